"""What is found inside a ball by trying: lower values that a certificate must exceed."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.attention import Map as Part
from lipscope.linalg.singular import TopSingular, top_singular
from lipscope.theorems.derived.centre import BallName


class Search:
    """The best values seen so far, and moves that stay inside the ball.

    Args:
        layer: The layer, in float64.
        x: Centre.
        radii: One per token, ``(n,)``.
        ball: ``token`` or ``frobenius``.
        part: ``attention`` or ``heads``.
        seed: Of random directions and of the solver's starts.
    """

    def __init__(
        self,
        layer: DotProduct,
        x: Tensor,
        radii: Tensor,
        ball: BallName,
        part: Part,
        seed: int,
    ) -> None:
        self.layer, self.x, self.radii = layer, x, radii[:, None]
        self.ball: BallName = ball
        self.part: Part = part
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.here = self.f(x).detach()
        self.ratio, self.sigma, self.worst = 0.0, 0.0, x

    def f(self, x: Tensor) -> Tensor:
        """The map."""
        return self.layer(x) if self.part == "attention" else self.layer.heads(x)

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
            top = sigma_of(self.layer, self.x + e, self.part, self.seed + i)
            if top.sigma > best:
                best, at = top.sigma, e
            point = (self.x + e).detach().requires_grad_(True)
            moved = torch.func.jvp(self.f, (point,), (top.v,))[1]
            (slope,) = torch.autograd.grad((top.u * moved).sum(), point)
            e = self.inside(e + self.to_edge(slope) * 0.5 * 0.9**i)
        if at is not None:
            again = sigma_of(self.layer, self.x + at, self.part, self.seed + 10_000)
            self.sigma = max(self.sigma, again.sigma)
            self.see(at)


def sigma_of(layer: DotProduct, x: Tensor, part: Part, seed: int) -> TopSingular:
    """Sigma of a layer at ``x``, from a start of its own."""
    generator = torch.Generator().manual_seed(seed)
    return top_singular(layer.linearise(x, map=part), tol=1e-4, generator=generator)
