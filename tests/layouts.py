"""Tiny models of every family: maps of one layer on both paths, compared in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lipscope import to_dense, top_singular
from lipscope.models import LayerMap, attention_sites, build_map, prepared, trace

WIDTH, HEADS, GROUPS, TOKENS = 16, 4, 2, 5
_PLAIN = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
}
SMALL = {**_PLAIN, "vocab_size": 60, "pad_token_id": 0}
_GROUPED = {**SMALL, "num_key_value_heads": GROUPS}
_IMAGE = {**_PLAIN, "image_size": 4, "patch_size": 2}
GPT2 = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "n_positions": 16, "vocab_size": 60}
# Four of the eight entries of a head are turned: two pairs, so that their layout matters.
_ROPE = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5}
TORCH = "torch"
MAPS = ("heads", "attention", "normed", "residual")
_TWO = {"num_attention_heads": 2}
# Heads of another width than the model's share, and a window in the second layer.
_WIDE = {**_GROUPED, "head_dim": 6, "bos_token_id": 1, "eos_token_id": 2}
_BOTH = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
_BUCKETS = {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 6}
T5 = {"d_model": WIDTH, "num_heads": HEADS, "d_kv": 6, "d_ff": 24, "num_layers": 2}
T5 |= {"vocab_size": 60, **_BUCKETS}
BART = {"d_model": WIDTH, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
BART |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
BART |= {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SMALL),
    "roberta": ("roberta", SMALL),
    "xlm-roberta": ("xlm-roberta", SMALL),
    "xlm-roberta-xl": ("xlm-roberta-xl", SMALL),
    "roberta-prelayernorm": ("roberta-prelayernorm", SMALL),
    "camembert": ("camembert", SMALL),
    "data2vec-text": ("data2vec-text", SMALL),
    "electra": ("electra", {**SMALL, "embedding_size": WIDTH}),
    "ernie": ("ernie", SMALL),
    "distilbert": (
        "distilbert",
        {"dim": WIDTH, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 24, "vocab_size": 60},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2, by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": ("gpt2", {**GPT2, "scale_attn_weights": False}),
    "gpt_neox": (
        "gpt_neox",
        {**SMALL, **_TWO, "use_parallel_residual": False, "rope_parameters": _ROPE},
    ),
    "gpt_neox, no biases": (
        "gpt_neox",
        {**SMALL, "use_parallel_residual": False, "attention_bias": False},
    ),
    "llama": ("llama", {**_GROUPED, "attention_bias": True}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 2}),
    "mistral, wide heads": ("mistral", {**_GROUPED, "head_dim": 12, "sliding_window": None}),
    "granite": (
        "granite",
        {**_GROUPED, "attention_multiplier": 0.3, "residual_multiplier": 0.2},
    ),
    "granitemoe": (
        "granitemoe",
        {**_GROUPED, "attention_multiplier": 0.3, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 2}),
    "gemma": ("gemma", _WIDE),
    "gemma2": ("gemma2", {**_WIDE, **_BOTH, "attn_logit_softcapping": 0.5}),
    "gemma3": ("gemma3_text", {**_WIDE, **_BOTH}),
    "qwen3": ("qwen3", _WIDE),
    "qwen3_moe": ("qwen3_moe", {**_WIDE, "num_experts": 2, "num_experts_per_tok": 1}),
    "olmo2": ("olmo2", {**_GROUPED, "bos_token_id": 1, "eos_token_id": 2}),
    "mpnet": ("mpnet", {**SMALL, "relative_attention_num_buckets": 32}),
    "t5": ("t5", T5),
    "t5, decoder": ("t5", T5),
    "mt5": ("mt5", T5),
    "bart": ("bart", BART),
    "bart, decoder": ("bart", BART),
    "mbart": ("mbart", BART),
    "marian": ("marian", BART),
    "pegasus": ("pegasus", BART),
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
    "beit": (
        "beit",
        {**_IMAGE, "use_relative_position_bias": True, "layer_scale_init_value": 0.3},
    ),
    "beit, shared": ("beit", {**_IMAGE, "use_shared_relative_position_bias": True}),
}
# Copies of a layout that is tested in full, or of a call that differs in its options only.
COPIES = ("xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "ernie", "gpt2, unscaled")
COPIES += (
    "gpt_neox, no biases",
    "mixtral",
    "granitemoe",
    "beit, shared",
    "vit, no biases",
    "deit",
    "vit_msn",
    "ijepa",
)
COPIES += ("qwen3_moe", "mt5", "mbart", "marian", "pegasus")
FULL = (*(name for name in MODELS if name not in COPIES), TORCH)
WINDOWS = {"mistral": 2, "qwen2, window": 2, "phi3": 3, "gemma2": 3, "gemma3": 3}
CAUSAL = tuple(name for name, (_, options) in MODELS.items() if options in (GPT2, _GROUPED, _WIDE))
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
    ours = to_dense(op)
    truth: Any = torch.autograd.functional.jacobian(generic, generic.x, vectorize=True)
    agree(ours, truth.reshape(ours.shape))
    e, g = probes(*op.in_shape), probes(*op.out_shape)
    for each in (op, run):
        agree(each.matvec(e).flatten(1), e.flatten(1) @ ours.T)
        agree(each.rmatvec(g).flatten(1), g.flatten(1) @ ours)
    top = float(torch.linalg.svdvals(truth.reshape(ours.shape))[0])
    found = top_singular(op, tol=1e-10)
    assert math.isclose(found.sigma, top, rel_tol=1e-9)
    n_out, n = op.out_shape[0], op.in_shape[0]
    return ours.reshape(n_out, -1, n, op.in_shape[1]).abs().amax((1, 3)) > 0


def check_heads(closed: LayerMap, generic: LayerMap, heads: int = HEADS) -> None:
    """Single heads agree, each on its own copy of the input."""
    assert closed.num_heads == generic.num_heads == heads
    agree(closed.head_outputs(), generic.head_outputs())
    ours, truth = (layer.linearise(layer.x, per_head=True) for layer in (closed, generic))
    e = torch.randn(heads, *closed.x.shape, dtype=torch.float64)
    agree(ours.matvec(e), truth.matvec(e))
    g = torch.randn(ours.matvec(e).shape, dtype=torch.float64)
    agree(ours.rmatvec(g), truth.rmatvec(g))
