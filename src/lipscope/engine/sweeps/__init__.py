"""Sweeps: many measurements from one specification, in worker processes or on a cluster.

The specification becomes jobs with ids of their own; every finished job is on the disk, and
the same request on the same folder goes on with what is missing.
"""

from lipscope.engine.spec import read_spec
from lipscope.engine.sweeps.driver import Estimate, estimate, sweep

__all__ = ["Estimate", "estimate", "read_spec", "sweep"]
