"""Which token holds the most sensitive direction, and whether attention reads that one most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lipscope import Measurement, TokenShare
from lipscope.charts import Panel, Series, readable
from lipscope.control import attention_received
from lipscope.models import reinitialised, special_tokens_of
from lipscope.records import mean_interval, rank_correlation
from lipscope_experiments.experiment import Source, Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import (
    Claim,
    Findings,
    Record,
    Table,
    average,
    counted,
    middle,
    share,
)

_TOKENS = 64
_LAYERS = 6  # at most so many of a model, evenly
FIRST, SPECIAL, MARK, OTHER = "first token", "special, not first", "punctuation", "other"
_KINDS = (FIRST, SPECIAL, MARK, OTHER)
_AS_IS, _BARE, _RANDOM = "as it is", "no special tokens", "random weights"


@dataclass(frozen=True)
class Window:
    """One layer at one window.

    Attributes:
        row: Its measurement.
        kinds: Of every token.
        held: The share of every token in ``|v|²``, v the top right singular vector.
        received: The mean over heads and rows of the attention that every token gets.
    """

    row: Measurement
    kinds: tuple[str, ...]
    held: tuple[float, ...]
    received: tuple[float, ...]

    def on(self, kind: str, values: Sequence[float]) -> float:
        """The sum of some values over the tokens of one kind."""
        return math.fsum(v for v, one in zip(values, self.kinds, strict=True) if one == kind)

    @property
    def top(self) -> str:
        """The kind of the token that holds most."""
        return self.kinds[max(range(len(self.held)), key=self.held.__getitem__)]

    @property
    def kept(self) -> float:
        """Sigma with the top token held fixed, as a part of sigma."""
        return (self.row.sigma_rest or 0.0) / (self.row.sigma or math.inf)


@dataclass(frozen=True)
class Case:
    """A model on a text, changed or not; by layer, its windows."""

    where: str
    control: str
    layers: dict[int, list[Window]]


@experiment(
    "questions/sink",
    title="Where is the sink? Which token holds the most sensitive direction",
    cite="derived here",
    models=("minilm", "smollm2", "dinov2"),
    quick_models=("minilm",),
    reads_images=True,
)
def sink(study: Study) -> Findings:
    """The top direction and the attention received, token by token, in layers of models."""
    missing: list[str] = []
    cases = [case for source in study.sources(missing) for case in _cases(study, source)]
    _draw(study, cases)
    places = dict.fromkeys(case.where for case in cases)
    return Findings(
        tuple(
            claim for where in places for claim in _claims([c for c in cases if c.where == where])
        ),
        tuple(_table(case) for case in cases),
        (
            f"The map `attention` at windows of {_TOKENS} tokens (pictures: at the model's own "
            f"side), at most {_LAYERS} layers of a model, evenly spread over its depth. v is the "
            "top right singular vector, the direction of the input in which the output moves most; "
            "the share of a token is its part of |v|².",
            "Without special tokens: for models that put some around a text. "
            "A token is of the first kind that fits: the first one of the window (the class token "
            "of MiniLM and DINOv2), another special token, one without a letter or a digit, any "
            "other.",
            "Attention received: the mean over heads and rows of what a token gets; 1 over all "
            "tokens. Under a causal mask early tokens are read by more rows; the control with "
            "random weights shows what that does by itself.",
            "Of several layers: the middle one of their means over windows (smallest to largest).",
            "Held fixed: sigma over moves that leave the top token where it is, as a part of "
            "sigma. It speaks of first order, and of that layer alone.",
            "Intervals: 95 %, Student's over windows (Clopper–Pearson of counts), for independent "
            "windows of this text. Layers of one model are not independent of each other.",
            *missing,
        ),
    )


# --- what is computed ------------------------------------------------------------------------


def _cases(study: Study, source: Source) -> Iterator[Case]:
    """The model as it is, without special tokens, and with random weights."""
    where = source.where
    yield _case(study, where, source, _AS_IS)
    asked = source.asked
    tokenizer = source.model.tokenizer
    if tokenizer is not None and any(special_tokens_of(tokenizer)):
        bare = Source(source.model, source.name, {**asked, "special_tokens": False})
        yield _case(study, where, bare, _BARE)
    if not source.model.weights.startswith("random"):
        drawn = Source(reinitialised(source.model), source.name, asked)
        yield _case(study, where, drawn, _RANDOM)


def _case(study: Study, where: str, source: Source, control: str) -> Case:
    loaded = source.model
    count = int(loaded.config.num_hidden_layers)
    layers = [*range(0, count, math.ceil(count / study.pick(4, _LAYERS)))]
    asked: dict[str, Any] = {"layers": layers, **source.asked}
    if not source.sees:
        asked["lengths"] = [_TOKENS]
    if source.asked.get("images", "random") == "random":
        asked["samples"] = study.pick(4, 10)
    part = f"{where}, {control}"
    rows = study.measure(f"sigma, {part}", loaded, rest=True, **asked)
    (found,) = study.values(f"received, {part}", [_received(source, asked)])
    tokens: dict[str, list[TokenShare]] = {}
    for token in rows.tokens:
        tokens.setdefault(token.id, []).append(token)
    held: dict[int, list[Window]] = {layer: [] for layer in layers}
    for row in rows:
        if row.sigma is None or row.layer is None:
            continue
        mine = sorted(tokens[row.id], key=lambda one: one.index)
        held[row.layer].append(
            Window(
                row,
                tuple(kind_of(one.index, one.text, _specials(source)) for one in mine),
                tuple(one.share_in or 0.0 for one in mine),
                tuple(found["received"][f"{row.layer}, {row.sample}"]),
            )
        )
    return Case(where, control, {layer: windows for layer, windows in held.items() if windows})


def _received(source: Source, asked: dict[str, Any]) -> ValueJob:
    def compute() -> Record:
        found = layers_of(source.model, dtype="float32", **asked)
        return {
            "received": {
                f"{one.layer}, {one.sample}": attention_received(one.attention, one.x)
                .mean(0)
                .tolist()
                for one in found
            }
        }

    return {name: value for name, value in asked.items() if name != "data"}, compute


def _specials(source: Source) -> frozenset[str]:
    tokenizer = source.model.tokenizer
    return frozenset(getattr(tokenizer, "all_special_tokens", ()))


def kind_of(index: int, text: str, specials: frozenset[str]) -> str:
    """The first kind that fits a token.

    Args:
        index: Its place in the window.
        text: The token as its tokenizer writes it.
        specials: The special tokens.

    >>> [kind_of(i, t, frozenset({"[SEP]"})) for i, t in enumerate(("the", "Ġ,", "[SEP]", "ing"))]
    ['first token', 'punctuation', 'special, not first', 'other']
    """
    if index == 0:
        return FIRST
    if text in specials:
        return SPECIAL
    return OTHER if any(letter.isalnum() for letter in readable(text)) else MARK


# --- what is said ----------------------------------------------------------------------------


def _agreement(window: Window) -> float:
    return rank_correlation(window.held, window.received)[0]


def _mean(windows: Sequence[Window], of: Callable[[Window], float], least: float = 0.0) -> str:
    values = [value for value in map(of, windows) if math.isfinite(value)]
    return average(values, (least, 1.0)) if values else "–"


def _claims(cases: Sequence[Case]) -> Iterator[Claim]:
    """What is said of one model on one text, as it is and changed."""
    where, tokens = cases[0].where, len(next(iter(cases[0].layers.values()))[0].kinds)
    questions: tuple[tuple[str, str, Callable[[Case], str]], ...] = (
        (
            "kind of token that holds most of |v|², by layer",
            "the first token, if the direction sits where attention does",
            lambda case: counted(map(_largest, case.layers.values())),
        ),
        (
            "|v|² on the first token",
            f"{1 / tokens:.3f} if all tokens were alike",
            lambda case: _over(case, lambda w: w.on(FIRST, w.held)),
        ),
        (
            "attention that the first token receives",
            f"{1 / tokens:.3f} if all tokens were alike",
            lambda case: _over(case, lambda w: w.on(FIRST, w.received)),
        ),
        (
            "rank correlation over tokens of |v|² with the attention received",
            "positive, if attention says where the direction is",
            _agreements,
        ),
        (
            "sigma with the top token held fixed / sigma",
            "small, if one token carries sigma",
            lambda case: _over(case, lambda w: w.kept),
        ),
    )
    for about, said, of in questions:
        found = "; ".join(f"{case.control}: {of(case)}" for case in cases)
        yield Claim(f"{where}: {about}", said, found)


def _largest(windows: Sequence[Window]) -> str:
    return max(_KINDS, key=lambda kind: fmean(w.on(kind, w.held) for w in windows))


def _over(case: Case, of: Callable[[Window], float]) -> str:
    """The middle layer's mean, with the smallest and the largest."""
    return middle(fmean(map(of, windows)) for windows in case.layers.values())


def _agreements(case: Case) -> str:
    found = [_interval([_agreement(w) for w in windows]) for windows in case.layers.values()]
    known = [one for one in found if one is not None]
    sure = sum(low > 0 for _, low, _ in known)
    return (
        f"{middle(mean for mean, _, _ in known)}, above 0 beyond the interval in {sure} of "
        f"{len(known)} layers"
    )


def _interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    known = [value for value in values if math.isfinite(value)]
    return mean_interval(known) if known else None


def _table(case: Case) -> Table:
    shown = [k for k in _KINDS if any(k in w.kinds for ws in case.layers.values() for w in ws)]
    lines = []
    for layer, windows in case.layers.items():
        shares = [_mean(windows, lambda w, kind=kind: w.on(kind, w.held)) for kind in shown]
        top = max(_KINDS, key=lambda kind: sum(w.top == kind for w in windows))
        lines.append(
            (
                str(layer),
                *shares,
                f"{top}: {share(sum(w.top == top for w in windows), len(windows))}",
                _mean(windows, lambda w: w.on(FIRST, w.received)),
                _mean(windows, _agreement, -1.0),
                _mean(windows, lambda w: w.kept),
            )
        )
    columns = (
        "layer",
        *(f"|v|² on: {kind}" for kind in shown),
        "top token",
        "attention that the first token receives",
        "rank correlation",
        "held fixed / sigma",
    )
    return Table(f"{case.where}, {case.control}", columns, tuple(lines))


# --- what is drawn ---------------------------------------------------------------------------


def _draw(study: Study, cases: Sequence[Case]) -> None:
    panels = []
    for where in dict.fromkeys(case.where for case in cases):
        mine = [case for case in cases if case.where == where]
        series = []
        for case in mine:
            held = _curve(case, lambda w: w.on(FIRST, w.held))
            series.append(Series(f"most sensitive direction, {case.control}", held))
            if case.control != _BARE:
                got = _curve(case, lambda w: w.on(FIRST, w.received))
                series.append(Series(f"attention received, {case.control}", got))
        panels.append(
            Panel(
                where, tuple(series), "layer", "share of the first token", log_x=False, log_y=False
            )
        )
    study.draw("sink", "What the first token holds, and what it receives", panels, columns=3)


def _curve(case: Case, of: Callable[[Window], float]) -> tuple[tuple[int, float], ...]:
    return tuple((layer, fmean(map(of, windows))) for layer, windows in case.layers.items())
