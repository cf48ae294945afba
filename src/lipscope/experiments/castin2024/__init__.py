"""Castin, Ablin and Peyré (2024), "How Smooth Is Attention?": its figures and open points."""

from lipscope.experiments.castin2024 import (
    figure1,
    figure2,
    figure3,
    figure4,
    large_radius,
    long_context,
    looseness,
    mean_field,
    robustness,
    scaling_factor,
)

__all__ = [
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "large_radius",
    "long_context",
    "looseness",
    "mean_field",
    "robustness",
    "scaling_factor",
]
