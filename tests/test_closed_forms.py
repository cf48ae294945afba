"""Every family in closed form: against the generic path, autograd and the dense SVD.

Everything runs in float64 and agrees to 1e-9, norms, rotary angles and softmax included:
`exact_maths` keeps models from computing them in float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lipscope.capture import LayerMap, attention_sites, build_map, families, prepared, trace
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
# Heads of another width than the model's share, and a window in the second layer.
_WIDE = {**_GROUPED, "head_dim": 6, "bos_token_id": 1, "eos_token_id": 2}
_BOTH = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
_BUCKETS = {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 6}
_T5 = {"d_model": WIDTH, "num_heads": HEADS, "d_kv": 6, "d_ff": 24, "num_layers": 2}
_T5 |= {"vocab_size": 60, **_BUCKETS}
_BART = {"d_model": WIDTH, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
_BART |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
_BART |= {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

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
    "gemma": ("gemma", _WIDE),
    "gemma2": ("gemma2", {**_WIDE, **_BOTH, "attn_logit_softcapping": 0.5}),
    "gemma3": ("gemma3_text", {**_WIDE, **_BOTH}),
    "qwen3": ("qwen3", _WIDE),
    "qwen3_moe": ("qwen3_moe", {**_WIDE, "num_experts": 2, "num_experts_per_tok": 1}),
    "olmo2": ("olmo2", {**_GROUPED, "bos_token_id": 1, "eos_token_id": 2}),
    "mpnet": ("mpnet", {**_TEXT, "relative_attention_num_buckets": 32}),
    "t5": ("t5", _T5),
    "t5, decoder": ("t5", _T5),
    "mt5": ("mt5", _T5),
    "bart": ("bart", _BART),
    "bart, decoder": ("bart", _BART),
    "mbart": ("mbart", _BART),
    "marian": ("marian", _BART),
    "pegasus": ("pegasus", _BART),
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
COPIES += ("qwen3_moe", "mt5", "mbart", "marian", "pegasus")
FULL = (*(name for name in MODELS if name not in COPIES), TORCH)
WINDOWS = {"mistral": 2, "qwen2, window": 2, "phi3": 3, "gemma2": 3, "gemma3": 3}
CAUSAL = tuple(name for name, (_, options) in MODELS.items() if options in (_GPT2, _GROUPED, _WIDE))
CAUSAL += ("olmo2", "t5, decoder", "bart, decoder")
ENCODERS = ("bert", "roberta", "electra", "distilbert", "mpnet", "t5", "bart")
# Their eager attention is the only one.
EAGER = ("mpnet", "gemma2")


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
    ids = torch.randint(3, 60, (1, TOKENS), generator=gen)
    two = any(name in MODELS[family][1] for name in ("d_kv", "encoder_layers"))
    return (
        {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, 1:]} if two else {"input_ids": ids}
    )


def foreign(model: nn.Module) -> nn.Module:
    """The same model with attention classes of the same names from elsewhere: never read."""
    for site in attention_sites(model).values():
        site.__class__ = type(type(site).__name__, (type(site),), {"__module__": "elsewhere"})
    return model


def layer_of(family: str) -> int:
    """The second layer, of the decoder where asked for: its calls follow the encoder's."""
    return 3 if "decoder" in family else 1


@contextlib.contextmanager
def traced(
    family: str, inputs: Any = None, *, implementation: str = "eager", model: Any = None
) -> Iterator[Any]:
    """Builds maps of one trace of a model, in closed form until `foreign` is called on it."""
    model = model_of(family) if model is None else model
    inputs = inputs_of(family) if inputs is None else inputs
    options: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
    with prepared(model, implementation=implementation, **options) as (ready, _):
        record = trace(ready, inputs, attention_sites(ready), norms=True, dtype=torch.float64)

        def build(name: str, *, run: bool = False, **more: Any) -> LayerMap:
            if run:
                foreign(ready)
            return build_map(record, layer_of(family), name, **more)

        named: Any = build
        named.site = record.calls[layer_of(family)].module
        yield named


def captured(model: nn.Module, inputs: Any, name: str, **options: Any) -> LayerMap:
    """The second layer's map."""
    with traced(TORCH, inputs, model=model) as build:
        return build(name, **options)


def both(build: Any, names: tuple[str, ...]) -> dict[str, tuple[LayerMap, LayerMap]]:
    """Maps of one layer in closed form and, from the same trace, on the generic path."""
    closed = [build(name) for name in names]
    generic = [build(name, run=True) for name in names]
    assert all(layer.attention is not None for layer in closed)
    assert all(layer.attention is None for layer in generic)
    return dict(zip(names, zip(closed, generic, strict=True), strict=True))


def agree(ours: Tensor, truth: Tensor) -> None:
    """Equal to 1e-9 of the largest entry."""
    assert float(truth.abs().max()) > 1e-4
    assert float((ours - truth).abs().max()) <= 1e-9 * float(truth.abs().max())


def probes(*shape: int) -> Tensor:
    """Two Gaussian vectors: no operator but zero sends them to zero."""
    gen = torch.Generator().manual_seed(5)
    return torch.randn(2, *shape, generator=gen, dtype=torch.float64)


def check(closed: LayerMap, generic: LayerMap) -> Tensor:
    """Both paths, autograd and the dense SVD agree; the Jacobian by tokens, ``(n_out, n)``."""
    agree(closed.output, generic.output)
    op, run = closed.linearise(closed.x), generic.linearise(generic.x)
    ours = materialise(op)
    truth: Any = torch.autograd.functional.jacobian(generic, generic.x, vectorize=True)
    agree(ours, truth.reshape(ours.shape))
    e, g = probes(*op.in_shape), probes(*op.out_shape)
    for each in (op, run):
        agree(each.mv(e).flatten(1), e.flatten(1) @ ours.T)
        agree(each.rmv(g).flatten(1), g.flatten(1) @ ours)
    top = float(torch.linalg.svdvals(truth.reshape(ours.shape))[0])
    found = top_singular(op, tol=1e-10, tight=True)
    assert math.isclose(found.sigma, top, rel_tol=1e-9)
    n_out, n = op.out_shape[0], op.in_shape[0]
    return ours.reshape(n_out, -1, n, op.in_shape[1]).abs().amax((1, 3)) > 0


def check_heads(closed: LayerMap, generic: LayerMap, heads: int = HEADS) -> None:
    """Single heads agree, each on its own copy of the input."""
    assert closed.num_heads == generic.num_heads == heads
    agree(closed.head_outputs(), generic.head_outputs())
    ours, truth = (layer.linearise(layer.x, per_head=True) for layer in (closed, generic))
    e = torch.randn(heads, *closed.x.shape, dtype=torch.float64)
    agree(ours.mv(e), truth.mv(e))
    g = torch.randn(ours.mv(e).shape, dtype=torch.float64)
    agree(ours.rmv(g), truth.rmv(g))


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
    assert [one.scores for one in families() if kind in one.classes] == [scores]


# Maps that a family does not have: DINOv2 scales before it adds, OLMo-2 has no norm before.
LACKING = {
    "dinov2": ("residual",),
    "dinov2_with_registers": ("residual",),
    "olmo2": ("normed",),
}


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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*ENCODERS, *CAUSAL, *WINDOWS, "gpt_neox"])
def test_padding_is_read(family, implementation):
    if implementation == "sdpa" and family in EAGER:
        pytest.skip("the model has no fused attention")
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
            ours.append(op.mv(probes(*op.in_shape)))
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
    ours = materialise(layer.linearise(layer.x))
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
