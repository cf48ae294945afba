"""Llama: rotary embedding, grouped heads, causal; SmolLM2 is of this type."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProductAttention, Rotary
from lipscope.capture.masks import read_mask
from lipscope.capture.sites import AttentionCall, family


@family("LlamaAttention")
def llama(call: AttentionCall) -> DotProductAttention:
    """Read the four projections and the rotary angles that the model passed in."""
    module: Any = call.module
    causal, mask = read_mask(call)
    cos, sin = call.arguments["position_embeddings"]
    config = module.config
    return DotProductAttention(
        module.q_proj.weight,
        module.k_proj.weight,
        module.v_proj.weight,
        module.o_proj.weight,
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads,
        query_bias=module.q_proj.bias,
        key_bias=module.k_proj.bias,
        value_bias=module.v_proj.bias,
        output_bias=module.o_proj.bias,
        scale=module.scaling,
        causal=causal,
        mask=mask,
        rotary=Rotary(cos[0], sin[0]),
    )
