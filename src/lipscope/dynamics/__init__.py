"""Tokens that flow through attention: particles, normal laws, clusters, and sigma along depth."""

from lipscope.dynamics.depth import Depth, sigma_along, sigma_of_blocks, sigma_through
from lipscope.dynamics.gaussian import GaussianTrajectory, closure, gaussian_flow
from lipscope.dynamics.integrate import Event, Happened
from lipscope.dynamics.particles import (
    Clusters,
    Phase,
    Trajectory,
    clusters,
    consensus,
    diameter,
    evolve,
    leaders,
    outgrows,
    phases,
    residual,
)

__all__ = [
    "Clusters",
    "Depth",
    "Event",
    "GaussianTrajectory",
    "Happened",
    "Phase",
    "Trajectory",
    "closure",
    "clusters",
    "consensus",
    "diameter",
    "evolve",
    "gaussian_flow",
    "leaders",
    "outgrows",
    "phases",
    "residual",
    "sigma_along",
    "sigma_of_blocks",
    "sigma_through",
]
