"""Network segments: one attention layer (or none) followed by token-wise branches.

Derived here; proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.attention_at import AttentionAt, bend_of, moves_apart
from lipscope.certificates.attention_ball import PIECES, AttentionBall
from lipscope.certificates.forms import (
    OutOfReachError,
    added,
    ellipsoid,
    gradient,
    jacobian,
    norm_above,
    positive_part,
    thin_root,
    top_value,
    young,
)
from lipscope.certificates.tokenwise import NormBall, Units
from lipscope.models import Branch, Feed, Norm

_ENTRIES = 2_000_000  # maximum size of tensors of weights by read-outs
_STEPS = 60  # of the average over a segment of distances


@dataclass(frozen=True, eq=False)
class Point:
    """A point of a segment: ``v - v_0 = J xi + lin R + rest``, ``R`` the remainder of attention."""

    value: Tensor  # v_0, (n, d)
    jacobian: Tensor  # J, (n, d, p)
    lin: Tensor  # (n, d, d_u)
    rest: Tensor  # >= |rest_i|, (n,)


@dataclass(eq=False)
class Quadratic:
    """``<l, v> >= <l, v_1> - gap + <slope, f> - <f, K f> / 2``, one block of ``K`` per token."""

    slope: Tensor  # (n, d)
    blocks: Tensor  # (n, d, d)
    gap: float = 0.0


@dataclass(frozen=True, eq=False)
class Loose:
    """``G Z f`` with ``|Z f| <= <f, Y f>^(1/2) + rest |f|``: the uncertain part of a secant."""

    outer: Tensor  # G, (n d, q)
    inner: Tensor  # Y, (p, p)
    rest: Tensor

    @cached_property
    def size(self) -> Tensor:
        """``>= |Z f| / |f|``."""
        return top_value(self.inner).sqrt() + self.rest

    def slack(self, reads: Float[Tensor, "n k d"] | None = None) -> Tensor:
        """``>= |B G Z f| / |f|`` for blocks ``B_i``; None: the identity."""
        outer = self.outer
        if reads is not None:
            outer = (reads @ outer.unflatten(0, (len(reads), -1))).flatten(0, 1)
        return norm_above(outer) * self.size

    def form(self, k: Tensor) -> Tensor:
        """``>= <G Z f, K G Z f>``, as a form in ``f``."""
        most = top_value(self.outer.T @ k @ self.outer)
        w = young(float(self.size - self.rest), float(self.rest))
        eye = torch.eye(self.inner.shape[1], dtype=k.dtype)
        return most * (self.inner / w[0] + self.rest.square() / w[1] * eye)


@dataclass(frozen=True, eq=False)
class Secant:
    """``v - v_1 = (M + sum G Z) f``."""

    middle: Tensor  # M, (n d, p)
    loose: tuple[Loose, ...]

    def slack(self, reads: Float[Tensor, "n k d"] | None = None) -> Tensor:
        """``>= |B sum G Z f| / |f|``."""
        return sum((one.slack(reads) for one in self.loose), self.middle.new_zeros(()))

    def read(self, f: Callable[[Tensor], Tensor], *more: Loose) -> Secant:
        """Apply a linear map, given by its action on columns, and add uncertain parts."""
        loose = (Loose(f(one.outer), one.inner, one.rest) for one in self.loose)
        return Secant(f(self.middle), (*loose, *more))


class TokenBranch:
    """``v -> skip v + F(N(v))`` over the range of its inputs, around a centre.

    Args:
        last: Whether only linear maps follow.
    """

    def __init__(self, branch: Branch, at: Point, reach: Reads, last: bool = False) -> None:
        self.skip = float(branch.skip)
        norm, part, one = branch.norm, branch.part, at.value.new_ones(at.value.shape[1])
        if norm is None:  # use an identity
            norm = Norm(one, 0 * one, centred=False, scaled=False)
        assert isinstance(norm, Norm) and (part is None or isinstance(part, Feed))
        self.units = None if part is None else Units(part)
        self.reaches, self.at = reach, at
        self.norm, self.bends = NormBall(norm, at.value), norm.scaled
        value, slope, beyond = self.norm.value, self.norm.slope, torch.zeros_like(at.rest)
        if self.bends:
            radial = torch.minimum(reach.of(at, self.norm.radial[:, None])[:, 0], self.radius)
            if not self.norm.within(radial):
                raise OutOfReachError
            beyond = self.norm.most * self.norm.remainder(self.radius)
        self.slope, self.wide = slope, self._plus_skip(slope)
        extra = norm_above(self.wide) * at.rest + beyond
        if self.units is not None:
            z0 = self.units.arguments(value)
            into = self.units.into.expand(len(value), -1, -1)
            read = into @ slope
            curve = z0.new_zeros(())
            if self.bends:
                curve = self.norm.read(self.units.into) * self.norm.remainder(self.radius)[:, None]
            self.reach = curve + reach.of(at, read, self.units.close(z0, last) - curve)
            self.low, self.high = z0 - self.reach, z0 + self.reach
            self.mid, half = self.units.secants(z0, self.low, self.high)
            self.half, m = half, self.units.through(self.mid)
            self.wide = self._plus_skip(m @ slope)
            moved = (half * self.reach).norm(dim=-1) * norm_above(self.units.out)
            if bool((at.rest + beyond).any()):  # a nonlinear norm: distances are needed
                apart = self.units.apart(half, into) * (reach.radius(at, slope) + beyond)
                moved = torch.minimum(moved, apart)
            extra = norm_above(self.wide) * at.rest + norm_above(m) * beyond + moved
            value = self.units.feed(value)
        value = (at.value if branch.skip else 0.0) + value
        self.point = Point(value, self.wide @ at.jacobian, self.wide @ at.lin, extra)

    @cached_property
    def radius(self) -> Tensor:
        """``>= |v_i - v_0i|``."""
        return self.reaches.radius(self.at)

    def _slope_change(self, v: Tensor) -> Tensor:
        """`NormBall.slope_change`; 0 where the norm is linear."""
        return self.norm.slope_change(v, self.radius) if self.bends else v.new_zeros(len(v))

    def _plus_skip(self, m: Tensor) -> Tensor:
        if not self.skip:
            return m
        return m + torch.eye(m.shape[-1], dtype=m.dtype)

    def minorant(self, v: Float[Tensor, "n d"], above: Quadratic, spread: Tensor) -> Quadratic:
        """Pull a minorant of the output back to this branch's input, around ``v``."""
        y = self.norm.norm(v)
        slope, blocks, gap = above.slope, above.blocks, above.gap
        d0, apart = self.slope, self._slope_change(v)
        own = v.new_zeros(len(v), y.shape[-1], y.shape[-1])
        middle, error, read = d0, apart, slope
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
        blocks = _pulled(blocks, self._plus_skip(middle), error) + _pulled(own, d0, apart)
        if self.bends:
            blocks = blocks + self.norm.curvature(read, v, self.radius)
        read = torch.einsum("nd,nde->ne", read, self.norm.jacobian(v))
        read = read + slope if self.skip else read
        return Quadratic(read, blocks, gap)

    def secant(self, v: Float[Tensor, "n d"], at: Secant) -> Secant:
        """The secant map up to and including this branch."""
        n, d = v.shape
        d0, apart = self.slope, self._slope_change(v)
        x, slip = at.middle.view(n, d, -1), apart.new_zeros(())
        if bool(apart.any()):
            slip = _shared(apart, norm_above(x), norm_above(at.middle)) + apart.max() * at.slack()
        if self.units is None:
            return self._after(at, d0, torch.eye(d, dtype=v.dtype).expand(n, d, d), slip)
        z = self.units.arguments(self.norm.norm(v))
        mid, half = self.units.secants(z, self.low, self.high)
        m, side = self.units.through(mid), half.sqrt()[:, :, None]
        found = self._after(at, m @ d0, m, slip)
        into, used = side * self.units.into, (half > 0).flatten()
        if not bool(used.any()):
            return found
        rows = ((into @ d0) @ x).flatten(0, 1)[used]
        columns = torch.block_diag(*(self.units.out * side.mT))[:, used]
        rest = at.slack(into @ d0) + norm_above(into).max() * slip
        return Secant(found.middle, (*found.loose, Loose(columns, rows.T @ rows, rest)))

    def _after(self, at: Secant, straight: Tensor, outer: Tensor, slip: Tensor) -> Secant:
        """Compose with the token-wise maps; ``outer`` maps the norm's remainder ``slip``."""
        wide = self._plus_skip(straight)

        def mapped(columns: Tensor) -> Tensor:
            return (wide @ columns.unflatten(0, (len(wide), -1))).flatten(0, 1)

        if not float(slip) > 0:
            return at.read(mapped)
        nothing = at.middle.new_zeros(at.middle.shape[1], at.middle.shape[1])
        return at.read(mapped, Loose(torch.block_diag(*outer), nothing, slip))


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
    """Bounds of the moves of read-outs of points of a segment."""

    def __init__(
        self, ball: AttentionBall | None, radius: float, entry: Entry | None = None
    ) -> None:
        self.ball, self.at, self.r = ball, None if ball is None else ball.at, radius
        self.entry = entry

    def of(
        self, at: Point, reads: Float[Tensor, "n k d"], enough: Float[Tensor, "n k"] | float = 0.0
    ) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, v_i - v_0i>|``; may stop sharpening once below ``enough``."""
        moved = (reads @ at.jacobian).norm(dim=-1) * self.r + reads.norm(dim=-1) * at.rest[:, None]
        if self.ball is None:
            return moved
        return moved + self.left(reads @ at.lin, (enough - moved) / self.r) * self.r

    def left(
        self, reads: Float[Tensor, "n k d"], enough: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, R_i>| / r``: the average change of attention's Jacobian along a radius."""
        ball, at = self.ball, self.at
        assert ball is not None and at is not None
        drift = 0.0 if self.entry is None else self.entry.drift(reads)
        few = max(1, _ENTRIES // (ball.pieces * at.p.numel()))
        each = [ball.changes_of(some[:, :, None]) for some in reads.split(few, 1)]
        plain, rest = (torch.cat(some, -1) for some in zip(*each, strict=True))
        wanted = (plain.mean(0) + drift >= enough) & (rest < plain).any(0)
        return ball.with_lead(plain, rest, at.lead_of(reads, wanted)).mean(0) + drift

    @cached_property
    def rows(self) -> Float[Tensor, "pieces n"]:
        """``>= ‖J(x)_i - J_i‖`` for every row of attention, on each ball."""
        assert self.ball is not None and self.at is not None
        lead = self.at.lead_rows
        eye = self._eye[:, None]
        return self.ball.change_of(eye, None if lead is None else lead[0][:, None])[..., 0]

    @property
    def rows_moved(self) -> Float[Tensor, " n"]:
        """``>= |R_i| / r``: the average of `rows`, plus the remainder of a norm in front."""
        rows = self.rows.mean(0)
        return rows if self.entry is None else rows + self.entry.drift_rows

    @property
    def _eye(self) -> Tensor:
        assert self.at is not None
        n, d = len(self.at.rows), self.at.output.shape[1]
        return torch.eye(d, dtype=self.at.p.dtype).expand(n, d, d)

    def whole(self, shares: Float[Tensor, " b"]) -> Float[Tensor, "p p"]:
        """`AttentionBall.joint_change` for all outputs."""
        assert self.ball is not None and self.at is not None
        lead = self.at.lead_rows
        return self.ball.joint_change(self._eye, shares, lambda: lead and lead[1])

    def radius(self, at: Point, m: Float[Tensor, "n k d"] | None = None) -> Float[Tensor, " n"]:
        """``>= |M_i (v_i - v_0i)|``; None: for the identity."""
        j = at.jacobian if m is None else m @ at.jacobian
        rest = at.rest if m is None else norm_above(m) * at.rest
        moved = norm_above(j) * self.r + rest
        if self.ball is None:
            return moved
        lin = at.lin if m is None else m @ at.lin
        return moved + norm_above(lin) * self.rows_moved * self.r


class Entry:
    """The norm in front of attention: its outputs lie in ``y_0 + T_y xi_y``, ``|xi_y| <= r``.

    ``y - y_0 = D T xi + q`` with ``|q_i| <= r bent_i``; the ellipsoid consists of
    ``D T T^T D^T / w_0`` and a ball for each ``q_i``.
    """

    def __init__(self, part: DotProduct, norm: Norm, x: Tensor, t: Tensor, r: float) -> None:
        self.norm, self.r = NormBall(norm, x), r
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
        each = (self.bent * self.bent.sum() / self.w[1])[moved]
        if moves_apart(t):  # one ellipsoid per token
            own = through[moved]
            e = own @ own.mT / self.w[0] + each[:, None, None] * torch.eye(d, dtype=t.dtype)
            side = torch.block_diag(*ellipsoid(e))
        else:
            e = flat @ flat.T / self.w[0]
            side = ellipsoid(e + torch.diag(each.repeat_interleave(d)))
        self.t = t.new_zeros(n * d, side.shape[1])
        self.t[keep] = side
        self.t = self.t.view(n, d, -1)
        self.inner = torch.linalg.solve(side, flat)
        self.blocks = jacobian(part, self.y).movedim(2, 1)  # (n, n, d, d)
        self.moved = torch.einsum("ijde,jep->idp", self.blocks, through)

    def of_rows(self, rows: Tensor) -> None:
        """Restrict to the rows that are read."""
        self.blocks, self.moved = self.blocks[rows], self.moved[rows]

    def drift(self, reads: Float[Tensor, "n k d"]) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, J_A q>| / r``."""
        sizes = torch.einsum("ikd,ijde->ikje", reads, self.blocks).norm(dim=-1)
        return sizes @ self.bent

    @cached_property
    def drift_rows(self) -> Float[Tensor, " n"]:
        """``>= |(J_A q)_i| / r``."""
        return norm_above(self.blocks) @ self.bent

    def error(self, x: Float[Tensor, "n d"]) -> Tensor:
        """``>= ‖T_y^(-1) S T - W‖`` of secants from ``x``, ``W = T_y^(-1) D T``."""
        keep = self.own > 0
        apart = self.norm.slope_change(x, self.radius)
        each = (apart * self.own)[keep].square() / self.bent[keep]
        return (each.sum() * self.w[1] / self.bent.sum()).sqrt()

    def pulled(self, form: Tensor, x: Float[Tensor, "n d"]) -> Tensor:
        """A form ``>= F(T_y^(-1) S T f)`` of secants from ``x``."""
        straight = self.inner.T @ form @ self.inner
        most = top_value(form).sqrt() * self.error(x)
        w = young(float(top_value(straight).sqrt()), float(most))
        return straight / w[0] + most.square() / w[1] * torch.eye(len(straight), dtype=x.dtype)

    def lost(self, x: Tensor, half: Tensor | None = None) -> Tensor:
        """``>= |half J_A (S - D) T f| / |f|``, for all rows jointly."""
        j = norm_above(self.blocks if half is None else half[:, None] @ self.blocks)
        j = j * self.norm.slope_change(x, self.radius)
        # one f moves every token, each by at most its own norm of T
        return torch.minimum((j @ self.own).norm(), norm_above(j) * self.whole)


def square_axes(t: Float[Tensor, "n d p"]) -> tuple[Bool[Tensor, " nd"], Float[Tensor, "p p"]]:
    """Coordinates of the moving tokens, and the axes there."""
    rows = (t != 0).flatten(1).any(1).repeat_interleave(t.shape[1])
    return rows, t.flatten(0, 1)[rows]


def distance(t: Float[Tensor, "n d p"], v: Float[Tensor, "n d"]) -> float:
    """``|xi|`` with ``T xi = v``."""
    rows, side = square_axes(t)
    return float(torch.linalg.solve(side, v.flatten()[rows]).norm())


def _scaled(branch: Branch) -> bool:
    return isinstance(branch.norm, Norm) and branch.norm.scaled


class Segment:
    """Attention (or nothing) and token-wise branches, for inputs ``x_0 + T xi``, ``|xi| <= r``.

    Args:
        branches: The first one may hold attention, the others do not.
        t: ``T``, of full column rank on the moving tokens.
        rows: Output tokens that are read; None: all.
        last: Whether only linear maps read the output.
    """

    def __init__(
        self,
        branches: tuple[Branch, ...],
        x: Float[Tensor, "n d"],
        t: Float[Tensor, "n d p"],
        rows: Tensor | None = None,
        last: bool = False,
    ) -> None:
        self.last = last
        self.branches, self.x, self.t = branches, x, t
        self.rows = torch.arange(len(x)) if rows is None else rows
        self.mixes = bool(branches) and isinstance(branches[0].part, DotProduct)
        # without attention, use an identity branch
        self.first = branches[0] if self.mixes else Branch(skip=False)
        self.rest = branches[1:] if self.mixes else branches
        self.at: AttentionAt | None = None
        self.entry: Entry | None = None
        self.jacobian, self.value = t[self.rows], self.first(x)[self.rows]
        if self.mixes and self.first.norm is None:
            self._attend(x, t)

    @property
    def part(self) -> DotProduct:
        """The attention layer."""
        assert isinstance(self.first.part, DotProduct)
        return self.first.part

    def _attend(self, x: Tensor, t: Tensor) -> None:
        self.at = AttentionAt(self.part, x, t, self.rows)
        moved = self.at.jacobian if self.entry is None else self.entry.moved
        self.jacobian = moved + self.t[self.rows] if self.first.skip else moved

    def grow(self, radius: float) -> None:
        """Compute all bounds on the balls up to this radius.

        Raises:
            OutOfReachError: If the input of a norm may vanish.
        """
        self.r = radius
        if self.mixes and self.first.norm is not None:
            assert isinstance(self.first.norm, Norm)
            self.entry = Entry(self.part, self.first.norm, self.x, self.t, radius)
            self.entry.of_rows(self.rows)
            self._attend(self.entry.y, self.entry.t)
        ball = None if self.at is None else AttentionBall(self.at, radius)
        self.reads = Reads(ball, radius, self.entry)
        n, d = self.value.shape
        eye = torch.eye(d, dtype=self.x.dtype).expand(n, d, d)
        point = Point(self.value, self.jacobian, eye, self.x.new_zeros(n))
        self.tokens: list[TokenBranch] = []
        bend = [one.part is not None or _scaled(one) for one in self.rest]
        for k, branch in enumerate(self.rest):
            last = self.last and not any(bend[k + 1 :])
            self.tokens.append(TokenBranch(branch, point, self.reads, last))
            point = self.tokens[-1].point
        self.end = point

    def through(self, x: Tensor) -> list[Tensor]:
        """The inputs of all token-wise branches, and the output."""
        found = [self.first(x)[self.rows]]
        for branch in self.rest:
            found.append(branch(found[-1]))
        return found

    def averages(self, start: float, kind: str) -> Tensor:
        """Grid weights of the average over the segment from an anchor at ``start`` to any point.

        At ``t`` the segment is within ``(1 - t) start + t r`` of the centre. ``hessian``: weights
        ``2 (1 - t)``; ``jacobian``: 1. Right grid ends give an upper bound.
        """
        found = self.x.new_zeros(PIECES)
        for step in range(_STEPS):
            a, b = step / _STEPS, (step + 1) / _STEPS
            far = max((1 - s) * start + s * self.r for s in (a, b))
            # points just inside the next grid ball count as its edge
            piece = min(PIECES, math.ceil(far / self.r * PIECES * (1 - 1e-12))) - 1
            found[piece] += (1 - a) ** 2 - (1 - b) ** 2 if kind == "hessian" else 1 / _STEPS
        return found

    def _start(self, x: Tensor, start: float) -> float:
        """Distance of an anchor from the centre, in the coordinates of attention's input."""
        if self.entry is None:
            return start
        y = self.entry.norm.norm(x) - self.entry.y
        return min(distance(self.entry.t, y), self.r)

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
        assert self.at is not None and self.reads.ball is not None
        eye = torch.eye(len(base), dtype=base.dtype)
        bend, start = bend_of(self.at, q.slope), self._start(x, start)
        b = bend.hessian - self.reads.ball.hessian_change(bend, self.averages(start, "hessian"))
        if self.entry is not None:
            b = -self.entry.pulled(positive_part(-b), x)
            y = gradient(lambda z: self.part(z)[self.rows] * q.slope, self.entry.norm.norm(x))
            curve = self.entry.norm.curvature(y, x, self.entry.radius)
            b = b - torch.einsum("ndp,nde,neq->pq", self.t, curve, self.t)
        if bool(q.blocks.any()):  # without blocks, everything above attention is linear
            (half, left), at = thin_root(q.blocks), self.at
            shares = self.averages(start, "jacobian")
            joint = self.reads.ball.joint_change(half, shares, lambda: at.lead_together(half))
            if bool(left.any()):
                size = shares @ (left * self.reads.rows.square()).sum(-1).sqrt()
                joint = added([joint, size.square() * eye])
            forms = [base, joint]
            if self.entry is not None:
                lost = self.entry.lost(x, half).square() + left.max() * self.entry.lost(x).square()
                forms[1:] = self.entry.pulled(joint, x), lost * eye
            b = b - added(forms)
        g = gradient(lambda z: self.first(z)[self.rows] * q.slope, x)
        return q.gap, torch.einsum("nd,ndp->p", g, self.t), b

    def secant(self, x: Tensor, start: float) -> Secant:
        """The secant map from an anchor to any other point of the ball."""
        flat, loose = self.jacobian.flatten(0, 1), ()
        if self.reads.ball is not None:
            eye = torch.eye(len(flat), dtype=flat.dtype)
            form = self.reads.whole(self.averages(self._start(x, start), "jacobian"))
            form = form if self.entry is None else self.entry.pulled(form, x)
            loose = (Loose(eye, form, self.x.new_zeros(())),)
            if self.entry is not None:
                loose += (Loose(eye, torch.zeros_like(form), self.entry.lost(x)),)
        found = Secant(flat, loose)
        for branch, v in zip(self.tokens, self.through(x), strict=False):
            found = branch.secant(v, found)
        return found
