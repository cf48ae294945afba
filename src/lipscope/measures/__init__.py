"""Token measures: optimal transport, mean-field attention, mass splitting."""

from lipscope.measures.mean_field import (
    TokenMeasure as TokenMeasure,
    in_order as in_order,
    local_constant as local_constant,
    push_forward as push_forward,
    token_map as token_map,
    weighted as weighted,
    weighted_jacobian as weighted_jacobian,
)
from lipscope.measures.splitting import (
    Grouped as Grouped,
    Repeated as Repeated,
    Split as Split,
    finite_split as finite_split,
    grouped as grouped,
    own_operator as own_operator,
    repeated_tokens as repeated_tokens,
    split_at as split_at,
    uniform_gain as uniform_gain,
)
from lipscope.measures.transport import (
    Plan as Plan,
    Worst as Worst,
    conditional_distance as conditional_distance,
    lipschitz_ratio as lipschitz_ratio,
    optimal_plan as optimal_plan,
    search_ratio as search_ratio,
    sinkhorn_divergence as sinkhorn_divergence,
    tiny_mass_gain as tiny_mass_gain,
    tiny_mass_ratio as tiny_mass_ratio,
    wasserstein as wasserstein,
)
