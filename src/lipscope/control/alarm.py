"""Signals of a layer in training, and alarms where one leaves the range of its last readings."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, exact


@dataclass(frozen=True)
class Reading:
    """The signals of one layer after a step; None where there is none.

    One rule for every number: it is that of the worst entry of the probe and of the worst head
    there, the largest one; of the entropy, the smallest.
    """

    step: int  # step of training
    layer: int  # index from 0
    module: str  # path of its module
    # the local Lipschitz constant; None where it cannot be measured, likewise the two that follow
    sigma: float | None
    relative: float | None  # ``sigma ‖X‖ / ‖f(X)‖``
    top_share: float | None  # share of the most sensitive token
    radius: float | None  # largest token norm of the map's input
    largest_logit: float | None  # over the pairs of tokens that see each other
    entropy: float | None  # mean over rows, in nats
    sink_mass: float | None  # mean over rows of the attention that one token gets
    weight_norm: float  # Frobenius norm of all its parameters
    update_norm: float | None  # Frobenius norm of what the step changed in them
    logits: tuple[float, ...] = ()  # largest logit of every head
    entropies: tuple[float, ...] = ()  # entropy of every head
    sinks: tuple[float, ...] = ()  # sink mass of every head
    problem: str | None = None  # why float32, or nothing, can measure sigma; None where all is well

    def signals(self) -> dict[str, float | None]:
        """The numbers, one for each signal."""
        return {k: v for k, v in asdict(self).items() if k not in _NO_SIGNALS}


_NO_SIGNALS = ("step", "layer", "module", "logits", "entropies", "sinks", "problem")


def furthest(readings: Sequence[Reading]) -> str:
    """Which layer's sigma rose most from the first reading to the last, as the end of a line."""
    first = {one.layer: one for one in reversed(readings) if one.sigma}
    last = {one.layer: one for one in readings if one.sigma}
    moved = [i for i in first if last[i] is not first[i]]
    if not moved:
        return ""
    ratios = {i: (last[i].sigma or 0.0) / (first[i].sigma or 1.0) for i in moved}
    most = max(ratios, key=lambda i: ratios[i])
    one, now = first[most], last[most]
    return (
        f"; sigma of layer {most} ({one.module}) went furthest, from {one.sigma:.4g} at step "
        f"{one.step} to {now.sigma:.4g} at step {now.step}"
    )


@torch.no_grad()
@exact
def largest_logits(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, " h"]:
    """The largest score of every head over the pairs that its mask lets see each other.

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
    """The spread of every head's attention, and the share that one token gets.

    Mean over rows of ``-Σ_j P_ij log P_ij`` in nats, and the largest over tokens ``j`` of the mean
    over rows of ``P_ij``: between ``1/n`` and 1, at 1 all rows read one token.

    Holds for every variant; rows of weights that do not add up to 1 are divided by their sum.
    """
    p = _attention_shares(layer, x)
    return torch.special.entr(p).sum(-1).mean(-1), p.mean(-2).amax(-1)


@torch.no_grad()
@exact
def attention_received(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, "h n"]:
    """The attention that every token gets: the mean over rows of ``P_ij``, from every head.

    Sums to 1 over tokens. Holds for every variant; rows are divided by their sum, as in
    `entropy_and_sink`. Under a causal mask a late token is read by few rows, and gets little.
    """
    return _attention_shares(layer, x).mean(-2)


def _attention_shares(layer: Attention, x: Tensor) -> Tensor:
    """Attention weights ``(h, n, n)``, rows divided by their sum."""
    q, k, _ = layer.project(x)
    p = layer.weights(q, k)
    return p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)


def joint_norm(tensors: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> float:
    """Frobenius norm of all tensors together, or of what has changed in them since ``before``."""
    parts = [t.detach().float() for t in tensors]
    if before is not None:
        parts = [now - then for now, then in zip(parts, before, strict=True)]
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


PAST = 15  # readings that say what is usual
FEWEST = 3  # of them, before anything can be unusual
WARM = 10  # of them, before what is merely unusual counts: signals move fast when training begins
EARLY = 10.0  # how far beyond everything before a signal must be until then
CALM = 30  # readings within the limits, after which a signal that was told may be told again
MOST = 5  # alerts of a run
LOSSES = 100  # steps that say how the loss usually varies
FEWEST_LOSSES = 10
LOSS, MEASURED = "loss", "measured"
# Signals and how they go wrong: up or down.
RISING = ("sigma", "relative", "radius", "largest_logit", "weight_norm", "update_norm")
FALLING = ("entropy",)
# What is below is no smaller: a largest logit below 1, an entropy of a hundredth of a nat.
_LEAST = {"largest_logit": 1.0, "entropy": 0.01}
# Of the threshold: sigma drifts least in healthy runs, and updates go with the learning rate.
_POWERS = {"sigma": 1, "update_norm": 10}
_OTHERS = 5
_LOOK = {
    "sigma": "the learning rate, then this layer's `largest_logit` and `weight_norm`",
    "relative": "this layer's output, which shrinks or points elsewhere, and its `sigma`",
    "radius": "the norm before this layer, and what earlier layers add to the residual stream",
    "largest_logit": "query and key weights; a norm of queries and keys, or a cap, holds logits",
    "entropy": "this layer's `largest_logit`: its heads come to read single tokens",
    "weight_norm": "the learning rate and weight decay",
    "update_norm": "the learning rate and the clipping of gradients",
    LOSS: "the batch of this step, and the learning rate",
    MEASURED: "this layer's `largest_logit`, and the learning rate: training is in float32 too",
}


@dataclass(frozen=True)
class Alert:
    """A signal that is far from what it was, or a layer that cannot be measured."""

    step: int  # step of training
    layer: int | None  # index of the layer where it is furthest; None for the loss
    module: str  # path of the layer's module; "" for the loss
    # name of the signal; ``measured`` for a layer that float32, or nothing, can measure
    signal: str
    value: float | None = None  # what it is
    low: float | None = None  # the smallest of its last readings, or losses
    high: float | None = None  # the largest
    # how many times above ``high`` (the entropy: below ``low``) it is; for the loss, in standard
    # deviations above its mean
    excess: float = math.inf
    how: str = ""  # the same, or what could not be measured, in words
    also: tuple[int, ...] = ()  # other layers where it is unusual at this step

    def __str__(self) -> str:
        """One line: layer and signal, the value, its usual range, what to look at."""
        where = f"layer {self.layer} ({self.module})"
        if self.also:
            where += f" (and of {', '.join(map(str, self.also))})"
        what = "the loss" if self.layer is None else f"`{self.signal}` of {where}"
        said = f"{where} {self.how}"
        if self.value is not None:
            said = (
                f"{what} is {self.value:.4g}, {self.how}; usually {self.low:.4g} to {self.high:.4g}"
            )
        return f"Step {self.step}: {said}. Look at {_LOOK[self.signal]}."


class Alarm:
    """What was usual for every layer and signal, and for the loss.

    A signal is unusual where it is ``times`` above the largest of its last 15 readings (the
    entropy: below the smallest). For sigma that is what is said; other signals move more by
    themselves, and are told at the fifth power of it, norms of updates at the tenth. Before
    there are ten readings, ten times is what counts.

    Told is the layer where it is most, once until 30 readings of all layers were within the
    limits; another layer before that only where it goes twice as far. A run has five alerts at
    most, and `summary` counts the others.
    """

    def __init__(self, times: float = 1.15, deviations: float = 4.0) -> None:
        self.times, self.deviations = times, deviations
        self.told: list[Alert] = []
        self._more: Counter[str] = Counter()
        self._past: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=PAST))
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._episodes: dict[str, list[Alert]] = {}
        self._calm: Counter[str] = Counter()
        self.z_score: float | None = None
        """Of the last loss among the hundred before; None before there are ten."""

    def threshold(self, signal: str) -> float:
        """How many times the largest of its last readings a signal must be."""
        return self.times ** _POWERS.get(signal, _OTHERS)

    def loss(self, step: int, value: float) -> list[Alert]:
        """Take the loss of a step in, and say whether it is unusual."""
        past, far = self._losses, []
        if past:
            mean, spread, high = fmean(past), pstdev(past), max(past)
            said = Alert(step, None, "", LOSS, value, min(past), high)
            if len(past) >= FEWEST_LOSSES and spread > 0:
                self.z_score = z = (value - mean) / spread
                how = f"{z:.4g} standard deviations above the mean of the last {len(past)}"
                far = [replace(said, excess=z, how=how)] if z >= self.deviations else []
            elif value > EARLY * high > 0 and math.isfinite(self.times):
                how = f"{value / high:.4g} times the largest before"
                far = [replace(said, excess=value / high, how=how)]
        past.append(value)
        return self._new(LOSS, far)

    def signals(self, readings: Sequence[Reading]) -> list[Alert]:
        """Take the readings of a step in, and say what of them is unusual and not told yet."""
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
        """The alerts of a run, counted by signal, in words."""
        if not self.told:
            return "no alerts"
        counts = Counter(f"`{one.signal}`" for one in self.told)
        first = self.told[0]
        where = "" if first.layer is None else f" of layer {first.layer}"
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        words = f"{len(self.told)} alerts ({said})" if len(self.told) > 1 else "1 alert"
        words += f", the first at step {first.step}: `{first.signal}`{where}"
        more = ", ".join(f"`{name}` {count}" for name, count in self._more.items())
        return words + (f"; {sum(self._more.values())} more were not told ({more})" if more else "")

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
        """What is told of the layers where a signal is unusual now; nothing until it was calm."""
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
        if len(self.told) >= MOST:
            self._more[signal] += 1
            return []
        self.told.append(alert)
        return [alert]


def excess_of(name: str, value: float, past: Sequence[float]) -> float | None:
    """How many times above the largest of its last readings a signal is.

    For one that falls, how many times below the smallest. None before there are three readings,
    and where there is no ratio.

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
