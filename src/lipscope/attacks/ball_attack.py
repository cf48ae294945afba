"""Search inside a ball: lower values that a certificate must exceed, moves, changed decisions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Map
from lipscope.certificates import Decision, Pool, check_ball, in_double, sigma_of, tokens_of
from lipscope.display import Shown
from lipscope.theorems import BallName, per_token

Function = Callable[[Tensor], Tensor]
_FIRST = 1e-3  # share of the size at which the first gradient is taken: at 0 it vanishes


def of_size(move: Float[Tensor, "n d"], size: float) -> Float[Tensor, "n d"]:
    """A move scaled to ``‖E‖_F = size``."""
    return move * (size / move.norm().clamp_min(1e-30))


def random_move(x: Float[Tensor, "n d"], size: float, seed: int) -> Float[Tensor, "n d"]:
    """A move uniform on the sphere ``‖E‖_F = size``."""
    gen = torch.Generator().manual_seed(seed)
    return of_size(torch.randn(x.shape, generator=gen).to(x), size)


def sign_move(f: Function, x: Float[Tensor, "n d"], size: float, seed: int) -> Float[Tensor, "n d"]:
    """One step along the sign of a gradient (FGSM), scaled to ``‖E‖_F = size``.

    The gradient of ``‖f(X + E) - f(X)‖²`` is taken at a small random ``E``, since it vanishes
    at 0.

    Holds for every differentiable map.

    Source: the fast gradient sign method (Goodfellow et al. 2015), in another norm.
    """
    return of_size(_change_gradient(f, x, random_move(x, _FIRST * size, seed)).sign(), size)


def ascent_move(
    f: Function, x: Float[Tensor, "n d"], size: float, seed: int, *, steps: int = 20
) -> Float[Tensor, "n d"]:
    """Projected gradient ascent of ``‖f(X + E) - f(X)‖`` on the sphere ``‖E‖_F = size`` (PGD).

    Each step replaces ``E`` by its gradient, scaled back to the sphere: a power iteration as
    the size goes to 0. The best of all iterates is kept.

    Holds for every differentiable map; a lower value of the largest change.
    """
    with torch.no_grad():
        here = f(x)
    best = move = random_move(x, size, seed)
    most = 0.0
    for _ in range(steps):
        slope = _change_gradient(f, x, move)
        move = of_size(slope, size)
        with torch.no_grad():
            change = float((f(x + move) - here).norm())
        if change > most:
            best, most = move, change
    return best


def _change_gradient(f: Function, x: Tensor, move: Tensor) -> Tensor:
    with torch.no_grad():
        here = f(x)
    point = move.detach().requires_grad_(True)
    with torch.enable_grad():
        change = (f(x + point) - here).square().sum()
        (slope,) = torch.autograd.grad(change, point)
    return slope


@dataclass(frozen=True, repr=False)
class BallAttack(Shown):
    """The worst that was found inside a ball; what a certificate must exceed."""

    ratio: float  # largest ``‖f(X') - f(X)‖ / ‖X' - X‖`` found
    sigma: float  # largest sigma found inside the ball
    worst: Tensor  # the X' of ``ratio``
    attempts: int  # random points and ascents tried


class Attempts(NamedTuple):
    """How hard an attack tries."""

    random: int = 20  # random points of the ball
    ascents: int = 2  # ascents of each kind, or starts of descents besides X
    steps: int = 30  # of an ascent or a descent
    seed: int = 0  # of all that is drawn


def attack_in_ball(
    layer: Attention,
    x: Float[Tensor, "n d"],
    eps: float | Tensor,
    *,
    ball: BallName = "token",
    head: int | None = None,
    map: Map = "attention",
    **attempts: int,
) -> BallAttack:
    """Random and gradient-ascent attempts to exceed a certificate inside its ball.

    Ascents maximise ``‖f(X') - f(X)‖ / ‖X' - X‖`` and ``<u, J(X') v>``, with ``u, v`` the top
    singular vectors at the current point; every iterate is put back into the ball. The first start
    along the top singular vector at X, towards both sides. How many there are say the `Attempts`.

    Holds for any layer; its values are lower ones, found and not proved largest.
    """
    random, ascents, steps, seed = Attempts(**attempts)
    check_ball(ball)
    own = in_double(layer, head)
    x = tokens_of(own, x)
    radii = per_token(eps, len(x), ball)
    search = _Search(own, x, radii, ball, map, seed)
    top = sigma_of(own, x, map, seed)
    search.sigma = top.sigma
    if not bool((radii > 0).any()):
        return BallAttack(top.sigma, top.sigma, x, 0)
    search.see(search.inside(top.v * radii.max() * 1e-3))  # sigma itself, nearly
    for start in (top.v, -top.v):
        search.see(search.to_edge(start))
    for _ in range(random):
        search.see(search.to_edge(search.draw()))
    for i in range(ascents):
        search.climb_ratio([top.v, -top.v][i] if i < 2 else search.draw(), steps)
        search.climb_sigma(top.v if i == 0 else search.draw(), steps)
    return BallAttack(search.ratio, search.sigma, search.worst, random + 2 * ascents + 3)


class _Search:
    """The best values seen so far, and moves that stay inside the ball."""

    def __init__(
        self,
        layer: DotProduct,
        x: Tensor,
        radii: Tensor,
        ball: BallName,
        map: Map,
        seed: int,
    ) -> None:
        self.layer, self.x, self.radii = layer, x, radii[:, None]
        self.ball: BallName = ball
        self.map: Map = map
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.here = self.f(x).detach()
        self.ratio, self.sigma, self.worst = 0.0, 0.0, x

    def f(self, x: Tensor) -> Tensor:
        """The map."""
        return self.layer(x) if self.map == "attention" else self.layer.heads(x)

    def draw(self) -> Tensor:
        """A random direction."""
        return torch.randn(self.x.shape, generator=self.generator, dtype=self.x.dtype)

    def to_edge(self, e: Tensor) -> Tensor:
        """A direction scaled to the boundary."""
        norm = e.norm() if self.ball == "frobenius" else e.norm(dim=-1, keepdim=True)
        return e * (self.radii / norm.clamp_min(1e-300))

    def inside(self, e: Tensor) -> Tensor:
        """A move put back into the ball."""
        norm = e.norm() if self.ball == "frobenius" else e.norm(dim=-1, keepdim=True)
        return e * (self.radii / norm.clamp_min(1e-300)).clamp_max(1.0)

    def see(self, e: Tensor) -> None:
        """Note the finite difference along a move."""
        moved = self.x + e
        size = float((moved - self.x).norm())
        # below this, a difference of outputs is mostly rounding
        if size <= 1e-9 * float(self.x.norm()):
            return
        with torch.no_grad():
            ratio = float((self.f(moved) - self.here).norm()) / size
        if ratio > self.ratio:
            self.ratio, self.worst = ratio, moved

    def climb_ratio(self, start: Tensor, steps: int) -> None:
        """Ascent of the finite difference."""
        e = self.to_edge(start)
        for i in range(steps):
            point = e.detach().requires_grad_(True)
            change = (self.f(self.x + point) - self.here).norm() / point.norm()
            (slope,) = torch.autograd.grad(change, point)
            e = self.inside(e + self.to_edge(slope) * 0.5 * 0.9**i)
            self.see(e)

    def climb_sigma(self, start: Tensor, steps: int) -> None:
        """Ascent of sigma through its singular vectors; the end is measured afresh."""
        e, best, at = self.to_edge(start), -1.0, None
        for i in range(steps // 3):
            top = sigma_of(self.layer, self.x + e, self.map, self.seed + i)
            if top.sigma > best:
                best, at = top.sigma, e
            point = (self.x + e).detach().requires_grad_(True)
            moved = torch.func.jvp(self.f, (point,), (top.v,))[1]
            (slope,) = torch.autograd.grad((top.u * moved).sum(), point)
            e = self.inside(e + self.to_edge(slope) * 0.5 * 0.9**i)
        if at is not None:
            again = sigma_of(self.layer, self.x + at, self.map, self.seed + 10_000)
            self.sigma = max(self.sigma, again.sigma)
            self.see(at)


# --- decisions

_RIVALS = 5  # classes that an attack tries to reach, those nearest to first order
_GROWTH, _ENLARGED = 1.2, 25  # balls that are tried: up to a hundred times the first
_BISECTIONS = 7


@dataclass(frozen=True, repr=False)
class Flip(Shown):
    """The smallest move found that changes a decision; what a certified radius must not exceed."""

    radius: float  # its size in the ball's norm; inf if none was found
    decision: int  # class there
    point: Tensor  # the X' itself, or X
    attempts: int  # random points and descents tried


def attack_decision(
    layer: Attention,
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "c d_out"],
    *,
    radius: float,
    bias: Float[Tensor, " c"] | None = None,
    pool: Pool = "mean",
    ball: BallName = "token",
    **attempts: int,
) -> Flip:
    """Try to change a decision inside a ball, then in larger and larger ones.

    Descents on the margin, which step towards the steepest move of the ball (Frank and
    Wolfe's method), for the rivals that are nearest to first order: in the first ball from X
    and from random points, in the larger ones from X; then bisection on the radius. The `Attempts`
    say how many there are, of 20 steps each if not told otherwise.

    Holds for dot-product layers; a radius found is an upper value of the true one.
    """
    tries = Attempts(**{"steps": 20} | attempts)
    check_ball(ball)
    search = _FlipSearch(Decision(layer, x, weight, bias, pool), ball, tries.steps, tries.seed)
    if 0 < radius < math.inf:  # around a tie there is no ball
        search.sample(radius, tries.random)
        if not search.flips(radius, tries.ascents):
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
