"""lipscope: how much can the output of attention move when its input moves?"""

from lipscope import inputs
from lipscope.attention import Attention, DotProduct, Rotary

# Three functions bear the names of modules: they are imported from where those modules are
# loaded already, so that no later import can put a module in their place.
from lipscope.bounds import bounds
from lipscope.captured import capture
from lipscope.certify import certify
from lipscope.decision import certified_radius
from lipscope.errors import InputError
from lipscope.gradient import sigma
from lipscope.measure import measure
from lipscope.operator import Operator, linearise, materialise, restrict
from lipscope.record import Measurement
from lipscope.report import Rows
from lipscope.run import Run, read_run
from lipscope.sandwich import Sandwich, sandwich
from lipscope.singular import TopSingular, top_singular, top_singular_batch
from lipscope.sweep import sweep

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
    "bounds",
    "capture",
    "certified_radius",
    "certify",
    "inputs",
    "linearise",
    "materialise",
    "measure",
    "read_run",
    "restrict",
    "sandwich",
    "sigma",
    "sweep",
    "top_singular",
    "top_singular_batch",
]
