"""The map ``residual``: attention, the stream that it is added to, and norms on the way.

Bounds go from attention, or from the map ``normed``, to it by ``1 + ‖J‖``, or take the identity
into their diagonal blocks. Proofs: ``docs/theory/local-certificates.md``, on the map ``residual``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.linalg import Operator, compose, linearise, plus_identity
from lipscope.theorems.head import UNIT
from lipscope.theorems.layer_bounds import AskedLayer
from lipscope.theorems.normed import Norm, Normed, norm_of
from lipscope.theorems.register import NotApplicableError
from lipscope.theorems.residual_context import Around, Behind

_KNOWN = 0.01  # largest rounding of a norm's input, beside it, that still says something


@dataclass(frozen=True)
class Residual:
    """The map ``residual``, ``x -> N_o(x + N_s(f(x)))``; without a norm, ``x + f(x)``.

    Pre-norm models have ``f`` `Normed` and nothing else, post-norm models have ``N_o``.

    Attributes:
        branch: ``f``: attention, with a norm in front or without.
        second: ``N_s``, a norm of the attention's own output, or None.
        outer: ``N_o``, a norm of the sum, or None.

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(*3 * [torch.eye(4)])
    >>> Residual(layer, outer=nn.LayerNorm(4))(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    branch: Attention | Normed
    second: nn.Module | None = None
    outer: nn.Module | None = None

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """``N_o(x + N_s(f(x)))``."""
        y = self.branch(x)
        y = x + (y if self.second is None else self.second(y))
        return y if self.outer is None else self.outer(y)

    @property
    def attention(self) -> Attention:
        """The attention layer alone."""
        return self.branch.attention if isinstance(self.branch, Normed) else self.branch

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.attention.num_heads

    def linearise(self, x: Float[Tensor, "n d"], *, memory: int = 2**30) -> Operator:
        """The Jacobian at ``x``; norms by automatic differentiation.

        Args:
            x: ``(n, d)``.
            memory: As in `Attention.linearise`.

        Returns:
            Operator ``(n, d) -> (n, d)``.
        """
        op = self.branch.linearise(x, memory=memory)
        with torch.no_grad():
            y = self.branch(x)
            total = x + (y if self.second is None else self.second(y))
        op = op if self.second is None else compose(linearise(self.second, y), op)
        op = plus_identity(op)
        return op if self.outer is None else compose(linearise(self.outer, total), op)

    @cached_property
    def norms(self) -> tuple[Norm | None, Norm | None]:
        """Constants of ``N_s`` and ``N_o``; `InputError` if one is of neither kind."""
        second, outer = (
            None if one is None else norm_of(one, self.width) for one in (self.second, self.outer)
        )
        return second, outer

    @cached_property
    def width(self) -> int:
        """Of a token; `InputError` if attention gives tokens of another one."""
        layer = self.attention
        reads = layer.query.shape[1]
        concat = layer.num_heads * layer.value_width
        writes = concat if layer.output is None else layer.output.shape[0]
        if reads != writes:
            raise InputError(
                "`layer` should give tokens of the width that it takes, to be added to them. Found "
                f"{reads} and {writes}."
            )
        return reads

    def everywhere(self) -> Around:
        """What is around attention at all inputs: norms are steepest at 0."""
        second, outer = (
            None
            if one is None
            else _behind(one, torch.tensor([one.steepest(0.0)], dtype=torch.float64))
            for one in self.norms
        )
        return Around(1, self.width, second, outer, here=False)

    def at(self, layer: AskedLayer, x: Float[Tensor, "n d"]) -> Around:
        """What is around attention at ``x``.

        Args:
            layer: The attention at its own input, a norm in front taken up.
            x: The input of this map.

        Raises:
            NotApplicableError: Where a norm takes what rounding hides.
        """
        second, outer = self.norms
        if second is None and outer is None:
            return Around(len(x), self.width)
        assert layer.x is not None
        with torch.no_grad():
            y = layer.attention.in_double()(layer.x)
        off, after = layer.together.written_off + UNIT * _biases(layer.attention), None
        if second is not None:
            after = _behind_at(second, y, off)
            y = len(second.gain) ** 0.5 * second.gain * second.direction(y) + second.shift
            off = off * after.sizes
        off = off + UNIT * (x.norm(dim=1) + y.norm(dim=1))
        last = None if outer is None else _behind_at(outer, x + y, off)
        return Around(len(x), self.width, after, last)


def _behind(
    norm: Norm, slope: Tensor, u: Tensor | None = None, error: Tensor | None = None
) -> Behind:
    return Behind(len(norm.gain) ** 0.5 * norm.gain, norm.centred, slope, u, error)


def _behind_at(norm: Norm, y: Tensor, off: Tensor) -> Behind:
    """The derivative of a norm at ``y``, every token of which is known up to ``off``.

    ``u`` moves by at most ``s off``, and ``s`` by the share ``s off``: the derivative by three.
    """
    size = (norm.size(y) - off).clamp_min(0.0)
    slope = 1 / (size.square() + len(norm.gain) * norm.eps).sqrt()
    share = slope * off
    if not bool((share < _KNOWN).all()):
        raise NotApplicableError("a norm after it takes what cancels beyond float64")
    found = _behind(norm, slope, norm.direction(y))
    return _behind(norm, slope, found.u, 3 * found.sizes * share)


def _biases(layer: Attention) -> float:
    """``>= `` the norm of what biases write."""
    outer = 1.0 if layer.output is None else float(layer.output.norm())
    given = ((getattr(layer, "value_bias", None), outer), (getattr(layer, "output_bias", None), 1))
    return sum((float(b.double().norm()) * factor for b, factor in given if b is not None), 0.0)
