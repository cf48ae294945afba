"""Attention layers with closed-form Jacobians; one file per variant.

The module itself is callable: see `lipscope.attention.functional.attention`.
"""

import sys
from types import ModuleType

from lipscope.attention.core import (
    VARIANTS,
    Attention as Attention,
    Distance as Distance,
    InnerProduct as InnerProduct,
    change_of as change_of,
    check_as_written as check_as_written,
    check_layer as check_layer,
    hooks_of as hooks_of,
    joined as joined,
    of_heads as of_heads,
    on_ball as on_ball,
    product_norm as product_norm,
    row_gain as row_gain,
    spectral_norm as spectral_norm,
    transformed as transformed,
    variant as variant,
    variants as variants,
)
from lipscope.attention.functional import attention
from lipscope.attention.kinds.clipped import ClippedAttention as ClippedAttention
from lipscope.attention.kinds.cosine import ScaledCosineAttention as ScaledCosineAttention
from lipscope.attention.kinds.divided import DividedAttention as DividedAttention
from lipscope.attention.kinds.dot_product import DotProduct as DotProduct
from lipscope.attention.kinds.l2 import L2Attention as L2Attention, phi_inverse as phi_inverse
from lipscope.attention.kinds.lipschitz_norm import (
    CONSTANT as CONSTANT,
    LipschitzNormAttention as LipschitzNormAttention,
)
from lipscope.attention.kinds.sigmoid import SigmoidAttention as SigmoidAttention
from lipscope.attention.kinds.sinkhorn import SinkhornAttention as SinkhornAttention
from lipscope.attention.layer import (
    Clip as Clip,
    Map as Map,
    Rotary as Rotary,
    TokenNorm as TokenNorm,
    arguments as arguments,
    exact as exact,
    uncast as uncast,
)
from lipscope.attention.multihead import MultiheadAttention as MultiheadAttention
from lipscope.attention.weighting import Softmax as Softmax, Weighting as Weighting

# Registered variants become names of this module; those above also serve type checkers.
globals().update(VARIANTS)


class _Room(ModuleType):
    """A module that can be called, since the function `attention` shares its name."""

    __call__ = staticmethod(attention)


sys.modules[__name__].__class__ = _Room
