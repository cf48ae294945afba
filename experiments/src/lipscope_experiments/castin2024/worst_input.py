"""Constructions, ascent and text under the largest token norm of the text, and the bounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lipscope import Attention, LayerAtInput
from lipscope.attacks import DRAWN, KNOWN, ascend, worst
from lipscope.charts import Panel
from lipscope.pages import number
from lipscope.records import off_line, slope_of
from lipscope_experiments.experiment import Source, Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, Value, chosen, curve, grouped, middle, ratios
from lipscope_experiments.simple_layers import bound_values

_STEPS = 5, 40  # the second is what `lipscope attack` takes
_LONGER = 4
_PLACE = "model", "text", "layer"
_OTHERS = "given", KNOWN, DRAWN  # besides constructions
_E3 = "castin_thm_e_3"


@experiment("castin2024/worst-input", models=("minilm", "smollm2"))
def worst_input(study: Study) -> None:
    """The worst known input of a layer against the number of tokens."""
    found = [record for source in study.sources() for record in _worst_at(study, source)]
    _draw_worst(study, found)
    _of_inputs(study, found)
    _layer_tables(study, found)
    _bounds_table(study, found)
    _head_tables(study, found)
    study.remark(
        "The worst known input is the largest of all that `lipscope attack` tries: a lower "
        "value of the worst case, at tokens no larger than the largest of the layer's texts.",
        "Constructions place tokens by one head at a time; sigma is that of the whole layer, or of "
        "one head in the table of heads. Rotary layers have few: their logits depend on position.",
        f"Text: the largest of {study.pick(2, 5)} windows. Ascent: "
        f"{study.pick(*_STEPS)} steps from the worst inputs of the four worst kinds, and as "
        "many from four random starts (heads: one). It is not at its end then: "
        f"a column gives {_LONGER} times as many steps to the random starts.",
        "All known inputs: those of that column, too. The search has not converged, so the "
        "worst case is at least as far above text as stated here, and the bounds are at most "
        "as far above the worst case.",
        "Bounds hold for all inputs of this length and radius. Theorem E.3 is Theorem 3.3 of "
        "the paper with biases.",
    )


def _worst_at(study: Study, source: Source) -> Iterator[Record]:
    name, text = source.model.name, source.name
    asked = source.asked | {"special_tokens": False, "samples": study.pick(2, 5)}
    asked["lengths"] = study.pick([4, 12], [2, 4, 8, 16, 32, 64, 100])
    for layer in study.some_layers(source):
        inputs = list(layers_of(source.model, layers=[layer], **asked))
        places = dict(grouped(inputs, lambda one: len(one.x)))
        # One radius at all lengths, so that the curve is one of n alone; upward in the last digit.
        largest = max(float(one.x.norm(dim=-1).max()) for one in inputs)
        radius = float(f"{1.0005 * largest:.3e}")
        key = {"model": [name], "text": [text], "layer": [layer]}
        key |= {"n": sorted(places), "radius": [radius]}
        for found in study.values(
            f"worst-{name}-{text}-{layer}",
            grid(**key, steps=[study.pick(*_STEPS)]),
            lambda n, radius, steps, at=places, **_: _largest_at(
                at[n], radius, steps, study.pick(6, 1)
            ),
        ):
            yield _summed(found) | {"heads": [_summed(one) for one in found["heads"]]}


def _largest_at(at: Sequence[LayerAtInput], radius: float, steps: int, every: int) -> Record:
    n, whole, inputs = len(at[0].x), at[0].attention, [one.x for one in at]
    size: Record = {"num_tokens": n, "radius": radius}
    size["generator"] = torch.Generator().manual_seed(n)
    alone: Record = {**size, "given": inputs[:1], "steps": steps, "restarts": 1}
    return {
        **_tried(whole, **size, given=inputs, steps=steps),
        "longer": ascend(whole, **size, steps=_LONGER * steps).top.sigma,
        "heads": [_tried(whole.head(h), **alone) for h in range(0, whole.num_heads, every)],
    }


def _tried(layer: Attention, num_tokens: int, radius: float, **options: Any) -> Record:
    best: dict[str, float] = {}
    for row in worst(layer, num_tokens=num_tokens, radius=radius, **options):
        if row.sigma is not None:
            name = row.name.split(" (")[0]  # clusters at either end of the spectrum are of one kind
            best[name] = max(row.sigma, best.get(name, 0.0))
    ascents = {name: best.pop(name, None) for name in _OTHERS}
    return {"built": best, **ascents, "bounds": bound_values(layer, num_tokens, radius)}


def _summed(record: Record) -> Record:
    """With the best construction, the worst that `lipscope attack` finds, all known, and bounds."""
    built, bounds = record["built"], record["bounds"]
    tries = built | {name: record[name] or 0.0 for name in _OTHERS}
    which = max(tries, key=tries.__getitem__)
    known = max(tries[which], record.get("longer", 0.0))  # the longer ascent's too
    return record | {
        "construction": max(built.values(), default=None),
        "two clusters": built.get("two_cluster"),
        "which": which,
        "attack": tries[which],
        "known": known,
        "least": min(bounds.values(), default=None),
        _E3: bounds.get(_E3),
        "above": bounds.get(_E3) and bounds[_E3] / known,
    }


def _of_inputs(study: Study, found: Sequence[Record]) -> None:
    def ratio(above: str, below: str) -> str:
        values = ratios(found, above, below)
        return f"{middle(values)} times" if values else "no such input for these layers"

    study.claim(
        "gradient ascent from random starts, against the best construction",
        "gradient ascent gives poor results (Section 5.2)",
        ratio(DRAWN, "construction"),
    )
    about = "ascent from everything known, against the best construction"
    study.claim(about, "not in the paper", ratio(KNOWN, "construction"))
    about = f"random starts with {_LONGER} times as many steps, against the worst known input"
    study.claim(about, "not in the paper", ratio("longer", "attack"))
    study.claim(
        "best construction, against two clusters",
        "two clusters reach the growth of the bound (Proposition 3.4)",
        ratio("construction", "two clusters"),
    )
    about = "worst of all known inputs, against text"
    study.claim(about, "text is far from the worst case (Section 5)", ratio("known", "given"))
    places = [mine for _, mine in grouped(found, *_PLACE)]
    curves = [[(r["n"], r["known"]) for r in mine] for mine in places if len(mine) > 2]
    slopes, off = ([of(one) for one in curves] for of in (slope_of, off_line))
    study.claim(
        "growth of the worst of all known inputs with n",
        "n^(1/2) until e^(2γR²) (Theorem 3.3, Proposition 3.4)",
        f"mean slope {middle(slopes)}, but the values leave the line by "
        f"{middle([100 * v for v in off], 0)} %"
        if slopes
        else "too few lengths",
    )
    if tight := [_tight(mine[0], mine[-1]) for mine in places if mine[0]["above"]]:
        study.claim(
            f"{_E3} of the whole layer over the worst of all known inputs, by n",
            "no growth, if √n is tight in n for the layer as well (Section 3.2)",
            "; ".join(tight),
        )
    about = "smallest bound for all inputs, against the worst of all known inputs"
    study.claim(about, "derived here", ratio("least", "known"))
    below = sum(r["least"] is not None and r["known"] > r["least"] for r in found)
    study.claim("bounds below a known input", "none", f"{below} of {len(found)}")


def _tight(first: Record, last: Record) -> str:
    ends = (f"{number(r['above'], 3)} at n = {r['n']}" for r in (first, last))
    return f"layer {first['layer']}, {first['text']}: {', '.join(ends)}"


def _layer_tables(study: Study, found: Sequence[Record]) -> None:
    columns: dict[str, Value] = {"n": "n", "text": "given", "two clusters": "two clusters"}
    columns |= {"best construction": "construction"}
    columns["which"] = lambda r: max(r["built"], key=r["built"].get, default="–")
    columns |= {"ascent, random starts": DRAWN, "ascent, known inputs": KNOWN}
    columns |= {f"random starts, {_LONGER} × the steps": "longer"}
    columns |= {"smallest bound": "least", "Theorem E.3": _E3}
    for (model, text, layer), mine in grouped(found, *_PLACE):
        title = f"{model}, layer {layer}, {text}, radius {mine[0]['radius']:.3g}: all heads"
        study.table(title, mine, columns, digits=3)


def _bounds_table(study: Study, found: Sequence[Record]) -> None:
    lines = [
        (
            *(name, model, _spread([r["bounds"][name] / r["known"] for r in mine])),
            f"{sum(r['bounds'][name] == r['least'] for r in mine)} of {len(mine)}",
        )
        for name in dict.fromkeys(name for r in found for name in r["bounds"])
        for model, mine in grouped([r for r in found if name in r["bounds"]], "model")
    ]
    columns = ("bound", "model", "× the worst of all known inputs", "smallest of all")
    study.table("Every bound for all inputs, over layers, texts and lengths", lines, columns)


def _spread(values: Sequence[float]) -> str:
    low, mid, high = (number(of(values), 3) for of in (min, statistics.median, max))
    return f"{mid} ({low} to {high})"


def _head_tables(study: Study, found: Sequence[Record]) -> None:
    lines = [
        (
            *(f"{r['model']}, {r['text']}", r["layer"], r["n"]),
            middle((head["attack"] for head in heads), 1),
            middle(ratios(heads, "attack", "given"), 1),
            "{}, {} of {}".format(
                *Counter(h["which"] for h in heads).most_common(1)[0], len(heads)
            ),
            middle(ratios(heads, "least", "attack"), 1),
        )
        for r in found
        if (heads := [head for head in r["heads"] if head["built"]])
    ]
    columns = ("model, text", "layer", "n", "worst known", "against text", "most often")
    if lines:
        title = "One head at a time: median and range over heads"
        study.table(title, lines, (*columns, "smallest bound against it"))


def _draw_worst(study: Study, found: Sequence[Record]) -> None:
    curves = {
        "text, largest of its windows": "given",
        "two clusters": "two clusters",
        "ascent from random starts": DRAWN,
        "worst known input": "attack",
        f"random starts, {_LONGER} times the steps": "longer",
    }
    for text in study.texts:
        panels = []
        for (model, layer), mine in grouped(chosen(found, text=text.name), "model", "layer"):
            series = [curve(label, mine, "n", of) for label, of in curves.items()]
            series.append(curve("smallest bound for all inputs", mine, "n", "least", "dashes"))
            title = f"{model}, layer {layer}, radius {mine[0]['radius']:.3g}"
            panels.append(Panel(title, tuple(series)))
        study.draw(f"worst-input-{text.name}", f"Worst known inputs, {text.name}", panels)
