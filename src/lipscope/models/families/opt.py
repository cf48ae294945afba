"""OPT: four projections, queries scaled before their heads are split."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family("OPTAttention")
def opt(call: AttentionCall) -> DotProduct:
    """Read ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``."""
    module: Any = call.module
    return dot_product(
        call,
        affine(module.q_proj),
        affine(module.k_proj),
        affine(module.v_proj),
        affine(module.out_proj),
        heads=module.num_heads,
        scale=module.scaling,
    )
