"""Every bound of the literature and those derived here: one paper, one file."""

# The catalogue keeps this order: papers, then what is derived from them.
# isort: off
from lipscope.theorems.papers import castin2024, geshkovski2023, kim2021  # noqa: F401
from lipscope.theorems.papers import dasoulas2021, lipsformer2023, yudin2025, emadi2026  # noqa: F401
from lipscope.theorems.derived import global_bounds, local_bounds, row_gram, ball  # noqa: F401

# isort: on
from lipscope.linalg import Metric, NormInterval, Segment, infinity_norm, max_token_norm, segment
from lipscope.theorems.derived.ball import Ball, BallName, least, per_token
from lipscope.theorems.derived.row_gram import (
    JacobianRows,
    Weighted,
    row_gram_joint,
    weighted_head,
    weighted_rows,
)
from lipscope.theorems.directions import (
    Placement,
    eigen_directions,
    first_token_gain,
    split_gain,
    star_direction,
    value_direction,
)
from lipscope.theorems.head import (
    UNIT,
    Head,
    HeadAt,
    HeadsAt,
    check_scores,
    heads_of,
    tokens_in_double,
)
from lipscope.theorems.layer_bounds import (
    AskedLayer,
    Bound,
    bounds_at,
    evaluate,
    expected_seconds,
    how_long,
)
from lipscope.theorems.papers.castin2024 import castin_thm_3_7_limit, castin_thm_e_3
from lipscope.theorems.papers.kim2021 import kim_thm_3_2_infinity, tight_input, tight_value
from lipscope.theorems.register import (
    DERIVED,
    PATIENCE,
    RECALLED,
    NotApplicableError,
    Theorem,
    catalogue,
    theorem,
)
from lipscope.theorems.residual import Norm, Normed, Residual, absorb, norm_of, radius_of_norm
from lipscope.theorems.spectrum import eigenvalue

__all__ = [
    "DERIVED",
    "PATIENCE",
    "RECALLED",
    "UNIT",
    "AskedLayer",
    "Ball",
    "BallName",
    "Bound",
    "Head",
    "HeadAt",
    "HeadsAt",
    "JacobianRows",
    "Metric",
    "Norm",
    "NormInterval",
    "Normed",
    "NotApplicableError",
    "Placement",
    "Residual",
    "Segment",
    "Theorem",
    "Weighted",
    "absorb",
    "bounds_at",
    "castin_thm_3_7_limit",
    "castin_thm_e_3",
    "catalogue",
    "check_scores",
    "eigen_directions",
    "eigenvalue",
    "evaluate",
    "expected_seconds",
    "first_token_gain",
    "heads_of",
    "how_long",
    "infinity_norm",
    "kim_thm_3_2_infinity",
    "least",
    "max_token_norm",
    "norm_of",
    "per_token",
    "radius_of_norm",
    "row_gram_joint",
    "segment",
    "split_gain",
    "star_direction",
    "theorem",
    "tight_input",
    "tight_value",
    "tokens_in_double",
    "value_direction",
    "weighted_head",
    "weighted_rows",
]
