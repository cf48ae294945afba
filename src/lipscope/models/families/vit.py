"""ViT, DINOv2 and their copies: images, no mask, one key and value per query head."""

from __future__ import annotations

from typing import Any

from lipscope.attention import DotProduct
from lipscope.models.families.affine import affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, family


@family(
    "ViTAttention",
    "ASTAttention",
    "DeiTAttention",
    "Dinov2Attention",
    "Dinov2WithRegistersAttention",
    "IJepaAttention",
    "ViTMAEAttention",
    "ViTMSNAttention",
    "VivitAttention",
)
def vit(call: AttentionCall) -> DotProduct:
    """Read the four projections."""
    module: Any = call.module
    return dot_product(
        call,
        affine(module.q_proj),
        affine(module.k_proj),
        affine(module.v_proj),
        affine(module.o_proj),
        heads=module.num_attention_heads,
        scale=module.scaling,
    )
