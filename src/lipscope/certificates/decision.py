"""A decision of a linear read-out: the radius within which it cannot change.

Deterministic up to float64 rounding: exact derivatives at X, curvature bounded elsewhere. Derived
here; statements and proofs: ``docs/theory/ball-certificate.md``, "The decision" and "The third
order".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, DotProduct
from lipscope.certificates.balls import check_ball, in_double, tokens_of
from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.theorems import UNIT, Ball, BallName, HeadAt, NotApplicableError, eigenvalue, heads_of

_STARTS, _STEPS = 4, 300  # of the ascents
_FIRST = 1e-3  # smallest weight of a token beside the largest, after them
_ROUNDS = 16  # of the descent that finds weights for the token ball
_NEAR = 32  # power that tells top eigenvalues from the rest
_STEP = 5.0  # largest change of a weight asked for in a round
_LEAST = 1e-6  # smallest weight of a token at the end
_EIGEN_SLACK = 1e-10  # of an eigenvalue in float64, with room


def hessian(
    layer: DotProduct, x: Float[Tensor, "n d"], w: Float[Tensor, " d_out"], share: Tensor
) -> Float[Tensor, "nd nd"]:
    """Second derivative of ``<w, sum_i share_i f(X)_i>``, by automatic differentiation."""

    def gradient(flat: Tensor) -> Tensor:
        return torch.func.grad(lambda z: share @ layer(z.view_as(x)) @ w)(flat)

    flat = x.flatten()
    unit = torch.eye(len(flat), dtype=x.dtype)
    rows = torch.func.vmap(lambda e: torch.func.jvp(gradient, (flat,), (e,))[1], chunk_size=64)
    found = rows(unit)
    return (found + found.T) / 2


def largest_form(h: Float[Tensor, "nd nd"], tokens: int, ball: BallName) -> float:
    """``>= sup <E, H E>`` over the unit ball, 0 at least.

    In the Frobenius ball the largest eigenvalue. In the token ball, for any ``μ_j > 0``,
    ``λ_max(D^(-1/2) H D^(-1/2)) sum_j μ_j`` with ``D = diag(μ_j I)``: a descent takes weights to
    the tokens that carry the top eigenvectors, from the multipliers of the best maximum that
    ascents find. Any weights hold.
    """
    if not bool(h.isfinite().all()):
        return math.inf
    size = float(h.abs().max())
    if size == 0.0:
        return 0.0
    h = h / size  # no square of it leaves the float range
    if ball == "frobenius":
        return size * _top_value(torch.linalg.eigvalsh(h))
    weights, best = _multipliers(h, tokens), math.inf
    for _ in range(_ROUNDS):
        root = weights.rsqrt().repeat_interleave(len(h) // tokens)
        values, vectors = torch.linalg.eigh(root[:, None] * h * root)
        best = min(best, _top_value(values) * float(weights.sum()))
        if not values[-1] > 0.0:  # it rises nowhere, and no weights are better
            break
        near = (values / values[-1]).clamp_min(0.0) ** _NEAR
        carried = (vectors.square() @ (near / near.sum())).view(tokens, -1).sum(1)
        step = (carried * weights.sum() / weights).clamp(1 / _STEP, _STEP) ** 0.4
        weights = (weights * step).clamp_min(_LEAST * float(weights.max()))
    return size * best


def _multipliers(h: Tensor, tokens: int) -> Tensor:
    """``<e_j, (H e)_j>`` at the best point of some ascents in the token ball, made positive."""
    generator = start_named("multipliers")
    size = _STARTS, tokens, len(h) // tokens
    e = torch.randn(size, generator=generator, dtype=h.dtype)
    rate = 1 / max(-float(torch.linalg.eigvalsh(h)[0]), _FIRST)
    for _ in range(_STEPS):
        e = e / e.norm(dim=2, keepdim=True).clamp_min(1.0)
        e = e + (e.flatten(1) @ h).view(size) * rate
    e = e / e.norm(dim=2, keepdim=True).clamp_min(1.0)
    found = (e * (e.flatten(1) @ h).view(size)).sum(2)
    best = found[int(found.sum(1).argmax())]
    most = best.max()
    return (best / most).clamp_min(_FIRST) if most > 0 else torch.ones_like(best)


def _top_value(values: Tensor) -> float:
    """The last of some eigenvalues, with what rounding may hide of it, 0 at least."""
    return max(float(values[-1] + _EIGEN_SLACK * values.abs().max()), 0.0)


Pool = Literal["mean", "first"]
Form = tuple[Tensor, Tensor, Tensor]
_SLACK = 1e-9  # float64 rounding of the sums, with room
_OVERFLOWS = 1e150  # beyond it, squares of radii overflow
_BALANCES = tuple(2.0**k for k in range(-5, 6))


class ReadOut:
    """Scores ``g_r(X) = <w_r, pool(f(X))>`` around one centre, ``r`` of them at once.

    For ``E`` in the ball of radius ``eps``

        ``g_r(X) - g_r(X + E) <= eps slope_r + int_0^eps (eps - s) B_r(s) ds``

    with ``B(s)`` the curvature within ``s`` or ``fall + int_0^s third``, whichever is less.
    """

    def __init__(
        self,
        layer: DotProduct,
        x: Float[Tensor, "n d"],
        w: Float[Tensor, "r d_out"],
        pool: Pool,
        ball: BallName,
    ) -> None:
        self.ball: BallName = ball
        self.layer, self.x, self.w = layer, x, w
        self._held: tuple[float, list[_Rows]] = (-1.0, [])
        self.share = x.new_zeros(len(x))
        self.share[:] = 1 / len(x)
        if pool == "first":
            self.share = (torch.arange(len(x)) == 0).to(x.dtype)
        self.gradients = torch.stack([_score_gradient(layer, x, each, self.share) for each in w])
        parts = w if layer.output is None else w @ layer.output
        seen = (w != 0).double()
        if layer.output is not None:
            seen = seen @ (layer.output != 0).double()
        heads = list(
            zip(
                heads_of(layer, fold=False),
                *(s.unflatten(1, (layer.num_heads, -1)).unbind(1) for s in (parts, seen)),
                strict=True,
            )
        )
        # No path of nonzero weights from a token: nothing that is read depends on the input.
        reads = [(s @ (head.value != 0).double()).any(1) for head, _, s in heads]
        self.blind = ~torch.stack(reads).any(0)
        sizes = w.norm(dim=1)
        outer = 1.0 if layer.output is None else layer.output.norm()
        # one row of values per read-out: what w makes of the head's values
        self.centres = [
            HeadAt(
                dataclasses.replace(
                    head, value=u @ head.value, size=float(sizes.max() * outer * head.value.norm())
                ),
                x,
            )
            for head, u, _ in heads
        ]

    @cached_property
    def slope(self) -> Tensor:
        """``>= sup <∇g_r(X), E>`` over the unit ball, ``(r,)``: with what rounding may hide."""
        hidden = sum(c.slack for c in self.centres)
        if self.ball == "frobenius":
            return self.gradients.flatten(1).norm(dim=1) + hidden
        return self.gradients.norm(dim=-1).sum(-1) + hidden * len(self.share) ** 0.5

    @cached_property
    def hidden(self) -> float:
        """What rounding may add to a difference of scores, biases left out."""
        total = 0.0
        for c in self.centres:
            moved = c.rounding * (c.p * c.nu).sum(-1)
            total += float(UNIT * len(c.x) ** 0.5 * c.head.size_v * c.x.norm(dim=1).max())
            total += 2 * float(moved.max())
        return total

    @cached_property
    def fall(self) -> Tensor:
        """``>= sup -<E, H_r(X) E>`` over the unit ball, ``(r,)``, from the Hessian itself."""
        found = [
            largest_form(-hessian(self.layer, self.x, w, self.share), len(self.x), self.ball)
            for w in self.w
        ]
        hidden = sum(_hidden_bend(c) @ self.share for c in self.centres)
        return self.slope.new_tensor(found) + hidden

    def radii(
        self, margins: Float[Tensor, " r"], steps: int, *, exact: bool = False
    ) -> Float[Tensor, " r"]:
        """Radii within which ``g_r`` falls by less than its margin, as far as is proved.

        Best only for the least of them, the others may be cut off at twice the least. ``exact``
        uses the Hessian at X.
        """
        if bool(self.blind.all()):
            return torch.full_like(margins, math.inf)
        margins = (margins - self.hidden).masked_fill(self.blind, math.inf)
        if not bool((margins > 0).all()):  # a tie, up to rounding
            return torch.zeros_like(margins)
        top = self._scale(margins)
        if top == 0.0:
            raise NotApplicableError("no radius is small enough: its derivatives overflow")
        edges, pieces, kept = [0.0], [], torch.zeros_like(margins)
        at = self.fall if exact else torch.full_like(margins, math.inf)
        for step in range(1, 4 * steps + 1):  # pieces may reach beyond what one alone does
            edges.append(top * step / steps)
            bend, rise = self.curvature(edges[-1]), torch.zeros_like(at)
            if bool(at.isfinite().any()):
                rise = self.third(edges[-1])
            end = at + rise * (edges[-1] - edges[-2])
            less = at + end < 2 * bend
            pieces.append((torch.where(less, at, bend), torch.where(less, rise, 0.0)))
            at = torch.minimum(end, bend) if exact else at
            reached = _largest_radii(self.slope, edges, pieces, margins)
            if not bool((reached > kept).any()):
                break
            kept = torch.maximum(kept, reached)
            if float(reached.min()) < edges[-1]:
                break
        return kept.masked_fill(self.blind, math.inf)

    def _scale(self, margins: Tensor) -> float:
        """A radius that nearly keeps all margins: half of it does; 0 if none does."""
        top = min(float((margins / self.slope).min()), _OVERFLOWS)  # no larger one can be certified
        while top > 1 / _OVERFLOWS and not self._keeps(top / 2, margins):
            top /= 2
        return top if top > 1 / _OVERFLOWS else 0.0

    def _keeps(self, radius: float, margins: Tensor) -> bool:
        moved = radius * self.slope + radius**2 / 2 * self.curvature(radius)
        return bool((moved < margins).all())

    def curvature(self, radius: float) -> Tensor:
        """``>= |<E, H_r(X') E>|`` for X' within ``radius`` and E in the unit ball, ``(r,)``."""
        return self._over_ball([(r, r.second) for r in self._rows(radius)])

    def third(self, radius: float) -> Tensor:
        """``>= |d^3/dt^3 g_r(X' + t E)|`` at 0, for X' within ``radius``, E in the unit ball."""
        return self._over_ball([(r, r.third) for r in self._rows(radius)])

    def _rows(self, radius: float) -> list[_Rows]:
        if self._held[0] != radius:
            self._held = radius, [_Rows(Ball(c, radius, self.ball)) for c in self.centres]
        return self._held[1]

    def _over_ball(self, rows: list[tuple[_Rows, Form]]) -> Tensor:
        """Forms of all rows and heads, added."""
        if self.ball == "token":
            each = [
                own + 2 * cross * r.spread + others * r.spread**2
                for r, (own, cross, others) in rows
            ]
            found = torch.stack(each).sum(0) @ self.share
        else:
            found = self._over_frobenius(rows)
        # the slack, and no NaN from infinities that meet
        return torch.nan_to_num(found * (1 + _SLACK), nan=math.inf, posinf=math.inf)

    def _over_frobenius(self, rows: list[tuple[_Rows, Form]]) -> Tensor:
        """``min_κ max_j d_j``: the quadratic form made diagonal by ``2 A S <= κ A^2 + S^2 / κ``."""
        best = None
        for balance in _BALANCES:
            total = sum(
                self.share * (own + balance * cross)
                + (self.share * (others + cross / balance)) @ r.weights
                for r, (own, cross, others) in rows
            )
            assert isinstance(total, Tensor)
            worst = total.amax(-1)
            best = worst if best is None else torch.minimum(best, worst)
        assert best is not None
        return best


class _Rows:
    """Forms ``own_i |e_i|^2 + 2 cross_i |e_i| S_i + others_i S_i^2`` of rows, each ``(r, n)``.

    They bound the second and the third derivative of ``o_i`` along every E in the unit ball.
    ``S_i^2 >= Var_P'(<u, e>)`` for unit ``u``: ``spread_i^2`` in the unit token ball,
    ``sum_j weights_ij |e_j|^2`` in a Frobenius ball.
    """

    def __init__(self, ball: Ball) -> None:
        c, p = ball.c, ball.p
        self.ball, self.a = ball, c.norm_a
        self.v = (c.head.value.norm(dim=1) + UNIT * c.head.size_v)[:, None]
        self.rho = ball.rho.amax(-1)
        # >= |e_j - sum_l P'_il e_l|, which is (1 - P'_ij) times a difference of two moves
        apart = 2 * p.apart * ball.visible_eps[:, None]
        self.moved = torch.minimum(apart, (ball.visible_eps + ball.shift)[:, None])
        # >= |z'_ij - z_ij|
        self.dz = self.a * self.moved + (p.change * c.mu).sum(-1, keepdim=True)

    @cached_property
    def second(self) -> Form:
        """Of the second derivative."""
        third, mixed, top = self._passed(self._moments)
        sd_v, sd_z = self.deviations
        cross = self.v * sd_z + self.a * sd_v + self.rho * mixed
        return third, cross, 2 * self._linear(self.v, self.rho) + self.rho.square() * top

    @cached_property
    def third(self) -> Form:
        """Of the third derivative, one factor of each product taken at its largest."""
        v, a, rho, (sd_v, sd_z) = self.v, self.a, self.rho, self.deviations
        own, cross, others, mixed, top = self._passed(self._cubes)
        spread = self.spread if self.ball.ball == "token" else self.weights.amax(-1).sqrt()
        most = 3 * sd_v * (sd_z + rho * spread)
        own = own + most * sd_z.square()
        cross = rho * (cross + most * sd_z) + 3 * a * mixed
        return own, cross, rho.square() * (others + most) + 6 * a * (v + top * rho)

    @cached_property
    def deviations(self) -> tuple[Tensor, Tensor]:
        """``>= sqrt(Var v')``, ``(r, n)``, and ``sqrt(λ(Cov z'))``."""
        ball = self.ball

        def roots(rows: slice) -> tuple[Tensor, ...]:
            upper, z = ball.p.upper[rows], ball.c.z(rows)
            y = ball.c.y(rows).permute(2, 0, 1)
            of_z = _root_of(upper[None], z, torch.zeros_like(upper))
            return (upper * y.square()).sum(-1).sqrt(), of_z

        of_v, of_z = self._passed(roots)
        return of_v + self.v * ball.spread, of_z + self.a * ball.spread

    def _passed(self, part: Callable[[slice], tuple[Tensor, ...]]) -> list[Tensor]:
        found = [part(rows) for rows in self.ball.c.chunks]
        return [torch.cat(each, dim=-1) for each in zip(*found, strict=True)]

    def _values(self, rows: slice) -> tuple[Tensor, Tensor]:
        """``y``, ``(r, rows, n)``, and ``>= |y' - y|``."""
        c, p = self.ball.c, self.ball.p
        y = c.y(rows).permute(2, 0, 1)
        rounding = UNIT * c.head.size_v * c.x.norm(dim=-1).max()
        dy = self.v[..., None] * self.moved[rows]
        return y, dy + (p.change[rows] * y.abs()).sum(-1, keepdim=True) + rounding

    def _moments(self, rows: slice) -> tuple[Tensor, ...]:
        """Moments of ``y'`` with two ``z'`` in the rows, weighted by ``U``; the largest ``y'``."""
        upper, z, dz = self.ball.p.upper[rows], self.ball.c.z(rows), self.dz[rows]
        y, dy = self._values(rows)
        signed = [(s * y + dy).clamp_min(0.0) for s in (1, -1)]
        top = torch.stack([torch.where(upper > 0, s, 0.0).amax(-1) for s in signed]).amax(0)
        third = torch.stack([_root_of(upper * s, z, dz).square() for s in signed]).amax(0)
        mixed = _root_of(upper * torch.maximum(*signed).square(), z, dz)
        return third, mixed, top

    def _cubes(self, rows: slice) -> tuple[Tensor, ...]:
        """The same with ``|y'| b + 3 |V| m``, ``b`` how fast a logit moves; and with ``y'``."""
        upper, z, dz = self.ball.p.upper[rows], self.ball.c.z(rows), self.dz[rows]
        y, dy = self._values(rows)
        y, apart = y.abs() + dy, self.moved[rows] / self.ball.eps.max()
        reach = self.ball.c.mu[rows] + dz + self.rho[rows, None] * apart
        size = y * reach + 3 * self.v[..., None] * apart
        return (
            _root_of(upper * size, z, dz).square(),
            _root_of(upper * size.square(), z, dz),
            torch.where(upper > 0, size, 0.0).amax(-1),
            _root_of(upper * y.square(), z, dz),
            torch.where(upper > 0, y, 0.0).amax(-1),
        )

    def _linear(self, v: Tensor, rho: Tensor) -> Tensor:
        """``>= |Cov(<V, e>, <h', e>)| / S^2``: half of it where V and h are orthogonal."""
        c = self.ball.c
        if c.rotary is not None:
            return v * rho
        along = (c.head.value @ c.head.key.T @ c.q.T).abs()
        return (v * rho + torch.minimum(along + v * c.norm_a * self.ball.eps, v * rho)) / 2

    @cached_property
    def spread(self) -> Tensor:
        """``sqrt(Var)`` of the moves that a row reads, in the unit token ball, ``(n,)``."""
        return self.ball.spread / self.ball.eps

    @cached_property
    def weights(self) -> Tensor:
        """``C`` with ``Var_P'(<u, e>) <= sum_j C_ij |e_j|^2``, ``(n, n)``.

        ``U``; or, where one token holds nearly all the weight, moves relative to its own.
        """
        p = self.ball.p
        apart, best = p.apart.min(-1, keepdim=True)
        other = (2 * p.upper).scatter(-1, best, 2 * apart)
        return torch.where(
            other.sum(-1, keepdim=True) < p.upper.sum(-1, keepdim=True), other, p.upper
        )


def _largest_radii(
    slope: Tensor, edges: list[float], pieces: list[tuple[Tensor, Tensor]], margins: Tensor
) -> Tensor:
    """The largest radii up to the last edge with ``eps slope + int (eps - s) B(s) ds < margin``.

    On each piece ``B`` is a start and a rise from there on.
    """
    least, most = torch.zeros_like(margins), torch.full_like(margins, edges[-1])
    left, right = torch.tensor(edges[:-1]).to(most), torch.tensor(edges[1:]).to(most)
    bend, rise = (torch.stack(part, -1) for part in zip(*pieces, strict=True))

    def keeps(eps: Tensor) -> Tensor:
        far, near = ((eps[:, None] - edge).clamp_min(0.0) for edge in (left, right))
        flat = (far.square() - near.square()) / 2
        bent = bend * flat + rise * (far * flat - (far**3 - near**3) / 3).clamp_min(0.0)
        bent = torch.where(far > near, bent, 0.0)  # no inf * 0
        return (eps * slope + bent.sum(-1)) * (1 + _SLACK) < margins

    whole = keeps(most)
    if bool(whole.all()):
        return most
    for _ in range(60):
        middle = (least + most) / 2
        held = keeps(middle)
        least, most = torch.where(held, middle, least), torch.where(held, most, middle)
    return torch.where(whole, edges[-1], least)


def _root_of(weights: Tensor, z: Tensor, dz: Tensor) -> Tensor:
    """``>= sup_u sqrt(sum_j weights_ij <z'_ij, u>^2)`` for ``|z'_ij - z_ij| <= dz_ij``."""
    grams = [(part[..., None] * z).mT @ z for part in weights.view(-1, *z.shape[:2])]
    roots = torch.stack([eigenvalue(gram).sqrt() for gram in grams])
    return roots.view(weights.shape[:-1]) + (weights * dz.square()).sum(-1).sqrt()


def _hidden_bend(c: HeadAt) -> Tensor:
    """What rounding may hide of ``<E, H E>`` over the unit ball, ``(n,)``; as `AtInput.slack`."""
    unit = UNIT * len(c.x) ** 0.5
    share, v, a, rho = 2 * c.rounding + unit, c.head.size_v, c.norm_a, c.rho.amax(-1)
    y, z = c.nu.amax(-1), c.mu.amax(-1)
    dv = unit * v * c.x.norm(dim=-1).max()
    dz = unit * float(c.head.query.norm() * c.k.norm(dim=-1).max())
    if c.rotary is not None:
        dz = dz * c.head.rotation_norm
    moved = z + 2 * rho
    exact = 2 * v * moved + 2 * a * y + y * moved.square()
    return 4 * (share * exact + 2 * v * dz + 2 * a * dv + dv * moved.square() + 2 * y * moved * dz)


def _score_gradient(layer: DotProduct, x: Tensor, w: Tensor, share: Tensor) -> Tensor:
    """``∇g(X)``, all heads and rows together."""
    point = x.clone().requires_grad_(True)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(share @ layer(point) @ w, point)
    return found


_FAR = 0.1  # of the nearest distance, below which a radius says so
_DENSE = 1024  # entries of X up to which the Hessian of a margin is formed


@dataclass(frozen=True, repr=False)
class CertifiedRadius(Shown):
    """The radius within which a decision cannot change."""

    radius: float  # no X' in the open ball of this radius changes the decision
    ball: BallName  # which ball
    decision: int  # class at X
    rival: int  # the class that limits the radius
    margin: float  # difference of their scores at X
    nearest: float  # distance from a token to the nearest other token's vector
    fraction: float  # ``radius / nearest``: well below 1, no word can be replaced within it
    note: str | None = None  # what to know, or None


def certified_radius(
    layer: Attention,
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "c d_out"],
    *,
    bias: Float[Tensor, " c"] | None = None,
    pool: Pool = "mean",
    ball: BallName = "token",
    table: Float[Tensor, "vocab d"] | None = None,
    steps: int = 8,
) -> CertifiedRadius:
    """The largest radius found within which ``argmax(W pool(f(X)) + b)`` cannot change.

    With ``g_l = <W_k - W_l, pool(f(X))> + b_k - b_l`` for decision ``k`` and rival ``l``: the
    exact ``∇g_l(X)``, all heads and rows together, and bounds ``M_l(s)`` and ``T_l(s)`` of the
    second and third derivative over the ball of radius ``s``. The radius is the largest with
    ``eps ‖∇g_l‖* + int_0^eps (eps - s) B_l(s) ds < g_l`` for all rivals; ``‖·‖*`` is the sum of
    the tokens' norms (``token``) or the Frobenius norm. ``B_l(s)`` is the lesser of ``M_l(s)`` and,
    where X has at most 1,024 entries, ``H_l + int_0^s T_l`` with ``H_l`` from the Hessian at X.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary embedding;
    exact where f is linear in X. It speaks of moves of the map's input, not of replaced
    words: read ``fraction`` first.

    Args:
        layer: The layer; the map is ``attention``.
        x: Its input.
        weight: Read-out on the pooled output.
        bias: Of the read-out.
        pool: ``mean`` over tokens, or the ``first`` token.
        ball: ``token``: every token moves by at most the radius; ``frobenius``: all together.
        table: Vectors of other tokens, for the nearest distance; the rows of ``x`` if None.
        steps: Pieces of the integral.

    Without attention between tokens (n = 1) the map is linear and the radius exact:

    >>> from lipscope import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> found = certified_radius(layer, torch.tensor([[3.0, 1.0]]), torch.eye(2))
    >>> round(found.radius * 2**0.5, 6)  # the margin is 2, the read-out's norm sqrt(2)
    2.0
    """
    if steps < 1:
        raise InputError(f"`steps` should be at least 1. Found `steps = {steps}`.")
    check_ball(ball)
    at = Decision(layer, x, weight, bias, pool)
    if at.margins[at.rivals].min() <= 0:
        limit, radius = int(at.rivals[0]), 0.0
    else:
        try:
            radii = _rival_radii(at, ball, steps)
        except NotApplicableError as error:
            raise InputError(f"No certificate: {error}.") from error
        limit, radius = int(at.rivals[radii.argmin()]), float(radii.min())
    nearest = _nearest_distance(at.x, table)
    fraction = radius / nearest if nearest > 0 else math.inf
    return CertifiedRadius(
        radius=radius,
        ball=ball,
        decision=at.decision,
        rival=limit,
        margin=float(at.margins[limit]),
        nearest=nearest,
        fraction=fraction,
        note=_radius_note(radius, fraction),
    )


def _rival_radii(at: Decision, ball: BallName, steps: int) -> Tensor:
    """Radii of all rivals, the least of them from the Hessian at X if that is small enough."""
    margins = at.margins[at.rivals] - at.rounding
    radii = ReadOut(at.layer, at.x, at.differences, at.pool, ball).radii(margins, steps)
    sharp: set[int] = set()
    while at.x.numel() <= _DENSE and (least := int(radii.argmin())) not in sharp:
        if not 0 < float(radii[least]) < math.inf:
            break
        sharp.add(least)
        alone = ReadOut(at.layer, at.x, at.differences[[least]], at.pool, ball)
        again = alone.radii(margins[[least]], steps, exact=True)
        radii[least] = torch.maximum(radii[least], again[0])
    return radii


def _radius_note(radius: float, fraction: float) -> str | None:
    if radius == 0.0:
        return "no radius: two classes tie, up to rounding"
    if math.isinf(radius):
        return "infinite: the scores do not depend on the input"
    if fraction < _FAR:
        return "far from any other token's vector: no replacement of words is covered"
    return None


class Decision:
    """Scores and margins of a read-out, checked, in float64."""

    def __init__(
        self, layer: Attention, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Pool
    ) -> None:
        self.layer = in_double(layer, None)
        self.pool: Pool = pool
        self.x = tokens_of(self.layer, x)
        self.weight = weight.detach().to("cpu", torch.float64)
        if pool not in ("mean", "first"):
            raise InputError(f"`pool` should be mean or first. Found `{pool}`.")
        try:
            _ = HeadAt(heads_of(self.layer)[0], self.x).p  # mask and positions fit the tokens
        except NotApplicableError as error:
            raise InputError(f"No certificate: {error}.") from error
        with torch.no_grad():
            width = self.layer(self.x).shape[1]
        if weight.ndim != 2 or len(weight) < 2 or weight.shape[1] != width:
            raise InputError(
                f"`weight` should have shape (classes, {width}), at least two classes. "
                f"Found {tuple(weight.shape)}."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InputError(
                f"`bias` should have shape ({len(weight)},), one number per class. "
                f"Found {tuple(bias.shape)}."
            )
        self.bias = None if bias is None else bias.detach().to("cpu", torch.float64)
        with torch.no_grad():
            scores = self.scores(self.x)
        if not bool(torch.isfinite(scores).all()):
            raise InputError("The read-out should give finite scores. Found NaN or infinite ones.")
        self.decision = int(scores.argmax())
        self.margins = scores[self.decision] - scores
        others = torch.arange(len(scores)) != self.decision
        order = self.margins.argsort()
        self.rivals = order[others[order]]
        self.differences = self.weight[self.decision] - self.weight[self.rivals]

    @property
    def rounding(self) -> float:
        """Of a difference of scores, where biases are added that may cancel."""
        layer, sizes = self.layer, self.weight.norm(dim=1).max()
        outer = 1.0 if layer.output is None else layer.output.norm()
        given = [(layer.value_bias, sizes * outer), (layer.output_bias, sizes), (self.bias, 1.0)]
        return UNIT * sum(float(b.norm() * factor) for b, factor in given if b is not None)

    def scores(self, x: Tensor) -> Tensor:
        """``W pool(f(X)) + b``."""
        y = self.layer(x)
        found = self.weight @ (y.mean(0) if self.pool == "mean" else y[0])
        return found if self.bias is None else found + self.bias


def _nearest_distance(x: Tensor, table: Tensor | None) -> float:
    """Smallest distance between a token and another vector; equal vectors do not count."""
    others = x if table is None else table.detach().to("cpu", torch.float64)
    if others.ndim != 2 or others.shape[1] != x.shape[1]:
        raise InputError(
            f"`table` should have shape (vocab, {x.shape[1]}). Found {tuple(others.shape)}."
        )
    apart = torch.cdist(x, others, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart[apart > 1e-9 * x.norm(dim=-1).max()]
    return float(apart.min()) if apart.numel() else math.inf
