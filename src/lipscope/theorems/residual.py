"""Norms before and after attention, and the residual connection: maps ``normed``, ``residual``.

After a norm every token lies on an ellipsoid, whose shape can be absorbed into the weights:
attention of normalised tokens is another attention layer on the unit sphere, and every bound
for radius 1 holds for all inputs of the model.

The map ``residual`` is ``x -> N_o(x + N_s(f(x)))``; either norm may be missing, and ``f`` may have
a norm in front. Block ij of its Jacobian is ``L_i J_ij + δ_ij D_i`` with ``D_i`` the derivative of
``N_o`` at token i, the identity without it, and ``L_i`` that times the derivative of ``N_s``.
Bounds of attention extend to it by ``1 + ‖J‖``, or by adding the identity to diagonal blocks.
Proofs: ``docs/theory/local-certificates.md`` and ``global-bounds.md``, on these maps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.linalg import Operator, compose, linearise, plus_identity
from lipscope.models import Norm, read_norm
from lipscope.theorems.head import UNIT, HeadsAt
from lipscope.theorems.register import NotApplicableError


@dataclass(frozen=True)
class Normed:
    """The map ``normed``, ``x -> f(N(x))``: attention after a normalisation.

    Holds for any normalisation module; bounds from weights support RMSNorm and LayerNorm.

    >>> layer = DotProduct(*3 * [torch.eye(4)])
    >>> Normed(layer, nn.LayerNorm(4))(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    attention: Attention  # ``f``
    norm: nn.Module  # ``N``, over the last axis of ``(n, d)``

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d_out"]:
        """``f(N(x))``."""
        return self.attention(self.norm(x))

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.attention.num_heads

    def linearise(
        self, x: Float[Tensor, "n d"], *, memory: int = 2**30, per_head: bool = False
    ) -> Operator:
        """The Jacobian at ``x``; the norm is differentiated automatically."""
        with torch.no_grad():
            u = self.norm(x)
        outer = self.attention.linearise(u, memory=memory, per_head=per_head)
        return compose(outer, linearise(self.norm, x))

    def in_double(self) -> Normed:
        """A copy in float64, attention on the CPU."""
        return Normed(self.attention.in_double(), copy.deepcopy(self.norm).double())

    @cached_property
    def constants(self) -> Norm:
        """Gain, shift and ε of the norm; `InputError` unless it is RMSNorm or LayerNorm."""
        return norm_of(self.norm, self.attention.query.shape[1])

    @cached_property
    def absorbed(self) -> DotProduct:
        """The equivalent attention layer on the unit sphere, see `absorb`."""
        if not isinstance(self.attention, DotProduct):
            raise InputError(
                "`layer.attention` should be dot-product attention, whose weights can absorb "
                f"a norm. Found `{type(self.attention).__name__}`."
            )
        return absorb(self.attention, self.constants)


def norm_of(module: nn.Module, width: int) -> Norm:
    """Identify a module as LayerNorm or RMSNorm by evaluating it: see `read_norm`.

    >>> norm_of(nn.LayerNorm(4), 4).centred, norm_of(nn.RMSNorm(4), 4).centred
    (True, False)

    Raises:
        InputError: If it is neither.
    """
    own = copy.deepcopy(module).to("cpu", torch.float64)
    with torch.no_grad():
        found = read_norm(own, width)
    if found is None or not found.scaled:
        raise InputError(
            f"`norm` should be an RMSNorm or a LayerNorm. Found `{type(module).__name__}`, "
            "which does something else."
        )
    return found


def absorb(layer: DotProduct, norm: Norm) -> DotProduct:
    """The layer that acts on the unit sphere as ``layer`` acts on normalised tokens.

    ``f(N(x)) = f'(u(x))``, ``u`` the norm's `Norm.direction`, with weights ``√d W D_g`` and
    biases ``b + W β``: for LayerNorm with a shift, attention with biases on a sphere. If the norm
    subtracts the mean, so do the weights, restricted to the tokens that can occur.

    Holds for every ``ε ≥ 0``: tokens lie in the unit ball.

    Source: section 2.3 of [castin2024] (RMSNorm); with a shift, derived here.
    """
    own = layer.in_double()

    def weight(w: Tensor) -> Tensor:
        scaled = w * norm.weight * len(norm.weight) ** 0.5
        return scaled - scaled.mean(1, keepdim=True) if norm.centred else scaled

    def bias(w: Tensor, b: Tensor | None) -> Tensor:
        return w @ norm.bias if b is None else w @ norm.bias + b

    return own.replace(
        query=weight(own.query),
        key=weight(own.key),
        value=weight(own.value),
        query_bias=bias(own.query, own.query_bias),
        key_bias=bias(own.key, own.key_bias),
        value_bias=bias(own.value, own.value_bias),
    )


@dataclass(frozen=True)
class Behind:
    """The derivative of a norm after attention: ``s_i D_g (I - u_i u_i^T) Π`` in row i.

    ``D_g`` has ``√d γ``; ``Π`` subtracts the mean (LayerNorm) or is the identity (RMSNorm).
    """

    norm: Norm
    # upper bound of ``s_i``, ``(n,)``; the largest one, ``(1,)``, for all inputs
    slope: Float[Tensor, " n"]
    # normalised tokens in the unit ball, ``(n, d)``; None for all inputs
    u: Float[Tensor, "n d"] | None = None
    # upper bound of the derivative's change from rounding of the norm's input, ``(n,)``
    error: Float[Tensor, " n"] | None = None

    @property
    def gain(self) -> Float[Tensor, " d"]:
        """``√d γ``."""
        return len(self.norm.weight) ** 0.5 * self.norm.weight

    @property
    def sizes(self) -> Float[Tensor, " n"]:
        """Bounds of the norms of the row derivatives."""
        return self.gain.abs().max() * self.slope * (1 + UNIT)

    def at(self, rows: slice) -> Float[Tensor, "r d d"]:
        """The derivative at some tokens."""
        assert self.u is not None
        u = self.u[rows]
        m = torch.eye(u.shape[1], dtype=u.dtype) - u[:, :, None] * u[:, None]
        m = m - m.mean(-1, keepdim=True) if self.norm.centred else m
        return self.slope[rows, None, None] * self.gain[:, None] * m


@dataclass(frozen=True)
class Around:
    """The norms and the residual path around attention, at one input or for all inputs."""

    tokens: int  # number of tokens; 1 for all inputs
    width: int  # of a token
    second: Behind | None = None  # ``N_s``, applied to the attention output, or None
    outer: Behind | None = None  # ``N_o``, applied to the sum, or None

    @cached_property
    def beside(self) -> Float[Tensor, " n"]:
        """``>= ‖D_i‖``."""
        return self._sizes(self.outer)

    @cached_property
    def lefts(self) -> Float[Tensor, " n"]:
        """``>= ‖L_i‖``."""
        return self.beside * self._sizes(self.second)

    @property
    def plain(self) -> bool:
        """Whether ``D_i`` and ``L_i`` are identities: no norm after attention."""
        return self.second is None and self.outer is None

    def own(self, rows: slice) -> Float[Tensor, "r d d"]:
        """``D_i`` of some tokens; ``(1, d, d)`` if all are equal."""
        if self.outer is None:
            return torch.eye(self.width, dtype=torch.float64)[None]
        return self.outer.at(rows)

    def through(self, rows: slice, blocks: Float[Tensor, "r d m"]) -> Float[Tensor, "r d m"]:
        """``L_i B_i``."""
        blocks = blocks if self.second is None else self.second.at(rows) @ blocks
        return blocks if self.outer is None else self.outer.at(rows) @ blocks

    def back(self, rows: slice, blocks: Float[Tensor, "r d m"]) -> Float[Tensor, "r d m"]:
        """``L_i^T B_i``."""
        blocks = blocks if self.outer is None else self.outer.at(rows).mT @ blocks
        return blocks if self.second is None else self.second.at(rows).mT @ blocks

    def of(self, value: float) -> float:
        """``max ‖D_i‖ (1 + max ‖S_i‖ value)``, ``S_i`` the derivative of ``N_s``."""
        outer, second = (float(self._sizes(one).max()) for one in (self.outer, self.second))
        return outer * (1 + second * value)

    def slack(self, hidden: float) -> float:
        """Rounding error of a bound including the identity; ``hidden``: without it."""
        norm = hidden / UNIT
        second = float(self._sizes(self.second).max())
        inner, outer = (
            0.0 if one is None or one.error is None else float(one.error.max())
            for one in (self.second, self.outer)
        )
        beside = float(self.beside.max())
        total = float(self.lefts.max()) * hidden + UNIT * self.width * beside
        return total + outer * (1 + second * norm) + beside * inner * norm

    def _sizes(self, norm: Behind | None) -> Tensor:
        return torch.ones(self.tokens, dtype=torch.float64) if norm is None else norm.sizes


_KNOWN = 0.01  # largest relative rounding of a norm's input for a meaningful bound


@dataclass(frozen=True)
class Residual:
    """The map ``residual``, ``x -> N_o(x + N_s(f(x)))``; without a norm, ``x + f(x)``.

    Pre-norm models have ``f`` `Normed` and nothing else, post-norm models have ``N_o``.

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(*3 * [torch.eye(4)])
    >>> Residual(layer, outer=nn.LayerNorm(4))(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    branch: Attention | Normed  # ``f``: attention, with or without a norm in front
    second: nn.Module | None = None  # ``N_s``, a norm of the attention output, or None
    outer: nn.Module | None = None  # ``N_o``, a norm of the sum, or None

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
        """The Jacobian at ``x``; norms are differentiated automatically."""
        op = self.branch.linearise(x, memory=memory)
        with torch.no_grad():
            y = self.branch(x)
            total = x + (y if self.second is None else self.second(y))
        op = op if self.second is None else compose(linearise(self.second, y), op)
        op = plus_identity(op)
        return op if self.outer is None else compose(linearise(self.outer, total), op)

    def in_double(self) -> Residual:
        """A copy in float64, attention on the CPU."""
        norms = (
            None if n is None else copy.deepcopy(n).double() for n in (self.second, self.outer)
        )
        return Residual(self.branch.in_double(), *norms)

    @cached_property
    def norms(self) -> tuple[Norm | None, Norm | None]:
        """Constants of ``N_s`` and ``N_o``; `InputError` unless RMSNorm or LayerNorm."""
        second, outer = (
            None if one is None else norm_of(one, self.width) for one in (self.second, self.outer)
        )
        return second, outer

    @cached_property
    def width(self) -> int:
        """Token width; `InputError` if input and output widths differ."""
        layer = self.attention
        reads = layer.query.shape[1]
        concat = layer.num_heads * layer.value_width
        writes = concat if layer.output is None else layer.output.shape[0]
        if reads != writes:
            raise InputError(
                "`layer` should preserve the token width for the residual sum. Found "
                f"{reads} and {writes}."
            )
        return reads

    def everywhere(self) -> Around:
        """The norms and residual path for all inputs: norms are steepest at 0."""
        second, outer = (
            None if one is None else Behind(one, one.weight.new_tensor([one.steepest(0.0)]))
            for one in self.norms
        )
        return Around(1, self.width, second, outer)

    def at(self, attention: Attention, heads: HeadsAt | None, x: Float[Tensor, "n d"]) -> Around:
        """The norms and residual path at ``x``; ``heads`` is needed if a norm follows attention."""
        second, outer = self.norms
        if second is None and outer is None:
            return Around(len(x), self.width)
        with torch.no_grad():
            assert heads is not None
            y = attention.in_double()(heads.x)
        off, after = heads.written_off + UNIT * _biases(attention), None
        if second is not None:
            after = _behind_at(second, y, off)
            y = second(y)
            off = off * after.sizes
        off = off + UNIT * (x.norm(dim=1) + y.norm(dim=1))
        last = None if outer is None else _behind_at(outer, x + y, off)
        return Around(len(x), self.width, after, last)


def _behind_at(norm: Norm, y: Tensor, off: Tensor) -> Behind:
    """The derivative of a norm at ``y``, each token of which is known up to ``off``.

    ``u`` changes by at most ``s off``, ``s`` by the share ``s off``, the derivative by 3 times.
    """
    size = (norm.size(y) - off).clamp_min(0.0)
    slope = 1 / (size.square() + len(norm.weight) * norm.eps).sqrt()
    share = slope * off
    if not bool((share < _KNOWN).all()):
        raise NotApplicableError("a norm after it takes what cancels beyond float64")
    found = Behind(norm, slope, norm.direction(y))
    return replace(found, error=3 * found.sizes * share)


def _biases(layer: Attention) -> float:
    """``>= `` the norm of the contribution of the biases."""
    outer = 1.0 if layer.output is None else float(layer.output.norm())
    biases = ((getattr(layer, "value_bias", None), outer), (getattr(layer, "output_bias", None), 1))
    return sum((float(b.double().norm()) * factor for b, factor in biases if b is not None), 0.0)
