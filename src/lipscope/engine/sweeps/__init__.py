"""Sweeps: many measurements from one specification, in worker processes or on a cluster.

The specification becomes jobs with ids of their own; every finished job is on the disk, and
the same request on the same folder goes on with what is missing.
"""

from lipscope.engine.spec import Spec
from lipscope.engine.sweeps.driver import Estimate, estimate, sweep
from lipscope.engine.sweeps.spec_file import read_spec

__all__ = ["Estimate", "Spec", "estimate", "read_spec", "sweep"]
