"""The sink's column against sigma: does the attention that one token receives set the exponent?"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lipscope import LayerAtInput, TopSingular, records
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel, reinitialised
from lipscope_experiments.experiment import Source, Study, experiment, layers_of
from lipscope_experiments.findings import Record, Value, average, grouped, line, middle, ratios
from lipscope_experiments.frozen import (
    MEASURED,
    PREDICTED,
    SLOPES,
    Curve,
    column_norm,
    column_share,
    frozen_column,
    frozen_norm,
)
from lipscope_experiments.simple_layers import top

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


def error(curve: Curve) -> float:
    """Predicted less measured exponent."""
    return SLOPES[PREDICTED](curve) - SLOPES[MEASURED](curve)


@dataclass(frozen=True)
class LayerLaw:
    """One layer, or one head of it, on all passages: for each of them a record at every length."""

    model: str
    layer: int
    head: int | None
    points: Sequence[Record]

    def over_texts(self, of: Callable[[Curve], float]) -> list[float]:
        """The mean over its passages, of every text."""
        return [
            fmean(of(curve) for _, curve in grouped(mine, "passage"))
            for _, mine in grouped(self.points, "text")
        ]

    @functools.cached_property
    def means(self) -> dict[str, float]:
        """Measured and predicted exponents, means over texts."""
        return {name: fmean(self.over_texts(of)) for name, of in SLOPES.items()}

    @property
    def stated(self) -> bool:
        """Whether the law was stated on it."""
        return self.layer in _STATED.get(self.model, ())

    @property
    def is_sink(self) -> bool:
        """Whether it meets the hypothesis of the law."""
        return fmean(self.over_texts(column_share)) >= _SHARE

    @property
    def is_random(self) -> bool:
        """Whether its weights are those of a new model."""
        return self.model.endswith(_RANDOM)

    @property
    def ends(self) -> list[Record]:
        """The longest length of every passage, with what carries sigma there."""
        return [one for one in self.points if one["rest"]]


@experiment("castin2024/sink-law", models=("minilm", "smollm2", "dinov2"))
def sink_law(study: Study) -> None:
    """The sink's column and the exponent of sigma."""
    found = grouped(_points_of_models(study), "model", "layer", "head")
    every = [LayerLaw(*where, points=points) for where, points in found]
    laws = sorted((one for one in every if one.head is None), key=lambda law: law.is_random)
    heads = [one for one in every if one.head is not None]
    _draw_law(study, laws)
    _of_law(study, laws, heads)
    _law_tables(study, laws)
    study.remark(
        *PLAN,
        f"Texts: {', '.join(text.name for text in study.texts)}. Passages of MiniLM with its "
        "special tokens from a third and from two thirds of every text, 16, 32, 64 and 128 tokens; "
        f"of SmolLM2 from a third, 16, 64 and 256. Pictures of {', '.join(map(str, _SIDES))} "
        "patches a side and a class token; positions interpolated.",
        "MiniLM and DINOv2: all layers. SmolLM2: the layers of the pilot and "
        f"{', '.join(map(str, _BESIDES['smollm2']))}, chosen before the runs. Random weights: one "
        f"draw, first, middle and last layer, the first {_FEW} texts. Heads: MiniLM's, the first "
        "passage of every text, 16, 64 and 128 tokens.",
        f"Sigma to {_TOL:.0%}, in float32. Intervals: {records.CONFIDENCE:.0%} over texts.",
        "What it does not show: what makes a token a sink, that its column is the cause of the "
        "exponent, longer inputs, or other families.",
    )


def _points_of_models(study: Study) -> Iterator[Record]:
    """What is measured of every model: its layers, those of random weights, its heads."""
    for name, some in itertools.groupby(study.sources(), lambda one: one.model.name):
        sources = [*some]
        fresh = replace(reinitialised(sources[0].model), name=f"{name}{_RANDOM}")
        drawn = [replace(source, model=fresh) for source in sources[:_FEW]]
        for source in [*sources, *drawn]:
            yield from _points(study, source, heads=False)
        for source in sources:
            yield from _points(study, source, heads=True)


def _layers(study: Study, source: Source) -> list[int]:
    """All layers of models of twelve or fewer, the named ones of deeper ones, three random ones."""
    name = source.model.name
    if name.endswith(_RANDOM) or study.quick:
        return source.first_middle_last
    named = sorted({*_STATED.get(name, ()), *_BESIDES.get(name, ())})
    return named or source.even_layers(12)


def _passages(study: Study, source: Source, heads: bool) -> Iterator[tuple[str, dict[int, Record]]]:
    """The passages of a text, or the pictures, and a verb's options by length, or side."""
    loaded, deep = source.model, source.is_deep
    if heads and (source.sees or deep):
        return
    if source.sees:
        sides = [int(loaded.config.patch_size) * side for side in _SIDES]
        asked = source.asked | {"samples": study.pick(3, 10) if study.images == "random" else None}
        yield source.name, {side: {**asked, "resolutions": [side]} for side in sides}
        return
    lengths = (16, 64, 256) if deep else (16, 64, 128) if heads else (16, 32, 64, 128)
    content, room = source.asked["data"], _LETTERS * lengths[-1]
    several = not (deep or heads or study.quick or loaded.name.endswith(_RANDOM))
    for place in _PLACES if several else _PLACES[:1]:
        start = int(place * max(len(content) - room, 0))
        asked = {"data": content[start : start + room], "samples": 1}
        some = [n for n in lengths if n <= 64 or not study.quick]
        yield f"{source.name}, from {place:.0%}", {n: {**asked, "lengths": [n]} for n in some}


def _points(study: Study, source: Source, *, heads: bool) -> Iterator[Record]:
    """Every layer, or head, at every length of a text's passages, or of pictures."""
    model, layers = source.model, _layers(study, source)
    for passage, asked in _passages(study, source, heads):
        key = {"text": passage, "layers": layers, "heads": heads}
        keys = [key | {"length": n, "rest": n == max(asked) and not heads} for n in asked]
        measured = functools.partial(_measured, model, asked)
        for found in study.values(f"columns, {model.name}", keys, measured):
            for one in found["points"]:
                text = f"picture {one['sample']}" if source.sees else source.name
                where = {"model": model.name, "text": text, "passage": passage, **one}
                yield where | one["point"] | (one["point"]["rest"] or {})


def _measured(
    loaded: LoadedModel,
    asked: Mapping[int, Record],
    length: int,
    heads: bool,
    rest: bool,
    **key: Any,
) -> Record:
    """Sigma and the frozen column, of every layer or head at one length."""
    points = []
    for one in layers_of(loaded, layers=key["layers"], dtype="float32", **asked[length]):
        column = frozen_column(one.attention, one.x)
        parts = [(None, one.linearise(), column.norm, column.mass, column.received)]
        if heads:
            parts = [
                (head, one.attention.head(head).linearise(one.x), norm, mass, mass)
                for head, (_, mass, norm) in enumerate(column.heads)
            ]
        for head, op, norm, mass, received in parts:
            found = top(op, tol=_TOL)
            point = {"n": len(one.x), "sigma": found.sigma, "norm": norm, "mass": mass}
            carried = _carried(one, column.token, found) if rest else None
            point |= {"received": received, "rest": carried}
            where = {"sample": one.sample, "layer": one.layer, "head": head}
            points.append({**where, "point": point})
    return {"points": points}


def _carried(one: LayerAtInput, token: int, found: TopSingular) -> Record:
    """What carries sigma: the top token, over how many the direction spreads, norms of parts."""
    shares = found.v.double().square().sum(-1)
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


def _errors(laws: Sequence[LayerLaw], constant: float) -> dict[str, float]:
    """Mean absolute errors of the law, of its other forms, and of both constants."""

    def off(guess: Callable[[LayerLaw], float]) -> float:
        return fmean(abs(guess(law) - law.means[MEASURED]) for law in laws)

    forms = {name: off(lambda law, n=name: law.means[n]) for name in SLOPES if name != MEASURED}
    constants = {"1/4": 0.25, f"{constant:.2f}, the mean stated": constant}
    return forms | {name: off(lambda _, c=value: c) for name, value in constants.items()}


def _ranked(laws: Sequence[LayerLaw]) -> float:
    """The rank correlation of predicted and measured exponents."""
    predicted, measured = ([law.means[name] for law in laws] for name in (PREDICTED, MEASURED))
    return records.rank_correlation(predicted, measured)[0] if len(laws) > 2 else math.nan


def _of_group(laws: Sequence[LayerLaw], constant: float) -> str:
    """Errors of the law, of its other forms and of both constants, and the rank correlation."""
    if not laws:
        return "no layer"
    ranked = _ranked(laws)
    signed = fmean(law.means[PREDICTED] - law.means[MEASURED] for law in laws)
    said = ", ".join(f"{name} {value:.3f}" for name, value in _errors(laws, constant).items())
    return (
        f"{len(laws)} {'heads' if laws[0].head is not None else 'layers'}; mean absolute error: "
        f"{said}; mean error of the law {signed:+.3f}; rank correlation "
        + (f"{ranked:.2f}" if math.isfinite(ranked) else "–")
    )


def verdict(fresh: Sequence[LayerLaw], constant: float) -> str:
    """Whether what was written before the runs refutes the law."""
    if len(fresh) < 3:
        return "not decided: fewer than three such layers"
    mine, _, _, *constants = _errors(fresh, constant).values()
    ranked, least = _ranked(fresh), min(constants)
    held = {
        f"its error {mine:.3f} is above {_ERROR}": mine > _ERROR,
        f"its error {mine:.3f} is not below {least:.3f}, a constant's": mine >= least,
        f"the rank correlation {ranked:.2f} is not above {_RANKED}": not ranked > _RANKED,
    }
    against = "; ".join(one for one, holds in held.items() if holds)
    return f"refuted: {against}" if against else "not refuted"


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
    nothing, alike = "nothing, unless one is a sink", "as for layers"
    groups = {
        "sinks that it was stated on": ("small: it was stated on them", stated),
        "trained layers that are no sinks": (nothing, [law for law in trained if not law.is_sink]),
        "random weights, all layers": (nothing, [law for law in laws if law.is_random]),
        "heads by themselves, sinks": (alike, [head for head in heads if head.is_sink]),
        "heads by themselves, no sinks": (alike, [head for head in heads if not head.is_sink]),
    }
    for about, (said, mine) in groups.items():
        study.claim(about, said, _of_group(mine, constant))
    study.claim(
        "the frozen column over sigma, sinks, all passages at the longest length",
        f"at least {_SHARE} in the mean of a layer; above 1 is possible",
        middle(one["norm"] / one["sigma"] for law in sinks for one in law.ends),
    )


def _law_tables(study: Study, laws: Sequence[LayerLaw]) -> None:
    columns: dict[str, Value] = {
        "model": "model",
        "layer": lambda law: f"{law.layer}" + " (stated)" * law.stated,
        "column / sigma": lambda law: average(law.over_texts(column_share), (0.0, math.inf)),
        "sink": lambda law: "yes" if law.is_sink else "no",
    }
    for name, of in (*SLOPES.items(), ("predicted − measured", error)):
        columns[name] = lambda law, of=of: average(law.over_texts(of), digits=".2f")
    study.table("Exponents (mean over texts, 95 % interval over texts)", laws, columns)
    lines = []
    for law in laws:
        ends, words = law.ends, [one["words"] for one in law.ends if one["index"]]
        first = f"first {len(ends) - len(words)} of {len(ends)}"
        cells = (law.model, law.layer, first + f"; else {' '.join(words[:4])}" * bool(words))
        cells += (middle(p["held"] for p in ends), middle((p["tokens"] for p in ends), 1))
        lines.append((*cells, *(middle(ratios(ends, one, "sigma")) for one in ("frozen", "whole"))))
    title = "What carries sigma, at the longest length (medians over passages, ranges)"
    names = ("model", "layer", "top token", "its |v|²", "tokens in v")
    study.table(title, lines, (*names, "attention frozen / sigma", "whole column / sigma"))


def _draw_law(study: Study, laws: Sequence[LayerLaw]) -> None:
    if not laws:
        return
    kinds: dict[str, Callable[[LayerLaw], bool]] = {
        "sink, not used to state the law": lambda law: law.is_sink and not law.stated,
        "sink, used to state it": lambda law: law.is_sink and law.stated,
        "no sink": lambda law: not law.is_sink and not law.is_random,
        "random weights": lambda law: law.is_random,
    }
    series = []
    for name, of in kinds.items():
        if points := [(law.means[PREDICTED], law.means[MEASURED]) for law in laws if of(law)]:
            series.append(Series(name, points, "points"))
    every = [law.means[name] for law in laws for name in (PREDICTED, MEASURED)]
    ends = min(every), max(every)
    series.append(line("measured = predicted", ends, ends, "dashes"))
    axes = "½ + slope of the attention that the sink receives", "measured exponent of sigma"
    panel = Panel("Every dot a layer of a model", series, *axes, log_x=False, log_y=False)
    study.draw("sink-law", "Predicted and measured exponents", [panel], columns=1)
