"""BART and encoder-decoders of its layout: four linear layers, either kind of attention."""

from __future__ import annotations

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family(
    "BartAttention",
    "BlenderbotAttention",
    "BlenderbotSmallAttention",
    "M2M100Attention",
    "MBartAttention",
    "MarianAttention",
    "PLBartAttention",
    "PegasusAttention",
)
def bart(call: AttentionCall) -> DotProduct:
    """Read the four projections."""
    return projected(call, "q_proj k_proj v_proj out_proj", heads=call.module.num_heads)
