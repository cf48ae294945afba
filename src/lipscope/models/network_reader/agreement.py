"""Whether a network is the module that it was read from: scores, gradients, curvature."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.errors import InputError
from lipscope.linalg import start_named

Scores = Callable[[Tensor], Tensor]

_AGREES = 1e-6  # relative
_MOVES = (1e-2, 1e-1, 1.0)  # of the stream, relative to its root mean square
_MANY = 4  # classes whose gradients are compared


def check_network(network: Scores, scores: Scores, x: Float[Tensor, "n d"]) -> None:
    """Refuse a network that is not the function ``scores`` of the stream.

    Compared to 1e-6, at ``x`` and after random moves of three sizes: scores, gradients (of the
    largest scores at ``x``, then of a random combination of them), and products with the Hessian
    there, by differences along a random direction.

    Args:
        network: The description, a `Network` or another function.
        scores: The module itself from the same stream, ``(n, d) -> (c,)``.
        x: The stream.

    Raises:
        InputError: If they differ: in what, where, and by how much.
    """
    generator = start_named("network and module")
    size = float(x.square().mean().sqrt()) or 1.0

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=x.dtype)

    with torch.no_grad():
        mine, own = network(x), scores(x)
    _compare("scores", "at the input", mine, own, float(own.norm()))
    top = own.topk(min(_MANY, len(own))).indices
    for move in (0.0, *_MOVES):
        at = x + move * size * drawn(*x.shape)
        where = f"after a random move of {move:g} times the stream" if move else "at the input"
        weights = drawn(1, len(top)) if move else torch.eye(len(top), dtype=x.dtype)
        (mine, slopes), (own, expected) = (
            _gradients(f, at, top, weights) for f in (network, scores)
        )
        _compare("scores", where, mine, own, float(own.norm()))
        length = float(expected.norm())
        _compare("gradients", where, slopes, expected, length)
        if move:
            near = at + 1e-4 * size * drawn(*x.shape)
            _, mine = _gradients(network, near, top, weights)
            _, own = _gradients(scores, near, top, weights)
            change = own - expected
            # Beside the rounding of the gradients themselves.
            floor = 1e-4 * length
            _compare("curvature", where, mine - slopes, change, float(change.norm()) + floor)


def _compare(what: str, where: str, mine: Tensor, own: Tensor, size: float) -> None:
    error = float((mine - own).norm()) if mine.shape == own.shape else math.inf
    if not error <= _AGREES * size:
        raise InputError(
            f"The network should have the {what} of the module itself. Found a relative difference "
            f"of {error / size if size else error:.2g} {where}: the module computes something that "
            "lipscope does not read; certify one of its layers."
        )


def _gradients(
    f: Scores, x: Tensor, classes: Tensor, weights: Float[Tensor, "r k"]
) -> tuple[Float[Tensor, " c"], Float[Tensor, "r n d"]]:
    """All scores, and gradients of combinations of those of some classes."""
    with torch.enable_grad():
        x = (x.detach() + 0.0).requires_grad_()
        scores = f(x)
        rows = [row @ scores[classes] + 0.0 * x.sum() for row in weights]
        parts = [torch.autograd.grad(row, x, retain_graph=True)[0] for row in rows]
    return scores.detach(), torch.stack(parts)
