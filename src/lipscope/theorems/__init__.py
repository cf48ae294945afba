"""Every bound of the literature and those derived here: one paper, one file."""

# The catalogue keeps this order: papers, then what is derived from them.
# isort: off
from lipscope.theorems.papers import (
    castin2024,
    geshkovski2023,
    kim2021,
    dasoulas2021,
    lipsformer2023,
    yudin2025,
    emadi2026,
)
from lipscope.theorems.derived import global_bounds, other_kinds, local_bounds, row_gram, ball

# isort: on
from lipscope.linalg.norms import Metric, NormInterval, infinity_norm, max_token_norm
from lipscope.linalg.segment import Segment, segment
from lipscope.theorems.derived.intervals import BallName
from lipscope.theorems.head import Head, heads_of
from lipscope.theorems.head_at import HeadAt, HeadsAt
from lipscope.theorems.layer_bounds import AskedLayer, evaluate
from lipscope.theorems.normed import Norm, Normed, absorb, norm_of, radius_of_norm
from lipscope.theorems.register import (
    DERIVED,
    PATIENCE,
    RECALLED,
    NotApplicableError,
    Theorem,
    catalogue,
    theorem,
)
from lipscope.theorems.residual import Residual
from lipscope.theorems.table import Bound, bounds_at, expected_seconds, how_long

# What enters theorems into the catalogue by being imported.
PAPERS = (
    castin2024,
    geshkovski2023,
    kim2021,
    dasoulas2021,
    lipsformer2023,
    yudin2025,
    emadi2026,
    global_bounds,
    other_kinds,
    local_bounds,
    row_gram,
    ball,
)

__all__ = [
    "DERIVED",
    "PAPERS",
    "PATIENCE",
    "RECALLED",
    "AskedLayer",
    "BallName",
    "Bound",
    "Head",
    "HeadAt",
    "HeadsAt",
    "Metric",
    "Norm",
    "NormInterval",
    "Normed",
    "NotApplicableError",
    "Residual",
    "Segment",
    "Theorem",
    "absorb",
    "bounds_at",
    "catalogue",
    "evaluate",
    "expected_seconds",
    "heads_of",
    "how_long",
    "infinity_norm",
    "max_token_norm",
    "norm_of",
    "radius_of_norm",
    "segment",
    "theorem",
]
