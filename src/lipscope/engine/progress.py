"""Progress reporting: to a function, or as a line in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm import tqdm

from lipscope.errors import InputError
from lipscope.records import Measurement

Tell = Callable[[int, int, Measurement | None], None]
Progress = Tell | bool

_FORMAT = "measuring {bar:30} {n_fmt}/{total_fmt} {elapsed} left {remaining}"


class Bar:
    """A line on standard error; it stays where that is no terminal, as in a notebook.

    What is left is told from the rows that this run has finished, not from those of earlier ones.

    Args:
        shown: Whether there is a line at all.

    Attributes:
        anew: Whether a row was measured, and not read from the folder.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.anew = False
        self._shown = shown
        self._line: tqdm | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def update(self, done: int, total: int, row: Measurement | None) -> None:
        """Move the bar; rows that an earlier run left count as done."""
        self.anew |= row is not None
        if not self._shown:
            return
        if self._line is None:
            stays = not sys.stderr.isatty()
            self._line = tqdm(
                total=total, initial=done, bar_format=_FORMAT, smoothing=0, leave=stays
            )
        self._line.total = total
        self._line.update(done - self._line.n)
        if done >= total:
            self._end()

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None


def told(progress: Progress | None) -> Tell:
    """The receiver of progress: a function, a line for True, nobody for None and False.

    A verb asks once, so that all of its parts move one line.
    """
    if progress is None or progress is False:
        return lambda *_: None
    if progress is True:
        return Bar().update
    if not callable(progress):
        raise InputError(
            "`progress` should be true, or a function of `done`, `total` and the row. Found "
            f"`{type(progress).__name__}`."
        )
    return progress
