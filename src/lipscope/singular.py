"""The top singular value of an operator, with a two-sided interval.

The lower end is a Ritz value, hence never above the truth; the upper end holds with
probability ``1 - delta`` over the random start (``docs/theory/interval.md``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from lipscope.errors import InputError
from lipscope.krylov import Bidiagonal, golub_kahan
from lipscope.operator import Operator

SolverStatus = Literal["converged", "tight", "max_steps", "non_finite"]

DEFAULT_MEMORY = 2**30  # bytes
# Rounding allowance of the upper end: once converged the exact bound collapses onto sigma
# and would fail by rounding alone (measured: 2.3e-7 in float32, 6e-16 in float64).
SLACK = {torch.float32: 1e-5, torch.float64: 1e-12}
# Residuals below this are rounding, so a smaller tolerance could never be met.
SMALLEST_TOL = {torch.float32: 1e-5, torch.float64: 1e-12}
_SMALLEST_BASIS = 8  # steps between restarts, whatever the memory


@dataclass(frozen=True)
class TopSingular:
    """The top singular triplet of an operator and what is known about it.

    Attributes:
        sigma: Largest Ritz value: a lower bound on the top singular value.
        upper: Upper bound, valid with probability ``1 - delta`` over the start.
        delta: Failure probability of ``upper``.
        u: Left singular vector, ``out_shape``, unit norm.
        v: Right singular vector, ``in_shape``, unit norm.
        solver_residual: ``r / (sqrt(2) sigma)``: some singular value lies within this
            relative distance of ``sigma``.
        products: Products with the operator or its transpose.
        status: ``converged`` (residual met the tolerance), ``tight`` (the interval did),
            ``max_steps`` (neither; the interval is still valid), ``non_finite``.
        note: Advice in words, or None.
    """

    sigma: float
    upper: float
    delta: float
    u: Tensor
    v: Tensor
    solver_residual: float
    products: int
    status: SolverStatus
    note: str | None = None


@dataclass(frozen=True)
class _Cycle:
    """What one finished restart cycle tells the upper bound of the next (THEORY H8)."""

    alpha: np.ndarray
    beta: np.ndarray
    weights: np.ndarray  # top right singular vector of B in the basis, all positive


def top_singular(
    op: Operator,
    *,
    tol: float = 1e-3,
    delta: float = 1e-6,
    tight: bool = False,
    max_steps: int = 300,
    memory: int = DEFAULT_MEMORY,
    generator: torch.Generator | None = None,
) -> TopSingular:
    """Largest singular value of ``op`` by Golub–Kahan from one random start.

    ``sigma = max ‖J e‖ / ‖e‖`` over the Krylov space. The run stops when
    ``r / √2 ≤ tol · sigma``, where ``r`` is the one-sided residual, or with ``tight=True``
    when ``upper ≤ (1 + tol) · sigma``.

    Holds for any real operator. That the residual is small proves that *some* singular
    value is near ``sigma``; only ``upper`` speaks of the largest one.

    Args:
        op: Operator, of shape ``in_shape -> out_shape``.
        tol: Relative tolerance; at least 1e-5 in float32 and 1e-12 in float64.
        delta: Failure probability of ``upper``, in (0, 1).
        tight: Go on until the interval, not only the residual, meets ``tol``.
        max_steps: Most steps (two products each).
        memory: Bytes for the basis; a longer run restarts from its best vector.
        generator: Source of the random start; torch's global one if None.

    Returns:
        TopSingular record. Non-convergence is a status, never an exception.

    Raises:
        InputError: For a tolerance or probability out of range.

    Source: derived here (``docs/theory/interval.md``), after [golub1965], [hochstenbach2013].

    >>> import torch
    >>> from lipscope.operator import linearise
    >>> scale = torch.tensor([3.0, 4.0, 5.0])
    >>> top = top_singular(linearise(lambda x: scale * x, torch.ones(3)))
    >>> f"{top.sigma:.3f} {top.status}"
    '5.000 converged'
    """
    generators = [generator]
    return top_singular_batch(
        op,
        generators,
        tol=tol,
        delta=delta,
        tight=tight,
        max_steps=max_steps,
        memory=memory,
    )[0]


def top_singular_batch(
    op: Operator,
    generators: Sequence[torch.Generator | None],
    *,
    tol: float = 1e-3,
    delta: float = 1e-6,
    tight: bool = False,
    max_steps: int = 300,
    memory: int = DEFAULT_MEMORY,
) -> list[TopSingular]:
    """`top_singular` of ``b`` operators that share their products, for example heads.

    ``op.mv`` and ``op.rmv`` take and return a leading axis of length ``b`` whose entries
    belong to different operators. Each entry has its own start and its own stop, so that
    an answer does not depend on its neighbours.

    Args:
        op: Operator whose products map ``(b, *in_shape)`` to ``(b, *out_shape)``.
        generators: One source of the random start per entry; its length is ``b``.
        tol: As in `top_singular`.
        delta: As in `top_singular`, for each entry.
        tight: As in `top_singular`.
        max_steps: As in `top_singular`.
        memory: As in `top_singular`, for the whole batch.

    Returns:
        One record per entry.

    Raises:
        InputError: As in `top_singular`.
    """
    _check(op, tol, delta)
    stop = _Stop(tol, delta, tight, op)
    b = len(generators)
    answers: list[TopSingular | None] = [None] * b
    for run, last in _restarted(op, _starts(op, generators), max_steps, memory, stop):
        for i in range(b):
            if answers[i] is None:
                answers[i] = stop.judge(run, i, last=last)
        if all(answers):
            break
    return [answer for answer in answers if answer is not None]


def _check(op: Operator, tol: float, delta: float) -> None:
    smallest = SMALLEST_TOL.get(op.dtype, 1e-2)
    if not tol >= smallest:
        raise InputError(
            f"`tol` should be at least {smallest:g} in {str(op.dtype)[6:]}. Found `tol = {tol}`."
        )
    if not 0.0 < delta < 1.0:
        raise InputError(f"`delta` should be between 0 and 1. Found `delta = {delta}`.")


def _starts(op: Operator, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One Gaussian vector per entry: its direction is uniform on the sphere.

    Drawn in float32 on the generator's own device, so that a row does not depend on the
    dtype in which it is computed.
    """
    drawn = [
        torch.randn(
            op.in_shape, generator=g, device=g.device if g is not None else torch.device("cpu")
        )
        for g in generators
    ]
    return torch.stack([x.to(op.device, op.dtype) for x in drawn])


@dataclass
class _Run:
    """A decomposition, the finished cycles before it, and the products of them all."""

    state: Bidiagonal
    cycles: list[list[_Cycle]]  # one list per entry of the batch
    products: int


def _restarted(
    op: Operator, start: Tensor, max_steps: int, memory: int, stop: _Stop
) -> Iterator[tuple[_Run, bool]]:
    """Golub–Kahan steps, restarted from the top Ritz vector when the basis is full."""
    b = start.shape[0]
    bytes_per_step = b * (op.in_size + math.prod(op.out_shape)) * start.element_size()
    room = max(_SMALLEST_BASIS, memory // max(bytes_per_step, 1) - 1)
    cycles: list[list[_Cycle]] = [[] for _ in range(b)]
    steps = 0
    while True:
        capacity = min(room, max_steps - steps)
        state = None
        for state in golub_kahan(op, start, capacity):
            last = steps + state.steps >= max_steps
            yield _Run(state, cycles, 2 * steps + state.products), last
        assert state is not None
        steps += state.steps
        start = torch.stack([stop.close_cycle(state, i, cycles[i]) for i in range(b)])
        start = start.reshape(b, *op.in_shape)


class _Stop:
    """Reads a decomposition: Ritz value, residual, interval, and whether to stop."""

    def __init__(self, tol: float, delta: float, tight: bool, op: Operator) -> None:
        self.tol, self.delta, self.tight, self.op = tol, delta, tight, op
        self.threshold = start_threshold(op.in_size, delta)

    def judge(self, run: _Run, i: int, *, last: bool) -> TopSingular | None:
        """The answer for entry ``i``, or None to go on."""
        state = run.state
        alpha, beta = state.alpha[i].numpy(), state.beta[i].numpy()
        if not (np.isfinite(alpha).all() and np.isfinite(beta).all()):
            return self._non_finite(run)
        theta, left, right = _ritz(alpha, beta)
        residual = beta[-1] * abs(left[-1])
        small = residual <= math.sqrt(2) * self.tol * theta
        if not (last or small):
            return None
        upper = self._upper(run, i, theta)
        within = upper <= (1 + self.tol) * theta
        exhausted = alpha[-1] == 0.0 or beta[-1] == 0.0
        if self.tight and not (last or within or exhausted):
            return None
        status, note = self._status(small=small, within=within, exhausted=exhausted)
        return TopSingular(
            sigma=theta,
            upper=upper,
            delta=self.delta,
            u=self._vector(state.u[i], left, self.op.out_shape),
            v=self._vector(state.v[i, :-1], right, self.op.in_shape),
            solver_residual=residual / (math.sqrt(2) * theta) if theta > 0 else 0.0,
            products=run.products,
            status=status,
            note=note,
        )

    def _status(
        self, *, small: bool, within: bool, exhausted: bool
    ) -> tuple[SolverStatus, str | None]:
        if self.tight and within:
            return "tight", None
        if not self.tight and small:
            return "converged", None
        if exhausted:
            return (
                "max_steps",
                "the Krylov space is exhausted to rounding, so more steps cannot narrow the "
                "interval: use float64 or a larger `delta`",
            )
        return (
            "max_steps",
            "steps ran out before the tolerance was met; the interval is valid but wide: "
            "raise `max_steps` or `tol`, or use float64",
        )

    def _upper(self, run: _Run, i: int, theta: float) -> float:
        if theta == 0.0:
            return 0.0  # J x = 0 for a random x: J = 0 with probability one
        slack = 1 + SLACK.get(self.op.dtype, 1e-2)
        if run.state.steps >= self.op.in_size and not run.cycles[i]:
            return theta * slack  # the Krylov space is the whole space
        alpha, beta = run.state.alpha[i].numpy(), run.state.beta[i].numpy()
        eps = 16 * torch.finfo(self.op.dtype).eps
        factor = upper_factor(alpha, beta, run.cycles[i], theta, self.threshold, eps)
        return theta * factor * slack

    def _vector(self, basis: Tensor, weights: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        vector = torch.from_numpy(weights).to(basis) @ basis
        norm = vector.norm()
        return (vector / norm if norm > 0 else vector).reshape(shape)

    def close_cycle(self, state: Bidiagonal, i: int, cycles: list[_Cycle]) -> Tensor:
        """Record a full cycle and return the top Ritz vector, the next start."""
        alpha, beta = state.alpha[i].numpy().copy(), state.beta[i].numpy().copy()
        _, _, right = _ritz(np.nan_to_num(alpha), np.nan_to_num(beta))
        cycles.append(_Cycle(alpha, beta, np.abs(right)))
        return torch.from_numpy(right).to(state.v) @ state.v[i, :-1]

    def _non_finite(self, run: _Run) -> TopSingular:
        nan = math.nan
        return TopSingular(
            nan,
            nan,
            self.delta,
            torch.full(self.op.out_shape, nan, dtype=self.op.dtype, device=self.op.device),
            torch.full(self.op.in_shape, nan, dtype=self.op.dtype, device=self.op.device),
            nan,
            run.products,
            "non_finite",
            "a product with the Jacobian is not finite: the map overflows at this input",
        )


def _ritz(alpha: np.ndarray, beta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Top singular triplet of the bidiagonal matrix ``B_k``."""
    matrix = np.diag(alpha) + np.diag(beta[:-1], k=1)
    left, values, right = np.linalg.svd(matrix)
    return float(values[0]), left[:, 0], right[0]


def start_threshold(size: int, delta: float) -> float:
    """``t`` with ``P(|b_1| < t) = delta`` for a coordinate of a uniform unit vector.

    ``b_1^2`` follows the Beta(1/2, (N - 1)/2) law for ``N = size``.

    >>> round(start_threshold(1, 0.1), 3)
    1.0
    """
    if size == 1:
        return 1.0
    return math.sqrt(float(betaincinv(0.5, (size - 1) / 2, delta)))


def closed_form_factor(steps: int, threshold: float) -> float:
    """``cosh(arccosh(1/t) / (2k - 1))``: the a-priori bound on ``sigma_1 / theta_k``.

    Holds with the probability of ``threshold`` for one cycle from a uniform start.
    Source: derived here (``docs/theory/interval.md``, closed form).
    """
    return math.cosh(math.acosh(1 / threshold) / (2 * steps - 1))


def upper_factor(
    alpha: np.ndarray,
    beta: np.ndarray,
    cycles: Sequence[_Cycle],
    theta: float,
    threshold: float,
    floor: float = 0.0,
) -> float:
    """Smallest ``x >= 1`` such that ``sigma_1 <= x theta`` unless the start was unlucky.

    Solves ``sum_j p_j(lam)^2 prod_c q_c(lam)^2 = 1 / t^2`` for ``lam = x^2`` in units of
    ``theta^2``, with the Lanczos polynomials ``p_0..p_k`` of ``B^T B`` and one factor ``q_c``
    per earlier cycle. The left side increases beyond the top Ritz value.

    Args:
        alpha: ``alpha_1..alpha_k`` of the last cycle.
        beta: ``beta_2..beta_{k+1}`` of the last cycle.
        cycles: Earlier cycles.
        theta: Top Ritz value of the last cycle.
        threshold: Value of `start_threshold`.
        floor: Rounding level relative to ``theta^2``: a coupling below it is not known to be
            smaller, so an invariant subspace is trusted to this level only.

    Returns:
        The factor ``x``.

    Source: derived here (``docs/theory/interval.md``, a-posteriori bound and restarts).
    """
    goal = -2 * math.log(threshold)

    def log_left(excess: np.ndarray) -> np.ndarray:
        lam = 1 + excess
        total = _log_christoffel(_Lanczos(alpha / theta, beta / theta, floor), lam)
        for cycle in cycles:
            lanczos = _Lanczos(cycle.alpha / theta, cycle.beta / theta, floor)
            total += 2 * _log_growth(lanczos, cycle.weights, lam)
        return total

    if goal <= 0:
        return 1.0
    low, high = 1e-17, max(1 / threshold**2, 2.0)
    for _ in range(6):  # each round narrows the bracket by 64 on a logarithmic grid
        grid = np.geomspace(low, high, 65)
        above = log_left(grid) >= goal
        first = int(np.argmax(above)) if above.any() else len(grid) - 1
        low, high = grid[max(first - 1, 0)], grid[first]
    factor = math.sqrt(1 + high)
    if not cycles:
        factor = min(factor, closed_form_factor(len(alpha), threshold))
    return factor


@dataclass(frozen=True)
class _Lanczos:
    """The tridiagonal matrix ``T = B^T B`` in units of ``theta^2``, and its polynomials."""

    alpha: np.ndarray
    beta: np.ndarray
    floor: float

    def polynomials(self, lam: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """``p_0, p_1, …, p_k`` at ``lam``, each as (value, log of the scale it is in)."""
        before, now = np.zeros_like(lam), np.ones_like(lam)
        scale = np.zeros_like(lam)
        yield now, scale
        link = 0.0
        for j in range(len(self.alpha)):
            diagonal = self.alpha[j] ** 2 + (self.beta[j - 1] ** 2 if j else 0.0)
            following = max(self.alpha[j] * self.beta[j], self.floor, 1e-300)
            new = ((lam - diagonal) * now - link * before) / following
            size = np.maximum(np.abs(new), 1.0)
            before, now, scale = now / size, new / size, scale + np.log(size)
            link = following
            yield now, scale


def _log_christoffel(lanczos: _Lanczos, lam: np.ndarray) -> np.ndarray:
    """``log sum_{j<=k} p_j(lam)^2``."""
    total = np.full_like(lam, -np.inf)
    for value, scale in lanczos.polynomials(lam):
        with np.errstate(divide="ignore"):
            total = np.logaddexp(total, 2 * (np.log(np.abs(value)) + scale))
    return total


def _log_growth(lanczos: _Lanczos, weights: np.ndarray, lam: np.ndarray) -> np.ndarray:
    """``log q(lam)``: how much a restart raised the start's part on the top direction."""
    total = np.full_like(lam, -np.inf)
    for weight, (value, scale) in zip(weights, lanczos.polynomials(lam), strict=False):
        with np.errstate(divide="ignore"):
            total = np.logaddexp(total, np.log(weight) + np.log(np.abs(value)) + scale)
    return total
