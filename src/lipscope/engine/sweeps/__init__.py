"""Sweeps: many measurements from one specification, in worker processes or on a cluster.

The specification is expanded into jobs with ids; every finished job is on disk, and the same
request on the same folder continues with the missing jobs.
"""

from lipscope.engine.spec import read_spec
from lipscope.engine.sweeps.driver import Estimate, estimate, sweep

__all__ = ["Estimate", "estimate", "read_spec", "sweep"]
