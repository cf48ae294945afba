"""BERT and its copies: separate query, key and value; projection in a module of its own."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProductAttention
from lipscope.capture.masks import read_mask
from lipscope.capture.sites import AttentionCall, family


@family(
    "BertSelfAttention",
    "RobertaSelfAttention",
    "XLMRobertaSelfAttention",
    "ElectraSelfAttention",
)
def bert(call: AttentionCall) -> DotProductAttention:
    """Read ``query``, ``key``, ``value`` and the traced output projection."""
    module: Any = call.module
    causal, mask = read_mask(call)
    projection: Any = call.projection
    return DotProductAttention(
        module.query.weight,
        module.key.weight,
        module.value.weight,
        projection.weight if projection is not None else None,
        num_heads=module.num_attention_heads,
        query_bias=module.query.bias,
        key_bias=module.key.bias,
        value_bias=module.value.bias,
        output_bias=projection.bias if projection is not None else None,
        scale=module.scaling,
        causal=causal,
        mask=mask,
    )
