"""Attacks within a ball: adversarial moves, and lower values that certificates must exceed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attacks.ascent import sigma_gradient
from lipscope.attention import Attention, DotProduct, Map
from lipscope.certificates import check_ball, in_double, sigma_of
from lipscope.display import Shown
from lipscope.theorems import BallName, per_token, tokens_in_double

Function = Callable[[Tensor], Tensor]
_KRYLOV_STEPS = 4  # of an ascent of sigma, from the previous singular vector
_FIRST = 1e-3  # relative size at which the first gradient is taken, since it vanishes at 0


def of_size(move: Float[Tensor, "n d"], size: float) -> Float[Tensor, "n d"]:
    """Scale a move to ``‖E‖_F = size``."""
    return move * (size / move.norm().clamp_min(1e-30))


def random_move(x: Float[Tensor, "n d"], size: float, seed: int) -> Float[Tensor, "n d"]:
    """A random move, uniform on the sphere ``‖E‖_F = size``."""
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

    Each step replaces ``E`` by its gradient, rescaled to the sphere: a power iteration as the size
    tends to 0. Returns the best of all iterates.

    Holds for every differentiable map; a lower bound of the largest change.
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
    """The worst values found inside a ball, which a certificate must exceed."""

    ratio: float  # largest ``‖f(X') - f(X)‖ / ‖X' - X‖`` found
    sigma: float  # largest sigma found inside the ball
    worst: Tensor  # the X' of ``ratio``
    attempts: int  # number of random points and ascents


class Attempts(NamedTuple):
    """The effort of an attack."""

    random: int = 20  # random points of the ball
    ascents: int = 2  # ascents of each kind
    steps: int = 30  # of an ascent
    seed: int = 0  # of all random numbers


def attack_in_ball(
    layer: Attention | Function,
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
    singular vectors at the current point; every iterate is projected onto the ball. The first
    starts are along the top singular vector at X, in both directions. `Attempts` sets their number.

    Holds for any layer, and for any other map of tokens in float64, without ``head`` and ``map``;
    its values are lower bounds of the maxima.
    """
    random, ascents, steps, seed = Attempts(**attempts)
    check_ball(ball)
    of: Map | None = None
    if isinstance(layer, Attention):
        layer, of = in_double(layer, head), map
        x = tokens_in_double(x, layer.query.shape[1])
    radii = per_token(eps, len(x), ball)
    top = sigma_of(layer, x, of, seed)
    if not bool((radii > 0).any()):
        return BallAttack(top.sigma, top.sigma, x, 0)
    search = _Search(layer, x, radii[:, None], ball, of, seed, top.sigma)
    search.see(search.inside(top.v * radii.max() * 1e-3))  # approximately sigma itself
    for start in (top.v, -top.v):
        search.see(search.to_edge(start))
    for _ in range(random):
        search.see(search.to_edge(search.draw()))
    for i in range(ascents):
        search.climb_ratio([top.v, -top.v][i] if i < 2 else search.draw(), steps)
        search.climb_sigma(top.v if i == 0 else search.draw(), steps)
    return BallAttack(search.ratio, search.sigma, search.worst, random + 2 * ascents + 3)


@dataclass(eq=False)
class _Search:
    """The best values so far, and moves that stay inside the ball."""

    layer: Function
    x: Tensor
    radii: Tensor  # ``(n, 1)``
    ball: BallName
    map: Map | None
    seed: int
    sigma: float
    ratio: float = 0.0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        layer = self.layer
        # Gradients use float32: twice as fast; results use the layer's own precision.
        self.rough = copy.deepcopy(layer).float() if isinstance(layer, Attention) else layer
        self.here, self.worst = self.f(self.x).detach(), self.x

    def f(self, x: Tensor) -> Tensor:
        """The map."""
        return self._of(self.layer, x)

    def _of(self, layer: Function, x: Tensor) -> Tensor:
        return layer.heads(x) if isinstance(layer, DotProduct) and self.map == "heads" else layer(x)

    def draw(self) -> Tensor:
        """A random direction."""
        return torch.randn(self.x.shape, generator=self.generator, dtype=self.x.dtype)

    def to_edge(self, e: Tensor) -> Tensor:
        """Scale a direction to the boundary."""
        return self.radii * (e / self._size(e))

    def inside(self, e: Tensor) -> Tensor:
        """Project a move onto the ball."""
        return e * (self.radii / self._size(e)).clamp_max(1.0)

    def _size(self, e: Tensor) -> Tensor:
        """The size of a move, or of each token's move; never 0."""
        norm = e.norm() if self.ball == "frobenius" else e.norm(dim=-1, keepdim=True)
        return norm.clamp_min(torch.finfo(e.dtype).tiny)

    def see(self, e: Tensor) -> None:
        """Record the finite difference along a move."""
        moved = self.x + e
        size = float((moved - self.x).norm())
        # for smaller moves, a difference of outputs is mostly rounding
        if size <= 1e-9 * float(self.x.norm()):
            return
        with torch.no_grad():
            ratio = float((self.f(moved) - self.here).norm()) / size
        if ratio > self.ratio:
            self.ratio, self.worst = ratio, moved

    def climb_ratio(self, start: Tensor, steps: int) -> None:
        """Ascend the finite difference."""
        e = self.to_edge(start)
        for i in range(steps):
            point = e.detach().requires_grad_(True)
            change = (self.f(self.x + point) - self.here).norm() / point.norm()
            (slope,) = torch.autograd.grad(change, point)
            e = self.inside(e + self.to_edge(slope) * 0.5 * 0.9**i)
            self.see(e)

    def climb_sigma(self, start: Tensor, steps: int) -> None:
        """Ascend sigma along its singular vectors; measure the end from scratch."""
        v = self.draw()
        at = self._climbed(self.rough, start, v, steps)
        if at is None and self.rough is not self.layer:  # beyond the float32 range
            at = self._climbed(self.layer, start, v, steps)
        if at is not None:
            again = sigma_of(self.layer, self.x + at, self.map, self.seed + 10_000)
            self.sigma = max(self.sigma, again.sigma)
            self.see(at)

    def _climbed(self, layer: Function, start: Tensor, v: Tensor, steps: int) -> Tensor | None:
        """The best move of an ascent; None if sigma was never positive and finite."""
        kind = self.x.dtype if layer is self.layer else torch.float32
        e, v, best, at = self.to_edge(start), v.to(kind), 0.0, None
        for i in range(steps // 3):
            # The first from a random start, then each from the previous singular vector.
            taken = _KRYLOV_STEPS if i else 4 * _KRYLOV_STEPS
            here = (self.x + e)[None].to(kind)
            found = sigma_gradient(
                lambda x: self._of(layer, x[0])[None], here, v[None], steps=taken
            )
            sigma, slope, v = (one[0] for one in found)
            if best < float(sigma) < math.inf:
                best, at = float(sigma), e
            e = self.inside(e + self.to_edge(slope.to(e)) * 0.5 * 0.9**i)
        return at
