"""One token against all others: Propositions 3.4 and 3.6 and what they leave room for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope.attacks.constructions.construction import Construction, head_for, pair
from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.measures import Repeated, repeated_tokens
from lipscope.theorems import (
    DERIVED,
    Direction,
    Head,
    eigen_directions,
    first_token_gain,
    star_direction,
)

_CASTIN = "castin2024"
_RADII = 60  # tried between 0 and the radius where the best one is not known in closed form


def two_cluster(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """One token against all others, along a real eigenvector of ``A``.

    With ``gamma = max(-gamma_min, gamma_max / 8)`` over the real eigenvalues of ``A``:
    ``x_1 = R u``, the rest at ``-R u`` (first case) or ``R u / 2`` (second). Then for ``V = I``
    ``sigma >= sqrt(n-1) p``, ``p = 1 / (1 + (n-1) exp(-2 gamma R^2))``; ``predicted`` is the
    sharper ``sqrt(n-1) p ‖V (I + 2 gamma R^2 (1-p) u u^T)‖``, and with a causal mask the same
    sum over rows with the number of tokens that each of them reads.

    Holds for one head of dot-product attention, unmasked or causal, without rotary embedding.

    Args:
        layer: The layer.
        head: Index of the query head.
        num_tokens: At least 2.
        radius: Largest token norm ``R``.

    Returns:
        The input; the moving token is ``x_1``, which every row may read.

    Raises:
        InputError: For arguments out of range, or where it is not available.

    Source: Proposition 3.4 of [castin2024]; the factor is derived here
    (``docs/theory/inputs.md``).

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(torch.eye(1), -torch.eye(1), torch.eye(1))
    >>> two_cluster(layer, num_tokens=3, radius=2.0).x.flatten().abs()
    tensor([2., 2., 2.])
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    directions = eigen_directions(one)
    if not directions:
        raise InputError(f"not available: `A` of head {head} has no nonzero real eigenvalue.")
    best = directions[0]
    name = f"two_cluster ({best.case} eigenvalue)"
    x, value = _along(one, best, num_tokens, [radius])
    return Construction(x.to(layer.query), name, "Proposition 3.4", _CASTIN, value, head=head)


def gamma_star(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """One token against all others, in the best pair of directions; no eigenvalue is needed.

    ``x_1 = R Av / |Av|``, the rest at ``R v``, where ``v`` maximises
    ``gamma* = (|Av| - <v, Av>) / 2`` over ``|v| <= 1``. For ``V = I``
    ``sigma >= sqrt(n-1) p (1 + 2 gamma* R^2 (1-p))``.

    Holds for any head of dot-product attention with ``A != 0``, unmasked or causal, without
    rotary embedding.

    Args:
        layer: The layer.
        head: Index of the query head.
        num_tokens: At least 2.
        radius: Largest token norm ``R``.

    Returns:
        The input; the moving token is ``x_1``.

    Raises:
        InputError: As `two_cluster`.

    Source: derived here (``docs/theory/inputs.md``), after Proposition 3.4 of [castin2024].
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    x, value = _along(one, _star(one, head), num_tokens, [radius])
    return Construction(
        x.to(layer.query), "gamma_star", "after Proposition 3.4", DERIVED, value, head=head
    )


def unbalanced(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """Two unbalanced clusters at the norm ``r <= R`` where they do most for this ``n``.

    The two clusters of `two_cluster` or `gamma_star` at norm ``r``. Sigma is largest near
    ``n - 1 = exp(2 gamma r^2)``, where the others give half of their attention to ``x_1``:
    ``sigma ~ (gamma / 2) r^2 exp(gamma r^2)``. Beyond, attention saturates and sigma falls.

    Holds as `gamma_star`. ``r`` is the best of 60 values and of the closed form.

    Args:
        layer: The layer.
        head: Index of the query head.
        num_tokens: At least 2.
        radius: Largest token norm allowed.

    Returns:
        The input; for numbers of tokens beyond memory see `weighted_two_atoms`.

    Raises:
        InputError: As `two_cluster`.

    Source: Proposition 3.6 of [castin2024], solved for ``r``.
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    candidates = []
    for way in [*eigen_directions(one)[:1], _star(one, head)]:
        known = math.sqrt(math.log(num_tokens - 1) / (2 * way.gamma))
        radii = [min(known, radius), *(radius * (i + 1) / _RADII for i in range(_RADII))]
        candidates.append(_along(one, way, num_tokens, [r for r in radii if r > 0]))
    x, value = max(candidates, key=lambda one: one[1])
    return Construction(
        x.to(layer.query), "unbalanced", "Proposition 3.6", _CASTIN, value, head=head
    )


def weighted_two_atoms(
    layer: Attention,
    *,
    head: int = 0,
    radius: float,
    num_tokens: int | None = None,
    factor: float = 1.0,
) -> Repeated:
    """Sigma of the layer on the clusters of Proposition 3.6, for any ``n``, in O(1).

    ``n - 1 = factor · exp(2 gamma R^2)`` tokens (rounded up) against one at radius ``R``. For
    ``V = I`` and factor 1, ``sigma / ((gamma / 2) R^2 exp(gamma R^2)) -> 1`` like
    ``1 + 1 / (gamma R^2)``; factor 3 has the larger limit ``3 sqrt(3) / 4 = 1.299``.

    Holds for unmasked dot-product attention without rotary embedding; biases, other heads and
    the projection are measured with it.

    Args:
        layer: The layer.
        head: Index of the query head whose ``A`` places the tokens.
        radius: Largest token norm ``R``.
        num_tokens: Take this ``n`` instead.
        factor: See above.

    Returns:
        `Repeated`, exact up to rounding: moves of equal tokens against each other included.

    Raises:
        InputError: As `two_cluster`, and for masked layers.

    Source: Proposition 3.6 and Lemma C.8 of [castin2024]; splitting derived here
    (``docs/theory/inputs.md``).
    """
    one = head_for(layer, head, 2 if num_tokens is None else num_tokens, radius, least=2)
    way = (eigen_directions(one) or [_star(one, head)])[0]
    if num_tokens is None:
        exponent = 2 * way.gamma * radius**2
        if exponent > 600:
            raise InputError(f"not available: exp({exponent:.4g}) tokens are beyond float64.")
        num_tokens = 1 + max(1, math.ceil(factor * math.exp(exponent)))
    atoms = radius * torch.stack([way.first, way.rest])
    return repeated_tokens(layer, atoms, (1, num_tokens - 1))


def _star(one: Head, head: int) -> Direction:
    best = star_direction(one)
    if best is None:
        raise InputError(f"not available: `A` of head {head} is zero.")
    return best


def _along(
    one: Head, way: Direction, num_tokens: int, radii: Sequence[float]
) -> tuple[Tensor, float]:
    """Tokens along a direction, and the gain of the first one; the best radius and sign."""
    # Without a bias both signs are the same up to symmetry.
    signs = (1.0, -1.0) if one.norm_b > 0 else (1.0,)
    sizes = torch.tensor([sign * r for r in radii for sign in signs], dtype=torch.float64)[:, None]
    gains = first_token_gain(one, sizes * way.first, sizes * way.rest, num_tokens)
    best = int(gains.nan_to_num(nan=-1.0).argmax())
    tokens = pair(sizes[best] * way.first, sizes[best] * way.rest, num_tokens)
    return tokens, float(gains[best])
