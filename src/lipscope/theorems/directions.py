"""Token directions that attract the attention of all others, computed from ``A`` and ``V``.

With ``x_1 = R first`` and every other token at ``R rest``, the others' logit for ``x_1``
exceeds their logit for themselves by ``2 gamma R^2``. A larger ``gamma`` needs fewer tokens
of norm at most ``R`` for a large sigma (Proposition 3.4 of [castin2024]).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.theorems.head import UNIT, Head

_ITERATIONS = 500
_SETTLED = 1e-8
_SCREENING, _KEPT = 40, 6  # iterations of all ascents, number of ascents continued
_RANDOM_STARTS = 32
# Eigenvalues below this share of ‖A‖ are zero up to rounding (low rank).
_ZERO = 1e-10


Found = TypeVar("Found", "Placement | None", Tensor)
_HEADS_KEPT = 256  # cache size, in heads


def _cached(search: Callable[[Head], Found]) -> Callable[[Head], Found]:
    """Cache the last results of a search, keyed by the entries of a head's matrices."""
    answers = dict[bytes, tuple[Found]]()

    @functools.wraps(search)
    def found(head: Head) -> Found:
        held = hashlib.sha256()
        for matrix in (head.query, head.key, head.value):
            held.update(repr(tuple(matrix.shape)).encode())
            held.update(matrix.detach().contiguous().numpy().data)
        if (kept := answers.get(held.digest())) is None:
            with torch.inference_mode(False), torch.no_grad():
                kept = answers[held.digest()] = (search(head),)
            if len(answers) > _HEADS_KEPT:
                answers.pop(next(iter(answers)), None)
        return copy.deepcopy(kept[0])  # the caller may modify it

    return found


@dataclass(frozen=True)
class Placement:
    """Positions of one token and of all others, in units of the radius."""

    gamma: float  # half the logit gap at radius 1: ``<A rest, first - rest> = 2 gamma``
    first: Float[Tensor, " d"]  # unit vector, ``(d,)``
    rest: Float[Tensor, " d"]  # vector of norm at most 1, ``(d,)``
    case: str  # ``negative``, ``positive`` (Proposition 3.4) or ``star`` (derived here)


def eigen_directions(head: Head) -> list[Placement]:
    """The two cases of Proposition 3.4, best first; empty if neither applies to ``A``.

    ``gamma = -gamma_min`` with ``first = u``, ``rest = -u``, and ``gamma = gamma_max / 8``
    with ``first = u``, ``rest = u / 2``, where ``gamma_min`` and ``gamma_max`` are the
    extreme real eigenvalues of ``A`` and ``u`` the unit eigenvector.

    Holds for any ``A``; only cases with ``gamma > 0`` are returned.

    Source: Proposition 3.4 and Lemma C.7 of [castin2024].
    """
    values, vectors = real_eigenpairs(head)
    found = []
    if len(values):
        low, high = int(values.argmin()), int(values.argmax())
        if values[low] < 0:
            u = vectors[low]
            found.append(Placement(-float(values[low]), u, -u, "negative"))
        if values[high] > 0:
            u = vectors[high]
            found.append(Placement(float(values[high]) / 8, u, u / 2, "positive"))
    return sorted(found, key=lambda one: -one.gamma)


@_cached
def star_direction(head: Head) -> Placement | None:
    """``gamma* = max_{|v| <= 1} (|Av| - <v, Av>) / 2``; requires no real eigenvalue.

    ``rest = v``, ``first = Av / |Av|``. The two cases of Proposition 3.4 are ``v`` an
    eigenvector of norm 1 or 1/2, so ``gamma* >= gamma``; also ``gamma* <= ‖A‖``.

    Holds for any ``A`` other than 0 (then None). The problem is not concave: the result is the
    best of many ascents, each of which gives a valid direction. Each step maximises a minorant,
    ``|Av| >= <Av, s>`` with the quadratic form linearised after removing its largest
    eigenvalue, so ascents are monotone.

    Source: derived here (``docs/theory/inputs.md``).
    """
    if head.norm_a == 0:
        return None
    basis = _span(head.query, head.key)  # the subspace on which A and its transpose act
    a = (head.key @ basis).T @ (head.query @ basis)
    symmetric = (a + a.T) / 2
    top = max(float(torch.linalg.eigvalsh(symmetric)[-1]), 0.0) + 1e-12 * head.norm_a
    v = _starts(head, basis, a)
    for i in range(_ITERATIONS):
        before, av = v, v @ a.T
        if i == _SCREENING:
            before = v = v[_half_gap(v, av).topk(min(_KEPT, len(v))).indices]
            av = v @ a.T
        s = av / av.norm(dim=1, keepdim=True).clamp_min(1e-300)
        v = (s @ a + 2 * (top * v - v @ symmetric)) / (2 * top)
        v = v / v.norm(dim=1, keepdim=True).clamp_min(1.0)
        if float((v - before).abs().max()) < _SETTLED:
            break
    av = v @ a.T
    gain = _half_gap(v, av)
    best = int(gain.argmax())
    first = basis @ av[best]
    return Placement(float(gain[best]), first / first.norm(), basis @ v[best], "star")


def _half_gap(v: Tensor, av: Tensor) -> Tensor:
    return (av.norm(dim=1) - (v * av).sum(1)) / 2


def real_eigenpairs(head: Head) -> tuple[Float[Tensor, " m"], Float[Tensor, "m d"]]:
    """Nonzero real eigenvalues of ``A`` and their unit eigenvectors, from ``k x k``.

    ``Q K^T w = lambda w`` gives ``A (K^T w) = lambda K^T w``.
    """
    values, vectors = torch.linalg.eig(head.query @ head.key.T)
    # In real Schur form, real eigenvalues have exactly zero imaginary part.
    keep = (values.imag == 0) & (values.real.abs() > _ZERO * head.norm_a)
    full = vectors.real[:, keep].T @ head.key
    return values.real[keep], full / full.norm(dim=1, keepdim=True)


def _span(*matrices: Tensor) -> Float[Tensor, "d r"]:
    """Orthonormal basis of the joint row space of matrices, or of the full space if large."""
    rows = torch.cat(matrices)
    if rows.shape[0] >= rows.shape[1]:
        return torch.eye(rows.shape[1], dtype=rows.dtype)
    return torch.linalg.qr(rows.T).Q


def _starts(head: Head, basis: Tensor, a: Tensor) -> Tensor:
    eigen = real_eigenpairs(head)[1] @ basis
    singular = torch.linalg.svd(a).Vh[:8]
    gen = torch.Generator().manual_seed(0)
    random = torch.randn(_RANDOM_STARTS, a.shape[0], generator=gen, dtype=a.dtype)
    random = random / random.norm(dim=1, keepdim=True)
    return torch.cat([eigen, eigen / 2, singular, -singular, random])


@_cached
def value_direction(head: Head) -> Float[Tensor, " d"]:
    """A unit vector ``u`` with large ``|Vu| |A^T u|``: the best of several ascents.

    A fixed point of ``u <- (V^T V / |Vu|^2 + A A^T / |A^T u|^2) u``, normalised, where the
    gradient of ``log |Vu| + log |A^T u|`` is along ``u``. Constructions accept any ``u``.
    """

    def pull(u: Tensor) -> Tensor:  # A^T u, for rows u
        return (u @ head.key.T) @ head.query

    gen = torch.Generator().manual_seed(0)
    width = head.key.shape[1]
    random = torch.randn(8, width, generator=gen, dtype=head.key.dtype)
    u = torch.cat([torch.linalg.svd(head.value, full_matrices=False).Vh[:4], head.key[:4], random])
    best, most = u[-1] / u[-1].norm(), 0.0
    for _ in range(100):
        u = u / u.norm(dim=1, keepdim=True).clamp_min(1e-300)
        vu, au = u @ head.value.T, pull(u)
        gain = vu.norm(dim=1) * au.norm(dim=1)
        top = int(gain.argmax())
        if float(gain[top]) > most:
            best, most = u[top], float(gain[top])
        back = (au @ head.query.T) @ head.key
        u = (vu @ head.value) / (vu**2).sum(1, keepdim=True).clamp_min(1e-300) + back / (au**2).sum(
            1, keepdim=True
        ).clamp_min(1e-300)
    return best


def first_token_gain(
    head: Head, first: Float[Tensor, "*b d"], rest: Float[Tensor, "*b d"], num_tokens: int
) -> Float[Tensor, "*b"]:
    """Largest gain of moving only ``x_1 = first``, with all others at ``rest``; row 1 excluded.

    Row ``i >= 2`` moves by ``p_i V (I + (1-p_i) s a^T) e`` with ``s = first - rest``,
    ``a = A rest + b`` and ``p_i = 1 / (1 + (N_i - 1) exp(-<a, s>))``, so the gain is the root
    of ``lam_max(sum_i p_i^2 (I + c_i s a^T)^T V^T V (I + c_i s a^T))``, ``c_i = 1 - p_i``: a
    lower bound of sigma.

    Holds for one head, unmasked or causal, including query biases.

    Source: derived here (``docs/theory/inputs.md``), after Lemma C.7 of [castin2024].
    """
    a, s = _pull(head, rest), first - rest
    others = head.visible(num_tokens)[1:].to(torch.float64) - 1
    p = torch.sigmoid((a * s).sum(-1, keepdim=True) - others.log())
    zero, one, two = ((p**2 * (1 - p) ** j).sum(-1)[..., None, None] for j in range(3))
    moved = s @ head.value.T
    if not head.layer.causal:  # all rows are equal: use the smaller Gram matrix of the outputs
        drawn, size = a @ head.value.T, a.square().sum(-1)[..., None, None]
        square, gram = moved[..., :, None] * moved[..., None, :], head.value @ head.value.T
        cross = moved[..., :, None] * drawn[..., None, :]
    else:  # restrict to the span of the rows of V and of a, which lies in the keys' row space
        basis = _span(head.value, head.key)
        v, a = head.value @ basis, a @ basis
        size, gram = moved.square().sum(-1)[..., None, None], v.T @ v
        square = a[..., :, None] * a[..., None, :]
        cross = (moved @ v)[..., :, None] * a[..., None, :]
    gram = zero * gram + one * (cross + cross.mT) + two * size * square
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()


def split_gain(head: Head, first: Tensor, rest: Tensor, num_tokens: int) -> float:
    """Largest gain of moving equal tokens at ``rest`` against each other, ``x_1`` at ``first``.

    ``‖V C A‖ = p (1-p) |V s| |A^T s|``, as the covariance of a row is ``p (1-p) s s^T``.

    Holds for one unmasked head with at least three tokens; 0 otherwise.

    Source: derived here (``docs/theory/inputs.md``).
    """
    if head.layer.causal or num_tokens < 3:
        return 0.0
    s = first - rest
    p = float(torch.sigmoid(_pull(head, rest) @ s - torch.tensor(float(num_tokens - 1)).log()))
    return p * (1 - p) * float((head.value @ s).norm() * ((s @ head.key.T) @ head.query).norm())


@dataclass(frozen=True)
class OpposedPair:
    """Positions of two tokens and of all others, and the gain of moving the two in opposition."""

    first: Float[Tensor, " d"]  # ``f + z``
    second: Float[Tensor, " d"]  # ``f - z``
    rest: Float[Tensor, " d"]
    gain: float  # a lower bound of sigma, see `pair_directions`


_DIRECTIONS, _SHARES, _ANGLES = 8, 16, 48  # grid: directions and norms of the rest, pair angles
_ROWS = 256  # rows that represent all rows while comparing grid points
_NEGLIGIBLE = 1e-9  # relative to the sizes of V and a: smaller gains may be rounding errors


def pair_directions(head: Head, num_tokens: int, radius: float) -> OpposedPair | None:
    """Two tokens ``f ± z`` that share the attention of all others, located at ``r``.

    With ``a = A r + b`` and ``<a, z> = 0``, row ``i >= 3`` assigns each of the two the weight
    ``p_i = 1 / (2 + (N_i - 2) exp(-<a, f - r>))``. Moves by ``± a / (√2 |a|)`` leave the mean of
    the two values unchanged and shift weight from one to the other, so that
    ``sigma >= √2 |V z| |a| √(Σ_{i>=3} p_i²)``: at most ``√(n/2) R² ‖A‖ ‖V‖`` without a bias,
    nearly attained for large ``R² ‖A‖`` if ``V`` attains its norm orthogonally to ``a`` and
    ``r`` does not attract its own attention. ``f`` is along ``a`` and ``f ± z`` has norm R; ``r``,
    its norm and the angle come from a grid search, with ``r`` along singular vectors of ``A``.

    Holds for one head, unmasked or causal, including query biases, up to rounding. None with
    fewer than three tokens or without any gain, as in one dimension.

    Source: derived here (``docs/theory/inputs.md``).
    """
    basis = _span(head.query, head.key)
    a = (head.key @ basis).T @ (head.query @ basis)
    toward = torch.linalg.svd(a).Vh[:_DIRECTIONS] @ basis.T
    toward = torch.cat([toward, -toward]) if head.norm_b > 0 else toward
    shares = torch.arange(1, _SHARES + 1, dtype=torch.float64) / _SHARES
    angles = torch.arange(1, _ANGLES + 1, dtype=torch.float64) * torch.pi / (2 * _ANGLES)
    sides = torch.linalg.svd(head.value, full_matrices=False).Vh[:4]
    inside = radius * (1 - UNIT)  # rounding must not move a token outside
    best, most = None, 0.0
    for direction in toward if num_tokens > 2 else ():
        rest = inside * shares[:, None] * direction
        pull = _pull(head, rest)
        size = pull.norm(dim=1, keepdim=True)
        y = pull / size.clamp_min(1e-300)
        z = sides - (y @ sides.T)[..., None] * y[:, None]
        z = z / z.norm(dim=-1, keepdim=True).clamp_min(1e-6)  # vectors along ``a`` vanish
        moved = (z @ head.value.T).norm(dim=-1).amax(1, keepdim=True)
        gap = inside * size * angles.cos() - (pull * rest).sum(1, keepdim=True)
        gain = moved * size * _shared_weight(head, gap, num_tokens, _ROWS) * inside * angles.sin()
        top = int(gain.argmax())
        if float(gain.flatten()[top]) > most:
            most = float(gain.flatten()[top])
            best = rest[top // _ANGLES], y[top // _ANGLES], angles[top % _ANGLES]
    if best is None:
        return None
    rest, y, angle = best
    z = torch.linalg.svd(head.value - torch.outer(head.value @ y, y), full_matrices=False).Vh[0]
    for _ in range(2):  # a second pass removes rounding errors along ``a``
        z = z - (z @ y) * y
        z = z / z.norm().clamp_min(1e-300)
    f, z = inside * angle.cos() * y, inside * angle.sin() * z
    a = _pull(head, rest)
    shared = _shared_weight(head, a @ (f - rest), num_tokens)
    moved = float((head.value @ z).norm()) - UNIT * head.size_v * float(z.norm())
    gain = math.sqrt(2) * max(moved, 0.0) * float(a.norm() * shared)
    negligible = _NEGLIGIBLE * head.size_v * float(z.norm() * a.norm())
    if not gain > negligible or abs(float(z @ y)) > 8 * UNIT * radius:
        return None
    return OpposedPair(f + z, f - z, rest, gain)


def _pull(head: Head, token: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """``A r + b``, the vector whose inner products with other tokens are the logits."""
    return (token @ head.query.T + head.query_bias) @ head.key


def _shared_weight(
    head: Head, gap: Float[Tensor, "*b"], num_tokens: int, most: int | None = None
) -> Float[Tensor, "*b"]:
    """``√(Σ_{i>=3} p_i²)`` for rows whose own logit is ``gap`` below that of the two tokens.

    ``most``: approximate with this many rows.
    """
    seen, times = head.visible(num_tokens)[2:].unique(return_counts=True)
    if most is not None and len(seen) > most:
        index = torch.linspace(0, len(seen) - 1, most).long()
        seen, times = seen[index], times[index] * (len(seen) / most)
    p = 1 / (2 + (seen.to(torch.float64) - 2) * (-gap[..., None]).exp())
    return (p.square() * times).sum(-1).sqrt()
