"""One head of dot-product attention as the theorems see it, in float64 and in factors.

``f(X)_i = V m_i`` with ``m_i = sum_j P_ij x_j`` and logits ``S_ij = <A x_i + b, x_j> + B_ij``,
where ``A = K^T Q / sqrt(k)`` has rank at most ``k``: nothing here forms a ``d x d`` product.
A bias ``B`` of the logits does not depend on ``X``: it changes ``P`` and no derivative of ``S``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import DotProduct, Rotary, Softmax
from lipscope.theorems.register import NotApplicableError

UNIT = 8 * torch.finfo(torch.float64).eps  # rounding of a product of matrices, with room


@dataclass(frozen=True)
class Head:
    """A head, with its part of the output projection folded into ``V`` where asked for.

    Attributes:
        query: ``Q`` with the scale in it, ``(k, d)``.
        key: ``K``, ``(k, d)``.
        value: ``V``, ``(k_v, d)``. Folded: ``R V`` with ``W_h = U R``, ``U`` with orthonormal
            columns, so that every norm of ``W_h V …`` is kept.
        query_bias: ``b_Q`` with the scale in it, ``(k,)``; zeros if there is none. Biases of
            keys cancel in the softmax (without rotary embedding), those of values shift.
        key_bias: ``b_K``, ``(k,)``; matters with a rotary embedding only.
        causal: Whether token i reads tokens j <= i only.
        mask: ``(n, n)``, True where i may read j, or None.
        rotary: Rotary embedding, or None.
        window: Token i reads tokens j > i - window only, or None.
        score_bias: ``B``, ``(n, n)``, or None.
        size: ``‖W_h‖_F ‖V‖_F`` where that product is folded into ``value``, which may cancel
            in it; None where nothing is.
    """

    query: Float[Tensor, "k d"]
    key: Float[Tensor, "k d"]
    value: Float[Tensor, "kv d"]
    query_bias: Float[Tensor, " k"]
    key_bias: Float[Tensor, " k"]
    causal: bool = False
    mask: Bool[Tensor, "n n"] | None = None
    rotary: Rotary | None = None
    window: int | None = None
    score_bias: Float[Tensor, "n n"] | None = None
    size: float | None = None

    @cached_property
    def norm_a(self) -> float:
        """``‖A‖``, from a ``k x k`` matrix; with what rounding may hide where ``K^T Q`` cancels."""
        hidden = UNIT * float(self.key.norm() * self.query.norm())
        return _product_norm(self.key.T, self.query.T) + hidden

    @cached_property
    def size_v(self) -> float:
        """``‖V‖_F`` before anything in it cancels: what its rounding is relative to."""
        return float(self.value.norm()) if self.size is None else self.size

    @cached_property
    def norm_b(self) -> float:
        """``|b|``, ``b = K^T b_Q``."""
        return float((self.key.T @ self.query_bias).norm())

    @cached_property
    def norm_v(self) -> float:
        """``‖V‖``, with what rounding may hide where a folded product cancels."""
        hidden = 0.0 if self.size is None else UNIT * self.size
        return float(torch.linalg.matrix_norm(_small(self.value), 2)) + hidden

    @cached_property
    def rotation_norm(self) -> float:
        """Largest norm of a rotation; above 1 where a long-context scaling is part of it."""
        assert self.rotary is not None
        (c1, c2), (s1, s2) = (w.chunk(2, dim=-1) for w in (self.rotary.cos, self.rotary.sin))
        # The two halves of one pair turn by [[c_1, -s_1], [s_2, c_2]].
        pairs = torch.stack([torch.stack([c1, -s1], -1), torch.stack([s2, c2], -1)], -2)
        rest = self.rotary.cos.shape[-1] < self.query.shape[0]
        return max(float(torch.linalg.matrix_norm(pairs, 2).max()), 1.0 if rest else 0.0)

    def matrix_a(self) -> Float[Tensor, "d d"]:
        """``A`` itself, for constructions on small layers."""
        return self.key.T @ self.query

    def visible(self, num_tokens: int) -> Tensor:
        """``N_i``: how many keys each of ``num_tokens`` rows may read, ``(n,)``."""
        n = num_tokens
        if self.mask is not None or self.window is not None:
            return self.allowed(n).sum(-1)
        return torch.arange(1, n + 1) if self.causal else torch.full((n,), n)

    def allowed(self, num_tokens: int) -> Bool[Tensor, "n n"]:
        """True where row i may read key j.

        Raises:
            NotApplicableError: If the layer's mask was made for another number of tokens.
        """
        n = num_tokens
        allowed = torch.ones(n, n, dtype=torch.bool)
        if self.causal:
            allowed = allowed.tril()
        if self.window is not None:
            allowed = allowed.triu(1 - self.window)
        if self.mask is not None:
            if self.mask.shape[-1] != n:
                raise NotApplicableError(
                    f"its mask was captured for {self.mask.shape[-1]} tokens, not for {n}"
                )
            allowed = allowed & self.mask
        return allowed

    def biased(self, scores: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        """Logits from inner products: with the bias, -inf where hidden.

        Raises:
            NotApplicableError: If mask or bias were made for another number of tokens, or a
                row may read no token.
        """
        n = len(scores)
        allowed = self.allowed(n)
        if not bool(allowed.any(-1).all()):
            raise NotApplicableError("one of its rows may read no token at all")
        if self.score_bias is not None:
            scores = scores + self._score_bias(n)
        return scores.masked_fill(~allowed, -torch.inf)

    def bias_range(self, num_tokens: int) -> Float[Tensor, " n"]:
        """``max_j B_ij - min_j B_ij`` over the keys that row i may read."""
        if self.score_bias is None:
            return torch.zeros(num_tokens, dtype=torch.float64)
        bias, hidden = self._score_bias(num_tokens), ~self.allowed(num_tokens)
        top = bias.masked_fill(hidden, -torch.inf).amax(-1)
        return (top - bias.masked_fill(hidden, torch.inf).amin(-1)).clamp_min(0)

    def _score_bias(self, num_tokens: int) -> Tensor:
        assert self.score_bias is not None
        if self.score_bias.shape[-1] != num_tokens:
            raise NotApplicableError(
                f"its bias of the logits was captured for {self.score_bias.shape[-1]} tokens, "
                f"not for {num_tokens}"
            )
        return self.score_bias

    def without_rotary(self) -> None:
        """Raise if inner products depend on positions."""
        if self.rotary is not None:
            raise NotApplicableError("its logits depend on positions (rotary embedding)")

    def without_positions(self) -> None:
        """Raise if logits depend on positions in any way beyond the mask."""
        self.without_rotary()
        if self.score_bias is not None:
            raise NotApplicableError("its logits depend on positions (relative bias)")

    def without_bias(self) -> None:
        """Raise if the query has a bias that reaches the logits."""
        if self.norm_b > 0:
            raise NotApplicableError("its queries have a bias")

    def unmasked(self) -> None:
        """Raise if any row cannot read every token."""
        hides = self.mask is not None and not bool(self.mask.all())
        if self.causal or self.window is not None or hides:
            raise NotApplicableError("it is masked")

    def causal_or_unmasked(self) -> None:
        """Raise for masks other than none and the causal one."""
        hides = self.mask is not None and not bool(self.mask.all())
        if self.window is not None or hides:
            raise NotApplicableError("its mask is neither empty nor causal")


def heads_of(layer: DotProduct, *, fold: bool = True, turn: bool = True) -> list[Head]:
    """The query heads of a layer, on the CPU in float64.

    Args:
        layer: The layer; grouped keys and values are repeated.
        fold: Whether the head's part of the output projection is part of ``V``
            (map ``attention``) or not (map ``heads``).
        turn: Whether the outputs of a folded head may be turned, which keeps all norms; not
            where something is added to them.

    Returns:
        One `Head` per query head.

    Raises:
        NotApplicableError: If the logits are not those of a `Head`.
    """
    check_scores(layer)
    own = layer.in_double()
    return [_head(own.head(h), fold=fold, turn=turn) for h in range(own.num_heads)]


def _head(one: DotProduct, *, fold: bool, turn: bool) -> Head:
    value, zeros, size = one.value, one.query.new_zeros(one.head_width), None
    if fold and one.output is not None:
        size = float(one.output.norm() * value.norm())
        output = torch.linalg.qr(one.output, mode="r").R if turn else one.output
        value = output @ value
    return Head(
        one.query * one.scale,
        one.key,
        value,
        zeros if one.query_bias is None else one.query_bias * one.scale,
        zeros if one.key_bias is None else one.key_bias,
        one.causal,
        one.mask,
        one.rotary,
        one.window,
        one.score_bias,
        size,
    )


def check_scores(layer: DotProduct) -> None:
    """Raise where logits are more than inner products of affine maps plus a fixed bias.

    Raises:
        NotApplicableError: For other weights than softmax, soft-capped scores and normalised
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


def _small(w: Tensor) -> Tensor:
    """A matrix with the singular values of ``w`` and its smaller dimension twice."""
    return torch.linalg.qr(w.T if w.shape[0] < w.shape[1] else w, mode="r").R


def _product_norm(left: Tensor, right: Tensor) -> float:
    """``‖L R^T‖`` for tall ``L`` and ``R`` with the same number of columns."""
    small = torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right, mode="r").R.T
    return float(torch.linalg.matrix_norm(small, 2))
