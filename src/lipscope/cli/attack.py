"""`lipscope attack`: inputs on which a layer is far from smooth, and edits of a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import INPUT, SOLVER, Model, asked, with_options
from lipscope.cli.terminal import Force, bar, errors, resumable, show
from lipscope.errors import InputError
from lipscope.records import Place

if TYPE_CHECKING:
    from lipscope.engine import Attacked

EXAMPLE = "Example: lipscope attack minilm --layer 3 --length 64 --like-text --steps 80"
_ASIDE = "`--budget` edits a text. Found `--steps`, `--like-text` or `--radius` too; leave it out."
_ALONE = "`--{}` goes with edits of a text. Found no `--budget`."


@with_options(
    *INPUT,
    "radius",
    *SOLVER,
    hidden=("windows", "position_offset", "tol", "delta", "dtype", "device", "memory"),
    radius="A number, or norm.",
)
def attack(
    model: Model = "minilm",
    layer: Annotated[int, typer.Option(help="Index of the layer, from 0.")] = 0,
    length: Annotated[int, typer.Option(help="Number of tokens.")] = 64,
    like_text: Annotated[
        bool,
        typer.Option("--like-text", help="Radius of the text.  [default]"),
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Of ascent; 0 for none.  [default: 40]")] = None,
    budget: Annotated[
        int | None, typer.Option(help="Edit this many tokens of the text instead.")
    ] = None,
    recipes: Annotated[
        str | None, typer.Option(help="sigma,hotflip,duplicate,random.  [all]")
    ] = None,
    queries: Annotated[int | None, typer.Option(help="Edited texts to run.  [default: 32]")] = None,
    target: Annotated[
        str | None, typer.Option(help="Or layer: whose output.  [default: model]")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Windows.  [default: 10]")] = None,
    read_out: Annotated[Path | None, typer.Option(help="A decision, as in certify.")] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="The same: the nearest text."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder.  [default: runs/<date>-<model>-attack]"),
    ] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per input on stdout.")
    ] = False,
    **options: Any,
) -> None:
    """Find the inputs that make sigma of a layer large.

    Next to sigma on real text: every construction for every head, then gradient ascent
    from the best of them and from the text; the worst is kept as worst.npz. Some 15 s for
    MiniLM. With --budget, edits of a text. More options: docs/commands.md.
    """
    edits = {"budget": budget, "queries": queries, "target": target, "samples": samples}
    edits |= {"recipes": recipes and recipes.split(","), "read_out": read_out}
    edits |= {"between": between or None}
    edits = {name: value for name, value in edits.items() if value is not None}
    content, given = asked(options)
    if "radius" in given and like_text:
        raise InputError("`--radius` and `--like-text` exclude each other. Found both.")
    both = steps is not None or like_text or "radius" in given
    if both if budget is not None else edits:
        raise InputError(
            _ASIDE if budget is not None else _ALONE.format(sorted(edits)[0].replace("_", "-"))
        )
    place = Place(out, f"{model}-attack", force=force)
    if budget is not None:
        if "images" in given:
            raise InputError("`--budget` edits a text. Found `--images`; leave one out.")
        _edit(model, content, place, layer, length, jsonl, edits | given)
        return
    steps = 40 if steps is None else steps
    from lipscope.engine import attack as run

    with resumable(), bar() as told:
        found = run(
            model,
            content,
            layer=layer,
            length=None if "images" in given else length,
            steps=steps,
            out=place,
            progress=told.update,
            **given,
        )
    if jsonl:
        for line in _lines(found):
            sys.stdout.write(line + "\n")
    else:
        show(found)
    errors.print(f"Worst input: {place.path / 'worst.npz'}", markup=False, soft_wrap=True)


def _edit(
    model: str,
    content: str | None,
    place: Place,
    layer: int,
    length: int,
    jsonl: bool,
    given: dict[str, Any],
) -> None:
    from lipscope.engine import attack_text

    with resumable(), bar() as told:
        found = attack_text(
            model, content, layer=layer, length=length, out=place, progress=told.update, **given
        )
    if jsonl:
        first = found.rows[0]
        about = {"model": first.model, "layer": first.layer, "by": found.by}
        for one in found.edits:
            sys.stdout.write(json.dumps(about | vars(one), ensure_ascii=False) + "\n")
    else:
        show(found)
    errors.print(f"Rows and edits: {place.path}", markup=False, soft_wrap=True)


def _lines(attacked: Attacked) -> Iterator[str]:
    """Every construction for every head, and the ascent."""
    real, worst = attacked.rows
    about = {"model": real.model, "layer": real.layer, "num_tokens": real.num_tokens}
    about |= {"radius": attacked.radius, "radius_text": attacked.given_radius}
    about |= {"sigma_text": real.sigma, "upper_text": real.upper}
    for one in attacked.found:
        plain = {name: value for name, value in vars(one).items() if name not in ("x", "v")}
        if one is attacked.found[0]:  # measured again
            plain |= {"sigma": worst.sigma, "upper": worst.upper}
        yield json.dumps(about | plain, ensure_ascii=False)
