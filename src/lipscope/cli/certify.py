"""`lipscope certify`: how far outputs, or a decision, can move while the input stays in a ball."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import typer

from lipscope import engine, pages
from lipscope.cli.options import INPUT, SOLVER, Model, ask, with_options
from lipscope.cli.terminal import note, say, show
from lipscope.display import rounded_down, rounded_up
from lipscope.errors import InputError

_EPS = 0.01
_MOVES = {"token": "every token moves", "frobenius": "all tokens together move"}
_FORMS = {
    "sum": "heads put together by the sum of their bounds",
    "projection": "heads put together by the norm of the output projection",
    "joint": "heads put together by one bound of the whole layer",
    "expansion": "a bound of sigma at X, and one of what is of second order",
    "slopes": "the parts' slopes at X after each other, and a bound of what they leave out",
}
_OF_BALL = ("eps", "head", "steps", "sharp", "random", "ascents")
_HIDDEN = ("windows", "position_offset", "device", "dtype", "delta", "tol")


@with_options(
    *("layer", "length", "read_out", "between", "pool", *(n for n in INPUT if n != "map"), *SOLVER),
    hidden=(*_HIDDEN, "images", "memory", "special_tokens", "tokens"),
    eps=(float, None, "Radius of the ball.  [default: 0.01]"),
    decision=(bool, False, "How far a decision stands."),
    ball=(
        str,
        None,
        "token, frobenius; of a decision joint, token, each.  [default: token; joint]",
    ),
    tokens=(str, None, "Tokens that may move, of a decision."),
    head=(int, None, "One query head alone.  [default: all]"),
    steps=(int, None, "Radii of the bound.  [default: 4]"),
    sharp=(bool, None, "Sharpest bound, slow; unset: up to seconds."),
    random=(int, None, "Random points of the attack.  [default: 20]"),
    ascents=(int, None, "Ascents of each kind.  [default: 2]"),
    map=(str, None, "Or residual, block, …  [default: attention; model]"),
    length=(None, "Tokens in the window.  [default: 64; the text]"),
    pool=(None, "Pool by mean or first.  [default: mean]"),
    out="Run folder for the row, and worst inputs.",
    jsonl="ball",
)
def certify(model: Model = "minilm", **options: Any) -> None:
    """Bound all moves in a ball around a text.

    Certify L with ‖f(X') − f(X)‖ ≤ L ‖X' − X‖ for every X' in the ball, then attack it:
    the largest ratio found inside the ball must stay below L. Some 15 s for MiniLM. With
    --decision, --between or --read-out: the radius within which a decision cannot change, of
    the whole model from --layer on or, with --map attention, of that layer's pooled output.
    More options: docs/commands.md.
    """
    given = {name: options.pop(name) for name in _OF_BALL}
    ball, tokens = options.pop("ball"), options.pop("tokens")
    if options.pop("decision") or options["read_out"] is not None or options["between"]:
        return _decision(model, ball, tokens, given, options)
    for name, value in (("tokens", tokens), ("pool", options.pop("pool"))):
        if value is not None:
            raise InputError(f"`--{name}` goes with a decision. Found it alone; leave it out.")
    if ball not in (None, *_MOVES):
        raise InputError(f"`ball` should be {' or '.join(_MOVES)}. Found `{ball}`.")
    options["map"] = options["map"] or "attention"
    default: dict[str, Any] = {"eps": _EPS, "random": 20, "ascents": 2}
    how = {name: default.get(name) if value is None else value for name, value in given.items()}
    one, folder = ask("certify", model, options, ball=ball or "token", **how)
    return _tell([one], folder, () if options["jsonl"] else _of_ball(one))


def _tell(found: Sequence[Any], folder: Any, lines: Iterable[str]) -> None:
    """What was found, as lines or else as JSON, and where it stands."""
    lines = list(lines)
    if not lines:
        for one in found:
            said = json.dumps(_certificate_line(one), ensure_ascii=False, allow_nan=False)
            sys.stdout.write(said + "\n")
    say(lines)
    if lines and getattr(found[0], "words", None) and found[0].ball == "token":
        show(engine.TokenRadii(tuple(found)))
    if folder is not None:
        file = getattr(found[0], "file", None)
        note(f"Row: {folder}" + (f"; inputs: {folder / file}" if file else ""))
    if getattr(found[-1], "stopped", False):
        kept = "is kept; the same command goes on from there."
        note(f"Stopped. What was proved {'stands above.' if folder is None else kept}")
        raise typer.Exit(130)
    if any(one.violated for one in found):
        raise typer.Exit(1)


def _decision(
    model: str,
    ball: str | None,
    tokens: str | None,
    given: Mapping[str, Any],
    options: dict[str, Any],
) -> None:
    if wrong := [f"`--{name}`" for name, value in given.items() if value is not None]:
        raise InputError(f"A decision has no {wrong[0]}. Found it; leave it out.")
    how: dict[str, Any] = {"ball": ball or "joint", "at_layer": options.pop("layer")}
    how["tokens"] = None if tokens is None else engine.parse_integers(tokens, "tokens")
    found, folder = ask("certify_decision", model, options, **how)
    _tell(found, folder, () if options["jsonl"] else _of_decision(found))


def _of_decision(found: Sequence[engine.DecisionCertificate]) -> Iterator[str]:
    """The decision and its radius; those of single tokens have a table."""
    one = found[0]
    what = "whole model" if one.map == "model" else f"layer {one.at_layer}"
    yield f"{one.model}, {what}, decided by {one.by}"
    yield (
        f"decision      “{one.decision_name}”; “{one.rival_name}” is behind by a margin of "
        f"{pages.number(one.margin)}"
    )
    if one.ball == "token":
        return
    moves = _MOVES["frobenius" if one.ball == "joint" else "token"]
    if math.isinf(one.radius):
        yield f"{one.ball:<14}certified at any radius: {one.note}"
        return
    below = pages.number(rounded_down(one.radius))
    yield f"{one.ball:<14}certified radius {below}: the decision stands while {moves} by less"
    attack = "no attack changed it"
    if one.attack is not None:
        attack = f"an attack changes it at {pages.number(one.attack)}"
    yield f"{'':14}{attack}; to first order it ends at {pages.number(one.first_order)}"
    if one.words_within is not None:
        yield (
            f"{'':14}{one.words_within} embeddings of other words lie within it; the nearest is "
            f"at {pages.number(one.nearest)}"
        )
    if one.violated:
        yield "VIOLATED: the attack found less than the certified radius. Please report."
    if one.note:
        yield f"Note: {one.note}."


def _certificate_line(
    found: engine.CertifiedBall | engine.DecisionCertificate,
) -> dict[str, Any]:
    """What a line of JSON says: no heads, which are many, and no number that it cannot hold."""
    left = ("heads", "value", "ratio", "file")
    said = {one.name: getattr(found, one.name) for one in fields(found) if one.name not in left}
    if hasattr(found, "heads"):
        more = {"certificate": "value", "over_attack": "over_attack"}
        said |= {name: getattr(found, key) for name, key in more.items()}
    said["violated"] = found.violated
    endless = {name for name, v in said.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in endless else value for name, value in said.items()}


def _of_ball(found: engine.CertifiedBall) -> Iterator[str]:
    head = "" if found.head is None else f", head {found.head}"
    layer = "" if found.layer is None else f", layer {found.layer}"
    yield f"{found.model}{layer}{head}, map {found.map}, {found.num_tokens} tokens"
    yield (
        f"ball          {_MOVES[found.ball]} by at most {found.eps:.4g} "
        f"({found.relative_eps:.2g} of the largest token norm)"
    )
    value, sigma, upper = (
        f"{rounded_up(one):.4g}" for one in (found.value, found.sigma_bound, found.upper)
    )
    yield (
        f"certificate   ‖f(X') − f(X)‖ ≤ {value} ‖X' − X‖ from the centre X to "
        f"every X' in the ball ({_FORMS.get(found.form, found.form)})"
    )
    yield (
        f"sigma         at most {sigma} anywhere in the ball, hence between any two of its inputs; "
        f"at X measured in [{rounded_down(found.sigma):.4g}, {upper}]"
    )
    yield (
        f"attack        largest ratio found {found.largest_ratio:.4g}, largest sigma "
        f"{found.largest_sigma:.4g}, in {found.attempts} attempts"
    )
    if found.violated:
        yield "VIOLATED: the attack found more than the certificate allows. Please report."
    elif found.over_attack is not None:
        yield f"The certificate holds; it is {found.over_attack:.3g} times the best attack."
    if found.note:
        yield f"Note: {found.note}."
