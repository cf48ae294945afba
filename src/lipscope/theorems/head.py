"""Heads of dot-product attention, alone and at an input: the quantities used by theorems.

``f(X)_i = V m_i`` with ``m_i = sum_j P_ij x_j`` and logits ``S_ij = <A x_i + b, x_j> + B_ij``,
where ``A = K^T Q / sqrt(k)`` has rank at most ``k``: no ``d x d`` product is formed here.
A bias ``B`` of the logits does not depend on ``X``: it changes ``P`` but no derivative of ``S``.

With ``a_i = A x_i + b`` and ``y_ij = x_j - m_i``, the block of the Jacobian is
``J_ij = P_ij (V + V y_ij a_ij^T) + delta_ij V C_i A``. Under a rotary embedding ``R_j``,
``a_ij = K^T R_j^T R_i q_i`` depends on ``j`` and ``V C_i A`` becomes
``Cov_i(V x, R K x) R_i Q`` [A10 of the theory page]; otherwise ``a_ij = K^T q_i``. With
``z_ij = Q^T R_i^T k_j``, ``|A^T y_ij| = |z_ij - zbar_i|``; ``Q^T`` is replaced by its triangular
factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import DotProduct, Rotary, Softmax, product_norm
from lipscope.errors import InputError, shown
from lipscope.linalg import norm_in_double, norms_of_many
from lipscope.theorems.register import NotApplicableError

UNIT = 8 * torch.finfo(torch.float64).eps  # rounding of a matrix product, with a margin


@dataclass(frozen=True)
class Head:
    """A head, with its part of the output projection optionally folded into ``V``."""

    query: Float[Tensor, "k d"]  # ``Q`` including the scale, ``(k, d)``
    key: Float[Tensor, "k d"]  # ``K``, ``(k, d)``
    # ``V``, ``(k_v, d)``. Folded: ``R V`` with ``W_h = U R``, ``U`` with orthonormal columns: this
    # preserves every norm of ``W_h V …``
    value: Float[Tensor, "kv d"]
    # ``b_Q`` including the scale, ``(k,)``; zeros if absent. Key biases cancel in the softmax
    # (without rotary embedding); value biases shift
    query_bias: Float[Tensor, " k"]
    key_bias: Float[Tensor, " k"]  # ``b_K``, ``(k,)``; only matters with a rotary embedding
    layer: DotProduct  # the single head: its mask, rotary embedding and bias ``B`` of the logits
    # ``‖W_h‖_F ‖V‖_F`` if that product is folded into ``value``, where it may cancel; None if
    # nothing is folded
    size: float | None = None

    @cached_property
    def norm_a(self) -> float:
        """``‖A‖``, from a ``k x k`` matrix, including rounding errors where ``K^T Q`` cancels."""
        hidden = UNIT * float(self.key.norm() * self.query.norm())
        return float(product_norm(self.key, self.query)) + hidden

    @cached_property
    def size_v(self) -> float:
        """``‖V‖_F`` before cancellation: the scale of its rounding errors."""
        return float(self.value.norm()) if self.size is None else self.size

    @cached_property
    def norm_b(self) -> float:
        """``|b|``, ``b = K^T b_Q``."""
        return float((self.key.T @ self.query_bias).norm())

    @cached_property
    def norm_v(self) -> float:
        """``‖V‖``, including rounding errors where a folded product cancels."""
        hidden = 0.0 if self.size is None else UNIT * self.size
        return norm_in_double(self.value) + hidden

    @cached_property
    def rotation_norm(self) -> float:
        """Largest norm of a rotation; above 1 with long-context scaling."""
        rotary = self.layer.rotary
        return 1.0 if rotary is None else rotary.norm(self.query.shape[0])

    def visible(self, num_tokens: int) -> Tensor:
        """``N_i``: the number of keys visible to each of ``num_tokens`` rows, ``(n,)``."""
        n, layer = num_tokens, self.layer
        if layer.mask is not None or layer.window is not None:
            return self.allowed(n).sum(-1)
        return torch.arange(1, n + 1) if layer.causal else torch.full((n,), n)

    def allowed(self, num_tokens: int) -> Bool[Tensor, "n n"]:
        """True where row i may attend to key j."""
        mask, every = self.layer.mask, slice(0, num_tokens)
        if mask is not None and mask.shape[-1] != num_tokens:
            raise NotApplicableError(
                f"its mask was captured for {mask.shape[-1]} tokens, not for {num_tokens}"
            )
        found = self.layer.visible(every, every)
        return torch.ones(num_tokens, num_tokens, dtype=torch.bool) if found is None else found

    def biased(self, scores: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        """Logits from inner products: add the bias, set masked entries to -inf."""
        n = len(scores)
        allowed = self.allowed(n)
        if not bool(allowed.any(-1).all()):
            raise NotApplicableError("one of its rows may read no token at all")
        if self.layer.score_bias is not None:
            scores = scores + self._score_bias(n)
        return scores.masked_fill(~allowed, -torch.inf)

    def bias_range(self, num_tokens: int) -> Float[Tensor, " n"]:
        """``max_j B_ij - min_j B_ij`` over the keys visible to row i."""
        if self.layer.score_bias is None:
            return torch.zeros(num_tokens, dtype=torch.float64)
        bias, hidden = self._score_bias(num_tokens), ~self.allowed(num_tokens)
        top = bias.masked_fill(hidden, -torch.inf).amax(-1)
        return (top - bias.masked_fill(hidden, torch.inf).amin(-1)).clamp_min(0)

    def _score_bias(self, num_tokens: int) -> Tensor:
        bias = self.layer.score_bias
        assert bias is not None
        if bias.shape[-1] != num_tokens:
            raise NotApplicableError(
                f"its bias of the logits was captured for {bias.shape[-1]} tokens, "
                f"not for {num_tokens}"
            )
        return bias

    @property
    def _hides(self) -> bool:
        """Whether a window or a mask hides keys."""
        mask = self.layer.mask
        return self.layer.window is not None or (mask is not None and not bool(mask.all()))

    def without_rotary(self) -> None:
        """Raise if inner products depend on positions."""
        if self.layer.rotary is not None:
            raise NotApplicableError("its logits depend on positions (rotary embedding)")

    def without_positions(self) -> None:
        """Raise if logits depend on positions other than through the mask."""
        self.without_rotary()
        if self.layer.score_bias is not None:
            raise NotApplicableError("its logits depend on positions (relative bias)")

    def without_bias(self) -> None:
        """Raise if the query has a bias that reaches the logits."""
        if self.norm_b > 0:
            raise NotApplicableError("its queries have a bias")

    def unmasked(self) -> None:
        """Raise unless every row may attend to every token."""
        if self.layer.causal or self._hides:
            raise NotApplicableError("it is masked")

    def causal_or_unmasked(self) -> None:
        """Raise for masks other than a causal one."""
        if self._hides:
            raise NotApplicableError("its mask is neither empty nor causal")

    def only_causal(self) -> None:
        """Raise unless the mask is causal."""
        self.causal_or_unmasked()
        if not self.layer.causal:
            raise NotApplicableError("it is not causal")

    def plain(self) -> None:
        """Raise unless logits are ``<A x_i, x_j>``, with a causal mask or none."""
        self.causal_or_unmasked()
        self.without_positions()
        self.without_bias()


def heads_of(layer: DotProduct, *, fold: bool = True) -> list[Head]:
    """The query heads of a layer, on the CPU in float64; grouped keys and values are repeated.

    ``fold`` includes each head's part of the output projection in ``V`` (map ``attention``).
    """
    return [head_from(one, fold=fold) for one in single_heads(layer)]


def single_heads(layer: DotProduct, head: int | None = None) -> list[DotProduct]:
    """The query heads of a layer, or one of them, as layers on the CPU in float64."""
    check_scores(layer)
    own = layer.in_double()
    return [own.head(h) for h in (range(own.num_heads) if head is None else [head])]


def head_from(one: DotProduct, *, fold: bool, turn: bool = True) -> Head:
    """The `Head` of a single-head layer; ``fold`` as in `heads_of`.

    ``turn`` allows a rotation of the folded output, which keeps all norms; not if a sum follows.
    """
    value, zeros, size = one.value, one.query.new_zeros(one.head_width), None
    if fold and one.output is not None:
        size = float(one.output.norm() * value.norm())
        output = torch.linalg.qr(one.output, mode="r").R if turn else one.output
        value = output @ value
    query_bias, key_bias = (zeros if b is None else b for b in (one.query_bias, one.key_bias))
    scale = one.scale
    return Head(one.query * scale, one.key, value, query_bias * scale, key_bias, one, size)


def check_scores(layer: DotProduct) -> None:
    """Raise if logits are more than inner products of affine maps plus a fixed bias.

    Raises:
        NotApplicableError: For weights other than softmax, soft-capped scores and normalised
            queries, keys or values.
    """
    if not isinstance(layer.weighting, Softmax):
        raise NotApplicableError("its weights are no softmax of the scores")
    if layer.softcap is not None:
        raise NotApplicableError("its scores are soft-capped")
    if layer.query_norm is not None or layer.key_norm is not None:
        raise NotApplicableError("its queries and keys are normalised")
    if layer.value_norm is not None:
        raise NotApplicableError("its values are normalised")


_CHUNK_BYTES = 2**20  # of one tensor (rows, n, k), to fit in a core's cache
_SETTLED = 750.0  # a logit this far below another one has weight 0 in float64
_UNDERFLOW = 1e-140  # norms below the root of the smallest number may vanish when squared
_KNOWN = 0.01  # largest rounding of logits for meaningful weights


class AtInput:
    """Heads at ``X``, in float64 on the CPU; all quantities are computed lazily.

    ``HeadsAt`` adds a leading axis of heads to every tensor, ``HeadAt`` does not: ``*h``.

    Raises:
        InputError: If ``x`` does not fit the heads or is not finite.
        NotApplicableError: On access to a quantity whose mask, bias or rotary embedding is
            for another number of tokens, or which has a fully masked row.
    """

    # Arguments required by a theorem about such an object.
    needs: ClassVar[tuple[str, ...]] = ("x",)

    def __init__(self, heads: Sequence[Head], x: Float[Tensor, "n d"]) -> None:
        self.heads, self.x = tuple(heads), tokens_in_double(x, heads[0].query.shape[1])
        self.rotary = heads[0].layer.rotary  # if present, ``a_ij`` depends on ``j``

    def joined(self, parts: Iterable[Tensor]) -> Tensor:
        """Combine the tensors of the heads into one."""
        return torch.stack(list(parts))

    @cached_property
    def q(self) -> Float[Tensor, "*h n k"]:
        """Queries, scaled, with rotary embedding if present."""
        return self._rotated(self.joined(self.x @ h.query.T + h.query_bias for h in self.heads))

    @cached_property
    def k(self) -> Float[Tensor, "*h n k"]:
        """Keys, with rotary embedding if present."""
        return self._rotated(self.joined(self.x @ h.key.T + h.key_bias for h in self.heads))

    @cached_property
    def v(self) -> Float[Tensor, "*h n kv"]:
        """``V x_j``; value biases only shift the output."""
        return self.joined(self.x @ h.value.T for h in self.heads)

    @cached_property
    def p(self) -> Float[Tensor, "*h n n"]:
        """Probabilities."""
        return torch.softmax(self.s, -1)

    @cached_property
    def o(self) -> Float[Tensor, "*h n kv"]:
        """``V m_i``."""
        return self.p @ self.v

    @cached_property
    def mean_key(self) -> Float[Tensor, "*h n k"]:
        """Mean key of every row under its attention."""
        return self.p @ self.k

    @cached_property
    def s(self) -> Float[Tensor, "*h n n"]:
        """Inputs of the softmax: logits with the bias, -inf where masked."""
        scores = (self.q @ self.k.mT).view(len(self.heads), len(self.x), len(self.x))
        return self.joined(h.biased(s) for h, s in zip(self.heads, scores, strict=True))

    @cached_property
    def rounding(self) -> Float[Tensor, "*h n"]:
        """Rounding error of the logits of a row; 0 if one token has all the weight."""
        heads, size = self.heads, self.x.norm(dim=-1)
        turned = max(h.rotation_norm for h in heads) ** 2
        queries, keys = (
            self.joined(size * w.norm() + b.norm() for w, b in pairs)
            for pairs in (
                [(h.query, h.query_bias) for h in heads],
                [(h.key, h.key_bias) for h in heads],
            )
        )
        terms = sum(heads[0].query.shape)
        shift = UNIT * terms**0.5 * turned * queries * keys.amax(-1, keepdim=True)
        if any(h.layer.score_bias is not None for h in heads):
            shift = shift + UNIT * self.s.masked_fill(self.s == -torch.inf, 0.0).abs().amax(-1)
        best, second = self.s.topk(min(2, len(size)), -1).values[..., (0, -1)].unbind(-1)
        alone = (self.s > -torch.inf).sum(-1) == 1
        shift = shift.masked_fill(alone | (best - second > _SETTLED + 2 * shift), 0.0)
        if not bool((shift < _KNOWN).all()):
            raise NotApplicableError(
                "its logits are too large for float64 to know the attention weights"
            )
        return shift

    @cached_property
    def slack(self) -> float:
        """``>= ‖J~ - J‖`` for the Jacobian ``J~`` computed in float64, to first order.

        Relative to the terms that cancel: differences of values and keys, and heads. Also valid in
        the max-token norm. Derived here (``docs/theory/local-certificates.md``).
        """
        n, total = len(self.x), _UNDERFLOW if self.alive else 0.0
        kept = (self.p, self.q, self.k, self.v, self.o, self.mean_key, self.rounding)
        unit = UNIT * n**0.5
        for h, (head, outer) in enumerate(zip(self.heads, self.outer, strict=True)):
            p, q, k, v, o, middle, shift = (t.view(len(self.heads), n, -1)[h] for t in kept)
            reach = head.rotation_norm * head.key.norm() * q.norm(dim=-1)
            turn = head.rotation_norm * head.query.norm()
            apart = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
            keys = torch.cdist(middle, k, compute_mode="donot_use_mm_for_euclid_dist")
            most_v = head.size_v * self.x.norm(dim=-1).max()
            most_k = k.norm(dim=-1).max()
            once = (p * apart).sum(-1), (p * keys).sum(-1), (p * apart * keys).sum(-1)
            # P has a relative error, y and key differences errors relative to the terms subtracted.
            share = 2 * shift.view(-1) + unit
            off = share * (head.size_v + once[0] * reach + once[2] * turn)
            off = off + unit * (most_v * reach + (most_v * once[1] + most_k * once[0]) * turn)
            off = off + unit**2 * most_v * most_k * turn
            total += outer * n**0.5 * float(off.max())
        return total

    @cached_property
    def written_off(self) -> Float[Tensor, " n"]:
        """``>= |o~_i - o_i|``, all heads: rounding of the attention output, without biases."""
        n, kept = len(self.x), (self.p, self.v, self.o, self.rounding)
        total = self.x.new_zeros(n)
        for h, (head, outer) in enumerate(zip(self.heads, self.outer, strict=True)):
            p, v, o, shift = (t.view(len(self.heads), n, -1)[h] for t in kept)
            apart = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
            moved = 2 * shift.view(-1) * (p * apart).sum(-1)
            most = head.size_v * self.x.norm(dim=-1).max()
            total = total + outer * (moved + UNIT * n**0.5 * most)
        return total

    @property
    def alive(self) -> bool:
        """Whether some weight passes a value; otherwise the Jacobian is zero by construction."""
        return any(bool(head.value.any()) for head in self.heads)

    @property
    def outer(self) -> list[float]:
        """Bounds of the norm of each head's output map."""
        return [1.0] * len(self.heads)

    def columns(self, slope: Float[Tensor, " n"] | None) -> Float[Tensor, " n"]:
        """The slope of a norm in front, one factor per column of blocks; ones without it."""
        return self.x.new_ones(len(self.x)) if slope is None else slope

    def y(self, rows: slice) -> Float[Tensor, "*h r n kv"]:
        """``V y_ij = v_j - o_i``, by subtraction."""
        return self.v[..., None, :, :] - self.o[..., rows, None, :]

    def pulled(self, rows: slice) -> Float[Tensor, "*h r m k"]:
        """``R_j^T R_i q_i``, ``a_ij`` before ``K^T``: m = 1 if independent of j, else n."""
        q = self.q[..., rows, None, :]
        if self.rotary is None:
            return q
        return self.rotary.transpose(q.expand(*q.shape[:-2], len(self.x), -1))

    def covariance(self, rows: slice) -> Float[Tensor, "*h r kv k"]:
        """``Cov_i(V x, k)`` with the last axis rotated back to that of ``Q``."""
        keys = self.k[..., None, :, :] - self.mean_key[..., rows, None, :]
        return self._back(rows, (self.p[..., rows, :, None] * self.y(rows)).mT @ keys)

    @cached_property
    def chunks(self) -> list[slice]:
        """Chunks of rows whose tensors ``(h, rows, n, k)`` fit in cache."""
        n, width = len(self.x), max(self.q.shape[-1], self.v.shape[-1])
        rows = max(1, _CHUNK_BYTES // (8 * n * width * len(self.heads)))
        return [slice(i, min(i + rows, n)) for i in range(0, n, rows)]

    def _rotated(self, w: Tensor) -> Tensor:
        if self.rotary is None:
            return w
        known = len(self.rotary.cos)
        if known != len(self.x):
            raise NotApplicableError(
                f"its rotary embedding was captured for {known} tokens, not for {len(self.x)}"
            )
        return self.rotary(w)

    def turned_back(self, rows: slice, w: Float[Tensor, "*b r k"]) -> Float[Tensor, "*b r k"]:
        """Undo the rotation of every row by its position."""
        if self.rotary is None:
            return w
        return Rotary(self.rotary.cos[rows], self.rotary.sin[rows]).transpose(w)

    def _back(self, rows: slice, w: Float[Tensor, "*h r m k"]) -> Float[Tensor, "*h r m k"]:
        return self.turned_back(rows, w.transpose(-3, -2)).transpose(-3, -2)


class HeadsAt(AtInput):
    """Several unfolded heads at ``X``, with the output projection ``[W_1 … W_H]``."""

    def __init__(
        self,
        heads: Sequence[Head],
        x: Float[Tensor, "n d"],
        output: Float[Tensor, "d_out hkv"] | None = None,
    ) -> None:
        super().__init__(heads, x)
        self.output = output
        # for all heads, ``(h, k, d)``; queries scaled
        self.query = torch.stack([head.query for head in heads])
        self.key = torch.stack([head.key for head in heads])
        self.value = torch.stack([head.value for head in heads])

    @property
    def alive(self) -> bool:
        """Whether some weight passes a value."""
        return super().alive and (self.output is None or bool(self.output.any()))

    @property
    def outer(self) -> list[float]:
        """``‖W_h‖_F``, or ones without a projection."""
        if self.output is None:
            return super().outer
        return [float(part.norm()) for part in self.output.chunk(len(self.heads), 1)]


class HeadAt(AtInput):
    """One head at ``X``: quantities shared by many theorems and radii."""

    def __init__(self, head: Head, x: Float[Tensor, "n d"]) -> None:
        super().__init__((head,), x)
        self.head = head

    def joined(self, parts: Iterable[Tensor]) -> Tensor:
        """The tensor of the only head."""
        (one,) = parts
        return one

    @cached_property
    def pieces(self) -> Iterable[tuple[slice, Tensor, Tensor]]:
        """`chunks` with their ``y`` and ``z``; cached if there is a single chunk."""
        found = _Pieces(self)
        return [*found] if len(self.chunks) == 1 else found

    @cached_property
    def allowed(self) -> Bool[Tensor, "n n"]:
        """True where row i may attend to token j."""
        return self.head.allowed(len(self.x))

    @cached_property
    def norm_a(self) -> float:
        """``‖A‖``, or an upper bound of all ``‖A_ij‖`` under a rotary embedding."""
        head = self.head
        if self.rotary is None:
            return head.norm_a
        return head.rotation_norm**2 * norm_in_double(head.query) * norm_in_double(head.key)

    @cached_property
    def gram_v(self) -> Float[Tensor, "kv kv"]:
        """``V V^T``."""
        return self.head.value @ self.head.value.T

    @cached_property
    def factor_q(self) -> Float[Tensor, "r k"]:
        """Triangular factor of ``Q^T``."""
        return torch.linalg.qr(self.head.query.T, mode="r").R

    @cached_property
    def nu(self) -> Float[Tensor, "n n"]:
        """``|V y_ij|``."""
        return torch.cdist(self.o, self.v, compute_mode="donot_use_mm_for_euclid_dist")

    @cached_property
    def mu(self) -> Float[Tensor, "n n"]:
        """``|A^T y_ij|``: how fast logit ij grows with token i."""
        return torch.cat([self.z(rows).norm(dim=-1) for rows in self.chunks])

    @cached_property
    def rho(self) -> Float[Tensor, "n m"]:
        """``|a_ij|``: how fast logit ij grows with token j; ``(n, 1)`` without rotary."""
        factor = torch.linalg.qr(self.head.key.T, mode="r").R.T
        sizes = [(self.pulled(rows) @ factor).norm(dim=-1) for rows in self.chunks]
        return torch.cat(sizes)

    @cached_property
    def drift(self) -> Float[Tensor, " n"]:
        """``‖V C_i A‖``, or its rotary counterpart."""
        factor = self.factor_q.T
        return torch.cat([norms_of_many(self.covariance(r) @ factor) for r in self.chunks])

    def z(self, rows: slice) -> Float[Tensor, "r n k"]:
        """``A^T y_ij`` in the basis of ``Q``'s factor."""
        difference = self.k[None] - self.mean_key[rows, None]
        return self._back(rows, difference) @ self.factor_q.T

    def tokens_in_queries(self) -> Float[Tensor, "n k"]:
        """``A^T x_i`` in the basis of ``Q``'s factor, without bias or rotation."""
        return (self.x @ self.head.key.T) @ self.factor_q.T


class _Pieces:
    """Rows of a head with their large tensors, recomputed in every pass."""

    def __init__(self, at: HeadAt) -> None:
        self.at = at

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        return ((rows, self.at.y(rows), self.at.z(rows)) for rows in self.at.chunks)


def tokens_in_double(x: Tensor, width: int) -> Float[Tensor, "n d"]:
    """A copy of ``x`` in float64 on the CPU, after checking its shape and values."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != width:
        found = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
        raise InputError(f"`x` should have shape (n, {width}), n at least 1. Found {found}.")
    if x.is_complex():
        raise InputError(f"`x` should be real. Found numbers of {x.dtype}.")
    x = x.detach().to("cpu", torch.float64, copy=True)
    if not bool(x.isfinite().all()):
        bad = int((~x.isfinite()).any(1).nonzero()[0])
        raise InputError(f"`x` should be finite. Found NaN or infinity in token {bad}.")
    return x
