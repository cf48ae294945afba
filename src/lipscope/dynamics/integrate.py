"""Integration of ordinary differential equations with error control and events."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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

LIMIT = 1e100  # beyond it scores, which are quadratic, approach the end of the float range
_TIME = 4 * np.finfo(float).eps  # relative error of the time of an event


@dataclass(frozen=True)
class Event:
    """An event that occurs when a margin falls to zero."""

    name: str  # of the event
    # ``(t, X) -> number``: positive before it; continuous, so that its time can be found
    margin: Callable[[float, Tensor], float]
    terminal: bool = True  # whether the integration ends there


@dataclass(frozen=True)
class Happened:
    """An event and its time."""

    name: str  # of the event
    time: float  # zero of its margin; 0 if not positive at the start


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Shown):
    """States of a flow at the requested times, and the reason for its end."""

    # requested times up to the end, ``(t,)``; after an early end, the end time comes last
    times: Tensor
    states: Tensor  # states at these times, ``(t, ...)``
    events: tuple[Happened, ...]  # in order
    # ``done``; ``event``: a terminal event; ``stuck``: no step is small enough (the velocity is not
    # finite, or changes too fast); ``evaluations``: too many
    status: Status
    note: str | None  # the reason for an early end
    steps: int  # accepted steps
    evaluations: int  # of the velocity


def integrate(
    velocity: Velocity,
    start: Tensor,
    times: Sequence[float] | Tensor,
    *,
    events: Sequence[Event] = (),
    rtol: float = 1e-8,
    max_evaluations: int = 200_000,
    limit: float = LIMIT,
) -> Solution:
    """Solve ``X' = velocity(t, X)`` from time 0, with adaptive steps of order 8.

    The local error of a step is at most ``rtol |X| + atol`` in the root mean square, ``atol``
    being ``rtol`` times the norm of the start. If the velocity raises `InputError` or is not
    finite, the step is reduced. Events are located between steps: a margin that falls below zero
    and rises again within a step is missed. If an entry of the state reaches the limit, the event
    ``overflow`` ends the flow: results are never infinite or NaN.

    Source: DOP853 of scipy.

    >>> found = integrate(lambda t, x: -x, torch.ones(1).double(), [0.0, 1.0])
    >>> bool(abs(found.states[-1] - math.exp(-1)) < 1e-8)
    True
    """
    at = times_of(times)
    check_count("max_evaluations", max_evaluations)
    check_positive("rtol", rtol)
    if not 1e-13 <= rtol < 1:
        raise InputError(f"`rtol` should be between 1e-13 and 1. Found `rtol = {rtol}`.")
    atol = rtol * max(float(start.square().mean().sqrt()), 1e-300)
    check_positive("atol", atol)
    flat = _FlatVelocity(velocity, start.shape)
    if not bool(velocity(0.0, start).isfinite().all()):  # errors here are the caller's
        raise InputError("`x` should have a finite velocity. Found NaN or Inf; scale it down.")
    overflow = Event("overflow", lambda _, x: limit - float(x.abs().max()))
    watched, happened = [*map(_numeric, events_of(events)), overflow], list[Happened]()
    found = [(0.0, event) for event in watched if not event.margin(0.0, start) > 0]
    kept: list[tuple[float, Tensor]] = []
    status: Status | None = None
    note: str | None = None
    steps, path = 0, lambda _: start.clone()
    with np.errstate(all="ignore"):  # non-finite values are rejected, without warnings
        solver = DOP853(flat, 0.0, start.numpy().ravel(), at[-1] or 1.0, rtol=rtol, atol=atol)
        while True:
            end = solver.t
            for time, event in sorted(found, key=lambda one: one[0]):
                if status is not None and time > end:
                    break
                watched.remove(event)
                happened.append(Happened(event.name, time))
                if event.terminal and status is None:
                    end, status, note = time, "event", event.name
            kept += [(t, path(t)) for t in at[len(kept) : bisect.bisect_right(at, end)]]
            last = (end, path(end))
            if status is None and (solver.status == "finished" or at[-1] == 0):
                status = "done"
            elif status is None and flat.count >= max_evaluations:
                status, note = "evaluations", f"more than {max_evaluations:,} evaluations"
            if status is not None:
                break
            solver.step()
            if solver.status == "failed":
                status, note = "stuck", flat.error or "no step is small enough"
                break
            steps, path = steps + 1, _within_step(solver, start.shape)
            found = list(_crossings(watched, path, end, solver.t))
    if not kept or kept[-1][0] < last[0]:  # add the end time if it was not requested
        kept.append(last)
    reached = torch.tensor([t for t, _ in kept], dtype=torch.float64)
    states = torch.stack([state for _, state in kept])
    return Solution(reached, states, tuple(happened), status, note, steps, flat.count)


def times_of(times: Sequence[float] | Tensor) -> list[float]:
    """Validate times: increasing, finite, from 0 on."""
    try:
        at = [] if isinstance(times, str) else [float(t) for t in times]
    except (TypeError, ValueError):
        at = []
    if not at or not all(map(math.isfinite, at)) or at[0] < 0 or at != sorted(set(at)):
        raise InputError(
            f"`times` should be increasing numbers from 0 on. Found {shown(times)[:80]}."
        )
    return at


def events_of(events: Sequence[Event]) -> Sequence[Event]:
    """Require a sequence of `Event`."""
    if not isinstance(events, Sequence) or not all(isinstance(one, Event) for one in events):
        raise InputError(f"`events` should be a list of `Event`. Found {shown(events)}.")
    return events


def _numeric(event: Event) -> Event:
    """The event with a check that its margin is a number."""

    def margin(t: float, state: Tensor) -> float:
        found = event.margin(t, state)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            message = f"`{event.name}` should be one number. Found {shown(found)[:80]}"
            raise InputError(f"The margin of the event {message}.") from None

    return replace(event, margin=margin)


class _FlatVelocity:
    """The velocity for scipy: on flat arrays, NaN where it raises."""

    def __init__(self, velocity: Velocity, shape: torch.Size) -> None:
        self.velocity, self.shape = velocity, shape
        self.count, self.error = 0, ""

    def __call__(self, t: float, y: np.ndarray) -> np.ndarray:
        self.count += 1
        if not np.isfinite(y).all():
            return np.full_like(y, np.nan)
        try:
            out = self.velocity(t, torch.from_numpy(y).reshape(self.shape)).numpy().ravel()
        except InputError as problem:
            self.error = str(problem)
            return np.full_like(y, np.nan)
        if not np.isfinite(out).all():
            self.error = "the velocity is not finite"
        return out


def _within_step(solver: Any, shape: torch.Size) -> Callable[[float], Tensor]:
    """The state within the last step, interpolated lazily."""
    dense = functools.cache(solver.dense_output)

    def at(t: float) -> Tensor:
        y = solver.y.copy() if t == solver.t else dense()(t)
        return torch.from_numpy(y).reshape(shape)

    return at


def _crossings(
    watched: Sequence[Event], path: Callable[[float], Tensor], old: float, new: float
) -> Iterator[tuple[float, Event]]:
    """Events whose margin falls to zero within a step, with their times."""
    bracket: dict[str, Any] = {"bracket": (old, new), "xtol": 1e-300, "rtol": _TIME}
    for event in watched:
        if event.margin(new, path(new)) > 0:
            continue
        if event.margin(old, path(old)) > 0:  # true up to rounding
            fall = root_scalar(lambda t, e=event: e.margin(t, path(t)), method="brentq", **bracket)
            yield float(fall.root), event
        else:
            yield old, event
