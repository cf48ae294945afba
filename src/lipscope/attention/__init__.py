"""Attention layers with their Jacobian in closed form; one variant is one file.

Called, ``lipscope.attention(q, k, v)`` is the function `lipscope.attention.functional.attention`.
"""

import sys
from types import ModuleType

from lipscope.attention.core import VARIANTS
from lipscope.attention.core import Attention as Attention
from lipscope.attention.core import transformed as transformed
from lipscope.attention.core import variant as variant
from lipscope.attention.core import variants as variants
from lipscope.attention.functional import attention
from lipscope.attention.kinds.clipped import ClippedAttention as ClippedAttention
from lipscope.attention.kinds.cosine import ScaledCosineAttention as ScaledCosineAttention
from lipscope.attention.kinds.divided import DividedAttention as DividedAttention
from lipscope.attention.kinds.dot_product import DotProduct as DotProduct
from lipscope.attention.kinds.l2 import L2Attention as L2Attention
from lipscope.attention.kinds.l2 import phi_inverse as phi_inverse
from lipscope.attention.kinds.lipschitz_norm import CONSTANT as CONSTANT
from lipscope.attention.kinds.lipschitz_norm import LipschitzNormAttention as LipschitzNormAttention
from lipscope.attention.kinds.sigmoid import SigmoidAttention as SigmoidAttention
from lipscope.attention.kinds.sinkhorn import SinkhornAttention as SinkhornAttention
from lipscope.attention.layer import Clip as Clip
from lipscope.attention.layer import Map as Map
from lipscope.attention.layer import MovingSide as MovingSide
from lipscope.attention.layer import Rotary as Rotary
from lipscope.attention.layer import TokenNorm as TokenNorm
from lipscope.attention.layer import arguments as arguments
from lipscope.attention.layer import exact as exact
from lipscope.attention.layer import uncast as uncast
from lipscope.attention.multihead import MultiheadAttention as MultiheadAttention
from lipscope.attention.scores import Distance as Distance
from lipscope.attention.spectral import of_heads as of_heads
from lipscope.attention.spectral import on_ball as on_ball
from lipscope.attention.spectral import product_norm as product_norm
from lipscope.attention.spectral import row_gain as row_gain
from lipscope.attention.spectral import spectral_norm as spectral_norm
from lipscope.attention.weighting import Softmax as Softmax
from lipscope.attention.weighting import Weighting as Weighting

# Every variant stands here by being registered; names above are for type checkers too.
globals().update(VARIANTS)


class _Room(ModuleType):
    """This room: its name is that of the function, so that it is the function when called."""

    __call__ = staticmethod(attention)


sys.modules[__name__].__class__ = _Room
