"""GPT-2: queries, keys and values in one ``Conv1D``, one after the other."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family("GPT2Attention", "DecisionTransformerGPT2Attention")
def gpt2(call: AttentionCall) -> DotProduct:
    """Read ``c_attn``, ``c_proj``, across also ``q_attn``; the scale may depend on the layer."""
    module: Any = call.module
    inside = affine(module.c_attn)
    if getattr(module, "is_cross_attention", False):
        query, (key, value) = affine(module.q_attn), inside.rows([module.split_size] * 2)
    else:
        query, key, value = inside.rows([module.split_size] * 3)
    output = affine(module.c_proj)
    return dot_product(call, query, key, value, output, heads=module.num_heads)
