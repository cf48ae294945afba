"""Gemma, Gemma 2 and Gemma 3: Llama with soft-capped scores or normalised queries and keys."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct, TokenNorm
from lipscope.models.families.llama import grouped_heads
from lipscope.models.tracing.sites import AttentionCall, family


@family("GemmaAttention", scores="rotary")
def gemma(call: AttentionCall) -> DotProduct:
    """Read the four projections; heads need not be as wide as the model over their number."""
    return grouped_heads(call)


@family("Gemma2Attention", scores="soft cap")
def gemma2(call: AttentionCall) -> DotProduct:
    """Read the four projections and the soft cap; every other layer has a window."""
    module: Any = call.module
    return grouped_heads(call, softcap=module.attn_logit_softcapping)


@family("Gemma3Attention", scores="normalised")
def gemma3(call: AttentionCall) -> DotProduct:
    """Read the four projections and both norms; its eager attention has no soft cap."""
    norms: list[Any] = [call.module.q_norm, call.module.k_norm]
    query, key = (TokenNorm(1 + norm.weight, norm.eps) for norm in norms)  # it stores γ - 1
    return grouped_heads(call, query_norm=query, key_norm=key)
