"""What `lipscope certify` says about a decision: its radius in both balls, and an attack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.certificates.read_out import Pool
from lipscope.cli.terminal import Screen
from lipscope.errors import InputError
from lipscope.pages.table import number
from lipscope.theorems import BallName

if TYPE_CHECKING:
    from lipscope.engine.capture import Captured
    from lipscope.engine.classifier import Classifier
    from lipscope.models import LoadedModel
    from lipscope.records.folder import RunFolder

_OF_INPUT = ("windows", "special_tokens", "position_offset", "images", "resolutions")
_OF_INPUT += ("seed", "modules", "allow_pickle")
_MOVES = {"token": "every token moves", "frobenius": "all tokens together move"}


def stored(read_out: Path | None, between: Sequence[str]) -> Classifier | None:
    """The read-out of a file, if one was asked for."""
    from lipscope.engine.classifier import classifier_of_file

    if read_out is not None and between:
        raise InputError("`--read-out` and `--between` exclude each other. Found both.")
    return None if read_out is None else classifier_of_file(read_out)


def decide(
    model: LoadedModel,
    content: str | None,
    *,
    stored: Classifier | None,
    between: Sequence[str],
    place: dict[str, Any],
    out: RunFolder | None,
    balls: Sequence[BallName],
    pool: Pool,
    steps: int,
    attempts: dict[str, int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row a ball, and the inputs at which an attack changed the decision."""
    from lipscope.engine.capture import captures
    from lipscope.engine.classifier import classifier_of_texts

    real = next(captures(model, content, **of_input(place)))
    special = place["special_tokens"]
    classifier = stored or classifier_of_texts(
        model, between, layer=place["layer"], pool=pool, special_tokens=special
    )
    rows, points = [], {"x": real.x}
    for ball in balls:
        row, point = _row(real, classifier, ball, pool, steps, **attempts)
        rows.append(row)
        if row["flip_radius"] is not None:
            points[f"flip_{ball}"] = point
    if out is not None:
        _keep(model, content, rows, out, place)
    return rows, points


def of_input(place: dict[str, Any]) -> dict[str, Any]:
    """What `captures` takes of a verb's arguments."""
    kept = {name: place[name] for name in _OF_INPUT if name in place}
    lengths = None if place["length"] is None else [place["length"]]
    return kept | {"layers": [place["layer"]], "lengths": lengths}


def _row(
    real: Captured,
    classifier: Classifier,
    ball: BallName,
    pool: Pool,
    steps: int,
    random: int,
    ascents: int,
    seed: int,
) -> tuple[dict[str, Any], Any]:
    from lipscope.attacks import attack_decision
    from lipscope.certificates.decision import certified_radius

    read_out: dict[str, Any] = {"bias": classifier.bias, "pool": pool, "ball": ball}
    found = certified_radius(real.attention, real.x, classifier.weight, steps=steps, **read_out)
    tried = attack_decision(
        real.attention,
        real.x,
        classifier.weight,
        radius=found.radius,
        random=random,
        ascents=ascents,
        seed=seed,
        **read_out,
    )
    reached = math.isfinite(tried.radius)
    row = {
        "model": real.model,
        "layer": real.layer,
        "map": "attention",
        "num_tokens": len(real.x),
        "pool": pool,
        "decision": found.decision,
        "decision_name": classifier.names[found.decision],
        "by": classifier.by,
        "rival": found.rival,
        "rival_name": classifier.names[found.rival],
        "margin": found.margin,
        "ball": ball,
        "radius": found.radius,
        "nearest": found.nearest,
        "fraction": found.fraction,
        "flip_radius": tried.radius,
        "flip_decision": tried.decision if reached else None,
        "attempts": tried.attempts,
        # a tie has no ball around it: changing there contradicts nothing
        "violated": found.radius > 0 and tried.radius < found.radius,
        "note": found.note,
    }
    return plain(row), tried.point


def _keep(
    loaded: LoadedModel,
    content: str | None,
    rows: Sequence[dict[str, Any]],
    out: RunFolder,
    place: dict[str, Any],
) -> None:
    """The row of sigma at the input, and the radii beside it, into a run folder."""
    from lipscope.engine.certify import keep as write
    from lipscope.records.rows import Bound
    from lipscope.theorems import DERIVED

    found = [
        Bound(
            theorem=f"decision_{row['ball']}",
            statement=f"{_class(row, 'decision')} stays ahead of {_class(row, 'rival')}",
            cite=DERIVED,
            kind="radius",
            scope="ball",
            metric="frobenius",
            value=row["radius"],
            eps=row["radius"],
            reason="" if row["radius"] is not None else "the scores do not depend on the input",
            note=row["note"] or "",
        )
        for row in rows
    ]
    write(loaded, content, found, out=out, **place)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the numbers that JSON cannot hold."""

    def holds(value: Any) -> bool:
        return not isinstance(value, float) or math.isfinite(value)

    return {name: value if holds(value) else None for name, value in row.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """The decision, then each ball."""
    console = Screen()
    first = rows[0]
    pooled = "mean over" if first["pool"] == "mean" else "first of"
    lines = [
        f"{first['model']}, layer {first['layer']}, map attention, {pooled} "
        f"{first['num_tokens']} tokens",
        f"decision      {_class(first, 'decision')}; {_class(first, 'rival')} is behind by a "
        f"margin of {number(first['margin'])}",
        f"{'':14}decided by {first['by']}, not by the model's own head",
    ]
    for row in rows:
        lines += _ball(row)
    lines += [f"Note: {note}." for note in dict.fromkeys(row["note"] for row in rows) if note]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _class(row: dict[str, Any], key: str) -> str:
    name = row[f"{key}_name"]
    return f"class {row[key]}" if name == str(row[key]) else f"class {row[key]}, “{name}”"


def _ball(row: dict[str, Any]) -> list[str]:
    name = row["ball"]
    if row["radius"] == 0.0:
        return [f"{name:<14}No certificate: two classes tie at X."]
    if row["radius"] is None:
        return [f"{name:<14}certified at any radius: the scores do not depend on the input"]
    lines = [
        f"{name:<14}certified radius {_down(row['radius'])}: the decision stands while "
        f"{_MOVES[name]} by less"
    ]
    if row["fraction"] is None:
        lines.append(f"{'':14}there is no other token to compare with")
    else:
        lines.append(
            f"{'':14}{100 * row['fraction']:.2g} % of the distance to the nearest other token's "
            f"vector, {number(row['nearest'])}"
        )
    if row["violated"]:
        lines.append(f"VIOLATED: an attack changed it at {row['flip_radius']:.6g}. Please report.")
    elif row["flip_radius"] is None:
        lines.append(f"{'':14}no attack changed it, in {row['attempts']} attempts")
    else:
        times = row["flip_radius"] / row["radius"]
        lines.append(
            f"{'':14}an attack changes it at {number(row['flip_radius'])}, {times:.3g} times the "
            f"radius, in {row['attempts']} attempts"
        )
    return lines


def _down(value: float) -> str:
    """Rounded downwards, so that what is printed still holds."""
    return number(value * (1 - 1e-3))
