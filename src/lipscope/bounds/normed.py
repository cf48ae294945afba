"""Normalised inputs: what RMSNorm or LayerNorm in front of attention does to bounds.

After normalisation every token lies on an ellipsoid, whose shape can be taken into the
weights: attention of normalised tokens is another attention layer on the unit sphere, and
every bound for radius 1 holds for all inputs of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import DotProduct
from lipscope.bounds.head import check_scores
from lipscope.errors import InputError


@dataclass(frozen=True)
class Norm:
    """``N(x) = g ∘ c(x) / √(|c(x)|² / d + ε) + β`` for one token, float64.

    Attributes:
        gain: ``g``, ``(d,)``.
        shift: ``β``, ``(d,)``; zeros for RMSNorm.
        centred: Whether ``c`` takes the mean away (LayerNorm) or does nothing (RMSNorm).
    """

    gain: Float[Tensor, " d"]
    shift: Float[Tensor, " d"]
    centred: bool

    def direction(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Where tokens end up on the unit sphere (``ε = 0``), before gain and shift."""
        c = self._centre(x)
        return c / c.norm(dim=1, keepdim=True)

    def slope(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """``1 / |c(x_i)|``: the norm of the Jacobian of `direction` at every token.

        At most this for ``ε > 0``. Times a bound of the absorbed layer at radius 1, it bounds
        the map ``normed``.
        """
        return 1 / self._centre(x).norm(dim=1)

    def _centre(self, x: Tensor) -> Tensor:
        x = x.detach().to("cpu", torch.float64)
        return x - x.mean(1, keepdim=True) if self.centred else x


def norm_of(module: nn.Module, width: int) -> Norm:
    """Gain and shift of a normalisation module, found by asking it.

    What a module calls its weights does not matter (some store ``g - 1``): gain and shift are
    read off its outputs, and a random input confirms them.

    Args:
        module: RMSNorm or LayerNorm over the last axis, in any library's form.
        width: ``d``, at least 2.

    Returns:
        Its gain, shift and whether it takes the mean away.

    Raises:
        InputError: If the module is neither.

    >>> norm_of(nn.LayerNorm(4), 4).centred, norm_of(nn.RMSNorm(4), 4).centred
    (True, False)
    """
    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.zeros(1))
    signs = torch.ones(width, dtype=torch.float64)
    signs[1::2] = -1
    if width % 2:
        signs[-1] = 0
    size = float((signs.square().mean()).sqrt())
    probes = torch.stack([signs, -signs, torch.ones_like(signs), torch.zeros_like(signs)])

    def ask(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = module(x[None].to(tensor.device, tensor.dtype))[0]
        return y.to("cpu", torch.float64)

    plus, minus, ones, zeros = ask(1e4 * probes)
    shift = zeros
    centred = bool((ones - shift).abs().max() <= 1e-3 * (plus - minus).abs().max())
    gain = (plus - minus) * signs * size / 2 if centred else ones - shift
    if centred and width % 2:
        turned = ask(1e4 * signs.roll(1)[None])[0] - shift
        gain[-1] = turned[-1] * size / signs.roll(1)[-1]
    norm = Norm(gain, shift, centred)
    probe = torch.randn(3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = norm.direction(probe) * width**0.5 * gain + shift
    if not torch.allclose(
        ask(100 * probe), expected, rtol=2e-2, atol=2e-2 * float(gain.abs().max())
    ):
        raise InputError(
            f"`norm` should be an RMSNorm or a LayerNorm. Found `{type(module).__name__}`, "
            "which does something else."
        )
    return norm


def radius_of_norm(norm: Norm) -> float:
    """The largest norm that a token can have after a normalisation.

    ``√d |g|_∞ (+ |β|)``.

    Holds for every input and every ``ε ≥ 0``.

    Args:
        norm: The normalisation.

    Returns:
        The a-priori radius.

    >>> radius_of_norm(norm_of(nn.RMSNorm(9), 9))
    3.0
    """
    width = len(norm.gain)
    return float(width**0.5 * norm.gain.abs().max() + norm.shift.norm())


def absorb(layer: DotProduct, norm: Norm) -> DotProduct:
    """The layer that does on the unit sphere what ``layer`` does on normalised tokens.

    ``f(N(x)) = f'(direction(x))`` with weights ``√d W D_g`` and biases ``b + W β``: for
    LayerNorm with a shift, attention with biases on a sphere. Biases of queries are kept, so
    bounds that allow for them still apply.

    Holds for ``ε = 0``; for ``ε > 0`` tokens lie inside the unit ball, so that every bound
    for radius 1 holds as well.

    Args:
        layer: The layer, on normalised tokens.
        norm: The normalisation.

    Returns:
        A layer for radius 1, float64.

    Raises:
        NotApplicableError: For soft-capped scores or normalised queries and keys.

    Source: section 2.3 of [castin2024] (RMSNorm); with a shift, derived here.
    """
    check_scores(layer)

    def weight(w: Tensor) -> Tensor:
        return w.detach().to("cpu", torch.float64) * norm.gain * len(norm.gain) ** 0.5

    def bias(w: Tensor, b: Tensor | None) -> Tensor:
        moved = w.detach().to("cpu", torch.float64) @ norm.shift
        return moved if b is None else moved + b.detach().to("cpu", torch.float64)

    def double(w: Tensor | None) -> Tensor | None:
        return None if w is None else w.detach().to("cpu", torch.float64)

    return DotProduct(
        weight(layer.query),
        weight(layer.key),
        weight(layer.value),
        double(layer.output),
        heads=layer.num_heads,
        groups=layer.num_groups,
        query_bias=bias(layer.query, layer.query_bias),
        key_bias=bias(layer.key, layer.key_bias),
        value_bias=bias(layer.value, layer.value_bias),
        output_bias=double(layer.output_bias),
        scale=layer.scale,
        causal=layer.causal,
        mask=layer.mask,
        rotary=layer.rotary,
        window=layer.window,
        score_bias=double(layer.score_bias),
    )
