"""Token measures: transport between them, attention on them, and mass splitting."""

from lipscope.measures.atoms import Repeated, repeated_tokens, uniform_gain
from lipscope.measures.mean_field import (
    local_constant,
    push_forward,
    token_map,
    weighted_jacobian,
)
from lipscope.measures.ratios import (
    Worst,
    lipschitz_ratio,
    search_ratio,
    tiny_mass_gain,
    tiny_mass_ratio,
)
from lipscope.measures.splitting import Split, finite_split, own_operator, split_at
from lipscope.measures.tokens import TokenMeasure, in_order
from lipscope.measures.transport import (
    Plan,
    conditional_distance,
    optimal_plan,
    sinkhorn_divergence,
    wasserstein,
)

__all__ = [
    "Plan",
    "Repeated",
    "Split",
    "TokenMeasure",
    "Worst",
    "conditional_distance",
    "finite_split",
    "in_order",
    "lipschitz_ratio",
    "local_constant",
    "optimal_plan",
    "own_operator",
    "push_forward",
    "repeated_tokens",
    "search_ratio",
    "sinkhorn_divergence",
    "split_at",
    "tiny_mass_gain",
    "tiny_mass_ratio",
    "token_map",
    "uniform_gain",
    "wasserstein",
    "weighted_jacobian",
]
