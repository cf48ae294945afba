"""What commands share: where they write, how they read text, a progress bar, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lipscope import interrupts
from lipscope.charts.pieces import printable

if TYPE_CHECKING:
    from lipscope.records.rows import Measurement


class Screen(Console):
    """A console that shows text as it is: no ``:llama:`` as a picture, no escape code obeyed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; control characters in text as their pictures."""
        super().print(*map(printable, objects), **options)


errors = Screen(stderr=True)


def read_text(path: str | None) -> str | None:
    """The text of a file or of standard input, which must be UTF-8."""
    if path is None:
        return None
    from lipscope.models.data import windows

    if path == "-":
        return windows.decoded(sys.stdin.buffer.read(), "`--text`", "standard input")
    return windows.read_text(path, "`--text`")


Force = Annotated[bool, typer.Option("--force", help="Replace a run of another question.")]


@contextmanager
def resumable() -> Iterator[None]:
    """End an interrupted run with advice; typer would end it without a word.

    Not before what it runs is imported: torch swallows an interrupt while it imports numpy, which
    cannot be imported a second time.
    """
    interrupts.as_usual()
    try:
        yield
    except KeyboardInterrupt:
        errors.print("Stopped. What is finished is kept; the same command goes on from there.")
        raise typer.Exit(130) from None


_ALWAYS = 1e9  # seconds: what is left is told from all rows that this run has finished


class Bar:
    """A progress bar on standard error, silent where that is no terminal.

    What is left is told from the rows that this run has finished, not from those of earlier ones.

    Attributes:
        anew: Whether a row was measured, and not read from the folder.
    """

    def __init__(self) -> None:
        self.anew = False
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("measuring"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=errors,
                transient=True,
                speed_estimate_period=_ALWAYS,
            )
        self._task: Any = None

    def __enter__(self) -> Bar:
        self._context().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def _context(self) -> AbstractContextManager[Any]:
        return self._bar if self._bar is not None else nullcontext()

    def update(self, done: int, total: int, row: Measurement | None) -> None:
        """Move the bar; rows that an earlier run left count as done."""
        self.anew |= row is not None
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done)
