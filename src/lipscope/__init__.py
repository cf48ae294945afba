"""lipscope: how much can the output of attention move when its input moves?"""

from lipscope.attention import Attention, DotProductAttention, Rotary
from lipscope.errors import InputError
from lipscope.measure import measure
from lipscope.operator import Operator, linearise, materialise, restrict
from lipscope.record import Measurement
from lipscope.report import Rows
from lipscope.singular import TopSingular, top_singular, top_singular_batch

__all__ = [
    "Attention",
    "DotProductAttention",
    "InputError",
    "Measurement",
    "Operator",
    "Rotary",
    "Rows",
    "TopSingular",
    "linearise",
    "materialise",
    "measure",
    "restrict",
    "top_singular",
    "top_singular_batch",
]
