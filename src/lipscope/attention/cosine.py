"""Scaled cosine attention: queries, keys and values of bounded length."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention.inner_product import InnerProduct
from lipscope.attention.projections import Frame, Part
from lipscope.errors import InputError


class ScaledCosineAttention(InnerProduct):
    """Attention with ``S_ij = τ <q̂_i, k̂_j>`` and values ``ν v̂_j``.

    ``ẑ = z / √(|z|² + ε)`` for the query, key and value of every token and head.

    Holds for encoders and causal decoders. Some code leaves values as they are; that layer is
    not Lipschitz with the constant of the paper and is not this one.

    Args:
        query: ``(heads * k, d)``.
        key: ``(heads * k, d)``.
        value: ``(heads * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        temperature: ``τ``, positive.
        gain: ``ν``, positive.
        eps: ``ε``, positive.
        heads: Number of heads.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j.

    Raises:
        InputError: If the shapes do not fit together or a number is not positive.

    Source: scaled cosine similarity attention of [lipsformer2023].

    >>> import torch
    >>> eye = torch.eye(1)
    >>> layer = ScaledCosineAttention(eye, eye, eye, temperature=1.0, gain=2.0, eps=3.0)
    >>> layer(torch.ones(4, 1)).flatten().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        temperature: float,
        gain: float = 1.0,
        eps: float = 1e-6,
        heads: int = 1,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        for name, number in (("temperature", temperature), ("gain", gain), ("eps", eps)):
            if not number > 0:
                raise InputError(f"`{name}` should be positive. Found `{name} = {number}`.")
        super().__init__(
            query, key, value, output, heads=heads, scale=1.0, causal=causal, mask=mask
        )
        self.temperature, self.gain, self.eps = temperature, gain, eps

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``τ q̂``, ``k̂`` and ``ν v̂``, each ``(..., heads, n, width)``."""
        q, k, v = (_Shortened(z, self.eps, c).value for z, c in self._raw(x))
        return q, k, v

    def frame(self, x: Tensor, part: Part, *, per_head: bool) -> Frame:
        """The linear maps, with the derivative of ``z ↦ ẑ`` between them and the core."""
        inner = super().frame(x, part, per_head=per_head)
        return _Around(inner, *[_Shortened(z, self.eps, c) for z, c in self._raw(x)])

    def _raw(self, x: Tensor) -> list[tuple[Tensor, float]]:
        return list(zip(super().project(x), (self.temperature, 1.0, self.gain), strict=True))


@dataclass(frozen=True)
class _Shortened:
    """``ẑ = c z / √(|z|² + ε)`` and its derivative, which is symmetric."""

    z: Tensor
    eps: float
    factor: float

    @property
    def length(self) -> Tensor:
        return (self.z.square().sum(-1, keepdim=True) + self.eps).sqrt()

    @property
    def value(self) -> Tensor:
        return self.factor * self.z / self.length

    def derivative(self, dz: Tensor) -> Tensor:
        unit = self.z / self.length
        return self.factor * (dz - unit * (unit * dz).sum(-1, keepdim=True)) / self.length


@dataclass
class _Around:
    """Another frame with three normalisations inside."""

    inner: Frame
    q: _Shortened
    k: _Shortened
    v: _Shortened

    def __post_init__(self) -> None:
        self.axes, self.width_out = self.inner.axes, self.inner.width_out

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self.inner.enter(e)
        return self.q.derivative(dq), self.k.derivative(dk), self.v.derivative(dv)

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        return self.inner.enter_t(
            self.q.derivative(gq), self.k.derivative(gk), self.v.derivative(gv)
        )

    def leave(self, o: Tensor) -> Tensor:
        return self.inner.leave(o)

    def leave_t(self, g: Tensor) -> Tensor:
        return self.inner.leave_t(g)
