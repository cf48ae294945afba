"""Token measures: transport between them, attention on them, and mass splitting."""

from lipscope.measures.mean_field import (
    TokenMeasure,
    in_order,
    local_constant,
    push_forward,
    token_map,
    weighted_jacobian,
)
from lipscope.measures.splitting import (
    Repeated,
    Split,
    finite_split,
    own_operator,
    repeated_tokens,
    split_at,
    uniform_gain,
)
from lipscope.measures.transport import (
    Plan,
    Worst,
    conditional_distance,
    lipschitz_ratio,
    optimal_plan,
    search_ratio,
    sinkhorn_divergence,
    tiny_mass_gain,
    tiny_mass_ratio,
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
