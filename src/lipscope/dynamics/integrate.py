"""Ordinary differential equations to a stated tolerance, to the end or until something happens."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.integrate import DOP853
from scipy.optimize import root_scalar
from torch import Tensor

from lipscope.display import Shown
from lipscope.errors import InputError, check_count, check_positive, shown

Velocity = Callable[[float, Tensor], Tensor]
Status = Literal["done", "event", "stuck", "evaluations"]

LIMIT = 1e100  # beyond it scores, which are squares, come near the end of the float range
_TIME = 4 * np.finfo(float).eps  # the relative error of the time of an event


@dataclass(frozen=True)
class Event:
    """Something that happens when a margin falls to zero."""

    name: str  # what happens
    # ``(t, X) -> number``: positive before; continuous, so that the time can be found
    margin: Callable[[float, Tensor], float]
    terminal: bool = True  # whether the flow ends there


@dataclass(frozen=True)
class Happened:
    """An event and its time."""

    name: str  # of the event
    time: float  # when its margin fell to zero; 0 if it was so from the start


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Shown):
    """States of a flow at the times that were asked for, and why it ended."""

    # those asked for up to the end, ``(t,)``; the time of the end itself comes last where the flow
    # ended early
    times: Tensor
    states: Tensor  # the states then, ``(t, ...)``
    events: tuple[Happened, ...]  # what happened, in order
    # ``done``; ``event``: a terminal event; ``stuck``: no step is small enough (the velocity ceases
    # to be finite, or changes too fast); ``evaluations``: too many
    status: Status
    note: str | None  # why, where the flow ended early
    steps: int  # steps that were accepted
    evaluations: int  # of the velocity


def integrate(
    velocity: Velocity,
    start: Tensor,
    times: Sequence[float] | Tensor,
    *,
    events: Sequence[Event] = (),
    rtol: float = 1e-8,
    atol: float | None = None,
    max_evaluations: int = 200_000,
    limit: float = LIMIT,
) -> Solution:
    """Solve ``X' = velocity(t, X)`` from time 0, of order 8 with steps of its own choice.

    The local error of a step is at most ``rtol |X| + atol`` in the root mean square, ``atol`` by
    default ``rtol`` times that of the start. What the velocity raises as `InputError`, or answers
    with numbers that are not finite, makes a step smaller. Events are
    looked for between steps: a margin that falls below zero and rises again within one is
    missed. Once an entry of the state reaches the limit it ends with the event ``overflow``:
    nothing here is ever infinite or NaN.

    Source: DOP853 of scipy.

    >>> found = integrate(lambda t, x: -x, torch.ones(1).double(), [0.0, 1.0])
    >>> bool(abs(found.states[-1] - math.exp(-1)) < 1e-8)
    True
    """
    at = times_of(times)
    check_count("max_evaluations", max_evaluations)
    rtol, atol = _tolerances(rtol, atol, start)
    asked = _Asked(velocity, start.shape)
    if not bool(velocity(0.0, start).isfinite().all()):  # what it refuses here is the caller's
        raise InputError("`x` should have a finite velocity. Found NaN or Inf; scale it down.")
    overflow = Event("overflow", lambda _, x: limit - float(x.abs().max()))
    run = _FlowRecord(at, start, (*events_of(events), overflow))
    with np.errstate(all="ignore"):  # what is not finite is refused, not warned of
        solver = DOP853(asked, 0.0, start.numpy().ravel(), at[-1] or 1.0, rtol=rtol, atol=atol)
        while run.status is None:
            solver.step()
            run.take(solver, asked.said)
            if run.status is None and asked.count >= max_evaluations:
                run.stop("evaluations", f"more than {max_evaluations:,} evaluations")
    return run.solution(asked.count)


def times_of(times: Sequence[float] | Tensor) -> list[float]:
    """Times as numbers: increasing, finite, from 0 on."""
    try:
        at = [float(t) for t in times]
    except (TypeError, ValueError):
        at = []
    if not at or not all(map(math.isfinite, at)) or at[0] < 0 or at != sorted(set(at)):
        raise InputError(
            f"`times` should be increasing numbers from 0 on. Found {shown(times)[:80]}."
        )
    return at


def events_of(events: Sequence[Event]) -> Sequence[Event]:
    """Events, and nothing else."""
    if not isinstance(events, Sequence) or not all(isinstance(one, Event) for one in events):
        raise InputError(f"`events` should be a list of `Event`. Found {shown(events)}.")
    return events


def _tolerances(rtol: float, atol: float | None, start: Tensor) -> tuple[float, float]:
    check_positive("rtol", rtol)
    if not 1e-13 <= rtol < 1:
        raise InputError(f"`rtol` should be between 1e-13 and 1. Found `rtol = {rtol}`.")
    if atol is None:
        atol = rtol * max(float(start.square().mean().sqrt()), 1e-300)
    check_positive("atol", atol)
    return rtol, atol


class _Asked:
    """The velocity as scipy asks for it: on flat arrays, NaN where it is refused."""

    def __init__(self, velocity: Velocity, shape: torch.Size) -> None:
        self.velocity, self.shape = velocity, shape
        self.count, self.said = 0, ""

    def __call__(self, t: float, y: np.ndarray) -> np.ndarray:
        self.count += 1
        if not np.isfinite(y).all():
            return np.full_like(y, np.nan)
        try:
            out = self.velocity(t, torch.from_numpy(y).reshape(self.shape)).numpy().ravel()
        except InputError as problem:
            self.said = str(problem)
            return np.full_like(y, np.nan)
        if not np.isfinite(out).all():
            self.said = "the velocity is not finite"
        return out


class _Path:
    """The state within the last step, interpolated when it is first asked for."""

    def __init__(self, solver: Any, shape: torch.Size) -> None:
        self.solver, self.shape, self.dense = solver, shape, None

    def __call__(self, t: float) -> Tensor:
        if t == self.solver.t:
            y = self.solver.y.copy()
        else:
            self.dense = self.dense or self.solver.dense_output()
            y = self.dense(t)
        return torch.from_numpy(y).reshape(self.shape)


class _FlowRecord:
    """A flow on its way: states so far, what has happened, what is still looked for."""

    def __init__(self, at: list[float], start: Tensor, events: Sequence[Event]) -> None:
        self.at, self.times, self.states = at, list[float](), list[Tensor]()
        self.last, self.steps = (0.0, start.clone()), 0
        self.happened: list[Happened] = []
        self.watched: list[Event] = []
        self.status: Status | None = None
        self.note: str | None = None
        if at[0] == 0:
            self._keep(*self.last)
        for event in events:
            if event.margin(0.0, start) > 0:
                self.watched.append(event)
            else:
                self._meet(event, 0.0)
        if self.status is None and at[-1] == 0:
            self.stop("done", None)

    def take(self, solver: Any, said: str) -> None:
        """What a step has brought; ``said``, why it could not be made."""
        if solver.status == "failed":
            self.stop("stuck", said or "no step is small enough")
            return
        self.steps += 1
        path = _Path(solver, self.last[1].shape)
        end = solver.t
        for time, event in sorted(self._crossed(path), key=lambda one: one[0]):
            self.watched.remove(event)
            self._meet(event, time)
            if self.status is not None:
                end = time
                break
        for t in self.at[len(self.times) : bisect.bisect_right(self.at, end)]:
            self._keep(t, path(t))
        self.last = (end, path(end))
        if self.status is None and solver.status == "finished":
            self.stop("done", None)

    def stop(self, status: Status, note: str | None) -> None:
        """The flow ends."""
        self.status, self.note = status, note

    def solution(self, evaluations: int) -> Solution:
        """All of it as a record, closed with the end where that was not asked for."""
        if not self.times or self.times[-1] < self.last[0]:
            self._keep(*self.last)
        assert self.status is not None
        return Solution(
            torch.tensor(self.times, dtype=torch.float64),
            torch.stack(self.states),
            tuple(self.happened),
            self.status,
            self.note,
            self.steps,
            evaluations,
        )

    def _keep(self, time: float, state: Tensor) -> None:
        self.times.append(time)
        self.states.append(state)

    def _meet(self, event: Event, time: float) -> None:
        self.happened.append(Happened(event.name, time))
        if event.terminal and self.status is None:
            self.stop("event", event.name)

    def _crossed(self, path: _Path) -> Iterator[tuple[float, Event]]:
        old, new = path.solver.t_old, path.solver.t
        for event in self.watched:
            if not event.margin(new, path(new)) > 0:
                began = event.margin(old, path(old)) > 0  # but for rounding, it is
                yield (_zero_time(event, path, old, new) if began else old), event


def _zero_time(event: Event, path: _Path, old: float, new: float) -> float:
    options = {"bracket": (old, new), "xtol": 1e-300, "rtol": _TIME}
    return float(root_scalar(lambda t: event.margin(t, path(t)), method="brentq", **options).root)
