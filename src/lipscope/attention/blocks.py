"""Blocks of scores: some heads and rows at a time, with the keys that these rows may read."""

from __future__ import annotations

from dataclasses import dataclass

_FEWEST_ROWS = 128  # of a chunk where heads can be parted instead: shorter products are slow
# A mask of one side is followed in this many steps: each costs calls, and saves half of its
# square. Steps of fewer rows cost more than they save.
_STEPS, _SMALLEST_STEP = 8, 64


@dataclass(frozen=True)
class Block:
    """Some heads and rows, and the keys that these rows may read."""

    heads: slice
    rows: slice
    keys: slice
    index: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of heads, rows and keys."""
        return tuple(s.stop - s.start for s in (self.heads, self.rows, self.keys))

    @property
    def size(self) -> int:
        """Number of scores."""
        heads, rows, keys = self.shape
        return heads * rows * keys


def parted(
    heads: int,
    n: int,
    m: int,
    limit: int,
    *,
    causal: bool = False,
    window: int | None = None,
    all_rows: bool = False,
) -> list[Block]:
    """Blocks of at most ``limit`` scores, or the fewest rows of one head.

    Args:
        heads: Number of heads.
        n: Number of rows.
        m: Number of keys.
        limit: Scores of a block.
        causal: Row i reads keys j <= i only.
        window: Row i reads keys j > i - window only.
        all_rows: Whether a block needs all rows of its heads.
    """
    fewest = n if all_rows else min(n, _FEWEST_ROWS)
    together = max(1, min(heads, limit // (m * max(1, fewest))))
    rows = max(1, min(n, limit // (m * together)))
    if causal:
        rows = min(rows, max(_SMALLEST_STEP, -(-n // _STEPS)))
    if window is not None:
        rows = min(rows, max(_SMALLEST_STEP, window // _STEPS))
    if all_rows:
        rows = n
    found: list[Block] = []
    for h in range(0, heads, together):
        for i in range(0, n, rows):
            chunk = slice(i, min(i + rows, n))
            part = slice(h, min(h + together, heads))
            found.append(Block(part, chunk, reach(chunk, m, causal, window), len(found)))
    return found


def reach(rows: slice, num_keys: int, causal: bool, window: int | None) -> slice:
    """The keys that some of these rows may read: causal layers and windows see no others."""
    last = min(rows.stop, num_keys) if causal else num_keys
    first = 0 if window is None else rows.start - window + 1
    return slice(min(max(first, 0), last - 1), last)
