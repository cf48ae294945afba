"""Tokens that follow attention: continuous flows, and the residual layers that discretise them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope.attention import Attention
from lipscope.dynamics.fields import Field, Function, Norm
from lipscope.dynamics.integrate import (
    LIMIT,
    Event,
    Happened,
    Solution,
    Status,
    events_of,
    integrate,
)
from lipscope.errors import InputError, check_count, check_positive
from lipscope.measures import TokenMeasure


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(Solution):
    """Tokens at several times.

    The fields of `Solution`; states are ``(t, n, d)``, where renormalised those of ``y``.

    Attributes:
        field: What moved them.
    """

    field: Field

    @property
    def end(self) -> Tensor:
        """The last state, ``(n, d)``."""
        return self.states[-1]

    def attention(self, index: int) -> Tensor:
        """Attention weights at a time, ``(h, n, n)``."""
        return self.field.weights(float(self.times[index]), self.states[index])


def evolve(
    f: Attention | Function,
    x: Tensor | TokenMeasure,
    times: Sequence[float] | Tensor,
    *,
    renormalise: bool = False,
    norm: Norm | None = None,
    events: Sequence[Event] = (),
    rtol: float = 1e-8,
    max_evaluations: int = 200_000,
) -> Trajectory:
    """The flow ``x_i' = f(X)_i`` of tokens under a layer, with adaptive steps of order 8.

    ``renormalise``: ``y = e^(-tV) x``, ``V = Σ_h W_h V_h``, which follows
    ``y_i' = Σ_h W_h V_h Σ_j P_ij^h(e^(tV) y) y_j - V y_i``. ``e^(tV)`` enters through scores alone,
    in the log domain: where differences of tokens decide it, no time is too long for it. Where
    digits decide that float64 does not hold, such as those in which two tokens differ that are
    equal along the fastest direction, the flow ends with the event ``rounding``.
    ``norm``: ``x_i' = Π_i f(X)_i``, ``Π_i`` the projection along ``x_i``, so that every token keeps
    its norm: the limit of residual layers with RMSNorm after each; with ``layer`` tokens and
    outputs are centred too, as by LayerNorm.

    Holds for every layer of this package, heads, masks and biases included, and any function of
    tokens that keeps its shape; renormalised for layers whose values are linear and commute.
    Computed in float64 on the CPU.

    Args:
        f: The layer, or a function ``(n, d) -> (n, d)`` in float64.
        x: Tokens ``(n, d)``, or a measure: weighted atoms, with positions for a causal layer.
        times: When to report states; increasing, from 0 on.
        renormalise: Whether states are those of ``y``.
        norm: Norm of the residual stream, ``rms`` or ``layer``; none if None.
        events: What to look for besides; states are as reported.
        rtol: Relative tolerance of a step.
        max_evaluations: Of the layer, after which the flow ends with a note.

    Returns:
        `Trajectory`; a flow that leaves the float range ends with the event ``overflow``.

    Raises:
        InputError: For tokens, weights or times that are none, or a layer that does not fit.

    Source: [geshkovski2023]; [sander2022].

    All weight on one token: x' = x.

    >>> from lipscope.attention import DotProduct
    >>> one = torch.ones(1, 1)
    >>> evolve(DotProduct(one, one, one), one, [0.0, 1.0]).end.item()
    2.71828...
    """
    field = Field(f, x, renormalise=renormalise, norm=norm)
    seen = [
        replace(e, margin=lambda t, s, e=e: e.margin(t, field.onto(s))) for e in events_of(events)
    ]
    options = {"events": seen, "rtol": rtol, "max_evaluations": max_evaluations}
    if renormalise:
        seen.append(Event("rounding", field.certain))
    found = integrate(field, field.start, times, **options)
    states = torch.stack([field.onto(state) for state in found.states])
    held: dict[str, Any] = {**vars(found), "states": states}
    return Trajectory(**held, field=field)


def residual(
    f: Attention | Function | Sequence[Attention | Function],
    x: Tensor | TokenMeasure,
    *,
    step: float,
    layers: int | None = None,
    renormalise: bool = False,
    norm: Norm | None = None,
) -> Trajectory:
    """Residual layers ``x <- x + step f(X)``: Euler's steps of fixed size, of order 1.

    With a norm ``x <- N(x + step f(X))``, which keeps every token's norm. Its distance to `evolve`
    is of the order of the step where the step is small; where it is not, nothing is promised.

    Args:
        f: The layer, or one for every step.
        x: As for `evolve`, likewise the last two.
        step: Size of a step, ``1 / L`` for L layers in unit time.
        layers: How many; as many as were given if None.
        renormalise: Steps of the renormalised flow instead.
        norm: Norm after every layer.

    Returns:
        `Trajectory` with every state; it ends early with the event ``overflow`` or ``rounding``.

    Raises:
        InputError: As `evolve`, or for a step or number of layers that is none.

    >>> from lipscope.attention import DotProduct
    >>> one = torch.ones(1, 1)
    >>> residual(DotProduct(one, one, one), one, step=0.5, layers=2).end.item()
    2.25
    """
    given = list(f) if isinstance(f, Sequence) else [f]
    if layers is None:
        layers = len(given) if isinstance(f, Sequence) else 0
    check_count("layers", layers)
    if isinstance(f, Sequence) and layers != len(given):
        raise InputError(f"`layers` should be {len(given)}, one for every layer. Found `{layers}`.")
    check_positive("step", step)
    of = [Field(one, x, renormalise=renormalise, norm=norm) for one in given]
    states, times, why = [of[0].start], [0.0], None
    happened: tuple[Happened, ...] = ()
    status: Status = "done"
    for layer in range(layers):
        field, state = of[layer % len(of)], states[-1]
        if renormalise and not field.certain(times[-1], state) > 0:
            happened, status, why = (Happened("rounding", times[-1]),), "event", "rounding"
            break
        new = field.onto(state + step * field(times[-1], state))
        if not float(new.abs().max()) <= LIMIT:
            happened, status, why = (Happened("overflow", (layer + 1) * step),), "event", "overflow"
            break
        states.append(new)
        times.append((layer + 1) * step)
    at, taken = torch.tensor(times, dtype=torch.float64), len(times) - 1
    return Trajectory(at, torch.stack(states), happened, status, why, taken, taken, of[0])
