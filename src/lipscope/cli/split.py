"""`lipscope split`: which tokens of a text are better taken apart than moved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import INPUT, SOLVER, Model, asked, indices, with_options
from lipscope.cli.terminal import Force, bar, errors, resumable, show
from lipscope.records import Place

if TYPE_CHECKING:
    from lipscope.engine import Splitting

EXAMPLE = "Example: lipscope split minilm --layers 0,3 --length 32 --out runs/split"
_STEM = "split"


@with_options(
    *INPUT,
    "map",
    *SOLVER,
    hidden=("windows", "position_offset", "images", "delta", "memory"),
    map="or heads.",
)
def split(
    model: Model = "minilm",
    layers: Annotated[str, typer.Option(help="An index, 0,3, or all.")] = "0",
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="Run folder for rows, tokens and figure.")
    ] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per token on stdout.")
    ] = False,
    **options: Any,
) -> None:
    """Compare moving tokens with taking them apart.

    Two halves of a token that move against each other can change the output more than any
    move of whole tokens (mass splitting). For every layer and head sigma and the largest
    gain of splitting one token; for every token of the window both of its own. More
    options: docs/commands.md.
    """
    place = None if out is None else Place(out, force=force)
    content, given = asked(options)
    from lipscope.engine import split as run

    with resumable(), bar() as told:
        found = run(
            model,
            content,
            layers=indices(layers, "layers"),
            length=None if "images" in given else length,
            out=place,
            progress=told.update,
            **given,
        )
    if jsonl:
        for one in found.tokens:
            line = vars(one) | {"better_split": one.better_split}
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    else:
        show(found)
    if place is not None:
        if told.anew or not (place.path / f"{_STEM}.svg").exists():
            _draw(found, place.path)
        errors.print(f"Rows and figure: {place.path}", markup=False, soft_wrap=True)


def _draw(found: Splitting, folder: Path) -> None:
    """Gains of every token, layer by layer, beside sigma of the layer."""
    from lipscope.charts import Panel, Series, curves_chart, save_each

    panels = []
    for row in found.moved:
        mine = [t for t in found.tokens if (t.layer, t.sample) == (row.layer, row.sample)]
        if row.head is not None or row.sigma is None or not mine:
            continue
        ends = (0, len(mine) - 1)
        panels.append(
            Panel(
                f"layer {row.layer}",
                (
                    Series("one token moved", tuple((t.index, t.moved) for t in mine), "points"),
                    Series("one token split", tuple((t.index, t.split) for t in mine), "points"),
                    Series("sigma", tuple((x, row.sigma) for x in ends), "dashes"),
                ),
                x="token",
                y="gain",
                log_x=False,
            )
        )
    if panels:
        chart = curves_chart(f"{found.moved[0].model}: tokens split and moved", panels)
        save_each(chart, [folder / f"{_STEM}.{kind}" for kind in ("svg", "png")])
