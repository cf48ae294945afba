"""Decoders of 2 to 18 blocks with four kinds of attention: bits per held-out character."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import InputError, Measurement, Monitor, MultiheadAttention
from lipscope.attention import Distance
from lipscope.charts import Panel, Series
from lipscope.control import ContractiveAttention
from lipscope.models import LoadedModel
from lipscope.records import RunFolder
from lipscope_experiments.data import Corpus, corpus
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, chosen, curve, grouped, level
from lipscope_experiments.training import seeded

VARIANTS = ("dot product", "L2, untied", "L2, tied", "contractive L2")
CONSTANT = 0.9  # of the contractive blocks


@dataclass(frozen=True)
class CharacterRun:
    """Everything that decides on a run besides its text."""

    variant: str  # one of `VARIANTS`
    depth: int  # blocks
    schedule: str  # ``fixed`` rate, or ``warm-up`` over a fifth of the steps, ``1 / √step`` after
    seed: int  # of weights and windows
    steps: int  # of Adam
    every: int  # steps between readings, each with a checkpoint
    rate: float = 3e-3  # the largest
    width: int = 32  # of a token
    heads: int = 4  # of a block
    length: int = 32  # characters of a window
    batch: int = 8  # windows of a step

    def rate_at(self, step: int) -> float:
        """The rate of a step, from 1."""
        if self.schedule == "fixed":
            return self.rate
        warm = max(self.steps // 5, 1)
        return self.rate * min(step / warm, math.sqrt(warm / step))


class UntiedL2(Distance):
    """``P X W_V`` with ``P_ij ∝ exp(-|x_i W_Q - x_j W_K|² / √k)`` at scale 1: not Lipschitz."""

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys take up ``1 / √k``."""
        factor = self.head_width**-0.25
        return self.query * factor, self.key * factor, self.value


class CharBlock(nn.Module):
    """``LN(X + F(X))`` for the attention, then for two linear maps: the original Transformer's."""

    def __init__(self, run: CharacterRun) -> None:
        super().__init__()
        kind = ("dot-product", UntiedL2, "l2", "l2")[VARIANTS.index(run.variant)]
        options: dict[str, Any] = {"scale": 1.0} if kind is UntiedL2 else {}
        options |= {"bias": False, "batch_first": True, "causal": True}
        self.attention: nn.Module = MultiheadAttention(run.width, run.heads, kind, **options)
        if run.variant == VARIANTS[-1]:
            self.attention = ContractiveAttention(self.attention.attention, CONSTANT)
        self.first, self.second = nn.LayerNorm(run.width), nn.LayerNorm(run.width)
        self.mlp = nn.Sequential(
            nn.Linear(run.width, 4 * run.width), nn.ReLU(), nn.Linear(4 * run.width, run.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after the block."""
        if isinstance(self.attention, MultiheadAttention):
            x = self.first(x + self.attention(x, x, x, need_weights=False)[0])
        else:
            x = self.first(x + self.attention(x))
        return self.second(x + self.mlp(x))


class CharDecoder(nn.Module):
    """A causal decoder on characters."""

    def __init__(self, run: CharacterRun, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, run.width)
        self.positions = nn.Parameter(torch.randn(run.length, run.width))
        self.blocks = nn.Sequential(*(CharBlock(run) for _ in range(run.depth)))
        self.head = nn.Linear(run.width, characters)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[-1]]
        return self.head(self.blocks(x))


def train(run: CharacterRun, data: Corpus, folder: RunFolder) -> dict[str, Any]:
    """Train one decoder; rows of its attention layers go to the folder at every reading.

    Returns ``curve``: steps, bits per character of training (mean since the last) and held out;
    ``stopped``: why it ended early, or None; ``bits``: the last held-out ones, None if it did.
    """
    with seeded(run.seed):
        net = CharDecoder(run, data.characters)
    name = f"{run.variant}, {run.depth} blocks, {run.schedule}, seed {run.seed}, {data.text.name}"
    loaded = LoadedModel(name, net, None, None, "trained")
    monitor = Monitor(loaded, data.held[:1, :-1], every=run.every, out=folder, alert=None)
    optimiser = torch.optim.Adam(net.parameters(), lr=run.rate, fused=True)
    gen = torch.Generator().manual_seed(run.seed)
    curve: list[list[float | int]] = []
    losses: list[float] = []
    for step in range(1, run.steps + 1):
        loss = _nats(net, data.draw(run.batch, run.length, gen))
        losses.append(float(loss.detach()) / math.log(2))
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = run.rate_at(step)
        try:
            with monitor.step(loss):
                optimiser.step()
        except InputError as problem:
            finite = all(bool(p.isfinite().all()) for p in net.parameters())
            if finite and math.isfinite(losses[-1]):
                raise
            return {"curve": curve, "stopped": str(problem), "bits": None}
        if step % run.every == 0 or step == run.steps:
            with torch.no_grad():
                held = float(_nats(net, data.held)) / math.log(2)
            curve.append([step, fmean(losses), held])
            losses = []
    return {"curve": curve, "stopped": None, "bits": curve[-1][2]}


def _nats(net: CharDecoder, windows: Tensor) -> Tensor:
    logits = net(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


_RATES = {"fixed": "fixed rate", "warm-up": "warm-up"}
_SEEDS = 1  # each takes some half an hour of one core a text
_BETTER = 0.25  # bits below what knows how often each character occurs: the model trains


@experiment("kim2021/charlm")
def charlm(study: Study) -> None:
    """The Lipschitz Constant of Self-Attention: how deep a character-level model trains."""
    texts = [corpus(text, CharacterRun.length) for text in study.texts]
    steps, every = study.pick((100, 50), (1000, 250))
    depths = study.pick((2, 4), (2, 6, 10, 14, 18))
    every_run = grid(seed=range(_SEEDS), depth=depths, schedule=_RATES, variant=VARIANTS)
    keys = [
        asdict(CharacterRun(**one, steps=steps, every=every))
        | {"text": data.text.name, "sha256": data.text.sha256}
        for data in texts
        for one in every_run
    ]
    by = {data.text.sha256: data for data in texts}

    def trained(text: str, sha256: str, **run: Any) -> Record:
        return train(CharacterRun(**run), by[sha256], study.folder)

    runs = study.values("runs", keys, trained)
    rows = [row for row in study.folder.done.values() if row.step is not None]
    _draw_bits(study, texts, runs)
    _draw_sigmas(study, texts[0], runs, rows)
    _of_trainable_depths(study, texts, runs, rows)


def _depths(runs: Sequence[Record]) -> list[int]:
    return sorted({one["depth"] for one in runs})


def _mean_bits(runs: Sequence[Record]) -> float | None:
    found = [one["bits"] for one in runs]
    return None if None in found or not found else fmean(found)


def _sigmas_along(
    rows: Sequence[Measurement], of: dict[str, Any], layer: int
) -> list[tuple[int, float]]:
    start = "{variant}, {depth} blocks, {schedule}, seed {seed}, {text}@".format_map(of)
    found = {
        row.step: row.sigma
        for row in rows
        if row.layer == layer and row.model.startswith(start)
        if row.step is not None and row.sigma is not None
    }
    return sorted(found.items())


def _draw_bits(study: Study, texts: Sequence[Corpus], runs: Sequence[Record]) -> None:
    depths, panels = _depths(runs), []
    axes = "blocks", "bits per held-out character", False, False
    for data, (schedule, rate) in itertools.product(texts, _RATES.items()):
        own = chosen(runs, sha256=data.text.sha256, schedule=schedule)
        series = [level("single characters", data.chance, depths)]
        for variant in VARIANTS:
            mine = grouped(chosen(own, variant=variant), "depth")
            series.append(curve(variant, mine, "depth", lambda _, some: _mean_bits(some)))
        panels.append(Panel(f"{data.text.name}, {rate}", series, *axes))
    study.draw("charlm", "Bits per character against depth", panels, columns=2)


def _draw_sigmas(
    study: Study, data: Corpus, runs: Sequence[Record], rows: Sequence[Measurement]
) -> None:
    deepest, panels = _depths(runs)[-1], []
    layers = sorted({0, deepest // 2, deepest - 1})
    for one in chosen(runs, sha256=data.text.sha256, depth=deepest, seed=0, schedule="fixed"):
        every = [Series(f"layer {i}", _sigmas_along(rows, one, i)) for i in layers]
        if series := [curve for curve in every if curve.points]:
            panels.append(Panel(one["variant"], series, x="step", log_x=False))
    title = f"Sigma of layers along training, {deepest} blocks at a fixed rate"
    study.draw("charlm-sigma", title, panels, columns=2)


def _of_trainable_depths(
    study: Study, texts: Sequence[Corpus], runs: Sequence[Record], rows: Sequence[Measurement]
) -> None:
    first = runs[0]
    stopped = [one for one in runs if one["stopped"]]
    said = (
        "dot product: not beyond 10 blocks; L2, tied, and contractive L2: 18 (the authors, in "
        "their replies to reviewers)"
    )
    ways = {"fixed": ("at a fixed rate", said), "warm-up": ("with warm-up", "–")}
    for (schedule, (how, known)), data in itertools.product(ways.items(), texts):
        about = f"deepest that trains {how}, {data.text.name}"
        study.claim(about, known, _deepest(data, runs, schedule))
    for data in texts:
        _bits_table(study, data, runs)
    _sigma_table(study, runs, rows)
    study.remark(
        f"Not run: the paper's own sizes. Its text was not at hand; as recalled it is the Penn "
        f"Treebank, with models far wider and trained far longer than here: width "
        f"{first['width']}, {first['heads']} heads, windows of {first['length']} characters, "
        f"{first['batch']} a step, {first['steps']} steps of Adam at {first['rate']:g}, "
        f"{_SEEDS} seed{'s' * (_SEEDS > 1)}." + (" Depths: 2 and 4 only." if study.quick else ""),
        "A model trains if it needs at least "
        f"{_BETTER} bits per character less than what knows only how often each character "
        "occurs (the dashes), with every seed. The last tenth of a text is held out.",
        "Blocks are the original Transformer's: norms after each sum. Only the attention "
        "differs: untied L2 has keys and values of its own; contractive L2 is "
        f"{CONSTANT} F / L, L at {first['length']} tokens. Warm-up: linear over a fifth of the "
        "steps, then the inverse square root.",
        f"What has not left the dashes after {first['steps']} steps may do so later, or at a "
        "smaller rate. Tied and contractive attention begins with a far smaller sigma, so with "
        "a smaller branch beside the sum, which alone makes such deep models easier to train: "
        "that the Lipschitz constant is the reason is not shown.",
        f"{len(stopped)} of {len(runs)} runs ended in a loss that is not finite."
        + "".join(f" {one['variant']}, {one['depth']}: {one['stopped']}" for one in stopped),
        "Sigma of every layer at every reading, at one held-out window, are rows of the run "
        "folder (column `step`), map `attention`.",
    )


def _deepest(data: Corpus, runs: Sequence[Record], schedule: str) -> str:
    found, most = [], data.chance - _BETTER
    for variant in VARIANTS:
        own = chosen(runs, sha256=data.text.sha256, schedule=schedule, variant=variant)
        bits = ((d, [one["bits"] for one in some]) for d, some in grouped(own, "depth"))
        fine = [d for d, each in bits if all(b is not None and b < most for b in each)]
        found.append(f"{variant}: {max(fine, default='none')}")
    return f"{'; '.join(found)} (of {', '.join(map(str, _depths(runs)))})"


def _bits_table(study: Study, data: Corpus, runs: Sequence[Record]) -> None:
    def cell(own: list[Record]) -> str:
        mean, bits = _mean_bits(own), [one["bits"] for one in own]
        if mean is None:
            return "ended early"
        return f"{mean:.2f}" + f" ({min(bits):.2f} to {max(bits):.2f})" * (len(own) > 1)

    own = grouped(chosen(runs, sha256=data.text.sha256), "schedule", "variant")
    lines = [(*way, *(cell(some) for _, some in grouped(mine, "depth"))) for way, mine in own]
    title = f"Bits per held-out character: {data.text.name} (single characters: {data.chance:.2f})"
    study.table(title, lines, ("rate", "attention", *(f"{d} blocks" for d in _depths(runs))))


def _sigma_table(study: Study, runs: Sequence[Record], rows: Sequence[Measurement]) -> None:
    """Sigma of the deepest models, the largest over layers, runs and texts."""
    deepest, lines = _depths(runs)[-1], []
    for place in itertools.product(_RATES, VARIANTS):
        own = chosen(runs, schedule=place[0], variant=place[1], depth=deepest)
        curves = [_sigmas_along(rows, one, i) for one in own for i in range(deepest)]
        ends = [(c[0][1], c[-1][1]) for c in curves if c]
        if ends:
            first, last = (max(one) for one in zip(*ends, strict=True))
            lines.append((*place, first, last))
    title = f"Largest sigma of an attention layer, {deepest} blocks"
    study.table(title, lines, ("rate", "attention", "before training", "at the end"))
