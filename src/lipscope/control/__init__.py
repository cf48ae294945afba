"""Layers that are kept smooth: penalties, constraints, and the signals that a monitor reads."""

from lipscope.control.restrain import restrain
from lipscope.control.restraint import Restraint, restraints

__all__ = ["Restraint", "restrain", "restraints"]
