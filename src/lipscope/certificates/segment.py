"""A segment of a network: tokens are mixed once, then go through token-wise branches.

Derived here; proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.activation import Units
from lipscope.certificates.attention_ball import (
    PIECES,
    AttentionAt,
    AttentionBall,
    bend_of,
)
from lipscope.certificates.forms import (
    OutOfReachError,
    ellipsoid,
    gradient,
    jacobian,
    norm_above,
    positive_part,
    root,
    top_value,
    young,
)
from lipscope.certificates.norm_ball import NormAt
from lipscope.models import Branch, Feed, Norm

_SMALL = 128  # coordinates of a ball
_STEPS = 60  # of the average over a segment of distances


@dataclass(frozen=True, eq=False)
class Point:
    """A place in a segment: ``v - v_0 = J xi + lin R + rest``, ``R`` what attention leaves out."""

    value: Tensor  # v_0, (n, d)
    jacobian: Tensor  # J, (n, d, p)
    lin: Tensor  # (n, d, d_u)
    rest: Tensor  # >= |rest_i|, (n,)


@dataclass(eq=False)
class Quadratic:
    """``<l, v> >= <l, v_1> - gap + <slope, f> - <f, K f> / 2``, one block of ``K`` a token."""

    slope: Tensor  # (n, d)
    blocks: Tensor  # (n, d, d)
    gap: float = 0.0


@dataclass(frozen=True, eq=False)
class Secant:
    """``v - v_1 = (M + G Z + R) f``: ``|Z f| <= |Y f|``, ``|R f| <= rest |f|``."""

    middle: Tensor  # M, (n d, p)
    outer: Tensor  # G, (n d, q)
    inner: Tensor  # Y, (q, p)
    rest: Tensor

    @cached_property
    def size(self) -> Tensor:
        """``‖Y‖``."""
        return norm_above(self.inner) if len(self.inner) else self.rest.new_zeros(())

    @cached_property
    def slack(self) -> Tensor:
        """``>= |(G Z + R) f| / |f|``."""
        if not len(self.inner):
            return self.rest
        return norm_above(self.outer) * self.size + self.rest


class TokenBranch:
    """``v -> skip v + F(N(v))`` between what its inputs can be, around a centre."""

    def __init__(self, branch: Branch, at: Point, reach: Reads) -> None:
        self.skip = float(branch.skip)
        part = branch.part
        assert part is None or isinstance(part, Feed)
        self.units = None if part is None else Units(part)
        self.center, self.branch = at.value, branch
        n, d = at.value.shape
        eye = torch.eye(d, dtype=at.value.dtype)
        self.radius = reach.radius(at)
        self.norm = None if branch.norm is None else NormAt(branch.norm, at.value)
        slope, beyond = eye.expand(n, d, d), at.rest.new_zeros(n)
        y = at.value
        if self.norm is not None:
            radial = torch.minimum(reach.of(at, self.norm.radial[:, None])[:, 0], self.radius)
            if not self.norm.within(radial):
                raise OutOfReachError
            y, slope = self.norm.value, self.norm.slope
            beyond = self.norm.most * self.norm.remainder(self.radius)
        self.slope = slope
        wide = self._plus_skip(slope)
        extra = norm_above(wide) * at.rest + beyond
        value = y
        if self.units is not None:
            z0 = self.units.arguments(y)
            into = self.units.into.expand(n, -1, -1)
            read = into @ slope
            self.reach = reach.of(at, read)
            if self.norm is not None:
                curve = self.norm.read(self.units.into)
                self.reach = self.reach + curve * self.norm.remainder(self.radius)[:, None]
            self.low, self.high = z0 - self.reach, z0 + self.reach
            mid, half = self.units.secants(z0, self.low, self.high)
            m = self.units.through(mid)
            wide = self._plus_skip(m @ slope)
            moved = (half * self.reach).norm(dim=-1) * norm_above(self.units.out)
            apart = self.units.apart(half, into) * (reach.radius_of(at, slope) + beyond)
            extra = norm_above(wide) * at.rest + norm_above(m) * beyond
            extra = extra + torch.minimum(moved, apart)
            assert isinstance(part, Feed)
            value = part(y)
        self.point = Point(
            (at.value if branch.skip else 0.0) + value,
            wide @ at.jacobian,
            wide @ at.lin,
            extra,
        )

    def _plus_skip(self, m: Tensor) -> Tensor:
        if not self.skip:
            return m
        return m + torch.eye(m.shape[-1], dtype=m.dtype)

    def __call__(self, v: Tensor) -> Tensor:
        """The branch itself."""
        return self.branch(v)

    def minorant(self, v: Float[Tensor, "n d"], above: Quadratic, spread: Tensor) -> Quadratic:
        """A minorant of what is above, in this branch's input, around ``v``."""
        y = v if self.norm is None else self.norm.norm(v)
        slope, blocks, gap = above.slope, above.blocks, above.gap
        d0, apart = self.slope, v.new_zeros(len(v))
        if self.norm is not None:
            apart = self.norm.slope_change(v, self.radius)
        own = v.new_zeros(len(v), y.shape[-1], y.shape[-1])
        middle, error = d0, apart
        if self.units is not None:
            z = self.units.arguments(y)
            c = slope @ self.units.feed.outer
            lost, s, bend = self.units.minorant(c, z, self.low, self.high, spread)
            gap = gap + lost
            into = self.units.into
            own = (into.T * bend[:, None, :]) @ into
            read = s @ into
            mid, half = self.units.secants(z, self.low, self.high)
            m = self.units.through(mid)
            middle = m @ d0
            wide = self.units.apart(half, into @ d0)
            error = (
                wide + (norm_above(m) + self.units.apart(half, into.expand(len(v), -1, -1))) * apart
            )
        else:
            read = slope
        blocks = _pulled(blocks, self._plus_skip(middle), error)
        if self.norm is not None:
            blocks = blocks + _pulled(own, d0, apart)
            blocks = blocks + self.norm.curvature(read, v, self.radius)
            read = torch.einsum("nd,nde->ne", read, self.norm.jacobian(v))
        else:
            blocks = blocks + own
        return Quadratic(self.skip * slope + read, blocks, gap)

    def secant(self, v: Float[Tensor, "n d"], at: Secant) -> Secant:
        """The secant map of all before this branch, after it."""
        n, d = v.shape
        p = at.middle.shape[1]
        d0, apart = self.slope, v.new_zeros(n)
        if self.norm is not None:
            apart = self.norm.slope_change(v, self.radius)
        x = at.middle.view(n, d, p)
        own = norm_above(x)
        slack, rest = at.slack, at.rest
        if self.units is None:
            wide = self._plus_skip(d0)
            rest = norm_above(wide).max() * rest
            rest = rest + _shared(apart, own, norm_above(at.middle)) + apart.max() * slack
            return self._after(at, wide, at.inner, None, rest)
        y = v if self.norm is None else self.norm.norm(v)
        mid, half = self.units.secants(self.units.arguments(y), self.low, self.high)
        m, into = self.units.through(mid), self.units.into
        wide = self._plus_skip(m @ d0)
        through = norm_above(m) + self.units.apart(half, into.expand(n, -1, -1))
        error = through * apart
        rest = norm_above(wide).max() * rest + _shared(error, own, norm_above(at.middle))
        rest = rest + (error.max() + self.units.apart(half, into @ d0).max()) * slack
        side = half.sqrt()
        rows = (side[:, :, None] * (into @ (d0 @ x))).flatten(0, 1)
        used = (half > 0).flatten()
        columns = torch.block_diag(*(self.units.out * side[:, None, :]))[:, used]
        return self._after(at, wide, torch.cat([at.inner, rows[used]]), columns, rest)

    def _after(
        self, at: Secant, wide: Tensor, inner: Tensor, columns: Tensor | None, rest: Tensor
    ) -> Secant:
        n = len(wide)
        outer = (wide @ at.outer.unflatten(0, (n, -1))).flatten(0, 1)
        outer = outer if columns is None else torch.cat([outer, columns], 1)
        middle = (wide @ at.middle.unflatten(0, (n, -1))).flatten(0, 1)
        return Secant(middle, outer, inner, rest)


def _shared(each: Tensor, own: Tensor, whole: Tensor) -> Tensor:
    """``>= (sum_i each_i^2 |X_i f|^2)^(1/2) / |f|``."""
    return torch.minimum((each * own).norm(), each.max() * whole)


def _pulled(blocks: Tensor, middle: Tensor, error: Tensor) -> Tensor:
    """``K'`` with ``<f, K' f> >= <S f, K S f>`` for every ``S`` within ``error`` of ``middle``."""
    found = middle.mT @ blocks @ middle
    if not bool((error > 0).any()):
        return found
    a, b = top_value(found).sqrt(), top_value(blocks).sqrt() * error
    t = ((b + 1e-300) / (a + 1e-300)).clamp(1e-9, 1e9)[:, None, None]
    eye = torch.eye(found.shape[-1], dtype=found.dtype)
    return (1 + t) * found + (1 + 1 / t) * b.square()[:, None, None] * eye


class Reads:
    """How far read-outs of points of a segment can move."""

    def __init__(
        self, ball: AttentionBall | None, radius: float, entry: Entry | None = None
    ) -> None:
        self.ball, self.at, self.r = ball, None if ball is None else ball.at, radius
        self.entry = entry

    def of(self, at: Point, reads: Float[Tensor, "n k d"]) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, v_i - v_0i>|``."""
        moved = (reads @ at.jacobian).norm(dim=-1) * self.r + reads.norm(dim=-1) * at.rest[:, None]
        if self.ball is None:
            return moved
        return moved + self.left(reads @ at.lin) * self.r

    def left(self, reads: Float[Tensor, "n k d"]) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, R_i>| / r``: the average change of attention's Jacobian along a radius."""
        found = self.changes(reads).mean(0)
        return found if self.entry is None else found + self.entry.drift(reads)

    def changes(self, reads: Float[Tensor, "n k d"]) -> Float[Tensor, "pieces n k"]:
        """Of every read-out alone, on each ball."""
        assert self.ball is not None and self.at is not None
        return self.ball.change_of(reads[:, :, None], self.at.lead_of(reads))

    @cached_property
    def rows(self) -> Float[Tensor, "pieces n"]:
        """``>= ‖J(x)_i - J_i‖`` of every row of attention, on each ball."""
        assert self.ball is not None and self.at is not None
        lead = self.at.lead_rows
        eye = self._eye[:, None]
        return self.ball.change_of(eye, None if lead is None else lead[0][:, None])[..., 0]

    @property
    def _eye(self) -> Tensor:
        assert self.at is not None
        n, d = len(self.at.rows), self.at.output.shape[1]
        return torch.eye(d, dtype=self.at.p.dtype).expand(n, d, d)

    @cached_property
    def whole(self) -> Float[Tensor, " pieces"]:
        """``>= ‖J(x) - J‖`` on each ball."""
        assert self.ball is not None and self.at is not None
        lead = self.at.lead_rows
        return self.ball.joint_change(self._eye, None if lead is None else lead[1])

    def radius(self, at: Point) -> Float[Tensor, " n"]:
        """``>= |v_i - v_0i|``."""
        return self.radius_of(at, None)

    def radius_of(self, at: Point, m: Tensor | None) -> Float[Tensor, " n"]:
        """``>= |M_i (v_i - v_0i)|``."""
        j = at.jacobian if m is None else m @ at.jacobian
        rest = at.rest if m is None else norm_above(m) * at.rest
        moved = norm_above(j) * self.r + rest
        if self.ball is None:
            return moved
        lin = at.lin if m is None else m @ at.lin
        rows = self.rows.mean(0)
        if self.entry is not None:
            rows = rows + self.entry.drift_rows
        return moved + norm_above(lin) * rows * self.r


class Entry:
    """The norm in front of attention: its outputs lie in ``y_0 + T_y xi_y``, ``|xi_y| <= r``.

    ``y - y_0 = D T xi + q`` with ``|q_i| <= r bent_i``; the ellipsoid has ``D T T^T D^T / w_0`` and
    a ball for each ``q_i``.
    """

    def __init__(self, part: DotProduct, norm: Norm, x: Tensor, t: Tensor, r: float) -> None:
        self.norm, self.r = NormAt(norm, x), r
        self.own, self.whole = norm_above(t), norm_above(t.flatten(0, 1))
        radial = torch.minimum((self.norm.radial[:, None] @ t)[:, 0].norm(dim=-1), self.own)
        if not self.norm.within(radial * r):
            raise OutOfReachError
        self.radius = self.own * r
        self.y = self.norm.value
        through = self.norm.slope @ t  # (n, d, p)
        n, d, _ = t.shape
        moved = self.own > 0
        bent = self.norm.most * self.norm.remainder(self.radius) / r
        floor = 1e-7 * norm_above(through).max() + 1e-30
        self.bent = torch.where(moved, bent + floor, 0.0)
        flat, keep = through.flatten(0, 1), moved.repeat_interleave(d)
        flat = flat[keep]
        self.w = young(float(flat.norm()) ** 0.7, float(self.bent.norm()) * d**0.35)
        e = flat @ flat.T / self.w[0]
        each = (self.bent * self.bent.sum() / self.w[1])[moved]
        side = ellipsoid(e + torch.diag(each.repeat_interleave(d)))
        self.t = t.new_zeros(n * d, side.shape[1])
        self.t[keep] = side
        self.t = self.t.view(n, d, -1)
        self.inner = torch.linalg.solve(side, flat)
        self.blocks = jacobian(part, self.y).movedim(2, 1)  # (n, n, d, d)
        self.moved = torch.einsum("ijde,jep->idp", self.blocks, through)

    def of_rows(self, rows: Tensor) -> None:
        """Keep what is read."""
        self.blocks, self.moved = self.blocks[rows], self.moved[rows]

    def drift(self, reads: Float[Tensor, "n k d"]) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, J_A q>| / r``."""
        sizes = torch.einsum("ikd,ijde->ikje", reads, self.blocks).norm(dim=-1)
        return sizes @ self.bent

    @cached_property
    def drift_rows(self) -> Float[Tensor, " n"]:
        """``>= |(J_A q)_i| / r``."""
        return norm_above(self.blocks) @ self.bent

    def apart(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """``>= ‖S_i - D_i‖`` of secants of the norm from ``x``."""
        return self.norm.slope_change(x, self.radius)

    def error(self, x: Float[Tensor, "n d"]) -> Tensor:
        """``>= ‖T_y^(-1) S T - W‖`` of secants from ``x``, ``W = T_y^(-1) D T``."""
        keep = self.own > 0
        each = (self.apart(x) * self.own)[keep].square() / self.bent[keep]
        return (each.sum() * self.w[1] / self.bent.sum()).sqrt()

    def size(self, x: Float[Tensor, "n d"]) -> Tensor:
        """``>= ‖T_y^(-1) S T‖``."""
        return norm_above(self.inner) + self.error(x)

    def lost(self, x: Tensor, half: Tensor | None = None) -> Tensor:
        """``>= |half J_A (S - D) T f| / |f|``, all rows together."""
        j = norm_above(self.blocks if half is None else half[:, None] @ self.blocks)
        j = j * self.apart(x)
        # one f moves every token, each by its own norm of T at most
        return torch.minimum((j @ self.own).norm(), norm_above(j) * self.whole)


class Segment:
    """Attention (or nothing) and token-wise branches, for inputs ``x_0 + T xi``, ``|xi| <= r``.

    Args:
        branches: The first one may hold attention, the others do not.
        x: Centre.
        t: ``T``, of full column rank on the tokens that move.
        rows: Tokens that are read of the output; all if None.
    """

    def __init__(
        self,
        branches: tuple[Branch, ...],
        x: Float[Tensor, "n d"],
        t: Float[Tensor, "n d p"],
        rows: Tensor | None = None,
    ) -> None:
        self.branches, self.x, self.t = branches, x, t
        self.rows = torch.arange(len(x)) if rows is None else rows
        self.first = branches[0] if branches else None
        self.part = self.first.part if self.first is not None else None
        self.mixes = isinstance(self.part, DotProduct)
        self.rest = branches[1:] if self.mixes else branches
        self.skip = not self.mixes or (self.first is not None and self.first.skip)
        self.at: AttentionAt | None = None
        self.entry: Entry | None = None
        self.jacobian, self.value = t[self.rows], x[self.rows]
        if self.mixes:
            assert self.first is not None and isinstance(self.part, DotProduct)
            self.value = self.first(x)[self.rows]
            if self.first.norm is None:
                self._attend(x, t)

    def _attend(self, x: Tensor, t: Tensor) -> None:
        assert isinstance(self.part, DotProduct)
        self.at = AttentionAt(self.part, x, t, self.rows)
        moved = self.at.jacobian if self.entry is None else self.entry.moved
        self.jacobian = moved + self.t[self.rows] if self.skip else moved

    def grow(self, radius: float, pieces: int | None = None) -> None:
        """Bound everything on the balls up to this radius.

        Raises:
            OutOfReachError: Where the input of a norm could vanish.
        """
        # what grows with the radius is taken at right ends, which costs little where m is small
        self.pieces = pieces or (2 * PIECES if self.t.shape[-1] <= _SMALL else PIECES)
        self.r = radius
        if self.first is not None and self.mixes and self.first.norm is not None:
            assert isinstance(self.part, DotProduct)
            self.entry = Entry(self.part, self.first.norm, self.x, self.t, radius)
            self.entry.of_rows(self.rows)
            self._attend(self.entry.y, self.entry.t)
        ball = None if self.at is None else AttentionBall(self.at, radius, self.pieces)
        self.reads = Reads(ball, radius, self.entry)
        n, d = self.value.shape
        eye = torch.eye(d, dtype=self.x.dtype).expand(n, d, d)
        point = Point(self.value, self.jacobian, eye, self.x.new_zeros(n))
        self.tokens: list[TokenBranch] = []
        for branch in self.rest:
            self.tokens.append(TokenBranch(branch, point, self.reads))
            point = self.tokens[-1].point
        self.end = point

    def through(self, x: Tensor) -> list[Tensor]:
        """What enters every token-wise branch, and what comes out."""
        found = [(self.first(x) if self.mixes and self.first is not None else x)[self.rows]]
        for branch in self.rest:
            found.append(branch(found[-1]))
        return found

    def averages(self, start: float, kind: str) -> Tensor:
        """Weights of the grid in the average over the way from an anchor at ``start`` to any point.

        At ``t`` the way is within ``(1 - t) start + t r`` of the centre. ``hessian``: weights
        ``2 (1 - t)``; ``jacobian``: 1. Right ends of the grid, so an upper bound.
        """
        found = self.x.new_zeros(self.pieces)
        for step in range(_STEPS):
            a, b = step / _STEPS, (step + 1) / _STEPS
            far = max((1 - s) * start + s * self.r for s in (a, b))
            # a hair inside the ball of the next grid point is taken for its edge
            piece = min(self.pieces, math.ceil(far / self.r * self.pieces * (1 - 1e-12))) - 1
            found[piece] += (1 - a) ** 2 - (1 - b) ** 2 if kind == "hessian" else 1 / _STEPS
        return found

    def _start(self, x: Tensor, start: float) -> float:
        """How far an anchor is from the centre, in what attention sees."""
        if self.entry is None:
            return start
        keep = (self.entry.own > 0).repeat_interleave(x.shape[1])
        y = self.entry.norm.norm(x) - self.entry.y
        side = self.entry.t.flatten(0, 1)[keep]
        return min(float(torch.linalg.solve(side, y.flatten()[keep]).norm()), self.r)

    def minorant(
        self, x: Tensor, start: float, slope: Tensor, spread: float
    ) -> tuple[float, Tensor, Tensor]:
        """``<l, out(x')> >= <l, out(x)> - gap + <g, f> + <f, B f> / 2``, ``f`` in ``xi``."""
        found = self.through(x)
        q = Quadratic(slope, slope.new_zeros(*slope.shape, slope.shape[1]))
        for branch, v in zip(reversed(self.tokens), reversed(found[:-1]), strict=True):
            reach = x.new_zeros(()) if branch.units is None else branch.reach.square()
            q = branch.minorant(v, q, spread * reach)
        j = self.jacobian
        base = torch.einsum("ndp,nde,neq->pq", j, q.blocks, j)
        if not self.mixes:
            return q.gap, torch.einsum("nd,ndp->p", q.slope, self.t[self.rows]), -base
        assert self.at is not None and self.reads.ball is not None and self.first is not None
        assert isinstance(self.part, DotProduct)
        part = self.part
        first, eye = self.first, torch.eye(len(base), dtype=base.dtype)
        bend, start = bend_of(self.at, q.slope), self._start(x, start)
        b = bend.hessian.clone()
        for piece, w in enumerate(self.averages(start, "hessian")):
            if w > 0:
                b = b - w * self.reads.ball.hessian_change(bend, piece)
        change = x.new_zeros(())
        if bool(q.blocks.any()):  # nothing above attention bends where it is alone
            half = root(q.blocks)
            change = self.averages(start, "jacobian") @ self.reads.ball.joint_change(
                half, self.at.lead_together(half)
            )
            if self.entry is not None:
                change = change * self.entry.size(x) + self.entry.lost(x, half)
        if self.entry is not None:
            bent = positive_part(-b)
            straight = self.entry.inner.T @ bent @ self.entry.inner
            most = top_value(bent).sqrt() * self.entry.error(x)
            w0, w1 = young(float(top_value(straight).sqrt()), float(most))
            b = -straight / w0 - most.square() / w1 * eye
            y = gradient(lambda z: part(z)[self.rows] * q.slope, self.entry.norm.norm(x))
            curve = self.entry.norm.curvature(y, x, self.entry.radius)
            b = b - torch.einsum("ndp,nde,neq->pq", self.t, curve, self.t)
        w0, w1 = young(float(top_value(base).sqrt()), float(change))
        b = b - base / w0 - change.square() / w1 * eye
        g = gradient(lambda z: first(z)[self.rows] * q.slope, x)
        return q.gap, torch.einsum("nd,ndp->p", g, self.t), b

    def secant(self, x: Tensor, start: float) -> Secant:
        """The secant map from an anchor to any other point of the ball."""
        p = self.t.shape[-1]
        rest = self.x.new_zeros(())
        if self.reads.ball is not None:
            rest = self.averages(self._start(x, start), "jacobian") @ self.reads.whole
        if self.entry is not None:
            rest = rest * self.entry.size(x) + self.entry.lost(x)
        width = self.jacobian.shape[0] * self.jacobian.shape[1]
        found = Secant(
            self.jacobian.flatten(0, 1),
            self.x.new_zeros(width, 0),
            self.x.new_zeros(0, p),
            rest,
        )
        for branch, v in zip(self.tokens, self.through(x), strict=False):
            found = branch.secant(v, found)
        return found
