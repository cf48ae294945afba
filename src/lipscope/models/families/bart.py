"""BART and encoder-decoders of its layout: four linear layers, either kind of attention."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
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
