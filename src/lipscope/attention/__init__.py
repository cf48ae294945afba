"""Attention layers with their Jacobian in closed form; one variant is one file."""

from lipscope.attention.core import Attention, Rotary
from lipscope.attention.dot_product import DotProductAttention

__all__ = ["Attention", "DotProductAttention", "Rotary"]
