"""Gains of splitting tokens beside moving them, token by token."""

from __future__ import annotations

from dataclasses import dataclass

GAINS = "tokens"
"""The part of the values of a run folder that holds `TokenGain` records."""


@dataclass(frozen=True)
class TokenGain:
    """One token of a window: taken apart, and moved.

    Attributes:
        id: Row of its layer with ``move = copies``.
        layer: Index of the layer.
        sample: Index of the window or entry.
        index: Position in the window, from 0.
        text: The token's text.
        split: Largest gain of moving its copies against each other.
        split_upper: Upper end of its interval.
        moved: Largest gain of moving it alone, copies together.
        moved_upper: Upper end of its interval.
    """

    id: str
    layer: int
    sample: int
    index: int
    text: str
    split: float
    split_upper: float
    moved: float
    moved_upper: float

    @property
    def better_split(self) -> bool:
        """Whether taking it apart is known to gain more than moving it."""
        return self.split > self.moved_upper
