"""Attempts to change a decision near an input, which a certified radius must survive."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.certificates import Decision, Pool, check_ball
from lipscope.display import Shown
from lipscope.theorems import BallName

_RIVALS = 5  # classes that an attack tries to reach, those nearest to first order
_GROWTH, _ENLARGED = 1.2, 25  # balls that are tried: up to a hundred times the first
_BISECTIONS = 7


@dataclass(frozen=True, repr=False)
class Flip(Shown):
    """The smallest move found that changes a decision; what a certified radius must not exceed.

    Attributes:
        radius: Its size in the ball's norm; inf if none was found.
        decision: Class there.
        point: The X' itself, or X.
        attempts: Random points and descents tried.
    """

    radius: float
    decision: int
    point: Tensor
    attempts: int


def attack_decision(
    layer: Attention,
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "c d_out"],
    *,
    radius: float,
    bias: Float[Tensor, " c"] | None = None,
    pool: Pool = "mean",
    ball: BallName = "token",
    random: int = 20,
    ascents: int = 2,
    steps: int = 20,
    seed: int = 0,
) -> Flip:
    """Try to change a decision inside a ball, then in larger and larger ones.

    Descents on the margin, which step towards the steepest move of the ball (Frank and
    Wolfe's method), for the rivals that are nearest to first order: in the first ball from X
    and from random points, in the larger ones from X; then bisection on the radius.

    Holds for dot-product layers; a radius found is an upper value of the true one.

    Args:
        layer: The layer; the map is ``attention``.
        x: Centre.
        weight: Read-out, as for `certified_radius`.
        radius: Where to begin: the certified radius.
        bias: Of the read-out.
        pool: ``mean`` or ``first``.
        ball: ``token`` or ``frobenius``.
        random: Random points on the boundary of the first ball.
        ascents: Random starts of descents in the first ball.
        steps: Steps of each.
        seed: Of the random points.

    Returns:
        The smallest change of the decision found.

    Raises:
        InputError: As `certified_radius` does.
    """
    check_ball(ball)
    search = _FlipSearch(Decision(layer, x, weight, bias, pool), ball, steps, seed)
    if 0 < radius < math.inf:  # around a tie there is no ball
        search.sample(radius, random)
        if not search.flips(radius, ascents):
            search.approach(radius)
    at = search.at
    return Flip(search.radius, search.reached, at.x + search.best, search.attempts)


class _FlipSearch:
    """Moves that stay in a ball, and the smallest one that changed the decision."""

    def __init__(self, at: Decision, ball: BallName, steps: int, seed: int) -> None:
        self.at, self.ball, self.steps = at, ball, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.radius, self.reached = math.inf, at.decision
        self.best = torch.zeros_like(at.x)
        self.attempts = 0
        slopes = [self._size(self._slope(self.best, int(r))) for r in at.rivals]
        first = at.margins[at.rivals] / torch.tensor(slopes, dtype=at.x.dtype)
        order = first.argsort()[:_RIVALS]
        self.rivals: list[int] = at.rivals[order].tolist()
        self.first = float(first[order[0]])

    def sample(self, radius: float, count: int) -> None:
        """Random points on the boundary."""
        for _ in range(count):
            self.attempts += 1
            self._see(self._steepest(self._draw(), radius))

    def flips(self, radius: float, ascents: int = 0) -> bool:
        """Whether a descent inside the ball changes the decision."""
        for rival in self.rivals:
            starts = [self._steepest(self._draw(), radius) for _ in range(ascents)]
            for start in (torch.zeros_like(self.at.x), *starts):
                self.attempts += 1
                self._descend(start, rival, radius)
        return self.radius <= radius * (1 + 1e-12)

    def approach(self, radius: float) -> None:
        """The smallest ball in which a descent succeeds."""
        low, high = radius, max(radius * _GROWTH, self.first)
        if not math.isfinite(high):
            return
        for _ in range(_ENLARGED):
            if self.flips(high):
                break
            low, high = high, high * _GROWTH
        else:
            return
        for _ in range(_BISECTIONS):
            middle = (low + self.radius) / 2
            if not self.flips(middle):
                low = middle

    def _descend(self, e: Tensor, rival: int, radius: float) -> None:
        for i in range(self.steps):
            target = self._steepest(-self._slope(e, rival), radius)
            e = e + (target - e) * (1.0 if i < 3 else 2 / i)  # a mean of moves in the ball
            if self._see(e):
                return

    def _see(self, e: Tensor) -> bool:
        with torch.no_grad():
            found = int(self.at.scores(self.at.x + e).argmax())
        if found == self.at.decision:
            return False
        size = float(e.norm() if self.ball == "frobenius" else e.norm(dim=-1).max())
        if size < self.radius:
            self.radius, self.reached, self.best = size, found, e
        return True

    def _slope(self, e: Tensor, rival: int) -> Tensor:
        point = (self.at.x + e).requires_grad_(True)
        with torch.enable_grad():
            scores = self.at.scores(point)
            (found,) = torch.autograd.grad(scores[self.at.decision] - scores[rival], point)
        return found

    def _size(self, slope: Tensor) -> float:
        return float(slope.norm() if self.ball == "frobenius" else slope.norm(dim=-1).sum())

    def _steepest(self, direction: Tensor, radius: float) -> Tensor:
        whole = self.ball == "frobenius"
        norm = direction.norm() if whole else direction.norm(dim=-1, keepdim=True)
        return direction * (radius / norm.clamp_min(1e-300))

    def _draw(self) -> Tensor:
        return torch.randn(self.at.x.shape, generator=self.generator, dtype=self.at.x.dtype)
