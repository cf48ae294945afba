"""Lipschitz bounds from the literature and derived here; one file per paper."""

# The catalogue keeps this order: papers first, then results derived here.
# isort: off
from lipscope.theorems.papers import castin2024, geshkovski2023, kim2021  # noqa: F401
from lipscope.theorems.papers import dasoulas2021, lipsformer2023, yudin2025, emadi2026  # noqa: F401
from lipscope.theorems.derived import global_bounds, local_bounds, row_gram, ball  # noqa: F401

# isort: on
from lipscope.theorems.derived.ball import (
    Ball as Ball,
    BallName as BallName,
    least as least,
    per_token as per_token,
)
from lipscope.theorems.derived.row_gram import (
    JacobianRows as JacobianRows,
    Weighted as Weighted,
    row_gram_joint as row_gram_joint,
    weighted_heads as weighted_heads,
    weighted_rows as weighted_rows,
)
from lipscope.theorems.directions import (
    Placement as Placement,
    eigen_directions as eigen_directions,
    first_token_gain as first_token_gain,
    pair_directions as pair_directions,
    split_gain as split_gain,
    star_direction as star_direction,
    value_direction as value_direction,
)
from lipscope.theorems.head import (
    UNIT as UNIT,
    Head as Head,
    HeadAt as HeadAt,
    HeadsAt as HeadsAt,
    check_scores as check_scores,
    heads_of as heads_of,
    tokens_in_double as tokens_in_double,
)
from lipscope.theorems.layer_bounds import (
    Bound as Bound,
    LayerSubject as LayerSubject,
    bounds_at as bounds_at,
    evaluate as evaluate,
    expected_seconds as expected_seconds,
    how_long as how_long,
)
from lipscope.theorems.network_bound import (
    LipschitzBound as LipschitzBound,
    lipschitz_bound as lipschitz_bound,
)
from lipscope.theorems.papers.castin2024 import (
    castin_thm_3_7_limit as castin_thm_3_7_limit,
    castin_thm_e_3 as castin_thm_e_3,
)
from lipscope.theorems.papers.kim2021 import (
    kim_thm_3_2_infinity as kim_thm_3_2_infinity,
    tight_input as tight_input,
    tight_value as tight_value,
)
from lipscope.theorems.register import (
    DERIVED as DERIVED,
    PATIENCE as PATIENCE,
    RECALLED as RECALLED,
    NotApplicableError as NotApplicableError,
    Theorem as Theorem,
    catalogue as catalogue,
    theorem as theorem,
    theorem_named as theorem_named,
)
from lipscope.theorems.residual import (
    Normed as Normed,
    Residual as Residual,
    absorb as absorb,
    norm_of as norm_of,
)
