"""Read an attention mask as a model passes it to its layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipscope.capture.sites import AttentionCall, NotCoveredError
from lipscope.errors import InputError


def read_mask(call: AttentionCall) -> tuple[bool, Tensor | None]:
    """The mask of a call as ``(causal, mask)``, the simplest form that says the same.

    Under fused attention a missing mask stands for a causal one where the module is causal;
    under eager attention it stands for none.

    Args:
        call: A call with ``attention_mask`` of shape ``(1, 1 or h, n, n)``, boolean (True is
            visible) or additive (0 or very negative), or None; or one of torch's own attention.

    Returns:
        Whether the mask is the causal one, and any other mask as ``(n, n)`` or ``(h, n, n)``
        booleans, True where visible.

    Raises:
        NotCoveredError: For an additive mask with other values, a score bias.
    """
    n = call.num_tokens
    if isinstance(call.module, nn.MultiheadAttention):
        visible = _visible_in_torch(call)
    else:
        mask = call.arguments.get("attention_mask")
        if mask is None:
            fused = call.implementation not in (None, "eager")
            causal = call.arguments.get("is_causal")
            if causal is None:
                causal = getattr(call.module, "is_causal", False)
            return bool(fused and causal and n > 1), None
        visible = mask if mask.dtype == torch.bool else ~_hidden(mask)
    if visible is None:
        return False, None
    visible = visible[0].expand(*visible.shape[1:-2], n, n)
    visible = visible[0] if visible.shape[0] == 1 else visible
    if bool(visible.all()):
        return False, None
    if visible.ndim == 2 and bool((visible == torch.ones_like(visible).tril()).all()):
        return True, None
    return False, visible


def _visible_in_torch(call: AttentionCall) -> Tensor | None:
    """What ``attn_mask`` and ``key_padding_mask`` leave visible, ``(1, 1 or h, 1 or n, n)``.

    In a boolean mask of torch's attention, True means hidden. Its flag ``is_causal`` only
    says what the mask is.
    """
    n, hidden = call.num_tokens, None
    for name, shape in (("attn_mask", (1, -1, n, n)), ("key_padding_mask", (1, 1, 1, n))):
        mask = call.arguments.get(name)
        if mask is not None:
            part = (mask if mask.dtype == torch.bool else _hidden(mask)).reshape(shape)
            hidden = part if hidden is None else hidden | part
    return None if hidden is None else ~hidden


def _hidden(mask: Tensor) -> Tensor:
    """Where an additive mask hides."""
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if bool((mask.masked_fill(hidden, 0.0) != 0).any()):
        raise NotCoveredError
    return hidden


def check_visible(call: AttentionCall) -> None:
    """Refuse a row that may read no token: its softmax is undefined.

    Raises:
        InputError: If a row of the mask hides every token.
    """
    mask = call.arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
    else:
        hidden = mask if _hides(call) else ~mask
    rows = hidden.all(-1).flatten().nonzero()
    if len(rows):
        row = int(rows[0]) % mask.shape[-2]
        raise InputError(
            f"Every token should read at least one token. Found that token {row} of "
            f"`{call.name}` reads none (left padding?); pad on the right or drop the padding."
        )


def _hides(call: AttentionCall) -> bool:
    """Whether True in a boolean mask means hidden; MPT's means so, all others' visible."""
    return type(call.module).__module__.startswith("transformers.models.mpt.")
