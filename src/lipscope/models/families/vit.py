"""ViT, DINOv2 and their copies: images, no mask, one key and value per query head."""

from __future__ import annotations

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
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
    return projected(call, "q_proj k_proj v_proj o_proj", heads=call.module.num_attention_heads)
