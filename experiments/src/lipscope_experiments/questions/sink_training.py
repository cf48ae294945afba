"""When a sink appears: small models that must copy at triggers and have nothing to do elsewhere."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

import torch
from torch import Tensor, nn

from lipscope.charts import Panel
from lipscope.models import LoadedModel
from lipscope.records import rank_correlation
from lipscope_experiments.data import Text
from lipscope_experiments.experiment import Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, column_mean, curve, grouped, share
from lipscope_experiments.frozen import MEASURED, PREDICTED, SLOPES, column_share, frozen_column
from lipscope_experiments.simple_layers import top
from lipscope_experiments.training import seeded

_WIDTH, _HEADS, _DEPTH, _LENGTH, _BATCH = 48, 4, 4, 64, 16
_RATE, _WARM = 2e-3, 50
_LETTERS = 63  # the most frequent ones of a text; what else it holds is left out
_TRIGGERS = (1, 5, 9)  # ranks of the letters after which the letter before them is copied
_LENGTHS = (16, 32, 64)
_HELD = 2  # windows that are measured
_SINK = 2.0  # times what it receives before training: the first token is a sink
DECODER, ENCODER = "decoder", "encoder"

PLAN = (
    "Written before the runs. Question: when does the first token become a sink, and does the "
    "exponent of sigma follow ½ + the slope of the attention that it receives along training?",
    "Task: letters of a text by their bigrams, except that after three letters, the triggers, "
    "comes the letter before the trigger. A decoder predicts the next letter; an encoder says at "
    "every trigger which letter was before it, and elsewhere the letter itself. Both begin with a "
    "token of their own, always the same.",
    f"A layer has a sink once its first token receives {_SINK:g} times what it received before "
    "training, in the mean over heads and rows of the longest windows.",
    "The account is refuted if fewer than half of the runs of a kind have a sink at the end, or if "
    "in the layer whose first token receives most at the end, predicted and measured exponents "
    "have no positive rank correlation along training beyond the interval over seeds.",
)


class CopyingNet(nn.Module):
    """A Transformer of torch's own layers, norms first, with or without a causal mask."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_LETTERS + 1, _WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(_LENGTH, _WIDTH))
        nn.init.normal_(self.tokens.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(_WIDTH)
        self.body = nn.TransformerEncoder(layer, _DEPTH, norm, enable_nested_tensor=False)
        for p in self.body.parameters():  # torch makes copies of one layer
            if p.ndim > 1:
                nn.init.normal_(p, std=0.7 / math.sqrt(p.shape[1]))
        self.head = nn.Linear(_WIDTH, _LETTERS)
        self.causal = causal

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of letters."""
        n = input_ids.shape[-1]
        x = self.tokens(input_ids) + self.positions[:n]
        mask = nn.Transformer.generate_square_subsequent_mask(n) if self.causal else None
        return self.head(self.body(x, mask=mask, is_causal=self.causal))


class Letters:
    """Bigrams of a text, and windows that copy at triggers."""

    def __init__(self, text: Text) -> None:
        ranked = [letter for letter, _ in Counter(text.content).most_common(_LETTERS)]
        known = {letter: i for i, letter in enumerate(ranked)}
        ids = torch.tensor([known[letter] for letter in text.content if letter in known])
        pairs = torch.bincount(ids[:-1] * _LETTERS + ids[1:], minlength=_LETTERS**2)
        self.next = pairs.view(_LETTERS, _LETTERS) + 0.01
        self.first = torch.bincount(ids, minlength=_LETTERS).double()

    def windows(self, count: int, gen: torch.Generator) -> Tensor:
        """Windows ``(count, length + 1)``: the token of the beginning, then letters."""
        ids = torch.full((count, _LENGTH + 1), _LETTERS)
        ids[:, 1] = torch.multinomial(self.first, count, replacement=True, generator=gen)
        for i in range(2, _LENGTH + 1):
            ids[:, i] = torch.multinomial(self.next[ids[:, i - 1]], 1, generator=gen)[:, 0]
            if i > 2:
                ids[:, i] = torch.where(triggers(ids[:, i - 1]), ids[:, i - 2], ids[:, i])
        return ids


def triggers(ids: Tensor) -> Tensor:
    """Where a letter is a trigger."""
    return torch.isin(ids, torch.tensor(_TRIGGERS))


def targets(kind: str, windows: Tensor) -> Tensor:
    """What is asked at every token but the first, ``(b, length - 1)``."""
    if kind == DECODER:
        return windows[:, 2:]
    own, before = windows[:, 1:-1], windows[:, :-2]
    return torch.where(triggers(own) & (before < _LETTERS), before, own)


@experiment("questions/sink-training")
def sink_training(study: Study) -> None:
    """When does a sink appear? Small models that copy at triggers."""
    letters = Letters(study.texts[0])
    steps = study.pick((0, 20, 40), (0, 50, 100, 200, 400, 600, 800, 1000))
    seeds, text = range(study.pick(1, 10)), study.texts[0].sha256
    keys = grid(seed=seeds, kind=(DECODER, ENCODER), steps=[list(steps)], text=[text])
    runs = study.values("runs", keys, functools.partial(_trained, letters))
    panels = [_of_kind(study, kind, mine) for kind, mine in grouped(runs, "kind")]
    study.draw("sink-training", "The sink along training, mean over seeds", panels, columns=2)
    study.remark(
        *PLAN,
        f"{_DEPTH} blocks, width {_WIDTH}, {_HEADS} heads, norms first, {_LENGTH} tokens, "
        f"{_BATCH} windows a step, AdamW at {_RATE:g} after {_WARM} steps of warm-up, weight decay "
        f"0.1; measured at {', '.join(map(str, steps))} steps on {_HELD} windows, at "
        f"{', '.join(map(str, _LENGTHS))} tokens.",
        "Intervals: 95 %, Student's over seeds (Clopper–Pearson of counts).",
        "What it does not show: language models at their own size, whose sinks may come another "
        "way; other tasks, widths and optimisers.",
    )


def _trained(letters: Letters, seed: int, kind: str, steps: Sequence[int], **_: str) -> Record:
    """One run: its readings at some steps."""
    gen = torch.Generator().manual_seed(seed)
    with seeded(seed):
        net = CopyingNet(kind == DECODER)
    held = letters.windows(_BATCH, torch.Generator().manual_seed(10_000))
    optimiser = torch.optim.AdamW(net.parameters(), lr=_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    readings = []
    for step in range(steps[-1] + 1):
        if step in steps:
            readings.append({"step": step, **_reading(net.eval(), kind, held)})
            net.train()
        optimiser.param_groups[0]["lr"] = _RATE * min(1.0, (step + 1) / _WARM)
        loss = _loss(net, kind, letters.windows(_BATCH, gen))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    return {"readings": readings}


def _loss(net: nn.Module, kind: str, windows: Tensor) -> Tensor:
    logits = net(windows[:, :-1])[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets(kind, windows).flatten())


def _reading(net: CopyingNet, kind: str, held: Tensor) -> Record:
    """Held-out loss, and by layer what its first token receives, exponents and largest logit."""
    with torch.no_grad():
        loss = float(_loss(net, kind, held))
    loaded = LoadedModel(kind, net, None, None, "trained")
    points = []
    for n in _LENGTHS:
        for one in layers_of(loaded, held[:_HELD, :n], dtype="float32"):
            q, k, _ = one.attention.project(one.x)
            p = one.attention.weights(q, k)
            point = {"layer": one.layer, "sample": one.sample, "n": n}
            point |= {
                "first": float(p[..., 0].mean()),
                "logit": float((q @ k.mT)[p > 0].abs().max()),
            }
            point |= asdict(frozen_column(one.attention, one.x))
            points.append(point | {"sigma": top(one.linearise(), tol=1e-2).sigma})
    return {"loss": loss, "layers": [_of_layer(mine) for _, mine in grouped(points, "layer")]}


def _of_layer(points: Sequence[Record]) -> Record:
    """Means over windows: exponents, and the rest at the longest length."""
    windows = [mine for _, mine in grouped(points, "sample")]
    return {
        **{name: fmean(map(SLOPES[name], windows)) for name in (MEASURED, PREDICTED)},
        **{name: fmean(mine[-1][name] for mine in windows) for name in ("sigma", "first")},
        "share": fmean(map(column_share, windows)),
        "logit": max(mine[-1]["logit"] for mine in windows),
    }


# --- what is said


def _along(run: Record) -> list[Record]:
    """Readings along training of the layer whose first token receives most at the end."""
    last = run["readings"][-1]["layers"]
    best = max(range(len(last)), key=lambda layer: last[layer]["first"])
    return [one | one["layers"][best] for one in run["readings"]]


def _onset(run: Record) -> int | None:
    """The first step at which some layer has a sink, or None."""
    start, *later = run["readings"]
    for reading in later:
        pairs = zip(reading["layers"], start["layers"], strict=True)
        if any(now["first"] >= _SINK * then["first"] for now, then in pairs):
            return reading["step"]
    return None


def _of_kind(study: Study, kind: str, runs: Sequence[Record]) -> Panel:
    onsets = Counter(step for run in runs if (step := _onset(run)) is not None)
    seen = ", ".join(f"{count} at {step}" for step, count in sorted(onsets.items()))
    study.claim(
        f"{kind}: runs with a sink at the end",
        "more than half",
        share(onsets.total(), len(runs)) + f", first seen at step {seen}" * bool(seen),
    )
    along = [_along(run) for run in runs]
    pairs = ([[one[name] for one in mine] for name in (PREDICTED, MEASURED)] for mine in along)
    study.claim(
        f"{kind}: rank correlation along training of predicted and measured exponents, its layer "
        "of the largest share",
        "positive",
        average([rank_correlation(*pair)[0] for pair in pairs], (-1.0, 1.0)),
    )
    columns = {"first token receives": "first", "column / sigma": "share"}
    columns |= {"measured exponent": MEASURED, "predicted exponent": PREDICTED}
    columns |= {"sigma": "sigma", "largest logit": "logit"}
    by_step = [*grouped([one for mine in along for one in mine], "step")]
    study.table(
        f"{kind}: the layer whose first token receives most at the end, {len(runs)} seeds",
        by_step,
        {"step": "step", "loss": column_mean("loss")}
        | {said: column_mean(name) for said, name in columns.items()},
    )
    curves = {
        "attention that the first token receives": "first",
        "frozen column / sigma": "share",
        "measured exponent of sigma": MEASURED,
        "predicted exponent": PREDICTED,
    }
    series = [
        curve(said, by_step, "step", lambda _, some, n=name: fmean(one[n] for one in some))
        for said, name in curves.items()
    ]
    return Panel(f"{kind}, {len(runs)} seeds", series, "step", "", False, False)
