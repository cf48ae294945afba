"""Bounds of smooth Transformers by the published formula, and an attack on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lipscope import MultiheadAttention, SmoothTransformer, linearise
from lipscope.linalg import max_token_norm, start_named

GELU_SLOPE = 1.1289


def as_rms(model: SmoothTransformer) -> float:
    """What makes of a bound by norms of tokens one by their root mean squares."""
    outputs, width = model.head.weight.shape
    return math.sqrt(width / outputs)


def formula(model: SmoothTransformer, *, right: bool) -> float:
    """The bound of phess2/lipschitz-transformers at commit 9173461, or the same put right.

    Of root mean squares, from the norms of whole matrices. ``right``: scores are divided by the
    width of a head, so that their slope has a factor H; heads add up, to at most √H of one; the
    slope of GELU, which the network is divided by, is divided out once.
    """
    a = bound = 1.0  # largest root mean square of a token; the bound so far
    for one in model.sums:
        if isinstance(one.part, MultiheadAttention):
            layer: Any = one.part.attention
            q, k, v, o = map(_rms_norm, (layer.query, layer.key, layer.value, layer.output))
            heads = layer.num_heads if right else 1
            grown = math.sqrt(heads) * o * v
            slope = grown * (1 + 2 * heads * a**2 * q * k)
        else:
            inner, _, outer = one.part
            grown = _rms_norm(inner.weight) * _rms_norm(outer.weight)
            slope = GELU_SLOPE * grown if right else grown
        bound *= 1 - one.alpha + one.alpha * slope
        a *= 1 - one.alpha + one.alpha * grown
    return bound * _rms_norm(model.head.weight)


def _rms_norm(weight: Tensor) -> float:
    rows, columns = weight.shape
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2)) * math.sqrt(columns / rows)


def sigma_at(model: SmoothTransformer, tokens: Tensor) -> float:
    """How far a row of scores moves when tokens move, at one input: a lower value."""
    op = linearise(lambda x: model.scores(x[None])[0], tokens)
    return max_token_norm(op, dense=0).lower


def largest_found(model: SmoothTransformer, *, num_tokens: int, starts: int, steps: int) -> float:
    """The largest `sigma_at` that an ascent in the tokens finds, all of them in the ball.

    Inputs and moves climb together by Adam, from normal inputs; the best one is measured anew.
    """
    gen = start_named(f"{starts} starts")
    width = model.head.in_features
    x, e = torch.randn(2, starts, num_tokens, width, generator=gen, dtype=torch.float64).float()
    x, e = x.requires_grad_(), e.requires_grad_()
    adam, most, best = torch.optim.Adam([x, e], lr=0.1), -math.inf, x
    for step in range(steps):
        adam.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
        move = e / e.norm(dim=-1, keepdim=True)
        inside = 0.999 * model.clip(x)
        moved = torch.func.jvp(model.scores, (inside,), (move,))[1]
        found = moved.reshape(starts, -1, moved.shape[-1]).norm(dim=-1).amax(-1)
        if float(found.detach().max()) > most:
            most, best = float(found.detach().max()), inside[int(found.argmax())].detach()
        x.grad, e.grad = torch.autograd.grad(-found.log().sum(), (x, e))
        adam.step()
    return sigma_at(model.double(), best.double())
