"""A layer of a model with its input, as tests of bounds and certificates take them."""

from typing import Any

from torch import Tensor

import lipscope as ls
from lipscope import Attention
from lipscope.theorems import Normed


def layer_of(
    model: Any, data: Any = None, *, map: str = "attention", **options: Any
) -> tuple[Attention | Normed, Tensor]:
    """In float64 on the CPU unless asked otherwise; with the norm in front for `normed`."""
    usual = {"dtype": "float64", "device": "cpu"}
    at = ls.load_model(model).at(data, map=map, **{**usual, **options})
    return at.normed if map == "normed" else at.attention, at.x
