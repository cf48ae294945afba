"""Layers that are kept smooth, what a monitor reads of them, and blocks that can be inverted."""

from lipscope.control.alarm import (
    PAST,
    WARM,
    Alarm,
    Alert,
    Reading,
    attention_received,
    entropy_and_sink,
    excess_of,
    furthest,
    joint_norm,
    largest_logits,
)
from lipscope.control.invertible import (
    Contraction,
    ContractiveAttention,
    ContractiveMLP,
    Flow,
    Inverse,
    InvertibleResidual,
    LogDeterminant,
    log_determinant,
    solve,
)
from lipscope.control.restraint import Restraint, restrain, restraints

__all__ = [
    "PAST",
    "WARM",
    "Alarm",
    "Alert",
    "Contraction",
    "ContractiveAttention",
    "ContractiveMLP",
    "Flow",
    "Inverse",
    "InvertibleResidual",
    "LogDeterminant",
    "Reading",
    "Restraint",
    "attention_received",
    "entropy_and_sink",
    "excess_of",
    "furthest",
    "joint_norm",
    "largest_logits",
    "log_determinant",
    "restrain",
    "restraints",
    "solve",
]
