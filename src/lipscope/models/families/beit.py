"""BEiT: ViT without biases of the keys, and a relative position bias in place of a mask."""

from __future__ import annotations

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family("BeitAttention", scores="relative bias")
def beit(call: AttentionCall) -> DotProduct:
    """Read the four projections; their bias, if any, was added to the mask."""
    return projected(call, "q_proj k_proj v_proj o_proj", heads=call.module.num_attention_heads)
