"""Golub-Kahan bidiagonalisation: leading singular values with two-sided intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from lipscope.display import Shown
from lipscope.errors import InputError, check_count, stated
from lipscope.linalg.operator import Operator, Together, no_operator
from lipscope.linalg.torch_state import few_threads


@dataclass(frozen=True)
class Cycle:
    """The data of a finished restart cycle that the next upper bound uses."""

    alpha: np.ndarray  # diagonal of the bidiagonal matrix
    beta: np.ndarray  # superdiagonal, and the coupling to the next vector
    weights: np.ndarray  # top right singular vector in the basis, all entries positive


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


class Evidence:
    """Evidence from a run about singular values beyond its top Ritz value.

    The function ``sum_j p_j(lam)^2 prod_c q_c(lam)^2`` of ``lam = x^2`` in units of
    ``theta^2``, with the Lanczos polynomials ``p_0..p_k`` of ``B^T B`` and one factor ``q_c``
    per earlier cycle; it increases beyond the top Ritz value. If ``sigma_1 = x theta``, the
    component of the start along the top direction was at most its inverse square root. ``alpha``
    is ``alpha_1..alpha_k`` of the last cycle, ``beta`` its ``beta_2..beta_{k+1}``. ``floor``,
    relative to ``theta^2``, is the smallest credible coupling: invariant subspaces are
    trusted to this level only.

    Source: derived here (``docs/theory/interval.md``, a-posteriori bound and restarts).
    """

    def __init__(
        self,
        alpha: np.ndarray,
        beta: np.ndarray,
        cycles: Sequence[Cycle],
        theta: float,
        floor: float = 0.0,
    ) -> None:
        self.last = _Lanczos(alpha / theta, beta / theta, floor)
        self.earlier = [
            (_Lanczos(c.alpha / theta, c.beta / theta, floor), c.weights.tolist()) for c in cycles
        ]

    def excludes(self, factor: float, threshold: float) -> bool:
        """Whether ``sigma_1 > factor theta`` requires a start component below ``threshold``."""
        excess = (factor - 1) * (factor + 1)
        return self._log(excess) >= -2 * math.log(threshold)

    def upper_factor(self, threshold: float) -> float:
        """Smallest ``x >= 1`` with ``sigma_1 <= x theta`` unless the start was unlucky.

        Solves ``sum_j p_j(lam)^2 prod_c q_c(lam)^2 = 1 / t^2``.
        """
        goal = -2 * math.log(threshold)
        if goal <= 0:
            return 1.0
        low, high = math.log(1e-17), math.log(max(1 / threshold**2, 2.0))
        while high - low > 1e-9:  # in ``log(x^2 - 1)``
            middle = (low + high) / 2
            low, high = (low, middle) if self._log(math.exp(middle)) >= goal else (middle, high)
        factor = math.sqrt(1 + math.exp(high))
        if not self.earlier:
            factor = min(factor, closed_form_factor(self.last.steps, threshold))
        return factor

    def _log(self, excess: float) -> float:
        lam = 1 + excess
        total = self.last.log_sum(lam, [1.0] * (self.last.steps + 1), 2)
        return total + sum(
            2 * lanczos.log_sum(lam, weights, 1) for lanczos, weights in self.earlier
        )


class _Lanczos:
    """The tridiagonal matrix ``T = B^T B`` in units of ``theta^2``, and its polynomials."""

    def __init__(self, alpha: np.ndarray, beta: np.ndarray, floor: float) -> None:
        self.steps = len(alpha)
        self._diagonal = (alpha**2 + np.append(0.0, beta[:-1] ** 2)).tolist()
        self._links = np.maximum(alpha * beta, max(floor, 1e-300)).tolist()

    def log_sum(self, lam: float, weights: Sequence[float], power: int) -> float:
        """``log sum_j w_j |p_j(lam)|^power``.

        With power 2 and unit weights of ``p_0..p_k``, the inverse of the Christoffel function; with
        power 1 and a cycle's weights, ``log q(lam)``: how much a restart raised the component
        along the top direction. Scalars, not arrays: faster for a single ``lam``.
        """
        before, now, scale, link, total = 0.0, 1.0, 0.0, 0.0, weights[0]
        for diagonal, following, weight in zip(
            self._diagonal, self._links, weights[1:], strict=False
        ):
            new = ((lam - diagonal) * now - link * before) / following
            size = max(abs(new), 1.0)
            unit = 1 / size  # its powers may underflow; those of the size would overflow
            before, now, scale, link = now * unit, new * unit, scale + math.log(size), following
            total = total * unit**power + weight * abs(now) ** power
        return power * scale + (math.log(total) if total else -math.inf)


# A new direction shorter than this many rounding units of the operator norm is noise: the
# subspace is numerically invariant and the recurrence ends.
_BREAKDOWN = 16.0


@dataclass(frozen=True)
class Bidiagonal:
    """The state of ``b`` parallel runs after ``k`` steps.

    ``J V_k = U_k B_k`` and ``J^T U_k = V_k B_k^T + beta_{k+1} v_{k+1} e_k^T``, with ``B_k``
    upper bidiagonal: diagonal ``alpha_1..alpha_k``, superdiagonal ``beta_2..beta_k``.
    """

    alpha: Tensor  # ``(b, k)`` float64, on the CPU
    beta: Tensor  # ``(b, k)`` float64: ``beta_2 .. beta_{k+1}``
    v: Tensor  # ``(b, k + 1, N)`` right vectors; the last one starts the next step
    u: Tensor | None  # ``(b, k, M)`` left vectors; None if not stored
    products: int  # products with ``J`` or ``J^T`` so far, for each run of the batch

    @property
    def steps(self) -> int:
        """Number of steps k."""
        return self.alpha.shape[1]

    def matrix(self) -> Tensor:
        """``B_k``, shape ``(b, k, k)``."""
        return torch.diag_embed(self.alpha) + torch.diag_embed(self.beta[:, :-1], offset=1)


def golub_kahan(
    op: Operator, start: Tensor, capacity: int, *, keep_left: bool = True
) -> Iterator[Bidiagonal]:
    """Bidiagonalise ``op`` from ``start``, yielding the decomposition after every step.

    The right vectors are reorthogonalised against all earlier ones (twice after cancellation);
    the left ones follow from the two-term recurrence, which suffices for the leading singular
    values [simon2000] and halves that cost. Memory is ``capacity (N + M)`` numbers per run, or
    ``capacity N`` without left vectors; long runs on a GPU temporarily use 64 vectors more
    to grow.

    Holds for any real operator. An exhausted run continues with zeros, so that a batch may hold
    runs of different lengths.

    Yields:
        The state after 1, 2, …, ``capacity`` steps. Its tensors are views that the next
        step extends; copy them to keep them.
    """
    b = start.shape[0]
    size_in, size_out = math.prod(op.in_shape), math.prod(op.out_shape)
    # Allocate for a usual run: the process reuses memory of this size without page faults. Longer
    # runs get their full capacity at once when the first allocation is full.
    held = capacity if capacity <= 2 * USUAL_STEPS else USUAL_STEPS
    right = torch.empty(b, held + 1, size_in, dtype=op.dtype, device=op.device)
    left = start.new_empty(b, held if keep_left else 1, size_out)
    eps = torch.finfo(op.dtype).eps * _BREAKDOWN
    alpha, beta = (torch.zeros(b, capacity, dtype=torch.float64) for _ in range(2))
    lengths, couplings = alpha.numpy(), beta.numpy()  # the same memory
    size = np.zeros(b)  # largest coefficient so far

    v = start.reshape(b, size_in)
    right[:, 0] = v / v.norm(dim=1, keepdim=True)
    before = left[:, 0]
    for k in range(capacity):
        if k == held:
            held = capacity
            right = _longer(right, capacity + 1)
            left = _longer(left, capacity) if keep_left else left
        now = left[:, k if keep_left else 0]
        w = op.matvec(right[:, k].reshape(b, *op.in_shape)).reshape(b, size_out)
        if k > 0:
            w = torch.addcmul(w, beta[:, k - 1, None].to(w), before, value=-1)
        lengths[:, k] = _normalise(w, size * eps, now)
        size = np.maximum(size, lengths[:, k])

        z = op.rmatvec(now.reshape(b, *op.out_shape)).reshape(b, size_in)
        z = torch.addcmul(z, alpha[:, k, None].to(z), right[:, k], value=-1)
        z = _orthogonalise(z, right[:, : k + 1])
        couplings[:, k] = _normalise(z, size * eps, right[:, k + 1])
        size = np.maximum(size, couplings[:, k])
        before = now
        yield Bidiagonal(
            alpha[:, : k + 1],
            beta[:, : k + 1],
            right[:, : k + 2],
            left[:, : k + 1] if keep_left else None,
            2 * (k + 1),
        )


def _longer(basis: Tensor, size: int) -> Tensor:
    """Copy the vectors into a larger basis; unwritten memory costs nothing."""
    longer = basis.new_empty(basis.shape[0], size, basis.shape[2])
    longer[:, : basis.shape[1]] = basis
    return longer


def _normalise(w: Tensor, floor: np.ndarray, out: Tensor) -> np.ndarray:
    """Norms of the rows, in float64, and unit rows in ``out``; rows below the floor become zero."""
    # Squares of small float32 entries underflow, hence the float64 sum.
    norm = torch.linalg.vector_norm(w, dim=1, dtype=torch.float64).cpu().numpy()
    alive = norm > floor
    inverse = np.divide(1.0, norm, out=np.zeros_like(norm), where=alive)
    torch.mul(w, torch.from_numpy(inverse)[:, None].to(w), out=out)
    # NaN compares false: keep it visible for the solver to report.
    return np.where(alive | np.isnan(norm), norm, 0.0)


def _orthogonalise(z: Tensor, basis: Tensor) -> Tensor:
    """Subtract from ``z``, in place, its projection on the rows of ``basis``; twice if needed."""
    before = torch.linalg.vector_norm(z, dim=1)
    z = _project_out(z, basis)
    if (torch.linalg.vector_norm(z, dim=1) < 0.7 * before).any():
        z = _project_out(z, basis)
    return z


def _project_out(z: Tensor, basis: Tensor) -> Tensor:
    # One by one: a batched product with single vectors takes ten times as long.
    for x, rows in zip(z, basis, strict=True):
        x.addmv_(rows.mT, rows @ x, alpha=-1)
    return z


SolverStatus = Literal["converged", "max_steps", "non_finite"]

DEFAULT_MEMORY = 2**30  # bytes
# Callback after every step; its argument returns the current intervals.
Watch = Callable[[Callable[[], Sequence[tuple[float, float]]]], None]
# Rounding allowance of the upper end: after convergence the exact bound collapses onto sigma and
# would fail by rounding alone (measured: 2.3e-7 in float32, 6e-16 in float64).
SLACK = {torch.float32: 1e-5, torch.float64: 1e-12}
# The allowance takes half of the tolerance, so a smaller one could not be met.
SMALLEST_TOL = {torch.float32: 2e-5, torch.float64: 2e-12}
OVERFLOWS = "a product with the Jacobian is not finite: the map overflows at this input"
_SMALLEST_BASIS = 8  # steps between restarts, whatever the memory
# Runs are rarely longer. If that many left vectors do not fit, none is stored: right vectors use
# the memory better, and the single left vector needed costs one more product.
USUAL_STEPS = 64


@dataclass(frozen=True, repr=False)
class TopSingular(Shown):
    """The top singular triplet of an operator with its interval.

    Attributes:
        sigma: Largest Ritz value: a lower bound on the top singular value.
        upper: Upper bound, valid with probability ``1 - delta`` over the start.
        delta: Failure probability of ``upper``.
        u: Left singular vector, ``out_shape``, unit norm.
        v: Right singular vector, ``in_shape``, unit norm.
        solver_residual: ``r / (sqrt(2) sigma)``: some singular value lies within this
            relative distance of ``sigma``.
        products: Products with the operator or its transpose.
        status: ``converged`` (``upper`` is at most ``(1 + tol) sigma``), ``max_steps`` (it is
            larger, but valid), ``non_finite``.
        note: Advice, or None.
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


def top_singular(
    op: Operator,
    *,
    tol: float = 1e-3,
    delta: float = 0.01,
    max_steps: int = 300,
    memory: int = DEFAULT_MEMORY,
    generator: torch.Generator | None = None,
) -> TopSingular:
    """Largest singular value of ``op`` by Golub–Kahan from one random start.

    ``sigma = max ‖J e‖ / ‖e‖`` over the Krylov space. The run stops when ``r / √2 ≤ tol · sigma``,
    where ``r`` is the one-sided residual, and ``upper`` is at most ``(1 + tol) · sigma``: the
    tolerance is then met with probability ``1 - delta``. A larger ``delta`` stops sooner; 1e-6
    takes 50% more products than 0.01, and often more precision than float32 has.

    Holds for any real operator. A small residual proves only that *some* singular value is
    near ``sigma``; only the upper ends bound the largest one.

    Args:
        tol: Relative tolerance; at least 2e-5 in float32 and 2e-12 in float64.
        delta: Failure probability of ``upper``, in (0, 1).
        max_steps: Maximum number of steps (two products each).
        memory: Bytes for the basis; a longer run restarts from its best vector.
        generator: Source of the random start; None: torch's global generator.

    Returns:
        TopSingular record. Non-convergence is a status, never an exception.

    Raises:
        InputError: If a tolerance or probability is out of range, or the operator is in half
            precision.

    Source: derived here (``docs/theory/interval.md``), after [golub1965], [hochstenbach2013].

    >>> from lipscope.linalg import linearise
    >>> scale = torch.tensor([3.0, 4.0, 5.0])
    >>> top = top_singular(linearise(lambda x: scale * x, torch.ones(3)))
    >>> f"{top.sigma:.3f} {top.status}"
    '5.000 converged'
    """
    return top_singular_batch(
        op, [generator], tol=tol, delta=delta, max_steps=max_steps, memory=memory
    )[0]


def top_singular_batch(
    op: Operator,
    generators: Sequence[torch.Generator | None],
    *,
    tol: float = 1e-3,
    delta: float = 0.01,
    max_steps: int = 300,
    memory: int = DEFAULT_MEMORY,
    watch: Watch | None = None,
    found: Callable[[int, TopSingular], None] | None = None,
) -> list[TopSingular]:
    """`top_singular` of ``b`` operators with joint products, for example heads.

    ``op.matvec`` and ``op.rmatvec`` take and return a leading axis of length ``b``, one entry per
    operator. Each entry has its own start and stopping point, so that results do not depend on
    the batch; ``memory`` is for the whole batch.

    ``watch`` is called after every step with a function that returns the current intervals
    ``(sigma, upper)``, one per entry. They depend on chance only through the start, so all
    intervals of a run hold simultaneously with probability ``1 - delta`` per entry; an exception in
    ``watch`` ends the run. ``found`` is called with each entry and its result as it finishes.
    """
    _check_solver(op, tol, delta, max_steps)
    stop = _Stop(tol, delta, op)
    b = len(generators)
    answers: list[TopSingular | None] = [None] * b
    left = op.left if isinstance(op, Together) else None
    entries = b * max(math.prod(op.in_shape), math.prod(op.out_shape))
    with few_threads(entries), torch.autocast(op.device.type, enabled=False):
        for run, last in _restarted(op, _random_starts(op, generators), max_steps, memory, stop):
            for i in range(b):
                if answers[i] is not None or (top := stop.judge(run, i, last=last)) is None:
                    continue
                answers[i] = top
                if left:
                    left.discard(i)
                if found is not None:
                    found(i, top)
            if watch is not None:
                watch(
                    lambda run=run: [
                        (one.sigma, one.upper) if one else stop.interval(run, i)
                        for i, one in enumerate(answers)
                    ]
                )
            if all(answers):
                break
    return [answer for answer in answers if answer is not None]


def _check_solver(op: Operator, tol: float, delta: float, max_steps: int) -> None:
    if not isinstance(op, Operator):
        raise no_operator(op)
    if type(max_steps) is not int or max_steps < 1:
        check_count("max_steps", max_steps)
    if op.dtype not in SLACK:
        raise InputError(
            "The operator should be in float32 or float64, whose rounding the interval covers. "
            f"Found {str(op.dtype)[6:]}; convert the layer and its input, as with `.float()`."
        )
    least, kind = SMALLEST_TOL[op.dtype], str(op.dtype)[6:]
    if isinstance(tol, str) or not least <= tol < math.inf:
        found = stated("tol", tol)
        raise InputError(f"`tol` should be at least {least:g} in {kind}. Found {found}.")
    if isinstance(delta, str) or not 0.0 < delta < 1.0:
        raise InputError(f"`delta` should be between 0 and 1. Found {stated('delta', delta)}.")


def _random_starts(op: Operator, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One Gaussian vector per entry: its direction is uniform on the sphere.

    Drawn in float64 on the generator's device, so that a row does not depend on its dtype and a
    small `delta` holds: float32 normal numbers are exactly zero once in 2^24 draws.
    """
    drawn = [
        torch.randn(op.in_shape, generator=g, device=g.device if g else "cpu", dtype=torch.float64)
        for g in generators
    ]
    return torch.stack([x.to(op.device, op.dtype) for x in drawn])


@dataclass
class _Restarts:
    """A decomposition, the finished cycles before it, and the total number of products."""

    state: Bidiagonal
    cycles: list[list[Cycle]]  # one list per entry of the batch
    products: int


def _restarted(
    op: Operator, start: Tensor, max_steps: int, memory: int, stop: _Stop
) -> Iterator[tuple[_Restarts, bool]]:
    """Golub–Kahan steps, restarted from the top Ritz vector when the basis is full."""
    b = start.shape[0]
    each = b * start.element_size()
    right, left = each * math.prod(op.in_shape), each * math.prod(op.out_shape)
    room = memory // max(right + left, 1) - 1
    keep_left = room >= min(max_steps, USUAL_STEPS)
    if not keep_left:
        room = max(_SMALLEST_BASIS, (memory - left) // max(right, 1) - 1)
    cycles: list[list[Cycle]] = [[] for _ in range(b)]
    steps = 0
    while True:
        capacity = min(room, max_steps - steps)
        state = None
        for state in golub_kahan(op, start, capacity, keep_left=keep_left):
            last = steps + state.steps >= max_steps
            yield _Restarts(state, cycles, 2 * steps + state.products), last
        assert state is not None
        steps += state.steps
        start = torch.stack([stop.close_cycle(state, i, cycles[i]) for i in range(b)])
        start = start.reshape(b, *op.in_shape)


class _Stop:
    """Convergence test: Ritz value, residual, interval and stopping decision."""

    def __init__(self, tol: float, delta: float, op: Operator) -> None:
        self.tol, self.delta, self.op = tol, delta, op
        self.in_size = math.prod(op.in_shape)
        self.threshold = start_threshold(self.in_size, delta)

    def interval(self, run: _Restarts, i: int) -> tuple[float, float]:
        """The current interval of entry ``i``."""
        alpha, beta = run.state.alpha[i].numpy(), run.state.beta[i].numpy()
        if not (np.isfinite(alpha).all() and np.isfinite(beta).all()):
            return math.nan, math.nan
        theta = _top_triplet(alpha, beta)[0]
        return theta, self._upper(run, i, theta)

    def judge(self, run: _Restarts, i: int, *, last: bool) -> TopSingular | None:
        """The result of entry ``i``, or None to continue."""
        state = run.state
        alpha, beta = state.alpha[i].numpy(), state.beta[i].numpy()
        if not (np.isfinite(alpha).all() and np.isfinite(beta).all()):
            return self._non_finite(run)
        theta, left, right = _top_triplet(alpha, beta)
        residual = float(beta[-1] * abs(left[-1]))
        small = bool(residual <= math.sqrt(2) * self.tol * theta)
        if not (last or small):
            return None
        exhausted = bool(alpha[-1] == 0.0 or beta[-1] == 0.0)
        within = self._excludes(run, i, theta)
        if not (last or within or exhausted):
            return None
        upper = self._upper(run, i, theta)
        status, note = self._status(small=small, within=within, exhausted=exhausted)
        v = self._vector(state.v[i, :-1], right, self.op.in_shape)
        if state.u is None:
            u = self._left_of(v, i, state.v.shape[0])
        else:
            u = self._vector(state.u[i], left, self.op.out_shape)
        return TopSingular(
            sigma=theta,
            upper=upper,
            delta=self.delta,
            u=u,
            v=v,
            solver_residual=residual / (math.sqrt(2) * theta) if theta > 0 else 0.0,
            products=run.products + (state.u is None),
            status=status,
            note=note,
        )

    def _status(
        self, *, small: bool, within: bool, exhausted: bool
    ) -> tuple[SolverStatus, str | None]:
        if small and within:
            return "converged", None
        if exhausted:
            return "max_steps", (
                "the Krylov space is exhausted to rounding, so more steps cannot exclude a larger "
                "value: the interval is valid but wide; use float64 or a larger `delta`"
            )
        return "max_steps", (
            "steps ran out before the tolerance was met; the interval is valid but wide: "
            "raise `max_steps` or `tol`, or use float64"
        )

    def _excludes(self, run: _Restarts, i: int, theta: float) -> bool:
        """Whether a singular value above ``(1 + tol) theta`` is unlikely enough to stop."""
        if self._complete(run, i, theta):
            return True
        factor = (1 + self.tol) / (1 + SLACK[self.op.dtype])
        return self._evidence(run, i, theta).excludes(factor, self.threshold)

    def _upper(self, run: _Restarts, i: int, theta: float) -> float:
        slack = 1 + SLACK[self.op.dtype]
        if self._complete(run, i, theta):
            return theta * slack
        return theta * self._evidence(run, i, theta).upper_factor(self.threshold) * slack

    def _complete(self, run: _Restarts, i: int, theta: float) -> bool:
        """Whether the result is deterministic: J is zero, or the Krylov space is complete."""
        # J x = 0 for a random x: J = 0 with probability one.
        return theta == 0.0 or (run.state.steps >= self.in_size and not run.cycles[i])

    def _evidence(self, run: _Restarts, i: int, theta: float) -> Evidence:
        alpha, beta = run.state.alpha[i].numpy(), run.state.beta[i].numpy()
        floor = 16 * torch.finfo(self.op.dtype).eps
        return Evidence(alpha, beta, run.cycles[i], theta, floor)

    def _left_of(self, v: Tensor, i: int, b: int) -> Tensor:
        """``J v / sigma`` for entry ``i`` of the batch: the left vector, from one product."""
        copies = v.new_zeros(b, *v.shape)
        copies[i] = v
        return unit_vector(self.op.matvec(copies)[i])

    def _vector(self, basis: Tensor, weights: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return unit_vector(torch.from_numpy(weights).to(basis) @ basis).reshape(shape)

    def close_cycle(self, state: Bidiagonal, i: int, cycles: list[Cycle]) -> Tensor:
        """Record a full cycle and return the top Ritz vector, the next start."""
        alpha, beta = state.alpha[i].numpy().copy(), state.beta[i].numpy().copy()
        _, _, right = _top_triplet(np.nan_to_num(alpha), np.nan_to_num(beta))
        cycles.append(Cycle(alpha, beta, np.abs(right)))
        return torch.from_numpy(right).to(state.v) @ state.v[i, :-1]

    def _non_finite(self, run: _Restarts) -> TopSingular:
        nan, kind = math.nan, {"dtype": self.op.dtype, "device": self.op.device}
        u, v = (torch.full(shape, nan, **kind) for shape in (self.op.out_shape, self.op.in_shape))
        return TopSingular(nan, nan, self.delta, u, v, nan, run.products, "non_finite", OVERFLOWS)


def unit_vector(vector: Tensor) -> Tensor:
    """Normalise a tensor by its norm over all entries; zero stays zero."""
    norm = vector.norm()
    return vector / norm if norm > 0 else vector


def _top_triplet(alpha: np.ndarray, beta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Top singular triplet of the bidiagonal matrix ``B_k``."""
    matrix = np.diag(alpha) + np.diag(beta[:-1], k=1)
    left, values, right = np.linalg.svd(matrix)
    return float(values[0]), left[:, 0], right[0]


@dataclass(frozen=True, repr=False)
class Leading(Shown):
    """A leading singular direction."""

    sigma: float  # lower bound of the singular value of this rank
    upper: float  # its upper bound, with probability ``1 - delta`` for each rank
    u: Tensor  # left vector, ``out_shape``, unit norm
    v: Tensor  # right vector, ``in_shape``, unit norm
    residual: float  # ``‖J^T J v - theta^2 v‖ / (sqrt(2) theta^2)``, ``theta = ‖J v‖``
    # upper bound of the sine of the angle between ``v`` and the singular vector of this rank; None
    # if the intervals do not separate its value from its neighbours'
    sine: float | None = None


def leading(
    op: Operator,
    first: TopSingular,
    start: Callable[[int], torch.Generator],
    *,
    count: int,
    **solver: Any,
) -> list[Leading]:
    """The first ``count`` singular directions of ``op``, largest first.

    Direction j is the top one of ``J P`` with ``P`` the projection onto the orthogonal complement
    of the right vectors ``W`` before it. ``sigma_j(J) <= ‖J P‖`` for every such ``W`` (Courant,
    Fischer), so the upper end of its top singular value bounds ``sigma_j``; and ``sigma_j(J) >=
    sigma_min(J [W, v_j])`` (Cauchy). The angle bound is that of Davis and Kahan for ``J^T J``:
    ``sin <= ‖J^T J v - theta^2 v‖ / distance``, with the distance of ``theta^2`` from the squares
    of the neighbours' intervals.

    Holds for any real operator; equal singular values have no unique directions and no sine.

    Source: derived here (``docs/theory/directions.md``), after [davis1970].

    >>> matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    >>> one = Operator(lambda e: e @ matrix.T, lambda g: g @ matrix, (3,), (3,), matrix.dtype)
    >>> seeded = torch.Generator().manual_seed
    >>> top = top_singular(one, generator=seeded(0))
    >>> [round(each.sigma, 6) for each in leading(one, top, seeded, count=2)]
    [3.0, 2.0]
    """
    images, uppers = [op.matvec(first.v[None])], [first.upper]
    found = [_measured_direction(op, first.v, images[0], first.sigma, first.upper)]
    while len(found) <= count and len(found) < op.in_size:  # one more bounds the gap below
        basis = torch.stack([one.v for one in found]).flatten(1)
        top = top_singular_batch(_deflated(op, basis), [start(len(found) + 1)], **solver)[0]
        # Rounding is relative to the whole operator, however much is deflated.
        uppers.append(top.upper + SLACK[op.dtype] * first.sigma)
        if not top.sigma > 16 * torch.finfo(op.dtype).eps * first.sigma:
            break
        v = _away(top.v.flatten(), basis)
        v = (v / v.norm()).reshape(op.in_shape)
        images.append(op.matvec(v[None]))
        least = float(torch.linalg.svdvals(torch.cat(images).double().flatten(1))[-1])
        found.append(_measured_direction(op, v, images[-1], min(least, uppers[-1]), uppers[-1]))
    # Values that differ by rounding alone are equal.
    above = [math.inf, *((1 - SLACK[op.dtype]) * one.sigma for one in found)]
    below = [*uppers[1:], 0.0]  # zero once the space is exhausted
    thetas = [float(image.double().norm()) for image in images]
    return [
        replace(one, sine=_sine(one.residual, thetas[j], above[j], below[j]))
        for j, one in enumerate(found[:count])
    ]


def _deflated(op: Operator, basis: Tensor) -> Operator:
    """``J P``, with ``P`` the projection onto the complement of the rows of ``basis``."""

    def away(e: Tensor) -> Tensor:
        return _away(e.flatten(-len(op.in_shape)), basis).reshape(e.shape)

    return replace(op, matvec=lambda e: op.matvec(away(e)), rmatvec=lambda g: away(op.rmatvec(g)))


def _away(e: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):  # the second pass removes rounding errors
        e = e - (e @ basis.T) @ basis
    return e


def _measured_direction(
    op: Operator, v: Tensor, image: Tensor, sigma: float, upper: float
) -> Leading:
    theta = image.double().norm()
    off = op.rmatvec(image)[0].double() - theta**2 * v.double()
    residual = float(off.norm() / (math.sqrt(2) * theta**2))
    return Leading(sigma, upper, (image[0].double() / theta).to(v), v, residual)


def _sine(residual: float, theta: float, above: float, below: float) -> float | None:
    """Upper bound of the sine of the angle, if the neighbours' values are separated."""
    distance = min(theta**2 - below**2, above**2 - theta**2)
    return min(residual * math.sqrt(2) * theta**2 / distance, 1.0) if distance > 0 else None
