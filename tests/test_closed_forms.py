"""Every family in closed form: against the generic path, autograd and the dense SVD."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lipscope.capture import LayerMap, attention_sites, build_map, prepared, trace
from lipscope.errors import InputError
from lipscope.operator import materialise
from lipscope.singular import top_singular

WIDTH, HEADS, GROUPS, TOKENS = 16, 4, 2, 5
_PLAIN = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
}
_TEXT = {**_PLAIN, "vocab_size": 60, "pad_token_id": 0}
_GROUPED = {**_TEXT, "num_key_value_heads": GROUPS}
_IMAGE = {**_PLAIN, "image_size": 4, "patch_size": 2}
_GPT2 = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "n_positions": 16, "vocab_size": 60}
# Four of the eight entries of a head are turned: two pairs, so that their layout matters.
_ROPE = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5}
TORCH = "torch"
MAPS = ("heads", "attention", "normed", "residual")
_TWO = {"num_attention_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _TEXT),
    "roberta": ("roberta", _TEXT),
    "xlm-roberta": ("xlm-roberta", _TEXT),
    "xlm-roberta-xl": ("xlm-roberta-xl", _TEXT),
    "roberta-prelayernorm": ("roberta-prelayernorm", _TEXT),
    "camembert": ("camembert", _TEXT),
    "data2vec-text": ("data2vec-text", _TEXT),
    "electra": ("electra", {**_TEXT, "embedding_size": WIDTH}),
    "ernie": ("ernie", _TEXT),
    "distilbert": (
        "distilbert",
        {"dim": WIDTH, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 24, "vocab_size": 60},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt2, by layer": ("gpt2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": ("gpt2", {**_GPT2, "scale_attn_weights": False}),
    "gpt_neox": (
        "gpt_neox",
        {**_TEXT, **_TWO, "use_parallel_residual": False, "rope_parameters": _ROPE},
    ),
    "gpt_neox, no biases": (
        "gpt_neox",
        {**_TEXT, "use_parallel_residual": False, "attention_bias": False},
    ),
    "llama": ("llama", {**_GROUPED, "attention_bias": True}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 2}),
    "mistral, wide heads": ("mistral", {**_GROUPED, "head_dim": 12, "sliding_window": None}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 2}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen2, window": (
        "qwen2",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0},
    ),
    "phi3": ("phi3", {**_GROUPED, "head_dim": 8, "rope_parameters": _ROPE, "sliding_window": 3}),
    "vit": ("vit", _IMAGE),
    "vit, no biases": ("vit", {**_IMAGE, "qkv_bias": False}),
    "deit": ("deit", _IMAGE),
    "dinov2": ("dinov2", _IMAGE),
    "dinov2_with_registers": ("dinov2_with_registers", {**_IMAGE, "num_register_tokens": 1}),
    "vit_msn": ("vit_msn", _IMAGE),
    "ijepa": ("ijepa", _IMAGE),
}
# Copies of a layout that is tested in full, or of a call that differs in its options only.
COPIES = ("xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "ernie", "gpt2, unscaled")
COPIES += ("gpt_neox, no biases", "mixtral", "vit, no biases", "deit", "vit_msn", "ijepa")
FULL = (*(name for name in MODELS if name not in COPIES), TORCH)
WINDOWS = {"mistral": 2, "qwen2, window": 2, "phi3": 3}
CAUSAL = tuple(name for name, (_, options) in MODELS.items() if options in (_GPT2, _GROUPED))
ENCODERS = ("bert", "roberta", "electra", "distilbert")


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter drawn anew: biases of zero and norms of one would hide mistakes."""
    gen = torch.Generator().manual_seed(1)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p.dtype)
        # Queries and keys of size 1 and less, so that attention is neither flat nor sharp.
        p.data = noise * (0.5 if p.ndim < 2 else p.shape[-1] ** -0.5)
    return model.double().eval().requires_grad_(False)


class Blocks(nn.Module):
    """Torch's own encoder layers, with a mask for each of them."""

    def __init__(self, *, bias: bool = True, **options: Any) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 24, dropout=0.0, batch_first=True, bias=bias, norm_first=True
            )
            for _ in range(2)
        ]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True, **options)
            layer.self_attn = attention

    def forward(self, x: Tensor, mask: Any = None, padding: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_mask=mask, src_key_padding_mask=padding)
        return x


def model_of(family: str) -> nn.Module:
    if family == TORCH:
        return randomised(Blocks())
    kind, options = MODELS[family]
    return randomised(AutoModel.from_config(AutoConfig.for_model(kind, **options)))


def inputs_of(family: str) -> Any:
    gen = torch.Generator().manual_seed(2)
    if family == TORCH:
        return (torch.randn(1, TOKENS, WIDTH, generator=gen, dtype=torch.float64),)
    if "image_size" in MODELS[family][1]:
        return {"pixel_values": torch.randn(1, 3, 4, 4, generator=gen, dtype=torch.float64)}
    return {"input_ids": torch.randint(3, 60, (1, TOKENS), generator=gen)}


def foreign(model: nn.Module) -> nn.Module:
    """The same model with attention classes of the same names from elsewhere: never read."""
    for site in attention_sites(model).values():
        site.__class__ = type(type(site).__name__, (type(site),), {"__module__": "elsewhere"})
    return model


def captured(
    model: nn.Module, inputs: Any, name: str, *, implementation: str = "eager", memory: int = 2**30
) -> LayerMap:
    options: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
    with prepared(model, implementation=implementation, **options) as (ready, _):
        record = trace(ready, inputs, attention_sites(ready), norms=True, dtype=torch.float64)
        return build_map(record, 1, name, memory=memory)


def both(model: nn.Module, inputs: Any, name: str, **options: Any) -> tuple[LayerMap, LayerMap]:
    """The second layer in closed form and on the generic path."""
    closed = captured(model, inputs, name, **options)
    generic = captured(foreign(model), inputs, name, **options)
    assert closed.attention is not None
    assert generic.attention is None
    return closed, generic


def agree(ours: Tensor, truth: Tensor) -> None:
    assert float(truth.abs().max()) > 1e-3
    assert float((ours - truth).abs().max()) <= 1e-9 * float(truth.abs().max())


def check(closed: LayerMap, generic: LayerMap) -> Tensor:
    """Both paths, autograd and the dense SVD agree; the Jacobian by tokens, ``(n, n)``."""
    agree(closed.output, generic.output)
    ours = materialise(closed.linearise(closed.x))
    agree(ours, materialise(generic.linearise(generic.x)))
    truth: Any = torch.autograd.functional.jacobian(generic, generic.x, vectorize=True)
    agree(ours, truth.reshape(ours.shape))
    agree(materialise(closed.linearise(closed.x).T), ours.T)
    top = float(torch.linalg.svdvals(truth.reshape(ours.shape))[0])
    found = top_singular(closed.linearise(closed.x), tol=1e-10, tight=True)
    assert math.isclose(found.sigma, top, rel_tol=1e-9)
    n = closed.x.shape[0]
    return ours.reshape(n, -1, n, closed.x.shape[1]).abs().amax((1, 3)) > 0


@pytest.mark.parametrize(
    ("family", "name"),
    [*itertools.product(FULL, MAPS), *itertools.product(COPIES, ["attention"])],
)
def test_closed_form_of_every_family(family, name):
    if name == "residual" and "dinov2" in family:
        with pytest.raises(InputError, match="residual"):
            captured(model_of(family), inputs_of(family), name)  # scales before it adds
        return
    seen = check(*both(model_of(family), inputs_of(family), name))
    whole = torch.ones_like(seen)
    if family in WINDOWS:
        assert seen.equal(whole.tril().triu(1 - WINDOWS[family]))
    elif family in CAUSAL:
        assert seen.equal(whole.tril())


@pytest.mark.parametrize("name", ["heads", "attention"])
@pytest.mark.parametrize("family", FULL)
def test_single_heads_of_every_family(family, name):
    closed, generic = both(model_of(family), inputs_of(family), name)
    assert closed.num_heads == generic.num_heads == (2 if family == "gpt_neox" else HEADS)
    agree(closed.head_outputs(), generic.head_outputs())
    e = torch.randn(closed.num_heads or 0, *closed.x.shape, dtype=torch.float64)
    ours, truth = (layer.linearise(layer.x, per_head=True) for layer in (closed, generic))
    agree(ours.mv(e), truth.mv(e))
    g = torch.randn(ours.mv(e).shape, dtype=torch.float64)
    agree(ours.rmv(g), truth.rmv(g))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*ENCODERS, *CAUSAL, *WINDOWS, "gpt_neox"])
def test_padding_is_read(family, implementation):
    inputs = inputs_of(family)
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0]])
    options = {"implementation": implementation}
    seen = check(*both(model_of(family), inputs, "attention", **options))
    assert not seen[:4, 4:].any()
    assert bool(seen.diagonal()[:4].all())


@pytest.mark.parametrize("family", MODELS)
def test_both_implementations_are_read_alike(family):
    maps = [
        captured(model_of(family), inputs_of(family), "attention", implementation=how)
        for how in ("eager", "sdpa")
    ]
    eager, fused = (materialise(layer.linearise(layer.x)) for layer in maps)
    agree(fused, eager)


def test_the_scale_of_gpt2_may_depend_on_the_layer():
    scales = []
    for family in ("gpt2", "gpt2, by layer", "gpt2, unscaled"):
        layer = captured(model_of(family), inputs_of(family), "attention")
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
    seen = check(*both(model_of(TORCH), inputs, "heads"))
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
    check(*both(randomised(Blocks(bias=False)), inputs_of(TORCH), "attention"))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_appended_keys_are_run_not_read(option):
    model = randomised(Blocks(**{option: True}))
    layer = captured(model, inputs_of(TORCH), "attention")
    assert layer.attention is None
    truth: Any = torch.autograd.functional.jacobian(layer, layer.x)
    ours = materialise(layer.linearise(layer.x))
    agree(ours, truth.reshape(ours.shape))


def test_a_score_bias_is_run_not_read():
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.float64)
    layer = captured(model_of(TORCH), (*inputs_of(TORCH), bias), "attention")
    assert layer.attention is None
    with pytest.raises(InputError, match="generic path"):
        captured(model_of(TORCH), (*inputs_of(TORCH), bias), "attention", memory=1000)


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
