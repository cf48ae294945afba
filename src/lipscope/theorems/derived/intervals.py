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
        change: ``D_ij >= |P'_ij - P_ij|``.
    """

    upper: Tensor
    lower: Tensor
    change: Tensor


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
    eta = (at.mu * e[:, None] + keyed).masked_fill(~allowed, 0.0)
    upper = torch.sigmoid(at.s + eta - _others(at.s - eta))
    lower = torch.sigmoid(at.s - eta - _others(at.s + eta))
    if ball == "frobenius":
        weights = p * rho
        squares = weights.square()
        rest = (squares.sum(-1, keepdim=True) - squares).clamp_min(0.0)
        moved = ((rho * (1 - p)).square() + rest).sqrt() * e
    else:
        weights = p * keyed
        moved = (weights.sum(-1, keepdim=True) - weights).clamp_min(0.0) + keyed * (1 - p)
    jensen = at.mu * e[:, None] + moved
    widest = eta.amax(-1, keepdim=True)
    # in the log domain: P may underflow where P exp(jensen) does not
    log_p = at.s - at.s.logsumexp(-1, keepdim=True)
    upper = torch.maximum(torch.minimum(upper, (log_p + jensen).exp()), p)
    lower = torch.maximum(lower, (log_p - jensen - widest.square() / 2).exp())
    lower = torch.minimum(lower, p)
    change = torch.maximum(upper - p, p - lower)
    return SoftmaxIntervals(
        upper.masked_fill(~allowed, 0.0), lower, change.masked_fill(~allowed, 0.0)
    )


def _others(t: Tensor) -> Tensor:
    """``log sum_{l != j} exp t_il`` without overflow or cancellation."""
    whole = t.logsumexp(-1, keepdim=True)
    # below the row's maximum a share is at most 1/2, so that 1 - share loses no digit
    rest = whole + torch.log1p(-(t - whole).exp().clamp_max(0.5))
    best = t.argmax(-1, keepdim=True)
    alone = t.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    return rest.scatter(-1, best, alone)
