"""Functions of tokens whose Lipschitz constant is certified to be below 1."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, spectral_norm, transformed
from lipscope.errors import InputError, shown

_ROUNDING = 128  # units: of singular values, and of products of some of them


class Contraction(nn.Module, ABC):
    """``g`` with ``‖g(X) - g(Y)‖_F ≤ c ‖X - Y‖_F``, ``c < 1``, for all X, Y of one length.

    Args:
        c: The constant, above 0 and below 1.

    Raises:
        InputError: For any other number.
    """

    def __init__(self, c: float) -> None:
        super().__init__()
        if not isinstance(c, int | float) or not 0 < c < 1:
            raise InputError(f"`c` should be above 0 and below 1 to contract. Found `c = {c}`.")
        self.c = c

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``g(X)``."""

    @property
    @abstractmethod
    def first(self) -> Tensor:
        """The weights that a token meets first, ``(_, d)``."""

    def check(self, name: str, x: object) -> None:
        """Refuse what is no tokens of the width and the dtype of the weights."""
        d, dtype = self.first.shape[1], self.first.dtype
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != d or x.dtype != dtype:
            found = type(x).__name__
            if isinstance(x, Tensor):
                found = f"{tuple(x.shape)} in {str(x.dtype)[6:]}"
            raise InputError(
                f"`{name}` should have shape (..., n, {d}) in {str(dtype)[6:]}, as the weights. "
                f"Found {found}."
            )


class ContractiveAttention(Contraction):
    """``c F(X) / L``, ``L = layer.constant(n)``: attention that contracts at all inputs.

    ``L`` is derived from the weights and the number of tokens in every pass, so that the layer
    is a contraction whatever training does to it, and gradients go through ``L``.

    Holds for variants with a bound at all inputs: `L2Attention`, `ScaledCosineAttention`,
    `LipschitzNormAttention`, `ClippedAttention`; not for dot products, Sinkhorn, sigmoid
    or divided attention, whose bounds are on a ball.

    Args:
        layer: Attention whose output is as wide as its input.
        c: The constant, above 0 and below 1.

    Raises:
        InputError: For another ``c``, a layer of which no constant is known, or another width;
            in a pass, for a constant that is no bound (NaN, negative).

    Source: Contractive-L2-MHA of [kim2021], for every variant with a constant.

    >>> from lipscope.attention import L2Attention
    >>> g = ContractiveAttention(L2Attention(torch.eye(2), torch.eye(2)), c=0.9)
    >>> round(g(torch.tensor([[3.0, 4.0]])).norm().item(), 3)  # one token: F(x) = x / √2, as L
    4.5
    """

    def __init__(self, layer: Attention, c: float) -> None:
        super().__init__(c)
        if not isinstance(layer, Attention):
            raise InputError(
                "`layer` should be an attention layer, such as `attention` of a "
                f"`lipscope.MultiheadAttention`. Found `{type(layer).__name__}`."
            )
        d = layer.query.shape[1]
        width = layer.num_heads * layer.value_width if layer.output is None else len(layer.output)
        if width != d:
            raise InputError(f"The output should be as wide as the input, {d}. Found {width}.")
        layer.constant(1 if layer.mask is None else layer.mask.shape[-1])
        self.layer = layer

    @property
    def first(self) -> Tensor:
        """The weights of the queries."""
        return self.layer.query

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``c F(X) / L``."""
        return self.layer(x) * self._share(x.shape[-2])

    def as_layer(self, num_tokens: int) -> Attention:
        """The same function of so many tokens as one attention layer, which can be measured."""
        layer, share = self.layer, self._share(num_tokens)
        last = torch.eye(layer.query.shape[1]).to(share) if layer.output is None else layer.output
        bias = {} if layer.output_bias is None else {"output_bias": share * layer.output_bias}
        return layer.replace(output=share * last, **bias)

    def _share(self, num_tokens: int) -> Tensor:
        with torch.autocast(self.first.device.type, enabled=False):
            return _share(self.c, self.layer.constant(num_tokens), self.first.dtype)


class ContractiveMLP(Contraction):
    """``c f(x) / Π_l ‖W_l‖`` for every token, ``f`` linear maps with ``tanh`` between them.

    Args:
        widths: Of the layers, the first and last alike.
        c: The constant, above 0 and below 1.
        generator: Of the first weights.

    Raises:
        InputError: For another ``c``, or widths that do not end as they begin.

    >>> g = ContractiveMLP([2, 8, 2], c=0.5)
    >>> g(torch.zeros(5, 1, 2)).shape
    torch.Size([5, 1, 2])
    """

    def __init__(
        self, widths: Sequence[int], c: float, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(c)
        whole = isinstance(widths, Sequence) and all(type(w) is int and w > 0 for w in widths)
        if not whole or len(widths) < 2 or widths[0] != widths[-1]:
            raise InputError(
                "`widths` should be two or more positive integers, the last as the first. "
                f"Found `{shown(widths)}`."
            )
        pairs = itertools.pairwise(widths)
        self.weights = nn.ParameterList(
            [torch.randn(b, a, generator=generator) / math.sqrt(a) for a, b in pairs]
        )
        self.biases = nn.ParameterList([torch.zeros(b) for b in widths[1:]])

    @property
    def first(self) -> Tensor:
        """The weights of the first layer."""
        return self.weights[0]

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``c f(x) / Π_l ‖W_l‖``."""
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = nn.functional.linear(x, weight, bias)
            x = x if layer == last else x.tanh()
        with torch.autocast(self.first.device.type, enabled=False):
            sizes = torch.stack([spectral_norm(weight) for weight in self.weights])
            return x * _share(self.c, sizes.prod(), x.dtype)


def _share(c: float, constant: Tensor, dtype: torch.dtype) -> Tensor:
    """``c / L`` in a dtype, rounded down; where ``L`` is 0, so is every change of the output.

    Raises:
        InputError: If ``L`` is negative or no number, and so no bound.
    """
    if not transformed() and not bool(constant >= 0):
        raise InputError(
            "The constant of a contraction should be 0 or larger, to be divided by. Found "
            f"{constant.item():g}: a weight is no number, or `constant` no bound of its layer."
        )
    bound = constant * (1 + _ROUNDING * torch.finfo(dtype).eps)
    none = torch.full_like(bound, torch.nan)  # where torch follows what is computed: no exception
    return (c / torch.where(bound > 0, bound, torch.where(bound == 0, 1.0, none))).to(dtype)
