"""`lipscope measure`: sigma of a model's layers on a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import (
    INPUT,
    QUESTION,
    SOLVER,
    THEOREMS,
    Model,
    asked,
    indices,
    with_options,
)
from lipscope.cli.terminal import Force, Screen, bar, errors, resumable
from lipscope.engine import parse_integers
from lipscope.records import Place

if TYPE_CHECKING:
    from lipscope.pages import Rows


EXAMPLE = "Example: lipscope measure minilm --text FILE --lengths 16,64,256 --rest"


@with_options(*INPUT, *QUESTION, *THEOREMS, *SOLVER, hidden=THEOREMS)
def measure(
    model: Model = "minilm",
    layers: Annotated[str, typer.Option(help="all, or 0,3,5 or 0:5.")] = "all",
    lengths: Annotated[str, typer.Option(help="Tokens, or 2:512:10.")] = "16,64,256",
    samples: Annotated[int, typer.Option(help="Windows per length.")] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/<date>-<model>]")
    ] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object a row on stdout.")
    ] = False,
    **options: Any,
) -> None:
    """Measure sigma of attention, with intervals. More options: docs/commands.md."""
    place = Place(out, model, force=force)
    content, given = asked(options)
    pictures = "images" in given
    from lipscope.engine import measure as run

    with resumable(), bar() as told:
        rows = run(
            model,
            content,
            layers=indices(layers, "layers"),
            lengths=None if pictures else parse_integers(lengths, "lengths"),
            samples=samples,
            out=place,
            progress=told.update,
            **given,
        )
    _publish(rows, jsonl=jsonl)
    if told.anew or not any(place.path.glob("*.svg")):
        rows.save(place.path)
    errors.print(f"Rows and figures: {place.path}", markup=False, soft_wrap=True)


def _publish(rows: Rows, *, jsonl: bool) -> None:
    """The table, or the rows, to standard output."""
    if jsonl:
        for row in rows:
            sys.stdout.write(row.to_json() + "\n")
    console = errors if jsonl else Screen()
    console.print(rows.table(), crop=False)
    console.print()
    console.print(rows.summary(), markup=False, soft_wrap=True)
    for remark in _remarks(rows):
        errors.print(remark, markup=False, soft_wrap=True)


def _remarks(rows: Rows) -> list[str]:
    """Each different remark once: bytes for tokens, steps that ran out, dropout."""
    notes = {row.note for row in rows if row.note is not None}
    parts = {part for note in notes for part in note.split("; ") if "frobenius" not in part}
    return sorted(f"Note: {part}." for part in parts)
