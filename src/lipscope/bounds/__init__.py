"""Every bound of the literature and those derived here: one paper, one file."""

from lipscope.bounds.head import Head, heads_of
from lipscope.bounds.theorem import DERIVED, NotApplicable, Theorem, catalogue, theorem

__all__ = [
    "DERIVED",
    "Head",
    "NotApplicable",
    "Theorem",
    "catalogue",
    "heads_of",
    "theorem",
]
