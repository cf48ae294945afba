"""One layer of every variant, small: an entry of `EXAMPLES`, which a new variant needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from agreement import gaussian
from lipscope.attention import (
    Attention,
    ClippedAttention,
    DividedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    variants,
)

N = 6


@dataclass
class Example:
    """How to build a variant: the shapes of its paper's weights, other arguments, any mask."""

    weights: dict[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    masked: bool = True

    def build(self, kind: type[Attention], *, trained: bool = True, **options: Any) -> Attention:
        weights = {}
        for i, (name, shape) in enumerate(self.weights.items()):
            weight = gaussian(*shape, seed=i) if shape else torch.tensor(1.5 + i).double()
            weights[name] = nn.Parameter(weight) if trained else weight
        return kind(**weights, **(self.options | options))


TWO_HEADS = {"query": (6, 4), "key": (6, 4), "value": (4, 4), "output": (5, 4)}
EXAMPLES: dict[type[Attention], Example] = {
    DotProduct: Example(TWO_HEADS | {"query_bias": (6,), "output_bias": (5,)}, {"heads": 2}),
    L2Attention: Example({"query": (6, 4), "value": (4, 4), "output": (5, 4)}, {"heads": 2}),
    ScaledCosineAttention: Example(
        TWO_HEADS | {"temperature": (), "gain": ()}, {"heads": 2, "eps": 0.3}
    ),
    LipschitzNormAttention: Example(TWO_HEADS, {"heads": 2}, masked=False),
    SinkhornAttention: Example(TWO_HEADS, {"heads": 2}, masked=False),
    SigmoidAttention: Example(
        TWO_HEADS | {"query_bias": (6,), "key_bias": (6,), "value_bias": (4,), "output_bias": (5,)},
        {"heads": 2},
    ),
    ClippedAttention: Example(
        TWO_HEADS | {"query_bias": (6,), "value_bias": (4,)}, {"heads": 2, "radius": 1.5}
    ),
    DividedAttention: Example(
        TWO_HEADS | {"query_bias": (6,), "value_bias": (4,)},
        {"heads": 2, "by": "G2", "num_tokens": 9, "radius": 1.5},
    ),
}
each_variant = pytest.mark.parametrize("kind", variants(), ids=lambda one: one.__name__)


def build(kind: type[Attention], **options: Any) -> Attention:
    return EXAMPLES[kind].build(kind, **options)
