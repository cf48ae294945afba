"""MPNet: BERT with a relative position bias that the encoder computes once."""

from __future__ import annotations

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family("MPNetSelfAttention", scores="relative bias")
def mpnet(call: AttentionCall) -> DotProduct:
    """Read ``q``, ``k``, ``v``, ``o`` and the bias that is passed in."""
    bias = call.arguments.get("position_bias")
    bias = None if bias is None else bias[0]
    return projected(call, "q k v o", heads=call.module.num_attention_heads, score_bias=bias)
