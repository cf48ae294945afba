"""Directions along which a token or two draw the attention of all others, from ``A`` and ``V``.

With ``x_1 = R first`` and every other token at ``R rest``, the others' logit of ``x_1``
exceeds their logit of themselves by ``2 gamma R^2``. The larger ``gamma``, the fewer tokens
of norm at most ``R`` are needed for a large sigma (Proposition 3.4 of [castin2024]).
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
_SCREENING, _KEPT = 40, 6  # after so many iterations only the best go on
_RANDOM_STARTS = 32
# Eigenvalues below this share of ‖A‖ are zeros of a matrix of low rank, up to rounding.
_ZERO = 1e-10


Found = TypeVar("Found", "Placement | None", Tensor)
_HEADS_KEPT = 256  # whose directions are not searched for again


def _kept(search: Callable[[Head], Found]) -> Callable[[Head], Found]:
    """A search whose last answers are kept, each for the numbers in a head's matrices."""
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
        return copy.deepcopy(kept[0])  # whoever asked may write on it

    return found


@dataclass(frozen=True)
class Placement:
    """Where to put one token and the rest, in units of the radius."""

    gamma: float  # half the logit gap at radius 1: ``<A rest, first - rest> = 2 gamma``
    first: Float[Tensor, " d"]  # unit vector, ``(d,)``
    rest: Float[Tensor, " d"]  # vector of norm at most 1, ``(d,)``
    case: str  # ``negative``, ``positive`` (Proposition 3.4) or ``star`` (derived here)


def eigen_directions(head: Head) -> list[Placement]:
    """The two cases of Proposition 3.4, best first; none where ``A`` has no use for them.

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


@_kept
def star_direction(head: Head) -> Placement | None:
    """``gamma* = max_{|v| <= 1} (|Av| - <v, Av>) / 2``: needs no real eigenvalue.

    ``rest = v``, ``first = Av / |Av|``. The two cases of Proposition 3.4 are ``v`` an
    eigenvector of norm 1 or 1/2, so ``gamma* >= gamma``; also ``gamma* <= ‖A‖``.

    Holds for any ``A`` other than 0 (None there). The problem is not concave: what is
    returned is the best of many ascents, and any of them is a valid direction. Each step
    maximises a minorant, ``|Av| >= <Av, s>`` and the quadratic form linearised after its
    largest eigenvalue has been taken out, so no ascent ever goes down.

    Source: derived here (``docs/theory/inputs.md``).
    """
    if head.norm_a == 0:
        return None
    basis = _span(head.query, head.key)  # on which A and its transpose act
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
    # A real matrix in real Schur form: real eigenvalues have no imaginary part at all.
    keep = (values.imag == 0) & (values.real.abs() > _ZERO * head.norm_a)
    full = vectors.real[:, keep].T @ head.key
    return values.real[keep], full / full.norm(dim=1, keepdim=True)


def _span(*matrices: Tensor) -> Float[Tensor, "d r"]:
    """Orthonormal basis of what the rows of matrices span; all of the space if they are many."""
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


@_kept
def value_direction(head: Head) -> Float[Tensor, " d"]:
    """A unit vector ``u`` that makes ``|Vu| |A^T u|`` large: best of several ascents.

    A fixed point of ``u <- (V^T V / |Vu|^2 + A A^T / |A^T u|^2) u``, normalised, where the
    gradient of ``log |Vu| + log |A^T u|`` is along ``u``. Any ``u`` serves the constructions.
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
    """Largest gain of moving ``x_1 = first`` alone, all others at ``rest``; row 1 not read.

    Row ``i >= 2`` moves by ``p_i V (I + (1-p_i) s a^T) e`` with ``s = first - rest``,
    ``a = A rest + b`` and ``p_i = 1 / (1 + (N_i - 1) exp(-<a, s>))``, so the gain is the root
    of ``lam_max(sum_i p_i^2 (I + c_i s a^T)^T V^T V (I + c_i s a^T))``, ``c_i = 1 - p_i``: a
    lower bound of sigma.

    Holds for one head, unmasked or causal, biases of the queries included.

    Source: derived here (``docs/theory/inputs.md``), after Lemma C.7 of [castin2024].
    """
    a, s = _reads(head, rest), first - rest
    others = head.visible(num_tokens)[1:].to(torch.float64) - 1
    p = torch.sigmoid((a * s).sum(-1, keepdim=True) - others.log())
    zero, one, two = ((p**2 * (1 - p) ** j).sum(-1)[..., None, None] for j in range(3))
    moved = s @ head.value.T
    if not head.layer.causal:  # all rows are alike: the Gram matrix of the outputs is a smaller one
        drawn, size = a @ head.value.T, a.square().sum(-1)[..., None, None]
        square, gram = moved[..., :, None] * moved[..., None, :], head.value @ head.value.T
        cross = moved[..., :, None] * drawn[..., None, :]
    else:  # everything happens in the span of the rows of V and of a, which is one of the keys'
        basis = _span(head.value, head.key)
        v, a = head.value @ basis, a @ basis
        size, gram = moved.square().sum(-1)[..., None, None], v.T @ v
        square = a[..., :, None] * a[..., None, :]
        cross = (moved @ v)[..., :, None] * a[..., None, :]
    gram = zero * gram + one * (cross + cross.mT) + two * size * square
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()


def split_gain(head: Head, first: Tensor, rest: Tensor, num_tokens: int) -> float:
    """Largest gain of moving equal tokens at ``rest`` against each other, ``x_1`` at ``first``.

    ``‖V C A‖ = p (1-p) |V s| |A^T s|``, the covariance of a row being ``p (1-p) s s^T``.

    Holds for one unmasked head with at least three tokens; 0 otherwise.

    Source: derived here (``docs/theory/inputs.md``).
    """
    if head.layer.causal or num_tokens < 3:
        return 0.0
    s = first - rest
    p = float(torch.sigmoid(_reads(head, rest) @ s - torch.tensor(float(num_tokens - 1)).log()))
    return p * (1 - p) * float((head.value @ s).norm() * ((s @ head.key.T) @ head.query).norm())


@dataclass(frozen=True)
class OpposedPair:
    """Where to put two tokens and the rest, and what moves of the two against each other gain."""

    first: Float[Tensor, " d"]  # ``f + z``
    second: Float[Tensor, " d"]  # ``f - z``
    rest: Float[Tensor, " d"]
    gain: float  # a lower bound of sigma, see `pair_directions`


_DIRECTIONS, _SHARES, _ANGLES = 8, 16, 48  # of the rest, of its norm in the radius, of the pair
_ROWS = 256  # whose weights stand for those of all rows while a grid is compared
_NOTHING = 1e-9  # of what the sizes of V and a allow: a gain up to here may be rounding


def pair_directions(head: Head, num_tokens: int, radius: float) -> OpposedPair | None:
    """Two tokens ``f ± z`` that share the attention of all others, which are at ``r``.

    With ``a = A r + b`` and ``<a, z> = 0``, row ``i >= 3`` gives each of the two the weight
    ``p_i = 1 / (2 + (N_i - 2) exp(-<a, f - r>))``. Moves by ``± a / (√2 |a|)`` leave the mean of
    the two values as it is and shift weight from one to the other, so that
    ``sigma >= √2 |V z| |a| √(Σ_{i>=3} p_i²)``: at most ``√(n/2) R² ‖A‖ ‖V‖`` without bias, and near
    it for large ``R² ‖A‖`` where V is as large on what is perpendicular to ``a`` and ``r`` does not
    draw its own attention. ``f`` is along ``a`` and ``f ± z`` of norm R; ``r``, its norm and the
    angle between are the best of a grid, ``r`` along singular vectors of ``A``.

    Holds for one head, unmasked or causal, biases of the queries included, up to rounding. None
    with fewer than three tokens or where nothing is gained, as in one dimension.

    Source: derived here (``docs/theory/inputs.md``).
    """
    basis = _span(head.query, head.key)
    a = (head.key @ basis).T @ (head.query @ basis)
    toward = torch.linalg.svd(a).Vh[:_DIRECTIONS] @ basis.T
    toward = torch.cat([toward, -toward]) if head.norm_b > 0 else toward
    shares = torch.arange(1, _SHARES + 1, dtype=torch.float64) / _SHARES
    angles = torch.arange(1, _ANGLES + 1, dtype=torch.float64) * torch.pi / (2 * _ANGLES)
    sides = torch.linalg.svd(head.value, full_matrices=False).Vh[:4]
    inside = radius * (1 - UNIT)  # so that rounding leaves no token outside
    best, most = None, 0.0
    for direction in toward if num_tokens > 2 else ():
        rest = inside * shares[:, None] * direction
        pull = _reads(head, rest)
        size = pull.norm(dim=1, keepdim=True)
        y = pull / size.clamp_min(1e-300)
        z = sides - (y @ sides.T)[..., None] * y[:, None]
        z = z / z.norm(dim=-1, keepdim=True).clamp_min(1e-6)  # nothing is left of one along ``a``
        moved = (z @ head.value.T).norm(dim=-1).amax(1, keepdim=True)
        gap = inside * size * angles.cos() - (pull * rest).sum(1, keepdim=True)
        gain = moved * size * _shared(head, gap, num_tokens, _ROWS) * inside * angles.sin()
        top = int(gain.argmax())
        if float(gain.flatten()[top]) > most:
            most = float(gain.flatten()[top])
            best = rest[top // _ANGLES], y[top // _ANGLES], angles[top % _ANGLES]
    if best is None:
        return None
    rest, y, angle = best
    z = torch.linalg.svd(head.value - torch.outer(head.value @ y, y), full_matrices=False).Vh[0]
    for _ in range(2):  # once may leave rounding of what was along ``a``, which is not small beside
        z = z - (z @ y) * y
        z = z / z.norm().clamp_min(1e-300)
    f, z = inside * angle.cos() * y, inside * angle.sin() * z
    a = _reads(head, rest)
    shared = _shared(head, a @ (f - rest), num_tokens)
    moved = float((head.value @ z).norm()) - UNIT * head.size_v * float(z.norm())
    gain = math.sqrt(2) * max(moved, 0.0) * float(a.norm() * shared)
    nothing = _NOTHING * head.size_v * float(z.norm() * a.norm())
    if not gain > nothing or abs(float(z @ y)) > 8 * UNIT * radius:
        return None
    return OpposedPair(f + z, f - z, rest, gain)


def _reads(head: Head, token: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """``A r + b``: what the keys of others are multiplied with."""
    return (token @ head.query.T + head.query_bias) @ head.key


def _shared(
    head: Head, gap: Float[Tensor, "*b"], num_tokens: int, most: int | None = None
) -> Float[Tensor, "*b"]:
    """``√(Σ_{i>=3} p_i²)``, the rows being at ``gap`` below the two tokens that they read.

    With ``most``, about: so many rows stand for all.
    """
    seen, times = head.visible(num_tokens)[2:].unique(return_counts=True)
    if most is not None and len(seen) > most:
        some = torch.linspace(0, len(seen) - 1, most).long()
        seen, times = seen[some], times[some] * (len(seen) / most)
    p = 1 / (2 + (seen.to(torch.float64) - 2) * (-gap[..., None]).exp())
    return (p.square() * times).sum(-1).sqrt()
