"""Every way in which a layer says what it does must say the same."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.attention.jacobian import ChunkedCore

MEMORY = (2**30, 400)  # everything kept; nothing kept, a row or a head at a time
SIZES = {"rtol": 1e-11, "atol": 1e-11}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def agree(layer: Attention, x: Tensor, log_weights: Tensor | None = None) -> None:
    """Forward (plain, batched, in chunks), closed form, stretch and automatic differentiation."""

    def f(z: Tensor) -> Tensor:
        return layer(z, log_weights=log_weights)

    y = f(x).detach()
    assert bool(y.isfinite().all())
    torch.testing.assert_close(f(torch.stack([2 * x, x]))[1], y, **SIZES)
    e, g = gaussian(*x.shape, seed=1), gaussian(*y.shape, seed=2)
    pushed: Any = torch.func.jvp(f, (x,), (e,))[1]
    pulled: Any = cast(Any, torch.func.vjp(f, x)[1])(g)[0]
    with torch.no_grad():
        torch.testing.assert_close(f(x), y, **SIZES)
    for memory in MEMORY:
        with torch.no_grad():
            o = ChunkedCore(layer, x, memory, log_weights=log_weights).o
            torch.testing.assert_close(layer.project_out(o.transpose(0, 1).flatten(1)), y, **SIZES)
        op = layer.linearise(x, memory=memory, log_weights=log_weights)
        torch.testing.assert_close(op.matvec(e), pushed, **SIZES)
        torch.testing.assert_close(op.rmatvec(g), pulled, **SIZES)
        if log_weights is None:
            found = layer.stretch(x, g, e, memory=memory)
            torch.testing.assert_close(found, (g * pushed).sum(), **SIZES)


def slope_at(model: nn.Module, x: Tensor) -> float:
    """The largest slope of a token at an input, by one token that moves: a lower value."""
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], x)
    blocks = jacobian.movedim(-2, 1) if jacobian.ndim == 4 else jacobian.movedim(-2, 0)
    return float(torch.linalg.matrix_norm(blocks, 2).max())
