"""What moves tokens: a layer's output, along ``e^(-tV)``, on spheres, or as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.measures import TokenMeasure, token_map

Function = Callable[[Tensor], Tensor]
Norm = Literal["rms", "layer"]

# The logarithm of how much queries and keys may grow: weights are those of the limit long
# before, and products of two of them stay far from the end of the float range.
_SHARPEST = 230.0
_AT_ONCE = 2**22  # scores up to which weights are formed at once: faster than in blocks
_COMMUTES = 1e-12


class Field:
    """The velocity ``(t, X) -> X'`` of tokens under a layer.

    Attributes:
        start: Where the flow begins: the tokens, centred where the norm is ``layer``.
        rate: ``V`` of the renormalisation; None without one.
        fastest: The largest real part of its eigenvalues.
    """

    def __init__(
        self,
        f: Attention | Function,
        x: Tensor | TokenMeasure,
        *,
        renormalise: bool = False,
        norm: Norm | None = None,
    ) -> None:
        self.measure = x if isinstance(x, TokenMeasure) else None
        self.start = _tokens(x.points.detach() if isinstance(x, TokenMeasure) else x)
        self.f = _in_double(f)
        self.norm, self.radii, self.rate = norm, None, None
        if norm not in (None, "rms", "layer"):
            raise InputError(f"`norm` should be None, rms or layer. Found `{norm}`.")
        if renormalise and norm is not None:
            raise InputError("`renormalise` goes with no `norm`. Found both; leave one out.")
        if norm is not None:
            self.start = self._centred(self.start)
            self.radii = self.start.norm(dim=-1, keepdim=True)
            if not bool((self.radii > 0).all()):
                raise InputError("`x` should have tokens that are not zero once normalised.")
        if renormalise:
            self.rate = self._rate()
            self.fastest = float(torch.linalg.eigvals(self.rate).real.max())
            self.relative = self.rate - self.fastest * torch.eye(len(self.rate)).to(self.rate)
        self._check_fits()

    def __call__(self, t: float, x: Tensor) -> Tensor:
        """The velocity at a time and a state."""
        if self.rate is not None:
            return self._renormalised(t, x)
        if self.radii is None:
            return self.read(x)
        x = self.onto(x)
        v = self._centred(self.read(x))
        return v - x * ((x * v).sum(-1, keepdim=True) / self.radii.square())

    def onto(self, x: Tensor) -> Tensor:
        """The nearest state that the flow can have: on its spheres, if it has some."""
        if self.radii is None:
            return x
        x = self._centred(x)
        return x * (self.radii / x.norm(dim=-1, keepdim=True))

    def read(self, x: Tensor) -> Tensor:
        """What every token reads: the layer's output."""
        if self.measure is not None:
            assert isinstance(self.f, Attention)
            mu = self.measure.moved(x)
            return token_map(self.f, mu, mu.points, mu.positions)
        pairs = len(x) ** 2 * (self.f.num_heads if isinstance(self.f, Attention) else 0)
        with torch.set_grad_enabled(0 < pairs <= _AT_ONCE):
            out = self.f(x if pairs else x.clone())  # a function may write into its argument
        if not isinstance(out, Tensor):
            raise InputError(f"`f` should give a tensor. Found `{type(out).__name__}`.")
        return out.detach()

    def weights(self, t: float, x: Tensor) -> Tensor:
        """The attention weights at a state, ``(h, n, n)``.

        Raises:
            InputError: If there are none: of a function, or of a measure.
        """
        if not isinstance(self.f, Attention) or self.measure is not None:
            raise InputError("not available: attention weights are those of a layer on tokens.")
        q, k, _ = self.f.project(self.stretched(t, x))
        return self.f.weights(q, k)

    def stretched(self, t: float, y: Tensor) -> Tensor:
        """``x = e^(tV) y``, divided by what would leave the float range; else the state itself."""
        if self.rate is None:
            return y
        size = math.exp(min(t * self.fastest, _SHARPEST))
        return size * y @ torch.linalg.matrix_exp(t * self.relative).T

    def _renormalised(self, t: float, y: Tensor) -> Tensor:
        """``P V y - V y`` with the weights of ``e^(tV) y``."""
        assert self.rate is not None and isinstance(self.f, Attention)
        q, k, _ = self.f.project(self.stretched(t, y))
        _, _, v = self.f.project(y)
        heads = (self.f.weights(q, k) @ v).transpose(-3, -2).flatten(-2)
        return self.f.project_out(heads) - y @ self.rate.T

    def _rate(self) -> Tensor:
        """``V = Σ_h W_h V_h``, if it commutes with every head."""
        f = self.f
        if self.measure is not None or not isinstance(f, Attention):
            raise InputError("`renormalise` goes with a layer on tokens. Found another flow.")
        held = (f.value_bias, f.output_bias, f.value_norm, f.entrance())
        if any(one is not None for one in held):
            raise InputError("not available: `renormalise` needs values that are linear in tokens.")
        maps = value_maps(f)
        total = maps.sum(0)
        off = (maps @ total - total @ maps).abs().max()
        if not float(off) <= _COMMUTES * max(float(maps.abs().max() ** 2), 1e-300):
            raise InputError(
                "not available: `renormalise` needs heads whose value maps commute with their "
                f"sum. Found some that do not, by {float(off):.2g}."
            )
        return total

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.norm == "layer" else x

    def _check_fits(self) -> None:
        try:
            out = self.read(self.start)
        except RuntimeError as problem:
            raise InputError(
                f"The layer should read tokens {tuple(self.start.shape)}. Found that it cannot: "
                f"{problem}"
            ) from problem
        if out.shape != self.start.shape:
            raise InputError(
                "A flow needs a layer that keeps the width of its tokens. Found tokens "
                f"{tuple(self.start.shape)} and outputs {tuple(out.shape)}."
            )


def value_maps(layer: Attention) -> Tensor:
    """``W_h V_h`` of every head, ``(h, d_out, d)``: what the values become in the output."""
    _, _, value = layer.projections()
    groups = value.unflatten(0, (layer.num_groups, -1))
    by_head = layer.repeat_groups(groups)
    width = layer.num_heads * layer.value_width
    output = torch.eye(width).to(value) if layer.output is None else layer.output
    return output.unflatten(1, (layer.num_heads, -1)).transpose(0, 1) @ by_head


def _tokens(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.numel() or not x.is_floating_point():
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"`x` should be tokens, (n, d), at least one. Found `{found}`.")
    if not bool(x.isfinite().all()):
        raise InputError("`x` should be finite. Found NaN or Inf in it.")
    return x.detach().to("cpu", torch.float64)


def _in_double(f: Attention | Function) -> Attention | Function:
    return f.in_double() if isinstance(f, Attention) else f
