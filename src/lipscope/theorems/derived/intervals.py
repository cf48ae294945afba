"""Intervals of a head's softmax over a ball around its input.

Proofs: ``docs/theory/ball-certificate.md``, whose names (``mu, nu, rho, eta``) are used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.theorems.head_at import HeadAt

BallName = Literal["token", "frobenius"]


@dataclass(frozen=True)
class SoftmaxIntervals:
    """Intervals of the attention weights over a ball.

    Attributes:
        upper: ``U_ij >= P'_ij``.
        lower: ``L_ij <= P'_ij``.
        apart: ``>= 1 - P'_ij``, to full accuracy where ``L_ij`` rounds to 1.
        change: ``D_ij >= |P'_ij - P_ij|``.
        free: ``>= 1 - sum_j L_ij``, the weight that may be anywhere, ``(n,)``.
    """

    upper: Tensor
    lower: Tensor
    apart: Tensor
    change: Tensor
    free: Tensor


def softmax_over(at: HeadAt, eps: Float[Tensor, " n"], ball: BallName) -> SoftmaxIntervals:
    """Intervals of ``P'_ij`` over the ball: the box of logits, and Jensen's inequality.

    ``P'_ij <= min( box, P_ij exp(jensen_ij) )``: in the box every logit of a row moves by
    ``eta`` on its own; Jensen's inequality knows that the row's mean moves too.

    Args:
        at: The head at the at.
        eps: Radius per token.
        ball: ``frobenius`` if the whole move is at most ``eps`` (all entries equal).

    Returns:
        The intervals.
    """
    p, allowed, e = at.p, at.allowed, eps
    rho = at.rho + at.norm_a * e[:, None]  # of the moved query
    keyed = rho * e
    rounding = at.rounding[:, None]  # of the logits themselves
    eta = (at.mu * e[:, None] + keyed + rounding).masked_fill(~allowed, 0.0)
    above = at.s + eta - _others(at.s - eta)
    below = at.s - eta - _others(at.s + eta)
    # in the log domain: P may underflow where P exp(jensen) does not, and 1 - P where P is 1
    odds = at.s - _others(at.s)
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
    # P - P' = (1 - P') - (1 - P), which keeps its digits where P is near 1
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
    """``sum_{l != j} w_il`` of nonnegative numbers, without taking the largest from itself."""
    best = w.argmax(-1, keepdim=True)
    alone = w.scatter(-1, best, 0.0).sum(-1, keepdim=True)
    return (w.sum(-1, keepdim=True) - w).clamp_min(0.0).scatter(-1, best, alone)


def _others(t: Tensor) -> Tensor:
    """``log sum_{l != j} exp t_il`` without overflow or cancellation."""
    whole = t.logsumexp(-1, keepdim=True)
    # below the row's maximum a share is at most 1/2, so that 1 - share loses no digit
    rest = whole + torch.log1p(-(t - whole).exp().clamp_max(0.5))
    best = t.argmax(-1, keepdim=True)
    alone = t.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    return rest.scatter(-1, best, alone)
