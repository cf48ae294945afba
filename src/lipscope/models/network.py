"""Networks that decide, as their parts: attention, norms, token-wise networks, a pool and a head.

In float64. A network is a chain of branches ``h -> h + part(norm(h))`` on a stream of tokens, a
pool of its tokens, branches on the pooled vector, and a linear head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, Clip, DotProduct, check_layer
from lipscope.errors import InputError

ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"]
ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda z: nn.functional.gelu(z, approximate="tanh"),
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
    "identity": lambda z: z,
}


@dataclass(frozen=True, eq=False)
class Norm:
    """``gamma c / sqrt(|c|^2 / d + eps) + beta`` with ``c = v - mean(v)``, or ``c = v``.

    LayerNorm is centred and scaled, RMSNorm scaled alone, a norm without variance centred alone.
    """

    weight: Float[Tensor, " d"]  # ``γ``
    bias: Float[Tensor, " d"]  # ``β``; zeros for RMSNorm
    eps: float = 1e-5  # ``ε``
    centred: bool = True
    scaled: bool = True

    def __call__(self, v: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The norm of every token."""
        c = self._centre(v)
        if self.scaled:
            c = c / (c.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return self.weight * c + self.bias

    def direction(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """``u(x) = c / √(|c|² + d ε)``, in the unit ball: ``N(x) = √d γ ∘ u(x) + β``.

        Of a norm that is scaled, as all below. The derivative of ``u`` is ``s (I - u u^T)``, after
        the mean is taken away where the norm is centred, with the `slope` ``s``.

        Raises:
            InputError: If the norm divides a token by zero.
        """
        slope = self.slope(x)
        if not bool(slope.isfinite().all()):
            bad = int((~slope.isfinite()).nonzero()[0])
            raise InputError(
                "`x` should have no token that the norm divides by zero. Found token "
                f"{bad}, {'constant' if self.centred else 'zero'}, and a norm with ε = 0."
            )
        return self._centre(_plain(x)) * slope[:, None]

    def slope(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """``s = 1 / √(|c|² + d ε)``: at every token the derivative of `direction` is at most it."""
        return 1 / (self.size(x).square() + len(self.weight) * self.eps).sqrt()

    def size(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """``|c(x_i)|`` of every token."""
        return self._centre(_plain(x)).norm(dim=1)

    def steepest(self, floor: float) -> float:
        """The largest slope where ``|c(x_i)|`` is at least ``floor``; infinite for 0 and ε = 0."""
        square = floor**2 + len(self.weight) * self.eps
        return 1 / math.sqrt(square) if square else math.inf

    @property
    def radius(self) -> float:
        """``√d |γ|_∞ + |β|``: no token has a larger norm after it, for every input and ``ε ≥ 0``.

        >>> Norm(torch.ones(9), torch.zeros(9), centred=False).radius
        3.0
        """
        return float(len(self.weight) ** 0.5 * self.weight.abs().max() + self.bias.norm())

    def _centre(self, v: Tensor) -> Tensor:
        return v - v.mean(-1, keepdim=True) if self.centred else v


def _plain(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


@dataclass(frozen=True, eq=False)
class Feed:
    """``W_2 (act(W_1 y + b_1) * (W_g y + b_g)) + b_2`` of every token; without a gate, ``* 1``."""

    inner: Float[Tensor, "f d"]
    inner_bias: Float[Tensor, " f"]
    outer: Float[Tensor, "d_out f"]
    outer_bias: Float[Tensor, " d_out"]
    activation: ActivationName
    gate: Float[Tensor, "f d"] | None = None
    gate_bias: Float[Tensor, " f"] | None = None

    def __call__(self, y: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d_out"]:
        """The network at every token."""
        hidden = ACTIVATIONS[self.activation](y @ self.inner.T + self.inner_bias)
        if self.gate is not None:
            gate = y @ self.gate.T
            hidden = hidden * (gate if self.gate_bias is None else gate + self.gate_bias)
        return hidden @ self.outer.T + self.outer_bias


@dataclass(frozen=True, eq=False)
class Branch:
    """``h -> skip h + part(norm(h))``; without a part ``norm(h)``, without a norm ``part(h)``.

    ``skip`` is the weight of the stream: True and False are 1 and 0.
    """

    part: Attention | Feed | None = None
    norm: Norm | Clip | None = None
    skip: bool | float | Tensor = True

    def __post_init__(self) -> None:
        if isinstance(self.part, Attention):
            check_layer(self.part)

    def __call__(self, h: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d_out"]:
        """The stream after this branch."""
        y = h if self.norm is None else self.norm(h)
        y = y if self.part is None else self.part(y)
        return h * self.skip + y if self.skip is not False else y


@dataclass(frozen=True, eq=False)
class Chain:
    """Branches after each other: a map of tokens, at most ``num_tokens`` if that is known."""

    branches: tuple[Branch, ...]
    num_tokens: int | None = None

    def __call__(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d_out"]:
        """The stream after all of them."""
        for branch in self.branches:
            x = branch(x)
        return x


@dataclass(frozen=True, eq=False)
class Network:
    """Scores ``W tail(sum_i share_i h_i) + b`` of the stream ``h`` that comes out of branches.

    Attributes:
        branches: What the stream goes through, in order.
        share: Of each token in the pool: ``1/n`` for the mean, 1 for the token that is read.
        of_any_number: Whether the mean is that of however many tokens there are, up to ``n``.
        tail: Branches without attention on the pooled vector, such as a tanh pooler.
        head: ``W``, one row a class.
        bias: ``b``.
        names: What to call the classes; their indices if empty.
    """

    branches: tuple[Branch, ...]
    share: Float[Tensor, " n"]
    head: Float[Tensor, "c d"]
    bias: Float[Tensor, " c"]
    tail: tuple[Branch, ...] = ()
    names: tuple[str, ...] = ()
    of_any_number: bool = False

    def __call__(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b c"]:
        """Scores of the classes at a stream of tokens."""
        return self.pooled(x) @ self.head.T + self.bias

    def pooled(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d_out"]:
        """What the head reads."""
        pooled = (self.share @ Chain(self.branches)(x)).unsqueeze(-2)
        return Chain(self.tail)(pooled)[..., 0, :]

    def name(self, index: int) -> str:
        """What a class is called."""
        return self.names[index] if self.names else str(index)


def scaled(part: Attention | Feed, after: float | Tensor, before: float = 1.0) -> Attention | Feed:
    """``y -> after part(before y)``, in the part's weights; ``after`` may be a number a channel."""
    if isinstance(part, Feed):
        return replace(
            part,
            inner=before * part.inner,
            gate=None if part.gate is None else before * part.gate,
            outer=_column(after, part.outer) * part.outer,
            outer_bias=after * part.outer_bias,
        )
    names = ("query", "key", "value") if before != 1 else ()
    inner = {name: before * getattr(part, name) for name in names}
    wide = part.output
    if wide is None:
        wide = torch.eye(part.num_heads * part.value_width).to(part.value)
    inner["output"] = _column(after, wide) * wide
    if part.output_bias is not None:  # which a variant may not have
        inner["output_bias"] = after * part.output_bias
    return part.replace(**inner)


def _column(factor: float | Tensor, of: Tensor) -> Tensor:
    return torch.as_tensor(factor, dtype=of.dtype, device=of.device).unsqueeze(-1)


def with_plain_sums(network: Network) -> Network:
    """The same network where residual sums have weights: ``s h + part(h)`` as ``g + part'(g)``.

    The stream is divided by the weights that it was multiplied by, ``g = h / c``: parts read
    ``c g`` and what they add is divided by ``s c``, their own weights changed.
    """
    c, found = 1.0, list[Branch]()
    for branch in (*network.branches, *network.tail):
        norm, part, kept = branch.norm, branch.part, float(branch.skip)
        after = 1 / (kept * c) if kept else 1.0
        if isinstance(norm, Norm) and norm.scaled:
            norm = replace(norm, weight=math.copysign(1.0, c) * norm.weight, eps=norm.eps / c**2)
        elif isinstance(norm, Norm):
            norm = replace(norm, weight=c * norm.weight)
        if part is not None:
            assert isinstance(part, DotProduct | Feed)
            part = scaled(part, after, 1.0 if norm is not None else c)
        found.append(Branch(part, norm, skip=bool(kept)))
        c = kept * c if kept else 1.0
    first = len(network.branches)
    branches, tail = tuple(found[:first]), tuple(found[first:])
    return replace(network, branches=branches, tail=tail, head=c * network.head)
