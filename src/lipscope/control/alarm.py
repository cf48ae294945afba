"""When a signal of training is unusual: beside its own past, by layer."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median, pstdev

PAST = 10  # readings that say what is usual
FEWEST = 3  # of them, before anything can be unusual
LOSSES = 100  # steps that say how the loss usually varies
FEWEST_LOSSES = 10
# Signals and how they go wrong: up or down. A largest logit below 1 is no larger than 1.
RISING = ("sigma", "relative", "radius", "largest_logit", "weight_norm", "update_norm")
FALLING = ("entropy",)
_LEAST = {"largest_logit": 1.0}


@dataclass(frozen=True)
class Alert:
    """A signal that is far from what it was.

    Attributes:
        step: Step of training.
        layer: Index; None for the loss.
        module: Path of the layer's module; "" for the loss.
        signal: Name of the signal.
        value: What it is.
        usual: The median of its last readings; the mean for the loss.
        excess: How many times more (for the entropy: less) that is; for the loss, in standard
            deviations.
    """

    step: int
    layer: int | None
    module: str
    signal: str
    value: float
    usual: float
    excess: float

    def __str__(self) -> str:
        """One line, which names layer and signal."""
        value, usual = f"{self.value:.4g}", f"{self.usual:.4g}"
        if self.layer is None:
            return (
                f"Step {self.step}: the loss is {value}, {self.excess:.1f} standard deviations "
                f"above its mean {usual}."
            )
        side = "below" if self.signal in FALLING else "above"
        return (
            f"Step {self.step}: `{self.signal}` of layer {self.layer} ({self.module}) is {value}, "
            f"{self.excess:.1f} times {side} its usual {usual}."
        )


class Alarm:
    """What was usual for every layer and signal, and for the loss.

    Args:
        times: How many times the median of the last ten readings is unusual.
        deviations: How many standard deviations above the mean of the last 100 losses.
    """

    def __init__(self, times: float = 2.0, deviations: float = 4.0) -> None:
        self.times, self.deviations = times, deviations
        self._past: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=PAST))
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._z: tuple[float, float, float] | None = None

    def loss(self, value: float) -> None:
        """Take the loss of a step in."""
        if len(self._losses) >= FEWEST_LOSSES:
            mean, spread = fmean(self._losses), pstdev(self._losses)
            if spread > 0:
                self._z = value, mean, (value - mean) / spread
        self._losses.append(value)

    @property
    def z_score(self) -> float | None:
        """Of the last loss among the hundred before; None before there are ten."""
        return None if self._z is None else self._z[2]

    def loss_alert(self, step: int) -> Alert | None:
        """Whether the last loss is unusual."""
        if self._z is None or self._z[2] < self.deviations:
            return None
        return Alert(step, None, "", "loss", *self._z)

    def signals(
        self, step: int, layer: int, module: str, values: Mapping[str, float | None]
    ) -> list[Alert]:
        """Take the signals of a layer in, and say which of them are unusual."""
        found = []
        for name in (*RISING, *FALLING):
            value = values.get(name)
            if value is None or not math.isfinite(value):
                continue
            past = self._past[layer, name]
            excess = excess_of(name, value, past)
            if excess is not None and excess >= self.times:
                found.append(Alert(step, layer, module, name, value, median(past), excess))
            past.append(value)
        return found


def excess_of(name: str, value: float, past: deque[float]) -> float | None:
    """How many times above its median a signal is, or below it for one that falls.

    None before there are three readings, and where there is no ratio.

    >>> excess_of("sigma", 6.0, deque([1.0, 2.0, 3.0])), excess_of("sigma", 6.0, deque([1.0]))
    (3.0, None)
    """
    if len(past) < FEWEST:
        return None
    least = _LEAST.get(name, 0.0)
    now, usual = max(value, least), max(median(past), least)
    if name in FALLING:
        now, usual = usual, now
    return now / usual if usual > 0 else None
