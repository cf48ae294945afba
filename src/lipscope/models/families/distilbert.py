"""DistilBERT: separate query, key and value; the projection is inside."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family("DistilBertSelfAttention")
def distilbert(call: AttentionCall) -> DotProduct:
    """Read the four linear layers."""
    module: Any = call.module
    return dot_product(
        call,
        affine(module.q_lin),
        affine(module.k_lin),
        affine(module.v_lin),
        affine(module.out_lin),
        heads=module.n_heads,
        scale=module.scaling,
    )
