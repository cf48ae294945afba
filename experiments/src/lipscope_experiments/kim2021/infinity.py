"""Inputs on which the infinity norm of the Jacobian is large, found by gradient ascent."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope import Attention
from lipscope.attacks import check_size

_RATE = 0.05
_SPREADS = 4.0  # random starts have entries up to this many standard deviations of scale


def ascend_infinity(
    layer: Attention, *, num_tokens: int, restarts: int = 50, steps: int = 300, seed: int = 0
) -> float:
    """The largest ``‖J(X)‖_∞ = max_o sum_i |J_oi|`` that Adam finds from random starts.

    Holds for every layer; a lower value of the supremum, the best over all iterates. The dense
    Jacobian is formed: ``num_tokens · d`` up to some hundreds.

    Args:
        layer: The layer.
        num_tokens: Number of tokens.
        restarts: Random starts, normal with scales from 0.1 to 4.
        steps: Steps of each.
        seed: Of the starts.

    Returns:
        The largest value.

    Raises:
        InputError: For no tokens.
    """
    check_size(num_tokens, 1.0)
    gen = torch.Generator().manual_seed(seed)
    shape = (restarts, num_tokens, layer.query.shape[1])
    scale = torch.linspace(0.1, _SPREADS, restarts)[:, None, None]
    x = (torch.randn(shape, generator=gen) * scale).to(layer.query).requires_grad_(True)
    adam = torch.optim.Adam([x], lr=_RATE)
    best = 0.0
    for _ in range(steps):
        adam.zero_grad()
        values = _norms(layer, x)
        best = max(best, float(values.detach().nan_to_num(nan=0.0).max()))
        (-values.sum()).backward()
        adam.step()
    return best


def _norms(layer: Attention, x: Tensor) -> Tensor:
    """``‖J‖_∞`` of each input of a batch, differentiable."""
    size = x.shape[1] * x.shape[2]
    dense = torch.func.vmap(torch.func.jacrev(layer))(x)
    return dense.reshape(len(x), -1, size).abs().sum(-1).amax(-1)
