"""`lipscope.MultiheadAttention` of every variant: called, trained and measured like torch's own.

The dot product against torch's own module; the others against their layer. A new variant that
needs an option has it in `OPTIONS`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lipscope as ls
from agreement import gaussian
from lipscope.attention import Attention, functional
from lipscope.attention.layer import arguments

D, HEADS, B, N, M = 8, 2, 3, 5, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "ScaledCosineAttention": {"temperature": 2.0, "eps": 0.1},
    "ClippedAttention": {"radius": 2.0},
    "DividedAttention": {"by": "G2", "num_tokens": M, "radius": 3.0},
}
each_variant = pytest.mark.parametrize("kind", ls.variants(), ids=lambda one: one.__name__)
SLOW = pytest.mark.slow
PADDING = torch.arange(M) >= torch.tensor([[7], [4], [5]])
HIDDEN = (gaussian(N, M) > 0.5) & (torch.arange(M) != 0)


def build(kind: type[Attention] = ls.DotProduct, **options: Any) -> ls.MultiheadAttention:
    """In float64, with weights of a size at which attention is neither flat nor sharp."""
    heads = HEADS if "heads" in arguments(kind) else 1
    given = {"batch_first": True, "dtype": torch.float64} | OPTIONS.get(kind.__name__, {})
    module = ls.MultiheadAttention(D, heads, kind, **(given | options))
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(gaussian(*p.shape, seed=i) * 0.5)
    return module.double()


def theirs(module: ls.MultiheadAttention, **options: Any) -> nn.MultiheadAttention:
    """Torch's own module with the same weights."""
    found = nn.MultiheadAttention(
        D, HEADS, batch_first=module.batch_first, dtype=torch.float64, **options
    )
    layer = module.attention
    packed = [torch.cat([getattr(layer, f"{n}{end}") for n in ("query", "key", "value")])
              for end in ("", "_bias")]  # fmt: skip
    found.load_state_dict(
        {
            "in_proj_weight": packed[0],
            "in_proj_bias": packed[1],
            "out_proj.weight": layer.output,
            "out_proj.bias": layer.output_bias,
        }
    )
    return found


def takes_masks(kind: type[Attention]) -> bool:
    return "mask" in arguments(kind) and not kind.weighting.all_rows


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights by head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "hidden": {"attn_mask": HIDDEN},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
    "numbers": {"attn_mask": gaussian(N, M)},
    "by sample and head": {"attn_mask": (gaussian(B * HEADS, N, M) > 1) & (torch.arange(M) > 0)},
    "padding in numbers": {
        "key_padding_mask": torch.zeros(B, M).double().masked_fill(PADDING, -torch.inf)
    },
}


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_torch_s_module(call, batch_first, blocks, monkeypatch) -> None:
    """Cross-attention; with weights, and without, at once and in blocks."""
    if blocks:
        monkeypatch.setattr(functional, "BLOCK_BYTES", 8 * M * 2)
    ours = build(batch_first=batch_first)
    other = theirs(ours)
    x, c = gaussian(B, N, D), gaussian(B, M, D)
    x, c = (x, c) if batch_first else (x.movedim(0, 1), c.movedim(0, 1))
    for options in ({}, {"need_weights": False}):
        inputs = [t.clone().requires_grad_() for t in (x, c)]
        found, true = (f(inputs[0], inputs[1], inputs[1], **CALLS[call], **options)
                       for f in (ours, other))  # fmt: skip
        torch.testing.assert_close(found, true)
        slopes = (torch.autograd.grad(one[0].pow(2).sum(), inputs) for one in (found, true))
        torch.testing.assert_close(*slopes)


def test_without_a_batch_and_with_values_of_their_own() -> None:
    ours = build(batch_first=False)
    other = theirs(ours)
    x, c, w = gaussian(N, D), gaussian(M, D), gaussian(M, D, seed=1)
    for batch_first in (False, True):
        ours.batch_first = other.batch_first = batch_first
        for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
            masks = {"attn_mask": HIDDEN, "key_padding_mask": PADDING[1]}
            found, true = (f(x, c, w, **masks, **options) for f in (ours, other))
            torch.testing.assert_close(found, true)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_torch_s_module_are_loaded(bias) -> None:
    torch.manual_seed(0)
    other = nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=True)
    torch.manual_seed(0)
    ours = ls.MultiheadAttention(D, HEADS, bias=bias, batch_first=True)
    x = gaussian(B, N, D).float()
    torch.testing.assert_close(ours(x, x, x), other(x, x, x))  # they start alike
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    holders = [nn.ModuleDict({"attn": one}) for one in (ours, other)]
    holders[0].load_state_dict(holders[1].state_dict())
    torch.testing.assert_close(ours(x, x, x), other(x, x, x))
    assert "attn.in_proj_weight" in holders[1].state_dict()


@each_variant
def test_two_steps_of_training_and_what_it_keeps(kind) -> None:
    module, x = build(kind, dropout=0.2), gaussian(B, N, D)
    names = {name.removeprefix("attention.") for name in module.state_dict()}
    assert names == {name for name, _ in module.attention.state_dict().items()}
    before = copy.deepcopy(module.state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        (module(x, x, x)[0] - 1).square().mean().backward()
        assert all(
            p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters()
        )
        optimiser.step()
    trained = dict(module.named_parameters())  # numbers given as such are kept, not trained
    moved = {n for n, p in trained.items() if not torch.equal(p, before[n])}
    # A bias of the keys shifts all scores of a row alike: softmax does not see it.
    assert moved | {"attention.key_bias"} == {*trained, "attention.key_bias"}
    fresh = build(kind).eval()
    fresh.load_state_dict(module.state_dict())
    y = module.eval()(x, x, x)[0]
    for other in (fresh, copy.deepcopy(module)):
        torch.testing.assert_close(other(x, x, x)[0], y)
    torch.testing.assert_close(module.attention(x), y)  # the layer inside is the module


@each_variant
def test_training_begins_with_gradients(kind) -> None:
    """From the weights that a module starts with, where biases are zero; at zero tokens too."""
    heads = HEADS if "heads" in arguments(kind) else 1
    each = ("theorem-3.3", "G2", "mean-field") if kind is ls.DividedAttention else (None,)
    for by in each:
        options = OPTIONS.get(kind.__name__, {}) | ({"by": by} if by else {})
        module = ls.MultiheadAttention(D, heads, kind, batch_first=True, **options)
        for size in (0.0, 1.0):
            x = size * gaussian(B, N, D).float()
            module(x, x, x)[0].square().sum().backward()
            found = [p.grad for p in module.parameters() if p.grad is not None]
            assert found and all(bool(grad.isfinite().all()) for grad in found)


@each_variant
def test_it_is_measured_as_the_layer_inside(kind) -> None:
    module, x = build(kind).eval(), gaussian(N, D)
    jacobian = ls.to_dense(ls.linearise(lambda z: module(z, z, z)[0], x))
    true = float(torch.linalg.matrix_norm(jacobian, 2))
    assert float(ls.sigma(module, x).detach()) == pytest.approx(true, rel=1e-3)
    slope: Any = torch.autograd.grad(ls.sigma(module, x), next(iter(module.parameters())))[0]
    assert bool(slope.any())
    assert ls.measure(module, x)[0].sigma == pytest.approx(true, rel=1e-3)
    for bound in ls.bounds(module, x).bounds:
        asked = bound.kind == "upper" and bound.metric == "frobenius" and bound.sound
        if asked and bound.value is not None and bound.scope != "limit":
            assert bound.value >= true, bound.theorem
    model = Held(module).eval()
    with pytest.MonkeyPatch.context() as patch:  # nothing runs through automatic differentiation
        patch.setattr("lipscope.models.tracing.sites.why_run", None)
        row = ls.measure(model, x[None])[0]
    assert row.sigma == pytest.approx(true, rel=1e-3)
    assert row.note is None and row.derivative_error is not None


class Held(nn.Module):
    """A model of one layer."""

    def __init__(self, module: ls.MultiheadAttention) -> None:
        super().__init__()
        self.attn = module

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]


@each_variant
def test_masks(kind) -> None:
    module, x, c = build(kind).eval(), gaussian(B, N, D), gaussian(B, M, D)
    causal = torch.ones(N, N).triu(1).bool()
    if not takes_masks(kind):
        for masks in ({"attn_mask": causal}, {"key_padding_mask": PADDING[:, :N]}):
            with pytest.raises(ls.InputError, match="should be None for"):
                module(x, x, x, **masks)
        return
    y, p = module(x, x, x, attn_mask=causal)
    assert not p.masked_select(causal).any()
    layer = module.attention.replace(causal=True)
    torch.testing.assert_close(layer(x), y)
    built = build(kind, causal=True)
    torch.testing.assert_close(built(x, x, x)[0], y)
    row = ls.measure(Held(module), {"x": x[:1], "mask": causal})[0]
    assert row.sigma == pytest.approx(ls.measure(layer, x[0])[0].sigma, rel=1e-3)
    y, p = module(x, c, c, key_padding_mask=PADDING)
    assert not p.masked_select(PADDING[:, None].expand_as(p)).any()
    if kind.weighting.normalised:  # what is hidden is as if it were not there
        torch.testing.assert_close(y[1], module(x[1], c[1, :4], c[1, :4])[0])
    everything = torch.ones(B, M, dtype=torch.bool)
    y, p = module(x, c, c, key_padding_mask=everything)
    assert not p.any()
    bias = module.attention.output_bias
    torch.testing.assert_close(y, torch.zeros_like(y) if bias is None else bias.expand_as(y))


@each_variant
def test_in_torch_s_encoder(kind) -> None:
    layer = nn.TransformerEncoderLayer(D, HEADS, 16, dropout=0.0, batch_first=True)
    layer.self_attn = build(kind).float()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = gaussian(B, N, D).float()
    padding = PADDING[:, :N] if takes_masks(kind) else None
    for part in (encoder, encoder.train()):
        y = part(x, src_key_padding_mask=padding)
        assert y.shape == x.shape and bool(y.isfinite().all())
    rows = ls.measure(encoder.eval(), x[:1], modules=r"self_attn$")
    assert [row.layer for row in rows] == [0, 1]
    assert all(row.note is None for row in rows)


@each_variant
def test_other_precisions(kind) -> None:
    module, x = build(kind).float().eval(), gaussian(B, N, D).float()
    y = module(x, x, x)[0].detach()
    with torch.autocast("cpu", torch.bfloat16):
        cast = module(x, x, x)[0].detach()
    half = copy.deepcopy(module).bfloat16()
    short = half(*[x.bfloat16()] * 3)[0].detach()
    for one in (cast, short):
        assert float((one.float() - y).norm() / y.norm()) < 0.05
    assert short.dtype == torch.bfloat16


@each_variant
def test_parametrised_weights(kind) -> None:
    module, x = build(kind), gaussian(N, D)
    parametrizations.weight_norm(module.attention, "query")
    parametrizations.orthogonal(module.attention, "value")
    parametrizations.spectral_norm(module.attention, "output")
    module(x, x, x)[0].sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    module.eval()
    true = float(torch.linalg.matrix_norm(
        ls.to_dense(ls.linearise(lambda z: module(z, z, z)[0], x)), 2))  # fmt: skip
    for one in (ls.sigma(module, x).detach(), ls.measure(module, x)[0].sigma):
        assert float(one) == pytest.approx(true, rel=1e-3)
    assert ls.measure(Held(module), x[None])[0].sigma == pytest.approx(true, rel=1e-3)


@pytest.mark.filterwarnings("default")  # Dynamo's own, of gradients of what is no leaf
@pytest.mark.parametrize(
    "kind",
    [
        one if one in (ls.DotProduct, ls.SinkhornAttention) else pytest.param(one, marks=SLOW)
        for one in ls.variants()
    ],
    ids=lambda one: one.__name__,
)
def test_it_compiles(kind, unchecked) -> None:
    """In one piece, but where values decide on the steps (a balance), or must be finite."""
    module, x = build(kind), gaussian(B, N, D)
    whole = kind.__name__ not in ("DividedAttention", "SinkhornAttention")
    compiled = torch.compile(module, backend="eager", fullgraph=whole)
    for options in ({}, {"need_weights": False}):
        torch.testing.assert_close(compiled(x, x, x, **options)[0], module(x, x, x)[0])
    torch._dynamo.reset()


def test_dropout_is_that_of_torch_s_module() -> None:
    ours = build(dropout=0.4)
    other = theirs(ours, dropout=0.4)
    x = gaussian(B, N, D)
    found = []
    for module in (ours, other):
        torch.manual_seed(0)
        found.append(module(x, x, x))
    torch.testing.assert_close(found[0], found[1])
    assert not torch.equal(found[0][0], ours.eval()(x, x, x)[0])


def test_what_it_refuses(unchecked) -> None:
    module, x = build(), gaussian(B, N, D)
    long = gaussian(B, M, D)

    def made(*sizes: Any, **options: Any) -> Any:
        return lambda: ls.MultiheadAttention(*sizes, **options)

    refused = [
        (r"multiple of `num_heads`. Found `embed_dim = 8`, `num_heads = 3`", made(8, 3)),
        ("`num_heads` should be a positive integer. Found `num_heads = 0`", made(8, 0)),
        (r"`embed_dim` should be a positive integer. Found `embed_dim = 8.0`", made(8.0, 2)),
        (r"`dropout` should be between 0 and 1. Found `dropout = 1.5`", made(8, 2, dropout=1.5)),
        (r"`variant` should be one of .*dot-product.* Found 0.1", made(8, 2, 0.1)),
        (r"`variant` should be one of .*scaled-cosine.* Found 'cosine'", made(8, 2, "cosine")),
        ("needs `temperature`", made(8, 2, "scaled-cosine")),
        (r"DotProduct takes `scale`, .* as options. Found `kdim = 4`", made(8, 2, kdim=4)),
        ("LipschitzNormAttention takes no options. Found `causal = True`; leave it out",
         made(8, 2, "lipschitz-norm", causal=True)),
        ("`bias` should be False or None for L2Attention", made(8, 2, "l2", bias=True)),
        (r"the last two the same one. Found \(3, 5, 8\), \(3, 7, 8\), \(3, 5, 8\)",
         lambda: module(x, long, x)),
        (r"or \(batch, tokens, 8\)", lambda: module(x[..., :4], x, x)),
        (r"`attn_mask` should have shape \(5, 7\) or \(6, 5, 7\). Found \(7, 5\)",
         lambda: module(x, long, long, attn_mask=HIDDEN.T)),
        (r"`key_padding_mask` should have shape \(3, 5\). Found \(3, 7\)",
         lambda: module(x, x, x, key_padding_mask=PADDING)),
        ("should hold booleans or floats", lambda: module(x, x, x, attn_mask=HIDDEN[:, :N].long())),
        ("`is_causal` says what `attn_mask` is", lambda: module(x, x, x, is_causal=True)),
        (r"one input, \(tokens, width\). Found shape \(3, 5, 8\)", lambda: ls.sigma(module, x)),
        ("weights, float64. Found float32, float32", lambda: module(*[x.float()] * 3)),
        ("weights, float64. Found float64, list, list", lambda: module(x, [1], [1])),
    ]  # fmt: skip
    for said, ask in refused:
        with pytest.raises(ls.InputError, match=said) as found:
            ask()
        assert "\n" not in str(found.value)


@each_variant
def test_a_padded_sample_is_the_sample_alone(kind: type[Attention]) -> None:
    """Up to rounding: what padding hides decides on nothing, such as how many keys there are."""
    if not takes_masks(kind):
        pytest.skip("takes no mask")
    module, c = build(kind), gaussian(B, M, D)
    found, _ = module(c, c, c, key_padding_mask=PADDING)
    for sample, pad, y in zip(c, PADDING, found, strict=True):
        alone = sample[~pad]
        torch.testing.assert_close(y[~pad], module(alone, alone, alone)[0])


@pytest.mark.parametrize("weights", [True, False])
def test_numbers_of_a_mask_may_have_another_dtype(weights: bool) -> None:
    module, x, mask = build().float(), gaussian(B, N, D).float(), gaussian(N, N)
    found = module(x, x, x, attn_mask=mask, need_weights=weights)[0]
    torch.testing.assert_close(found, module(x, x, x, attn_mask=mask.float())[0])
