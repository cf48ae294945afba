"""`lipscope certify`: how far outputs can move while the input stays in a ball."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import INPUT, SOLVER, Model, asked, with_options
from lipscope.cli.terminal import Force, Screen, bar, errors, resumable
from lipscope.errors import InputError
from lipscope.records import Place

if TYPE_CHECKING:
    from lipscope.engine import CertifiedBall, CertifiedDecision

EXAMPLE = "Example: lipscope certify minilm --layer 3 --length 32 --eps 0.01"
_EPS = 0.01
_BALLS, _POOLS = ("token", "frobenius"), ("mean", "first")
_FORMS = {
    "sum": "the sum of their bounds",
    "projection": "the norm of the output projection",
    "joint": "one bound of the whole layer",
    "expansion": "a bound of sigma at X, and one of what is of second order",
}
_HIDDEN = ("windows", "position_offset", "device", "dtype", "delta", "tol")


@with_options(*INPUT, "map", *SOLVER, hidden=(*_HIDDEN, "images", "memory"), map="or heads.")
def certify(
    model: Model = "minilm",
    layer: Annotated[int, typer.Option(help="Index of the layer, from 0.")] = 0,
    eps: Annotated[float | None, typer.Option(help="Radius of the ball.  [default: 0.01]")] = None,
    ball: Annotated[
        str | None,
        typer.Option(
            help="token: each token moves by eps; frobenius: all together.  [default: token; both]"
        ),
    ] = None,
    read_out: Annotated[
        Path | None,
        typer.Option(help="A decision: matrix in .npy or .safetensors."),
    ] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="The same: the nearest of these texts at this layer, one option each.",
        ),
    ] = None,
    pool: Annotated[str, typer.Option(help="Pool by mean or first.")] = "mean",
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    head: Annotated[int | None, typer.Option(help="One query head alone.  [default: all]")] = None,
    steps: Annotated[int | None, typer.Option(help="Radii of the bound.  [default: 4; 8]")] = None,
    sharp: Annotated[
        bool | None, typer.Option(help="Sharpest bound, slow; unset: up to seconds.")
    ] = None,
    random: Annotated[int, typer.Option(help="Random points of the attack.")] = 20,
    ascents: Annotated[int, typer.Option(help="Ascents of each kind.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Run folder for the row, and worst inputs.")
    ] = None,
    force: Force = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per ball on stdout.")
    ] = False,
    **options: Any,
) -> None:
    """Bound all moves in a ball around a text.

    Certify L with ‖f(X') − f(X)‖ ≤ L ‖X' − X‖ for every X' in the ball, then attack it:
    the largest ratio found inside the ball must stay below L. Some 15 s for MiniLM. With
    --read-out or --between: the radius within which a decision on the pooled output cannot
    change. More options: docs/commands.md.
    """
    deciding = read_out is not None or bool(between)
    content, given = asked(options)
    if deciding and (eps is not None or head is not None or given["map"] != "attention"):
        raise InputError(
            "A decision has its own radius and reads the whole layer. Found `--eps`, `--head` or "
            "`--map` beside `--read-out` or `--between`; leave them out."
        )
    for option, value, known in (("ball", ball, _BALLS), ("pool", pool, _POOLS)):
        if value not in (None, *known):
            raise InputError(f"`{option}` should be {' or '.join(known)}. Found `{value}`.")
    from lipscope.cli import decision
    from lipscope.engine import certify as certify_ball
    from lipscope.engine import certify_decision

    length_of = None if "images" in given else length
    place = {"layer": layer, "length": length_of, "random": random, "ascents": ascents} | given
    with resumable(), bar() as told:
        place |= {"out": None if out is None else Place(out, force=force), "progress": told.update}
        found: list[Any]
        if deciding:
            how: dict[str, Any] = {"pool": pool, "steps": 8 if steps is None else steps}
            how |= {} if ball is None else {"ball": ball}
            decides = {"between": between or None, "read_out": read_out}
            found = [*certify_decision(model, content, **decides, **how, **place)]
        else:
            how = {"eps": _EPS if eps is None else eps, "ball": ball or "token", "head": head}
            how |= {"steps": 4 if steps is None else steps, "sharp": sharp}
            found = [certify_ball(model, content, **how, **place)]
    if jsonl:
        for one in found:
            said = json.dumps(_plain(one), ensure_ascii=False, allow_nan=False)
            sys.stdout.write(said + "\n")
    elif deciding:
        decision.show(found)
    else:
        _show(found[0])
    if out is not None:
        inputs = f"; inputs: {out / found[0].file}" if found[0].file else ""
        errors.print(f"Row: {out}{inputs}", markup=False, soft_wrap=True)
    if any(one.violated for one in found):
        raise typer.Exit(1)


def _plain(found: CertifiedBall | CertifiedDecision) -> dict[str, Any]:
    """What a line of JSON says: no heads, which are many, and no number that it cannot hold."""
    left = ("heads", "value", "ratio", "file")
    said = {one.name: getattr(found, one.name) for one in fields(found) if one.name not in left}
    if hasattr(found, "heads"):
        more = {"certificate": "value", "over_attack": "over_attack", "violated": "violated"}
        said |= {name: getattr(found, key) for name, key in more.items()}
    endless = {name for name, v in said.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in endless else value for name, value in said.items()}


def _show(found: CertifiedBall) -> None:
    console = Screen()
    head = "" if found.head is None else f", head {found.head}"
    kind = "every token moves" if found.ball == "token" else "all tokens together move"
    lines = [
        f"{found.model}, layer {found.layer}{head}, map {found.map}, {found.num_tokens} tokens",
        f"ball          {kind} by at most {found.eps:.4g} "
        f"({found.relative_eps:.2g} of the largest token norm)",
        f"certificate   ‖f(X') − f(X)‖ ≤ {_up(found.value)} ‖X' − X‖ from the centre X to "
        f"every X' in the ball (heads put together by: {_FORMS.get(found.form, found.form)})",
        f"sigma         at most {_up(found.sigma_bound)} anywhere in the ball, hence between any "
        f"two of its inputs; at X measured in [{found.sigma:.4g}, {found.upper:.4g}]",
        f"attack        largest ratio found {found.largest_ratio:.4g}, largest sigma "
        f"{found.largest_sigma:.4g}, in {found.attempts} attempts",
    ]
    if found.violated:
        lines.append("VIOLATED: the attack found more than the certificate allows. Please report.")
    elif found.over_attack is not None:
        share = found.over_attack
        lines.append(f"The certificate holds; it is {share:.3g} times the best attack.")
    if found.note:
        lines.append(f"Note: {found.note}.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _up(value: float) -> str:
    """Rounded upwards, so that what is printed still holds."""
    return f"{value * (1 + 5e-4):.4g}"
