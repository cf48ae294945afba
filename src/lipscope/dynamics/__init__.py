"""Dynamics of tokens under attention: particle flows, Gaussian closures, clusters, depth."""

from lipscope.dynamics.depth import (
    Depth as Depth,
    sigma_along as sigma_along,
    sigma_of_blocks as sigma_of_blocks,
    sigma_through as sigma_through,
)
from lipscope.dynamics.gaussian import (
    GaussianTrajectory as GaussianTrajectory,
    closure as closure,
    gaussian_flow as gaussian_flow,
)
from lipscope.dynamics.integrate import Event as Event, Happened as Happened
from lipscope.dynamics.particles import (
    Clusters as Clusters,
    Phase as Phase,
    Trajectory as Trajectory,
    clusters as clusters,
    consensus as consensus,
    diameter as diameter,
    evolve as evolve,
    leaders as leaders,
    outgrows as outgrows,
    phases as phases,
    residual as residual,
)
