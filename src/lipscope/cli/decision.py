"""`lipscope certify` of a decision: its radius in both balls, and an attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lipscope.cli.terminal import Screen
from lipscope.pages import number

if TYPE_CHECKING:
    from lipscope.engine import CertifiedDecision

_MOVES = {"token": "every token moves", "frobenius": "all tokens together move"}


def show(found: Sequence[CertifiedDecision]) -> None:
    """The decision, then each ball."""
    console = Screen()
    first = found[0]
    pooled = "mean over" if first.pool == "mean" else "first of"
    lines = [
        f"{first.model}, layer {first.layer}, map attention, {pooled} {first.num_tokens} tokens",
        f"decision      {first.named('decision')}; {first.named('rival')} is behind by a "
        f"margin of {number(first.margin)}",
        f"{'':14}decided by {first.by}, not by the model's own head",
    ]
    for one in found:
        lines += _ball(one)
    lines += [f"Note: {note}." for note in dict.fromkeys(one.note for one in found) if note]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _ball(one: CertifiedDecision) -> list[str]:
    name = one.ball
    if one.radius == 0.0:
        return [f"{name:<14}No certificate: two classes tie at X."]
    if one.radius is None:
        return [f"{name:<14}certified at any radius: the scores do not depend on the input"]
    lines = [
        f"{name:<14}certified radius {_down(one.radius)}: the decision stands while "
        f"{_MOVES[name]} by less"
    ]
    if one.fraction is None:
        lines.append(f"{'':14}there is no other token to compare with")
    else:
        lines.append(
            f"{'':14}{100 * one.fraction:.2g} % of the distance to the nearest other token's "
            f"vector, {number(one.nearest)}"
        )
    if one.violated:
        lines.append(f"VIOLATED: an attack changed it at {one.flip_radius:.6g}. Please report.")
    elif one.flip_radius is None:
        lines.append(f"{'':14}no attack changed it, in {one.attempts} attempts")
    else:
        times = one.flip_radius / one.radius
        lines.append(
            f"{'':14}an attack changes it at {number(one.flip_radius)}, {times:.3g} times the "
            f"radius, in {one.attempts} attempts"
        )
    return lines


def _down(value: float) -> str:
    """Rounded downwards, so that what is printed still holds."""
    return number(value * (1 - 1e-3))
