"""Castin, Ablin and Peyré: "How Smooth Is Attention?" [castin2024].

Upper and lower bounds for dot-product attention on tokens of norm at most ``R``, and its
limit for large tokens, with ``alpha = ‖A‖ R^2``. All hold for one head;
`lipscope.theorems.layer_bounds` combines heads (Lemma 3.8). The printed formulas of Theorems
C.3 and E.3 were not available: those below are derived from their proofs.
"""

from __future__ import annotations

import math

import torch

from lipscope.theorems.directions import Placement, eigen_directions
from lipscope.theorems.head import Head, HeadAt
from lipscope.theorems.register import NotApplicableError, theorem

_SLIDES = (
    "read: “same upper bound” on the slides (January 2025), without a distance or p, and the "
    "paper's text without formulas; fails for the conditional distance of every finite p"
)


@theorem(cite="castin2024", statement="Theorems 3.3 and 4.3")
def castin_thm_3_3(head: Head, num_tokens: int, radius: float) -> float:
    """Upper bound that grows like the square root of the number of tokens.

    ``√3 ‖V‖ (‖A‖² R⁴ (4n + 1) + n)^(1/2)``.

    Holds for any mask on tokens of norm at most R; not for biases of queries or rotary
    embeddings. Since deviations average to at most ``R²``, ``4n + 1`` could be ``n + 1``.

    Source: Theorem 3.3 (unmasked) and 4.3 (causal) of [castin2024].
    """
    head.without_rotary()
    head.without_bias()
    alpha, n = head.norm_a * radius**2, num_tokens
    return head.norm_v * math.sqrt(3 * (alpha**2 * (4 * n + 1) + n))


@theorem(cite="castin2024", statement="Theorem E.3 (formula from its proof)")
def castin_thm_e_3(head: Head, num_tokens: int, radius: float) -> float:
    """Theorem 3.3 with query biases.

    ``√3 ‖V‖ (‖A‖² R⁴ + 4 n R² (‖A‖ R + |b|)² + n)^(1/2)``, ``b = K^T b_Q``.

    Holds for any mask on tokens of norm at most R; not for rotary embeddings.

    Source: Theorem E.3 of [castin2024]; proof of this form: ``docs/theory/global-bounds.md``.
    """
    head.without_rotary()
    alpha, n = head.norm_a * radius**2, num_tokens
    beta = alpha + head.norm_b * radius
    return head.norm_v * math.sqrt(3 * (alpha**2 + 4 * n * beta**2 + n))


@theorem(cite="castin2024", statement="Theorem 4.4", scope="mean-field", sound=False, note=_SLIDES)
def castin_thm_4_4(head: Head, radius: float) -> float:
    """The unmasked mean-field constant, also stated for causal masks.

    ``‖V‖ (1 + 3 ‖A‖ R²) e^(2 ‖A‖ R²)``.

    The slides state it for causal attention, without the distance or ``p``. For the conditional
    Wasserstein distance of order ``p``, it fails for every finite ``p``: with ``A = 0`` attention
    is the running mean, whose norm for many tokens is ``p / (p-1)`` by Hardy's inequality
    (unbounded for ``p = 1``). For ``p = 2``: 1.1441 for two tokens, 2 in the limit.
    `causal_mean_field` is the corrected constant.

    Source: Theorem 4.4 of [castin2024]. The paper's text, available without its formulas, uses
    the distance of Definition 4.1, which keeps positions; its ``p`` was not legible.
    """
    head.only_causal()
    head.without_positions()
    head.without_bias()
    alpha = head.norm_a * radius**2
    return head.norm_v * (1 + 3 * alpha) * math.exp(2 * alpha)


@theorem(cite="castin2024", statement="Proposition 3.4, Lemma C.7", kind="lower")
def castin_prop_3_4(head: Head, num_tokens: int, radius: float) -> float:
    """Two clusters, as stated: one token that attracts the attention of all others.

    ``√(n-1) / (1 + (n-1) e^(-2 R² γ))`` for ``V = I``, where ``γ = max(-γ_min, γ_max / 8)``
    over the real eigenvalues of ``A``; times ``‖V‖`` for a multiple of an isometry.

    Holds without a mask and for causal masks (the attracting token first), ``d ≥ 2``.

    Source: Proposition 3.4 and Lemma C.7 of [castin2024].
    """
    direction = _best_direction(head)
    values = torch.linalg.svdvals(head.value)
    if len(values) < head.value.shape[1] or values[-1] < (1 - 1e-6) * values[0]:
        raise NotApplicableError("its value matrix is not a multiple of an isometry")
    if head.value.shape[1] < 2:
        raise NotApplicableError("its tokens have one entry only; stated for two or more")
    others = num_tokens - 1
    p = 1 / (1 + others * math.exp(-2 * direction.gamma * radius**2))  # weight of the first token
    return head.norm_v * math.sqrt(others) * p


@theorem(cite="castin2024", statement="Proposition 3.4, strengthened", kind="lower")
def castin_prop_3_4_strengthened(head: Head, num_tokens: int, radius: float) -> float:
    """Two clusters, with the first token moved along the eigenvector.

    ``√(Σ_{i≥2} p_i² |V (I + 2 γ R² (1-p_i) u u^T) e|²)`` for the best ``e`` found, where
    ``p_i = 1 / (1 + (N_i - 1) e^(-2 γ R²))`` and ``N_i`` is the number of visible keys: ``n``
    without a mask, ``i`` with a causal one. For ``V = I``: ``√(n-1) p (1 + 2 γ R² (1-p))``.

    Holds without a mask and for causal masks, any ``V``. With the unmasked ``p`` it would fail
    for causal attention.

    Source: the inputs of Proposition 3.4 of [castin2024]; the value is derived here
    (``docs/theory/global-bounds.md``).
    """
    return two_cluster_value(head, _best_direction(head), num_tokens, radius)


@theorem(cite="castin2024", statement="Proposition 3.6, C.8", kind="lower", scope="mean-field")
def castin_prop_3_6(head: Head, radius: float) -> float:
    """Exponential growth in R², for some number of tokens.

    ``(γ / 2) R² e^(γ R²)`` for ``V = I``, from ``e^(2 γ R²)`` tokens against one, to which each
    of the many gives half of its attention; times ``|V u|`` for any ``V``.

    Holds without a mask. The factor θ(R) of the statement is at least 1: weighted atoms reach
    ``(1 + γ R²) e^(γ R²) / 2`` exactly.

    Source: Proposition 3.6 and C.8 of [castin2024].
    """
    head.unmasked()
    direction = _best_direction(head)
    t = direction.gamma * radius**2
    return float((head.value @ direction.first).norm()) * t / 2 * math.exp(t)


@theorem(
    cite="castin2024",
    statement="Proposition 3.6, better constant",
    kind="lower",
    scope="mean-field",
)
def castin_prop_3_6_strengthened(head: Head, radius: float) -> float:
    """Proposition 3.6 with the optimal ratio of the two masses.

    ``max_c √c e^(γ R²) / (1+c) · |V u| (1 + 2 γ R² c / (1+c))``: ``c = 1`` is Proposition 3.6,
    ``c = 3`` grows like ``(3√3/8) γ R² e^(γ R²)``, 0.65 instead of 0.5.

    Holds without a mask, for some number of tokens.

    Source: the measures of Proposition 3.6 of [castin2024]; the constant is derived here.
    """
    head.unmasked()
    direction = _best_direction(head)
    t = direction.gamma * radius**2
    c = torch.linspace(1.0, 3.0, 65, dtype=torch.float64)
    gain = c.sqrt() / (1 + c) * (1 + 2 * t * c / (1 + c))
    return float((head.value @ direction.first).norm() * gain.max()) * math.exp(t)


@theorem(cite="castin2024", statement="Theorems 3.7 and 4.5, exact limit", scope="limit")
def castin_thm_3_7_limit(at: HeadAt) -> float:
    """Exact limit of sigma of ``s X`` as ``s`` grows.

    ``‖V‖ √(max_j #{i : m_i = j})`` with ``m_i = argmax_j <A x_i, x_j>`` over visible keys.

    Holds for any mask if every argmax is unique. Not a bound at ``X`` itself.

    Source: Theorems 3.7 and 4.5 of [castin2024]; the exact value is derived here.
    """
    head, x = at.head, at.x
    head.without_rotary()
    scores = (x @ head.query.T) @ (x @ head.key.T).T  # a bias does not grow like R²
    allowed = at.allowed
    top = scores.masked_fill(~allowed, -torch.inf).topk(min(2, len(x)), dim=1)
    tied = (allowed.sum(1) > 1) & (
        top.values[:, 0] - top.values[:, -1] <= 1e-12 * scores.abs().max()
    )
    if bool(tied.any()):
        raise NotApplicableError("two keys tie for the largest logit of a row")
    return head.norm_v * math.sqrt(int(torch.bincount(top.indices[:, 0]).max()))


@theorem(cite="castin2024", statement="Theorems 3.7 and 4.5", scope="limit")
def castin_thm_3_7(head: Head, num_tokens: int) -> float:
    """The limit of sigma for large tokens in general position.

    ``‖V‖ √n``.

    Holds for any mask, if all tokens are scaled up together and no two keys tie for the
    largest logit of a row.

    Source: Theorems 3.7 and 4.5 of [castin2024].
    """
    head.without_rotary()
    return head.norm_v * math.sqrt(num_tokens)


@theorem(cite="castin2024", statement="Theorem C.3, corrected")
def castin_thm_c_3(at: HeadAt) -> float:
    """Theorem 3.3 with quantities of the given tokens.

    ``√3 ‖V‖ (ρ² r² (n + 1) + n)^(1/2)``, ``r = max |x_i - x_j|``,
    ``ρ = max_i max(|a_i|, |A^T x_i|)``.

    Holds for any mask and bias at ``x``; not for rotary embeddings.

    Source: Theorem C.3 of [castin2024]. Its printed formula was not available;
    ``docs/theory/global-bounds.md`` shows that ``ρ`` must include ``A^T x``.
    """
    head, n = at.head, len(at.x)
    rho, rho_t, r = _logit_reach(at)
    rho = max(rho, rho_t)
    return head.norm_v * math.sqrt(3 * (rho**2 * r**2 * (n + 1) + n))


@theorem(
    cite="castin2024",
    statement="Theorem C.3, as coded by the authors",
    sound=False,
    note="the authors' code lacks √3 and A^T x; fails by a factor of 9 on eight hand-made tokens",
)
def castin_thm_c_3_coded(at: HeadAt) -> float:
    """The bound computed by the authors' script.

    ``‖V‖ (ρ² r² (n + 1) + n)^(1/2)`` with ``ρ = max_i |A x_i|`` alone.

    Fails for ``A = 3 e_1 e_2^T`` and eight tokens ``±3 e_1``: 2.83, while sigma is 27.04.

    Source: the code of [castin2024].
    """
    head, n = at.head, len(at.x)
    rho, _, r = _logit_reach(at)
    return head.norm_v * math.sqrt(rho**2 * r**2 * (n + 1) + n)


@theorem(cite="castin2024", statement="Theorem C.3, tightened")
def castin_thm_c_3_tightened(at: HeadAt) -> float:
    """Theorem C.3 from the row form and the identity of pairs.

    ``‖V‖ (√(n (1 + ρ² r² / 2)) + ρ_T r / √2)``, ``ρ = max |a_i|``, ``ρ_T = max |A^T x_i|``.

    Holds for any mask and bias at ``x``; not for rotary embeddings.

    Source: derived here (``docs/theory/global-bounds.md``).
    """
    head, n = at.head, len(at.x)
    rho, rho_t, r = _logit_reach(at)
    rows = math.sqrt(n * (1 + rho**2 * r**2 / 2))
    return head.norm_v * (rows + rho_t * r / math.sqrt(2))


def two_cluster_value(head: Head, direction: Placement, num_tokens: int, radius: float) -> float:
    """``‖J e‖`` for a unit move ``e`` of the first token, at the two-cluster input.

    With ``x_1 = R first`` and the others at ``R rest``, ``J_i1 = p_i V (I + (1 - p_i) R²
    (first - rest) (A rest)^T)`` for ``i ≥ 2``.

    Holds without a mask and for causal masks; no bias, no rotary embedding.
    """
    head.plain()
    seen = head.visible(num_tokens)[1:].to(torch.float64)
    if not len(seen):
        return 0.0
    gap = math.exp(-2 * direction.gamma * radius**2)
    p = 1 / (1 + (seen - 1) * gap)
    move = head.value @ (direction.first - direction.rest) * radius**2
    pull = head.key.T @ (head.query @ direction.rest)
    # The best e for one row is used for all; without a mask all rows are equal.
    block = head.value + (1 - p[-1]) * torch.outer(move, pull)
    e = torch.linalg.svd(block, full_matrices=False).Vh[0]
    rows = head.value @ e + torch.outer((1 - p) * (pull @ e), move)
    return float((p * rows.norm(dim=1)).norm())


def _best_direction(head: Head) -> Placement:
    head.plain()
    found = eigen_directions(head)
    if not found:
        raise NotApplicableError("A has no real eigenvalue other than 0")
    return found[0]


def _logit_reach(at: HeadAt) -> tuple[float, float, float]:
    """``max |a_i|``, ``max |A^T x_i|`` and the diameter of the tokens."""
    at.head.without_rotary()
    centred = at.x - at.x.mean(0)  # of the size of the diameter: no cancellation in products
    r = torch.cdist(centred, centred, compute_mode="use_mm_for_euclid_dist").max()
    return float(at.rho.max()), float(at.tokens_in_queries().norm(dim=1).max()), float(r)
