"""Capture sets implementations, masks and dtypes for the time of a measurement, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lipscope import load_model, measure, to_dense
from lipscope.errors import InputError
from lipscope.models import attention_sites, prepared
from lipscope.models.tracing.prepare import exact_maths
from test_families import COMMON, CPU, GROUPED, IDS, agrees, call_of, maps_of, model_of


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("name", ["nine_times", "sdpa"])
def test_attention_functions_of_a_user_are_refused(name: str) -> None:
    """Under `sdpa` the model would be another one; that name may be taken by another function."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model: Any = model_of("gpt2", "n_layer=1")
    AttentionInterface.register(name, lambda *a, **k: (9 * sdpa_attention_forward(*a, **k)[0], 0))
    try:
        model.set_attn_implementation(name)
        with pytest.raises(InputError, match=f"registered as `{name}`"):
            measure(model, IDS)
        with pytest.raises(InputError, match=f"registered as `{name}`"):
            load_model(model).decision(IDS)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    text = {**sizes, "vocab_size": 300, "eos_token_id": 299}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return CLIPModel(config).eval()


def test_every_part_of_a_composite_model_is_switched_and_put_back():
    model = clip()
    for first, text, vision in [("eager", "sdpa", "sdpa"), ("sdpa", "eager", "sdpa")]:
        configs = (model.config, model.config.text_config, model.config.vision_config)
        for config, choice in zip(configs, (first, text, vision), strict=True):
            config._attn_implementation_internal = choice
        with prepared(model, dtype=torch.float32, device=CPU, implementation="eager"):
            assert [c._attn_implementation for c in configs] == ["eager"] * 3
        assert [c._attn_implementation for c in configs] == [first, text, vision]


def test_the_text_part_of_a_composite_model_stays_causal():
    model = clip().double().requires_grad_(False)
    model.config.text_config._attn_implementation_internal = "sdpa"
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    inputs = {"input_ids": IDS, "pixel_values": pixels}
    with maps_of(model, inputs) as build:
        sites = list(attention_sites(model))
        layer = next(i for i in range(4) if build("attention", i).x.shape[0] == 6)
        assert any("text" in site for site in sites)
        n, d = build("attention", layer).x.shape
        jacobian = to_dense(build("attention", layer).linearise(build("attention", layer).x))
    blocks = jacobian.reshape(n, d, n, d).permute(0, 2, 1, 3)
    assert not blocks[torch.ones(n, n).triu(1).bool()].any()
    assert blocks[torch.ones(n, n).tril().bool()].abs().amax((1, 2)).all()


def test_a_model_inside_of_a_users_module_stays_causal():
    inner = model_of("mistral", f"{GROUPED},head_dim=4,sliding_window=3")
    inner.set_attn_implementation("sdpa")
    with maps_of(Wrapper(inner), (IDS,)) as build:
        layer = build("attention", 1)
        jacobian = to_dense(layer.linearise(layer.x))
        assert inner.config._attn_implementation == "eager"
    assert inner.config._attn_implementation == "sdpa"
    n, d = layer.x.shape
    reach = jacobian.reshape(n, d, n, d).abs().amax((1, 3)) > 0
    assert reach.equal(torch.ones(n, n).tril().bool() & ~torch.ones(n, n).tril(-3).bool())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "olmoe"])
def test_experts_in_float64(family):
    """Grouped products of experts know float32 only; their weights are in no linear layer."""
    experts = "num_experts=3" if family == "olmoe" else "num_local_experts=3"
    width = "" if family == "olmoe" else ",head_dim=4"
    model = model_of(family, f"{GROUPED},{experts},num_experts_per_tok=2{width}")
    args, kwargs = call_of_plain(model, "layers.1")
    rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
    before = model.config._experts_implementation
    with maps_of(model) as build:
        block = model.layers[1]

        def whole(u):
            out = block(u[None], *args[1:], **rest)
            return (out if isinstance(out, torch.Tensor) else out[0])[0]

        agrees(build("block", 1), whole)
        agrees(
            build("model"),
            lambda x: model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0],
        )
    assert model.config._experts_implementation == before


def call_of_plain(model: Any, path: str) -> tuple[tuple[Any, ...], Any]:
    model.set_experts_implementation("eager")
    call = call_of(model, path)
    model.set_experts_implementation("grouped_mm")
    return call


def test_mpt_whose_boolean_mask_hides_where_it_is_true():
    model = model_of("mpt", "d_model=12,n_heads=3,n_layers=2,vocab_size=300,expansion_ratio=2")
    args, kwargs = call_of(model, "blocks.1.attn")
    rest = {k: v for k, v in kwargs.items() if k not in ("hidden_states", "past_key_values")}
    site = model.blocks[1].attn
    with maps_of(model) as build:
        agrees(build("attention", 1), lambda u: site(u[None], *args[1:], **rest)[0][0])
    padded = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    with maps_of(model, padded) as build:
        layer = build("attention", 1)
        jacobian = to_dense(layer.linearise(layer.x)).reshape(6, 12, 6, 12)
        assert not jacobian[2:, :, :2].any() and bool(jacobian[2, :, 2].any())


def test_xlm_whose_cache_has_a_name_of_its_own():
    model = model_of("xlm", "emb_dim=12,n_heads=3,n_layers=2,vocab_size=300,n_words=300")
    args, _ = call_of(model, "attentions.1")
    site, norm = model.attentions[1], model.layer_norm1[1]

    def f(u):
        return site(u[None], *args[1:2])[0][0]

    with maps_of(model) as build:
        agrees(build("attention", 1), f)
        agrees(build("residual", 1), lambda u: norm(u + f(u)))
        with pytest.raises(InputError, match="needs a block around"):
            build("block")


def test_channels_before_tokens_are_refused():
    groups = ",".join(f"{g}_groups=1" for g in ("q", "k", "v", "intermediate", "output"))
    entries = f"{COMMON},embedding_size=12,post_attention_groups=1,{groups}"
    with (
        pytest.raises(InputError, match="channels first"),
        maps_of(model_of("squeezebert", entries)) as build,
    ):
        build("attention")


def test_a_convolution_over_a_transpose_is_no_such_layout():
    entries = COMMON.replace("heads=3", "heads=6") + ",embedding_size=12"
    model = model_of("convbert", entries)
    site = model.encoder.layer[1].attention
    with maps_of(model) as build:
        agrees(build("attention", 1), lambda u: site.output.dense(site.self(u[None])[0])[0])


def test_a_bottleneck_before_the_queries_alone_is_refused():
    """MobileBERT makes queries and keys from another tensor than its values."""
    entries = f"{COMMON},embedding_size=12,intra_bottleneck_size=12"
    with maps_of(model_of("mobilebert", entries)) as build:
        with pytest.raises(InputError, match="values from another one"):
            build("attention")
        assert build("block").x.shape == (6, 12)


class Normed(nn.Module):
    """Weights computed from others, by either of torch's two ways."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        way = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
        self.first = way(nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.first(x)
        return self.attention(u, u, u)[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("old", [True, False])
def test_weight_norm_is_copied(old):
    model = Normed(old)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    with maps_of(model, (x,)) as build:
        layer = build("attention")
        weight = (
            model.first.weight_g * (v := model.first.weight_v) / v.norm(dim=1, keepdim=True)
            if old
            else model.first.weight
        )
        expected = nn.functional.linear(x[0], weight.double(), model.first.bias.double())
        assert torch.allclose(layer.x, expected, atol=1e-6)
        twin = Normed(old)
        twin.load_state_dict(model.state_dict())
        twin.double()
        with torch.no_grad(), exact_maths(torch.float64):
            u = layer.x[None]
            assert torch.allclose(twin.attention(u, u, u)[0][0], layer.output, atol=1e-12)


def test_a_cache_that_a_run_with_gradients_filled_is_copied():
    """LeViT keeps its biases by device in a dictionary, in evaluation."""

    class Cached(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__dict__.setdefault("cache", {})["cpu"] = self.first.weight.sum()
            return super().forward(x) * self.cache["cpu"].detach()

    model, x = Cached(False).eval(), torch.randn(1, 5, 8)
    model(x)
    (row,) = measure(model, x)
    u = model.first(x).detach()
    jacobian = torch.autograd.functional.jacobian(lambda u: model.attention(u, u, u)[0], u)
    truth = float(torch.linalg.matrix_norm(jacobian.reshape(40, 40), 2))
    assert row.sigma == pytest.approx(truth, rel=1e-4)


def test_a_model_that_cannot_be_copied_is_refused_in_one_line():
    class Stubborn(Normed):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    with (
        pytest.raises(InputError, match="copying raised TypeError: no copies"),
        maps_of(Stubborn(False), (torch.randn(1, 5, 8, dtype=torch.float64),)),
    ):
        pass


@pytest.mark.parametrize(
    ("own", "right", "refused"),
    [("sdpa", "attention", "block"), ("eager", "block", "attention")],
)
def test_a_mask_of_booleans_is_read_as_the_model_itself_reads_it(own, right, refused):
    """Fused attention hides what such a mask leaves out, eager attention adds it to the scores."""
    from transformers import BertConfig, BertModel

    seen = torch.eye(6, dtype=torch.bool) | torch.eye(6, dtype=torch.bool).roll(1, 0)
    inputs = {"input_ids": torch.arange(5, 11)[None], "attention_mask": seen[None, None]}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 12)
    config = BertConfig(num_hidden_layers=2, num_attention_heads=3, vocab_size=60, **sizes)
    config._attn_implementation = own
    model = BertModel(config).eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    with pytest.raises(InputError, match="should be the derivative of the model itself"):
        measure(model, inputs, map=refused, layers=[0])
    found = measure(model, inputs, map=right, layers=[0], dtype="float32")[0].sigma
    layer = model.encoder.layer[0]
    x = model.embeddings(inputs["input_ids"]).detach()

    def function(x: torch.Tensor) -> torch.Tensor:
        if right == "block":
            return layer(x, seen[None, None])
        return layer.attention.output.dense(layer.attention.self(x, seen[None, None])[0])

    jacobian = torch.autograd.functional.jacobian(function, x)
    assert isinstance(jacobian, torch.Tensor)
    truth = torch.linalg.matrix_norm(jacobian.reshape(x.numel(), -1), 2)
    assert found == pytest.approx(float(truth), rel=2e-3)
