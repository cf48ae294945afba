"""Every bound of the literature and those derived here: one paper, one file."""

# The catalogue keeps this order: papers, then what is derived from them.
# isort: off
from lipscope.theorems.papers import castin2024, geshkovski2023, kim2021  # noqa: F401
from lipscope.theorems.papers import dasoulas2021, lipsformer2023, yudin2025, emadi2026  # noqa: F401
from lipscope.theorems.derived import global_bounds, local_bounds, row_gram, ball  # noqa: F401

# isort: on
from lipscope.theorems.derived.ball import Ball as Ball
from lipscope.theorems.derived.ball import BallName as BallName
from lipscope.theorems.derived.ball import least as least
from lipscope.theorems.derived.ball import per_token as per_token
from lipscope.theorems.derived.row_gram import JacobianRows as JacobianRows
from lipscope.theorems.derived.row_gram import Weighted as Weighted
from lipscope.theorems.derived.row_gram import row_gram_joint as row_gram_joint
from lipscope.theorems.derived.row_gram import weighted_head as weighted_head
from lipscope.theorems.derived.row_gram import weighted_rows as weighted_rows
from lipscope.theorems.directions import Placement as Placement
from lipscope.theorems.directions import eigen_directions as eigen_directions
from lipscope.theorems.directions import first_token_gain as first_token_gain
from lipscope.theorems.directions import split_gain as split_gain
from lipscope.theorems.directions import star_direction as star_direction
from lipscope.theorems.directions import value_direction as value_direction
from lipscope.theorems.head import UNIT as UNIT
from lipscope.theorems.head import Head as Head
from lipscope.theorems.head import HeadAt as HeadAt
from lipscope.theorems.head import HeadsAt as HeadsAt
from lipscope.theorems.head import check_scores as check_scores
from lipscope.theorems.head import heads_of as heads_of
from lipscope.theorems.head import tokens_in_double as tokens_in_double
from lipscope.theorems.layer_bounds import AskedLayer as AskedLayer
from lipscope.theorems.layer_bounds import Bound as Bound
from lipscope.theorems.layer_bounds import bounds_at as bounds_at
from lipscope.theorems.layer_bounds import evaluate as evaluate
from lipscope.theorems.layer_bounds import expected_seconds as expected_seconds
from lipscope.theorems.layer_bounds import how_long as how_long
from lipscope.theorems.papers.castin2024 import castin_thm_3_7_limit as castin_thm_3_7_limit
from lipscope.theorems.papers.castin2024 import castin_thm_e_3 as castin_thm_e_3
from lipscope.theorems.papers.kim2021 import kim_thm_3_2_infinity as kim_thm_3_2_infinity
from lipscope.theorems.papers.kim2021 import tight_input as tight_input
from lipscope.theorems.papers.kim2021 import tight_value as tight_value
from lipscope.theorems.register import DERIVED as DERIVED
from lipscope.theorems.register import PATIENCE as PATIENCE
from lipscope.theorems.register import RECALLED as RECALLED
from lipscope.theorems.register import NotApplicableError as NotApplicableError
from lipscope.theorems.register import Theorem as Theorem
from lipscope.theorems.register import catalogue as catalogue
from lipscope.theorems.register import theorem as theorem
from lipscope.theorems.residual import Norm as Norm
from lipscope.theorems.residual import Normed as Normed
from lipscope.theorems.residual import Residual as Residual
from lipscope.theorems.residual import absorb as absorb
from lipscope.theorems.residual import norm_of as norm_of
from lipscope.theorems.residual import radius_of_norm as radius_of_norm
from lipscope.theorems.spectrum import eigenvalue as eigenvalue
