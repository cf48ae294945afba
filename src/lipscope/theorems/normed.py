"""Normalised inputs: what RMSNorm or LayerNorm in front of attention does to bounds.

After normalisation every token lies on an ellipsoid, whose shape can be taken into the
weights: attention of normalised tokens is another attention layer on the unit sphere, and
every bound for radius 1 holds for all inputs of the model. Proofs:
``docs/theory/local-certificates.md`` and ``global-bounds.md``, on the map ``normed``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.linalg import Operator, compose, linearise

_LARGE = 1e4  # size of a token beside which ε is nothing
_SIZES = tuple(10.0**-k for k in range(13))  # of a token that feels ε
_AGREEMENT = 1e-5  # of a norm with what was read off it; some compute in float32


@dataclass(frozen=True)
class Norm:
    """``N(x) = g ∘ c(x) / √(|c(x)|² / d + ε) + β`` for one token, float64.

    With ``u(x) = c(x) / √(|c(x)|² + d ε)``, in the unit ball, ``N(x) = √d g ∘ u(x) + β``. The
    derivative of ``u`` is ``s (I - u u^T)``, for LayerNorm after the mean is taken away, with
    the slope ``s = 1 / √(|c(x)|² + d ε)``.

    Attributes:
        gain: ``g``, ``(d,)``.
        shift: ``β``, ``(d,)``; zeros for RMSNorm.
        centred: Whether ``c`` takes the mean away (LayerNorm) or does nothing (RMSNorm).
        eps: ``ε``.
    """

    gain: Float[Tensor, " d"]
    shift: Float[Tensor, " d"]
    centred: bool
    eps: float = 0.0

    def direction(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """``u``: where tokens end up in the unit ball, before gain and shift.

        Raises:
            InputError: If ``ε = 0`` and a token is zero (LayerNorm: constant).
        """
        slope = self.slope(x)
        if not bool(slope.isfinite().all()):
            bad = int((~slope.isfinite()).nonzero()[0])
            raise InputError(
                "`x` should have no token that the norm divides by zero. Found token "
                f"{bad}, {'constant' if self.centred else 'zero'}, and a norm with ε = 0."
            )
        return self._centre(x) * slope[:, None]

    def slope(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """``s``: the norm of the derivative of `direction` at every token is at most this."""
        return 1 / (self.size(x).square() + len(self.gain) * self.eps).sqrt()

    def size(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """``|c(x_i)|`` of every token."""
        return self._centre(x).norm(dim=1)

    def steepest(self, floor: float) -> float:
        """The largest slope where ``|c(x_i)|`` is at least ``floor``; infinite for 0 and ε = 0."""
        square = floor**2 + len(self.gain) * self.eps
        return 1 / math.sqrt(square) if square else math.inf

    def _centre(self, x: Tensor) -> Tensor:
        x = x.detach().to("cpu", torch.float64)
        return x - x.mean(1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class Normed:
    """The map ``normed``, ``x -> f(N(x))``: attention after a normalisation.

    Holds for any normalisation module; bounds from weights read RMSNorm and LayerNorm.

    Attributes:
        attention: ``f``.
        norm: ``N``, over the last axis of ``(n, d)``.

    >>> layer = DotProduct(*3 * [torch.eye(4)])
    >>> Normed(layer, nn.LayerNorm(4))(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    attention: Attention
    norm: nn.Module

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
        """The Jacobian at ``x``; the norm's part by automatic differentiation.

        Args:
            x: The norm's input, ``(n, d)``.
            memory: As in `Attention.linearise`.
            per_head: Likewise.

        Returns:
            Operator ``(n, d) -> (n, d_out)``, with ``per_head`` on a leading axis of heads.
        """
        with torch.no_grad():
            u = self.norm(x)
        outer = self.attention.linearise(u, memory=memory, per_head=per_head)
        return compose(outer, linearise(self.norm, x))

    @cached_property
    def constants(self) -> Norm:
        """Gain, shift and ε of the norm; `InputError` if it is neither of the two kinds."""
        return norm_of(self.norm, self.attention.query.shape[1])

    @cached_property
    def absorbed(self) -> DotProduct:
        """The attention layer that does the same on the unit sphere, see `absorb`."""
        if not isinstance(self.attention, DotProduct):
            raise InputError(
                "`layer.attention` should be dot-product attention, whose weights can take up "
                f"a norm. Found `{type(self.attention).__name__}`."
            )
        return absorb(self.attention, self.constants)


def norm_of(module: nn.Module, width: int) -> Norm:
    """Gain, shift and ε of a normalisation module, found by asking it.

    What a module calls its weights does not matter (some store ``g - 1``): gain, shift and
    ε are read off its outputs, and random inputs confirm them.

    Args:
        module: RMSNorm or LayerNorm over the last axis, in any library's form.
        width: ``d``, at least 2.

    Returns:
        Its gain, shift, ε and whether it takes the mean away.

    Raises:
        InputError: If the module is neither.

    >>> norm_of(nn.LayerNorm(4), 4).centred, norm_of(nn.RMSNorm(4), 4).centred
    (True, False)
    >>> f"{norm_of(nn.LayerNorm(4, eps=1e-3), 4).eps:.2g}"
    '0.001'
    """
    try:
        norm = _read(module, width)
        same = _agrees(module, norm)
    except RuntimeError:  # not over the last axis
        same, norm = False, None
    if norm is None or not same:
        raise InputError(
            f"`norm` should be an RMSNorm or a LayerNorm. Found `{type(module).__name__}`, "
            "which does something else."
        )
    return norm


def _read(module: nn.Module, width: int) -> Norm:
    """The norm that a module is if it is one."""
    token = _alternating(width)
    turned = token.roll(1)  # no entry is zero in both
    large = torch.stack([token, -token, turned, -turned, 2 + token])
    plus, minus, plus_turned, minus_turned, raised = _ask(module, _LARGE * large)
    shift = (plus + minus) / 2
    gain = torch.where(
        token == 0, (plus_turned - minus_turned) / (2 * turned), (plus - minus) / (2 * token)
    )
    # The mean is seen in every entry, or in none.
    centred = bool((raised - shift - gain * token).abs().max() <= 0.1 * gain.abs().max())
    eps = _epsilon(module, token, shift, gain * token)
    return Norm(gain * math.sqrt(1 + eps / _LARGE**2), shift, centred, eps)


def _agrees(module: nn.Module, norm: Norm) -> bool:
    """Whether random tokens, large ones and some that feel ε, come out as they should."""
    tolerance = max(_AGREEMENT, 4 * torch.finfo(_tensor_of(module).dtype).eps)
    gen = torch.Generator().manual_seed(0)
    probe = torch.randn(3, len(norm.gain), generator=gen, dtype=torch.float64)
    for x in (100 * probe, (math.sqrt(norm.eps) or 1.0) * probe):
        expected = norm.direction(x) * probe.shape[1] ** 0.5 * norm.gain + norm.shift
        error = (_ask(module, x) - expected).abs().max()
        if not error <= tolerance * expected.abs().max():
            return False
    return True


def _ask(module: nn.Module, x: Tensor) -> Tensor:
    tensor = _tensor_of(module)
    with torch.no_grad():
        y = module(x[None].to(tensor.device, tensor.dtype))[0]
    return y.to("cpu", torch.float64)


def _tensor_of(module: nn.Module) -> Tensor:
    """A tensor on the device and of the type that the module works with."""
    return next(iter([*module.parameters(), *module.buffers()]), torch.zeros(1))


def _alternating(width: int) -> Tensor:
    """A token of mean 0 and mean square 1 with entries of one size; the last is 0 if odd."""
    signs = torch.ones(width, dtype=torch.float64)
    signs[1::2] = -1
    if width % 2:
        signs[-1] = 0
    return signs / signs.square().mean().sqrt()


def _epsilon(module: nn.Module, token: Tensor, shift: Tensor, full: Tensor) -> float:
    """ε from the first token that is small enough to feel it: it shrinks by ``r < 1``.

    A token of mean square ``t²`` comes out as ``t / √(t² + ε) · √(1 + ε / L²)`` of what one of
    mean square ``L²`` does.
    """
    smallest = 16 * torch.finfo(_tensor_of(module).dtype).tiny  # half precision ends early
    for size in _SIZES:
        if size < smallest:
            break
        seen = _ask(module, size * token[None])[0] - shift
        r = float(seen @ full / full.square().sum().clamp_min(1e-300))
        if 0 < r <= 0.9:
            rest = r**2 - (size / _LARGE) ** 2  # 0 for what does not normalise
            return size**2 * (1 - r**2) / rest if rest > 0 else 0.0
    return 0.0


def radius_of_norm(norm: Norm) -> float:
    """The largest norm that a token can have after a normalisation.

    ``√d |g|_∞ (+ |β|)``.

    Holds for every input and every ``ε ≥ 0``.

    Args:
        norm: The normalisation.

    Returns:
        The a-priori radius.

    A module in float32 is read to its own rounding:

    >>> round(radius_of_norm(norm_of(nn.RMSNorm(9, eps=0.0), 9)), 5)
    3.0
    """
    width = len(norm.gain)
    return float(width**0.5 * norm.gain.abs().max() + norm.shift.norm())


def absorb(layer: DotProduct, norm: Norm) -> DotProduct:
    """The layer that does on the unit sphere what ``layer`` does on normalised tokens.

    ``f(N(x)) = f'(u(x))``, ``u`` the norm's `Norm.direction`, with weights ``√d W D_g`` and
    biases ``b + W β``: for LayerNorm with a shift, attention with biases on a sphere. Where
    the norm takes the mean away, so do the weights: they see only what tokens can be.

    Holds for every ``ε ≥ 0``: tokens lie in the unit ball.

    Args:
        layer: The layer, on normalised tokens.
        norm: The normalisation.

    Returns:
        A layer for radius 1, float64.

    Source: section 2.3 of [castin2024] (RMSNorm); with a shift, derived here.
    """
    own = layer.in_double()

    def weight(w: Tensor) -> Tensor:
        scaled = w * norm.gain * len(norm.gain) ** 0.5
        return scaled - scaled.mean(1, keepdim=True) if norm.centred else scaled

    def bias(w: Tensor, b: Tensor | None) -> Tensor:
        return w @ norm.shift if b is None else w @ norm.shift + b

    return own.replace(
        query=weight(own.query),
        key=weight(own.key),
        value=weight(own.value),
        query_bias=bias(own.query, own.query_bias),
        key_bias=bias(own.key, own.key_bias),
        value_bias=bias(own.value, own.value_bias),
    )
