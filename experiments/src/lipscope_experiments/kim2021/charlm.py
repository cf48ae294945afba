"""How deep a language model on characters still trains, with four kinds of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from lipscope import Measurement
from lipscope.charts import Panel, Series
from lipscope.pages import number
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table, chosen
from lipscope_experiments.kim2021.training import CONSTANT, VARIANTS, Corpus, Run, corpus, train

_RATES = {"fixed": "fixed rate", "warm-up": "warm-up"}
_SCHEDULES = tuple(_RATES)
_SEEDS = 1  # each takes some half an hour of one core a text
_BETTER = 0.25  # bits below what knows how often each character occurs: the model trains


@experiment(
    "kim2021/charlm",
    title="The Lipschitz Constant of Self-Attention: how deep a character-level model trains",
    cite="kim2021",
)
def charlm(study: Study) -> Findings:
    """Decoders of 2 to 18 blocks at a fixed rate and with warm-up, bits per held-out character."""
    texts = [corpus(text, Run.length) for text in study.texts]
    jobs = [job for data in texts for job in _jobs(study, data)]
    runs = study.values("runs", jobs)
    rows = [row for row in study.folder.done.values() if row.step is not None]
    _draw(study, texts, runs, rows)
    return _findings(study, texts, runs, rows)


def _jobs(study: Study, data: Corpus) -> Iterator[ValueJob]:
    steps, every = study.pick((100, 50), (1000, 250))
    for seed in range(_SEEDS):
        for depth in study.pick((2, 4), (2, 6, 10, 14, 18)):
            for schedule in _SCHEDULES:
                for variant in VARIANTS:
                    run = Run(variant, depth, schedule, seed, steps, every)
                    key = asdict(run) | {"text": data.text.name, "sha256": data.text.sha256}
                    yield key, lambda run=run: train(run, data, study.folder)


def _depths(runs: Sequence[Record]) -> list[int]:
    return sorted({one["depth"] for one in runs})


def _mean_bits(runs: Sequence[Record]) -> float | None:
    """The mean over seeds; None where one of them ended early."""
    found = [one["bits"] for one in runs]
    return None if None in found or not found else fmean(found)


def _sigmas(rows: Sequence[Measurement], of: dict[str, Any], layer: int) -> list[tuple[int, float]]:
    """Sigma of a layer of a run at its readings."""
    start = "{variant}, {depth} blocks, {schedule}, seed {seed}, {text}@".format_map(of)
    found = {
        row.step: row.sigma
        for row in rows
        if row.layer == layer and row.model.startswith(start)
        if row.step is not None and row.sigma is not None
    }
    return sorted(found.items())


def _draw(
    study: Study,
    texts: Sequence[Corpus],
    runs: Sequence[Record],
    rows: Sequence[Measurement],
) -> None:
    depths, panels = _depths(runs), []
    for data in texts:
        for schedule in _SCHEDULES:
            own = chosen(runs, sha256=data.text.sha256, schedule=schedule)
            series = [
                Series("single characters", tuple((d, data.chance) for d in depths), "dashes")
            ]
            for variant in VARIANTS:
                means = {d: _mean_bits(chosen(own, variant=variant, depth=d)) for d in depths}
                points = tuple((d, bits) for d, bits in means.items() if bits is not None)
                series.append(Series(variant, points))
            panels.append(
                Panel(
                    f"{data.text.name}, {_RATES[schedule]}",
                    tuple(series),
                    x="blocks",
                    y="bits per held-out character",
                    log_x=False,
                    log_y=False,
                )
            )
    study.draw("charlm", "Bits per character against depth", panels, columns=2)
    own = chosen(runs, sha256=texts[0].text.sha256, depth=depths[-1], seed=0, schedule="fixed")
    layers, panels = sorted({0, depths[-1] // 2, depths[-1] - 1}), []
    for one in own:
        curves = {f"layer {i}": tuple(_sigmas(rows, one, i)) for i in layers}
        series = tuple(Series(name, points) for name, points in curves.items() if points)
        if series:
            panels.append(Panel(one["variant"], series, x="step", log_x=False))
    title = f"Sigma of layers along training, {depths[-1]} blocks at a fixed rate"
    study.draw("charlm-sigma", title, panels, columns=2)


def _findings(
    study: Study,
    texts: Sequence[Corpus],
    runs: Sequence[Record],
    rows: Sequence[Measurement],
) -> Findings:
    first = runs[0]
    stopped = [one for one in runs if one["stopped"]]
    claims = [
        Claim(
            f"deepest that trains at a fixed rate, {data.text.name}",
            "dot product: not beyond 10 blocks; L2, tied, and contractive L2: 18 (the authors, in "
            "their replies to reviewers)",
            _deepest(data, runs, "fixed"),
        )
        for data in texts
    ]
    claims += [
        Claim(
            f"deepest that trains with warm-up, {data.text.name}",
            "–",
            _deepest(data, runs, "warm-up"),
        )
        for data in texts
    ]
    return Findings(
        tuple(claims),
        (*(_bits(data, runs) for data in texts), _grown(runs, rows)),
        (
            f"Not run: the paper's own sizes. Its text was not at hand; as recalled it is the Penn "
            f"Treebank, with models far wider and trained far longer than here: width "
            f"{first['width']}, {first['heads']} heads, windows of {first['length']} characters, "
            f"{first['batch']} a step, {first['steps']} steps of Adam at {first['rate']:g}, "
            f"{_SEEDS} seed{'s' * (_SEEDS > 1)}."
            + (" Depths: 2 and 4 only." if study.quick else ""),
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
        ),
    )


def _deepest(data: Corpus, runs: Sequence[Record], schedule: str) -> str:
    found = []
    for variant in VARIANTS:
        own = chosen(runs, sha256=data.text.sha256, schedule=schedule, variant=variant)
        fine = [d for d in _depths(own) if _trains(data, chosen(own, depth=d))]
        found.append(f"{variant}: {max(fine, default='none')}")
    return f"{'; '.join(found)} (of {', '.join(map(str, _depths(runs)))})"


def _trains(data: Corpus, runs: Sequence[Record]) -> bool:
    return all(one["bits"] is not None and one["bits"] < data.chance - _BETTER for one in runs)


def _bits(data: Corpus, runs: Sequence[Record]) -> Table:
    """Mean and range over seeds."""
    depths, lines = _depths(runs), []
    for schedule in _SCHEDULES:
        for variant in VARIANTS:
            cells = []
            for d in depths:
                own = chosen(runs, sha256=data.text.sha256, schedule=schedule, depth=d)
                own = chosen(own, variant=variant)
                mean, bits = _mean_bits(own), [one["bits"] for one in own]
                text = "ended early" if mean is None else f"{mean:.2f}"
                spread = mean is not None and len(own) > 1
                cells.append(f"{text} ({min(bits):.2f} to {max(bits):.2f})" if spread else text)
            lines.append((schedule, variant, *cells))
    return Table(
        f"Bits per held-out character: {data.text.name} (single characters: {data.chance:.2f})",
        ("rate", "attention", *(f"{d} blocks" for d in depths)),
        tuple(lines),
    )


def _grown(runs: Sequence[Record], rows: Sequence[Measurement]) -> Table:
    """Sigma of the deepest models, the largest over layers, runs and texts."""
    deepest, lines = _depths(runs)[-1], []
    for schedule in _SCHEDULES:
        for variant in VARIANTS:
            own = chosen(runs, schedule=schedule, variant=variant, depth=deepest)
            curves = [_sigmas(rows, one, i) for one in own for i in range(deepest)]
            ends = [(c[0][1], c[-1][1]) for c in curves if c]
            if ends:
                first, last = (max(one) for one in zip(*ends, strict=True))
                lines.append((schedule, variant, number(first), number(last)))
    return Table(
        f"Largest sigma of an attention layer, {deepest} blocks",
        ("rate", "attention", "before training", "at the end"),
        tuple(lines),
    )
