"""A token at the origin reads uniformly: why dot-product attention is not Lipschitz, in steps."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import DotProduct, InputError


def proof_steps(
    layer: DotProduct, x: Float[Tensor, "n d"], e: Float[Tensor, "n d"], row: int
) -> dict[str, float]:
    """Every step of the proof that attention is not Lipschitz, as a relative error.

    For ``x_row = 0``: the row's logits are 0, its weights ``1/n``, the derivative of the
    softmax there ``I/n - 1 1^T/n^2``, and so the row of the output moves along ``E`` by
    ``V (C A e_row + mean_j e_j)`` with ``C`` the covariance of the tokens, which grows like
    ``R^2`` as the other tokens do.

    Holds for one unmasked head without biases.

    Args:
        layer: One head.
        x: Tokens, the one in ``row`` at the origin.
        e: Direction ``E``.
        row: Which token is at the origin.

    Returns:
        For each step, the largest deviation of what it says from automatic differentiation or
        direct evaluation, relative to the largest entry.

    Raises:
        InputError: If the layer or the tokens are not as asked.

    Source: a note on scaled dot-product attention, of which a draft without its last step was
    read; the last step is derived here.
    """
    if layer.num_heads != 1 or layer.causal or layer.mask is not None:
        raise InputError("`layer` should be one unmasked head. Found another layer.")
    if bool(x[row].any()):
        raise InputError(f"Token {row} of `x` should be zero. Found another vector.")
    n = len(x)
    a = layer.scale * layer.key.T @ layer.query  # logits <A x_i, x_j>
    logits, moved = x @ a.T @ x.T, e @ a.T @ x.T + x @ a.T @ e.T
    weights = torch.softmax(logits, dim=-1)
    exact = torch.func.jvp(layer, (x,), (e,))[1]
    slope = torch.func.jacrev(lambda z: torch.softmax(z, dim=-1))(torch.zeros(n).to(x))
    uniform = torch.eye(n).to(x) / n - torch.ones(n, n).to(x) / n**2
    through = torch.func.jvp(lambda s: torch.softmax(s, dim=-1), (logits,), (moved,))[1]
    spread = torch.cov(x.T, correction=0)
    last = layer.value @ (spread @ a @ e[row] + e.mean(0))
    return {
        "chain rule: dAtt = M X W_V + softmax(P) X' W_V": _error(
            (through @ x + weights @ e) @ layer.value.T, exact
        ),
        "the logits of the zero token vanish": float(logits[row].abs().max()),
        "its weights are 1/n": _error(weights[row], torch.full_like(weights[row], 1 / n)),
        "softmax'(0) = I/n - 11'/n²": _error(slope, uniform),
        "its logits move by X v, v = A e": _error(moved[row], x @ a @ e[row]),
        "its output moves by V (C A e + mean e) (derived here)": _error(last, exact[row]),
    }


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
