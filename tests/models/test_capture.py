"""Capture: every map of every family against the dense Jacobian of the model's own modules,
and one test for each silent wrong answer that a capture can give.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import nn
from transformers import AutoModel, AutoTokenizer, models

from lipscope import to_dense
from lipscope.errors import InputError
from lipscope.models import (
    MAPS,
    LayerMap,
    LoadedModel,
    attention_sites,
    build_map,
    load_model,
    prepared,
    trace,
    windows_of_text,
)
from lipscope.models.tracing.prepare import exact_maths
from lipscope.sources import default_text
from tiny import TEXT, TINY, tiny

CPU = torch.device("cpu")


def captured(
    loaded: LoadedModel,
    inputs: dict[str, torch.Tensor],
    name: str,
    *,
    layer: int = 1,
    dtype: torch.dtype = torch.float64,
    implementation: str = "eager",
) -> LayerMap:
    with prepared(loaded.model, dtype=dtype, device=CPU, implementation=implementation) as (m, _):
        record = trace(m, inputs, attention_sites(m), norms=True, blocks=True, dtype=dtype)
        return build_map(record, None if name == "model" else layer, name)


def ids(loaded: LoadedModel, n: int = 6) -> dict[str, torch.Tensor]:
    windows = windows_of_text(TEXT, loaded.tokenizer, lengths=[n], samples=2)
    return {"input_ids": windows[1].ids}


def dense(layer: LayerMap) -> torch.Tensor:
    jacobian = torch.autograd.functional.jacobian(layer, layer.x)
    assert isinstance(jacobian, torch.Tensor)
    return jacobian.reshape(-1, layer.x.numel())


@pytest.mark.parametrize("name", [one for one in MAPS if one not in ("logits", "margin")])
@pytest.mark.parametrize("family", TINY)
def test_every_map_of_every_family(family, name):
    """Closed form or generic, the products are the Jacobian of the model's own modules."""
    loaded = tiny(family)
    layer = captured(loaded, ids(loaded), name)
    assert (layer.attention is None) == (family == "olmo" or name in ("block", "stack", "model"))
    op, truth = layer.linearise(layer.x), dense(layer)
    scale = float(truth.abs().max())
    assert torch.allclose(to_dense(op), truth, atol=1e-11 * scale)
    assert torch.allclose(to_dense(op.T), truth.T, atol=1e-11 * scale)


@pytest.mark.parametrize("name", ["heads", "attention", "normed"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_single_heads_of_every_family(family, name):
    loaded = tiny(family)
    layer = captured(loaded, ids(loaded), name)
    assert layer.num_heads is not None
    heads = layer.linearise(layer.x, per_head=True)
    e = torch.randn(layer.x.shape, dtype=torch.float64)
    parts = heads.matvec(e.expand(layer.num_heads, *e.shape))
    whole = layer.linearise(layer.x).matvec(e)
    joined = torch.cat(list(parts), dim=1) if name == "heads" else parts.sum(0)
    assert torch.allclose(joined, whole, atol=1e-11 * float(whole.abs().max()))
    outputs = layer.head_outputs()
    total = torch.cat(list(outputs), dim=1) if name == "heads" else outputs.sum(0)
    bias = layer.output - total  # the output bias, the same for every token
    assert torch.allclose(bias, bias[:1].expand_as(bias), atol=1e-11)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("name", ["attention", "normed", "residual", "block", "model"])
def test_finite_differences_of_the_whole_model(family, name):
    """An oracle without automatic differentiation, through the model's own forward pass."""
    loaded = tiny(family)
    layer = captured(loaded, ids(loaded), name)
    e = torch.randn(layer.x.shape, dtype=torch.float64)
    h = 1e-6
    with torch.no_grad():
        numeric = (layer(layer.x + h * e) - layer(layer.x - h * e)) / (2 * h)
    exact = layer.linearise(layer.x).matvec(e)
    assert float((numeric - exact).norm()) <= 1e-5 * float(exact.norm())


def test_a_map_that_the_model_does_not_have_is_refused():
    loaded = load_model(
        "random:gpt_neox:" + "hidden_size=12,num_attention_heads=3,"
        "num_hidden_layers=2,intermediate_size=16,vocab_size=300"
    )
    with pytest.raises(InputError, match="residual"):
        captured(loaded, ids(loaded), "residual")  # parallel attention and MLP
    with pytest.raises(InputError, match="should be one of"):
        captured(loaded, ids(loaded), "nonsense")
    with pytest.raises(InputError, match="between 0 and 1"):
        captured(loaded, ids(loaded), "attention", layer=7)


# --- silent wrong answers (each would raise no error by itself)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_causality_survives_the_attention_implementation(family, implementation):
    """Captured under sdpa the mask is None; run again under eager it would be lost."""
    loaded = tiny(family)
    loaded.model.set_attn_implementation(implementation)
    layer = captured(loaded, ids(loaded), "attention")
    n, d = layer.x.shape
    blocks = dense(layer).reshape(n, d, n, d)
    future = torch.ones(n, n).triu(1).bool()
    assert not blocks.permute(0, 2, 1, 3)[future].any()
    matrix = to_dense(layer.linearise(layer.x)).reshape(n, d, n, d)
    assert not matrix.permute(0, 2, 1, 3)[future].any()
    assert loaded.model.config._attn_implementation == implementation  # put back


def test_closed_forms_read_the_mask_alike_under_both_implementations():
    for family in ("bert", "gpt2", "llama", "mistral", "roberta", "distilbert"):
        loaded = tiny(family)
        eager = captured(loaded, ids(loaded), "attention", implementation="eager")
        fused = captured(loaded, ids(loaded), "attention", implementation="sdpa")
        assert torch.allclose(dense(eager), dense(fused), atol=1e-12)


def test_sliding_windows_are_kept():
    loaded = tiny("mistral")  # window 3
    layer = captured(loaded, ids(loaded, 8), "attention")
    n, d = layer.x.shape
    blocks = to_dense(layer.linearise(layer.x)).reshape(n, d, n, d).permute(0, 2, 1, 3)
    reach = blocks.abs().amax((2, 3)) > 0
    expected = torch.ones(n, n).tril().bool() & ~torch.ones(n, n).tril(-3).bool()
    assert reach.equal(expected)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_padding_is_kept(family):
    loaded = tiny(family)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    layer = captured(loaded, {**ids(loaded), "attention_mask": mask}, "attention")
    n, d = layer.x.shape
    blocks = to_dense(layer.linearise(layer.x)).reshape(n, d, n, d).permute(0, 2, 1, 3)
    seen = blocks.abs().amax((2, 3)) > 0
    assert not seen[:4, 4:].any()
    assert seen[:4, :4].all()


def test_float64_is_float64():
    """Llama casts its softmax, norms and angles to float32 whatever the weights are."""
    loaded = tiny("llama")
    layer = captured(loaded, ids(loaded), "attention")
    assert layer.attention is not None
    with torch.no_grad():
        ours = layer.attention(layer.x)  # plain float64 matrix products
    error = float((ours - layer.output).abs().max() / layer.output.abs().max())
    assert error < 1e-14


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_float64_is_float64_on_the_generic_path(family):
    """A float32 softmax or norm would leave noise of 1e-8 in differences of step 1e-6."""
    loaded = tiny(family)
    layer = captured(loaded, ids(loaded), "block")
    e = torch.randn(layer.x.shape, dtype=torch.float64)
    with torch.no_grad():
        base, near = layer(layer.x), layer(layer.x + 1e-9 * e)
    slope = (near - base) / 1e-9
    exact = layer.linearise(layer.x).matvec(e)
    assert float((slope - exact).norm()) <= 1e-4 * float(exact.norm())


def test_a_custom_operator_is_not_zero():
    """`torch.func.jvp` answers a custom operator with zeros."""

    @torch.library.custom_op("lipscope_tests::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    from lipscope import linearise

    x = torch.tensor([1.0, 2.0])
    assert to_dense(linearise(cube, x)).equal(torch.diag(3 * x**2))


def test_live_dropout_is_switched_off_and_put_back():
    loaded = tiny("gpt2")
    loaded.model.train()
    with prepared(loaded.model, dtype=torch.float32, device=CPU, implementation="eager") as (
        model,
        notes,
    ):
        assert any("dropout" in note for note in notes)
        assert not any(m.training for m in model.modules())
    assert all(m.training for m in loaded.model.modules())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_row_that_reads_nothing_is_zero(implementation):
    """Left padding: tokens 0 and 1 may read nothing, for which every kernel has its own habit."""
    loaded = tiny("gpt2")
    padded = {**ids(loaded), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    layer = captured(loaded, padded, "heads", implementation=implementation)
    with torch.no_grad():
        assert not layer(layer.x)[:2].any()
        assert torch.allclose(layer(layer.x)[2:], layer.output[2:], atol=1e-12)
    jacobian = to_dense(layer.linearise(layer.x)).reshape(6, 12, 6, 12)
    assert not jacobian[:2].any() and not jacobian[:, :, :2].any()
    assert torch.allclose(jacobian.reshape(72, 72), dense(layer), atol=1e-12)


def test_a_cache_is_not_carried_into_the_replay():
    loaded = tiny("gpt2")
    layer = captured(loaded, {**ids(loaded)}, "attention")
    with torch.no_grad():
        first, second = layer(layer.x), layer(layer.x)
    assert first.equal(second)


def test_a_layer_that_is_not_what_it_seems_is_an_error(monkeypatch):
    """A known class whose module goes its own way: the rebuilt output differs."""
    loaded = tiny("bert")
    site = loaded.model.encoder.layer[1].attention.self  # pyright: ignore
    forward = type(site).forward

    @functools.wraps(forward)
    def doubled(*args, **options):
        y, *others = forward(*args, **options)
        return 2 * y, *others

    monkeypatch.setattr(type(site), "forward", doubled)
    with pytest.raises(InputError, match="should equal the model's own output"):
        captured(loaded, ids(loaded), "attention")


def test_a_class_of_a_known_name_from_elsewhere_is_run_not_read():
    loaded = tiny("bert")
    site = loaded.model.encoder.layer[1].attention.self  # pyright: ignore
    plain = captured(loaded, ids(loaded), "heads")

    class BertSelfAttention(type(site)):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            out, weights = super().forward(hidden_states, attention_mask, **kwargs)
            return 2 * out + 1, weights

    site.__class__ = BertSelfAttention
    layer = captured(loaded, ids(loaded), "heads")
    assert layer.attention is None and plain.attention is not None
    assert torch.allclose(layer.output, 2 * plain.output + 1, atol=1e-12)
    ours, twice = (to_dense(a.linearise(a.x)) for a in (layer, plain))
    assert torch.allclose(ours, 2 * twice, atol=1e-11)


# --- torch's own attention, and user modules


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, dropout=0.0)
        self.layers = nn.ModuleList([layer])
        nn.init.normal_(layer.self_attn.in_proj_weight, std=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention_whose_fast_path_skips_its_module(batch_first):
    torch.manual_seed(0)
    model = Encoder(batch_first=batch_first).double().eval()
    x = torch.randn(5, 8, dtype=torch.float64)
    with prepared(model, dtype=torch.float64, device=CPU, implementation="eager") as (m, _):
        shaped = x[None] if batch_first else x[:, None]
        record = trace(m, (shaped,), attention_sites(m), norms=True, dtype=torch.float64)
        layer = build_map(record, 0, "attention")
        op = layer.linearise(layer.x)
    attention = model.layers[0].self_attn  # pyright: ignore
    q, k, v = (x @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
    heads = [
        torch.softmax(q[:, s] @ k[:, s].T / 2, -1) @ v[:, s] for s in (slice(0, 4), slice(4, 8))
    ]
    expected = torch.cat(heads, 1) @ attention.out_proj.weight.T + attention.out_proj.bias
    assert torch.allclose(layer.output, expected, atol=1e-12)
    assert torch.allclose(to_dense(op), dense(layer), atol=1e-11)


def test_sites_are_the_innermost_attention_modules():
    assert list(attention_sites(tiny("bert").model)) == [
        "encoder.layer.0.attention.self",
        "encoder.layer.1.attention.self",
    ]
    with pytest.raises(InputError, match="ends in `Attention`"):
        attention_sites(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InputError, match="at least one module"):
        attention_sites(tiny("bert").model, r"no_such_module")
    with pytest.raises(InputError, match="regular expression"):
        attention_sites(tiny("bert").model, r"(")


# --- the real models, against an independent solver on independent products


def lanczos(f, x: torch.Tensor) -> float:
    """ARPACK over `torch.func` products of a function, none of which is ours."""
    pull: Any = torch.func.vjp(f, x)[1]
    shape, size = x.shape, x.numel()
    out = f(x).shape

    def matvec(e):
        e = torch.as_tensor(e, dtype=x.dtype).reshape(shape)
        return torch.func.jvp(f, (x,), (e,))[1].flatten().numpy()

    def rmatvec(g):
        return pull(torch.as_tensor(g, dtype=x.dtype).reshape(out))[0].flatten().numpy()

    op = LinearOperator((math.prod(out), size), matvec=matvec, rmatvec=rmatvec, dtype="float64")
    return float(svds(op, k=1, tol=1e-6, return_singular_vectors=False)[0])


def test_minilm_against_an_independent_lanczos():
    loaded = load_model("minilm")
    window = windows_of_text(default_text(), loaded.tokenizer, lengths=[24], samples=3)[1]
    model = loaded.model.double().eval()
    model.requires_grad_(False).set_attn_implementation("eager")  # pyright: ignore
    with torch.no_grad():
        hidden = model(window.ids, output_hidden_states=True).hidden_states
    attention = model.encoder.layer[3].attention  # pyright: ignore

    def f(u):
        return attention.output.dense(attention.self(u[None])[0])[0]

    truth = lanczos(f, hidden[3][0])
    from lipscope import top_singular

    layer = captured(loaded, {"input_ids": window.ids}, "attention", layer=3)
    top = top_singular(layer.linearise(layer.x), tol=1e-6)
    assert math.isclose(top.sigma, truth, rel_tol=1e-5)
    assert truth <= top.upper * (1 + 1e-5)


@pytest.mark.slow
def test_smollm2_read_once_is_what_transformers_reads():
    loaded = load_model("smollm2")
    place: Any = loaded.model.name_or_path
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = AutoModel.from_pretrained(place, **file)
    tokenizer = AutoTokenizer.from_pretrained(place, **file)
    known = model.state_dict()
    assert loaded.model.state_dict().keys() == known.keys()
    assert all(torch.equal(w, known[name]) for name, w in loaded.model.state_dict().items())
    assert loaded.model.config.to_dict() == model.config.to_dict()
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.slow  # half a minute, most of it to read the model in float64
def test_smollm2_against_an_independent_lanczos():
    loaded = load_model("smollm2")
    assert loaded.weights == "dequantised Q4_1"
    window = windows_of_text(default_text(), loaded.tokenizer, lengths=[16], samples=3)[1]
    model = loaded.model.double().eval().requires_grad_(False)
    with torch.no_grad(), exact_maths(torch.float64):
        hidden = model(window.ids, output_hidden_states=True, use_cache=False).hidden_states
        block = model.layers[15]  # pyright: ignore
        u = block.input_layernorm(hidden[15])[0]
        position = torch.arange(16)[None]
        cos, sin = model.rotary_emb(u[None], position)  # pyright: ignore
    attention, future = block.self_attn, torch.ones(16, 16).triu(1).bool()

    def f(u):
        split = [
            p(u).unflatten(-1, (-1, 64)).transpose(0, 1)[None]
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        q, k = models.llama.modeling_llama.apply_rotary_pos_emb(split[0], split[1], cos, sin)
        k, v = (t.repeat_interleave(3, dim=1) for t in (k, split[2]))
        p = torch.softmax((q @ k.mT / 8).masked_fill(future, -torch.inf), -1)
        return attention.o_proj((p @ v)[0].transpose(0, 1).flatten(1))

    truth = lanczos(f, u)
    from lipscope import top_singular

    layer = captured(loaded, {"input_ids": window.ids}, "attention", layer=15)
    assert layer.attention is not None
    top = top_singular(layer.linearise(layer.x), tol=1e-6)
    assert math.isclose(top.sigma, truth, rel_tol=1e-5)
