"""Constants of whole attention layers in two norms, as functions of weights that are trained.

``max-token``: how far any token of the output moves when no token moves by more than 1.
``frobenius``: sigma. Both for all inputs whose tokens have norm at most ``R``, or for all inputs.
Proofs: ``docs/theory/network-bound.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import (
    CONSTANT,
    Attention,
    Clip,
    InnerProduct,
    L2Attention,
    LipschitzNormAttention,
    SigmoidAttention,
    SinkhornAttention,
    Softmax,
    TokenNorm,
    phi_inverse,
    product_norm,
    spectral_norm,
)
from lipscope.theorems.head import UNIT
from lipscope.theorems.register import NotApplicableError

BoundNorm = Literal["max-token", "frobenius"]
_SHARED = 3  # steps that share a sum out among heads
_TOKENS = "the number of tokens counts in it: give `num_tokens`"


def length(v: Tensor) -> Float[Tensor, "*b"]:
    """``|v|`` over the last axis, with a derivative at zero."""
    return torch.linalg.vector_norm(v, dim=-1)


@dataclass(frozen=True)
class Tokens:
    """What a part takes: ``y = G u + shift``, ``|u| <= radius``, ``G`` diagonal, maybe centred.

    Weights take ``G`` up: a part that reads ``y`` is another one that reads ``u``.
    """

    radius: Float[Tensor, ""]
    gain: Float[Tensor, " d"] | None = None
    shift: Float[Tensor, " d"] | None = None
    centred: bool = False

    def weight(self, w: Float[Tensor, "o d"]) -> Float[Tensor, "o d"]:
        """``W G``."""
        w = w if self.gain is None else w * self.gain
        return w - w.mean(1, keepdim=True) if self.centred else w

    def bias(self, w: Float[Tensor, "o d"], b: Tensor | None) -> Float[Tensor, " o"]:
        """``b + W shift``."""
        b = w.new_zeros(len(w)) if b is None else b.double()
        return b if self.shift is None else b + w @ self.shift

    @property
    def slope(self) -> Float[Tensor, ""]:
        """``‖G‖``."""
        return self.radius.new_ones(()) if self.gain is None else self.gain.abs().amax()

    @property
    def size(self) -> Float[Tensor, ""]:
        """``>= |y|``."""
        size = self.slope * self.radius
        return size if self.shift is None else size + length(self.shift)


class Constant(NamedTuple):
    """How much a part moves, from above, and how large the tokens are that it gives."""

    constant: Float[Tensor, ""]
    radius: Float[Tensor, ""]


def heads_together(blocks: Float[Tensor, "h o k"], sizes: Float[Tensor, " h"]) -> Float[Tensor, ""]:
    """``max |Σ_h M_h z_h|`` over ``|z_h| <= s_h``, from above.

    ``√(Σ_h c_h) ‖Σ_h s_h² M_h M_h^T / c_h‖^(1/2)`` for shares ``c_h > 0``, which a few steps bring
    near to the best ones: never above ``Σ_h s_h ‖M_h‖``.

    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> apart = torch.stack([eye[:, :1], eye[:, 1:]])  # two heads that write to two coordinates
    >>> round(heads_together(apart, eye.new_ones(2)).item(), 9)
    1.414213562
    """
    if not bool(sizes.isfinite().all()):
        return (sizes * spectral_norm(blocks)).sum()
    wide = blocks * sizes[:, None, None]
    with torch.no_grad():
        gram, own = wide @ wide.mT, torch.linalg.matrix_norm(wide, 2)
        found = [_shared(gram, own)]
        for _ in range(_SHARED if len(own) > 1 else 0):
            u = found[-1][2]
            found.append(_shared(gram, ((gram @ u) @ u).clamp_min(0).sqrt()))
        _, c, u = min(found, key=lambda one: float(one[0]))
    return (c.sum() * ((wide.mT @ u).square().sum(1) / c).sum()).sqrt()


def _shared(gram: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The square of the bound for shares, none of them zero; and the direction that attains it."""
    c = c.clamp_min(1e-9 * float(c.amax()) + 1e-150)
    values, vectors = torch.linalg.eigh((gram / c[:, None, None]).sum(0))
    return values[-1] * c.sum(), c, vectors[:, -1]


class _Heads:
    """The weights of a layer by head, in float64, for the tokens that enter it."""

    def __init__(self, layer: Attention, tokens: Tokens, num_tokens: int | None) -> None:
        self.layer, h, g = layer, layer.num_heads, layer.num_groups
        self.n = num_tokens if layer.mask is None else layer.mask.shape[-1]
        self.scale = abs(layer.scale)
        self.slope = tokens.radius.new_ones(())
        if (enter := layer.entrance()) is not None:
            slope, radius = _entrance(enter, tokens.size)
            self.slope, tokens = tokens.slope * slope, Tokens(radius)
        self.radius = tokens.radius
        weights, biases = layer.projections(), (layer.query_bias, layer.key_bias, layer.value_bias)
        whole = [w.double() for w in weights]
        self.q, self.k, self.v = (
            self._apart(tokens.weight(w), parts) for w, parts in zip(whole, (h, g, g), strict=True)
        )
        self.bq, self.bk, self.bv = (
            self._apart(tokens.bias(w, b), parts)
            for w, b, parts in zip(whole, biases, (h, g, g), strict=True)
        )
        width = h * layer.value_width
        eye = torch.eye(width, dtype=torch.float64, device=self.v.device)
        out = eye if layer.output is None else layer.output.double()
        self.o = out.unflatten(1, (h, -1)).movedim(1, 0)
        given = layer.output_bias
        self.bo = out.new_zeros(len(out)) if given is None else given.double()

    def _apart(self, w: Tensor, parts: int) -> Tensor:
        times = self.layer.num_heads // parts
        return w.unflatten(0, (parts, -1)).repeat_interleave(times, 0)

    @property
    def written(self) -> Float[Tensor, "h o d"]:
        """``M_h = O_h V_h``."""
        return self.o @ self.v

    @property
    def hidden(self) -> Float[Tensor, ""]:
        """What rounding may hide where products cancel in ``M_h``."""
        return UNIT * (self.o.flatten(1).norm(dim=1) * self.v.flatten(1).norm(dim=1)).sum()

    @property
    def norm_a(self) -> Float[Tensor, " h"]:
        """``‖A_h‖``, scale and rounding in it."""
        hidden = UNIT * self.k.flatten(1).norm(dim=1) * self.q.flatten(1).norm(dim=1)
        return self.scale * (product_norm(self.k, self.q) + hidden)

    @property
    def every(self) -> bool:
        """Whether every token reads every other."""
        layer = self.layer
        return not layer.causal and layer.mask is None and layer.window is None

    def writes(self, mean: Tensor) -> Float[Tensor, ""]:
        """``>= |y_i|`` where the heads' own parts are at most ``mean``; rows may read nothing."""
        fixed = (self.o @ self.bv[..., None])[..., 0].sum(0) + self.bo
        return mean + torch.maximum(length(fixed), length(self.bo))


class _Row(NamedTuple):
    """What a row of a head moves by: ``others`` in a mean over what it reads, ``own`` by itself.

    ``logits``: how far apart those of a row can be, None where that is not known.
    """

    others: Float[Tensor, " h"]
    own: Float[Tensor, " h"]
    logits: Float[Tensor, " h"] | None = None


def attention_constant(
    layer: Attention, tokens: Tokens, *, norm: BoundNorm, num_tokens: int | None = None
) -> Constant:
    """The constant of an attention layer on tokens of a radius, and the radius of what it gives.

    Infinite where the radius is, unless the layer is Lipschitz on all inputs.

    Raises:
        NotApplicableError: Where none is known, and why.
    """
    at = _Heads(layer, tokens, num_tokens)
    if isinstance(layer, SigmoidAttention):
        found = _sigmoid(at)
    elif isinstance(layer, SinkhornAttention | LipschitzNormAttention):
        found = _of_all_rows(at, norm)
    elif isinstance(layer.weighting, Softmax):
        found = _softmax(at, norm)
    else:
        raise NotApplicableError("no bound of its kind is known")
    return Constant(at.slope * found.constant, found.radius)


def _softmax(at: _Heads, norm: BoundNorm) -> Constant:
    layer, value_norm = at.layer, at.layer.norms()[2]
    blocks, radius = at.written, at.radius.expand(layer.num_heads)
    hidden, gain = at.hidden, 1.0
    if isinstance(layer, L2Attention):
        # values are `W_V W W^T`, and `W^T x` is what the scores read
        raw = layer.projections()[0].double().unflatten(0, (layer.num_heads, -1))
        blocks = at.o @ layer.value.double().unflatten(0, (layer.num_heads, -1)) @ raw.mT
        gain = spectral_norm(at.q)
        row, radius = _distances(at, gain), gain * radius
    elif not isinstance(layer, InnerProduct) or not layer.by_token:
        raise NotApplicableError("no bound of its kind is known")
    elif value_norm is None and _plain(layer):
        row = _inner_products(at)
    else:
        slope = torch.ones_like(radius)
        if value_norm is not None:
            slope, radius = _normed(value_norm, at.v, at.bv, at.radius, at.layer.value_width)
            blocks, hidden = at.o, at.hidden * 0
        row = _scores(at, radius, slope)
    moves = gain * (_counted(at, row, norm) + row.own)
    return Constant(
        heads_together(blocks, moves) + hidden * moves.amax(),
        at.writes(heads_together(blocks, radius) + hidden * radius.amax()),
    )


def _plain(layer: Attention) -> bool:
    """Whether scores are ``<A x_i + b, x_j>`` and something that does not move."""
    normed = any(norm is not None for norm in layer.norms())
    return layer.rotary is None and layer.softcap is None and not normed


def _counted(at: _Heads, row: _Row, norm: BoundNorm) -> Float[Tensor, " h"]:
    """A mean over what a row reads, in the norm: times the root of a column's sum."""
    if norm == "max-token":
        return row.others
    sums = None if at.n is None else row.others.new_full((), float(at.n))
    if at.every and at.layer.score_bias is None and row.logits is not None:
        near = row.logits.exp()
        sums = near if sums is None else torch.minimum(sums, near)
    if sums is None:
        raise NotApplicableError(_TOKENS)
    return row.others * sums.sqrt()


def _inner_products(at: _Heads) -> _Row:
    """``<A x_i + b, x_j>``: ``√(1 + β²)`` and ``α``, ``β = (‖A‖ R + |b|) R``, ``α = ‖A‖ R²``."""
    a, r = at.norm_a, at.radius
    b = at.scale * length((at.bq[:, None] @ at.k)[:, 0])
    # where scores do not move at all, no radius is needed
    alpha = torch.where(a > 0, a * r.square(), 0.0)
    beta = torch.where(a + b > 0, (a * r + b) * r, 0.0)
    return _Row((1 + beta.square()).sqrt(), alpha, 2 * beta)


def _scores(at: _Heads, radius: Tensor, slope: Tensor) -> _Row:
    """Scores that are no plain products: ``slope + a r`` and ``t r`` by their two slopes."""
    layer, r = at.layer, at.radius
    query, key, _ = layer.norms()
    lq, q = _normed(query, at.q, at.bq, r, layer.head_width)
    lk, k = _normed(key, at.k, at.bk, r, layer.head_width)
    turned = at.scale * (1.0 if layer.rotary is None else layer.rotary.norm(layer.head_width))
    a, t = (turned * torch.where(x == 0, 0.0, x * y) for x, y in ((lk, q), (lq, k)))
    logits = 2 * turned * q * k
    if layer.softcap is not None:
        logits = logits.clamp_max(2 * layer.softcap)
    return _Row(slope + a * radius, t * radius, logits)


def _distances(at: _Heads, gain: Tensor) -> _Row:
    """``-|x̂_i - x̂_j|²``: on a ball, or for so many tokens, whichever is less."""
    r2 = (gain * at.radius).square()
    others, own = (1 + 4 * r2 * (4 * r2 - 1).clamp_min(0)).sqrt(), 2 * r2
    if at.n is not None:
        f = phi_inverse(at.n - 1.0)
        everywhere = others + own > 1 + 4 * f
        others = torch.where(everywhere, 1 + 2 * f, others)
        own = torch.where(everywhere, 2 * f, own)
    return _Row(others, own, 4 * r2)


def _sigmoid(at: _Heads) -> Constant:
    """Weights that do not add up to 1: of ``n`` tokens, or of any number by ``b = -log m``."""
    layer, n, r = at.layer, at.n, at.radius
    assert isinstance(layer, SigmoidAttention)
    norm_v, a = spectral_norm(at.v), at.norm_a
    of_query = at.scale * length((at.bq[:, None] @ at.k)[:, 0])
    of_key = at.scale * length((at.bk[:, None] @ at.q)[:, 0])
    scores = a * r.square() + (of_query + of_key) * r + at.scale * (at.bq * at.bk).sum(-1).abs()
    if n is None and layer.offset is not None:
        raise NotApplicableError(_TOKENS)
    if n is None:
        top = steep = scores.exp()
    else:
        b = torch.as_tensor(layer.shift(n), dtype=torch.float64, device=r.device).flatten()
        top = n * torch.sigmoid(scores + b)
        nearest = (b.abs() - scores).clamp_min(0).sigmoid()  # to the steepest point, 0
        steep = n * nearest * (1 - nearest)
    size = norm_v * r + length(at.bv)
    moves = norm_v * top + size * (2 * a * r + of_query + of_key) * steep
    return Constant(heads_together(at.o, moves), heads_together(at.o, top * size) + length(at.bo))


def _of_all_rows(at: _Heads, norm: BoundNorm) -> Constant:
    """Weights that depend on all rows: bounds of sigma, times ``√n`` in the other norm."""
    if isinstance(at.layer, SinkhornAttention):
        blocks, hidden = at.written, at.hidden
        moves = 1 + 2 * at.norm_a * at.radius.square()
    else:
        blocks, hidden = at.o, at.hidden * 0
        moves = CONSTANT * spectral_norm(torch.cat([at.q, at.k, at.v], 1))
    if norm == "max-token" and at.n is None:
        raise NotApplicableError(_TOKENS)
    times = 1.0 if norm == "frobenius" or at.n is None else math.sqrt(at.n)
    radius = at.radius.expand(len(moves))
    return Constant(
        times * (heads_together(blocks, moves) + hidden * moves.amax()),
        at.writes(heads_together(at.written, radius) + at.hidden * radius.amax()),
    )


def _entrance(enter: TokenNorm | Clip, size: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and radius of what tokens go through before they are projected."""
    if isinstance(enter, Clip):
        return size.new_ones(()), size.clamp_max(enter.radius)
    weight, k = enter.weight.double().abs().amax(), len(enter.weight)
    return _shortened(weight, k, enter.eps, size)


def _shortened(weight: Tensor, k: int, eps: float, size: Tensor) -> tuple[Tensor, Tensor]:
    """Largest slope of ``w z / √(|z|²/k + ε)``, and its largest size for ``|z| <= size``."""
    floor = math.sqrt(k * eps)
    slope = weight * (math.sqrt(k) / floor if floor else math.inf)
    share = torch.where(size.isfinite(), size / (size.square() + k * eps).sqrt(), 1.0)
    return slope, weight * math.sqrt(k) * share


def _normed(
    norm: TokenNorm | None, w: Tensor, b: Tensor, radius: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Slope and size of queries, keys or values of every head, through their norm if any."""
    slope = spectral_norm(w)
    size = torch.where(slope > 0, slope * radius, 0.0) + length(b)
    if norm is None:
        return slope, size
    g, k = norm.weight.double().abs(), len(norm.weight)
    if k != width:  # one norm of all heads
        slope, size = spectral_norm(w.flatten(0, 1)), length(b.flatten()[None])[0]
        size = torch.where(slope > 0, slope * radius, 0.0) + size
    weight = g.unflatten(0, (-1, width)).amax(1).expand(len(w)) if k != width else g.amax()
    steep, most = _shortened(weight, k, norm.eps, size.expand(len(w)))
    return slope * steep, most.expand(len(w))
