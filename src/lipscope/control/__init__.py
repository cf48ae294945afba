"""Layers that contract, blocks that can be inverted, and densities made of them."""

from lipscope.control.contraction import Contraction, ContractiveAttention, ContractiveMLP
from lipscope.control.determinant import LogDeterminant, log_determinant
from lipscope.control.flow import Flow
from lipscope.control.inverse import Inverse, InvertibleResidual, solve

__all__ = [
    "Contraction",
    "ContractiveAttention",
    "ContractiveMLP",
    "Flow",
    "Inverse",
    "InvertibleResidual",
    "LogDeterminant",
    "log_determinant",
    "solve",
]
