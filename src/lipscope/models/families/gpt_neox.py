"""GPT-NeoX: one linear layer whose rows are, head by head, a query, a key and a value."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import Affine, affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family("GPTNeoXAttention", scores="rotary")
def gpt_neox(call: AttentionCall) -> DotProduct:
    """Read ``query_key_value`` and ``dense``; the rotary embedding turns part of a head."""
    module: Any = call.module
    heads = module.config.num_attention_heads
    weight, bias = affine(module.query_key_value)
    weights = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)
    biases = [None] * 3
    if bias is not None:
        biases = bias.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1)
    query, key, value = (Affine(*both) for both in zip(weights, biases, strict=True))
    return dot_product(call, query, key, value, affine(module.dense), heads=heads)
