"""Castin, Ablin and Peyré (2024), "How Smooth Is Attention?": its figures and open points."""

from lipscope.experiments.castin2024 import figure1

__all__ = ["figure1"]
