"""The largest sigma that is known to be reached at a radius, and what bounds say there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lipscope import Attention
from lipscope.attacks import DRAWN, KNOWN, ascend, worst
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import off_line, slope_of
from lipscope.theorems import bounds_at, catalogue
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import Claim, Findings, Record, Table, grouped, middle
from lipscope_experiments.texts import Text

_STEPS = 5, 40  # the second is what `lipscope attack` takes
_LONGER = 4
_PLACE = "model", "text", "layer"


@experiment(
    "castin2024/worst-input",
    title="The worst known input of a layer against the number of tokens",
    cite="castin2024",
    models=("minilm", "smollm2"),
    quick_models=("minilm",),
)
def worst_input(study: Study) -> Findings:
    """Constructions, ascent and text under the largest token norm of the text, and the bounds."""
    found = [record for place in study.places() for record in _of(study, *place)]
    _draw(study, found)
    return Findings(
        tuple(_claims(found)),
        (*_layer_tables(found), *_bounds_table(found), *_head_tables(found)),
        (
            "The worst known input is the largest of all that `lipscope attack` tries: a lower "
            "value of the worst case, at tokens no larger than the largest of the layer's texts.",
            "Constructions place tokens by one head at a time; sigma is that of the whole layer, "
            "or of one head in the table of heads. Rotary layers have few: their logits depend on "
            "position.",
            f"Text: the largest of {study.pick(2, 5)} windows. Ascent: "
            f"{study.pick(*_STEPS)} steps from the best construction of each kind and from the "
            "text, and as many from four random starts (heads: one). It is not at its end then: "
            f"a column gives {_LONGER} times as many steps to the random starts.",
            "All known inputs: those of that column, too. The search has not converged, so the "
            "worst case is at least as far above text as stated here, and the bounds are at most "
            "as far above the worst case.",
            "Bounds hold for all inputs of this length and radius. Theorem E.3 is Theorem 3.3 of "
            "the paper with biases.",
        ),
    )


def _of(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Record]:
    count = int(loaded.config.num_hidden_layers)
    lengths = study.pick([4, 12], [2, 4, 8, 16, 32, 64, 100])
    for layer in study.pick([count // 2], [0, count // 2, count - 1]):
        places: dict[int, list[Any]] = {n: [] for n in lengths}
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
        jobs = [_job(study, loaded, text, layer, radius, at) for at in places.values() if at]
        yield from study.values(f"worst-{loaded.name}-{text.name}-{layer}", jobs)


def _job(
    study: Study, loaded: LoadedModel, text: Text, layer: int, radius: float, at: Sequence[Any]
) -> ValueJob:
    n, steps = len(at[0].x), study.pick(*_STEPS)

    def compute() -> Record:
        whole, inputs = at[0].attention, [one.x for one in at]
        draw = torch.Generator().manual_seed(n)
        size: Record = {"num_tokens": n, "radius": radius, "generator": draw}
        heads = range(0, whole.num_heads, study.pick(6, 1))
        alone = ({**size, "given": inputs[:1], "steps": steps, "restarts": 1}, n, radius)
        return {
            **_tried(whole, {**size, "given": inputs, "steps": steps}, n, radius),
            "longer": ascend(whole, **size, steps=_LONGER * steps).top.sigma,
            "heads": [_tried(whole.head(h), *alone) for h in heads],
        }

    key = {"model": loaded.name, "text": text.name, "layer": layer, "n": n, "radius": radius}
    return key | {"steps": steps}, compute


def _tried(layer: Attention, options: Record, n: int, radius: float) -> Record:
    """The largest sigma of each kind of input, and the bounds."""
    best: dict[str, float] = {}
    for row in worst(layer, **options):
        if row.sigma is not None:
            name = row.name.split(" (")[0]  # clusters at either end of the spectrum are of one kind
            best[name] = max(row.sigma, best.get(name, 0.0))
    ascents = {name: best.pop(name, None) for name in ("given", KNOWN, DRAWN)}
    return {"built": best, **ascents, "bounds": _bounds(layer, n, radius)}


def _bounds(layer: Attention, n: int, radius: float) -> dict[str, float]:
    """Upper bounds for all inputs of this length and radius."""
    sound = {t.name for t in catalogue() if t.sound and t.kind == "upper" and t.scope != "limit"}
    return {
        bound.theorem: bound.value
        for bound in bounds_at(layer, num_tokens=n, radius=radius, metric="frobenius")
        if bound.value is not None and bound.theorem in sound
    }


# --- what is said ----------------------------------------------------------------------------


def _envelope(record: Record) -> float:
    """The largest sigma that `lipscope attack` finds at this radius and length."""
    return max(
        *record["built"].values(), *(record[name] or 0.0 for name in ("given", KNOWN, DRAWN))
    )


def _known(record: Record) -> float:
    """The largest sigma known at this radius and length, the longer ascent's too."""
    return max(_envelope(record), record["longer"])


def _construction(record: Record) -> float | None:
    return max(record["built"].values(), default=None)


def _claims(found: Sequence[Record]) -> Iterator[Claim]:
    def ratio(
        above: Callable[[Record], float | None], below: Callable[[Record], float | None]
    ) -> str:
        values = [a / b for r in found if (a := above(r)) is not None and (b := below(r))]
        return f"{middle(values)} times" if values else "no such input for these layers"

    yield Claim(
        "gradient ascent from random starts, against the best construction",
        "gradient ascent gives poor results (Section 5.2)",
        ratio(lambda r: r[DRAWN], _construction),
    )
    yield Claim(
        "ascent from everything known, against the best construction",
        "not in the paper",
        ratio(lambda r: r[KNOWN], _construction),
    )
    yield Claim(
        f"random starts with {_LONGER} times as many steps, against the worst known input",
        "not in the paper",
        ratio(lambda r: r["longer"], _envelope),
    )
    yield Claim(
        "best construction, against two clusters",
        "two clusters reach the growth of the bound (Proposition 3.4)",
        ratio(_construction, lambda r: r["built"].get("two_cluster")),
    )
    yield Claim(
        "worst of all known inputs, against text",
        "text is far from the worst case (Section 5)",
        ratio(_known, lambda r: r["given"]),
    )
    curves = [_points(mine) for _, mine in grouped(found, *_PLACE) if len(mine) > 2]
    slopes, off = ([of(curve) for curve in curves] for of in (slope_of, off_line))
    yield Claim(
        "growth of the worst of all known inputs with n",
        "n^(1/2) until e^(2γR²) (Theorem 3.3, Proposition 3.4)",
        f"mean slope {middle(slopes)}, but the values leave the line by "
        f"{middle([100 * v for v in off], 0)} %"
        if slopes
        else "too few lengths",
    )
    if tight := [_tight(mine) for _, mine in grouped(found, *_PLACE) if _above_all(mine[0])]:
        yield Claim(
            "castin_thm_e_3 of the whole layer over the worst of all known inputs, by n",
            "no growth, if √n is tight in n for the layer as well (Section 3.2)",
            "; ".join(tight),
        )
    yield Claim(
        "smallest bound for all inputs, against the worst of all known inputs",
        "derived here",
        ratio(_least, _known),
    )
    below = sum((least := _least(r)) is not None and _known(r) > least for r in found)
    yield Claim("bounds below a known input", "none", f"{below} of {len(found)}")


def _least(record: Record) -> float | None:
    return min(record["bounds"].values(), default=None)


def _above_all(record: Record) -> float | None:
    """Theorem E.3 over the worst of all known inputs."""
    bound = record["bounds"].get("castin_thm_e_3")
    return bound and bound / _known(record)


def _tight(records: Sequence[Record]) -> str:
    ends = (f"{_cell(_above_all(r))} at n = {r['n']}" for r in (records[0], records[-1]))
    return f"layer {records[0]['layer']}, {records[0]['text']}: {', '.join(ends)}"


def _points(records: Sequence[Record]) -> list[tuple[int, float]]:
    return [(r["n"], _known(r)) for r in records]


def _name(record: Record) -> str:
    """What the worst known input is."""
    others = {name: record[name] or 0.0 for name in ("given", KNOWN, DRAWN)}
    every = {**record["built"], **others}
    return max(every, key=every.__getitem__)


def _cell(value: float | None) -> str:
    return "–" if value is None else number(value, 3)


def _layer_tables(found: Sequence[Record]) -> Iterator[Table]:
    for (model, text, layer), mine in grouped(found, *_PLACE):
        lines = []
        for r in mine:
            by = max(r["built"], key=r["built"].get, default="–")
            values = (
                r["given"],
                r["built"].get("two_cluster"),
                _construction(r),
                r[DRAWN],
                r[KNOWN],
                r["longer"],
                _least(r),
                r["bounds"].get("castin_thm_e_3"),
            )
            cells = [_cell(value) for value in values]
            lines.append((str(r["n"]), *cells[:3], by, *cells[3:]))
        columns = (
            "n",
            "text",
            "two clusters",
            "best construction",
            "which",
            "ascent, random starts",
            "ascent, known inputs",
            f"random starts, {_LONGER} × the steps",
            "smallest bound",
            "Theorem E.3",
        )
        title = f"{model}, layer {layer}, {text}, radius {mine[0]['radius']:.3g}: all heads"
        yield Table(title, columns, tuple(lines))


def _bounds_table(found: Sequence[Record]) -> Iterator[Table]:
    """Every bound for all inputs, against the worst known one."""
    lines = []
    for name in dict.fromkeys(name for r in found for name in r["bounds"]):
        for model in dict.fromkeys(r["model"] for r in found):
            mine = [r for r in found if r["model"] == model and name in r["bounds"]]
            if mine:
                above = [r["bounds"][name] / _known(r) for r in mine]
                least = sum(r["bounds"][name] == _least(r) for r in mine)
                low, mid, high = (number(of(above), 3) for of in (min, statistics.median, max))
                lines.append((name, model, f"{mid} ({low} to {high})", f"{least} of {len(mine)}"))
    columns = ("bound", "model", "× the worst of all known inputs", "smallest of all")
    yield Table("Every bound for all inputs, over layers, texts and lengths", columns, tuple(lines))


def _head_tables(found: Sequence[Record]) -> Iterator[Table]:
    lines = []
    for (model, text, layer), mine in grouped(found, *_PLACE):
        for r in mine:
            placed = [h for h in r["heads"] if h["built"]]
            if not placed:
                continue
            known = [_envelope(h) for h in placed]
            gains = [k / h["given"] for k, h in zip(known, placed, strict=True)]
            least = [_least(h) for h in placed]
            loose = [b / k for k, b in zip(known, least, strict=True) if b]
            which = [_name(h) for h in placed]
            most = statistics.mode(which)
            lines.append(
                (
                    f"{model}, {text}",
                    str(layer),
                    str(r["n"]),
                    middle(known, 1),
                    middle(gains, 1),
                    f"{most}, {which.count(most)} of {len(which)}",
                    middle(loose, 1) if loose else "–",
                )
            )
    columns = (
        "model, text",
        "layer",
        "n",
        "worst known",
        "against text",
        "most often",
        "smallest bound against it",
    )
    if lines:
        yield Table("One head at a time: median and range over heads", columns, tuple(lines))


# --- what is drawn ---------------------------------------------------------------------------


def _draw(study: Study, found: Sequence[Record]) -> None:
    for text in study.texts:
        panels = []
        for (model, name, layer), mine in grouped(found, *_PLACE):
            if name == text.name:
                curves: dict[str, Callable[[Record], float | None]] = {
                    "text, largest of its windows": lambda r: r["given"],
                    "two clusters": lambda r: r["built"].get("two_cluster"),
                    "ascent from random starts": lambda r: r[DRAWN],
                    "worst known input": _envelope,
                    f"random starts, {_LONGER} times the steps": lambda r: r["longer"],
                }
                series = [Series(label, _curve(mine, of)) for label, of in curves.items()]
                least = _curve(mine, _least)
                series.append(Series("smallest bound for all inputs", least, "dashes"))
                title = f"{model}, layer {layer}, radius {mine[0]['radius']:.3g}"
                panels.append(Panel(title, tuple(series)))
        study.draw(f"worst-input-{text.name}", f"Worst known inputs, {text.name}", panels)


def _curve(
    records: Sequence[Record], of: Callable[[Record], float | None]
) -> tuple[tuple[int, float], ...]:
    return tuple((r["n"], y) for r in records if (y := of(r)) is not None)
