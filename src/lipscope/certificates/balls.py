"""Several heads over a ball.

Derived here; proofs: ``docs/theory/ball-certificate.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention import Attention, DotProduct
from lipscope.attention import Map as Part
from lipscope.certificates.expansion import rest
from lipscope.errors import InputError
from lipscope.theorems.derived.ball import Ball, least
from lipscope.theorems.derived.centre import BallName, Centre
from lipscope.theorems.derived.row_gram import row_gram_joint
from lipscope.theorems.head import all_heads_of, check_scores, heads_of
from lipscope.theorems.register import NotApplicableError


@dataclass(frozen=True)
class BallValue:
    """A bound of sigma over a ball.

    Attributes:
        total: Of all heads together.
        form: How they were put together.
        heads: Value and smallest form of each.
    """

    total: float
    form: str
    heads: list[tuple[float, str]]


class BallLayer:
    """All heads of a layer at one centre.

    Args:
        layer: The layer.
        x: Centre of the ball.
        part: ``attention``: heads add up; ``heads``: they stand side by side.
        sharp: Also use the row-Gram certificate at the centre, and what is left of all heads
            together beyond it (`around`).
    """

    def __init__(self, layer: DotProduct, x: Tensor, part: Part, sharp: bool) -> None:
        self.layer, self.x = layer, x
        self.part: Part = part
        self.sharp = sharp
        heads = heads_of(layer, fold=part == "attention")
        self.centres = [Centre(head, x) for head in heads]
        self.local = [_local(c, sharp) for c in self.centres]
        self.bare: list[Centre] = []
        self.norm_out, self.joint = 0.0, math.inf
        if len(heads) > 1:
            if part == "attention" and layer.output is not None:
                self.norm_out = float(torch.linalg.matrix_norm(layer.output, 2))
                self.bare = [Centre(head, x) for head in heads_of(layer, fold=False)]
            self.bare_local = [_local(c, False) for c in self.bare]
            if sharp:
                self.joint = row_gram_joint(all_heads_of(layer, fold=part == "attention"), x)

    def around(self, radii: Tensor, ball: BallName) -> tuple[float, list[float]]:
        """``>= ‖f(X') - f(X)‖ / ‖X' - X‖`` from X itself: sigma there plus the rest.

        Returns:
            Of the layer, infinite without ``sharp``, and of each head.
        """
        output = self.layer.output if self.part == "attention" else None
        centres = self.bare or [Centre(head, self.x) for head in heads_of(self.layer, fold=False)]
        together, each = rest(centres, output, radii, ball, together=self.sharp)
        heads = [local + one for local, one in zip(self.local, each, strict=True)]
        return (heads[0] if len(heads) == 1 else self.joint + together), heads

    def at(self, radii: Tensor, ball: BallName) -> BallValue:
        """Bounds of sigma over the ball of these radii."""
        # a Frobenius ball has one radius by definition
        eps = float(radii[0]) if ball == "frobenius" else radii
        balls = [Ball(c, eps, ball) for c in self.centres]
        forms = [
            b.forms(local, sharp=self.sharp) for b, local in zip(balls, self.local, strict=True)
        ]
        heads = [(least(f), min(f, key=lambda name: f[name])) for f in forms]
        values = torch.tensor([value for value, _ in heads], dtype=torch.float64)
        if len(heads) == 1:
            return BallValue(heads[0][0], "one head", heads)
        change = torch.tensor([b.change for b in balls], dtype=torch.float64)
        apart = self.part == "heads" or self.norm_out == 0.0  # outputs side by side
        together = {
            "sum": float(values.norm() if apart else values.sum()),
            "joint": self.joint + float(change.norm() if apart else change.sum()),
        }
        if self.bare:
            each = [
                least(Ball(c, eps, ball).forms(local))
                for c, local in zip(self.bare, self.bare_local, strict=True)
            ]
            together["projection"] = self.norm_out * math.hypot(*each)
        form = min(together, key=lambda name: together[name])
        return BallValue(together[form], form, heads)


def _local(centre: Centre, sharp: bool) -> float:
    """The best certificate at the centre."""
    at = Ball(centre, 0.0)
    value = min(at.by_rows, at.by_blocks)
    return min(value, centre.weighted.value) if sharp else value


def in_double(layer: Attention, head: int | None) -> DotProduct:
    """The layer, or one head of it, in float64 on the CPU.

    Raises:
        InputError: For other variants, or a head that it does not have.
    """
    if not isinstance(layer, DotProduct):
        raise InputError(
            f"No certificate: the proof is for dot-product attention. Found "
            f"`{type(layer).__name__}`."
        )
    try:
        check_scores(layer)
    except NotApplicableError as why:
        raise InputError(f"No certificate: the proof does not cover this layer, {why}.") from None
    return (layer if head is None else layer.head(head)).in_double()


def tokens_of(layer: DotProduct, x: Tensor) -> Tensor:
    """Tokens in float64 on the CPU, checked.

    Raises:
        InputError: If they do not fit the layer or are not finite.
    """
    width = layer.query.shape[1]
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != width:
        raise InputError(
            f"`x` should have shape (n, {width}), n at least 1. Found {tuple(x.shape)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise InputError("`x` should be finite. Found NaN or infinite tokens.")
    return x.detach().to("cpu", torch.float64)
