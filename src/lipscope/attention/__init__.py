"""Attention layers with their Jacobian in closed form; one variant is one file."""

from lipscope.attention.core import Attention
from lipscope.attention.cosine import ScaledCosineAttention
from lipscope.attention.dot_product import DotProduct
from lipscope.attention.l2 import L2Attention
from lipscope.attention.lipschitz_norm import LipschitzNormAttention
from lipscope.attention.norms import TokenNorm
from lipscope.attention.projections import Rotary

__all__ = [
    "Attention",
    "DotProduct",
    "L2Attention",
    "LipschitzNormAttention",
    "Rotary",
    "ScaledCosineAttention",
    "TokenNorm",
]
