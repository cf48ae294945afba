"""The result of a construction, and the checks that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attacks.ascent import check_size
from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.theorems import Head, NotApplicableError, heads_of

PredictionKind = Literal["lower", "exact", "limit"]


@dataclass(frozen=True)
class Construction:
    """An input and what is known about sigma there.

    Attributes:
        x: The tokens, ``(n, d)``, in the layer's dtype and on its device.
        name: The function that built it, with the case where there are several.
        statement: Where it comes from.
        cite: Key of the bibliography, or "derived here".
        predicted: What theory says about sigma of the head's contribution (or of the whole
            layer where ``head`` is None) with its biases, or None.
        kind: Whether ``predicted`` is a proved lower bound, the exact value, or the limit of
            large radii, which a finite radius need not have reached.
        head: The head that it was built for; None if it does not depend on one.
    """

    x: Float[Tensor, "n d"]
    name: str
    statement: str
    cite: str
    predicted: float | None
    kind: PredictionKind = "lower"
    head: int | None = None


def head_for(layer: Attention, head: int, num_tokens: int, radius: float, *, least: int) -> Head:
    """One head of a dot-product layer for which constructions hold, after all checks."""
    check_size(num_tokens, radius, least=least)
    if not isinstance(layer, DotProduct):
        raise InputError(
            f"not available: made for dot-product attention. Found `{type(layer).__name__}`."
        )
    if not 0 <= head < layer.num_heads:
        raise InputError(
            f"`head` should be between 0 and {layer.num_heads - 1}. Found `head = {head}`."
        )
    if layer.positional:
        raise InputError("not available: logits depend on position; use ascent.")
    try:
        (one,) = heads_of(layer.head(head))
        if one.mask is not None:
            one.allowed(num_tokens)  # the mask was made for this many tokens
        one.causal_or_unmasked()
    except NotApplicableError as why:
        raise InputError(f"not available: {why}.") from None
    return one


def pair(first: Tensor, rest: Tensor, num_tokens: int) -> Tensor:
    """One token, then ``n - 1`` equal ones."""
    return torch.cat([first[None], rest.expand(num_tokens - 1, -1)])
