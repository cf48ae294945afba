"""A density on sets of points: normal noise through invertible blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.control.inverse import Inverse, InvertibleResidual
from lipscope.errors import InputError, check_count


class Flow(nn.Module):
    """``log p(X) = log N(Z; 0, 1) + Σ log det``, ``Z`` what the blocks make of ``X``.

    A sample is a set of ``n`` points in ``d`` dimensions, ``(n, d)``; a point alone has n = 1.
    Blocks of attention let points know of each other, and the density does not depend on their
    order.

    Args:
        blocks: `InvertibleResidual` ones, the first nearest to the data.

    Raises:
        InputError: If there is none, or another module among them.

    Source: flows of residual blocks [behrmann2019].

    >>> from lipscope.control import ContractiveMLP
    >>> flow = Flow([InvertibleResidual(ContractiveMLP([2, 8, 2], c=0.5))])
    >>> flow.log_density(torch.zeros(7, 1, 2)).shape
    torch.Size([7])
    """

    def __init__(self, blocks: Sequence[InvertibleResidual]) -> None:
        super().__init__()
        several = isinstance(blocks, Sequence | nn.ModuleList)
        if not several or not blocks or not all(isinstance(b, InvertibleResidual) for b in blocks):
            kinds = blocks if several else [blocks]
            found = ", ".join(type(block).__name__ for block in kinds) or "none"
            raise InputError(f"`blocks` should be a list of `InvertibleResidual`. Found `{found}`.")
        self.blocks = nn.ModuleList(blocks)

    def log_density(self, x: Float[Tensor, "*b n d"], **options: object) -> Float[Tensor, "*b"]:
        """``log p(X)`` of every sample, in nats; options as in `log_determinant`."""
        total = x.new_zeros(x.shape[:-2])
        for block in self._each():
            total = total + block.log_determinant(x, **options).value
            x = block(x)
        size = x.shape[-2] * x.shape[-1]
        return total - (x.square().sum((-2, -1)) + size * math.log(2 * math.pi)) / 2

    def inverse(self, z: Float[Tensor, "*b n d"], **options: float) -> Inverse:
        """The ``X`` that becomes ``Z``; options as in `InvertibleResidual.inverse`.

        The error of a block grows by ``1 / (1 - c)`` in the next one; the bound that is returned
        is that of all together.
        """
        steps, error = 0, z.new_zeros(z.shape[:-2])
        for block in reversed(list(self._each())):
            found = block.inverse(z, **options)  # pyright: ignore[reportArgumentType]
            z, steps = found.x, steps + found.steps
            error = error / (1 - block.g.c) + found.error
        return Inverse(z, steps, error)

    def sample(
        self, count: int, num_tokens: int, width: int, *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "b n d"]:
        """``count`` samples of ``num_tokens`` points in ``width`` dimensions."""
        for name, number in (("count", count), ("num_tokens", num_tokens), ("width", width)):
            check_count(name, number, least=0 if name == "count" else 1)
        like = next(self.parameters())
        z = torch.randn(count, num_tokens, width, generator=generator, dtype=like.dtype)
        with torch.no_grad():
            return self.inverse(z.to(like.device)).x

    def _each(self) -> list[InvertibleResidual]:
        return [block for block in self.blocks if isinstance(block, InvertibleResidual)]
