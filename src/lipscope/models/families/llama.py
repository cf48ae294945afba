"""Llama and decoders of its layout, with or without biases, grouped heads or a window."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family(
    "LlamaAttention",  # SmolLM2 is of this type
    "GraniteAttention",  # its scale is a number of the configuration
    "GraniteMoeAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen2Attention",
    scores="rotary",
)
def llama(call: AttentionCall) -> DotProduct:
    """Read the four projections."""
    return grouped_heads(call)


def grouped_heads(call: AttentionCall, **options: Any) -> DotProduct:
    """Four projections of grouped heads, and what a family does with them (`dot_product`)."""
    config: Any = call.module.config
    return projected(
        call,
        "q_proj k_proj v_proj o_proj",
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        **options,
    )
