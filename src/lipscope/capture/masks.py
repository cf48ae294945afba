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
