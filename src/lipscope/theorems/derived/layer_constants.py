"""Lipschitz constants of whole attention layers in two norms, differentiable in the weights.

``max-token``: largest move of an output token if every input token moves by at most 1.
``frobenius``: sigma. Both hold for tokens of norm at most ``R``, or for all inputs.
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
    DividedAttention,
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
_TOKENS = "the bound depends on the number of tokens: give `num_tokens`"


def length(v: Tensor) -> Float[Tensor, "*b"]:
    """``|v|`` over the last axis, differentiable at zero."""
    return torch.linalg.vector_norm(v, dim=-1)


def product_above(left: Float[Tensor, "*b k d"], right: Float[Tensor, "*b k c"]) -> Tensor:
    """``>= ‖L^T R‖``, including rounding errors where the products cancel."""
    return product_norm(left, right) + UNIT * _size(left) * _size(right)


def _size(matrix: Tensor) -> Float[Tensor, "*b"]:
    return torch.linalg.vector_norm(matrix, dim=(-2, -1))


def reach(slope: Tensor, radius: Tensor) -> Tensor:
    """``slope * radius`` with 0 times infinity = 0; without a derivative if infinite."""
    if bool(torch.isfinite(radius).all()):
        return slope * radius
    slope, radius = slope.detach(), radius.detach()
    return torch.where(slope > 0, slope * radius, 0.0)


@dataclass(frozen=True)
class Tokens:
    """The input of a part: ``y = G u + shift``, ``|u| <= radius``, ``G`` diagonal, maybe centred.

    ``G`` is absorbed into the weights: a map of ``y`` becomes another map of ``u``.
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
        size = reach(self.slope, self.radius)
        return size if self.shift is None else size + length(self.shift)


class Constant(NamedTuple):
    """The Lipschitz constant of a part and the norm bound of its output tokens."""

    constant: Float[Tensor, ""]
    radius: Float[Tensor, ""]
    rows: Float[Tensor, ""] | None = None
    """For attention: the constant of a row in the steepest head, before value projection."""


def heads_norm(
    left: Float[Tensor, "h o k"], right: Float[Tensor, "h k d"], sizes: Float[Tensor, " h"]
) -> Float[Tensor, ""]:
    """``>= ‖[s_1 M_1 … s_H M_H]‖ = ‖Σ_h s_h² M_h M_h^T‖^(1/2)``, ``M_h = L_h R_h``.

    Includes rounding errors where products cancel; differentiable in all three arguments.
    """
    scales = [one.detach().abs().amax().clamp_min(1e-150) for one in (left, right, sizes)]
    left, right, sizes = (x / y for x, y in zip((left, right, sizes), scales, strict=True))
    few = right.shape[1] < right.shape[2]
    with torch.no_grad():
        narrow = torch.linalg.qr(right.mT, mode="r").R.mT if few else right
        wide = (left @ narrow) * sizes[:, None, None]
        u = torch.linalg.eigh((wide @ wide.mT).sum(0)).eigenvectors[:, -1]
    pulled = length(((u @ left)[:, None] @ right)[:, 0])
    hidden = UNIT * (sizes * _size(left) * _size(right)).sum()
    return (length(sizes * pulled) + hidden) * scales[0] * scales[1] * scales[2]


def heads_together(
    left: Float[Tensor, "h o k"], right: Float[Tensor, "h k d"], sizes: Float[Tensor, " h"]
) -> Float[Tensor, ""]:
    """Upper bound of ``max |Σ_h M_h z_h|`` over ``|z_h| <= s_h``, for ``M_h = L_h R_h``.

    ``√(Σ_h c_h) ‖Σ_h s_h² M_h M_h^T / c_h‖^(1/2)``, the smaller value for two choices of shares
    ``c_h > 0``: ``s_h ‖M_h‖``, which never exceeds ``Σ_h s_h ‖M_h‖``, and its square, the best
    choice if heads write to orthogonal spaces.

    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> left = torch.stack([eye[:, :1], eye[:, 1:]])  # two heads that write to two coordinates
    >>> round(heads_together(left, left.mT, eye.new_ones(2)).item(), 9)
    1.414213562
    """
    if not bool(sizes.isfinite().all()):
        return reach(product_above(left.mT, right), sizes).sum()
    own = sizes * product_norm(left.mT, right)
    found = []
    for shares in (own, own.square()) if len(own) > 1 else (own,):
        c = shares.clamp_min(1e-9 * float(shares.detach().amax()) + 1e-150).sqrt()
        found.append(length(c) * heads_norm(left, right, sizes / c))
    return torch.stack(found).amin()


class LayerHeads:
    """The weights of a layer by head, in float64, adapted to its input tokens."""

    def __init__(
        self,
        layer: Attention,
        tokens: Tokens,
        num_tokens: int | None,
        largest: float | Float[Tensor, ""] = 1.0,
    ) -> None:
        self.layer, h, g = layer, layer.num_heads, layer.num_groups
        self.largest = largest
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
            self._split(tokens.weight(w), parts) for w, parts in zip(whole, (h, g, g), strict=True)
        )
        self.bq, self.bk, self.bv = (
            self._split(tokens.bias(w, b), parts)
            for w, b, parts in zip(whole, biases, (h, g, g), strict=True)
        )
        width = h * layer.value_width
        eye = torch.eye(width, dtype=torch.float64, device=self.v.device)
        out = eye if layer.output is None else layer.output.double()
        self.o = out.unflatten(1, (h, -1)).movedim(1, 0)
        bias = layer.output_bias
        self.bo = out.new_zeros(len(out)) if bias is None else bias.double()

    def _split(self, w: Tensor, parts: int) -> Tensor:
        times = self.layer.num_heads // parts
        return w.unflatten(0, (parts, -1)).repeat_interleave(times, 0)

    def together(self, right: Tensor, sizes: Tensor) -> Tensor:
        """`heads_together` including the output projection."""
        return heads_together(self.o, right, sizes)

    @property
    def norm_a(self) -> Float[Tensor, " h"]:
        """``‖A_h‖``, including the scale."""
        return self.scale * product_above(self.k, self.q)

    @property
    def along_query(self) -> Float[Tensor, " h"]:
        """``|K^T b_Q|``, including the scale."""
        return self.scale * product_above(self.k, self.bq[..., None])

    @property
    def along_key(self) -> Float[Tensor, " h"]:
        """``|Q^T b_K|``."""
        return self.scale * product_above(self.q, self.bk[..., None])

    def writes(self, mean: Tensor, biased: float = 1.0) -> Float[Tensor, ""]:
        """``>= |y_i|`` if the heads contribute at most ``mean``; rows may be fully masked."""
        fixed = biased * (self.o @ self.bv[..., None])[..., 0].sum(0) + self.bo
        return mean + torch.maximum(length(fixed), length(self.bo))


class _Query(NamedTuple):
    """Terms of heads that share one query: a row's own move is at most ``own |L^T R e_i|``.

    If ``others`` is known, its mean over others is at most ``base`` with
    ``others |L^T R x_i| / radius + bias``: the root of their squares (``plain``), or their sum.
    """

    left: Float[Tensor, "h k m"]
    right: Float[Tensor, "h k d"]
    own: Float[Tensor, " h"]
    base: Float[Tensor, " h"] | None = None
    others: Float[Tensor, " h"] | None = None
    bias: Float[Tensor, " h"] | None = None
    plain: bool = False

    def means(self, counted: Float[Tensor, " h"]) -> Float[Tensor, ""]:
        """The root of the sum of squares of means, times ``counted``, in terms of the query."""
        if self.base is None or self.others is None or self.bias is None:
            return counted.new_tensor(math.inf)
        read = heads_norm(self.right.mT, self.left, counted * self.others)
        read, base = read + length(counted * self.bias), length(counted * self.base)
        return torch.hypot(base, read) if self.plain else base + read


class _Row(NamedTuple):
    """The moves of a head's row: ``others`` in a mean over the tokens read, ``own`` by itself.

    ``logits``: largest difference between the logits of a row, None if unknown.
    """

    others: Float[Tensor, " h"]
    own: Float[Tensor, " h"]
    logits: Float[Tensor, " h"] | None = None
    query: _Query | None = None


def attention_constant(
    layer: Attention,
    tokens: Tokens,
    *,
    norm: BoundNorm,
    num_tokens: int | None = None,
    largest: float | Float[Tensor, ""] = 1.0,
) -> Constant:
    """The constant of an attention layer on tokens of a given radius, and its output radius.

    Infinite if the radius is, unless the layer is globally Lipschitz. In the norm ``frobenius``
    for moves in which no token has more than the share ``largest``.

    Raises:
        NotApplicableError: If no constant is known, with the reason.
    """
    at = LayerHeads(layer, tokens, num_tokens, largest)
    if isinstance(layer, SigmoidAttention):
        found = _sigmoid(at)
    elif isinstance(layer, SinkhornAttention | LipschitzNormAttention):
        found = _of_all_rows(at, norm)
    elif isinstance(layer.weighting, Softmax):
        found = _softmax(at, norm)
    else:
        raise NotApplicableError("no bound of its kind is known")
    return found._replace(constant=at.slope * found.constant)


def _softmax(at: LayerHeads, norm: BoundNorm) -> Constant:
    layer, value_norm = at.layer, at.layer.norms()[2]
    right, radius, gain = at.v, at.radius.expand(layer.num_heads), 1.0
    if isinstance(layer, L2Attention):
        # values are `W_V W W^T`, and scores depend on `W^T x`
        raw = layer.projections()[0].double().unflatten(0, (layer.num_heads, -1))
        right = layer.value.double().unflatten(0, (layer.num_heads, -1)) @ raw.mT
        gain = spectral_norm(at.q)
        row, radius = _distances(at, gain), reach(gain, radius)
    elif not _of_inner_products(layer):
        raise NotApplicableError("no bound of its kind is known")
    elif _plain(layer):
        row = _inner_products(at)
    else:
        slope = torch.ones_like(radius)
        if value_norm is not None:
            slope, radius = _normed(value_norm, at.v, at.bv, at.radius, at.layer.value_width)
            right = _eye(at.v)
        row = _scores(at, radius, slope)
    root = _column_root(at, row, norm)
    moves = gain * (root * row.others + row.own)
    fixed = 0.0 if value_norm is not None else 1.0
    size = at.writes(at.together(right, radius), fixed)
    found = at.together(right, moves)
    query = row.query
    if len(moves) > 1 and query is not None and bool((moves + query.own).isfinite().all()):
        means = gain * root * row.others
        found = torch.minimum(found, _one_query(at, right, query, root, means, moves))
    return Constant(found, size, moves.amax())


def _one_query(
    at: LayerHeads, right: Tensor, query: _Query, root: Tensor, means: Tensor, moves: Tensor
) -> Float[Tensor, ""]:
    """Bound for heads that share one query, which cannot be the worst case for all of them.

    ``‖Σ_h M_h M_h^T / c_h‖^(1/2) (√(Σ_h c_h u_h²) + ‖Σ_h c_h D_h^T D_h‖^(1/2))`` for means of at
    most ``u_h`` and own moves of at most ``|D_h e_i|``, the smaller value for two choices of
    ``c_h > 0``. The query's part of ``u_h`` is summed like its moves if that is smaller.
    """
    alike, found = torch.ones_like(moves), []
    for shares in (alike, product_norm(at.o.mT, right) / moves.clamp_min(1e-150)):
        c = shares.clamp_min(1e-9 * float(shares.detach().amax()) + 1e-150).sqrt()
        others = torch.minimum(length(c * means), query.means(c * root))
        own = heads_norm(query.right.mT, query.left, c * query.own)
        found.append(heads_norm(at.o, right, 1 / c) * (others + own))
    return torch.stack(found).amin()


def _of_inner_products(layer: Attention) -> bool:
    """Whether scores are those of `InnerProduct`, which a class of one's own may redefine."""
    kind, known = type(layer), (InnerProduct.project_in, DividedAttention.project_in)
    same = kind.score is InnerProduct.score and kind.divisor is InnerProduct.divisor
    return same and kind.project_in in known and layer.by_token


def _plain(layer: Attention) -> bool:
    """Whether scores are ``<A x_i + b, x_j>`` plus constants."""
    normed = any(norm is not None for norm in layer.norms())
    return layer.rotary is None and layer.softcap is None and not normed


def _column_root(at: LayerHeads, row: _Row, norm: BoundNorm) -> Tensor:
    """The factor of a mean over the tokens that a row attends to.

    The root of a column sum, or ``√n largest`` if that is smaller.
    """
    if norm == "max-token":
        return row.others.new_ones(())
    sums = None if at.n is None else at.n * row.others.new_ones(()) * at.largest**2
    layer = at.layer
    hides = layer.causal or layer.mask is not None or layer.window is not None
    if not hides and layer.score_bias is None and row.logits is not None:
        near = row.logits.clamp_max(700).exp()
        sums = near if sums is None else torch.minimum(sums, near)
    if sums is None:
        raise NotApplicableError(_TOKENS)
    return sums.sqrt()


def _inner_products(at: LayerHeads) -> _Row:
    """``<A x_i + b, x_j>``: ``√(1 + β²)`` and ``α``, ``β = (‖A‖ R + |b|) R``, ``α = ‖A‖ R²``."""
    alpha = reach(at.norm_a, at.radius.square())
    bias = reach(at.along_query, at.radius)
    beta, one = alpha + bias, torch.ones_like(alpha)
    own = one * at.scale * at.radius.square()
    query = _Query(at.k, at.q, own, one, own, bias, plain=True)
    return _Row((1 + beta.square()).sqrt(), alpha, 2 * beta, query)


def _scores(at: LayerHeads, radius: Tensor, slope: Tensor) -> _Row:
    """Scores other than plain products: ``slope + a r`` and ``t r`` from their two slopes."""
    layer, r = at.layer, at.radius
    query, key, _ = layer.norms()
    lq, q = _normed(query, at.q, at.bq, r, layer.head_width)
    lk, k = _normed(key, at.k, at.bk, r, layer.head_width)
    rotation = 1.0 if layer.rotary is None else layer.rotary.norm(layer.head_width)
    turned = at.scale * rotation**2  # for queries and keys
    a, t = (turned * reach(x, y) for x, y in ((lk, q), (lq, k)))
    if layer.rotary is None and query is None and key is None:
        moved = reach(at.norm_a, r)
        a, t = at.along_query + moved, at.along_key + moved
    logits = 2 * turned * q * k
    if layer.softcap is not None:
        logits = logits.clamp_max(2 * layer.softcap)
    shared = None
    if query is None or len(query.weight) == layer.head_width:  # no norm across heads
        steep = turned * lq / spectral_norm(at.q).clamp_min(1e-150)
        read = steep * reach(lk, radius)
        shared = _Query(_eye(at.q), at.q, steep * reach(k, radius))
        if bool((others := reach(read, r)).isfinite().all()):
            shared = shared._replace(base=slope, others=others, bias=read * length(at.bq))
    return _Row(slope + reach(a, radius), reach(t, radius), logits, shared)


def _eye(right: Float[Tensor, "h k d"]) -> Float[Tensor, "h k k"]:
    return torch.eye(right.shape[1]).to(right).expand(len(right), -1, -1)


def _distances(at: LayerHeads, gain: Tensor) -> _Row:
    """``-|x̂_i - x̂_j|²``: on a ball, or for a fixed number of tokens, whichever is smaller."""
    r2 = reach(gain.square(), at.radius.square())
    others, own = (1 + 4 * reach((4 * r2 - 1).clamp_min(0), r2)).sqrt(), 2 * r2
    logits, mask = 4 * r2, at.layer.mask
    itself = mask is None or bool(mask.diagonal(dim1=-2, dim2=-1).all())
    if at.n is not None and itself:  # the lemma requires that a token attends to itself
        f = phi_inverse(at.n - 1.0)
        less = others + own < 1 + 4 * f
        others, own = (
            torch.where(less, ball, torch.full_like(ball, everywhere))
            for ball, everywhere in ((others, 1 + 2 * f), (own, 2 * f))
        )
        # the global constant is proved only for the sum of a column of ones
        logits = torch.where(less, logits, math.inf)
    return _Row(others, own, logits, _Query(_eye(at.q), at.q, own))


def sigmoid_moves(at: LayerHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised weights: for ``n`` tokens, or for any number with ``b = -log m``.

    Returns each head's constant before the output projection, value norms and sums of weights.
    """
    layer, n, r = at.layer, at.n, at.radius
    assert isinstance(layer, SigmoidAttention)
    norm_v, a = spectral_norm(at.v), at.norm_a
    linear = at.along_query + at.along_key
    scores = reach(a, r.square()) + reach(linear, r) + at.scale * (at.bq * at.bk).sum(-1).abs()
    if n is None and layer.offset is not None:
        raise NotApplicableError(_TOKENS)
    if n is None:
        top = steep = scores.exp()
    else:
        b = torch.as_tensor(layer.shift(n), dtype=torch.float64, device=r.device).flatten()
        top = n * torch.sigmoid(scores + b)
        nearest = (b.abs() - scores).clamp_min(0).sigmoid()  # closest to 0, the steepest point
        steep = n * nearest * (1 - nearest)
    size = reach(norm_v, r) + length(at.bv)
    return norm_v * top + reach(size * (2 * reach(a, r) + linear), steep), size, top


def _sigmoid(at: LayerHeads) -> Constant:
    moves, size, top = sigmoid_moves(at)
    most = at.together(_eye(at.v), reach(size, top)) + length(at.bo)
    return Constant(at.together(_eye(at.v), moves), most, moves.amax())


def _of_all_rows(at: LayerHeads, norm: BoundNorm) -> Constant:
    """Weights that depend on all rows: bounds of sigma, times ``√n`` in the other norm."""
    if isinstance(at.layer, SinkhornAttention):
        right, moves = at.v, 1 + 2 * reach(at.norm_a, at.radius.square())
    else:
        right, moves = _eye(at.v), CONSTANT * spectral_norm(torch.cat([at.q, at.k, at.v], 1))
    if norm == "max-token" and at.n is None:
        raise NotApplicableError(_TOKENS)
    times = 1.0 if norm == "frobenius" or at.n is None else math.sqrt(at.n)
    radius = at.radius.expand(len(moves))
    size = at.writes(at.together(at.v, radius))
    return Constant(times * at.together(right, moves), size, times * moves.amax())


def _entrance(enter: TokenNorm | Clip, size: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and output radius of the map applied to tokens before projection."""
    if isinstance(enter, Clip):
        return size.new_ones(()), size.clamp_max(enter.radius)
    weight, k = enter.weight.double().abs().amax(), len(enter.weight)
    return _shortened(weight, k, enter.eps, size)


def _shortened(weight: Tensor, k: int, eps: float, size: Tensor) -> tuple[Tensor, Tensor]:
    """Largest slope of ``w z / √(|z|²/k + ε)``, and its largest norm for ``|z| <= size``."""
    floor = math.sqrt(k * eps)
    slope = weight * (math.sqrt(k) / floor if floor else math.inf)
    finite = torch.where(size.isfinite(), size, 1.0)
    share = finite / torch.hypot(finite, finite.new_tensor(floor))
    share = torch.where(size.isfinite(), share, 1.0)
    return slope, weight * math.sqrt(k) * share


def _normed(
    norm: TokenNorm | None, w: Tensor, b: Tensor, radius: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Slope and norm of each head's queries, keys or values, including an optional norm layer."""
    slope = spectral_norm(w)
    size = reach(slope, radius) + length(b)
    if norm is None:
        return slope, size
    g, k = norm.weight.double().abs(), len(norm.weight)
    weight = g.amax()
    if k != width:  # one norm across all heads, or across shared groups
        times = len(w) * width // k
        slope = spectral_norm(w[::times].flatten(0, 1))
        size = reach(slope, radius) + length(b[::times].flatten())
        weight = g.unflatten(0, (-1, width)).amax(1).repeat_interleave(times)
    steep, most = _shortened(weight, k, norm.eps, size.expand(len(w)))
    return slope * steep, most.expand(len(w))
