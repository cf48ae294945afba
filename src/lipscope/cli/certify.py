"""`lipscope certify`: how far outputs can move while the input stays in a ball."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lipscope.cli.options import INPUT, SOLVER, Model, asked, with_options
from lipscope.cli.terminal import Force, Screen, bar, errors, resumable
from lipscope.errors import InputError
from lipscope.records.place import Place

if TYPE_CHECKING:
    from lipscope.cli import decision
    from lipscope.models import LoadedModel
    from lipscope.records.folder import RunFolder

EXAMPLE = "Example: lipscope certify minilm --layer 3 --length 32 --eps 0.01"
_EPS = 0.01
_MOST_POINTS = 100_000
_FORMS = {
    "sum": "the sum of their bounds",
    "projection": "the norm of the output projection",
    "joint": "one bound of the whole layer",
    "expansion": "a bound of sigma at X, and one of what is of second order",
}
_BALLS = ("token", "frobenius")
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
    _check(ball, pool, random, ascents)
    if deciding and (eps is not None or head is not None or given["map"] != "attention"):
        raise InputError(
            "A decision has its own radius and reads the whole layer. Found `--eps`, `--head` or "
            "`--map` beside `--read-out` or `--between`; leave them out."
        )
    from lipscope.cli import decision
    from lipscope.engine.certify import answered

    place = {"layer": layer, "length": None if "images" in given else length} | given
    attempts = {"random": random, "ascents": ascents, "seed": given["seed"]}
    if deciding:
        pooled = cast("decision.Pool", pool)
        balls = [cast("decision.BallName", one) for one in (_BALLS if ball is None else [ball])]
        how: dict[str, Any] = {
            "balls": balls,
            "pool": pooled,
            "steps": 8 if steps is None else steps,
        }
        stored = decision.stored(read_out, between or [])
        wanted = {**how, "between": between, "read_out": stored and stored.digests}

        def find(loaded: LoadedModel, out: RunFolder | None) -> tuple[Any, Any]:
            decide = functools.partial(decision.decide, between=between or [], stored=stored)
            return decide(loaded, content, place=place, out=out, attempts=attempts, **how)
    else:
        wanted = {"eps": _EPS if eps is None else eps, "ball": ball or "token", "head": head}
        wanted |= {"steps": 4 if steps is None else steps, "sharp": sharp}

        def find(loaded: LoadedModel, out: RunFolder | None) -> tuple[Any, Any]:
            return _bound(loaded, content, place, wanted, attempts, out)

    with resumable(), bar() as told:
        where = None if out is None else Place(out, force=force)
        every = {**wanted, **attempts}
        about = {"asked": every, "out": where, "progress": told.update}
        rows, file = answered(model, content, find, **about, **place)
    if jsonl:
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        sys.stdout.write("".join(lines))
    elif deciding:
        decision.show(rows)
    else:
        _show(rows[0])
    if out is not None:
        errors.print(f"Row: {out}; inputs: {out / file}", markup=False, soft_wrap=True)
    if any(row["violated"] for row in rows):
        raise typer.Exit(1)


def _check(ball: str | None, pool: str, random: int, ascents: int) -> None:
    if ball not in (None, *_BALLS):
        raise InputError(f"`ball` should be token or frobenius. Found `{ball}`.")
    if pool not in ("mean", "first"):
        raise InputError(f"`pool` should be mean or first. Found `{pool}`.")
    for name, count in (("random", random), ("ascents", ascents)):
        if not 0 <= count <= _MOST_POINTS:
            raise InputError(
                f"`{name}` should be a whole number from 0 to {_MOST_POINTS:,}. Found `{count}`."
            )


def _bound(
    loaded: LoadedModel,
    content: str | None,
    place: dict[str, Any],
    certificate: dict[str, Any],
    attempts: dict[str, int],
    out: RunFolder | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The ball certificate and the attack on it: one row, and the worst input found."""
    from lipscope.attacks.in_ball import attack_in_ball
    from lipscope.cli import decision
    from lipscope.engine.capture import captures
    from lipscope.engine.certify import certify as run

    found = run(loaded, content, out=out, **place, **certificate)
    real = next(captures(loaded, content, **decision.of_input(place)))
    same = {name: certificate[name] for name in ("ball", "head")}
    tried = attack_in_ball(
        real.attention, real.x, certificate["eps"], map=place["map"], **attempts, **same
    )
    row = {
        "model": real.model,
        "layer": real.layer,
        "head": certificate["head"],
        "map": place["map"],
        "num_tokens": len(real.x),
        "ball": found.ball,
        "eps": found.eps,
        "relative_eps": found.relative_eps,
        "certificate": found.value,
        "sigma_bound": found.sigma_bound,
        "form": found.form,
        "sigma": found.sigma,
        "upper": found.upper,
        "largest_ratio": tried.ratio,
        "largest_sigma": tried.sigma,
        "over_attack": found.value / tried.ratio if tried.ratio > 0 else None,
        "attempts": tried.attempts,
        "violated": tried.ratio > found.value * (1 + 1e-9),
        "note": found.note,
    }
    return [decision.plain(row)], {"x": real.x, "worst": tried.worst}


def _show(row: dict[str, Any]) -> None:
    console = Screen()
    head = "" if row["head"] is None else f", head {row['head']}"
    kind = "every token moves" if row["ball"] == "token" else "all tokens together move"
    lines = [
        f"{row['model']}, layer {row['layer']}{head}, map {row['map']}, {row['num_tokens']} tokens",
        f"ball          {kind} by at most {row['eps']:.4g} "
        f"({row['relative_eps']:.2g} of the largest token norm)",
        f"certificate   ‖f(X') − f(X)‖ ≤ {_up(row['certificate'])} ‖X' − X‖ from the centre X to "
        f"every X' in the ball (heads put together by: {_FORMS.get(row['form'], row['form'])})",
        f"sigma         at most {_up(row['sigma_bound'])} anywhere in the ball, hence between any "
        f"two of its inputs; at X measured in [{row['sigma']:.4g}, {row['upper']:.4g}]",
        f"attack        largest ratio found {row['largest_ratio']:.4g}, largest sigma "
        f"{row['largest_sigma']:.4g}, in {row['attempts']} attempts",
    ]
    if row["violated"]:
        lines.append("VIOLATED: the attack found more than the certificate allows. Please report.")
    elif row["over_attack"] is not None:
        share = row["over_attack"]
        lines.append(f"The certificate holds; it is {share:.3g} times the best attack.")
    if row["note"]:
        lines.append(f"Note: {row['note']}.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _up(value: float) -> str:
    """Rounded upwards, so that what is printed still holds."""
    return f"{value * (1 + 5e-4):.4g}"
