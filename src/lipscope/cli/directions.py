"""`lipscope directions`: what the worst directions of a layer mean, in the model's words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lipscope.cli.options import INPUT, SOLVER, Model, asked, indices, with_options
from lipscope.cli.terminal import Force, Screen, bar, errors, resumable
from lipscope.records import Place

EXAMPLE = "Example: lipscope directions minilm --layer 3 --length 32 -k 3 --out runs/words"
_WIDTH = 120


@with_options(
    *INPUT,
    *("map", "metric", "move", "read"),
    *SOLVER,
    hidden=("windows", "position_offset", "delta", "dtype", "memory"),
    metric="or token-relative.",
    move="first, last, not-first, a:b.",
)
def directions(
    model: Model = "minilm",
    layers: Annotated[str, typer.Option(help="An index, 0,3, or all.")] = "0",
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    k: Annotated[int, typer.Option("-k", help="Number of directions.")] = 5,
    among: Annotated[
        Path | None,
        typer.Option(help="File, a text a line: which one the output turns to."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per token or head on stdout.")
    ] = False,
    **options: Any,
) -> None:
    """Put the worst directions of a layer in words.

    The leading singular directions, each with an interval: at which tokens they move the
    input and the output, what these moves read as in the vocabulary, the model's logits or
    the other tokens, and which heads carry the answer. More options: docs/commands.md.
    """
    place = None if out is None else Place(out, force=force)
    content, given = asked(options)
    from lipscope.engine import directions as run

    with resumable(), bar() as told:
        found = run(
            model,
            content,
            layer=indices(layers, "layers"),
            k=k,
            among=among,
            length=None if "images" in given else length,
            out=place,
            progress=told.update,
            **given,
        )
    if jsonl:
        for one in found.directions:
            line = vars(one) | {sign: one.words(sign) for sign in ("plus", "minus")}
            line |= {"reads": one.reads, "determined": one.determined}
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    else:
        console = Screen(width=max(_WIDTH, Console().width))
        console.print(found.directions_table())
        for note in sorted({row.note for row in found if row.note}):
            console.print(f"Note: {note}.", markup=False, soft_wrap=True)
    if place is not None:
        errors.print(f"Rows and directions: {place.path}", markup=False, soft_wrap=True)
