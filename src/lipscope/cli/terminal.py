"""The terminal: output, text, progress and errors of all commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lipscope.cli import interrupts
from lipscope.display import printable

if TYPE_CHECKING:  # not at run time: it brings torch
    from lipscope.engine import Bar


class Screen(Console):
    """A console that shows text as it is: no ``:llama:`` as a picture, no escape code obeyed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; control characters in text as their pictures."""
        super().print(*map(printable, objects), **options)


errors = Screen(stderr=True)


def show(result: Any) -> None:
    """What a verb found: its tables, at least as wide as they need, and its sentences."""
    from rich.table import Table

    from lipscope.display import pieces, width_of

    for piece in pieces(result):
        # A pipe counts as 80 columns.
        if isinstance(piece, Table):
            Screen(width=max(width_of(piece), Console().width)).print(piece)
        elif isinstance(piece, str):
            Screen().print(piece, markup=False, soft_wrap=True)


def read_text(path: str | None) -> str | None:
    """The text of a file, a folder or standard input, which must be UTF-8."""
    if path is None:
        return None
    from lipscope.models import decode_text, read_texts

    if path == "-":
        return decode_text(sys.stdin.buffer.read(), "`--text`", "standard input")
    return read_texts(path, "`--text`")


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


def bar() -> Bar:
    """Progress reporting, silent where standard error is no terminal."""
    from lipscope.engine import Bar

    return Bar(shown=sys.stderr.isatty())
