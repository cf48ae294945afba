"""Qwen3 and OLMo-2: Llama with queries and keys normalised, by head or over all heads."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct, TokenNorm
from lipscope.models.families.llama import grouped_heads
from lipscope.models.tracing.sites import AttentionCall, family


@family("Qwen3Attention", "Qwen3MoeAttention", "Olmo2Attention", scores="normalised")
def qwen3(call: AttentionCall) -> DotProduct:
    """Read the four projections, ``q_norm`` and ``k_norm``, over one head or over all heads."""
    norms: list[Any] = [call.module.q_norm, call.module.k_norm]
    query, key = (TokenNorm(norm.weight, norm.variance_epsilon) for norm in norms)
    return grouped_heads(call, query_norm=query, key_norm=key)
