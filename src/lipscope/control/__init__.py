"""Layers that are kept smooth, what a monitor reads of them, and blocks that can be inverted."""

from lipscope.control.alarm import PAST, WARM, Alarm, Alert, excess_of
from lipscope.control.contraction import Contraction, ContractiveAttention, ContractiveMLP
from lipscope.control.determinant import LogDeterminant, log_determinant
from lipscope.control.flow import Flow
from lipscope.control.inverse import Inverse, InvertibleResidual, solve
from lipscope.control.restrain import restrain
from lipscope.control.restraint import Restraint, restraints
from lipscope.control.signals import (
    Reading,
    attention_received,
    entropy_and_sink,
    furthest,
    joint_norm,
    largest_logits,
)

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
