"""Read an attention mask as a model passes it to its layers."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.capture.sites import AttentionCall
from lipscope.errors import InputError


def read_mask(call: AttentionCall) -> tuple[bool, Tensor | None]:
    """The mask of a call as ``(causal, mask)``, the simplest form that says the same.

    Under fused attention a missing mask stands for a causal one where the module is causal;
    under eager attention it stands for none.

    Args:
        call: A call with ``attention_mask`` of shape ``(1, 1 or h, n, n)``, boolean (True is
            visible) or additive (0 or very negative), or None.

    Returns:
        Whether the mask is the causal one, and any other mask as ``(n, n)`` or ``(h, n, n)``
        booleans, True where visible.

    Raises:
        InputError: For an additive mask with other values.
    """
    mask = call.arguments.get("attention_mask")
    n = call.num_tokens
    if mask is None:
        fused = call.implementation not in (None, "eager")
        causal = call.arguments.get("is_causal")
        if causal is None:
            causal = getattr(call.module, "is_causal", False)
        return bool(fused and causal and n > 1), None
    visible = _visible(mask, call)[0]
    visible = visible.expand(*visible.shape[:-2], n, n)
    visible = visible[0] if visible.shape[0] == 1 else visible
    if bool(visible.all()):
        return False, None
    if visible.ndim == 2 and bool((visible == torch.ones_like(visible).tril()).all()):
        return True, None
    return False, visible


def _visible(mask: Tensor, call: AttentionCall) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if bool((mask.masked_fill(hidden, 0.0) != 0).any()):
        raise InputError(
            f"The mask of `{call.name}` should hold 0 and minus infinity. Found other values "
            "(a score bias), which its closed form does not cover."
        )
    return ~hidden


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
