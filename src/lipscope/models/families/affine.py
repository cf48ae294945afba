"""Affine maps out of modules, and the layer that four of them make with a call's own mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope.attention import DotProduct, Rotary, TokenNorm
from lipscope.models.tracing.sites import AttentionCall, NotCoveredError, is_plain


class Affine(NamedTuple):
    """``x -> x W^T + b``, with W ``(out, in)``."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, sizes: Sequence[int]) -> list[Affine]:
        """The maps to consecutive parts of the output, of the given widths."""
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(list(sizes))
        return [Affine(*both) for both in zip(self.weight.split(list(sizes)), biases, strict=True)]


def affine(module: Any) -> Affine:
    """The map of ``nn.Linear``, or of the ``Conv1D`` of GPT-2, which keeps W transposed."""
    if not is_plain(module):
        raise NotCoveredError
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
    return Affine(weight, module.bias)


def projected(call: AttentionCall, names: str, **options: Any) -> DotProduct:
    """The layer of a call's own linear modules: queries, keys, values, and output if not traced.

    Those of queries and keys may be followed by a `TokenNorm`, in an ``nn.Sequential``.
    """
    modules = [getattr(call.module, name) for name in names.split()]
    for i, side in enumerate(("query_norm", "key_norm")):
        match modules[i]:
            case nn.Sequential() as pair if len(pair) == 2 and isinstance(pair[1], TokenNorm):
                modules[i], options[side] = pair[0], pair[1]
    maps = [affine(module) for module in modules]
    if len(maps) < 4 and call.end.projection is not None:
        maps.append(affine(call.end.projection))
    return dot_product(call, *maps, **options)


def dot_product(
    call: AttentionCall,
    query: Affine,
    key: Affine,
    value: Affine,
    output: Affine | None = None,
    **options: Any,
) -> DotProduct:
    """The layer of these maps, with the model's scale and the mask and angles that it passed in.

    A ``score_bias`` among its further fields is added to the mask's own.
    """
    masking = read_mask(call)
    added = [b for b in (masking.bias, options.pop("score_bias", None)) if b is not None]
    angles = call.arguments.get("position_embeddings")
    return DotProduct(
        query.weight,
        key.weight,
        value.weight,
        None if output is None else output.weight,
        query_bias=query.bias,
        key_bias=key.bias,
        value_bias=value.bias,
        output_bias=None if output is None else output.bias,
        scale=getattr(call.module, "scaling", None),
        causal=masking.causal,
        window=masking.window,
        mask=masking.mask,
        rotary=None if angles is None else Rotary(angles[0][0], angles[1][0]),
        score_bias=sum(added[1:], added[0]) if added else None,
        **options,
    )


# --- masks, as a model passes them to its layers

# Where models hand a mask to an attention module (T5 calls it `mask`).
_NAMES = ("attention_mask", "mask")


class Masking(NamedTuple):
    """What a call lets its tokens read, in the simplest form that says the same."""

    causal: bool = False  # token i reads tokens j <= i only
    # With ``causal``: token i reads tokens j > i - window only; None for no window.
    window: int | None = None
    # Any other mask, ``(n, m)`` or ``(h, n, m)`` booleans, True where visible.
    mask: Tensor | None = None
    bias: Tensor | None = None  # what is added to the scores, ``(n, m)`` or ``(h, n, m)``, or None


def read_mask(call: AttentionCall) -> Masking:
    """The mask of a call, of shape ``(1, 1 or h, 1 or n, m)``, or of torch's own attention.

    Boolean (True is visible; eager attention adds it to the scores as it is) or additive (very
    negative where hidden, else a bias of the scores). Under fused attention a missing mask stands
    for a causal one where the module is causal; under eager attention it stands for none.
    """
    if isinstance(call.module, nn.MultiheadAttention):
        return _simplest(call, *_read_torch(call))
    # GPT-2 hands both masks to its cross-attention, which reads the encoder's.
    names = ("encoder_attention_mask",) if "encoder_attention_mask" in call.arguments else _NAMES
    names = _NAMES if call.side == "self" else names
    mask = next((call.arguments[n] for n in names if call.arguments.get(n) is not None), None)
    if mask is None:
        return Masking(causal=_causal_without_mask(call))
    if mask.dtype == torch.bool and call.implementation == "eager":
        mask = mask.to(call.x.dtype)
    return _simplest(call, *_visible_and_bias(mask))


def _causal_without_mask(call: AttentionCall) -> bool:
    fused = call.implementation not in (None, "eager") and call.side == "self"
    causal = call.arguments.get("is_causal")
    if causal is None:
        causal = getattr(call.module, "is_causal", False)
    return bool(fused and causal and call.num_tokens > 1)


def _simplest(call: AttentionCall, visible: Tensor | None, bias: Tensor | None) -> Masking:
    """A mask of shape ``(1, 1 or h, 1 or n, m)`` as `Masking`."""
    bias = None if bias is None else _mask_by_head(call, bias)
    if visible is None:
        return Masking(bias=bias)
    visible = _mask_by_head(call, visible)
    if bool(visible.all()):
        return Masking(bias=bias)
    if visible.ndim == 2 and visible.shape[0] == visible.shape[1]:
        window = int(visible[-1].sum())
        band = torch.ones_like(visible).tril().triu(1 - window)
        if window and visible.equal(band):
            return Masking(True, None if window == len(visible) else window, bias=bias)
    return Masking(mask=visible, bias=bias)


def _mask_by_head(call: AttentionCall, values: Tensor) -> Tensor:
    """``(1, 1 or h, 1 or n, m)`` as ``(n, m)`` or ``(h, n, m)``."""
    values = values[0].expand(values.shape[1], call.num_queries, values.shape[-1])
    return values[0] if values.shape[0] == 1 else values


def _visible_and_bias(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a boolean mask or an additive one leaves visible, and what it adds there."""
    if mask.dtype == torch.bool:
        return mask, None
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    added = mask.masked_fill(hidden, 0.0)
    return ~hidden, added if bool(added.any()) else None


def _read_torch(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """What ``attn_mask`` and ``key_padding_mask`` of torch's attention leave visible, and add.

    In a boolean one, True means hidden. Its flag ``is_causal`` only says what the mask is.
    """
    n, m = call.num_queries, call.num_keys
    visible: Tensor | None = None
    bias: Tensor | None = None
    for name, shape in (("attn_mask", (1, -1, n, m)), ("key_padding_mask", (1, 1, 1, m))):
        mask = call.arguments.get(name)
        if mask is None:
            continue
        shown, added = _visible_and_bias(~mask if mask.dtype == torch.bool else mask)
        shown = shown.reshape(shape)
        visible = shown if visible is None else visible & shown
        if added is not None:
            bias = added.reshape(shape) if bias is None else bias + added.reshape(shape)
    return visible, bias
