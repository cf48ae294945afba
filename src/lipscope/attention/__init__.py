"""Attention layers with their Jacobian in closed form; one variant is one file.

Called, ``lipscope.attention(q, k, v)`` is the function `lipscope.attention.functional.attention`.
"""

import sys
from types import ModuleType

from lipscope.attention.core import VARIANTS, Attention, transformed, variant, variants
from lipscope.attention.functional import attention
from lipscope.attention.kinds.clipped import ClippedAttention
from lipscope.attention.kinds.cosine import ScaledCosineAttention
from lipscope.attention.kinds.divided import DividedAttention
from lipscope.attention.kinds.dot_product import DotProduct
from lipscope.attention.kinds.l2 import L2Attention, phi_inverse
from lipscope.attention.kinds.lipschitz_norm import CONSTANT, LipschitzNormAttention
from lipscope.attention.kinds.sigmoid import SigmoidAttention
from lipscope.attention.kinds.sinkhorn import SinkhornAttention
from lipscope.attention.layer import (
    Clip,
    Map,
    MovingSide,
    Rotary,
    TokenNorm,
    arguments,
    exact,
    uncast,
)
from lipscope.attention.multihead import MultiheadAttention
from lipscope.attention.scores import Distance
from lipscope.attention.spectral import of_heads, on_ball, product_norm, row_gain, spectral_norm
from lipscope.attention.weighting import Softmax, Weighting

__all__ = [
    "CONSTANT",
    "Attention",
    "Clip",
    "ClippedAttention",
    "Distance",
    "DividedAttention",
    "DotProduct",
    "L2Attention",
    "LipschitzNormAttention",
    "Map",
    "MovingSide",
    "MultiheadAttention",
    "Rotary",
    "ScaledCosineAttention",
    "SigmoidAttention",
    "SinkhornAttention",
    "Softmax",
    "TokenNorm",
    "Weighting",
    "arguments",
    "exact",
    "of_heads",
    "on_ball",
    "phi_inverse",
    "product_norm",
    "row_gain",
    "spectral_norm",
    "transformed",
    "uncast",
    "variant",
    "variants",
]
# Every variant stands here by being registered; names above are for type checkers too.
globals().update(VARIANTS)


class _Room(ModuleType):
    """This room: its name is that of the function, so that it is the function when called."""

    __call__ = staticmethod(attention)


sys.modules[__name__].__class__ = _Room
