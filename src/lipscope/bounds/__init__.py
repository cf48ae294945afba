"""Every bound of the literature and those derived here: one paper, one file."""

from lipscope.bounds.head import Head, heads_of
from lipscope.bounds.theorem import DERIVED, NotApplicableError, Theorem, catalogue, theorem

__all__ = [
    "DERIVED",
    "Head",
    "NotApplicableError",
    "Theorem",
    "catalogue",
    "heads_of",
    "theorem",
]
