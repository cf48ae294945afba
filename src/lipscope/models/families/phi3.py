"""Phi-3: one linear layer with all queries, then all keys, then all values."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family("Phi3Attention", scores="rotary")
def phi3(call: AttentionCall) -> DotProduct:
    """Read ``qkv_proj`` and ``o_proj``; the rotary embedding may turn part of a head."""
    module: Any = call.module
    heads, groups = module.config.num_attention_heads, module.num_key_value_heads
    widths = [count * module.head_dim for count in (heads, groups, groups)]
    query, key, value = affine(module.qkv_proj).rows(widths)
    output = affine(module.o_proj)
    return dot_product(call, query, key, value, output, heads=heads, groups=groups)
