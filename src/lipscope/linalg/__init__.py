"""Linear algebra of Jacobians: operators, the top singular value, its interval and its gradient."""

from lipscope.linalg.finite_difference import Segment, difference, segment
from lipscope.linalg.gradient import sigma
from lipscope.linalg.norms import (
    Metric,
    NormInterval,
    bracketed,
    frobenius_interval,
    infinity_norm,
    max_token_norm,
)
from lipscope.linalg.operator import (
    Operator,
    Product,
    Tape,
    compose,
    derivatives,
    linearise,
    over_leading,
    plus_identity,
    restrict,
    start_named,
    stretch,
    to_dense,
)
from lipscope.linalg.singular import (
    SMALLEST_TOL,
    TopSingular,
    golub_kahan,
    top_singular,
    top_singular_batch,
)
from lipscope.linalg.top_subspace import Leading, leading

__all__ = [
    "SMALLEST_TOL",
    "Leading",
    "Metric",
    "NormInterval",
    "Operator",
    "Product",
    "Segment",
    "Tape",
    "TopSingular",
    "bracketed",
    "compose",
    "derivatives",
    "difference",
    "frobenius_interval",
    "golub_kahan",
    "infinity_norm",
    "leading",
    "linearise",
    "max_token_norm",
    "over_leading",
    "plus_identity",
    "restrict",
    "segment",
    "sigma",
    "start_named",
    "stretch",
    "to_dense",
    "top_singular",
    "top_singular_batch",
]
