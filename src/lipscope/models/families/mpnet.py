"""MPNet: BERT with a relative position bias, which the encoder computes once."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family("MPNetSelfAttention", scores="relative bias")
def mpnet(call: AttentionCall) -> DotProduct:
    """Read ``q``, ``k``, ``v``, ``o`` and the bias that is passed in."""
    module: Any = call.module
    bias = call.arguments.get("position_bias")
    return dot_product(
        call,
        affine(module.q),
        affine(module.k),
        affine(module.v),
        affine(module.o),
        heads=module.num_attention_heads,
        score_bias=None if bias is None else bias[0],
    )
