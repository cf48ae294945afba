"""Training signals of attention layers, and alarms on unusual values."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, pstdev

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, exact


@dataclass(frozen=True)
class Reading:
    """The signals of one layer after a step; None if unavailable.

    Each number is that of the worst probe entry and the worst head: the largest one, for the
    entropy the smallest.
    """

    step: int  # step of training
    layer: int  # index from 0
    module: str  # path of the module
    # the local Lipschitz constant; None if it cannot be measured, likewise the next two
    sigma: float | None
    relative: float | None  # ``sigma ‖X‖ / ‖f(X)‖``
    top_share: float | None  # share of the most sensitive token
    radius: float | None  # largest token norm of the map's input
    largest_logit: float | None  # over the visible pairs of tokens
    entropy: float | None  # mean over rows, in nats
    sink_mass: float | None  # mean over rows of the attention received by one token
    weight_norm: float  # Frobenius norm of all parameters
    update_norm: float | None  # Frobenius norm of their change in the step
    logits: tuple[float, ...] = ()  # largest logit of every head
    entropies: tuple[float, ...] = ()  # entropy of every head
    sinks: tuple[float, ...] = ()  # sink mass of every head
    problem: str | None = None  # why sigma cannot be measured, in float32 or at all; else None

    def signals(self) -> dict[str, float | None]:
        """The values by signal."""
        return {k: v for k, v in asdict(self).items() if k not in _NO_SIGNALS}


_NO_SIGNALS = ("step", "layer", "module", "logits", "entropies", "sinks", "problem")


def furthest(readings: Sequence[Reading]) -> str:
    """The layer whose sigma changed most between the first and last reading, as a phrase."""
    first = {one.layer: one for one in reversed(readings) if one.sigma}
    last = {one.layer: one for one in readings if one.sigma}
    moved = [i for i in first if last[i] is not first[i]]
    if not moved:
        return ""
    ratios = {i: (last[i].sigma or 0.0) / (first[i].sigma or 1.0) for i in moved}
    most = max(ratios, key=lambda i: ratios[i])
    one, now = first[most], last[most]
    return (
        f"; sigma of layer {most} ({one.module}) changed most, from {one.sigma:.4g} at step "
        f"{one.step} to {now.sigma:.4g} at step {now.step}"
    )


@torch.no_grad()
@exact
def largest_logits(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, " h"]:
    """The largest score of every head over the pairs that its mask leaves visible.

    Scaled and soft-capped, before a bias of the scores. Holds for every variant.
    """
    q, k, _ = layer.project(x)
    s = layer.capped(layer.score(q, k))
    every = slice(0, len(x))
    visible = layer.visible(every, every, x.device)
    return (s if visible is None else s.masked_fill(~visible, -torch.inf)).flatten(1).amax(1)


@torch.no_grad()
@exact
def entropy_and_sink(
    layer: Attention, x: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """The entropy of every head's attention, and the share of its most attended token.

    Mean over rows of ``-Σ_j P_ij log P_ij`` in nats, and the maximum over tokens ``j`` of the mean
    over rows of ``P_ij``: between ``1/n`` and 1; at 1 all rows attend to a single token.

    Holds for every variant; rows of weights that do not add up to 1 are divided by their sum.
    """
    p = _attention_shares(layer, x)
    return torch.special.entr(p).sum(-1).mean(-1), p.mean(-2).amax(-1)


@torch.no_grad()
@exact
def attention_received(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, "h n"]:
    """The attention that every token receives: the mean over rows of ``P_ij``, per head.

    Sums to 1 over tokens where every row attends to one. Holds for every variant; rows are divided
    by their sum, as in `entropy_and_sink`. Under a causal mask few rows see late tokens, which
    receive little.
    """
    return _attention_shares(layer, x).mean(-2)


def _attention_shares(layer: Attention, x: Tensor) -> Tensor:
    """Attention weights ``(h, n, n)``, rows divided by their sum."""
    q, k, _ = layer.project(x)
    p = layer.weights(q, k)
    return p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)


def joint_norm(tensors: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> float:
    """Joint Frobenius norm of tensors, or of their change since ``before``."""
    parts = [t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    if before is not None:
        parts = [now - then for now, then in zip(parts, before, strict=True)]
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


PAST = 15  # readings that define the usual range
FEWEST = 3  # minimum number of readings for any alert
WARM = 10  # readings before moderate excesses count: signals change fast early in training
EARLY = 10.0  # factor over all earlier readings required until then
CALM = 30  # readings within the limits after which a signal may be reported again
MOST = 5  # maximum number of alerts of a run
LOSSES = 100  # steps that define the usual variation of the loss
FEWEST_LOSSES = 10
LOSS, MEASURED = "loss", "measured"
# Signals and their direction of failure: up or down.
RISING = ("sigma", "relative", "radius", "largest_logit", "weight_norm", "update_norm")
FALLING = ("entropy",)
# Lower limits of the reference value: a largest logit of 1, an entropy of 0.01 nats.
_LEAST = {"largest_logit": 1.0, "entropy": 0.01}
# Powers of the threshold: sigma drifts least in healthy runs; updates follow the learning rate.
_POWERS = {"sigma": 1, "update_norm": 10}
_OTHERS = 5
_LOOK = {
    "sigma": "the learning rate, then this layer's `largest_logit` and `weight_norm`",
    "relative": "this layer's output, which shrinks or changes direction, and its `sigma`",
    "radius": "the norm before this layer, and what earlier layers add to the residual stream",
    "largest_logit": "query and key weights; query and key norms, or a cap, limit logits",
    "entropy": "this layer's `largest_logit`: its heads start to attend to single tokens",
    "weight_norm": "the learning rate and weight decay",
    "update_norm": "the learning rate and the clipping of gradients",
    LOSS: "the batch of this step, and the learning rate",
    MEASURED: "this layer's `largest_logit`, and the learning rate: training is in float32 too",
}


@dataclass(frozen=True)
class Alert:
    """A signal far outside its usual range, or a layer that cannot be measured."""

    step: int  # step of training
    layer: int | None  # index of the layer with the largest excess; None for the loss
    module: str  # path of the layer's module; "" for the loss
    # name of the signal; ``measured`` for a layer that cannot be measured, in float32 or at all
    signal: str
    value: float | None = None  # current value
    low: float | None = None  # smallest recent reading, or loss
    high: float | None = None  # largest recent reading, or loss
    # ratio to ``high`` (entropy: of ``low`` to it); for the loss, in standard deviations above its
    # mean
    excess: float = math.inf
    how: str = ""  # the excess, or what could not be measured, in words
    also: tuple[int, ...] = ()  # other layers with an unusual value at this step

    def __str__(self) -> str:
        """One line: layer and signal, value, usual range, advice."""
        where = f"layer {self.layer} ({self.module})"
        if self.also:
            where += f" (and of {', '.join(map(str, self.also))})"
        what = "the loss" if self.layer is None else f"`{self.signal}` of {where}"
        text = f"{where} {self.how}"
        if self.value is not None:
            text = (
                f"{what} is {self.value:.4g}, {self.how}; usually {self.low:.4g} to {self.high:.4g}"
            )
        return f"Step {self.step}: {text}. Look at {_LOOK[self.signal]}."


class Alarm:
    """Detect unusual signals of layers, and unusual losses.

    A signal is unusual if it exceeds the largest of its last 15 readings by the factor ``times``
    (the entropy: if it falls below the smallest by it). This is the rule for sigma; noisier
    signals use its fifth power, update norms its tenth. Before ten readings, the factor is ten.

    Reported is the layer with the largest excess, and again only after 30 readings of all layers
    within the limits; another layer before that only at twice the excess. A run has at most five
    alerts; `summary` counts the others.
    """

    def __init__(self, times: float = 1.15, deviations: float = 4.0) -> None:
        self.times, self.deviations = times, deviations
        self.alerts: list[Alert] = []
        self._more: Counter[str] = Counter()
        self._past: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=PAST))
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._episodes: dict[str, list[Alert]] = {}
        self._calm: Counter[str] = Counter()
        self.z_score: float | None = None
        """Standard score of the last loss among up to 100 before; None below ten, or if equal."""

    def threshold(self, signal: str) -> float:
        """The factor over the largest recent reading from which a signal is unusual."""
        return self.times ** _POWERS.get(signal, _OTHERS)

    def loss(self, step: int, value: float) -> list[Alert]:
        """Record the loss of a step; return an alert if it is unusual."""
        past, far, self.z_score = self._losses, [], None
        if past:
            usual, spread, high = mean(past), pstdev(past), max(past)
            alert = Alert(step, None, "", LOSS, value, min(past), high)
            if len(past) >= FEWEST_LOSSES and spread > 0:
                self.z_score = z = (value - usual) / spread
                how = f"{z:.4g} standard deviations above the mean of the last {len(past)}"
                far = [replace(alert, excess=z, how=how)] if z >= self.deviations else []
            elif value > EARLY * high > 0 and math.isfinite(self.times):
                how = f"{value / high:.4g} times the largest before"
                far = [replace(alert, excess=value / high, how=how)]
        past.append(value)
        return self._new(LOSS, far)

    def signals(self, readings: Sequence[Reading]) -> list[Alert]:
        """Record the readings of a step; return new alerts."""
        off = [
            Alert(one.step, one.layer, one.module, MEASURED, how=one.problem)
            for one in readings
            if one.problem and math.isfinite(self.times)
        ]
        found = self._new(MEASURED, off)
        for name in (*RISING, *FALLING):
            far = [alert for one in readings if (alert := self._unusual(name, one)) is not None]
            found += self._new(name, far)
        return found

    def summary(self) -> str:
        """A summary of a run's alerts, counted by signal."""
        if not self.alerts:
            return "no alerts"
        counts = Counter(f"`{one.signal}`" for one in self.alerts)
        first = self.alerts[0]
        where = "" if first.layer is None else f" of layer {first.layer}"
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        words = f"{len(self.alerts)} alerts ({listed})" if len(self.alerts) > 1 else "1 alert"
        words += f", the first at step {first.step}: `{first.signal}`{where}"
        more = ", ".join(f"`{name}` {count}" for name, count in self._more.items())
        return words + (f"; {sum(self._more.values())} more suppressed ({more})" if more else "")

    def _unusual(self, name: str, one: Reading) -> Alert | None:
        value = getattr(one, name)
        if value is None or not math.isfinite(value):
            return None
        past = self._past[one.layer, name]
        excess = excess_of(name, value, past)
        least = self.threshold(name)
        least = max(least, EARLY) if len(past) < WARM else least
        found = None
        if excess is not None and excess >= least:
            end = "below the bottom" if name in FALLING else "the top"
            how = f"{excess:.4g} times {end} of its usual range"
            low, high = min(past), max(past)
            found = Alert(one.step, one.layer, one.module, name, value, low, high, excess, how)
        past.append(value)
        return found

    def _new(self, signal: str, far: Sequence[Alert]) -> list[Alert]:
        """Alerts for the layers with an unusual signal, unless reported since it was calm."""
        before = self._episodes.get(signal, [])
        if not far:
            self._calm[signal] += 1
            if self._calm[signal] >= CALM:
                self._episodes.pop(signal, None)
            return []
        self._calm[signal] = 0
        worst = max(far, key=lambda one: one.excess)
        known = {layer for one in before for layer in (one.layer, *one.also)}
        if before and (worst.layer in known or worst.excess < 2 * before[-1].excess):
            return []
        also = tuple(one.layer for one in far if one is not worst and one.layer is not None)
        alert = replace(worst, also=also)
        self._episodes[signal] = [*before, alert]
        if len(self.alerts) >= MOST:
            self._more[signal] += 1
            return []
        self.alerts.append(alert)
        return [alert]


def excess_of(name: str, value: float, past: Sequence[float]) -> float | None:
    """The ratio of a signal to the largest of its last readings.

    For a falling signal, the ratio of the smallest one to it. None before three readings, and if
    the ratio is undefined.

    >>> excess_of("sigma", 6.0, [1.0, 2.0, 3.0]), excess_of("sigma", 6.0, [1.0])
    (2.0, None)
    """
    if len(past) < FEWEST:
        return None
    least = _LEAST.get(name, 0.0)
    if name in FALLING:
        return max(min(past), least) / max(value, least)
    usual = max(*past, least)
    return max(value, least) / usual if usual > 0 else None
