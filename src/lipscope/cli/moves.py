"""`lipscope attack` and `lipscope push`: inputs, texts and moves on which a layer is not smooth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import INPUT, SOLVER, Model, ask, with_options
from lipscope.cli.terminal import note, show, write_lines
from lipscope.errors import InputError

if TYPE_CHECKING:
    from lipscope.engine import Attacked
    from lipscope.pages import Push

_EDITS = ("budget", "recipes", "queries", "target", "samples", "read_out", "between")
_ASIDE = "`--budget` edits a text. Found `--steps`, `--like-text` or `--radius` too; leave it out."
_ALONE = "`--{}` goes with edits of a text. Found no `--budget`."


@with_options(
    *("layer", "length", "read_out", "between", *INPUT, "radius", *SOLVER),
    hidden=("windows", "position_offset", "tol", "delta", "dtype", "device", "memory"),
    radius="A number, or norm.",
    out="Run folder.  [default: runs/<date>-<model>-attack]",
    like_text=(bool, False, "Radius of the text.  [default]"),
    steps=(int, None, "Of ascent; 0 for none.  [default: 40]"),
    budget=(int, None, "Edit this many tokens of the text instead."),
    recipes=(str, None, "sigma,hotflip,duplicate,random.  [all]"),
    queries=(int, None, "Edited texts to run.  [default: 32]"),
    target=(str, None, "Or layer: whose output.  [default: model]"),
    samples=(int, None, "Windows.  [default: 10]"),
    jsonl="input",
)
def attack(model: Model = "minilm", **options: Any) -> None:
    """Find the inputs that make sigma of a layer large.

    Next to sigma on real text: every construction for every head, then gradient ascent
    from the best of them and from the text; the worst is kept as worst.npz. Some 15 s for
    MiniLM. With --budget, edits of a text. More options: docs/commands.md.
    """
    steps, like_text, radius = options.pop("steps"), options.pop("like_text"), options["radius"]
    edits = {name: options.pop(name) for name in _EDITS}
    edits = {name: value for name, value in edits.items() if value not in (None, [])}
    budget = edits.get("budget")
    if radius is not None and like_text:
        raise InputError("`--radius` and `--like-text` exclude each other. Found both.")
    if budget is not None and (steps is not None or like_text or radius is not None):
        raise InputError(_ASIDE)
    if budget is None and edits:
        raise InputError(_ALONE.format(sorted(edits)[0].replace("_", "-")))
    if budget is not None:
        if "recipes" in edits:
            edits["recipes"] = edits["recipes"].split(",")
        if options["images"] is not None:
            raise InputError("`--budget` edits a text. Found `--images`; leave one out.")
        found, folder, _ = ask("attack_text", model, options, f"{model}-attack", **edits)
        first = found.rows[0]
        about = {"model": first.model, "layer": first.layer, "by": found.by}
        lines, kept = (about | vars(one) for one in found.edits), f"Rows and edits: {folder}"
    else:
        steps = 40 if steps is None else steps
        found, folder, _ = ask("attack", model, options, f"{model}-attack", steps=steps)
        lines, kept = _tried_inputs(found), f"Worst input: {folder / 'worst.npz'}"
    if options["jsonl"]:
        write_lines(lines)
    else:
        show(found)
    note(kept)


def _tried_inputs(attacked: Attacked) -> Iterator[dict[str, Any]]:
    """Every construction for every head, and the ascent."""
    real, worst = attacked.rows
    about = {"model": real.model, "layer": real.layer, "num_tokens": real.num_tokens}
    about |= {"radius": attacked.radius, "radius_text": attacked.given_radius}
    about |= {"sigma_text": real.sigma, "upper_text": real.upper}
    for one in attacked.found:
        plain = {name: value for name, value in vars(one).items() if name not in ("x", "v")}
        if one is attacked.found[0]:  # measured again
            plain |= {"sigma": worst.sigma, "upper": worst.upper}
        yield about | plain


@with_options(
    *("layer", "length", "among", "between", "read_out", "pool", *INPUT, "map", *SOLVER),
    hidden=("windows", "position_offset", "tol", "delta", "device", "memory"),
    map="attention|normed|residual|block|stack|model",
    out="Run folder for rows, sizes and figure.",
    jsonl="move",
)
def push(
    model: Model = "minilm",
    eps: Annotated[str | None, typer.Option(help="Sizes by commas.  [default: up to ‖X‖]")] = None,
    draws: Annotated[int, typer.Option(help="Random directions.")] = 3,
    certificate: Annotated[
        bool | None, typer.Option(help="Certify changes; unset: up to a minute.")
    ] = None,
    **options: Any,
) -> None:
    """Push a layer's input, and see where sigma ends.

    The input moves along the top singular vector, its top token alone, and at random; the
    model runs on as it is. Beside what happens: sigma · size, and a certificate for every
    move. A decoder says its next tokens, --among the nearest text. More options:
    docs/commands.md.
    """
    sizes = None if eps is None else _numbers(eps)
    more = {"eps": sizes, "draws": draws, "certificate": certificate}
    found, folder, anew = ask("push", model, options, **more)
    from lipscope.pages import pushes_in

    pushes = pushes_in(found.rows, found.places, found.directions, found.steps)
    if options["jsonl"]:
        write_lines(vars(step) | {"reads": json.loads(step.reads)} for step in found.steps)
    else:
        show(found)
    if folder is not None:
        _draw_pushes(pushes, folder, anew=anew)
        note(f"Rows, sizes and figure: {folder}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as problem:
        one = str(problem).partition(": '")[2][:-1]
        raise InputError(f"`--eps` should be numbers by commas. Found `{one}`.") from None


def _draw_pushes(pushes: list[Push], folder: Path, *, anew: bool) -> None:
    from lipscope.charts import save_each
    from lipscope.pages import push_charts

    for name, chart in push_charts(pushes):
        paths = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
        if missing := [path for path in paths if anew or not path.exists()]:
            save_each(chart, missing)
