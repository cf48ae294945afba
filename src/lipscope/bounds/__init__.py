"""Every bound of the literature and those derived here: one paper, one file."""

from lipscope.bounds import (
    ball,
    castin2024,
    dasoulas2021,
    derived,
    emadi2026,
    geshkovski2023,
    kim2021,
    lipsformer2023,
    local,
    row_gram,
    yudin2025,
)
from lipscope.bounds.head import Head, heads_of
from lipscope.bounds.normed import Norm, Normed, absorb, norm_of, radius_of_norm
from lipscope.bounds.norms import NormInterval, infinity_norm, max_token_norm
from lipscope.bounds.segment import Segment, segment
from lipscope.bounds.several import Layer, evaluate
from lipscope.bounds.table import Bound, bounds
from lipscope.bounds.theorem import DERIVED, NotApplicableError, Theorem, catalogue, theorem

# What enters theorems into the catalogue by being imported.
PAPERS = (
    castin2024,
    geshkovski2023,
    kim2021,
    dasoulas2021,
    lipsformer2023,
    yudin2025,
    emadi2026,
    derived,
    local,
    row_gram,
    ball,
)

__all__ = [
    "DERIVED",
    "PAPERS",
    "Bound",
    "Head",
    "Layer",
    "Norm",
    "NormInterval",
    "Normed",
    "NotApplicableError",
    "Segment",
    "Theorem",
    "absorb",
    "bounds",
    "catalogue",
    "evaluate",
    "heads_of",
    "infinity_norm",
    "max_token_norm",
    "norm_of",
    "radius_of_norm",
    "segment",
    "theorem",
]
