"""Every family in closed form: against the generic path, autograd and the dense SVD.

Everything runs in float64 and agrees to 1e-9, norms, rotary angles and softmax included:
`exact_maths` keeps models from computing them in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layouts import (
    CAUSAL,
    COPIES,
    EAGER,
    ENCODERS,
    FULL,
    HEADS,
    MAPS,
    MODELS,
    TOKENS,
    TORCH,
    WINDOWS,
    Blocks,
    agree,
    both,
    captured,
    check,
    check_heads,
    inputs_of,
    model_of,
    probes,
    randomised,
    traced,
)
from lipscope import to_dense
from lipscope.errors import InputError
from lipscope.models import LayerMap, attention_sites, known_families


def check_registry(layer: LayerMap, kind: str) -> None:
    """What the table of families says of the scores is what was read."""
    attention: Any = layer.attention
    found = {
        "soft cap": attention.softcap is not None,
        "normalised": attention.query_norm is not None,
        "relative bias": attention.score_bias is not None,
        "rotary": attention.rotary is not None,
        "plain": True,
    }
    scores = next(name for name, is_so in found.items() if is_so)
    assert [one.scores for one in known_families() if kind in one.classes] == [scores]


# Maps that a family does not have: OLMo-2 has no norm before.
LACKING = {"olmo2": ("normed",)}


@pytest.mark.parametrize("family", FULL)
def test_every_map_of_every_family(family):
    names = tuple(name for name in MAPS if name not in LACKING.get(family, ()))
    with traced(family) as build:
        maps = both(build, names)
        for name in LACKING.get(family, ()):
            with pytest.raises(InputError, match=name):
                build(name)
        check_registry(maps["attention"][0], type(build.site).__name__)
        seen = {name: check(*pair) for name, pair in maps.items()}
        heads = 2 if family == "gpt_neox" else HEADS
        for name in ("heads", "attention", "normed"):
            if name in maps:
                check_heads(*maps[name], heads)
    if family in WINDOWS or family in CAUSAL:
        whole = torch.ones_like(seen["attention"])
        wide = WINDOWS.get(family, TOKENS)
        assert all(s.equal(whole.tril().triu(1 - wide)) for s in seen.values())


@pytest.mark.parametrize("family", COPIES)
def test_copies_of_a_family(family):
    with traced(family) as build:
        check(*both(build, ("attention",))["attention"])


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        (family, implementation)
        for family in (*ENCODERS, *CAUSAL, *WINDOWS, "gpt_neox")
        for implementation in (("eager",) if family in EAGER else ("eager", "sdpa"))
    ],
)
def test_padding_is_read(family, implementation):
    inputs = inputs_of(family)
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0]])
    if "decoder" in family:
        inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0]])
    with traced(family, inputs, implementation=implementation) as build:
        seen = check(*both(build, ("attention",))["attention"])
    real = len(seen) - 1
    assert not seen[:real, real:].any()
    assert bool(seen.diagonal()[:real].all())


@pytest.mark.parametrize("family", [name for name in MODELS if name not in EAGER])
def test_both_implementations_are_read_alike(family):
    ours = []
    for implementation in ("eager", "sdpa"):
        with traced(family, implementation=implementation) as build:
            layer = build("attention")
            op = layer.linearise(layer.x)
            ours.append(op.matvec(probes(*op.in_shape)))
    agree(ours[1], ours[0])


def test_the_scale_of_gpt2_may_depend_on_the_layer():
    scales = []
    for family in ("gpt2", "gpt2, by layer", "gpt2, unscaled"):
        with traced(family) as build:
            layer = build("attention")
        assert layer.attention is not None
        scales.append(layer.attention.scale)
    assert scales == [0.5, 0.25, 1.0]


# --- torch's own attention


_FUTURE = torch.ones(TOKENS, TOKENS).triu(1).bool()
_PADDING = torch.tensor([[False, False, False, False, True]])
_SOME = torch.rand(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.4


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        (_FUTURE, None),
        (nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64), None),
        (_SOME[0] & ~torch.eye(TOKENS).bool(), None),
        (_SOME & ~torch.eye(TOKENS).bool(), None),
        (None, _PADDING),
        (_FUTURE, _PADDING),
        (_SOME & ~torch.eye(TOKENS).bool(), _PADDING),
    ],
)
def test_masks_of_torch(mask, padding):
    inputs = (*inputs_of(TORCH), mask, padding)
    with traced(TORCH, inputs) as build:
        seen = check(*both(build, ("heads",))["heads"])
    hidden = torch.zeros_like(seen)
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask < 0
        hidden |= mask if mask.ndim == 2 else mask.all(0)
    if padding is not None:
        hidden |= padding
    hidden.fill_diagonal_(False)  # a token's query reads the token itself
    assert not seen[hidden].any()
    assert bool(seen[~hidden].all())


def test_torch_without_biases():
    with traced(TORCH, model=randomised(Blocks(bias=False))) as build:
        check(*both(build, ("attention",))["attention"])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_appended_keys_are_run_not_read(option):
    model = randomised(Blocks(**{option: True}))
    layer = captured(model, inputs_of(TORCH), "attention")
    assert layer.attention is None
    truth: Any = torch.autograd.functional.jacobian(layer, layer.x)
    ours = to_dense(layer.linearise(layer.x))
    agree(ours, truth.reshape(ours.shape))


@pytest.mark.parametrize("shape", [(TOKENS, TOKENS), (HEADS, TOKENS, TOKENS)])
def test_a_bias_of_the_scores_is_read(shape):
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 0, 1] = -torch.inf
    padding = torch.zeros(1, TOKENS).double().masked_fill(_PADDING, -torch.inf)
    with traced(TORCH, (*inputs_of(TORCH), bias, padding)) as build:
        layers = both(build, ("heads",))["heads"]
        seen = check(*layers)
    assert not seen[0, 1] and not seen[:4, 4].any()
    assert layers[0].attention.score_bias is not None


def test_the_generic_path_says_what_it_would_need():
    with pytest.raises(InputError, match="generic path"):
        captured(randomised(Blocks(add_zero_attn=True)), inputs_of(TORCH), "attention", memory=1000)


# --- what only looks like a known family


class Adapted(nn.Linear):
    """A linear layer that does more, as adapters and packed weights do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.flip(-1)


@pytest.mark.parametrize("kind", [Adapted, "wrapped"])
def test_another_kind_of_linear_layer_is_run_not_read(kind):
    model = model_of("vit")
    site: Any = list(attention_sites(model).values())[1]
    if kind == "wrapped":
        site.q_proj = Wrapped(site.q_proj)
    else:
        site.q_proj.__class__ = kind
    layer = captured(model, inputs_of("vit"), "attention")
    assert layer.attention is None


class Wrapped(nn.Module):
    """An adapter around a linear layer, which still shows its weights."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.flip(-1)
