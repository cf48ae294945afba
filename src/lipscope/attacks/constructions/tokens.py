"""One special token, many that agree, or all equal: regimes other than two clusters."""

from __future__ import annotations

import math

import torch

from lipscope.attacks.ascent import check_size
from lipscope.attacks.constructions.construction import Construction, head_for, pair
from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.measures import uniform_gain
from lipscope.theorems import DERIVED, first_token_gain, split_gain, value_direction

_CASTIN = "castin2024"
_DRAWS = 64


def large_radius(
    layer: Attention, *, head: int = 0, num_tokens: int, radius: float
) -> Construction:
    """Tokens on the sphere, many of which attend to one: the regime of large radii.

    If row i has one largest logit, at ``m_i``, the Jacobian at ``R X`` tends exponentially to
    ``E -> (V e_{m_i})_i``, so that ``sigma -> ‖V‖ sqrt(max_j #{i : m_i = j})``.

    Holds for one head, unmasked or causal, without rotary embedding, in the limit; of 64
    random draws the one with the largest limit is taken.

    Args:
        layer: The layer.
        head: Index of the query head.
        num_tokens: At least 1.
        radius: Norm of every token.

    Returns:
        The input; ``predicted`` is the limit.

    Raises:
        InputError: As `two_cluster`.

    Source: Theorems 3.7 and 4.5 of [castin2024]; the value of the limit is derived here.
    """
    one = head_for(layer, head, num_tokens, radius, least=1)
    gen = torch.Generator().manual_seed(0)
    best, most = None, 0
    for _ in range(_DRAWS):
        mix = torch.randn(num_tokens, 2 * len(one.query), generator=gen, dtype=torch.float64)
        x = mix @ torch.cat([one.query, one.key])
        x = radius * x / x.norm(dim=1, keepdim=True).clamp_min(1e-300)
        logits = (x @ one.query.T) @ (one.key @ x.T)
        logits = logits.masked_fill(~one.allowed(num_tokens), -torch.inf)
        count = int(logits.argmax(1).bincount().max())
        if count > most:
            best, most = x, count
    assert best is not None
    value = one.norm_v * math.sqrt(most)
    name, where = "large_radius", "Theorem 4.5" if layer.causal else "Theorem 3.7"
    return Construction(best.to(layer.query), name, where, _CASTIN, value, "limit", head)


def dominant_token(
    layer: Attention, *, head: int = 0, num_tokens: int, radius: float
) -> Construction:
    """One token of norm ``R``; small ones that give it half of their attention.

    ``x_1 = R u``, the rest at ``c A^T u / |A^T u|`` with ``c R |A^T u| = log(n-1)`` (at most
    ``R``), so that ``p = 1/2``. ``u`` makes ``|Vu| |A^T u|`` large: each small token's output
    moves with its own query by ``p (1-p) |V s| |A^T s|``, ``s = x_1 - x_j``.

    Holds for one head, unmasked or causal, without rotary embedding.

    Args:
        layer: The layer.
        head: Index of the query head.
        num_tokens: At least 2.
        radius: Norm of the first token.

    Returns:
        The input.

    Raises:
        InputError: As `two_cluster`.

    Source: derived here (``docs/theory/inputs.md``).
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    u = value_direction(one)
    pull = (u @ one.key.T) @ one.query
    if not pull.norm() > 0:
        raise InputError(f"not available: `A` of head {head} is zero.")
    size = min(radius, math.log(num_tokens - 1) / (radius * float(pull.norm())))
    first, rest = radius * u, size * pull / pull.norm()
    x = pair(first, rest, num_tokens)
    gain = float(first_token_gain(one, first, rest, num_tokens))
    value = max(gain, split_gain(one, first, rest, num_tokens))
    return Construction(
        x.to(layer.query), "dominant_token", "one large token", DERIVED, value, head=head
    )


def quadratic(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """A token at the origin that reads the others at ``± R u``: sigma grows like ``R^2``.

    Its attention is uniform, so ``sigma >= ‖V (I / n + C A)‖`` with ``C`` the covariance of the
    tokens: ``(n-1)/n R^2 u u^T`` for odd ``n``. Also the family on which dot-product attention
    is seen not to be Lipschitz. The origin is the last token under a causal mask, where it
    reads all others, and the first one otherwise.

    Holds for one head, unmasked or causal, without rotary embedding; with a query bias ``b``
    the row's true weights are used.

    Args:
        layer: The layer.
        head: Index of the query head.
        num_tokens: At least 2.
        radius: Norm ``R`` of the other tokens.

    Returns:
        The input.

    Raises:
        InputError: As `two_cluster`.

    Source: Appendix C.7 of [castin2024]; a token at the origin: Theorem 3.1 of [kim2021].
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    u = value_direction(one)
    at = torch.zeros(num_tokens, dtype=torch.float64)
    at[1 : 1 + num_tokens // 2], at[1 + num_tokens // 2 :] = radius, -radius
    x = at[:, None] * u
    b = one.query_bias @ one.key
    p = torch.softmax(x @ b, dim=0)
    mean = float(p @ at)
    spread = float(p @ at**2) - mean**2
    vu, pull = one.value @ u, (u @ one.key.T) @ one.query
    block = p[0] * (one.value - mean * torch.outer(vu, b)) + spread * torch.outer(vu, pull)
    value = float(torch.linalg.matrix_norm(block, 2))
    x = x.flip(0) if layer.causal else x
    return Construction(x.to(layer.query), "quadratic", "Appendix C.7", _CASTIN, value, head=head)


def constant(layer: Attention, *, num_tokens: int, radius: float) -> Construction:
    """All tokens equal: every row averages, ``sigma = ‖P‖ ‖sum_h W_h V_h‖``.

    ``P`` is uniform over what a row reads: ``‖P‖ = 1`` unmasked, and the norm of the Cesàro
    matrix (below 2) with a causal mask.

    Holds for every variant of attention, all heads together, exactly; with a rotary embedding
    the rows are not uniform and nothing is predicted.

    Args:
        layer: The layer.
        num_tokens: At least 1.
        radius: Norm of the token.

    Returns:
        The input.

    Raises:
        InputError: For a negative radius or no tokens.

    Source: derived here (``docs/theory/inputs.md``).
    """
    check_size(num_tokens, radius)
    d = layer.query.shape[1]
    one = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (radius * one / one.norm()).expand(num_tokens, d)
    value = uniform_gain(layer, num_tokens)
    return Construction(
        x.to(layer.query).contiguous(), "constant", "equal tokens", DERIVED, value, "exact"
    )
