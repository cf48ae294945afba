"""Layers that are kept smooth: penalties, constraints, and the signals that a monitor reads."""

from lipscope.control.restrain import restrain
from lipscope.control.restraint import Restraint, restraints
from lipscope.control.signals import entropy_and_sink, largest_logits

__all__ = ["Restraint", "entropy_and_sink", "largest_logits", "restrain", "restraints"]
