"""Which signal warns before training diverges, where the learning rate is the same for all?"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lipscope import InputError, Monitor
from lipscope.charts import Panel
from lipscope.control import Alarm
from lipscope.models import load_model
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, chosen, grouped, level, line, share

_LENGTH, _BATCH, _STEPS = 32, 4, 100
_PEAK, _MOMENTUM = 0.45, 0.9
_TOO_HIGH = 1.0  # nats above the lowest mean of five losses before: training has diverged
_ASKED, _MAIN = (24, 48, 72), 48  # steps at which a signal is asked about the rest of the run
_DRAWS = 2000
_FAMILIES = {"llama": "no norm of queries and keys", "qwen3": "a norm of queries and keys"}
_GROWS = {"linear": lambda part: part, "cosine": lambda part: (1 - math.cos(math.pi * part)) / 2}
LOSS, GRADIENT = "loss", "gradient norm"
BASELINES = (LOSS, GRADIENT, "weight_norm")
TESTED = ("sigma", "largest_logit", "entropy")
LEVEL, RISE = "level", "rise since step 0"
SIGNALS = tuple(itertools.product((*BASELINES, *TESTED), (LEVEL, RISE)))
PLAN = (
    "Question: among runs with one learning rate, which signal tells at a step those that will "
    "diverge from those that will not, and does sigma say more than the loss, the gradient norm "
    "and the norm of weights?",
    f"Small decoders of two blocks, width 32, on bytes: Llama's, and Qwen3's, whose queries and "
    f"keys have a norm. SGD with momentum {_MOMENTUM}; the rate grows to {_PEAK} over {_STEPS} "
    f"steps, linearly or as a cosine. 50 seeds for each. The rate lies between two that were "
    "tried on eight other seeds, before any signal was looked at; it was to let half diverge.",
    f"At steps {', '.join(map(str, _ASKED))}: of the runs that have not diverged yet, the share of "
    "pairs of one that will and one that will not, of the same schedule, in which the first has "
    "the higher signal (of entropy the lower). Signals: the worst of the layers; loss and gradient "
    "norm are means of the last five steps. Each as it is, and less its value at step 0. "
    f"Baselines: {', '.join(BASELINES)}. Tested: {', '.join(TESTED)}.",
    "One joint test for each model and step: which runs diverge is permuted within schedules; the "
    "largest distance from 1/2 of all twelve counts, so that both signs do; p times three, for "
    "three steps. Intervals of areas and of their gaps: the jackknife's, 95 %, over runs.",
    f"Sigma is refuted as a warning where neither of its areas is above 1/2 at step {_MAIN} "
    "(p < 0.05); as more than the baselines where the interval of the gap of its better area to "
    "the better one of any baseline holds 0.",
)


@experiment("control/early-warning")
def early_warning(study: Study) -> None:
    """Early warning: which signal tells a run that will diverge, at one learning rate."""
    study.plan(*PLAN)
    text = study.texts[0]
    data = torch.tensor(list(text.content.encode()[:200_000]))
    seeds, every = study.pick((2, 24), (50, 4))
    axes = {"family": _FAMILIES, "schedule": _GROWS, "seed": range(seeds)}
    keys = grid(**axes, every=[every], text=[text.sha256])
    runs = study.values("runs", keys, functools.partial(_train_until_divergence, data))
    panels: list[Panel] = []
    for family, name in _FAMILIES.items():
        panels += _of_runs(study, name, chosen(runs, family=family))
    study.draw("early-warning", "Telling runs that will diverge", panels, columns=2)
    study.remark(
        f"A run diverges at the step whose mean loss over five steps is {_TOO_HIGH:g} nat above "
        "the lowest before, or not finite.",
        "Runs differ by their seed alone (weights and batches), within a model and a schedule.",
        "What it does not show: larger models, other optimisers, divergence that builds up over "
        "thousands of steps; and alerts where the rate is level: here it grows all the time.",
    )


def _train_until_divergence(
    data: Tensor, family: str, schedule: str, seed: int, every: int, **_: Any
) -> Record:
    """One run: when it diverged, every signal at every reading before, and the alerts."""
    sizes = "hidden_size=32,num_attention_heads=4,num_key_value_heads=4,num_hidden_layers=2"
    more = ",head_dim=8" * (family == "qwen3")
    net: Any = load_model(
        f"random:{family}:{sizes},intermediate_size=64,vocab_size=256{more}", seed=seed
    ).model.train()
    windows, gen = data.unfold(0, _LENGTH + 1, 1), torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return windows[torch.randint(len(windows) - 1, (count,), generator=gen)]

    table = net.get_input_embeddings().weight
    optimiser = torch.optim.SGD(net.parameters(), lr=_PEAK, momentum=_MOMENTUM)
    monitor = Monitor(net, draw(1)[:, :-1], every=every, alert=None)
    alarm, losses, gradients = Alarm(), [], []
    onset: int | None = None
    for step in range(1, _STEPS + 1):
        optimiser.param_groups[0]["lr"] = _PEAK * _GROWS[schedule](step / _STEPS)
        ids = draw(_BATCH)
        logits = net(ids[:, :-1]).last_hidden_state @ table.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        losses.append(float(loss.detach()))
        if _diverged(losses):
            onset = step
            break
        alarm.loss(step, losses[-1])
        optimiser.zero_grad()
        loss.backward()
        gradients.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters()])))
        try:
            with monitor.step():
                optimiser.step()
            if step % every == 0:  # as the monitor itself would be told, without saying it
                alarm.signals([one for one in monitor.readings if one.step == step])
        except InputError:  # a weight is not finite any more
            onset = step + 1
            break
    readings = dict(grouped([r for r in monitor.readings if r.sigma is not None], "step"))
    signals = {
        name: [fmean(some[max(at - 5, 0) : max(at, 5)]) for at in readings]
        for name, some in ((LOSS, losses), (GRADIENT, gradients))
    }
    for name in (BASELINES[-1], *TESTED):
        worst = min if name == "entropy" else max
        signals[name] = [worst(getattr(r, name) for r in some) for some in readings.values()]
    alerts = [one.step for one in alarm.alerts]
    return {"onset": onset, "alerts": alerts, "steps": [*readings], "signals": signals}


def _diverged(losses: Sequence[float]) -> bool:
    if not math.isfinite(losses[-1]):
        return True
    means = [fmean(losses[i : i + 5]) for i in range(len(losses) - 4)]
    return bool(means) and means[-1] > min(means) + _TOO_HIGH


def areas(
    values: Float[Tensor, "runs signals"],
    bad: Bool[Tensor, " runs"],
    same: Bool[Tensor, "runs runs"],
) -> tuple[Float[Tensor, " signals"], Float[Tensor, "runs signals"], list[float]]:
    """By signal the share of pairs of a bad run and another one in which the bad one is higher.

    Of the ``same`` kind, ties by half. Also the shares without each run, and the joint level of
    each: that any is so far from 1/2 where bad runs are permuted within kinds.
    """
    above = values[:, None] - values[None]
    wins = ((above.sign() + 1) / 2).permute(2, 0, 1).double() * same

    def of(bad: Tensor, good: Tensor) -> Tensor:
        pairs = torch.einsum("di,ij,dj->d", bad, same.double(), good)
        return torch.einsum("di,pij,dj->dp", bad, wins, good) / pairs[:, None]

    mine, keep = bad.double()[None], 1 - torch.eye(len(bad), dtype=torch.float64)
    gen, mixed = torch.Generator().manual_seed(0), mine.repeat(_DRAWS, 1)
    for kind in same.unique(dim=0):
        at = kind.nonzero().flatten()
        order = torch.rand(_DRAWS, len(at), generator=gen).argsort(1)
        mixed[:, at] = mine[0, at][order]
    found = of(mine, 1 - mine)[0]
    tops = (of(mixed, 1 - mixed) - 0.5).abs().amax(1)
    levels = [
        (1 + float((tops >= float(far) - 1e-9).sum())) / (1 + _DRAWS) for far in (found - 0.5).abs()
    ]
    return found, of(mine * keep, (1 - mine) * keep), levels


def _of_runs(study: Study, name: str, runs: Sequence[Record]) -> list[Panel]:
    """What is said of the runs with or without a norm of queries and keys."""
    kinds = dict(grouped(runs, lambda one: "diverging" if one["onset"] else "stable"))
    diverged = share(len(kinds.get("diverging", ())), len(runs))
    study.claim(f"{name}: runs that diverge", "about half, by design", diverged)
    for kind, said in (("stable", "none"), ("diverging", "all, before they diverge")):
        if some := kinds.get(kind):
            about = f"{name}: {kind} runs with an alert of the monitor, at its defaults"
            study.claim(about, said, share(sum(bool(one["alerts"]) for one in some), len(some)))
    early = [one["onset"] - one["alerts"][0] for one in runs if one["onset"] and one["alerts"]]
    if early:
        study.claim(f"{name}: steps from the first alert to divergence", "–", f"{median(early):g}")
    curves: dict[int, Tensor] = {}
    cells: dict[int, list[str]] = {}
    for step in sorted({step for one in runs for step in one["steps"][1:]}):
        known = [one for one in runs if step in one["steps"] and (one["onset"] or math.inf) > step]
        bad = torch.tensor([one["onset"] is not None for one in known])
        if min(int(bad.sum()), int((~bad).sum())) < study.pick(1, 8):
            continue
        schedules = [one["schedule"] for one in known]
        same = torch.tensor([[a == b for b in schedules] for a in schedules])
        found, without, ps = areas(torch.tensor([_values(one, step) for one in known]), bad, same)
        curves[step] = found
        if step in _ASKED:
            ends = zip(found.tolist(), _error(without).tolist(), ps, strict=True)
            cells[step] = [f"{_interval(a, e)} (p {min(3 * p, 1):.3f})" for a, e, p in ends]
            about = f"{name}, step {step}, {int(bad.sum())} of {len(known)} runs diverge later"
            _of_sigma(study, about, found, without, ps)
    lines = [(*signal, *(some[k] for some in cells.values())) for k, signal in enumerate(SIGNALS)]
    columns = ("signal", "what of it", *(f"area at step {step}" for step in cells))
    study.table(f"{name}: telling runs that will diverge", lines, columns)
    panels = []
    for what in (LEVEL, RISE) if curves else ():
        lines = [
            line(signal, curves, [float(one[k]) for one in curves.values()])
            for k, (signal, kind) in enumerate(SIGNALS)
            if kind == what
        ]
        lines.append(level("chance", 0.5, curves))
        panels.append(Panel(f"{name}: {what}", lines, "step", "area", False, False))
    return panels


def _of_sigma(
    study: Study, about: str, found: Tensor, without: Tensor, ps: Sequence[float]
) -> None:
    """Sigma's better area, and its gaps to the better one of each baseline."""
    best = {
        name: max((k for k, one in enumerate(SIGNALS) if one[0] == name), key=found.__getitem__)
        for name in ("sigma", *BASELINES)
    }
    mine = best.pop("sigma")
    gaps = {
        name: (float(found[mine] - found[k]), float(_error(without[:, mine] - without[:, k])))
        for name, k in best.items()
    }
    study.claim(
        f"{about}: sigma, {SIGNALS[mine][1]}",
        "above 1/2, p < 0.05; gaps above 0",
        f"area {float(found[mine]):.2f} (p {min(3 * ps[mine], 1):.3f}); gap to "
        + "; ".join(f"{name} {_interval(*gap)}" for name, gap in gaps.items()),
    )


def _values(run: Record, step: int) -> list[float]:
    """Every signal at a reading, higher where it is expected before divergence."""
    at, found = run["steps"].index(step), []
    for signal, what in SIGNALS:
        values = run["signals"][signal]
        value = values[at] - values[0] if what == RISE else values[at]
        found.append(-value if signal == "entropy" else value)
    return found


def _error(without: Tensor) -> Tensor:
    """Half of the jackknife's 95 % interval."""
    runs = len(without)
    return 1.96 * ((runs - 1) * without.var(0, correction=0)).sqrt()


def _interval(value: float, error: float) -> str:
    ends = f" [{value - error:.2f}, {value + error:.2f}]" if math.isfinite(error) else ""
    return f"{value:.2f}{ends}"
