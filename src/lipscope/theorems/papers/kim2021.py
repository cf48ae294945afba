"""Kim, Papamakarios and Mnih: "The Lipschitz Constant of Self-Attention" [kim2021].

Dot-product attention is not Lipschitz; L2 attention with tied weights is, for a fixed number
``N`` of tokens. Both constants rest on ``sup Σ_j P_ij d_ij = φ⁻¹(N - 1)`` for
``P_ij ∝ e^(-d_ij)``, ``d_ii = 0``, with ``φ(x) = x e^(x+1)``.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import L2Attention, phi_inverse
from lipscope.errors import InputError
from lipscope.linalg import norms_of_many
from lipscope.theorems.head import Head
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem


@theorem(cite="kim2021", statement="Theorem 3.1", kind="lower")
def kim_thm_3_1(head: Head, num_tokens: int, radius: float) -> float:
    """Dot-product attention is not Lipschitz: growth in R² from one token at the origin.

    ``‖V (I + m R² u u^T A)‖ / n``: the diagonal block of the token at the origin, with ``m``
    others, an even number, at ``±R u``.

    Holds without a mask; for causal masks the token at the origin comes last. ``u`` is the
    better one of the top left singular vector of ``A`` and the top right one of ``V``.

    Source: Theorem 3.1 of [kim2021], at the input of a shorter proof with one token at the
    origin (``docs/theory/global-bounds.md``).
    """
    head.plain()
    n = num_tokens
    others = n - 1 - (n - 1) % 2
    best = 0.0
    for u in _directions(head):
        pull = head.query.T @ (head.key @ u)  # A^T u
        block = head.value / n + (radius**2 * others / n) * torch.outer(head.value @ u, pull)
        best = max(best, float(norms_of_many(block)))
    return best


@theorem(cite="kim2021", statement="Theorem 3.2, infinity norm", metric="infinity", recalled=True)
def kim_thm_3_2_infinity(layer: L2Attention, num_tokens: int) -> float:
    """L2 attention: largest entry of the output's move relative to that of the input's.

    ``(4 φ⁻¹(N-1) + 1/√k) ‖W^{O T}‖_∞ max_h ‖W_h‖_∞ ‖W_h^T‖_∞ max_h ‖W^{V,h T}‖_∞``.

    Holds for all inputs of N tokens, without a mask and for causal masks.

    Source: Theorem 3.2 of [kim2021].
    """
    _visible_self(layer)
    own = layer.in_double()
    w, v = own.query.chunk(own.num_heads), own.value.chunk(own.num_heads)
    size = max(_infinity(h) * _infinity(h.T) for h in w) * max(_infinity(h) for h in v)
    constant = 4 * phi_inverse(num_tokens - 1.0) + own.head_width**-0.5
    return constant * size * (1.0 if own.output is None else _infinity(own.output))


@theorem(
    cite="kim2021",
    statement="Theorem 3.2, Frobenius norm",
    recalled=True,
    note="with the fourth power of the query weights; the second fails",
)
def kim_thm_3_2(layer: L2Attention, num_tokens: int) -> float:
    """L2 attention in the Frobenius norm.

    ``√(N/k) (4 φ⁻¹(N-1) + 1) √(Σ_h ‖W_h‖⁴ ‖W^{V,h}‖²) ‖W^O‖``.

    Holds for all inputs of N tokens, without a mask and for causal masks. The power of
    ``‖W_h‖`` is 4, since attention is quadratic in ``W_h``.

    Source: Theorem 3.2 of [kim2021].
    """
    root, f = math.sqrt(num_tokens), phi_inverse(num_tokens - 1.0)
    smaller = root * (1 + 2 * f) + 2 * f
    return root * (4 * f + 1) / smaller * kim_thm_3_2_improved(layer, num_tokens)


@theorem(cite=DERIVED, statement="Kim et al., Theorem 3.2, smaller constant")
def kim_thm_3_2_improved(layer: L2Attention, num_tokens: int) -> float:
    """L2 attention in the Frobenius norm, without √N in the diagonal term.

    ``k^(-1/2) (√N (1 + 2 φ⁻¹(N-1)) + 2 φ⁻¹(N-1)) √(Σ_h ‖W_h‖⁴ ‖W^{V,h}‖²) ‖W^O‖``.

    Holds for all inputs of N tokens, without a mask and for causal masks.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    _visible_self(layer)
    return float(layer.in_double().constant(num_tokens))


def tight_input(num_tokens: int) -> Float[Tensor, "n 1"]:
    """An input at which L2 attention nearly attains the infinity-norm constant.

    One token at 0, half of the others at ``c`` and half at ``-c``, ``c² = 1 + φ⁻¹(N-1)``, for
    one head of width 1 with all weights 1.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    if num_tokens < 3 or num_tokens % 2 == 0:
        raise InputError(
            f"`num_tokens` should be odd and at least 3. Found `num_tokens = {num_tokens}`."
        )
    c = math.sqrt(1 + phi_inverse(num_tokens - 1.0))
    x = torch.full((num_tokens, 1), c, dtype=torch.float64)
    x[0] = 0.0
    x[1::2] *= -1
    return x


def tight_value(num_tokens: int) -> float:
    """``‖J‖_∞`` at `tight_input`: ``4 φ⁻¹ - 1 + 2 / (1 + φ⁻¹)``, ``φ⁻¹ = φ⁻¹(N-1)``.

    The bound ``4 φ⁻¹ + 1`` exceeds it by at most 2, for every odd N.

    >>> n = 101
    >>> round((4 * phi_inverse(n - 1.0) + 1) / tight_value(n), 3)
    1.144
    """
    f = phi_inverse(num_tokens - 1.0)
    return 4 * f - 1 + 2 / (1 + f)


def _directions(head: Head) -> list[Tensor]:
    """The top left singular vector of ``A`` and the top right one of ``V``."""
    small = torch.linalg.qr(head.query.T, mode="r").R
    u = torch.linalg.svd(head.key.T @ small.T, full_matrices=False).U[:, 0]
    return [u, torch.linalg.svd(head.value, full_matrices=False).Vh[0]]


def _visible_self(layer: L2Attention) -> None:
    if layer.mask is not None and not bool(layer.mask.all()):
        raise NotApplicableError("its mask is neither empty nor causal")


def _infinity(matrix: Tensor) -> float:
    """Largest row sum of magnitudes."""
    return float(matrix.abs().sum(1).max())
