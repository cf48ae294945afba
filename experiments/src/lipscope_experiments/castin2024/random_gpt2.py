"""Third column of Figure 1: random GPT-2 on text and two clusters, by sigma and the scripts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lipscope import Rows
from lipscope.charts import Panel, Series, power_law
from lipscope.models import reinitialised
from lipscope.records import slope_of
from lipscope_experiments.castin2024.protocol import Adversarial, adversarial, as_coded
from lipscope_experiments.experiment import Source, Study, experiment
from lipscope_experiments.findings import Record, curve, exponent, middle, plain_exponent


def _radius(rows: Rows, layer: int) -> float:
    """Median over windows of the root mean square of token norms."""
    return statistics.median(r.radius_rms or 0.0 for r in rows if r.layer == layer)


Built = list[tuple[int, Adversarial]]
"""Inputs that were built, with the seed of the weights."""


@experiment("castin2024/random-gpt2", models=("random:gpt2",))
def random_gpt2(study: Study) -> None:
    """How Smooth Is Attention?, Figure 1, third column: GPT-2 with random weights."""
    cases: list[Record] = []  # one draw of the weights on one text: rows, and what scripts compute
    built: Built = []
    first = study.load(study.models[0])
    layers = Source(first).first_and_middle
    lengths = study.pick([10, 20, 40], [10, 20, 40, 70, 100])
    options: dict[str, Any] = {"lengths": lengths, "samples": study.pick(3, 10)}
    options |= {"windows": "disjoint", "special_tokens": False}
    for seed in range(study.pick(1, 3)):
        again = reinitialised(first, seed) if seed else first
        drawn, mine = replace(again, name=f"{first.name}, seed {seed}"), list[Record]()
        for source in study.sources_of(drawn):
            asked = source.asked | options
            rows = study.measure(source.where, drawn, layers=layers, **asked)
            coded = as_coded(study, source, layers, asked)
            fits = {key.layer: fit for key, fit in rows.growth().items()}
            case = {"seed": seed, "text": source.name, "rows": rows, "coded": coded, "fits": fits}
            mine.append(case)
        cases += mine
        found = adversarial(study, drawn, layers[1:], mine[0]["rows"], every=4, lengths=lengths)
        built += [(seed, one) for one in found]
    _draw_both(study, cases, built)
    _of_both(study, cases, built)
    lines = [
        (
            *(case["seed"], case["text"], layer, f"{_radius(case['rows'], layer):.2f}"),
            *(exponent(fit), plain_exponent(case["coded"][layer])),
        )
        for case in cases
        for layer, fit in case["fits"].items()
    ]
    columns = ("seed", "text", "layer", "norm of the tokens", "sigma", "as in the scripts")
    study.table("Exponents in n on text, 95 % intervals over its windows", lines, columns)
    lines = [
        (seed, one.layer, f"{one.radii[name]:.3g}", one.exponents(name))
        for seed, one in built
        for name in one.rows
    ]
    if lines:
        columns = ("seed", "layer", "radius", "exponent: median and range over heads")
        study.table("Two clusters", lines, columns)
    study.remark(*_SAID)


def _of_both(study: Study, cases: Sequence[Record], built: Built) -> None:
    fits = [fit.slope for case in cases for fit in case["fits"].values() if fit]
    layers = list(cases[0]["coded"])
    coded = {layer: [slope_of(case["coded"][layer]) for case in cases] for layer in layers}
    slopes = {
        name: middle(slope_of(curve) for _, one in built for curve in one.curves(name))
        for name in ("the text", "the scripts")
    }
    study.claim(
        f"norm of the tokens, layer {layers[-1]}",
        "27.7 (Section 5.2)",
        middle(_radius(case["rows"], layers[-1]) for case in cases),
    )
    study.claim(
        "exponent of sigma on text",
        "close to 1/4, in all considered cases (Section 5.3; exponent from the slides)",
        middle(fits),
    )
    study.claim(
        "exponent of what the scripts compute, √‖Jᵀf(X)‖",
        "named sigma in the scripts; whether the printed figure came from them is unknown",
        "; ".join(f"layer {layer}: {middle(found)}" for layer, found in coded.items()),
    )
    about = "exponent on two clusters at the norm of text"
    study.claim(about, "radii below 100 grow slower than n^(1/2) (Section 5.2)", slopes["the text"])
    about = "exponent on two clusters at radius 100"
    study.claim(about, "1/2 (Section 5.3)", slopes["the scripts"])


_SAID = (
    "Read: Section 5 of the paper, the slides (January 2025) and the scripts (commit eff2f2a).",
    "Run: three draws of the weights as a new model has them, ten windows a length that share no "
    "text, none with special tokens. Two clusters are placed by three of the twelve heads, for "
    "n = 10 to 100. The map is `attention`, with the output projection.",
    "What follows: with these weights sigma itself grows far slower than n^(1/4), and what the "
    "scripts compute nearly like it in the middle layer. Which of the two the printed figure "
    "shows cannot be told from here. Two clusters reach n^(1/2) at neither radius, and grow "
    "faster at the smaller one, where Section 5.2 says that smaller radii grow slower.",
    "Models are measured in eval mode; the scripts leave GPT-2 in train mode, with its dropout.",
)


def _draw_both(study: Study, cases: Sequence[Record], built: Built) -> None:
    panels = []
    for layer in cases[0]["coded"]:
        rows = [row for case in cases for row in case["rows"] if row.layer == layer]
        sigma = curve("sigma", rows, "num_tokens", "sigma", "points")
        coded = [pair for case in cases for pair in case["coded"][layer]]
        shown = Series("as in the scripts", coded, "points")
        slopes = [case["fits"][layer].slope for case in cases if case["fits"][layer]]
        title = f"text, layer {layer}: sigma ~ n^{statistics.median(slopes or [math.nan]):.2f}"
        line = power_law(sigma.points, 0.25, "~ n^(1/4)")
        panels.append(Panel(title, (sigma, shown, line), y="sigma, or the scripts' quantity"))
    for name, title in (("the text", "at the norm of text"), ("the scripts", "at radius 100")):
        rows = [row for _, one in built for row in one.rows[name]]
        if not rows:  # rotary: nothing to place
            continue
        sigma = curve("sigma", rows, "num_tokens", "sigma", "points")
        slope = statistics.median(slope_of(c) for _, one in built for c in one.curves(name))
        line = power_law(sigma.points, 0.5, "~ n^(1/2)")
        panels.append(Panel(f"two clusters {title}: median ~ n^{slope:.2f}", (sigma, line)))
    study.draw("random-gpt2", "GPT-2 with random weights", panels, columns=2)
