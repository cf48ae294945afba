"""The largest sigma that is known to be reached at a radius, and what bounds say there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import torch

from lipscope import Attention, LayerAtInput
from lipscope.attacks import DRAWN, KNOWN, ascend, worst
from lipscope.charts import Panel
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import off_line, slope_of
from lipscope.theorems import bounds_at, catalogue
from lipscope_experiments.experiment import Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, chosen, curve, grouped, middle
from lipscope_experiments.texts import Text

_STEPS = 5, 40  # the second is what `lipscope attack` takes
_LONGER = 4
_PLACE = "model", "text", "layer"


@experiment(
    "castin2024/worst-input",
    title="The worst known input of a layer against the number of tokens",
    models=("minilm", "smollm2"),
)
def worst_input(study: Study) -> None:
    """Constructions, ascent and text under the largest token norm of the text, and the bounds."""
    found = [record for place in study.places() for record in _worst_at(study, *place)]
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
        f"{study.pick(*_STEPS)} steps from the best construction of each kind and from the "
        "text, and as many from four random starts (heads: one). It is not at its end then: "
        f"a column gives {_LONGER} times as many steps to the random starts.",
        "All known inputs: those of that column, too. The search has not converged, so the "
        "worst case is at least as far above text as stated here, and the bounds are at most "
        "as far above the worst case.",
        "Bounds hold for all inputs of this length and radius. Theorem E.3 is Theorem 3.3 of "
        "the paper with biases.",
    )


def _worst_at(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Record]:
    count = int(loaded.config.num_hidden_layers)
    lengths = study.pick([4, 12], [2, 4, 8, 16, 32, 64, 100])
    for layer in study.pick([count // 2], [0, count // 2, count - 1]):
        places: dict[int, list[LayerAtInput]] = {n: [] for n in lengths}
        for one in layers_of(
            loaded,
            text.content,
            layers=[layer],
            lengths=lengths,
            samples=study.pick(2, 5),
            special_tokens=False,
        ):
            places[len(one.x)].append(one)
        # One radius at all lengths, so that the curve is one of n alone; upward in the last digit.
        largest = max(float(one.x.norm(dim=-1).max()) for at in places.values() for one in at)
        radius = float(f"{1.0005 * largest:.3e}")
        key = {"model": [loaded.name], "text": [text.name], "layer": [layer]}
        key |= {"n": [n for n, at in places.items() if at], "radius": [radius]}
        yield from study.values(
            f"worst-{loaded.name}-{text.name}-{layer}",
            grid(**key, steps=[study.pick(*_STEPS)]),
            lambda n, radius, steps, at=places, **_: _largest_at(
                at[n], radius, steps, study.pick(6, 1)
            ),
        )


def _largest_at(at: Sequence[LayerAtInput], radius: float, steps: int, every: int) -> Record:
    n, whole, inputs = len(at[0].x), at[0].attention, [one.x for one in at]
    draw = torch.Generator().manual_seed(n)
    size: Record = {"num_tokens": n, "radius": radius, "generator": draw}
    heads = range(0, whole.num_heads, every)
    alone = ({**size, "given": inputs[:1], "steps": steps, "restarts": 1}, n, radius)
    return {
        **_tried(whole, {**size, "given": inputs, "steps": steps}, n, radius),
        "longer": ascend(whole, **size, steps=_LONGER * steps).top.sigma,
        "heads": [_tried(whole.head(h), *alone) for h in heads],
    }


def _tried(layer: Attention, options: Record, n: int, radius: float) -> Record:
    best: dict[str, float] = {}
    for row in worst(layer, **options):
        if row.sigma is not None:
            name = row.name.split(" (")[0]  # clusters at either end of the spectrum are of one kind
            best[name] = max(row.sigma, best.get(name, 0.0))
    ascents = {name: best.pop(name, None) for name in ("given", KNOWN, DRAWN)}
    return {"built": best, **ascents, "bounds": _bounds_of(layer, n, radius)}


def _bounds_of(layer: Attention, n: int, radius: float) -> dict[str, float]:
    sound = {t.name for t in catalogue() if t.sound and t.kind == "upper" and t.scope != "limit"}
    return {
        bound.theorem: bound.value
        for bound in bounds_at(layer, num_tokens=n, radius=radius, metric="frobenius")
        if bound.value is not None and bound.theorem in sound
    }


def _envelope(record: Record) -> float:
    """The largest sigma that `lipscope attack` finds at this radius and length."""
    return max(
        *record["built"].values(), *(record[name] or 0.0 for name in ("given", KNOWN, DRAWN))
    )


def _known_sigma(record: Record) -> float:
    """The largest sigma known at this radius and length, the longer ascent's too."""
    return max(_envelope(record), record["longer"])


def _construction(record: Record) -> float | None:
    return max(record["built"].values(), default=None)


def _of_inputs(study: Study, found: Sequence[Record]) -> None:
    def ratio(
        above: Callable[[Record], float | None], below: Callable[[Record], float | None]
    ) -> str:
        values = [a / b for r in found if (a := above(r)) is not None and (b := below(r))]
        return f"{middle(values)} times" if values else "no such input for these layers"

    study.claim(
        "gradient ascent from random starts, against the best construction",
        "gradient ascent gives poor results (Section 5.2)",
        ratio(lambda r: r[DRAWN], _construction),
    )
    study.claim(
        "ascent from everything known, against the best construction",
        "not in the paper",
        ratio(lambda r: r[KNOWN], _construction),
    )
    study.claim(
        f"random starts with {_LONGER} times as many steps, against the worst known input",
        "not in the paper",
        ratio(lambda r: r["longer"], _envelope),
    )
    study.claim(
        "best construction, against two clusters",
        "two clusters reach the growth of the bound (Proposition 3.4)",
        ratio(_construction, lambda r: r["built"].get("two_cluster")),
    )
    study.claim(
        "worst of all known inputs, against text",
        "text is far from the worst case (Section 5)",
        ratio(_known_sigma, lambda r: r["given"]),
    )
    curves = [
        [(r["n"], _known_sigma(r)) for r in mine]
        for _, mine in grouped(found, *_PLACE)
        if len(mine) > 2
    ]
    slopes, off = ([of(one) for one in curves] for of in (slope_of, off_line))
    study.claim(
        "growth of the worst of all known inputs with n",
        "n^(1/2) until e^(2γR²) (Theorem 3.3, Proposition 3.4)",
        f"mean slope {middle(slopes)}, but the values leave the line by "
        f"{middle([100 * v for v in off], 0)} %"
        if slopes
        else "too few lengths",
    )
    if tight := [_tight(mine) for _, mine in grouped(found, *_PLACE) if _above_all(mine[0])]:
        study.claim(
            "castin_thm_e_3 of the whole layer over the worst of all known inputs, by n",
            "no growth, if √n is tight in n for the layer as well (Section 3.2)",
            "; ".join(tight),
        )
    study.claim(
        "smallest bound for all inputs, against the worst of all known inputs",
        "derived here",
        ratio(_least, _known_sigma),
    )
    below = sum((least := _least(r)) is not None and _known_sigma(r) > least for r in found)
    study.claim("bounds below a known input", "none", f"{below} of {len(found)}")


def _least(record: Record) -> float | None:
    return min(record["bounds"].values(), default=None)


def _above_all(record: Record) -> float | None:
    """Theorem E.3 over the worst of all known inputs."""
    bound = record["bounds"].get("castin_thm_e_3")
    return bound and bound / _known_sigma(record)


def _tight(records: Sequence[Record]) -> str:
    ends = (f"{number(_above_all(r), 3)} at n = {r['n']}" for r in (records[0], records[-1]))
    return f"layer {records[0]['layer']}, {records[0]['text']}: {', '.join(ends)}"


def _kind_of_worst(record: Record) -> str:
    others = {name: record[name] or 0.0 for name in ("given", KNOWN, DRAWN)}
    every = {**record["built"], **others}
    return max(every, key=every.__getitem__)


def _layer_tables(study: Study, found: Sequence[Record]) -> None:
    for (model, text, layer), mine in grouped(found, *_PLACE):
        study.table(
            f"{model}, layer {layer}, {text}, radius {mine[0]['radius']:.3g}: all heads",
            mine,
            {
                "n": "n",
                "text": "given",
                "two clusters": lambda r: r["built"].get("two_cluster"),
                "best construction": _construction,
                "which": lambda r: max(r["built"], key=r["built"].get, default="–"),
                "ascent, random starts": DRAWN,
                "ascent, known inputs": KNOWN,
                f"random starts, {_LONGER} × the steps": "longer",
                "smallest bound": _least,
                "Theorem E.3": lambda r: r["bounds"].get("castin_thm_e_3"),
            },
            digits=3,
        )


def _bounds_table(study: Study, found: Sequence[Record]) -> None:
    lines = []
    for name in dict.fromkeys(name for r in found for name in r["bounds"]):
        for model in dict.fromkeys(r["model"] for r in found):
            mine = [r for r in found if r["model"] == model and name in r["bounds"]]
            if mine:
                above = [r["bounds"][name] / _known_sigma(r) for r in mine]
                least = sum(r["bounds"][name] == _least(r) for r in mine)
                low, mid, high = (number(of(above), 3) for of in (min, statistics.median, max))
                lines.append((name, model, f"{mid} ({low} to {high})", f"{least} of {len(mine)}"))
    columns = ("bound", "model", "× the worst of all known inputs", "smallest of all")
    study.table("Every bound for all inputs, over layers, texts and lengths", tuple(lines), columns)


def _head_tables(study: Study, found: Sequence[Record]) -> None:
    def loose(heads: list[Record]) -> list[float]:
        return [b / _envelope(h) for h in heads if (b := _least(h))]

    def most_often(heads: list[Record]) -> str:
        which = [_kind_of_worst(h) for h in heads]
        most = statistics.mode(which)
        return f"{most}, {which.count(most)} of {len(which)}"

    alone = [(r, [h for h in r["heads"] if h["built"]]) for r in found]
    if any(heads for _, heads in alone):
        study.table(
            "One head at a time: median and range over heads",
            [one for one in alone if one[1]],
            {
                "model, text": lambda r, _: f"{r['model']}, {r['text']}",
                "layer": lambda r, _: r["layer"],
                "n": lambda r, _: r["n"],
                "worst known": lambda _, heads: middle(map(_envelope, heads), 1),
                "against text": lambda _, heads: middle(
                    (_envelope(h) / h["given"] for h in heads), 1
                ),
                "most often": lambda _, heads: most_often(heads),
                "smallest bound against it": lambda _, heads: middle(loose(heads), 1),
            },
        )


def _draw_worst(study: Study, found: Sequence[Record]) -> None:
    curves = {
        "text, largest of its windows": "given",
        "two clusters": lambda r: r["built"].get("two_cluster"),
        "ascent from random starts": DRAWN,
        "worst known input": _envelope,
        f"random starts, {_LONGER} times the steps": "longer",
    }
    for text in study.texts:
        panels = []
        for (model, layer), mine in grouped(chosen(found, text=text.name), "model", "layer"):
            series = [curve(label, mine, "n", of) for label, of in curves.items()]
            series.append(curve("smallest bound for all inputs", mine, "n", _least, "dashes"))
            title = f"{model}, layer {layer}, radius {mine[0]['radius']:.3g}"
            panels.append(Panel(title, tuple(series)))
        study.draw(f"worst-input-{text.name}", f"Worst known inputs, {text.name}", panels)
