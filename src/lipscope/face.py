"""The public names of `lipscope`: the verbs, sigma, linearise, the variants, the records."""

import lipscope.dynamics  # noqa: F401  (what prompts and notebooks show)
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
from lipscope.attention.core import VARIANTS
from lipscope.attention.functional import attention
from lipscope.control import Restraint, restrain
from lipscope.engine.monitor import Monitor
from lipscope.engine.open_model import LayerAtInput, OpenModel, load_model
from lipscope.engine.sweeps import sweep
from lipscope.engine.verbs.attack import attack, attack_text
from lipscope.engine.verbs.certify import certify
from lipscope.engine.verbs.decisions import certify_decision
from lipscope.engine.verbs.measure import bounds, directions, measure
from lipscope.engine.verbs.push import Pushed, push
from lipscope.engine.verbs.smooth import Smoothed, smooth
from lipscope.engine.verbs.split import split
from lipscope.errors import InputError
from lipscope.linalg.gradient import sigma
from lipscope.linalg.operator import Operator, linearise, to_dense
from lipscope.linalg.singular import TopSingular, top_singular
from lipscope.pages.rows import Rows, report
from lipscope.records.folder import Run, read_run
from lipscope.records.rows import Bound, Direction, Measurement, TokenShare
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
    "LayerAtInput",
    "LipschitzNormAttention",
    "Measurement",
    "Monitor",
    "MultiheadAttention",
    "OpenModel",
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
    "catalogue",
    "certify",
    "certify_decision",
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
    "variants",
]
# Variants by being registered, as in `lipscope.attention`.
globals().update(VARIANTS)
