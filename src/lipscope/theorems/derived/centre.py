"""One head at the centre of a ball, and intervals of its softmax over that ball.

Everything is in factors: with ``z_ij = Q^T R_i^T k_j`` (``R`` the rotary embedding, or none)
``|A^T y_ij| = |z_ij - zbar_i|``, and ``Q^T`` is replaced by its triangular factor. Proofs:
``docs/theory/ball-certificate.md``, whose names (``mu, nu, rho, eta``) are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Rotary
from lipscope.errors import InputError
from lipscope.theorems.derived.row_gram import Rows, Weighted, weighted_rows
from lipscope.theorems.head import Head
from lipscope.theorems.point import at_point
from lipscope.theorems.register import NotApplicableError

BallName = Literal["token", "frobenius"]
_CHUNK_BYTES = 2**26  # of one tensor (rows, n, k)


class Centre:
    """What depends on the head and on the centre ``X`` only; computed once for many radii.

    Attributes:
        s: Logits, ``(n, n)``, -inf where masked; ``p``: their softmax.
        mu: ``|A^T y_ij|``: how fast logit ij grows with token i.
        nu: ``|V y_ij|``.
        rho: ``|K_j^T q_i|``: how fast it grows with token j; ``(n, 1)`` without rotary.
        norm_a: ``‖A‖``, or what bounds every ``‖A_ij‖`` under a rotary embedding.

    Raises:
        InputError: If ``x`` does not fit the head or is not finite.
        NotApplicableError: If mask or rotary embedding is for another number of tokens, or
            a row reads nothing.
    """

    def __init__(self, head: Head, x: Float[Tensor, "n d"]) -> None:
        x = x.detach().to("cpu", torch.float64)
        _check_tokens(head, x)
        self.head, self.x = head, x
        self.allowed = head.allowed(x.shape[0])
        q, k = x @ head.query.T + head.query_bias, x @ head.key.T + head.key_bias
        if head.rotary is not None:
            if head.rotary.cos.shape[0] != x.shape[0]:
                raise NotApplicableError(
                    f"its rotary embedding was captured for {head.rotary.cos.shape[0]} tokens, "
                    f"not for {x.shape[0]}"
                )
            q, k = head.rotary(q), head.rotary(k)
        self.q, self.k, self.v = q, k, x @ head.value.T
        self.s = head.biased(q @ k.T)
        self.p = torch.softmax(self.s, -1)
        self.o, self.kbar = self.p @ self.v, self.p @ k
        self.factor_q = torch.linalg.qr(head.query.T, mode="r").R
        self.factor_k = torch.linalg.qr(head.key.T, mode="r").R
        self.norm_v = head.norm_v
        self.norm_a = head.norm_a if head.rotary is None else _rotary_norm(head)
        self.gram_v = head.value @ head.value.T
        n = x.shape[0]
        self.mu, self.nu = x.new_empty(n, n), x.new_empty(n, n)
        self.rho = x.new_empty(n, 1 if head.rotary is None else n)
        drift = x.new_empty(n)
        for rows in self.chunks():
            y, z = self.y(rows), self.z(rows)
            self.nu[rows], self.mu[rows] = y.norm(dim=-1), z.norm(dim=-1)
            self.rho[rows] = (self.h(rows) @ self.factor_k.T).norm(dim=-1)
            drift[rows] = top((self.p[rows, :, None] * y).mT @ z)
        self.drift = drift  # ‖V C_i A‖

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding of the head, or None."""
        return self.head.rotary

    @cached_property
    def weighted(self) -> Weighted:
        """The row-Gram certificate at the centre, with its rows and weights."""
        return weighted_rows(Rows(at_point([self.head], self.x), None))

    def chunks(self) -> Iterator[slice]:
        """Rows whose tensors ``(rows, n, k)`` fit the cache of one pass."""
        n, width = self.s.shape[0], max(self.q.shape[1], self.v.shape[1])
        rows = max(1, _CHUNK_BYTES // (8 * n * width))
        return (slice(i, min(i + rows, n)) for i in range(0, n, rows))

    def y(self, rows: slice) -> Tensor:
        """``V y_ij = v_j - o_i``, ``(rows, n, k_v)``; differences, never of squares."""
        return self.v[None] - self.o[rows, None]

    def z(self, rows: slice) -> Tensor:
        """``A^T y_ij`` in the basis of ``Q``'s factor, ``(rows, n, k)``."""
        difference = self.k[None] - self.kbar[rows, None]
        if self.rotary is not None:
            # row i is turned back by its own position: rows take the axis of tokens
            own = Rotary(self.rotary.cos[rows], self.rotary.sin[rows])
            difference = own.transpose(difference.transpose(0, 1)).transpose(0, 1)
        return difference @ self.factor_q.T

    def h(self, rows: slice) -> Tensor:
        """``R_j^T q_i``, ``(rows, 1 or n, k)``: ``K^T`` of it is what token j is read with."""
        q = self.q[rows, None]
        if self.rotary is None:
            return q
        return self.rotary.transpose(q.expand(-1, self.k.shape[0], -1))


@dataclass(frozen=True)
class Softmax:
    """Intervals of the attention weights over a ball.

    Attributes:
        upper: ``U_ij >= P'_ij``.
        lower: ``L_ij <= P'_ij``.
        change: ``D_ij >= |P'_ij - P_ij|``.
    """

    upper: Tensor
    lower: Tensor
    change: Tensor


def softmax_over(centre: Centre, eps: Float[Tensor, " n"], ball: BallName) -> Softmax:
    """Intervals of ``P'_ij`` over the ball: the box of logits, and Jensen's inequality.

    ``P'_ij <= min( box, P_ij exp(jensen_ij) )``: in the box every logit of a row moves by
    ``eta`` on its own; Jensen's inequality knows that the row's mean moves too.

    Args:
        centre: The head at the centre.
        eps: Radius per token.
        ball: ``frobenius`` if the whole move is at most ``eps`` (all entries equal).

    Returns:
        The intervals.
    """
    p, allowed, e = centre.p, centre.allowed, eps
    rho = centre.rho + centre.norm_a * e[:, None]  # of the moved query
    keyed = rho * e
    eta = (centre.mu * e[:, None] + keyed).masked_fill(~allowed, 0.0)
    upper = torch.sigmoid(centre.s + eta - _others(centre.s - eta))
    lower = torch.sigmoid(centre.s - eta - _others(centre.s + eta))
    if ball == "frobenius":
        weights = p * rho
        squares = weights.square()
        rest = (squares.sum(-1, keepdim=True) - squares).clamp_min(0.0)
        moved = ((rho * (1 - p)).square() + rest).sqrt() * e
    else:
        weights = p * keyed
        moved = (weights.sum(-1, keepdim=True) - weights).clamp_min(0.0) + keyed * (1 - p)
    jensen = centre.mu * e[:, None] + moved
    widest = eta.amax(-1, keepdim=True)
    # in the log domain: P may underflow where P exp(jensen) does not
    log_p = centre.s - centre.s.logsumexp(-1, keepdim=True)
    upper = torch.maximum(torch.minimum(upper, (log_p + jensen).exp()), p)
    lower = torch.maximum(lower, (log_p - jensen - widest.square() / 2).exp())
    lower = torch.minimum(lower, p)
    change = torch.maximum(upper - p, p - lower)
    return Softmax(upper.masked_fill(~allowed, 0.0), lower, change.masked_fill(~allowed, 0.0))


def top(m: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """Spectral norms of small matrices, from the smaller Gram matrix."""
    gram = m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m
    return eigenvalue(gram).sqrt()


def eigenvalue(m: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    """Largest eigenvalues of positive semidefinite matrices; inf where they overflow."""
    if not bool(torch.isfinite(m).all()):
        return torch.full(m.shape[:-2], torch.inf, dtype=m.dtype)
    if m.shape[-1] == 1:
        return m[..., 0, 0].clamp_min(0.0)
    return torch.linalg.eigvalsh(m)[..., -1].clamp_min(0.0)


def _others(t: Tensor) -> Tensor:
    """``log sum_{l != j} exp t_il`` without overflow or cancellation."""
    whole = t.logsumexp(-1, keepdim=True)
    # below the row's maximum a share is at most 1/2, so that 1 - share loses no digit
    rest = whole + torch.log1p(-(t - whole).exp().clamp_max(0.5))
    best = t.argmax(-1, keepdim=True)
    alone = t.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    return rest.scatter(-1, best, alone)


def _rotary_norm(head: Head) -> float:
    """``max ‖R_i‖ ‖Q‖ max ‖R_j‖ ‖K‖ >= ‖A_ij‖`` for all positions."""
    assert head.rotary is not None
    (c1, c2), (s1, s2) = (w.chunk(2, dim=-1) for w in (head.rotary.cos, head.rotary.sin))
    pairs = torch.stack([torch.stack([c1, -s1], -1), torch.stack([s2, c2], -1)], -2)
    stretch = float(torch.linalg.matrix_norm(pairs, 2).max())
    if head.rotary.cos.shape[-1] < head.query.shape[0]:
        stretch = max(stretch, 1.0)
    norms = [float(torch.linalg.matrix_norm(w, 2)) for w in (head.query, head.key)]
    return stretch**2 * norms[0] * norms[1]


def _check_tokens(head: Head, x: Tensor) -> None:
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != head.query.shape[1]:
        raise InputError(
            f"`x` should have shape (n, {head.query.shape[1]}), n at least 1. "
            f"Found {tuple(x.shape)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise InputError("`x` should be finite. Found NaN or infinite tokens.")
