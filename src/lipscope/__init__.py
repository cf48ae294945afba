"""lipscope: how much can the output of attention move when its input moves?"""

from lipscope import attacks as inputs
from lipscope.attention import Attention, DotProduct, Rotary
from lipscope.certificates.certify import certify
from lipscope.certificates.decision import certified_radius
from lipscope.engine.bounds import Sandwich, sandwich
from lipscope.engine.capture import capture
from lipscope.engine.measure import measure
from lipscope.engine.sweep import sweep
from lipscope.errors import InputError
from lipscope.linalg.gradient import sigma
from lipscope.linalg.operator import Operator, linearise, restrict, to_dense
from lipscope.linalg.singular import TopSingular, top_singular, top_singular_batch
from lipscope.pages.rows import Rows
from lipscope.records.rows import Measurement
from lipscope.records.run import Run, read_run

__all__ = [
    "Attention",
    "DotProduct",
    "InputError",
    "Measurement",
    "Operator",
    "Rotary",
    "Rows",
    "Run",
    "Sandwich",
    "TopSingular",
    "capture",
    "certified_radius",
    "certify",
    "inputs",
    "linearise",
    "measure",
    "read_run",
    "restrict",
    "sandwich",
    "sigma",
    "sweep",
    "to_dense",
    "top_singular",
    "top_singular_batch",
]
