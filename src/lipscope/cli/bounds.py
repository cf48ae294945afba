"""`lipscope bounds`: every theorem about a layer, next to its measured sigma."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lipscope.cli.options import INPUT, SOLVER, Model, asked, indices, with_options
from lipscope.cli.terminal import Force, Screen, bar, errors, resumable
from lipscope.engine import parse_integers
from lipscope.records import ADVERSARIAL, MEASURED, Place, by_row, given, looseness

if TYPE_CHECKING:
    from lipscope.pages import Rows

EXAMPLE = "Example: lipscope bounds minilm --layer 3 --length 64 --radius norm"
_WIDTH = 110
_PLACE = ("model", "layer", "head", "map", "num_tokens", "sample")
_ASKED = ("map", "per_head", "metric", "radius", "theorems", "sharp", "ascent_steps")


@with_options(
    *INPUT,
    *_ASKED,
    *SOLVER,
    hidden=("windows", "position_offset", "delta", "memory"),
    map="or heads, normed, residual.",
    per_head="Each query head alone.",
    metric="Only in this metric, measured in it too.",
    radius="A number, norm, or row (the input's own).",
    theorems="Only these.",
)
def bounds(
    model: Model = "minilm",
    layers: Annotated[str, typer.Option(help="An index, 0,3, or all.")] = "0",
    lengths: Annotated[str, typer.Option(help="Tokens, or 16,64,128.")] = "64",
    samples: Annotated[int, typer.Option(help="Windows per length.")] = 1,
    attack: Annotated[
        bool, typer.Option("--attack", help="Also the worst input within the radius.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder for rows, bounds and figure.")
    ] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per row on stdout, no table.")
    ] = False,
    **options: Any,
) -> None:
    """Every bound of a layer next to its sigma.

    Every theorem that applies, with its value, source and looseness against the measured
    sigma (same metric and map), and those that do not, with the reason. More
    options: docs/commands.md.
    """
    place = None if out is None else Place(out, force=force)
    content, wanted = asked(options)
    pictures = "images" in wanted
    from lipscope.engine import bounds as run

    with resumable(), bar() as told:
        found = run(
            model,
            content,
            layers=indices(layers, "layers"),
            lengths=None if pictures else parse_integers(lengths, "lengths"),
            samples=samples,
            attack=attack,
            out=place,
            progress=told.update,
            **wanted,
        )
    if jsonl:
        _write(found)
    else:
        # At least as wide as the table needs: a pipe counts as 80 columns.
        console = Screen(width=max(_WIDTH, Console().width))
        console.print(found.bounds_table())
    if out is not None:
        if told.anew or not any(Path(out).glob("*.svg")):
            found.save(out)
        errors.print(f"Rows and figure: {out}", markup=False, soft_wrap=True)


def _write(found: Rows) -> None:
    """A line for each row, then one for each of its bounds, which says of what it speaks."""
    of = by_row(found.bounds)
    for row in found:
        lines = [{"theorem": MEASURED if given(row) else ADVERSARIAL} | row.to_dict()]
        place = {name: getattr(row, name) for name in _PLACE}
        for bound in of.get(row.id, []):
            more = {"applicable": bound.applicable, "looseness": looseness(bound, row)}
            lines.append(vars(bound) | place | more)
        sys.stdout.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
