"""The sink's column against sigma: does the attention that one token receives set the exponent?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

from lipscope import LayerAtInput, Operator, TopSingular, records, top_singular
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel, reinitialised
from lipscope_experiments.experiment import Source, Study, experiment, layers_of
from lipscope_experiments.findings import Record, average, middle
from lipscope_experiments.frozen import column_norm, frozen_column, frozen_norm

_SHARE = 0.75  # of sigma that a sink's column has at the longest input
_ERROR = 0.05  # mean absolute error of an exponent that the law is allowed
_RANKED = 0.5  # least rank correlation of predicted and measured exponents
_TOL = 1e-2
_SIDES = (4, 8, 16)  # of pictures, in patches
_LETTERS = 24  # of a text for each token, with room
_PLACES = (1 / 3, 2 / 3)  # where passages begin, as parts of a text
# The layers of the pilot, on which the law was stated, and those measured besides.
_STATED = {"minilm": (0, 1, 2, 3, 4, 5), "smollm2": (0, 5, 10, 15, 20, 25, 29)}
_BESIDES = {"smollm2": (2, 7, 12, 17, 22, 27)}
_RANDOM = ", random weights"
_FEW = 4  # texts that random weights read

PLAN = (
    "Written before the runs. Question: is the exponent of sigma in n, layer by layer, that of the "
    "column of one token with attention frozen, so ½ + the slope of the attention that it "
    "receives?",
    "Measured: the slope of log sigma (map `attention`) on log n, by least squares over nested "
    "passages. Predicted: ½ + the slope of log m, m = √(Σ_h ω_h mean_i P_h,is²) for the token s "
    "whose frozen column C_s has the largest Frobenius norm at that length, ω_h ∝ |W_h u|², u the "
    "top right singular vector of C_s. Two other forms beside it: the slope of ‖C_s‖ itself, and "
    "½ + the slope of the plain mean of P_h,is over heads and rows.",
    f"Hypothesis of the law: ‖C_s‖ is at least {_SHARE} of sigma at the longest length, in the "
    "mean over texts. Layers that meet it are called sinks below. The share alone bounds the "
    "difference of two slopes (docs/theory/sink.md); the law says more than that bound only where "
    "its errors are smaller.",
    "Texts are a random factor: a layer's exponent is the mean over texts of the mean over a "
    "text's passages, with Student's interval over texts: exact for a balanced one-way model with "
    "normal effects of texts. Pictures count as texts. Layers of one model are not independent, "
    "and no interval over layers is given.",
    "The law is refuted if, on sinks of layers and models that were not used to state it (all but "
    "MiniLM's six and SmolLM2's 0, 5, 10, 15, 20, 25, 29), the mean absolute error of the "
    f"predicted exponent is above {_ERROR}, or not below that of both constants, 1/4 and the mean "
    "measured exponent of the sinks that it was stated on; or if predicted and measured exponents "
    f"have a rank correlation of at most {_RANKED} over these layers.",
    "Heads: each by itself, its own token of largest root mean square attention, for which "
    "‖C_s‖ = √n ‖W_h‖ m exactly; the same share, errors and constants.",
    "Not sinks: which token holds the top right singular vector, over how many tokens it spreads "
    "(1 / Σ share²), what sigma keeps with attention frozen, and the token's whole column.",
)


@dataclass(frozen=True)
class ColumnAt:
    """One layer, or one head of it, at one length of one passage: sigma and the frozen column."""

    n: int
    sigma: float
    norm: float
    mass: float
    received: float
    rest: Record | None = None  # of layers, at the longest length: what carries sigma


@dataclass(frozen=True)
class ColumnCurve:
    """One layer of a model, or one head of it, on one passage at every length."""

    text: str
    points: tuple[ColumnAt, ...]

    def slope(self, of: Callable[[ColumnAt], float]) -> float:
        """Of a positive quantity in n."""
        return records.slope_of((one.n, of(one)) for one in self.points)

    @property
    def share(self) -> float:
        """The frozen column over sigma, at the longest length."""
        last = max(self.points, key=lambda one: one.n)
        return last.norm / last.sigma


MEASURED, PREDICTED, COLUMN, PLAIN = "measured", "predicted", "column", "plain attention"
_SLOPES: dict[str, Callable[[ColumnCurve], float]] = {
    MEASURED: lambda c: c.slope(lambda p: p.sigma),
    PREDICTED: lambda c: 0.5 + c.slope(lambda p: p.mass),
    COLUMN: lambda c: c.slope(lambda p: p.norm),
    PLAIN: lambda c: 0.5 + c.slope(lambda p: p.received),
}


@dataclass(frozen=True)
class LayerLaw:
    """One layer, or one head of it, on all passages."""

    model: str
    layer: int
    stated: bool  # whether the law was stated on it
    curves: tuple[ColumnCurve, ...]
    head: int | None = None

    def over_texts(self, of: Callable[[ColumnCurve], float]) -> list[float]:
        """The mean over its passages, of every text."""
        return [
            fmean(map(of, mine)) for mine in records.grouped(self.curves, lambda c: c.text).values()
        ]

    @cached_property
    def means(self) -> dict[str, float]:
        """Measured and predicted exponents, means over texts."""
        return {name: fmean(self.over_texts(of)) for name, of in _SLOPES.items()}

    @property
    def error(self) -> list[float]:
        """Predicted less measured exponent, by text."""
        return self.over_texts(lambda c: _SLOPES[PREDICTED](c) - _SLOPES[MEASURED](c))

    @property
    def is_sink(self) -> bool:
        """Whether it meets the hypothesis of the law."""
        return fmean(self.over_texts(lambda c: c.share)) >= _SHARE

    @property
    def is_random(self) -> bool:
        """Whether its weights are those of a new model."""
        return self.model.endswith(_RANDOM)


@dataclass(frozen=True)
class LengthsOfText:
    """What one call asks for: a model, what it reads there, and how that is cut."""

    name: str
    text: str
    asked: dict[str, Any]
    lengths: tuple[int, ...]  # tokens of text, or pixels of a side
    heads: bool = False  # whether it is heads that are measured

    def at(self, length: int) -> dict[str, Any]:
        """The options of one length."""
        sees = "images" in self.asked
        return self.asked | ({"resolutions": [length]} if sees else {"lengths": [length]})


@experiment(
    "castin2024/sink-law",
    title="The sink's column and the exponent of sigma",
    models=("minilm", "smollm2", "dinov2"),
    reads_images=True,
)
def sink_law(study: Study) -> None:
    """Predicted against measured exponents, by layer and head."""
    missing: list[str] = []
    sources = [*study.sources(missing)]
    every = [
        LayerLaw(model, layer, layer in _STATED.get(model, ()), tuple(curves), head)
        for (model, layer, head), curves in _all_curves(study, sources).items()
    ]
    laws, heads = ([one for one in every if (one.head is None) is whole] for whole in (True, False))
    _draw_law(study, laws)
    _of_law(study, laws, heads)
    _law_tables(study, laws)
    study.remark(*PLAN, *_how(study), *missing)


def _all_curves(
    study: Study, sources: Sequence[Source]
) -> dict[tuple[str, int, int | None], list[ColumnCurve]]:
    """By model, layer and head: trained models, then random weights, heads last."""
    found: dict[tuple[str, int, int | None], list[ColumnCurve]] = {}
    trained = {source.model.name: source.model for source in sources}
    fresh = {
        name: replace(reinitialised(model), name=f"{name}{_RANDOM}")
        for name, model in trained.items()
    }
    for models, heads in ((trained, False), (fresh, False), (trained, True)):
        texts = [*dict.fromkeys(source.name for source in sources if not source.sees)]
        few = texts[:_FEW] if models is fresh else texts
        for source in sources:
            if not source.sees and source.name not in few:
                continue
            loaded = models[source.model.name]
            for reading in _readings(study, source, loaded, heads):
                for (layer, head), curve in _curves(study, source, loaded, reading):
                    found.setdefault((loaded.name, layer, head), []).append(curve)
    return found


def _layers(study: Study, loaded: LoadedModel) -> list[int]:
    """All layers of models of twelve or fewer, the named ones of deeper ones, three random ones."""
    depth = int(loaded.config.num_hidden_layers)
    if loaded.name.endswith(_RANDOM) or study.quick:
        return sorted({0, depth // 2, depth - 1})
    named = sorted({*_STATED.get(loaded.name, ()), *_BESIDES.get(loaded.name, ())})
    return named or list(range(0, depth, math.ceil(depth / 12)))


def _readings(
    study: Study, source: Source, loaded: LoadedModel, heads: bool
) -> Iterator[LengthsOfText]:
    """The passages of a text, or the pictures."""
    name, trained = loaded.name, not loaded.name.endswith(_RANDOM)
    shallow = int(loaded.config.num_hidden_layers) <= 12
    if source.sees:
        patch = int(loaded.config.patch_size)
        count = None if study.images != "random" else study.pick(3, 10)
        asked = {"images": study.images, "samples": count}
        if not heads:
            yield LengthsOfText(name, source.name, asked, tuple(patch * side for side in _SIDES))
        return
    if heads and not shallow:
        return
    most = 128 if shallow else 256
    several = trained and shallow and not heads and not study.quick
    every = (16, 32, 64, 128, 256) if shallow and not heads else (16, 64, most)
    content = source.asked["data"]
    for place in _PLACES[: 2 if several else 1]:
        start = int(place * max(len(content) - _LETTERS * most, 0))
        asked = {"data": content[start : start + _LETTERS * most], "samples": 1}
        lengths = tuple(n for n in every if n <= study.pick(64, most))
        yield LengthsOfText(name, f"{source.name}, from {place:.0%}", asked, lengths, heads)


def _curves(
    study: Study, source: Source, loaded: LoadedModel, reading: LengthsOfText
) -> Iterator[tuple[tuple[int, int | None], ColumnCurve]]:
    """Every layer, or head, on one passage or all pictures."""
    points: dict[tuple[int, int, int | None], list[ColumnAt]] = {}
    for length in reading.lengths:
        for each, point in _points(study, loaded, reading, length):
            points.setdefault(each, []).append(point)
    for (sample, layer, head), mine in points.items():
        text = f"picture {sample}" if source.sees else source.name
        yield (layer, head), ColumnCurve(text, tuple(mine))


def _points(
    study: Study, loaded: LoadedModel, reading: LengthsOfText, length: int
) -> Iterator[tuple[tuple[int, int, int | None], ColumnAt]]:
    """At one length: every sample, layer and, if asked for, head."""
    key = {
        "text": reading.text,
        "length": length,
        "layers": _layers(study, loaded),
        "heads": reading.heads,
        "rest": length == reading.lengths[-1] and not reading.heads,
    }
    (found,) = study.values(
        f"columns, {reading.name}", [key], lambda **_: _measured(loaded, reading, key)
    )
    for one in found["points"]:
        yield (one["sample"], one["layer"], one["head"]), ColumnAt(**one["point"])


def _measured(loaded: LoadedModel, reading: LengthsOfText, key: Record) -> Record:
    """Sigma and the frozen column, of every layer or head at one length."""
    asked = {"layers": key["layers"], "dtype": "float32", **reading.at(key["length"])}
    points: list[Record] = []
    for one in layers_of(loaded, **asked):
        where, n = {"sample": one.sample, "layer": one.layer}, len(one.x)
        column = frozen_column(one.attention, one.x)
        if key["heads"]:
            for h, (_, mass, norm) in enumerate(column.heads):
                sigma = _top(one.attention.head(h).linearise(one.x)).sigma
                point = ColumnAt(n, sigma, norm, mass, mass)
                points.append({**where, "head": h, "point": asdict(point)})
            continue
        top = _top(one.linearise())
        rest = _carried(one, column.token, top) if key["rest"] else None
        point = ColumnAt(n, top.sigma, column.norm, column.mass, column.received, rest)
        points.append({**where, "head": None, "point": asdict(point)})
    return {"points": points}


def _top(op: Operator) -> TopSingular:
    return top_singular(op, tol=_TOL, generator=torch.Generator().manual_seed(0))


def _carried(one: LayerAtInput, token: int, top: TopSingular) -> Record:
    """What carries sigma: the top token, over how many the direction spreads, parts of sigma."""
    shares = top.v.double().square().sum(-1)
    index = int(shares.argmax())
    return {
        "index": index,
        "words": one.tokens[index],
        "held": float(shares[index]),
        "tokens": 1 / float(shares.square().sum()),
        "frozen": frozen_norm(one.attention, one.x),
        "whole": column_norm(one.linearise(), token),
    }


# --- what is said


def _errors(laws: Sequence[LayerLaw], predicted: Callable[[LayerLaw], float]) -> float:
    return fmean(abs(predicted(law) - law.means[MEASURED]) for law in laws)


def _of_group(laws: Sequence[LayerLaw], constant: float) -> str:
    """Errors of the law, of its other forms and of both constants, and the rank correlation."""
    if not laws:
        return "no layer"
    errors = {name: _errors(laws, lambda law, n=name: law.means[n]) for name in [*_SLOPES][1:]}
    errors |= {"1/4": _errors(laws, lambda _: 0.25)}
    errors |= {f"{constant:.2f}, the mean stated": _errors(laws, lambda _: constant)}
    measured, predicted = ([law.means[n] for law in laws] for n in (MEASURED, PREDICTED))
    ranked = records.rank_correlation(predicted, measured)[0] if len(laws) > 2 else math.nan
    agreed = f"{ranked:.2f}" if math.isfinite(ranked) else "–"
    signed = fmean(p - m for p, m in zip(predicted, measured, strict=True))
    said = ", ".join(f"{name} {value:.3f}" for name, value in errors.items())
    return (
        f"{len(laws)} {'heads' if laws[0].head is not None else 'layers'}; mean absolute error: "
        f"{said}; mean error of the law {signed:+.3f}; rank correlation {agreed}"
    )


def verdict(fresh: Sequence[LayerLaw], constant: float) -> str:
    """Whether what was written before the runs refutes the law."""
    if len(fresh) < 3:
        return "not decided: fewer than three such layers"
    mine = _errors(fresh, lambda law: law.means[PREDICTED])
    others = min(_errors(fresh, lambda _: 0.25), _errors(fresh, lambda _: constant))
    measured, predicted = ([law.means[n] for law in fresh] for n in (MEASURED, PREDICTED))
    ranked = records.rank_correlation(predicted, measured)[0]
    against = []
    if mine > _ERROR:
        against.append(f"its error {mine:.3f} is above {_ERROR}")
    if mine >= others:
        against.append(f"its error {mine:.3f} is not below {others:.3f}, a constant's")
    if not ranked > _RANKED:
        against.append(f"the rank correlation {ranked:.2f} is not above {_RANKED}")
    return "refuted: " + "; ".join(against) if against else "not refuted"


def _of_law(study: Study, laws: Sequence[LayerLaw], heads: Sequence[LayerLaw]) -> None:
    trained = [law for law in laws if not law.is_random]
    sinks = [law for law in trained if law.is_sink]
    stated = [law for law in sinks if law.stated]
    constant = fmean(law.means[MEASURED] for law in stated) if stated else 0.25
    fresh = [law for law in sinks if not law.stated]
    study.claim(
        "the law, on sinks that it was not stated on",
        f"error at most {_ERROR}, below both constants', rank correlation above {_RANKED}",
        f"{verdict(fresh, constant)}. {_of_group(fresh, constant)}",
    )
    groups = {
        "sinks that it was stated on": stated,
        "trained layers that are no sinks": [law for law in trained if not law.is_sink],
        "random weights, all layers": [law for law in laws if law.is_random],
    }
    for about, mine in groups.items():
        told = "small: it was stated on them" if mine is stated else "nothing, unless one is a sink"
        study.claim(about, told, _of_group(mine, constant))
    for kind, sink in (("sinks", True), ("no sinks", False)):
        mine = [head for head in heads if head.is_sink is sink]
        study.claim(f"heads by themselves, {kind}", "as for layers", _of_group(mine, constant))
    share = [c.share for law in sinks for c in law.curves]
    study.claim(
        "the frozen column over sigma, sinks, all passages at the longest length",
        f"at least {_SHARE} in the mean of a layer; above 1 is possible",
        middle(share),
    )


def _law_tables(study: Study, laws: Sequence[LayerLaw]) -> None:
    study.table(
        "Exponents (mean over texts, 95 % interval over texts)",
        laws,
        {
            "model": "model",
            "layer": lambda law: f"{law.layer}{' (stated)' if law.stated else ''}",
            "column / sigma": lambda law: average(
                law.over_texts(lambda c: c.share), (0.0, math.inf)
            ),
            "sink": lambda law: "yes" if law.is_sink else "no",
            **{
                name: lambda law, of=of: _signed(law.over_texts(of)) for name, of in _SLOPES.items()
            },
            "predicted − measured": lambda law: _signed(law.error),
        },
    )

    def rest(law: LayerLaw, name: str) -> list[float]:
        last = [max(c.points, key=lambda p: p.n) for c in law.curves]
        return [
            p.rest[name] / (p.sigma if name in ("frozen", "whole") else 1.0) for p in last if p.rest
        ]

    def top(law: LayerLaw) -> str:
        last = [max(c.points, key=lambda p: p.n) for c in law.curves]
        found = [p.rest for p in last if p.rest]
        first = sum(one["index"] == 0 for one in found)
        words = [one["words"] for one in found if one["index"]][:4]
        return f"first {first} of {len(found)}" + f"; else {' '.join(words)}" * bool(words)

    study.table(
        "What carries sigma, at the longest length (medians over passages, ranges)",
        laws,
        {
            "model": "model",
            "layer": "layer",
            "top token": top,
            "its |v|²": lambda law: middle(rest(law, "held")),
            "tokens in v": lambda law: middle(rest(law, "tokens"), 1),
            "attention frozen / sigma": lambda law: middle(rest(law, "frozen")),
            "whole column / sigma": lambda law: middle(rest(law, "whole")),
        },
    )


def _signed(values: Sequence[float]) -> str:
    mean, low, high = records.mean_interval(values)
    ends = f" [{low:.2f}, {high:.2f}]" if len(values) > 2 else ""
    return f"{mean:.2f}{ends}"


def _draw_law(study: Study, laws: Sequence[LayerLaw]) -> None:
    kinds = {
        "sink, not used to state the law": lambda law: law.is_sink and not law.stated,
        "sink, used to state it": lambda law: law.is_sink and law.stated,
        "no sink": lambda law: not law.is_sink and not law.is_random,
        "random weights": lambda law: law.is_random,
    }
    points = {
        name: tuple((law.means[PREDICTED], law.means[MEASURED]) for law in laws if of(law))
        for name, of in kinds.items()
    }
    every = [value for some in points.values() for pair in some for value in pair]
    if not every:
        return
    low, high = min(every), max(every)
    series = [Series(name, some, "points") for name, some in points.items() if some]
    series.append(Series("measured = predicted", ((low, low), (high, high)), "dashes"))
    panel = Panel(
        "Every dot a layer of a model",
        tuple(series),
        "½ + slope of the attention that the sink receives",
        "measured exponent of sigma",
        False,
        False,
    )
    study.draw("sink-law", "Predicted and measured exponents", [panel], columns=1)


def _how(study: Study) -> list[str]:
    texts = ", ".join(text.name for text in study.texts)
    return [
        f"Texts: {texts}. Passages of MiniLM with its special tokens from a third and from two "
        "thirds of every text, 16, 32, 64 and 128 tokens; of SmolLM2 from a third, 16, 64 and 256. "
        "Pictures of "
        f"{', '.join(map(str, _SIDES))} patches a side and a class token; positions interpolated.",
        "MiniLM and DINOv2: all layers. SmolLM2: the layers of the pilot and "
        f"{', '.join(map(str, _BESIDES['smollm2']))}, chosen before the runs. Random weights: one "
        f"draw, first, middle and last layer, the first {_FEW} texts. Heads: MiniLM's, the first "
        "passage of every text, 16, 64 and 128 tokens.",
        f"Sigma to {_TOL:.0%}, in float32. Intervals: {records.CONFIDENCE:.0%} over texts.",
    ]
