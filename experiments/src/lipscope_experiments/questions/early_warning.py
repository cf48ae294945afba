"""Which signal of a monitor warns before training diverges, how early, how often for nothing."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import InputError, Monitor
from lipscope.charts import Panel, Series
from lipscope.control import PAST, WARM, Alarm, excess_of
from lipscope.pages import number
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, grouped

_WIDTH, _HEADS, _LENGTH, _BATCH, _STEPS = 32, 4, 32, 4, 100
_MOMENTUM = 0.9
_TOO_HIGH = 1.0  # nats above the lowest mean of five losses before: training has diverged
_CHOSEN, _SEEDS = 8, 12  # seeds of the runs on which the monitor's thresholds were chosen
Statistic = Callable[[Record], float]
_peak_rate: Statistic = operator.itemgetter("peak")
LOSS = "loss z-score"
_RATE = "the peak learning rate itself"
SIGNALS = (
    "sigma",
    "relative",
    "top_share",
    "radius",
    "largest_logit",
    "entropy",
    "sink_mass",
    "weight_norm",
    "update_norm",
)


class ByteDecoder(nn.Module):
    """A small causal decoder on bytes, of torch's own layers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, _WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(_LENGTH, _WIDTH))
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 2 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_LENGTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next byte."""
        hidden = self.tokens(input_ids) + self.positions
        return self.head(self.body(hidden, mask=self.mask, is_causal=True))


@experiment(
    "control/early-warning",
    title="Early warning: signals of a monitor before training diverges",
    cite="derived here",
)
def early_warning(study: Study) -> None:
    """Small decoders trained at rates that grow, a third to a half of them too far."""
    text = study.texts[0]
    data = torch.tensor(list(text.content.encode()[:200_000]))
    keys = grid(
        depth=study.pick((1,), (1, 2, 3)),
        peak=study.pick((0.2, 0.8), (0.3, 0.36, 0.43, 0.52)),
        seed=range(study.pick(2, _SEEDS)),
        every=[study.pick(8, 2)],
        text=[text.sha256],
    )
    runs = study.values("runs", keys, functools.partial(_train_until_divergence, data))
    found = {name: _judged(name, runs) for name in (*SIGNALS, LOSS)}
    _draw_alarms(study, runs, found)
    _of_alarms(study, runs, found)


def _train_until_divergence(
    data: Tensor, depth: int, peak: float, seed: int, every: int, **_: str
) -> Record:
    """One run: when it diverged, and the excess of every signal at every reading before."""
    gen = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ByteDecoder(depth)
    optimiser = torch.optim.SGD(net.parameters(), lr=peak, momentum=_MOMENTUM)
    monitor = Monitor(net, _byte_windows(data, 1, gen)[:, :-1], every=every, alert=None)
    alarm, losses, scores = Alarm(), [], {}
    onset: int | None = None
    for step in range(1, _STEPS + 1):
        for group in optimiser.param_groups:
            group["lr"] = peak * step / _STEPS
        ids = _byte_windows(data, _BATCH, gen)
        logits = net(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        losses.append(float(loss.detach()))
        if _diverged(losses):
            onset = step
            break
        alarm.loss(step, losses[-1])
        scores[step] = alarm.z_score
        optimiser.zero_grad()
        loss.backward()
        try:
            with monitor.step():
                optimiser.step()
            if step % every == 0:  # as the monitor itself would be told, without saying it
                alarm.signals([one for one in monitor.readings if one.step == step])
        except InputError:  # a weight is not finite any more
            onset = step + 1
            break
    steps, excess = _excesses(monitor)
    return {
        "onset": onset,
        "alerts": [[one.step, one.signal] for one in alarm.told],
        "steps": steps,
        "excess": excess | {LOSS: [scores.get(step) for step in steps]},
        "last_loss": losses[-1] if math.isfinite(losses[-1]) else None,
    }


def _byte_windows(data: Tensor, count: int, gen: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - _LENGTH - 1, (count,), generator=gen)
    return torch.stack([data[i : i + _LENGTH + 1] for i in starts.tolist()])


def _diverged(losses: Sequence[float]) -> bool:
    if not math.isfinite(losses[-1]):
        return True
    means = [fmean(losses[i : i + 5]) for i in range(len(losses) - 4)]
    return bool(means) and means[-1] > min(means) + _TOO_HIGH


def _excesses(monitor: Monitor) -> tuple[list[int], dict[str, list[float | None]]]:
    """The steps of the readings, and by signal the largest excess over layers at each."""
    steps = [*dict.fromkeys(one.step for one in monitor.readings)]
    found: dict[str, list[float | None]] = {}
    for name in SIGNALS:
        past: dict[int, deque[float]] = {}
        by_step: dict[int, list[float]] = {step: [] for step in steps}
        for one in monitor.readings:
            value = one.signals()[name]
            if value is None or not math.isfinite(value):
                continue
            held = past.setdefault(one.layer, deque(maxlen=PAST))
            excess = excess_of(name, value, held) if len(held) >= WARM else None
            if excess is not None and math.isfinite(excess):
                by_step[one.step].append(excess)
            held.append(value)
        found[name] = [max(some, default=None) for some in by_step.values()]
    return steps, found


def _judged(name: str, runs: Sequence[Record]) -> dict[str, Any]:
    """Warnings, false alarms and misses at the monitor's own threshold, and at every other."""
    threshold = Alarm().deviations if name == LOSS else Alarm().threshold(name)
    bad, good = _diverging_and_stable(runs)
    warned = [one["onset"] - step for one in bad if (step := _first_alarm(one, name, threshold))]
    values = ([v for v in one["excess"][name] if v is not None] for one in runs)
    tops = {id(one): max(some, default=0.0) for one, some in zip(runs, values, strict=True)}

    def largest(run: Record) -> float:
        return tops[id(run)]

    return {
        "threshold": threshold,
        "steps": warned,
        "missed": len(bad) - len(warned),
        "false": sum(_first_alarm(one, name, threshold) is not None for one in good),
        "area": _estimate(runs, largest),
        "alike": _estimate(runs, largest, alike=True),
        "curve": _trade_off(runs, largest),
    }


def _diverging_and_stable(runs: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Those that diverge, and those that do not."""
    bad = [one for one in runs if one["onset"] is not None]
    return bad, [one for one in runs if one["onset"] is None]


def _trade_off(runs: Sequence[Record], of: Statistic) -> list[tuple[float, float]]:
    """Shares of stable and of diverging runs above every threshold of a number."""
    bad, good = ([of(one) for one in some] for some in _diverging_and_stable(runs))

    def above(some: list[float], level: float) -> float:
        return sum(value >= level for value in some) / max(len(some), 1)

    levels = sorted({*good, *bad, math.inf}, reverse=True)
    return [(above(good, level), above(bad, level)) for level in levels]


def _order_share(runs: Sequence[Record], of: Statistic, *, alike: bool = False) -> float | None:
    """The share of pairs of a diverging and a stable run that a number puts in this order.

    With ``alike`` only pairs of the same rate and depth.
    """
    pairs = [
        (of(bad), of(good))
        for bad, good in itertools.product(*_diverging_and_stable(runs))
        if not alike or all(bad[name] == good[name] for name in ("peak", "depth"))
    ]
    wins = [1.0 if b > g else 0.5 if b == g else 0.0 for b, g in pairs]
    return fmean(wins) if wins else None


def _estimate(
    runs: Sequence[Record], of: Statistic, *, alike: bool = False
) -> tuple[float, float, float] | None:
    """An area with its 95 % interval: the jackknife's, every run left out once."""
    area = _order_share(runs, of, alike=alike)
    without = [_order_share([*runs[:k], *runs[k + 1 :]], of, alike=alike) for k in range(len(runs))]
    known = [one for one in without if one is not None]
    if area is None or len(known) < len(runs):
        return None
    middle, count = fmean(known), len(known)
    error = 1.96 * math.sqrt((count - 1) / count * sum((one - middle) ** 2 for one in known))
    return area, max(area - error, 0.0), min(area + error, 1.0)


def _first_alarm(run: Record, name: str, threshold: float) -> int | None:
    """The first reading at which a signal is at its threshold."""
    pairs = zip(run["steps"], run["excess"][name], strict=True)
    return next((step for step, value in pairs if value is not None and value >= threshold), None)


def _draw_alarms(study: Study, runs: Sequence[Record], found: dict[str, dict[str, Any]]) -> None:
    rate = Series(_RATE, tuple(_trade_off(runs, _peak_rate)), "dashes")
    chance = Series("chance", ((0.0, 0.0), (1.0, 1.0)), "dashes")
    axes = "stable runs with an alarm", "diverging runs with one", False, False
    panels = [
        Panel(
            f"{name.replace('_', ' ')}: area {_area_words(one['area'])}",
            (Series("the signal", tuple(one["curve"])), rate, chance),
            *axes,
        )
        for name, one in sorted(found.items(), key=lambda pair: -(pair[1]["area"] or (0.0,))[0])
    ]
    title = "Alarms before training diverges, at every threshold"
    study.draw("early-warning", title, panels, columns=4)


def _of_alarms(study: Study, runs: Sequence[Record], found: dict[str, dict[str, Any]]) -> None:
    bad = [one["onset"] for one in runs if one["onset"] is not None]
    stable = len(runs) - len(bad)
    lines = [
        (
            name,
            f"{one['threshold']:.3g}",
            f"{len(one['steps'])} of {len(bad)}",
            f"{median(one['steps']):g}" if one["steps"] else "–",
            str(one["missed"]),
            f"{one['false']} of {stable}",
            _area_words(one["area"]),
            _area_words(one["alike"]),
        )
        for name, one in found.items()
    ]
    rate = _estimate(runs, _peak_rate)
    lines.append((f"{_RATE}, which was varied", "–", "–", "–", "–", "–", _area_words(rate), "–"))
    columns = ("signal", "alarm at", "warned", "steps before", "missed", "false alarms", "area")
    columns += ("area, same rate and depth",)
    usual = f"between {min(bad)} and {max(bad)}" if bad else "none"
    caught, most = _told(runs)
    study.claim("runs that diverge", "a third to a half, by design", f"{len(bad)} of {len(runs)}")
    study.claim(
        "diverging runs in which the monitor alerts before, at its defaults",
        "–",
        f"{caught} of {len(bad)}; a stable run has at most {most}",
    )
    study.claim(
        "signal that tells diverging runs from stable ones best",
        "practitioners: the norm of updates moves first, not every rise leads to a spike",
        f"{_best_signal(found, 'area')}; {_RATE}, which was varied, {_area_words(rate)}",
    )
    study.claim("the same among runs of one rate and one depth", "–", _best_signal(found, "alike"))
    _alerts(study, runs)
    study.table("Signals", tuple(lines), columns)
    study.remark(
        f"A run diverges at the step whose mean loss over five steps is {number(_TOO_HIGH)} "
        f"nat above the lowest before, or not finite ({usual} of {_STEPS} steps). Readings up "
        "to there count.",
        f"The monitor's defaults were chosen on the runs of seeds 0 to {_CHOSEN - 1}; those of "
        "the other seeds were run once, afterwards.",
        "The statistic of a signal is how many times above the largest (entropy: below the "
        f"smallest) of its last {PAST} readings it is, from the {WARM + 1}th reading on, in "
        "the layer where that is most; of the loss its deviations above the mean of the last "
        "hundred. An alarm is the first reading at the threshold. Area: the share of pairs of "
        "a diverging and a stable run whose largest statistics are in this order, with the "
        "jackknife's 95 % interval over runs.",
        f"Decoders of width {_WIDTH} on bytes of the default text, SGD with momentum "
        f"{_MOMENTUM}, whose rate grows linearly over {_STEPS} steps: norms of updates grow "
        "with it in stable runs, too. Stable runs have more readings than those that stop "
        "early, and so more chances of a false alarm.",
        "A rate that is too large moves every signal and makes runs diverge: an area that is "
        "no larger than that of the rate says nothing that the rate does not. Pairs of one "
        f"rate and one depth, of which there are {_like_pairs(runs)}, leave it out.",
    )


def _told(runs: Sequence[Record]) -> tuple[int, int]:
    """How many diverging runs had an alert before, and the most alerts of a stable run."""
    bad, good = _diverging_and_stable(runs)
    alerts = (len(one["alerts"]) for one in good)
    return sum(bool(one["alerts"]) for one in bad), max(alerts, default=0)


def _alerts(study: Study, runs: Sequence[Record]) -> None:
    """What the monitor says by itself, on the runs that its defaults were chosen on and others."""
    lines = []
    for some in (range(_CHOSEN), range(_CHOSEN, _SEEDS)):
        own = [one for one in runs if one["seed"] in some]
        if not own:
            continue
        bad, good = _diverging_and_stable(own)
        caught = [one for one in bad if one["alerts"]]
        lead = [one["onset"] - one["alerts"][0][0] for one in caught]
        first = Counter(one["alerts"][0][1] for one in caught)
        lines.append(
            (
                f"{some[0]} to {max(one['seed'] for one in own)}",
                f"{len(caught)} of {len(bad)}",
                f"{median(lead):g}" if lead else "–",
                ", ".join(f"{name} {count}" for name, count in first.most_common()) or "–",
                f"{sum(bool(one['alerts']) for one in good)} of {len(good)}",
                str(_told(own)[1]),
            )
        )
    columns = ("seeds", "diverging runs with an alert", "steps before", "first alert")
    columns += ("stable runs with an alert", "most alerts of a stable run")
    study.table("The monitor's own alerts", tuple(lines), columns)


def _area_words(value: tuple[float, float, float] | None) -> str:
    return "–" if value is None else "{:.2f} ({:.2f} to {:.2f})".format(*value)


def _best_signal(found: dict[str, dict[str, Any]], which: str) -> str:
    known = {name: one[which] for name, one in found.items() if one[which] is not None}
    if not known:
        return "no such pair"
    name = max(known, key=lambda one: known[one][0])
    return f"{name}, area {_area_words(known[name])}"


def _like_pairs(runs: Sequence[Record]) -> int:
    parts = (_diverging_and_stable(own) for _, own in grouped(runs, "peak", "depth"))
    return sum(len(bad) * len(good) for bad, good in parts)
