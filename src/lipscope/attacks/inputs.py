"""Worst-case inputs for attention: constructions from a head's ``A`` and ``V``, and their maximum.

A head is given by its index. Errors say "not available" if a construction does not apply.
Constructions without a cited paper are derived here: ``docs/theory/inputs.md``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attacks.ascent import ascend, check_size, clamp
from lipscope.attention import Attention, DotProduct, L2Attention, joined, phi_inverse
from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.linalg import (
    USUAL_STEPS,
    TopSingular,
    together,
    top_singular,
    top_singular_batch,
)
from lipscope.measures import (
    Grouped,
    Repeated,
    grouped,
    repeated_tokens,
    uniform_gain,
    weighted,
)
from lipscope.theorems import (
    DERIVED,
    Head,
    NotApplicableError,
    Placement,
    eigen_directions,
    first_token_gain,
    heads_of,
    pair_directions,
    split_gain,
    star_direction,
    value_direction,
)

PredictionKind = Literal["lower", "exact", "limit"]


@dataclass(frozen=True)
class Construction:
    """An input and the predicted sigma there."""

    x: Float[Tensor, "n d"]  # the tokens, ``(n, d)``, in the layer's dtype and on its device
    name: str  # name of the construction, with the case if there are several
    statement: str  # source statement
    cite: str  # key of the bibliography, or "derived here"
    # prediction for sigma of the head's contribution (of the whole layer if ``head`` is None) with
    # its biases, or None
    predicted: float | None
    # whether ``predicted`` is a proved lower bound, the exact value, or the limit of large radii
    # (possibly not reached)
    kind: PredictionKind = "lower"
    head: int | None = None  # the head it is built for; None if independent of heads


def head_for(layer: Attention, head: int, num_tokens: int, radius: float, *, least: int) -> Head:
    """A head of a dot-product layer, after checking that constructions apply."""
    check_size(num_tokens, radius, least=least)
    if not isinstance(layer, DotProduct):
        raise InputError(
            f"not available: made for dot-product attention. Found `{type(layer).__name__}`."
        )
    layer.check_head(head)
    if layer.positional:
        raise InputError("not available: logits depend on position; use ascent.")
    try:
        (one,) = heads_of(layer.head(head))
        if one.layer.mask is not None:
            one.allowed(num_tokens)  # checks the mask's number of tokens
        one.causal_or_unmasked()
    except NotApplicableError as why:
        raise InputError(f"not available: {why}.") from None
    return one


def pair(first: Tensor, rest: Tensor, num_tokens: int) -> Tensor:
    """One token, then ``n - 1`` equal ones."""
    return torch.cat([first[None], rest.expand(num_tokens - 1, -1)])


_CASTIN = "castin2024"
_RADII = 60  # radii tried if the best one is not known in closed form


def two_cluster(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """One token against all others, along a real eigenvector of ``A``.

    With ``gamma = max(-gamma_min, gamma_max / 8)`` over the real eigenvalues of ``A``:
    ``x_1 = R u``, the rest at ``-R u`` (first case) or ``R u / 2`` (second). Then for ``V = I``
    ``sigma >= sqrt(n-1) p``, ``p = 1 / (1 + (n-1) exp(-2 gamma R^2))``; ``predicted`` is the
    sharper ``sqrt(n-1) p ‖V (I + 2 gamma R^2 (1-p) u u^T)‖``, and with a causal mask the same sum
    over rows with their numbers of visible tokens.

    Holds for one head of dot-product attention, unmasked or causal, without rotary embedding.

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
    x, value = _tokens_along(one, best, num_tokens, [radius])
    return Construction(x.to(layer.query), name, "Proposition 3.4", _CASTIN, value, head=head)


def gamma_star(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """One token against all others, along the best pair of directions, without eigenvalues.

    ``x_1 = R Av / |Av|``, the rest at ``R v``, where ``v`` maximises
    ``gamma* = (|Av| - <v, Av>) / 2`` over ``|v| <= 1``. For ``V = I``
    ``sigma >= sqrt(n-1) p (1 + 2 gamma* R^2 (1-p))``.

    Holds for any head of dot-product attention with ``A != 0``, unmasked or causal, without
    rotary embedding.

    Source: derived here (``docs/theory/inputs.md``), after Proposition 3.4 of [castin2024].
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    x, value = _tokens_along(one, _star(one, head), num_tokens, [radius])
    return Construction(
        x.to(layer.query), "gamma_star", "after Proposition 3.4", DERIVED, value, head=head
    )


def unbalanced(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """Two unbalanced clusters at the best norm ``r <= R`` for this ``n``.

    The two clusters of `two_cluster` or `gamma_star` at norm ``r``. Sigma is largest near
    ``n - 1 = exp(2 gamma r^2)``, where the others give half of their attention to ``x_1``:
    ``sigma ~ (gamma / 2) r^2 exp(gamma r^2)``. Beyond, attention saturates and sigma falls.

    Hypotheses as for `gamma_star`. ``r`` is the best of 60 values and of the closed form.

    Source: Proposition 3.6 of [castin2024], solved for ``r``.
    """
    one = head_for(layer, head, num_tokens, radius, least=2)
    candidates = []
    for way in [*eigen_directions(one)[:1], _star(one, head)]:
        known = math.sqrt(math.log(num_tokens - 1) / (2 * way.gamma))
        radii = [min(known, radius), *(radius * (i + 1) / _RADII for i in range(_RADII))]
        candidates.append(_tokens_along(one, way, num_tokens, [r for r in radii if r > 0]))
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
    the projection are included.

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


def _star(one: Head, head: int) -> Placement:
    best = star_direction(one)
    if best is None:
        raise InputError(f"not available: `A` of head {head} is zero.")
    return best


def _tokens_along(
    one: Head, way: Placement, num_tokens: int, radii: Sequence[float]
) -> tuple[Tensor, float]:
    """Tokens along a direction, and the gain of the first one, for the best radius and sign."""
    # Without a bias both signs are equivalent by symmetry.
    signs = (1.0, -1.0) if one.norm_b > 0 else (1.0,)
    sizes = torch.tensor([sign * r for r in radii for sign in signs], dtype=torch.float64)[:, None]
    gains = first_token_gain(one, sizes * way.first, sizes * way.rest, num_tokens)
    best = int(gains.nan_to_num(nan=-1.0).argmax())
    tokens = pair(sizes[best] * way.first, sizes[best] * way.rest, num_tokens)
    return tokens, float(gains[best])


# --- one special token, clusters of equal tokens, or all tokens equal


_DRAWS = 64


def large_radius(
    layer: Attention, *, head: int = 0, num_tokens: int, radius: float
) -> Construction:
    """Tokens on a sphere, many of which attend to the same one: the regime of large radii.

    If row i has one largest logit, at ``m_i``, the Jacobian at ``R X`` tends exponentially to
    ``E -> (V e_{m_i})_i``, so that ``sigma -> ‖V‖ sqrt(max_j #{i : m_i = j})``.

    Holds for one head, unmasked or causal, without rotary embedding, in the limit; the best
    limit of 64 random draws is used.

    Source: Theorems 3.7 and 4.5 of [castin2024]; the value of the limit is derived here.
    """
    one = head_for(layer, head, num_tokens, radius, least=1)
    gen = torch.Generator().manual_seed(0)
    basis, allowed, best, most = torch.cat([one.query, one.key]), one.allowed(num_tokens), None, 0
    gram = basis @ basis.T
    for _ in range(_DRAWS):
        mix = torch.randn(num_tokens, len(basis), generator=gen, dtype=torch.float64)
        size = (mix @ gram * mix).sum(1, keepdim=True).clamp_min(0).sqrt()
        mix = torch.where(size > 0, radius * mix / size, 0.0)
        queries, keys = (mix @ gram).split(len(one.query), dim=1)
        logits = (queries @ keys.T).masked_fill(~allowed, -torch.inf)
        count = int(logits.argmax(1).bincount().max())
        if count > most:
            best, most = clamp(mix @ basis, radius), count
    assert best is not None
    value = one.norm_v * math.sqrt(most)
    name, where = "large_radius", "Theorem 4.5" if layer.causal else "Theorem 3.7"
    return Construction(best.to(layer.query), name, where, _CASTIN, value, "limit", head)


def dominant_token(
    layer: Attention, *, head: int = 0, num_tokens: int, radius: float
) -> Construction:
    """One token of norm ``R``, and small ones that give it half of their attention.

    ``x_1 = R u``, the rest at ``c A^T u / |A^T u|`` with ``c R |A^T u| = log(n-1)`` (at most
    ``R``), so that ``p = 1/2``. ``u`` makes ``|Vu| |A^T u|`` large: each small token's output
    moves with its own query by ``p (1-p) |V s| |A^T s|``, ``s = x_1 - x_j``.

    Holds for one head, unmasked or causal, without rotary embedding.

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


def opposed_pair(
    layer: Attention, *, head: int = 0, num_tokens: int, radius: float
) -> Construction:
    """Two tokens of norm ``R`` that share the attention of all others.

    ``x_1, x_2 = f ± z``, the rest at ``r``, with ``a = A r + b`` perpendicular to ``z``. Moving
    them against each other along ``a`` shifts the weights of all other rows at once:
    ``sigma >= √2 |V z| |a| √(Σ_{i>=3} p_i²)``, which for large ``R² ‖A‖`` may approach
    ``√(n/2) R² ‖A‖ ‖V‖``.

    Holds for one head, unmasked or causal, without rotary embedding, with at least three tokens.

    Source: derived here (``docs/theory/inputs.md``).
    """
    one = head_for(layer, head, num_tokens, radius, least=3)
    found = pair_directions(one, num_tokens, radius)
    if found is None:
        raise InputError(f"not available: no two tokens attract the attention of head {head}.")
    rest = found.rest.expand(num_tokens - 2, -1)
    x = torch.cat([found.first[None], found.second[None], rest]).to(layer.query)
    statement = "two opposed tokens"
    return Construction(x, "opposed_pair", statement, DERIVED, found.gain, head=head)


def quadratic(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """A token at the origin that attends to others at ``± R u``: sigma grows like ``R^2``.

    Its attention is uniform, so ``sigma >= ‖V (I / n + C A)‖`` with ``C`` the covariance of the
    tokens: ``(n-1)/n R^2 u u^T`` for odd ``n``. This family also shows that dot-product attention
    is not Lipschitz. The origin is the last token under a causal mask, where it attends to all
    others, and the first one otherwise.

    Holds for one head, unmasked or causal, without rotary embedding; with a query bias ``b``
    the row's actual weights are used.

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

    ``P`` is uniform over the visible tokens: ``‖P‖ = 1`` unmasked, and the norm of the Cesàro
    matrix (below 2) with a causal mask.

    Exact for every variant of attention, with all heads; with a rotary embedding the rows are not
    uniform and nothing is predicted.

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


def l2_opposed(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """A token at the origin and the others at ``± r u``, ``r |W u| / k^(1/4) = c``.

    ``c^2 = 1 + phi^{-1}(n-1)`` with ``phi(x) = x e^{x+1}`` maximises the mean squared distance
    ``sum_j P_1j |x_j - x_1|^2 = phi^{-1}(n-1)`` that token 1 sees. For ``D = H = 1``, unit
    weights and odd ``n`` the infinity norm of the Jacobian is
    ``4 phi^{-1} - 1 + 2 / (1 + phi^{-1})``, within 2 of the upper bound. ``predicted`` is
    ``‖V (P_11 I + 2 C W W^T / sqrt(k))‖ <= sigma``. ``u`` is the top right singular vector of
    the queries, ``r`` at most the radius; the origin comes last under a causal mask.

    Holds for one head of `L2Attention` without a mask other than the causal one.

    Source: Theorem 3.2 of [kim2021]; the configuration is derived here
    (``docs/theory/inputs.md``).
    """
    check_size(num_tokens, radius, least=2)
    if not isinstance(layer, L2Attention):
        raise InputError(f"not available: made for L2 attention. Found `{type(layer).__name__}`.")
    one = layer.head(head).in_double()
    if layer.mask is not None and not bool(layer.mask.all()):
        raise InputError("not available: its mask is neither empty nor causal.")
    value = one.value if one.output is None else one.output @ one.value
    _, size, right = torch.linalg.svd(one.query, full_matrices=False)
    if not size[0] > 0:
        raise InputError(f"not available: the queries of head {head} are zero.")
    c = math.sqrt(1 + phi_inverse(float(num_tokens - 1)))
    u, r = right[0], min(radius, c / float(size[0]))
    at = torch.zeros(num_tokens, dtype=torch.float64)
    at[1 : 1 + num_tokens // 2], at[1 + num_tokens // 2 :] = r, -r
    p = torch.softmax(-((at * size[0]) ** 2), dim=0)
    spread = float(p @ at**2 - (p @ at) ** 2)
    block = p[0] * value + 2 * spread * float(size[0]) ** 2 * torch.outer(value @ u, u)
    norm = float(torch.linalg.matrix_norm(block, 2))
    x = at[:, None] * u
    x = (x.flip(0) if layer.causal else x).to(layer.query)
    return Construction(x, "l2_opposed", "Theorem 3.2", "kim2021", norm, head=head)


# --- the worst input

# One function per construction; those that depend on a head take its index.
_BY_HEAD = (two_cluster, gamma_star, unbalanced, dominant_token, opposed_pair, quadratic)
PER_HEAD: dict[str, Callable[..., Construction]] = {
    build.__name__: build for build in (*_BY_HEAD, large_radius, l2_opposed)
}
PER_LAYER: dict[str, Callable[..., Construction]] = {"constant": constant}
_TOGETHER, _MEMORY = 12, 2**28  # number of inputs with joint products, and bytes for them
_CLIMBED = 4  # number of kinds of inputs, the worst ones, that start an ascent
KNOWN, DRAWN = "ascent from known inputs", "ascent from random starts"


@dataclass(frozen=True, repr=False)
class WorstInput(Shown):
    """An input with sigma of the whole layer there, or the reason why it is not available."""

    name: str  # of the construction, `KNOWN`, `DRAWN`, or ``given`` for an input from the caller
    statement: str  # source statement
    cite: str  # key of the bibliography, or "derived here"
    head: int | None = None  # head that determined the tokens, or None
    # lower end of the interval; None if not available or not finite
    sigma: float | None = None
    upper: float | None = None  # upper end, valid with probability ``0.99``
    radius_max: float | None = None  # largest token norm
    # as in `Construction`: for the head's contribution, or the whole layer
    predicted: float | None = None
    x: Float[Tensor, "n d"] | None = None  # the input, or None
    v: Float[Tensor, "n d"] | None = None  # top right singular vector, for `confirm`, or None
    reason: str | None = None  # why it is not available, or the solver's note, or None


def worst(
    layer: Attention,
    *,
    num_tokens: int,
    radius: float,
    names: Collection[str] | None = None,
    restarts: int = 4,
    steps: int = 40,
    given: Sequence[Tensor] = (),
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> list[WorstInput]:
    """Sigma of the whole layer at all known bad inputs, worst first.

    These are all constructions for all heads, the ``given`` inputs, the result of an ascent from
    the worst inputs of the four worst kinds (``given`` is one kind), and of an ascent from random
    starts. Holds for every layer; unavailable constructions come last, with the reason.
    Constructions are compared in float32; the best of each kind, and those that overflow, are
    measured in the layer's precision. Twelve heads of width 32 at n = 64 take about ten seconds on
    two cores.

    Args:
        layer: The layer; the map is ``attention``, all heads with the projection.
        restarts: Random starts of the second ascent.
        given: Further inputs ``(n, d)``, such as real text; tokens beyond the radius are scaled.
        tol: Tolerance of the measurements.

    Returns:
        One row per construction and head, per given input, and per ascent. The first one is
        measured again from an independent start, since the largest of many intervals fails more
        often.
    """
    check_size(num_tokens, radius)
    rough = copy.deepcopy(layer).float()  # twice as fast
    built = list(_built(layer, num_tokens, radius, names))
    rows = [row for row in built if row.x is None]
    rows += _solved(rough, [row for row in built if row.x is not None], tol, generator)
    best = {row.name: row for row in sorted(rows, key=_by_sigma, reverse=True)}

    def again(row: WorstInput) -> WorstInput:
        return _solved(layer, [row], tol, generator)[0]

    rows = [
        again(row) if row.x is not None and (row is best[row.name] or row.sigma is None) else row
        for row in rows
    ]
    about = ("given", "the input that was given, within the radius", "")
    rows += [again(WorstInput(*about, x=clamp(x, radius))) for x in given]
    rows.sort(key=_by_sigma)
    if steps:
        size: dict[str, Any] = {"num_tokens": num_tokens, "radius": radius, "steps": steps}
        known = dict[str, Tensor]()
        for row in rows:
            if row.x is not None and row.sigma is not None:
                known.setdefault(row.name, row.x)
        starts = {KNOWN: (0, [*known.values()][:_CLIMBED]), DRAWN: (restarts, [])}
        for name, (count, inputs) in starts.items():
            if count or inputs:
                found = ascend(layer, **size, restarts=count, start=inputs, generator=generator)
                row = WorstInput(name, "gradient ascent", DERIVED, x=found.x)
                rows.append(_with_top(row, found.top))
    rows.sort(key=_by_sigma)
    first = rows[0]
    if first.x is not None and first.sigma is not None:  # from an independent start
        first = again(first)
    return [first, *rows[1:]]


def _built(
    layer: Attention, num_tokens: int, radius: float, names: Collection[str] | None
) -> Iterator[WorstInput]:
    """All constructions for all heads, unmeasured, or why they are not available."""
    size = {"num_tokens": num_tokens, "radius": radius}
    for name, build in PER_LAYER.items():
        if names is None or name in names:
            yield _attempted(name, None, partial(build, layer, **size))
    for name, build in PER_HEAD.items():
        if names is not None and name not in names:
            continue
        heads = range(layer.num_heads)
        made = [_attempted(name, h, partial(build, layer, head=h, **size)) for h in heads]
        # Report what fails for the whole layer only once.
        if len(made) > 1 and made[0].reason and len({one.reason for one in made}) == 1:
            made = [replace(made[0], head=None)]
        yield from made


def _attempted(name: str, head: int | None, build: Callable[[], Construction]) -> WorstInput:
    try:
        one = build()
    except InputError as why:
        return WorstInput(name, "", "", head, reason=str(why).removeprefix("not available: "))
    about = (one.name, one.statement, one.cite, one.head)
    return WorstInput(*about, predicted=one.predicted, x=one.x)


def _solved(
    layer: Attention, rows: Sequence[WorstInput], tol: float, generator: torch.Generator | None
) -> list[WorstInput]:
    """The same inputs, with sigma."""
    inputs = [row.x for row in rows if row.x is not None]
    tops = _tops(layer, inputs, tol, generator)
    return [_with_top(row, top) for row, top in zip(rows, tops, strict=True)]


def _with_top(row: WorstInput, top: TopSingular) -> WorstInput:
    assert row.x is not None
    radius = float(torch.linalg.vector_norm(row.x, dim=-1).max())
    found = replace(row, radius_max=radius, reason=top.note)
    if top.status == "non_finite":
        return replace(found, sigma=None, upper=None, v=None)
    return replace(found, sigma=top.sigma, upper=top.upper, v=top.v)


def _tops(
    layer: Attention, inputs: Sequence[Tensor], tol: float, generator: torch.Generator | None
) -> list[TopSingular]:
    """Sigma of one layer at several inputs, at the cost of their distinct tokens if possible.

    Small inputs of equal size have joint products.
    """
    inputs = [x.to(layer.query.dtype) for x in inputs]
    if inputs:
        with torch.no_grad():
            layer.project(inputs[0])  # may refuse this many tokens, which groups hide
    groups = [grouped(layer, x) for x in inputs]
    sizes = [len(x if g is None else g.tokens) for x, g in zip(inputs, groups, strict=True)]
    found = dict[int, TopSingular]()
    for n in sorted(set(sizes)):
        group = [i for i, size in enumerate(sizes) if size == n]
        kept = 2 * USUAL_STEPS * n * layer.query.shape[1] + 4 * layer.num_heads * n**2
        most = _MEMORY // (kept * layer.query.element_size())
        most = max(1, min(_TOGETHER, most))
        for k in range(0, len(group), most):
            part = group[k : k + most]
            sites = [(inputs[i], groups[i]) for i in part]
            found |= zip(part, _tops_of(layer, sites, tol, generator), strict=True)
    return [found[i] for i in range(len(inputs))]


def _tops_of(
    layer: Attention,
    sites: Sequence[tuple[Tensor, Grouped | None]],
    tol: float,
    generator: torch.Generator | None,
) -> list[TopSingular]:
    """Sigma at inputs with the same number of distinct tokens."""
    at = [
        layer.linearise(x) if g is None else layer.linearise(g.tokens, log_weights=g.log_weights)
        for x, g in sites
    ]
    weights = torch.stack([x.new_zeros(len(x)) if g is None else g.log_weights for x, g in sites])
    shared = together(lambda part: joined([at[i] for i in part]), at) if len(at) > 1 else None
    if shared is None:
        pairs = zip(at, weights, strict=True)
        tops = [top_singular(weighted(op, w), tol=tol, generator=generator) for op, w in pairs]
    else:
        op = weighted(shared, weights)
        tops = top_singular_batch(op, [generator] * len(at), tol=tol)
    return [
        top if g is None else replace(top, u=g.spread(top.u), v=g.spread(top.v))
        for top, (_, g) in zip(tops, sites, strict=True)
    ]


def _by_sigma(row: WorstInput) -> float:
    return float("inf") if row.sigma is None else -row.sigma
