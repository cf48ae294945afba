"""Constructor arguments of a layer: the numbers and words that are allowed."""

from __future__ import annotations

import inspect
from typing import TypedDict

from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.errors import (
    InputError,
    check_count,
    check_finite_number,
    check_positive,
    shown,
)


class Framed(TypedDict, total=False):
    """What softmax and its like take besides weights: `Biased` explains it."""

    heads: int
    query_bias: Float[Tensor, " hk"] | None
    key_bias: Float[Tensor, " hk"] | None
    value_bias: Float[Tensor, " hv"] | None
    output_bias: Float[Tensor, " d_out"] | None
    scale: float | None
    causal: bool
    mask: Bool[Tensor, "*h n n"] | None


def arguments(kind: type) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor, with those that it hands on to the one above it."""
    above = (one for one in kind.__mro__ if "__init__" in vars(one))
    found: dict[str, inspect.Parameter] = {}
    for one in above:
        own = dict(inspect.signature(vars(one)["__init__"]).parameters)
        hands_on = [n for n, p in own.items() if p.kind is inspect.Parameter.VAR_KEYWORD]
        found = {n: p for n, p in own.items() if n not in ("self", *hands_on)} | found
        if not hands_on:
            break
    return found


def check_frame(
    causal: object, mask: object, scale: object, softcap: object, window: object
) -> None:
    """Refuse what decides on scores and masks, and is no such thing."""
    if scale is not None:
        check_finite_number("scale", scale)
    if softcap is not None:
        check_positive("softcap", softcap)
    if window is not None:
        check_count("window", window)
    if not isinstance(causal, bool):
        raise InputError(f"`causal` should be True or False. Found `causal = {shown(causal)}`.")
    if mask is None:
        return
    kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    if str(kind) != "torch.bool":
        raise InputError(f"`mask` should be a tensor of booleans. Found {kind!s}.")
