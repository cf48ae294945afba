"""Quadratic forms: eigenvalue bounds, positive parts, and minima over balls.

In float64, with rounding errors of eigenvalues on the safe side.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

SLACK = 1e-11  # rounding of eigenvalues relative to the largest one, with a margin
_FEW = 1e-10  # relative eigenvalue below which a thin root omits rows
_NONE = 1e-14  # relative rounding of an eigendecomposition
_TINY = 1e-150  # norms below it are raised to it, since their squares underflow
_LARGE = 160  # width from which a Cholesky factor verifies an eigenvalue estimate
_CHOLESKY = 2.3e-16  # rounding of a Cholesky factor, times rows and columns
_VECTORS, _ROUNDS, _STEP = 6, 2, 1e-3


class OutOfReachError(Exception):
    """No bound holds on a ball this large: a norm's input may vanish, or a bound overflows."""


def _finite(m: Tensor) -> Tensor:
    if not bool(m.isfinite().all()):
        raise OutOfReachError
    return m


def top_value(gram: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b"]:
    """Largest eigenvalue of positive semidefinite matrices, overestimated by ``1e-3`` at most."""
    _finite(gram)
    if gram.ndim == 2 and len(gram) >= _LARGE:
        return _top_by_cholesky(gram)
    values = torch.linalg.eigvalsh(gram)
    return (values[..., -1] + SLACK * values.abs().amax(-1)).clamp_min(0)


@cache
def _start(m: int) -> Tensor:
    generator = torch.Generator().manual_seed(m)
    return torch.randn(m, _VECTORS, generator=generator, dtype=torch.float64)


def _top_by_cholesky(gram: Float[Tensor, "m m"]) -> Tensor:
    """Bound eigenvalues by a shift ``s`` for which ``s - M`` has a Cholesky factor."""
    m = len(gram)
    size = _finite(gram.diagonal().sum())
    if not bool(size > 0):
        return gram.abs().sum()
    v = _start(m).to(gram.dtype)
    scaled = gram / size  # avoids overflow in products
    for _ in range(_ROUNDS):
        v = scaled @ (scaled @ (scaled @ torch.linalg.qr(v).Q))
    v = gram @ torch.linalg.qr(v).Q
    low = torch.linalg.eigvalsh(v.T @ (v / size))[-1].clamp_min(0).sqrt() * size.sqrt()
    step, eye = _STEP, torch.eye(m, dtype=gram.dtype)
    hidden = SLACK + _CHOLESKY * m * (m + 1)
    while True:
        shift = low * (1 + step) + SLACK * size
        if int(torch.linalg.cholesky_ex(shift * (1 - hidden) * eye - gram).info) == 0:
            return shift
        step *= 2


def about(form: Tensor | RowForm) -> Tensor:
    """Rough largest eigenvalue of a nonnegative form: for choosing weights, not a bound."""
    v = _start(len(form))[:, :1]
    for _ in range(4):
        v = form @ v
        v = v / (v.norm() + 1e-300)
    return (form @ v).norm()


def norm_above(m: Float[Tensor, "*b k p"]) -> Float[Tensor, "*b"]:
    """Upper bounds of spectral norms."""
    return top_value(m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m).sqrt()


def weighted_gram(a: Float[Tensor, "k p"], w: Float[Tensor, " k"]) -> Float[Tensor, "p p"]:
    """``sum_k w_k a_k a_k^T``."""
    return (a * w[:, None]).T @ a


class RowForm:
    """``sum_k w_k r_k r_k^T + M`` in blocks of rows; sums and multiples act on the weights.

    Forms with the same rows can be added, scaled and applied to vectors before a single matrix
    is formed.
    end, and not one each.
    """

    def __init__(
        self,
        rows: Sequence[Float[Tensor, "_ p"]],
        weights: Sequence[Float[Tensor, " _"] | None],
        rest: Float[Tensor, "p p"] | None = None,
    ) -> None:
        self.rows, self.weights, self.rest = rows, weights, rest

    def _summed(
        self, of_rows: Callable[[Tensor, Tensor], Tensor], of_rest: Callable[[Tensor], Tensor]
    ) -> Tensor:
        pairs = zip(self.rows, self.weights, strict=True)
        found = [of_rows(rows, w) for rows, w in pairs if w is not None]
        return reduce(operator.add, found if self.rest is None else [*found, of_rest(self.rest)])

    def __len__(self) -> int:
        return self.rows[0].shape[1]

    def __add__(self, other: RowForm) -> RowForm:
        pairs = [*zip(self.weights, other.weights, strict=True), (self.rest, other.rest)]
        *weights, rest = (y if x is None else x if y is None else x + y for x, y in pairs)
        return RowForm(self.rows, weights, rest)

    def __rmul__(self, factor: float | Float[Tensor, ""]) -> RowForm:
        *weights, rest = (None if w is None else factor * w for w in (*self.weights, self.rest))
        return RowForm(self.rows, weights, rest)

    def __matmul__(self, v: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        return self._summed(lambda rows, w: rows.T @ (w[:, None] * (rows @ v)), lambda m: m @ v)

    def trace(self) -> Float[Tensor, ""]:
        """``sum_k w_k |r_k|^2 + tr M``."""
        return self._summed(lambda rows, w: w @ rows.square().sum(1), torch.trace)

    def matrix(self) -> Float[Tensor, "p p"]:
        """The matrix of the form."""
        return self._summed(weighted_gram, lambda m: m)


_Form = TypeVar("_Form", Tensor, RowForm)


def top_bilinear(left: Float[Tensor, "*#b k p"], right: Float[Tensor, "*#b k p"]) -> Tensor:
    """``>= sup |<L e, R e>|`` over unit ``e``, the norm of ``S = (L^T R + R^T L) / 2``.

    With the Gram matrix ``C C^T`` of all rows of ``L`` and ``R`` and their swap ``F``, ``S`` has
    the eigenvalues of ``C^T F C / 2``. Enlarging the Gram matrix to cover rounding corresponds to
    rows with more coordinates, which cannot decrease the norm.
    """
    sizes = norm_above(left), norm_above(right)
    both = zip((left, right), sizes, strict=True)
    units = (m / size.clamp_min(_TINY)[..., None, None] for m, size in both)
    rows = torch.cat(torch.broadcast_tensors(*units), -2)
    m, p = rows.shape[-2:]
    eye = torch.eye(m, dtype=rows.dtype)
    c = torch.linalg.cholesky(rows @ rows.mT + 2 * _CHOLESKY * (m * (m + 1) + p) * eye)
    most = torch.linalg.eigvalsh(c.mT @ c.roll(m // 2, -2)).abs().amax(-1) / 2
    return sizes[0] * sizes[1] * (most + SLACK).clamp_max(1)


def positive_part(h: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b m m"]:
    """``[H]_+ >= H``: negative eigenvalues set to 0."""
    values, vectors = torch.linalg.eigh(_finite(h))
    return (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT


def thin_root(h: Float[Tensor, "b m m"]) -> tuple[Float[Tensor, "b k m"], Float[Tensor, " b"]]:
    """``R`` and ``s`` with ``H <= R^T R + s``, with as many rows as the largest rank.

    ``s`` is the largest omitted eigenvalue of ``H``: at most ``1e-10`` of its largest one.
    """
    values, vectors = torch.linalg.eigh(_finite(h))
    values = values.clamp_min(0)
    kept = values > _FEW * values[:, -1:]
    left = torch.where(kept, 0.0, values).amax(-1)
    left = torch.where(left > _NONE * values[:, -1], left, 0.0)
    rows = vectors.mT * torch.where(kept, values, 0.0).sqrt()[..., None]
    return rows[:, -max(1, int(kept.sum(-1).max())) :], left


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a number, or of the sum of a tensor, at ``x``."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(f(x).sum(), x)
    return found


def jacobian(f: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"]) -> Tensor:
    """``(*out, n, d)`` of a batched function, from one batch entry per output."""
    with torch.no_grad():
        shape = f(x[None])[0].shape
    count = shape.numel()
    return gradient(lambda z: f(z).reshape(count, count).diagonal(), x.expand(count, -1, -1)).view(
        *shape, *x.shape
    )


def ellipsoid(e: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b m m"]:
    """Symmetric ``T`` with ``T T^T >= E``: rounding of the largest axis is added to all axes."""
    wide = e + SLACK * top_value(e)[..., None, None] * torch.eye(e.shape[-1], dtype=e.dtype)
    values, vectors = torch.linalg.eigh(_finite(wide))
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT


def young(*sizes: float) -> list[float]:
    """Weights with sum 1 that minimise ``sum_k sizes_k^2 / w_k``: proportional to ``sizes``.

    ``|sum_k v_k|^2 <= sum_k |v_k|^2 / w_k`` for any such weights (Cauchy-Schwarz).
    """
    least = 1e-9 * max(*sizes, 1e-300)
    total = sum(max(size, least) for size in sizes)
    return [max(size, least) / total for size in sizes]


def added(forms: Sequence[_Form]) -> _Form:
    """A form ``>= (sum_k F_k(f)^(1/2))^2`` for nonnegative forms."""
    w = young(*(float(about(form)) ** 0.5 for form in forms))
    whole, *others = ((1 / share) * form for form, share in zip(forms, w, strict=True))
    for one in others:
        whole = whole + one
    return whole


def least_in_ball(
    value: float, g: Float[Tensor, " m"], b: Float[Tensor, "m m"], radius: float
) -> tuple[float, Tensor]:
    """Lower bound of ``value + <g, f> + <f, B f> / 2`` over ``|f| <= radius``, and a minimiser.

    By weak duality ``value - <g, (B + μ)^(-1) g> / 2 - μ radius² / 2`` is a lower bound for every
    ``μ >= 0`` with ``B + μ > 0``; the best one attains the minimum (trust region).
    """
    values, vectors = torch.linalg.eigh(_finite(b))
    values = values - SLACK * values.abs().max()
    along = vectors.T @ g
    floor = max(0.0, -float(values[0]))
    low = floor + 1e-9 * (1e-140 + floor + float(g.norm()) / radius)
    high = max(2 * low, float(g.norm()) / radius + floor) * (1 + 1e-9)
    for _ in range(60):
        mid = (low * high) ** 0.5
        if float((along / (values + mid)).square().sum()) > radius**2:
            low = mid
        else:
            high = mid
    point = -(vectors @ (along / (values + high)))
    below = value - float((along.square() / (values + high)).sum() + high * radius**2) / 2
    return below, point


def least_in_balls(
    value: float, g: Float[Tensor, " m"], b: Float[Tensor, "m m"], radius: float, balls: int
) -> float:
    """Lower bound of the same form if each of several blocks of ``f`` is within ``radius``.

    Weak duality with a multiplier for each block; any with ``B + diag(mu) > 0`` is valid, and a
    descent finds good ones.
    """
    width, eye = len(g) // balls, torch.eye(len(g), dtype=g.dtype)
    _finite(b)

    def dual(log: Tensor) -> Tensor:
        shift = b + torch.diag(log.exp().repeat_interleave(width))
        shift = shift - SLACK * shift.detach().norm() * eye  # exceeds the rounding error
        factor, bad = torch.linalg.cholesky_ex(shift)
        if int(bad):
            return log.sum() * 0 - torch.inf
        along = torch.linalg.solve_triangular(factor, g[:, None], upper=False)
        return value - along.square().sum() / 2 - radius**2 / 2 * log.exp().sum()

    floor = max(0.0, -float(torch.linalg.eigvalsh(b)[0]))
    size = g.view(balls, width).norm(dim=1)
    log = (size / radius + floor * 1.001 + 1e-12 * (1 + float(size.max()))).log()
    best, rate, kept = -torch.inf, 0.3, log
    for _ in range(60):
        at = log.clone().requires_grad_(True)
        found = dual(at)
        if not bool(found.isfinite()) or float(found.detach()) < best:
            rate /= 2
            log = (log + kept) / 2 if best > -torch.inf else log + 0.1
            continue
        best, kept = float(found.detach()), log
        (slope,) = torch.autograd.grad(found, at)
        log = log + rate * slope / (slope.abs().max() + 1e-300)
    return best
