"""The ball certificate of one head: a bound of every Jacobian within a radius of X.

Derived here; statement and proof, with the names used here (``mu, nu, rho, eta``):
``docs/theory/ball-certificate.md``. A ball is ``token`` (every token moves by at most ``eps``;
contains the other) or ``frobenius`` (all tokens together do).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.errors import InputError, stated
from lipscope.linalg import eigenvalue, nonnegative_norm
from lipscope.theorems.derived.global_bounds import global_rows_capped
from lipscope.theorems.derived.local_bounds import of_both_parts
from lipscope.theorems.derived.row_gram import Weighted
from lipscope.theorems.head import HeadAt
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem

BallName = Literal["token", "frobenius"]


@dataclass(frozen=True)
class SoftmaxIntervals:
    """Intervals of the attention weights over a ball."""

    upper: Tensor  # ``U_ij >= P'_ij``
    lower: Tensor  # ``L_ij <= P'_ij``
    apart: Tensor  # ``>= 1 - P'_ij``, accurate even if ``L_ij`` rounds to 1
    change: Tensor  # ``D_ij >= |P'_ij - P_ij|``
    free: Tensor  # ``>= 1 - sum_j L_ij``, the unassigned weight of a row, ``(n,)``


def softmax_over(at: HeadAt, eps: Float[Tensor, " n"], ball: BallName) -> SoftmaxIntervals:
    """Intervals of ``P'_ij`` over the ball, from the box of logits and Jensen's inequality.

    ``P'_ij <= min( box, P_ij exp(jensen_ij) )``: in the box every logit of a row moves by
    ``eta`` independently; Jensen's inequality uses that the row's mean moves too.
    """
    p, allowed, e = at.p, at.allowed, eps
    rho = at.rho + at.norm_a * e[:, None]  # for the moved query
    keyed = rho * e
    rounding = at.rounding[:, None]  # of the logits themselves
    eta = (at.mu * e[:, None] + keyed + rounding).masked_fill(~allowed, 0.0)
    above = at.s + eta - _weight_of_others(at.s - eta)
    below = at.s - eta - _weight_of_others(at.s + eta)
    # in the log domain: P may underflow although P exp(jensen) does not, likewise 1 - P at P = 1
    odds = at.s - _weight_of_others(at.s)
    log_p, rest = torch.nn.functional.logsigmoid(odds), torch.sigmoid(-odds)  # rest = 1 - P
    if ball == "frobenius":
        moved = ((rho * rest).square() + _without((p * rho).square())).sqrt() * e
    else:
        moved = _without(p * keyed) + keyed * rest
    jensen = at.mu * e[:, None] + moved + 2 * rounding
    widest = eta.amax(-1, keepdim=True)
    log_upper = (log_p + jensen).clamp_max(0.0)
    upper = torch.maximum(torch.minimum(torch.sigmoid(above), log_upper.exp()), p)
    log_lower = log_p - jensen - widest.square() / 2
    lower = torch.maximum(torch.sigmoid(below), log_lower.exp())
    lower = torch.minimum(lower, p)
    apart = torch.maximum(torch.minimum(torch.sigmoid(-below), -torch.expm1(log_lower)), rest)
    least = torch.maximum(torch.sigmoid(-above), -torch.expm1(log_upper))
    # P - P' = (1 - P') - (1 - P) is accurate where P is near 1
    fall = torch.where(p > 0.5, apart - rest, p - lower).clamp_min(0.0)
    rise = torch.where(p > 0.5, rest - least, upper - p).clamp_min(0.0)
    return SoftmaxIntervals(
        upper.masked_fill(~allowed, 0.0),
        lower,
        apart,
        torch.maximum(fall, rise).masked_fill(~allowed, 0.0),
        fall.masked_fill(~allowed, 0.0).sum(-1),
    )


def _without(w: Tensor) -> Tensor:
    """``sum_{l != j} w_il`` of nonnegative numbers, without subtracting the largest from itself."""
    best = w.argmax(-1, keepdim=True)
    alone = w.scatter(-1, best, 0.0).sum(-1, keepdim=True)
    return (w.sum(-1, keepdim=True) - w).clamp_min(0.0).scatter(-1, best, alone)


def _weight_of_others(t: Tensor) -> Tensor:
    """``log sum_{l != j} exp t_il`` without overflow or cancellation."""
    whole = t.logsumexp(-1, keepdim=True)
    # below the row's maximum a share is at most 1/2, so that 1 - share loses no digits
    rest = whole + torch.log1p(-(t - whole).exp().clamp_max(0.5))
    best = t.argmax(-1, keepdim=True)
    alone = t.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    return rest.scatter(-1, best, alone)


_SLACK = 1e-10  # float64 rounding of the weighted sums, with a margin


class Ball:
    """One head over the ball of radius ``eps`` around its centre; all forms are computed lazily.

    ``eps`` is shared by all tokens or given per token (``token`` only); `by_weights` needs
    ``weighted``. ``scored`` is the same ball for a head with another ``V``; its scores are reused.
    """

    def __init__(
        self,
        centre: HeadAt,
        eps: float | Float[Tensor, " n"],
        ball: BallName = "token",
        weighted: Weighted | None = None,
        scored: Ball | None = None,
    ) -> None:
        self.c = centre
        self.scored = scored
        self.ball: BallName = ball
        self.weighted = weighted
        self.eps = per_token(eps, centre.x.shape[0], ball)

    @cached_property
    def p(self) -> SoftmaxIntervals:
        """Intervals of the attention weights."""
        return self.scored.p if self.scored else softmax_over(self.c, self.eps, self.ball)

    @cached_property
    def visible_eps(self) -> Tensor:
        """Largest move among the tokens that row i attends to, ``(n,)``."""
        return torch.where(self.c.allowed, self.eps, 0.0).amax(-1)

    @cached_property
    def spread(self) -> Tensor:
        """``>= sqrt(lam_max(Cov_P'(e)))``: the spread of moves within a row, ``(n,)``."""
        apart = self.p.apart.amin(-1).clamp_max(0.5)  # Var <= 4 p (1 - p) eps^2 once p > 1/2
        part = (4 * apart * (1 - apart)).sqrt()
        if self.ball == "frobenius":
            part = torch.minimum(part, self.p.upper.amax(-1).sqrt())
        return self.visible_eps * part

    @cached_property
    def shift(self) -> Tensor:
        """``>= |sum_j P'_ij e_j|``, ``(n,)``."""
        if self.ball == "frobenius":
            return self.visible_eps * self.p.upper.amax(-1).sqrt()
        return self.visible_eps

    @cached_property
    def rho(self) -> Tensor:
        """``>= |K_j^T q'_i|``, ``(n, 1)``, or ``(n, n)`` with a rotary embedding."""
        return self.c.rho + self.c.norm_a * self.eps[:, None]

    @cached_property
    def sums(self) -> dict[str, Tensor]:
        """Weighted Gram matrices of ``Vy`` and ``A^T y`` in one pass over the rows.

        ``upper`` holds for any weights ``P'``, ``change`` is weighted with ``D``; ``_y`` is a
        Gram matrix of ``Vy``, ``(n, k_v, k_v)``, ``_v`` and ``_a`` top eigenvalues for ``Vy`` and
        ``A^T y``.
        """
        c, p = self.c, self.p
        parts: dict[str, list[Tensor]] = {}
        for rows, y, z in c.pieces:
            change = p.change[rows, :, None].sqrt()
            moved = _gram(change * y)
            gram, top, change_v = self._moment(rows, y, c.nu, moved)
            found = {
                "upper_y": gram,
                "change_y": moved,
                "upper_v": top,
                "change_v": change_v,
            }
            if self.scored is None:
                found["upper_a"] = self._moment(rows, z, c.mu)[1]
            if c.rotary is not None:
                found["rows"] = self._rotary_rows(rows, y)
            for name, value in found.items():
                parts.setdefault(name, []).append(value)
        sums = {name: torch.cat(part) for name, part in parts.items()}
        return sums if self.scored is None else sums | {"upper_a": self.scored.sums["upper_a"]}

    def _moment(self, rows: slice, y: Tensor, size: Tensor, *others: Tensor) -> list[Tensor]:
        """``>= sum_j P'_ij y_ij y_ij^T``, and its top eigenvalue; ``size`` holds ``|y_ij|``.

        Uses ``U``, or ``L`` with the rest of the weight placed where it counts most. The other
        entries are the top eigenvalues for the other matrices of this size.
        """
        upper, lower, free = (w[rows] for w in (self.p.upper, self.p.lower, self.p.free))
        squares = size[rows].masked_fill(~self.c.allowed[rows], 0.0).square()
        free = free * squares.amax(-1)
        gram = _gram(upper[..., None].sqrt() * y)
        top, *tops = eigenvalue(torch.stack([gram, *others]))
        # lam(U) <= lam(L) + sum_j (U_ij - L_ij) |y_ij|^2: usually lam(U) is the smaller one
        near = (~(free >= ((upper - lower) * squares).sum(-1))).nonzero()[:, 0]
        if len(near):
            top = top.clone()
            other = _gram(lower[near, :, None].sqrt() * y[near])
            other = other + torch.diag_embed(free[near, None].expand(-1, y.shape[-1]))
            second = eigenvalue(other)
            less = second < top[near]
            gram[near[less]], top[near[less]] = other[less], second[less]
        return [gram, top, *tops]

    @cached_property
    def mean_moved(self) -> Tensor:
        """``>= |sum_j (P'_ij - P_ij) V y_ij|``, ``(n,)``."""
        total = self.p.change.sum(-1)
        by_norms = (self.p.change * self.c.nu).sum(-1)
        return torch.minimum(by_norms, (total * self.sums["change_v"]).sqrt())

    @cached_property
    def _change_a(self) -> Tensor:
        """``change_v`` of `sums` for ``A^T y``; only some forms need it."""
        if self.scored is not None:
            return self.scored._change_a
        parts = [
            eigenvalue(_gram(self.p.change[rows, :, None].sqrt() * z))
            for rows, _, z in self.c.pieces
        ]
        return torch.cat(parts)

    @cached_property
    def _key_moved(self) -> Tensor:
        total = self.p.change.sum(-1)
        by_norms = (self.p.change * self.c.mu).sum(-1)
        return torch.minimum(by_norms, (total * self._change_a).sqrt())

    @cached_property
    def own_change(self) -> Tensor:
        """``>= ‖V C'_i A - V C_i A‖``, ``(n,)``: the change of token i's own-query term."""
        c, sums = self.c, self.sums
        v, a = c.head.norm_v * self.spread, c.norm_a * self.spread
        return (
            (sums["change_v"] * self._change_a).sqrt()
            + self.mean_moved * self._key_moved
            + v * sums["upper_a"].sqrt()
            + a * sums["upper_v"].sqrt()
            + v * a
        )

    @cached_property
    def own(self) -> Tensor:
        """``>= ‖V C'_i A‖``, ``(n,)``: the product of two spreads, or centre plus change."""
        c, sums = self.c, self.sums
        v = sums["upper_v"].sqrt() + c.head.norm_v * self.spread
        a = sums["upper_a"].sqrt() + c.norm_a * self.spread
        return torch.minimum(v * a, c.drift + self.own_change)

    @cached_property
    def row(self) -> Tensor:
        """``w'_i >= lam_max(sum_j P'_ij B'_ij B'_ij^T)``, ``(n,)``."""
        c, sums = self.c, self.sums
        if c.rotary is not None:
            return sums["rows"]
        moved, upper = c.head.norm_v * self.spread, sums["upper_v"].sqrt()
        # (a + b)(a + b)^T <= (1 + t) a a^T + (1 + 1/t) b b^T with t = moved / upper
        stretch = torch.where(upper > 0, 1 + moved / upper, 0.0)
        extra = self.spread.square() + self.spread * upper / max(c.head.norm_v, 1e-300)
        rho = self.rho[:, 0].square()
        whole = c.gram_v * (1 + rho * extra)[:, None, None]
        return eigenvalue(whole + sums["upper_y"] * (rho * stretch)[:, None, None])

    def _rotary_rows(self, rows: slice, y: Tensor) -> Tensor:
        """`row` under rotary embeddings: centre weighted by U, plus change."""
        c, upper = self.c, self.p.upper[rows]
        key_value = c.head.value @ c.head.key.T  # (k_v, k)
        cross = (upper[..., None] * (c.pulled(rows) @ key_value.T)).mT @ y
        gram = _gram((upper.sqrt() * c.rho[rows])[..., None] * y)
        total = upper.sum(-1)[:, None, None] * c.gram_v
        main = eigenvalue(total + cross + cross.mT + gram).sqrt()
        # o'_i - o_i from norms alone, since the sums are not available yet
        mean = (self.p.change[rows] * c.nu[rows]).sum(-1) + c.head.norm_v * self.shift[rows]
        query = c.norm_a * self.eps[rows, None]
        block = (c.head.norm_v * self.eps + mean[:, None]) * self.rho[rows] + c.nu[rows] * query
        return (main + (upper * block.square()).sum(-1).sqrt()).square()

    # --- the forms

    @cached_property
    def by_weights(self) -> float:
        """The row-Gram certificate at the centre with blocks stretched by ``U_ij / P_ij``.

        ``sqrt(max_j sum_i p_ij ω'_i)``; the weights ``p`` are those of the centre.
        Infinite without weights.
        """
        if self.weighted is None:
            return math.inf
        c, p = self.c, self.p
        stretch = torch.where(c.p > 0, p.upper / c.p, 1.0)
        unseen = (c.p == 0) & (p.upper > 0)
        if bool(unseen.any()) or not bool(torch.isfinite(stretch).all()):
            return math.inf
        rows, weights = self.weighted.rows, self.weighted.weights
        sizes = torch.where(weights > 0, p.upper.square() / weights, 0.0)
        mean = self.mean_moved + c.head.norm_v * self.shift
        moved = (c.head.norm_v * self.eps + mean[:, None]) * self.rho
        query = c.norm_a * self.eps
        if c.rotary is None:
            parts = [eigenvalue(_gram(sizes[r, :, None].sqrt() * y)) for r, y, _ in c.pieces]
            turned = query * torch.cat(parts).sqrt()
        else:
            turned = query * (sizes * c.nu.square()).sum(-1).sqrt()
        loose = torch.where(c.p > 0, p.change / c.p, 0.0).diagonal()
        own = (self.own_change + loose * c.drift) / weights.diagonal().sqrt()
        root = rows.eigenvalues(weights / stretch.square()).sqrt()
        root = root + (sizes * moved.square()).sum(-1).sqrt() + turned + own
        return float(_column_sum(weights, root.square()) * (1 + _SLACK))

    @cached_property
    def by_rows(self) -> float:
        """``F2(eps)``: `of_both_parts` of ``sum_i U_ij w'_i`` and ``‖V C'_i A‖``."""
        return of_both_parts(self.row @ self.p.upper, self.own)

    @cached_property
    def by_blocks(self) -> float:
        """``F1(eps) = ‖U‖ ‖V‖ + max_i ‖V C'_i A‖ + ‖[U_ij |Vy'_ij| |a'_i|]_ij‖``."""
        c = self.c
        mean = self.mean_moved + c.head.norm_v * self.shift
        nu = c.nu + c.head.norm_v * self.eps + mean[:, None]
        upper, blocks = nonnegative_norm(torch.stack([self.p.upper, self.p.upper * nu * self.rho]))
        return float(upper * c.head.norm_v + self.own.max() + blocks)

    @property
    def cheap(self) -> float:
        """The smaller of the two forms above."""
        return min(self.by_rows, self.by_blocks)

    @cached_property
    def change(self) -> float:
        """``>= ‖J(X') - J(X)‖``, to be added to any bound of ``‖J(X)‖``."""
        c, sums = self.c, self.sums
        weights = self.p.change.sum(-1).sqrt() * c.head.norm_v
        if c.rotary is None:
            turned = c.rho[:, 0] * sums["change_v"].sqrt()
        else:
            turned = (self.p.change * (c.nu * c.rho).square()).sum(-1).sqrt()
        blocks = (weights + turned).square()
        moved = self.rho.amax(-1) * (c.head.norm_v * self.spread + self.mean_moved)
        moved = moved + c.norm_a * self.eps * sums["upper_v"].sqrt()
        return float(
            _column_sum(self.p.change, blocks)
            + _column_sum(self.p.upper, moved.square())
            + self.own_change.max()
        )

    @cached_property
    def by_radius(self) -> float:
        """G2 at the radius of the moved tokens; inf with a rotary embedding."""
        if self.c.rotary is not None:
            return math.inf
        radius = float((self.c.x.norm(dim=-1) + self.eps).max())
        return global_rows_capped(self.c.head, len(self.c.x), radius)

    def forms(self, local: float | None = None) -> dict[str, float]:
        """All finite forms, by name."""
        if local is None:
            local = Ball(self.c, 0.0).cheap
        found = {
            "rows": self.by_rows,
            "blocks": self.by_blocks,
            "change": local + self.change,
            "weights": self.by_weights,
            "radius": self.by_radius,
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


@theorem(cite=DERIVED, statement="ball certificate")
def ball_certificate(at: HeadAt, eps: float) -> float:
    """The smallest ball form: ``‖f(X') - f(X'')‖ <= L ‖X' - X''‖`` within ``eps`` of X.

    ``L = min(F1(eps), F2(eps), min(F1, F2)(0) + change(eps), G2(max|x_i| + eps))``.
    Holds for every X', X'' whose tokens are within ``eps`` of those of X, any mask, biases
    and rotary embedding (without the G2 term).

    Source: derived here (``docs/theory/ball-certificate.md``).
    """
    return least(Ball(at, eps).forms())


@theorem(cite=DERIVED, statement="ball certificate, rows")
def ball_rows(at: HeadAt, eps: float) -> float:
    """``F2(eps)``, ``F2(eps)² = min_θ max_j ((1+θ) sum_i U_ij w'_i + (1+1/θ) ‖V C'_j A‖²)``.

    Holds under the hypotheses of `ball_certificate`.

    Source: derived here (``docs/theory/ball-certificate.md``).
    """
    return least({"rows": Ball(at, eps).by_rows})


@theorem(cite=DERIVED, statement="ball certificate, blocks")
def ball_blocks(at: HeadAt, eps: float) -> float:
    """``F1(eps) = ‖U‖ ‖V‖ + max_i ‖V C'_i A‖ + ‖[U_ij |V y'_ij| |a'_i|]‖``.

    Holds under the hypotheses of `ball_certificate`.

    Source: derived here (``docs/theory/ball-certificate.md``).
    """
    return least({"blocks": Ball(at, eps).by_blocks})


@theorem(cite=DERIVED, statement="ball certificate, radius")
def ball_radius(at: HeadAt, eps: float) -> float:
    """`global_rows_capped` at radius ``max_i |x_i| + eps``.

    Holds for any mask and biases, not for rotary embeddings. Source: derived here.
    """
    at.head.without_rotary()
    return least({"radius": Ball(at, eps).by_radius})


def least(forms: dict[str, float]) -> float:
    """The smallest of the forms, all of which are valid."""
    finite = [value for value in forms.values() if math.isfinite(value)]
    if not finite:
        raise NotApplicableError("no certificate: every form overflows; choose a smaller `eps`")
    return min(finite)


def per_token(eps: float | Tensor, num_tokens: int, ball: BallName) -> Float[Tensor, " n"]:
    """Broadcast ``eps`` to one radius per token."""
    of_numbers = isinstance(eps, Tensor | float | int)
    radii = torch.as_tensor(eps if of_numbers else math.nan, dtype=torch.float64).detach().cpu()
    if not (bool(torch.isfinite(radii).all()) and bool((radii >= 0).all())):
        raise InputError(f"`eps` should be finite and not negative. Found {stated('eps', eps)}.")
    if radii.ndim and (ball == "frobenius" or tuple(radii.shape) != (num_tokens,)):
        raise InputError(
            f"`eps` should be one number, or {num_tokens} for the ball `token`. "
            f"Found shape {tuple(radii.shape)}."
        )
    return radii.expand(num_tokens)


def _gram(w: Tensor) -> Tensor:
    return w.mT @ w


def _column_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """``sqrt(max_j sum_i weights_ij rows_i)``."""
    return (rows @ weights).max().sqrt()
