"""Attention layers with their Jacobian in closed form; one variant is one file."""

from lipscope.attention.core import Attention
from lipscope.attention.dot_product import DotProductAttention
from lipscope.attention.projections import Rotary

__all__ = ["Attention", "DotProductAttention", "Rotary"]
