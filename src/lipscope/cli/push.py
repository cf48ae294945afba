"""`lipscope push`: a layer's input moved along its worst direction, in the model as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import INPUT, SOLVER, Model, asked, with_options
from lipscope.cli.terminal import Force, bar, errors, resumable, show
from lipscope.errors import InputError
from lipscope.records import Place

if TYPE_CHECKING:
    from lipscope.pages import Push

EXAMPLE = "Example: lipscope push smollm2 --layer 5 --length 32 --map block --out runs/push"


@with_options(
    *INPUT,
    "map",
    *SOLVER,
    hidden=("windows", "position_offset", "tol", "delta", "device", "memory"),
    map="attention|normed|residual|block|stack|model",
)
def push(
    model: Model = "minilm",
    layer: Annotated[int, typer.Option(help="Index of the layer, from 0.")] = 0,
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    eps: Annotated[str | None, typer.Option(help="Sizes by commas.  [default: up to ‖X‖]")] = None,
    draws: Annotated[int, typer.Option(help="Random directions.")] = 3,
    among: Annotated[
        Path | None, typer.Option(help="File, a text a line: the nearest is read.")
    ] = None,
    between: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A decision, as in certify.")
    ] = None,
    read_out: Annotated[Path | None, typer.Option(help="The same: a matrix in a file.")] = None,
    pool: Annotated[str, typer.Option(help="Pool by mean or first.")] = "mean",
    certificate: Annotated[
        bool | None, typer.Option(help="Certify changes; unset: up to a minute.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder for rows, sizes and figure.")] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per move on stdout.")
    ] = False,
    **options: Any,
) -> None:
    """Push a layer's input, and see where sigma ends.

    The input moves along the top singular vector, its top token alone, and at random; the
    model runs on as it is. Beside what happens: sigma · size, and a certificate for every
    move. A decoder says its next tokens, --among the nearest text. More options:
    docs/commands.md.
    """
    content, given = asked(options)
    sizes = None if eps is None else [_number(one) for one in eps.split(",")]
    place = None if out is None else Place(out, force=force)
    from lipscope.engine import push as run
    from lipscope.pages import pushes_in

    with resumable(), bar() as told:
        found = run(
            model,
            content,
            layer=layer,
            length=None if "images" in given else length,
            eps=sizes,
            draws=draws,
            among=among,
            between=between or None,
            read_out=read_out,
            pool=pool,  # pyright: ignore[reportArgumentType]
            certificate=certificate,
            out=place,
            progress=told.update,
            **given,
        )
    pushes = pushes_in(found.rows, found.places, found.directions, found.steps)
    if jsonl:
        for step in found.steps:
            line = vars(step) | {"reads": json.loads(step.reads)}
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    else:
        show(found)
    if place is not None:
        _draw(pushes, place.path, anew=told.anew)
        errors.print(f"Rows, sizes and figure: {place.path}", markup=False, soft_wrap=True)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`--eps` should be numbers by commas. Found `{text}`.") from None


def _draw(pushes: list[Push], folder: Path, *, anew: bool) -> None:
    from lipscope.charts import save_each
    from lipscope.pages import push_charts

    for name, chart in push_charts(pushes):
        paths = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
        if missing := [path for path in paths if anew or not path.exists()]:
            save_each(chart, missing)
