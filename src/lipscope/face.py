"""What `lipscope` offers: the verbs, sigma, linearise, the variants, the records."""

import lipscope.dynamics
import lipscope.pages.notebook  # noqa: F401  (what notebooks show)
from lipscope.attention import (
    Attention,
    ClippedAttention,
    DividedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    MultiheadAttention,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    variants,
)
from lipscope.attention.functional import attention
from lipscope.control import Restraint, restrain
from lipscope.engine.attack import attack
from lipscope.engine.bounds import bounds
from lipscope.engine.capture import capture
from lipscope.engine.certify import certify
from lipscope.engine.directions import directions
from lipscope.engine.measure import measure
from lipscope.engine.monitor import Monitor
from lipscope.engine.push import Pushed, push
from lipscope.engine.smooth import Smoothed, smooth
from lipscope.engine.split import split
from lipscope.engine.sweep import sweep
from lipscope.engine.text import attack_text
from lipscope.errors import InputError
from lipscope.linalg.gradient import sigma
from lipscope.linalg.operator import Operator, linearise, to_dense
from lipscope.linalg.singular import TopSingular, top_singular
from lipscope.models import load_model
from lipscope.pages.report import report
from lipscope.pages.rows import Rows
from lipscope.records.rows import Bound, Direction, Measurement, TokenShare
from lipscope.records.run import Run, read_run
from lipscope.theorems import catalogue

__all__ = [
    "Attention",
    "Bound",
    "ClippedAttention",
    "Direction",
    "DividedAttention",
    "DotProduct",
    "InputError",
    "L2Attention",
    "LipschitzNormAttention",
    "Measurement",
    "Monitor",
    "MultiheadAttention",
    "Operator",
    "Pushed",
    "Restraint",
    "Rows",
    "Run",
    "ScaledCosineAttention",
    "SigmoidAttention",
    "SinkhornAttention",
    "Smoothed",
    "TokenShare",
    "TopSingular",
    "attack",
    "attack_text",
    "attention",
    "bounds",
    "capture",
    "catalogue",
    "certify",
    "directions",
    "linearise",
    "load_model",
    "measure",
    "push",
    "read_run",
    "report",
    "restrain",
    "sigma",
    "smooth",
    "split",
    "sweep",
    "to_dense",
    "top_singular",
]
# Variants by being registered, as in `lipscope.attention`.
globals().update({one.__name__: one for one in variants()})
