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
from torch import Tensor

from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.linalg.interval import Cycle, Evidence, start_threshold
from lipscope.linalg.krylov import Bidiagonal, golub_kahan
from lipscope.linalg.operator import Operator

SolverStatus = Literal["converged", "max_steps", "non_finite"]

DEFAULT_MEMORY = 2**30  # bytes
# Rounding allowance of the upper end: once converged the exact bound collapses onto sigma
# and would fail by rounding alone (measured: 2.3e-7 in float32, 6e-16 in float64).
SLACK = {torch.float32: 1e-5, torch.float64: 1e-12}
# The allowance takes half of it, so a smaller tolerance could not be met.
SMALLEST_TOL = {torch.float32: 2e-5, torch.float64: 2e-12}
_SMALLEST_BASIS = 8  # steps between restarts, whatever the memory
# Runs are rarely longer. Where so many left vectors do not fit, none is kept: the room is worth
# more to the right ones, and the one left vector that is wanted costs one more product.
_USUAL_STEPS = 64


@dataclass(frozen=True, repr=False)
class TopSingular(Shown):
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
        status: ``converged`` (``upper`` is at most ``(1 + tol) sigma``), ``max_steps`` (it is
            not, and still valid), ``non_finite``.
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

    ``sigma = max ‖J e‖ / ‖e‖`` over the Krylov space. The run stops when
    ``r / √2 ≤ tol · sigma``, where ``r`` is the one-sided residual, and ``upper`` is at most
    ``(1 + tol) · sigma``: so the tolerance is met with probability ``1 - delta``. A larger
    ``delta`` stops sooner; 1e-6 takes half as many products again as 0.01, and often more than
    float32 can tell.

    Holds for any real operator. That the residual is small proves that *some* singular
    value is near ``sigma``; only the upper ends speak of the largest one.

    Args:
        op: Operator, of shape ``in_shape -> out_shape``.
        tol: Relative tolerance; at least 1e-5 in float32 and 1e-12 in float64.
        delta: Failure probability of ``upper``, in (0, 1).
        max_steps: Most steps (two products each).
        memory: Bytes for the basis; a longer run restarts from its best vector.
        generator: Source of the random start; torch's global one if None.

    Returns:
        TopSingular record. Non-convergence is a status, never an exception.

    Raises:
        InputError: For a tolerance or probability out of range, or an operator in half
            precision, of which nothing would be promised.

    Source: derived here (``docs/theory/interval.md``), after [golub1965], [hochstenbach2013].

    >>> import torch
    >>> from lipscope.linalg.operator import linearise
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
        max_steps=max_steps,
        memory=memory,
    )[0]


def top_singular_batch(
    op: Operator,
    generators: Sequence[torch.Generator | None],
    *,
    tol: float = 1e-3,
    delta: float = 0.01,
    max_steps: int = 300,
    memory: int = DEFAULT_MEMORY,
) -> list[TopSingular]:
    """`top_singular` of ``b`` operators that share their products, for example heads.

    ``op.matvec`` and ``op.rmatvec`` take and return a leading axis of length ``b`` whose entries
    belong to different operators. Each entry has its own start and its own stop, so that
    an answer does not depend on its neighbours.

    Args:
        op: Operator whose products map ``(b, *in_shape)`` to ``(b, *out_shape)``.
        generators: One source of the random start per entry; its length is ``b``.
        tol: As in `top_singular`.
        delta: As in `top_singular`, for each entry.
        max_steps: As in `top_singular`.
        memory: As in `top_singular`, for the whole batch.

    Returns:
        One record per entry.

    Raises:
        InputError: As in `top_singular`.
    """
    _check(op, tol, delta, max_steps)
    stop = _Stop(tol, delta, op)
    b = len(generators)
    answers: list[TopSingular | None] = [None] * b
    for run, last in _restarted(op, _starts(op, generators), max_steps, memory, stop):
        for i in range(b):
            if answers[i] is None:
                answers[i] = stop.judge(run, i, last=last)
        if all(answers):
            break
    return [answer for answer in answers if answer is not None]


def _check(op: Operator, tol: float, delta: float, max_steps: int) -> None:
    if max_steps < 1:
        raise InputError(f"`max_steps` should be at least 1. Found `max_steps = {max_steps}`.")
    if op.dtype not in SLACK:
        raise InputError(
            "The operator should be in float32 or float64, whose rounding the interval covers. "
            f"Found {str(op.dtype)[6:]}; convert the layer and its input, as with `.float()`."
        )
    smallest = SMALLEST_TOL[op.dtype]
    if not tol >= smallest:
        raise InputError(
            f"`tol` should be at least {smallest:g} in {str(op.dtype)[6:]}. Found `tol = {tol}`."
        )
    if not 0.0 < delta < 1.0:
        raise InputError(f"`delta` should be between 0 and 1. Found `delta = {delta}`.")


def _starts(op: Operator, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One Gaussian vector per entry: its direction is uniform on the sphere.

    Drawn in float64 on the generator's own device, so that a row does not depend on the dtype
    in which it is computed, and a small `delta` holds: normal numbers of float32 are exactly
    zero once in 2^24 draws.
    """
    cpu = torch.device("cpu")
    drawn = [
        torch.randn(
            op.in_shape, generator=g, device=cpu if g is None else g.device, dtype=torch.float64
        )
        for g in generators
    ]
    return torch.stack([x.to(op.device, op.dtype) for x in drawn])


@dataclass
class _Run:
    """A decomposition, the finished cycles before it, and the products of them all."""

    state: Bidiagonal
    cycles: list[list[Cycle]]  # one list per entry of the batch
    products: int


def _restarted(
    op: Operator, start: Tensor, max_steps: int, memory: int, stop: _Stop
) -> Iterator[tuple[_Run, bool]]:
    """Golub–Kahan steps, restarted from the top Ritz vector when the basis is full."""
    b = start.shape[0]
    right, left = (
        b * size * start.element_size() for size in (op.in_size, math.prod(op.out_shape))
    )
    room = memory // max(right + left, 1) - 1
    keep_left = room >= min(max_steps, _USUAL_STEPS)
    if not keep_left:
        room = max(_SMALLEST_BASIS, (memory - left) // max(right, 1) - 1)
    cycles: list[list[Cycle]] = [[] for _ in range(b)]
    steps = 0
    while True:
        capacity = min(room, max_steps - steps)
        state = None
        for state in golub_kahan(op, start, capacity, keep_left=keep_left):
            last = steps + state.steps >= max_steps
            yield _Run(state, cycles, 2 * steps + state.products), last
        assert state is not None
        steps += state.steps
        start = torch.stack([stop.close_cycle(state, i, cycles[i]) for i in range(b)])
        start = start.reshape(b, *op.in_shape)


class _Stop:
    """Reads a decomposition: Ritz value, residual, interval, and whether to stop."""

    def __init__(self, tol: float, delta: float, op: Operator) -> None:
        self.tol, self.delta, self.op = tol, delta, op
        self.threshold = start_threshold(op.in_size, delta)

    def judge(self, run: _Run, i: int, *, last: bool) -> TopSingular | None:
        """The answer for entry ``i``, or None to go on."""
        state = run.state
        alpha, beta = state.alpha[i].numpy(), state.beta[i].numpy()
        if not (np.isfinite(alpha).all() and np.isfinite(beta).all()):
            return self._non_finite(run)
        theta, left, right = _ritz(alpha, beta)
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
            return (
                "max_steps",
                "the Krylov space is exhausted to rounding, so more steps cannot exclude a larger "
                "value: the interval is valid but wide; use float64 or a larger `delta`",
            )
        return (
            "max_steps",
            "steps ran out before the tolerance was met; the interval is valid but wide: "
            "raise `max_steps` or `tol`, or use float64",
        )

    def _excludes(self, run: _Run, i: int, theta: float) -> bool:
        """Whether a singular value above ``(1 + tol) theta`` is unlikely enough to stop."""
        if self._complete(run, i, theta):
            return True
        factor = (1 + self.tol) / (1 + SLACK[self.op.dtype])
        return self._evidence(run, i, theta).excludes(factor, self.threshold)

    def _upper(self, run: _Run, i: int, theta: float) -> float:
        slack = 1 + SLACK[self.op.dtype]
        if self._complete(run, i, theta):
            return theta * slack
        return theta * self._evidence(run, i, theta).upper_factor(self.threshold) * slack

    def _complete(self, run: _Run, i: int, theta: float) -> bool:
        """Whether nothing is left to chance: J is zero, or the Krylov space is everything."""
        # J x = 0 for a random x: J = 0 with probability one.
        return theta == 0.0 or (run.state.steps >= self.op.in_size and not run.cycles[i])

    def _evidence(self, run: _Run, i: int, theta: float) -> Evidence:
        alpha, beta = run.state.alpha[i].numpy(), run.state.beta[i].numpy()
        floor = 16 * torch.finfo(self.op.dtype).eps
        return Evidence(alpha, beta, run.cycles[i], theta, floor)

    def _left_of(self, v: Tensor, i: int, b: int) -> Tensor:
        """``J v / sigma`` for entry ``i`` of the batch: the left vector, from one product."""
        copies = v.new_zeros(b, *v.shape)
        copies[i] = v
        image = self.op.matvec(copies)[i]
        norm = image.norm()
        return image / norm if norm > 0 else image

    def _vector(self, basis: Tensor, weights: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        vector = torch.from_numpy(weights).to(basis) @ basis
        norm = vector.norm()
        return (vector / norm if norm > 0 else vector).reshape(shape)

    def close_cycle(self, state: Bidiagonal, i: int, cycles: list[Cycle]) -> Tensor:
        """Record a full cycle and return the top Ritz vector, the next start."""
        alpha, beta = state.alpha[i].numpy().copy(), state.beta[i].numpy().copy()
        _, _, right = _ritz(np.nan_to_num(alpha), np.nan_to_num(beta))
        cycles.append(Cycle(alpha, beta, np.abs(right)))
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
