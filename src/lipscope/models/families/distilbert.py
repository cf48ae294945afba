"""DistilBERT: separate query, key and value; the projection is inside."""

from __future__ import annotations

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family("DistilBertSelfAttention")
def distilbert(call: AttentionCall) -> DotProduct:
    """Read the four linear layers."""
    return projected(call, "q_lin k_lin v_lin out_lin", heads=call.module.n_heads)
