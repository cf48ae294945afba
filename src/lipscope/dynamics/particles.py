"""Token dynamics under attention: continuous flows, residual layers, clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from lipscope.attention import Attention, DotProduct, check_layer
from lipscope.display import Shown
from lipscope.dynamics.integrate import (
    LIMIT,
    Event,
    Happened,
    Solution,
    Status,
    events_of,
    integrate,
)
from lipscope.errors import (
    InputError,
    check_count,
    check_numbers,
    check_positive,
    check_tokens,
    shown,
)
from lipscope.linalg import start_named
from lipscope.measures import TokenMeasure, token_map

Function = Callable[[Tensor], Tensor]
Norm = Literal["rms", "layer"]

# Logarithmic limits of tokens and rows of scores: weights reach their limit long before, and
# products of two tokens stay well within the float range.
_SHARPEST = 230.0
_STEEPEST = 700.0  # the same for queries: the end of the float range
_PERTURBATION = 4 * torch.finfo(torch.float64).eps  # rounding error of a token over some steps
_LOST = 1e-3  # accepted rounding error of a velocity, relative to the largest one
_AT_ONCE = 2**22  # maximum number of scores for computing weights without blocks: faster
_COMMUTES = 1e-12


class Field:
    """The velocity ``(t, X) -> X'`` of tokens under a layer.

    ``start``: the tokens, centred if the norm is ``layer``. ``rate`` is ``V`` of the
    renormalisation, None without one, and ``fastest`` the largest real part of its eigenvalues.
    """

    def __init__(
        self,
        f: Attention | Function,
        x: Tensor | TokenMeasure,
        *,
        renormalise: bool = False,
        norm: Norm | None = None,
    ) -> None:
        self.measure = x if isinstance(x, TokenMeasure) else None
        if self.measure is not None:
            check_layer(f)
        elif not callable(f):
            raise InputError(f"`f` should be a layer or a function. Found `{type(f).__name__}`.")
        points = x.points if isinstance(x, TokenMeasure) else x
        check_tokens("x", points)
        self.start = points.detach().to("cpu", torch.float64)
        self.f = f.in_double() if isinstance(f, Attention) else f
        self.norm, self.radii, self.rate = norm, None, None
        if norm not in (None, "rms", "layer"):
            raise InputError(f"`norm` should be None, rms or layer. Found `{norm}`.")
        if renormalise and norm is not None:
            raise InputError("`renormalise` goes with no `norm`. Found both; leave one out.")
        if norm is not None:
            self.start = self._centred(self.start)
            self.radii = self.start.norm(dim=-1, keepdim=True)
            if not bool((self.radii > 0).all()):
                raise InputError("`x` should have tokens that are not zero once normalised.")
        if renormalise:
            self.rate = self._rate()
            self.fastest = float(torch.linalg.eigvals(self.rate).real.max())
            self.relative = self.rate - self.fastest * torch.eye(len(self.rate)).to(self.rate)
            self._prepare()
        self._check_fits()

    def __call__(self, t: float, x: Tensor) -> Tensor:
        """The velocity at a time and a state."""
        if self.rate is not None:
            return self._renormalised(t, x)
        if self.radii is None:
            return self.read(x)
        x = self.onto(x)
        v = self._centred(self.read(x))
        return v - x * ((x * v).sum(-1, keepdim=True) / self.radii.square())

    def onto(self, x: Tensor) -> Tensor:
        """Project onto the states of the flow: onto its spheres, if any."""
        if self.radii is None:
            return x
        x = self._centred(x)
        return x * (self.radii / x.norm(dim=-1, keepdim=True))

    def read(self, x: Tensor) -> Tensor:
        """The layer's output for every token."""
        if self.measure is not None:
            assert isinstance(self.f, Attention)
            mu = self.measure.moved(x)
            return token_map(self.f, mu, mu.points, mu.positions)
        pairs = len(x) ** 2 * (self.f.num_heads if isinstance(self.f, Attention) else 0)
        with torch.set_grad_enabled(0 < pairs <= _AT_ONCE):
            out = self.f(x if pairs else x.clone())  # functions may modify their argument
        if not isinstance(out, Tensor):
            raise InputError(f"`f` should give a tensor. Found `{type(out).__name__}`.")
        return out.detach()

    def weights(self, t: float, x: Tensor) -> Tensor:
        """The attention weights at a state, ``(h, n, n)``."""
        if not isinstance(self.f, Attention) or self.measure is not None:
            raise InputError("not available: attention weights are those of a layer on tokens.")
        return self.f.weights(*self._queries_and_keys(t, x))

    def certain(self, t: float, y: Tensor) -> float:
        """Accuracy of a renormalised velocity after rounding: none if negative.

        Compares velocities for tokens perturbed by rounding errors, with other limits for values
        beyond the float range; they may differ by a thousandth of ``V`` applied to the state, or to
        the start.
        """
        if (size := max(self.size, self._size(y))) == 0:  # a single point is stationary
            return math.inf
        apart = y.abs().amax(0) if self.sums else y.abs()  # with or without differences
        try:
            off = self._renormalised(t, y + self.shake * apart, 0.9) - self._renormalised(t, y)
        except InputError:  # the next step reports the reason
            return math.inf
        return _LOST * size - float(off.abs().max())

    def _prepare(self) -> None:
        """Compute the constant parts of a renormalised velocity."""
        f, x = self.f, self.start
        assert isinstance(f, Attention) and self.rate is not None
        empty = f.empty_rows(f.project(x)[1])
        # Rows of weights add up to 1: a component shared by all tokens moves none of them.
        self.sums = f.weighting.normalised and (empty is None or not bool(empty.any()))
        self.plain: DotProduct | None = None
        held = (f.softcap, f.rotary, f.query_norm, f.key_norm)
        if type(f) is DotProduct and self.sums and all(one is None for one in held):
            self.plain = f.replace(query_bias=None, key_bias=None)
            self.query_bias = f.project(torch.zeros_like(x[:1]))[0]
        self.size = self._size(x)
        signs = torch.randint(2, x.shape, generator=start_named("rounding")) * 2 - 1
        # A component shared by all tokens at the start is never separated by rounding.
        self.shake = _PERTURBATION * signs * (x != x[:1]).any(0)

    def _size(self, y: Tensor) -> float:
        """The largest entry of ``V`` applied to tokens, or to their differences."""
        assert self.rate is not None
        return float(((y - y[:1] if self.sums else y) @ self.rate.T).abs().max())

    def _queries_and_keys(self, t: float, y: Tensor, part: float = 1.0) -> tuple[Tensor, Tensor]:
        """Queries and keys of ``x = e^(tV) y`` with the same weights, within the float range.

        For dot products from logarithms of norms, row by row, and from differences of keys, which
        leave the softmax unchanged; otherwise all tokens are scaled down together.
        """
        assert isinstance(self.f, Attention)
        if self.rate is None:
            return self.f.project(y)[:2]
        growth, log_size = torch.linalg.matrix_exp(t * self.relative), t * self.fastest
        if self.plain is None:
            x = y @ growth.T
            reach = float(x.abs().max())
            if reach > 0:
                x = x * math.exp(min(log_size, part * _SHARPEST - math.log(reach)))
            return self.f.project(x)[:2]
        up = max(log_size, 0.0)
        q, of_q = _of_size_one(
            self.plain.project(math.exp(log_size - up) * y @ growth.T)[0]
            + math.exp(-up) * self.query_bias
        )
        k, of_k = _of_size_one(self.plain.project((y - y[:1]) @ growth.T)[1], -2)
        row = self.plain.score(q, k).abs().amax(-1, keepdim=True).log()  # -inf for zero rows
        most = (part * _SHARPEST - row).clamp_max(part * _STEEPEST)
        return q * torch.minimum(of_q + of_k + up + log_size, most).exp(), k

    def _renormalised(self, t: float, y: Tensor, part: float = 1.0) -> Tensor:
        """``P V y - V y`` with the weights of ``e^(tV) y``."""
        assert self.rate is not None and isinstance(self.f, Attention)
        p = self.f.weights(*self._queries_and_keys(t, y, part))
        if not self.sums:
            heads = p @ self.f.project(y)[2]
            return self._out(heads) - y @ self.rate.T
        v = self.f.project(y - y[:1])[2]
        return self._out(p @ v - v)

    def _out(self, heads: Tensor) -> Tensor:
        assert isinstance(self.f, Attention)
        return self.f.project_out(heads.transpose(-3, -2).flatten(-2))

    def _rate(self) -> Tensor:
        """``V = Σ_h W_h V_h``, if it commutes with every head."""
        f = self.f
        if self.measure is not None or not isinstance(f, Attention):
            raise InputError("`renormalise` goes with a layer on tokens. Found another flow.")
        held = (f.value_bias, f.output_bias, f.value_norm, f.entrance())
        if any(one is not None for one in held):
            raise InputError("not available: `renormalise` needs values that are linear in tokens.")
        maps = value_maps(f)
        total = maps.sum(0)
        off = (maps @ total - total @ maps).abs().max()
        if not float(off) <= _COMMUTES * max(float(maps.abs().max() ** 2), 1e-300):
            raise InputError(
                "not available: `renormalise` needs heads whose value maps commute with their "
                f"sum. Found some that do not, by {float(off):.2g}."
            )
        return total

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.norm == "layer" else x

    def _check_fits(self) -> None:
        try:
            out, again = self.read(self.start), self.read(self.start)
        except (RuntimeError, TypeError) as problem:
            raise InputError(
                f"The layer should read tokens {tuple(self.start.shape)}. Found that it cannot: "
                f"{problem}"
            ) from problem
        if out.shape != self.start.shape:
            raise InputError(
                "A flow needs a layer that keeps the width of its tokens. Found tokens "
                f"{tuple(self.start.shape)} and outputs {tuple(out.shape)}."
            )
        if not torch.allclose(out, again, rtol=1e-6, atol=1e-6 * float(out.abs().max())):
            raise InputError(
                "A flow needs a layer that always gives the same. Found one that draws random "
                "numbers: call `eval()`."
            )


def _of_size_one(z: Tensor, *axes: int) -> tuple[Tensor, Tensor]:
    """Rows, or matrices, scaled to largest entry 1, and the logarithms of the scales."""
    size = z.abs().amax((-1, *axes), keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return z / size, size.log()


def value_maps(layer: Attention) -> Tensor:
    """``W_h V_h`` of every head, ``(h, d_out, d)``: the maps from tokens to outputs."""
    _, _, value = layer.projections()
    groups = value.unflatten(0, (layer.num_groups, -1))
    by_head = layer.repeat_groups(groups)
    width = layer.num_heads * layer.value_width
    output = torch.eye(width).to(value) if layer.output is None else layer.output
    return output.unflatten(1, (layer.num_heads, -1)).transpose(0, 1) @ by_head


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(Solution):
    """Tokens at several times.

    The fields of `Solution`; states are ``(t, n, d)``, those of ``y`` if renormalised.
    """

    fields: tuple[Field, ...]  # the velocity, or that of each layer in turn

    @property
    def end(self) -> Tensor:
        """The last state, ``(n, d)``."""
        return self.states[-1]

    def attention(self, index: int) -> Tensor:
        """Attention weights at a time index, ``(h, n, n)``, of the layer applied to the state."""
        at = range(len(self.states))[index]
        if len(self.fields) > 1 and at == len(self.fields):
            raise InputError("No layer reads the state after the last one. Found its index.")
        field = self.fields[at % len(self.fields)]
        return field.weights(float(self.times[at]), self.states[at])


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
    ``y_i' = Σ_h W_h V_h Σ_j P_ij^h(e^(tV) y) y_j - V y_i``. ``e^(tV)`` enters through scores, in
    the log domain: if differences of tokens determine the result, any time can be reached. If it
    depends on digits beyond float64, such as those that separate two tokens equal along the
    fastest direction, the event ``rounding`` ends the flow.
    ``norm``: ``x_i' = Π_i f(X)_i``, with the projection ``Π_i`` orthogonal to ``x_i``, so that
    token norms are constant: the limit of residual layers with RMSNorm after each; with ``layer``
    tokens and outputs are also centred, as by LayerNorm.

    Holds for every layer of this package, including heads, masks and biases, and any function of
    tokens that keeps its shape; renormalised for layers with linear, commuting value maps.
    Computed in float64 on the CPU.

    Args:
        x: Tokens ``(n, d)``, or a measure: weighted atoms, with positions for a causal layer.
        times: Times of the reported states; increasing, from 0 on.
        events: Additional events; their states are as reported.
        max_evaluations: Maximum number of evaluations of the layer; the flow then ends with a note.

    Source: [geshkovski2023]; [sander2022].

    With all weight on one token, x' = x:

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
    return Trajectory(**held, fields=(field,))


def residual(
    f: Attention | Function | Sequence[Attention | Function],
    x: Tensor | TokenMeasure,
    *,
    step: float,
    layers: int | None = None,
    renormalise: bool = False,
    norm: Norm | None = None,
) -> Trajectory:
    """Residual layers ``x <- x + step f(X)``: Euler's method with fixed steps, of order 1.

    With a norm ``x <- N(x + step f(X))``, which preserves the norm of every token. The distance to
    `evolve` is of the order of a small step; for large steps there is no guarantee. One layer for
    all steps, or one per step; ends early with the event ``overflow`` or ``rounding``.

    >>> from lipscope.attention import DotProduct
    >>> one = torch.ones(1, 1)
    >>> residual(DotProduct(one, one, one), one, step=0.5, layers=2).end.item()
    2.25
    """
    several = isinstance(f, Sequence | nn.ModuleList)
    maps = list(f) if several else [f]
    layers = len(maps) if layers is None and several else layers
    if layers is None:
        raise InputError("`layers` should say how many steps one layer takes. Found none.")
    check_count("layers", layers)
    if several and layers != len(maps):
        raise InputError(f"`layers` should be {len(maps)}, one for every layer. Found `{layers}`.")
    check_positive("step", step)
    of = [Field(one, x, renormalise=renormalise, norm=norm) for one in maps]
    first = of[0].rate
    for one in of[1:]:
        if first is not None and not torch.equal(first, cast(Tensor, one.rate)):
            raise InputError("`renormalise` goes with layers of one `V`. Found layers of several.")
    states, times, ended = [of[0].start], [0.0], None
    for layer in range(layers):
        field, state = of[layer % len(of)], states[-1]
        if renormalise and not field.certain(times[-1], state) > 0:
            ended = Happened("rounding", times[-1])
            break
        new = field.onto(state + step * field(times[-1], state))
        if not float(new.abs().max()) <= LIMIT:
            ended = Happened("overflow", (layer + 1) * step)
            break
        states.append(new)
        times.append((layer + 1) * step)
    at, taken = torch.tensor(times, dtype=torch.float64), len(times) - 1
    happened = () if ended is None else (ended,)
    status: Status = "done" if ended is None else "event"
    why = ended and ended.name
    fields = tuple(of)
    return Trajectory(at, torch.stack(states), happened, status, why, taken, taken, fields)


# --- clusters


@dataclass(frozen=True, eq=False, repr=False)
class Clusters(Shown):
    """Groups of nearby points."""

    count: int  # number of groups
    # group of every point, from 0, numbered by first points
    labels: Int[Tensor, " n"]
    sizes: tuple[int, ...]  # number of points per group


@dataclass(frozen=True)
class Phase:
    """A time interval with a constant number of clusters."""

    count: int
    start: float
    end: float


def clusters(points: Float[Tensor, "n d"], radius: float) -> Clusters:
    """Connected components of the graph of pairs with ``|x_i - x_j| <= radius``.

    Single linkage: two points share a cluster if a chain of points, each within the radius of the
    next one, connects them. So the count decreases with the radius, and is independent of the
    order and position of the points.

    >>> clusters(torch.tensor([[0.0], [3.0], [1.0], [2.0], [9.0]]), 1.0).sizes
    (4, 1)
    """
    check_positive("radius", radius)
    check_tokens("points", points)
    points = points.double()
    near = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") <= radius
    count, found = connected_components(csr_matrix(near.numpy()), directed=False)
    labels = torch.as_tensor(found).long()
    return Clusters(int(count), labels, tuple(labels.bincount(minlength=count).tolist()))


def phases(times: Sequence[float] | Tensor, counts: Sequence[int]) -> tuple[Phase, ...]:
    """Intervals of constant count, in order; a long one other than the last is metastable.

    >>> phases([0.0, 1.0, 2.0, 3.0], [5, 2, 2, 1])[1]
    Phase(count=2, start=1.0, end=3.0)
    """
    try:
        at, found = [float(t) for t in times], [int(count) for count in counts]
    except (TypeError, ValueError):
        at, found = [], []
    if not found or len(at) != len(found):
        raise InputError(
            "`counts` should be one number for each of `times`, at least one. Found "
            f"{shown(counts)[:60]} and {shown(times)[:60]}."
        )
    counts = found
    starts = [i for i in range(len(counts)) if i == 0 or counts[i] != counts[i - 1]]
    ends = [*starts[1:], len(counts) - 1]
    return tuple(Phase(counts[i], at[i], at[j]) for i, j in zip(starts, ends, strict=True))


def leaders(weights: Float[Tensor, "h n n"]) -> tuple[int, ...]:
    """Tokens that receive more than half of some token's weight, mean over heads.

    In the limit of the renormalised flow every token attends to a single leader.

    >>> leaders(torch.tensor([[[1.0, 0.0], [0.9, 0.1]]]))
    (0,)
    """
    check_numbers("weights", weights, None, None, None)
    return tuple((weights.mean(0) > 0.5).any(0).nonzero()[:, 0].tolist())


def consensus(radius: float) -> Event:
    """The event ``consensus``: all tokens are within the radius of each other."""
    check_positive("radius", radius)
    return Event("consensus", lambda _, x: diameter(x) - radius, True)


def diameter(points: Float[Tensor, "n d"]) -> float:
    """The largest distance between two points."""
    check_tokens("points", points)
    return float(torch.pdist(points.double()).max()) if len(points) > 1 else 0.0


def outgrows(radius: float, *, terminal: bool = True) -> Event:
    """The event ``outgrown``: some token is further from the origin than the radius."""
    check_positive("radius", radius)
    return Event("outgrown", lambda _, x: radius - float(x.norm(dim=-1).max()), terminal)
