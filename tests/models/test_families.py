"""Capture of models whose layers are not built like BERT, GPT-2 or Llama.

Each map is compared with the dense Jacobian of the model's own modules, put together here as
the paper or the model's code has it; or it is refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lipscope import DotProduct, MultiheadAttention, to_dense
from lipscope.attention import Distance
from lipscope.errors import InputError
from lipscope.models import (
    LayerMap,
    are_read,
    attention_sites,
    build_map,
    family,
    load_model,
    prepared,
    read_network,
    trace,
)
from lipscope.models.tracing import sites
from lipscope.models.tracing.prepare import exact_maths

CPU = torch.device("cpu")
IDS = torch.arange(5, 11)[None]
COMMON = (
    "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16,vocab_size=300"
)
GROUPED = f"{COMMON},num_key_value_heads=1"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def model_of(family: str, entries: str) -> Any:
    """A random float64 model with larger weights, so that attention is not flat."""
    model: Any = load_model(f"random:{family}:{entries}").model
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p.data *= 8
    # The references below run single modules, whose masks are those of one implementation.
    model.set_attn_implementation("eager")
    return model.double().eval().requires_grad_(False)


@contextmanager
def maps_of(model: nn.Module, inputs: Any = None) -> Iterator[Callable[..., LayerMap]]:
    """Builds the maps of a model; they live as long as the model is prepared."""
    inputs = {"input_ids": IDS} if inputs is None else inputs
    with prepared(model, dtype=torch.float64, device=CPU, implementation="eager") as (m, _):
        record = trace(m, inputs, attention_sites(m), norms=True, blocks=True, dtype=torch.float64)

        def build(name: str, layer: int = 0, *, per_head: bool = False) -> LayerMap:
            return build_map(record, None if name == "model" else layer, name, per_head=per_head)

        yield build


def agrees(layer: LayerMap, truth: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Values, Jacobian and largest singular value are those of an independent function."""
    with exact_maths(torch.float64):
        expected = torch.func.jacrev(truth)(layer.x)
        assert torch.allclose(truth(layer.x), layer.output, rtol=1e-8, atol=1e-10)
    assert isinstance(expected, torch.Tensor)
    expected = expected.reshape(-1, layer.x.numel())
    ours = to_dense(layer.linearise(layer.x))
    assert torch.allclose(ours, expected, atol=1e-9 * float(expected.abs().max()))
    sigma = float(torch.linalg.matrix_norm(expected, 2))
    assert sigma > 1e-3
    assert abs(float(torch.linalg.matrix_norm(ours, 2)) - sigma) <= 1e-9 * sigma


def call_of(model: nn.Module, path: str, inputs: Any = None) -> tuple[tuple[Any, ...], Any]:
    """Arguments with which a module is called, caches left out."""
    seen: list[Any] = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad(), exact_maths(torch.float64):
        model(**({"input_ids": IDS} if inputs is None else inputs), use_cache=False)
    handle.remove()
    return seen[0]


def heads_by_hand(u: torch.Tensor, q: Any, k: Any, v: Any, count: int) -> torch.Tensor:
    split = [m(u).unflatten(-1, (count, -1)).transpose(0, 1) for m in (q, k, v)]
    scores = split[0] @ split[1].mT / split[0].shape[-1] ** 0.5
    return (torch.softmax(scores, -1) @ split[2]).transpose(0, 1).flatten(1)


# --- residuals and norms inside the attention module


def test_albert_whose_attention_module_adds_and_normalises():
    model = model_of("albert", f"{COMMON},embedding_size=8")
    site: Any = model.get_submodule("encoder.albert_layer_groups.0.albert_layers.0.attention")

    def heads(u):
        return heads_by_hand(u, site.query, site.key, site.value, 3)

    with maps_of(model) as build:
        for layer in (0, 1):  # one module, called twice
            agrees(build("heads", layer), heads)
            agrees(build("attention", layer), lambda u: site.dense(heads(u)))
            agrees(build("residual", layer), lambda u: site.LayerNorm(u + site.dense(heads(u))))
        one = build("attention", per_head=True)
        e = torch.randn_like(one.x)
        parts = one.linearise(one.x, per_head=True).matvec(e.expand(3, *e.shape))
        assert torch.allclose(parts.sum(0), one.linearise(one.x).matvec(e), atol=1e-12)
        agrees(build("model"), lambda x: _albert_from(model, x))
        with pytest.raises(InputError, match="needs a block for every layer"):
            build("stack", 1)


def _albert_from(model: Any, x: torch.Tensor) -> torch.Tensor:
    block = model.encoder.albert_layer_groups[0].albert_layers[0]
    return block(block(x[None], None), None)[0]


def test_bloom_whose_attention_module_takes_the_residual():
    model = model_of("bloom", "hidden_size=12,n_head=3,n_layer=2,vocab_size=300")
    args, kwargs = call_of(model, "h.1.self_attention")
    site, norm = model.h[1].self_attention, model.h[1].input_layernorm

    def f(u):
        return site(u[None], torch.zeros_like(args[1]), **kwargs)[0][0]

    with maps_of(model) as build:
        agrees(build("attention", 1), f)
        agrees(build("normed", 1), lambda x: f(norm(x)))
        agrees(build("residual", 1), lambda x: x + f(norm(x)))
        assert build("heads", 1, per_head=True).head_outputs().shape == (3, 6, 4)


def test_xlnet_whose_norm_cannot_be_taken_off_is_refused():
    model = model_of("xlnet", "d_model=12,n_head=3,n_layer=2,d_inner=16,vocab_size=300")
    (h, *rest), kwargs = call_of(model, "layer.1")
    assert h.shape == (6, 1, 12)  # tokens first
    with maps_of(model) as build:
        for name in ("heads", "attention", "normed", "residual"):
            with pytest.raises(InputError, match="Found a norm at its end"):
                build(name)
        agrees(build("block", 1), lambda u: model.layer[1](u[:, None], *rest, **kwargs)[0][:, 0])


# --- where the residual is


def test_olmo2_residual_is_x_plus_norm_of_attention():
    model = model_of("olmo2", GROUPED)
    _, kwargs = call_of(model, "layers.1.self_attn")
    block, rest = model.layers[1], {k: v for k, v in kwargs.items() if k != "hidden_states"}

    def f(u):
        return block.self_attn(hidden_states=u[None], **rest)[0][0]

    with maps_of(model) as build:
        agrees(build("attention", 1), f)
        agrees(build("residual", 1), lambda u: u + block.post_attention_layernorm(f(u)))


def test_gemma2_residual_has_a_norm_on_either_side():
    model = model_of("gemma2", f"{GROUPED},head_dim=4")
    _, kwargs = call_of(model, "layers.1.self_attn")
    block, rest = model.layers[1], {k: v for k, v in kwargs.items() if k != "hidden_states"}

    def residual(x):
        u = block.input_layernorm(x)
        f = block.self_attn(hidden_states=u[None], **rest)[0][0]
        return x + block.post_attention_layernorm(f)

    with maps_of(model) as build:
        agrees(build("residual", 1), residual)


MODERN = f"{COMMON},pad_token_id=0,bos_token_id=1,eos_token_id=2,cls_token_id=1,sep_token_id=2"


def test_modernbert_whose_first_layer_has_no_norm():
    model = model_of("modernbert", MODERN)
    for layer in (0, 1):
        _, kwargs = call_of(model, f"layers.{layer}.attn")
        block = model.layers[layer]

        def residual(x, block=block, kwargs=kwargs):
            return x + block.attn(block.attn_norm(x)[None], **kwargs)[0][0]

        with maps_of(model) as build:
            agrees(build("residual", layer), residual)


def test_a_parallel_block_has_no_residual_of_attention_alone():
    """Cohere forms ``x + f`` only on its way to ``x + f + mlp``."""
    with (
        maps_of(model_of("cohere", GROUPED)) as build,
        pytest.raises(InputError, match="that the model uses further on"),
    ):
        build("residual")


class Twin(nn.Module):
    """A Transformer, pre-norm or post-norm, that adds in place or not."""

    def __init__(self, *, in_place: bool, pre: bool, norms: bool = True) -> None:
        super().__init__()
        self.in_place, self.pre = in_place, pre
        self.layers = nn.ModuleList()
        for _ in range(2):
            attention = nn.MultiheadAttention(8, 2, batch_first=True)
            norm = nn.LayerNorm(8) if norms else nn.Identity()
            parts = {"norm": norm, "self_attn": attention, "out": nn.LayerNorm(8)}
            self.layers.append(nn.ModuleDict({**parts, "mlp": nn.Linear(8, 8)}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            u = layer["norm"](x) if self.pre else x
            out = layer["self_attn"](u, u, u)[0]
            if self.in_place:
                x += out
            else:
                x = x + out
            if not self.pre:
                x = layer["norm"](x)
            y = layer["mlp"](layer["out"](x))
            if self.in_place:
                x += y
            else:
                x = x + y
        return x


@pytest.mark.parametrize("pre", [True, False])
def test_residuals_in_place_do_not_reach_what_was_captured(pre):
    model = Twin(in_place=True, pre=pre).double()
    other = Twin(in_place=False, pre=pre).double()
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    with maps_of(model, (x,)) as build, maps_of(other, (x,)) as truth:
        for name in ("heads", "attention", "residual", *(["normed"] if pre else [])):
            ours, theirs = build(name, 1), truth(name, 1)
            assert ours.x.equal(theirs.x) and ours.output.equal(theirs.output)
            agrees(ours, theirs)


def test_a_first_layer_without_any_norm_is_pre_norm():
    """Its sum enters a norm, as in a post-norm model, but the stream goes on from the sum."""
    model = Twin(in_place=False, pre=True, norms=False).double()
    site = model.layers[0]["self_attn"]  # pyright: ignore
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    with maps_of(model, (x,)) as build:
        agrees(build("residual", 0), lambda u: u + site(u[None], u[None], u[None])[0][0])


# --- where the model starts, and what is a layer


def test_the_model_starts_at_its_first_block_with_or_without_attention():
    from transformers import Lfm2Config, Lfm2Model

    config = Lfm2Config(
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_hidden_layers=3,
        intermediate_size=16,
        vocab_size=300,
        layer_types=["conv", "full_attention", "conv"],
    )
    model = Lfm2Model(config).double().eval().requires_grad_(False)
    with maps_of(model) as build:
        layer = build("model")
        assert layer.x.equal(model.embed_tokens(IDS)[0])
        agrees(
            layer,
            lambda x: model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0],
        )


def _vision(kind: str) -> Any:
    import transformers

    sizes = {
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 8,
        "patch_size": 4,
    }
    config = getattr(transformers, f"{kind}VisionConfig")(**sizes)
    model = getattr(transformers, f"{kind}VisionModel")(config)
    return model.double().eval().requires_grad_(False)


def test_a_pooling_head_is_no_self_attention_layer():
    model = _vision("Siglip")
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    with maps_of(model, {"pixel_values": pixels}) as build:
        block = next(m for n, m in model.named_modules() if n.endswith("layers.1"))
        agrees(build("block", 1), lambda u: block(u[None], None)[0])
        agrees(
            build("attention", 1),
            lambda u: block.self_attn(u[None], attention_mask=None)[0][0],
        )
        with pytest.raises(InputError, match="between 0 and 1"):
            build("attention", 2)


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "cross":
            return self.attention(x[:, :1], x, x)[0]
        return self.attention(x + 1, key=(x + 1), value=x)[0] if how == "two" else self.shared(x)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        q = x + 1
        return self.attention(q, q, x)[0]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("cross", "keys from elsewhere"),
        ("two", "keys from elsewhere"),
        ("one", "values from another one"),
    ],
)
def test_attention_whose_keys_or_values_come_from_elsewhere_is_refused(how, match):
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    with (
        pytest.raises(InputError, match=match),
        maps_of(Probe().double(), (x, how)) as build,
    ):
        build("attention")


class Untied(Distance):
    """A kind of attention that somebody else wrote."""


def test_a_foreign_kind_of_attention_is_read():
    module = MultiheadAttention(8, 2, Untied)
    assert are_read({"": module})
    module.attention = nn.Hardtanh()
    assert not are_read({"": module})


class OneMatrix(nn.Module):
    """Attention written by hand, with a module of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.rest = nn.Linear(8, 24), nn.Linear(8, 8), Nothing()
        self.dropout: nn.Module = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.rest(self.c_proj(y.transpose(1, 2).flatten(2))))


class Nothing(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("causal", [True, False])
def test_a_family_is_described_where_its_attention_is_written(causal, monkeypatch):
    monkeypatch.setattr(sites, "_READERS", dict(sites._READERS))
    monkeypatch.setattr(sites, "_REGISTRY", list(sites._REGISTRY))

    @family("OneMatrix", package=__name__)
    def one_matrix(call):
        own = call.module
        weights, biases = own.c_attn.weight.chunk(3), own.c_attn.bias.chunk(3)
        names = ("query_bias", "key_bias", "value_bias")
        given = dict(zip(names, biases, strict=True), output_bias=own.c_proj.bias)
        return DotProduct(*weights, own.c_proj.weight, heads=2, causal=causal, **given)

    model, x = OneMatrix().double().eval(), torch.randn(1, 5, 8, dtype=torch.float64)
    whole = nn.Sequential(model, nn.Linear(8, 3)).double()
    if not causal:
        with pytest.raises(InputError, match="should be what its family computes"):
            read_network(whole, (x,), modules="0", pool="last")
        return
    network, at = read_network(whole, (x,), modules="0", pool="last")
    torch.testing.assert_close(network(at), whole(x)[0, -1])
    model.dropout = nn.Hardtanh()
    assert not are_read({"": model})


@pytest.mark.parametrize("masked", [False, True])
def test_heads_of_torch_attention(masked):
    """Its projection is never called as a module."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    mask = torch.ones(5, 5).triu(1).bool() if masked else None
    site: Any = model.layers[1].self_attn  # pyright: ignore

    def split(u):
        parts = nn.functional.linear(u, site.in_proj_weight, site.in_proj_bias)
        return (p.unflatten(-1, (2, 4)).transpose(0, 1) for p in parts.chunk(3, -1))

    def heads(u):
        q, k, v = split(u)
        scores = q @ k.mT / 2
        scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(0, 1).flatten(1)

    with maps_of(model, (x, mask)) as build:
        agrees(build("heads", 1), heads)
        agrees(build("attention", 1), lambda u: site.out_proj(heads(u)))
        one = build("attention", 1, per_head=True)
        e = torch.randn_like(one.x)
        parts = one.linearise(one.x, per_head=True).matvec(e.expand(2, *e.shape))
        for h in range(2):
            columns = slice(4 * h, 4 * h + 4)
            weight = site.out_proj.weight[:, columns]
            moved = torch.func.jvp(heads, (one.x,), (e,))[1]
            assert torch.allclose(parts[h], moved[:, columns] @ weight.T, atol=1e-12)
        outputs = one.head_outputs()
        assert torch.allclose(outputs.sum(0) + site.out_proj.bias, one.output, atol=1e-12)
