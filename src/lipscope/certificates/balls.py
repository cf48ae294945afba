"""Several heads over a ball.

Derived here; proofs: ``docs/theory/ball-certificate.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Map
from lipscope.certificates.expansion import rest
from lipscope.errors import InputError
from lipscope.linalg import TopSingular, start_named, top_singular
from lipscope.theorems import (
    AskedLayer,
    Ball,
    BallName,
    HeadAt,
    NotApplicableError,
    Weighted,
    check_scores,
    least,
    row_gram_joint,
    weighted_head,
)


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
        map: ``attention``: heads add up; ``heads``: they stand side by side.
        sharp: Also use the row-Gram certificate at the centre, and what is left of all heads
            together beyond it (`around`).
    """

    def __init__(self, layer: DotProduct, x: Tensor, map: Map, sharp: bool) -> None:
        self.layer = AskedLayer(layer, map, x=x)
        self.sharp = sharp
        self.centres = [HeadAt(head, x) for head in self.layer.heads]
        self.weighted = [weighted_head(c) if sharp else None for c in self.centres]
        self.local = [_local(*pair) for pair in zip(self.centres, self.weighted, strict=True)]
        self.several = len(self.centres) > 1
        self.joint = row_gram_joint(self.layer.together) if sharp and self.several else math.inf

    @cached_property
    def slack(self) -> float:
        """What rounding may hide from a bound of all heads together at the centre."""
        return self.layer.together.slack

    @cached_property
    def bare(self) -> list[HeadAt]:
        """The heads before the output projection, if there is one."""
        assert self.layer.x is not None
        return [HeadAt(head, self.layer.x) for head in self.layer.bare]

    @cached_property
    def bare_local(self) -> list[float]:
        """The best cheap certificate of each of them at the centre."""
        return [_local(c, None) for c in self.bare]

    def around(self, radii: Tensor, ball: BallName) -> tuple[float, list[float]]:
        """``>= ‖f(X') - f(X)‖ / ‖X' - X‖`` from X itself: sigma there plus the rest.

        Returns:
            Of the layer, infinite without ``sharp``, and of each head.
        """
        output = self.layer.attention.output if self.layer.projected else None
        together, each = rest(self.bare, output, radii, ball, together=self.sharp)
        heads = [
            local + one + centre.slack
            for local, one, centre in zip(self.local, each, self.centres, strict=True)
        ]
        return (self.joint + together + self.slack if self.several else heads[0]), heads

    def at(self, radii: Tensor, ball: BallName) -> BallValue:
        """Bounds of sigma over the ball of these radii."""
        # a Frobenius ball has one radius by definition
        eps = float(radii[0]) if ball == "frobenius" else radii
        balls = [Ball(c, eps, ball, w) for c, w in zip(self.centres, self.weighted, strict=True)]
        forms = [b.forms(local) for b, local in zip(balls, self.local, strict=True)]
        heads = [
            (least(f) + centre.slack, min(f, key=lambda name: f[name]))
            for f, centre in zip(forms, self.centres, strict=True)
        ]
        if not self.several:
            return BallValue(heads[0][0], "one head", heads)
        values = torch.tensor([value for value, _ in heads], dtype=torch.float64)
        change = torch.tensor([b.change for b in balls], dtype=torch.float64)
        apart = not self.layer.projected or self.layer.norm_output == 0.0  # outputs side by side
        together = {
            "sum": float(values.norm() if apart else values.sum()),
            "joint": self.joint + float(change.norm() if apart else change.sum()) + self.slack,
        }
        if self.layer.projected:
            each = [
                least(Ball(c, eps, ball).forms(local)) + c.slack
                for c, local in zip(self.bare, self.bare_local, strict=True)
            ]
            together["projection"] = self.layer.norm_output * math.hypot(*each)
        form = min(together, key=lambda name: together[name])
        return BallValue(together[form], form, heads)


def _local(centre: HeadAt, weighted: Weighted | None) -> float:
    """The best certificate at the centre."""
    at = Ball(centre, 0.0)
    return min(at.by_rows, at.by_blocks, math.inf if weighted is None else weighted.value)


def sigma_of(layer: DotProduct, x: Tensor, map: Map = "attention", seed: int = 0) -> TopSingular:
    """Sigma of a layer at ``x``, from a start of its own."""
    start = start_named(f"sigma|{map}|{seed}", x)
    return top_singular(layer.linearise(x, map=map), tol=1e-4, generator=start)


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
