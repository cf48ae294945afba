"""Which token holds the most sensitive direction, and whether attention reads that one most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from lipscope import Measurement
from lipscope.charts import Panel, Series, readable
from lipscope.control import attention_received
from lipscope.models import reinitialised, special_tokens_of
from lipscope.records import grouped, mean_interval, rank_correlation
from lipscope_experiments.experiment import Source, Study, experiment, layers_of
from lipscope_experiments.findings import Record, average, counted, middle, share

_TOKENS = 64
_LAYERS = 12  # at most so many of a model, evenly
_LATER = 32  # the position from which windows are read again
_WORDS = ("the", "dog", "seven", "green")  # that take one place of a window in turn
_PLACES = (0, 20)  # these places
FIRST, SPECIAL, MARK, OTHER = "first token", "special, not first", "punctuation", "other"
_KINDS = (FIRST, SPECIAL, MARK, OTHER)
_AS_IS, _BARE, _RANDOM = "as it is", "no special tokens", "random weights"
_MOVED, _BARE_MOVED = f"from position {_LATER}", f"no special tokens, from position {_LATER}"


@dataclass(frozen=True)
class SinkWindow:
    """One layer at one window, and by token: its kind, its share ``held`` of the top direction.

    ``received`` is the mean over heads and rows of the attention that it gets.
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
class SinkCase:
    """A model on a text, changed or not; by layer, its windows."""

    where: str
    control: str
    layers: dict[int, list[SinkWindow]]


@experiment(
    "questions/sink",
    title="Where is the sink? Which token holds the most sensitive direction",
    cite="derived here",
    models=("minilm", "smollm2", "dinov2"),
    reads_images=True,
)
def sink(study: Study) -> None:
    """The top direction and the attention received, token by token, in layers of models."""
    missing: list[str] = []
    sources = [*study.sources(missing)]
    cases = [case for source in sources for case in _controls(study, source)]
    _draw_shares(study, cases)
    places = dict.fromkeys(case.where for case in cases)
    for where in places:
        _of_the_sink(study, [c for c in cases if c.where == where])
    for source in sources:
        if not source.sees:
            _erased_table(study, source)
    for case in cases:
        _shares_table(study, case)
    study.remark(
        f"The map `attention` at windows of {_TOKENS} tokens (pictures: at the model's own "
        f"side), at most {_LAYERS} layers of a model, evenly spread over its depth. v is the "
        "top right singular vector, the direction of the input in which the output moves most; "
        "the share of a token is its part of |v|².",
        f"From position {_LATER}: the same windows, the first token at that position; where "
        "positions enter by rotation, nothing but rounding should change.",
        f"Does the word matter: one window without special tokens, {', '.join(_WORDS)} in turn at "
        "one position; the difference of the layer's inputs there over their norm, mean of all "
        "pairs. A sink whose input no longer says the word is there for its position.",
        "Without special tokens: for models that put some around a text. A token is of the first "
        "kind that fits: the first one of the window (the class token of MiniLM and DINOv2), "
        "another special token, one without a letter or a digit, any other.",
        "Attention received: the mean over heads and rows of what a token gets; 1 over all "
        "tokens. Under a causal mask early tokens are read by more rows; the control with "
        "random weights shows what that does by itself.",
        "Of several layers: the middle one of their means over windows (smallest to largest).",
        "Held fixed: sigma over moves that leave the top token where it is, as a part of "
        "sigma. It speaks of first order, and of that layer alone.",
        "Intervals: 95 %, Student's over windows (Clopper–Pearson of counts), for independent "
        "windows of this text. Layers of one model are not independent of each other.",
        *missing,
    )


def _controls(study: Study, source: Source) -> Iterator[SinkCase]:
    """The model as it is, without special tokens, at later positions, and with random weights."""
    model, where, asked = source.model, source.where, source.asked
    yield _sink_case(study, where, source, _AS_IS)
    changes: dict[str, dict[str, Any]] = {}
    if not source.sees:
        bare = model.tokenizer is not None and any(special_tokens_of(model.tokenizer))
        changes = {_MOVED: {"position_offset": _LATER}}
        if bare:
            changes[_BARE] = {"special_tokens": False}
            changes[_BARE_MOVED] = changes[_BARE] | changes[_MOVED]
    for control, change in changes.items():
        yield _sink_case(study, where, Source(model, source.name, asked | change), control)
    if not model.weights.startswith("random"):
        drawn = Source(reinitialised(model), source.name, asked)
        yield _sink_case(study, where, drawn, _RANDOM)


def _layers_asked(study: Study, source: Source) -> list[int]:
    count = int(source.model.config.num_hidden_layers)
    return [*range(0, count, math.ceil(count / study.pick(4, _LAYERS)))]


def _sink_case(study: Study, where: str, source: Source, control: str) -> SinkCase:
    loaded = source.model
    layers = _layers_asked(study, source)
    asked: dict[str, Any] = {"layers": layers, **source.asked}
    if not source.sees:
        asked["lengths"] = [_TOKENS]
    if source.asked.get("images", "random") == "random":
        asked["samples"] = study.pick(4, 10)
    part = f"{where}, {control}"
    rows = study.measure(f"sigma, {part}", loaded, rest=True, **asked)
    key = {name: value for name, value in asked.items() if name != "data"}
    (found,) = study.values(f"received, {part}", [key], lambda **_: _received(source, asked))
    tokens = grouped(sorted(rows.tokens, key=lambda one: one.index), lambda one: one.id)
    specials = frozenset(getattr(loaded.tokenizer, "all_special_tokens", ()))
    held: dict[int, list[SinkWindow]] = {layer: [] for layer in layers}
    for row in rows:
        if row.sigma is None or row.layer is None:
            continue
        mine = tokens[row.id]
        held[row.layer].append(
            SinkWindow(
                row,
                tuple(token_kind(one.index, one.text, specials) for one in mine),
                tuple(one.share_in or 0.0 for one in mine),
                tuple(found["received"][f"{row.layer}, {row.sample}"]),
            )
        )
    return SinkCase(where, control, {layer: windows for layer, windows in held.items() if windows})


def _received(source: Source, asked: dict[str, Any]) -> Record:
    found = layers_of(source.model, dtype="float32", **asked)
    return {
        "received": {
            f"{one.layer}, {one.sample}": attention_received(one.attention, one.x).mean(0).tolist()
            for one in found
        }
    }


def _erased_table(study: Study, source: Source) -> None:
    """Whether a layer's input at one place of a window still says which word stands there."""
    layers = _layers_asked(study, source)
    key = {"layers": layers, "words": list(_WORDS), "places": list(_PLACES)}
    part = f"erased, {source.where}"
    (found,) = study.values(part, [key], lambda **_: _erased(source, layers))
    columns: dict[str, Callable[..., Any]] = {"layer": lambda layer: layer}
    for place in _PLACES:
        at = found["places"][str(place)]
        columns[f"position {place}: difference of two words"] = lambda layer, at=at: (
            f"{at[str(layer)][0]:.2%}"
        )
        columns[f"position {place}: attention received"] = lambda layer, at=at: (
            f"{at[str(layer)][1]:.1%}"
        )
    study.table(f"{source.where}: does the word at a position matter?", layers, columns)


def _erased(source: Source, layers: Sequence[int]) -> Record:
    """By place and layer: the distance of two words' inputs over their norm, attention received.

    Means over pairs of words, over words, heads and rows.
    """
    tokenizer = source.model.tokenizer
    ids = torch.tensor(
        tokenizer(source.asked["data"][:4000], add_special_tokens=False)["input_ids"]
    )
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"][-1] for word in _WORDS]
    places: dict[str, dict[str, tuple[float, float]]] = {}
    for place in _PLACES:
        batch = ids[:_TOKENS].repeat(len(words), 1)
        batch[:, place] = torch.tensor(words)
        inputs: dict[int, list[torch.Tensor]] = {}
        received: dict[int, list[float]] = {}
        for one in layers_of(source.model, batch, layers=layers, dtype="float32"):
            layer = one.layer or 0
            inputs.setdefault(layer, []).append(one.x[place])
            got = attention_received(one.attention, one.x)[:, place].mean()
            received.setdefault(layer, []).append(float(got))
        places[str(place)] = {
            str(layer): (
                fmean(float((a - b).norm()) for a, b in itertools.combinations(some, 2))
                / fmean(float(a.norm()) for a in some),
                fmean(received[layer]),
            )
            for layer, some in inputs.items()
        }
    return {"places": places}


def token_kind(index: int, text: str, specials: frozenset[str]) -> str:
    """The first kind that fits a token, given its place in the window and the special tokens.

    >>> [token_kind(i, t, frozenset({"[SEP]"})) for i, t in enumerate(("the", "Ġ,", "[SEP]"))]
    ['first token', 'punctuation', 'special, not first']
    """
    if index == 0:
        return FIRST
    if text in specials:
        return SPECIAL
    return OTHER if any(letter.isalnum() for letter in readable(text)) else MARK


def _rank_agreement(window: SinkWindow) -> float:
    return rank_correlation(window.held, window.received)[0]


def _mean_share(
    windows: Sequence[SinkWindow], of: Callable[[SinkWindow], float], least: float = 0.0
) -> str:
    return average([value for value in map(of, windows) if math.isfinite(value)], (least, 1.0))


def _of_the_sink(study: Study, cases: Sequence[SinkCase]) -> None:
    """What is said of one model on one text, as it is and changed."""
    where, tokens = cases[0].where, len(next(iter(cases[0].layers.values()))[0].kinds)
    questions: tuple[tuple[str, str, Callable[[SinkCase], str]], ...] = (
        (
            "kind of token that holds most of |v|², by layer",
            "the first token, if the direction sits where attention does",
            lambda case: counted(map(_largest_kind, case.layers.values())),
        ),
        (
            "|v|² on the first token",
            f"{1 / tokens:.3f} if all tokens were alike",
            lambda case: _range_over_layers(case, lambda w: w.on(FIRST, w.held)),
        ),
        (
            "attention that the first token receives",
            f"{1 / tokens:.3f} if all tokens were alike",
            lambda case: _range_over_layers(case, lambda w: w.on(FIRST, w.received)),
        ),
        (
            "rank correlation over tokens of |v|² with the attention received",
            "positive, if attention says where the direction is",
            _agreements,
        ),
        (
            "sigma with the top token held fixed / sigma",
            "small, if one token carries sigma",
            lambda case: _range_over_layers(case, lambda w: w.kept),
        ),
    )
    for about, said, of in questions:
        found = "; ".join(f"{case.control}: {of(case)}" for case in cases)
        study.claim(f"{where}: {about}", said, found)


def _largest_kind(windows: Sequence[SinkWindow]) -> str:
    return max(_KINDS, key=lambda kind: fmean(w.on(kind, w.held) for w in windows))


def _range_over_layers(case: SinkCase, of: Callable[[SinkWindow], float]) -> str:
    """The middle layer's mean, with the smallest and the largest."""
    return middle(fmean(map(of, windows)) for windows in case.layers.values())


def _agreements(case: SinkCase) -> str:
    every = ([_rank_agreement(w) for w in windows] for windows in case.layers.values())
    finite = ([value for value in values if math.isfinite(value)] for values in every)
    known = [mean_interval(values) for values in finite if values]
    sure = sum(low > 0 for _, low, _ in known)
    return (
        f"{middle(mean for mean, _, _ in known)}, above 0 beyond the interval in {sure} of "
        f"{len(known)} layers"
    )


def _shares_table(study: Study, case: SinkCase) -> None:
    def top(windows: Sequence[SinkWindow]) -> str:
        kind = max(_KINDS, key=lambda kind: sum(w.top == kind for w in windows))
        return f"{kind}: {share(sum(w.top == kind for w in windows), len(windows))}"

    shown = [k for k in _KINDS if any(k in w.kinds for ws in case.layers.values() for w in ws)]
    study.table(
        f"{case.where}, {case.control}",
        case.layers.items(),
        {
            "layer": lambda layer, _: layer,
            **{
                f"|v|² on: {kind}": lambda _, windows, kind=kind: _mean_share(
                    windows, lambda w: w.on(kind, w.held)
                )
                for kind in shown
            },
            "top token": lambda _, windows: top(windows),
            "attention that the first token receives": lambda _, windows: _mean_share(
                windows, lambda w: w.on(FIRST, w.received)
            ),
            "rank correlation": lambda _, windows: _mean_share(windows, _rank_agreement, -1.0),
            "held fixed / sigma": lambda _, windows: _mean_share(windows, lambda w: w.kept),
        },
    )


def _draw_shares(study: Study, cases: Sequence[SinkCase]) -> None:
    panels = []
    for where in dict.fromkeys(case.where for case in cases):
        mine = [case for case in cases if case.where == where]
        series = []
        for case in mine:
            held = _mean_by_layer(case, lambda w: w.on(FIRST, w.held))
            series.append(Series(f"held, {case.control}", held))
            if case.control == _AS_IS:
                got = _mean_by_layer(case, lambda w: w.on(FIRST, w.received))
                series.append(Series("attention received", got))
        panels.append(
            Panel(where, tuple(series), "layer", "share of the first token", False, False)
        )
    study.draw("sink", "What the first token holds, and what it receives", panels, columns=3)


def _mean_by_layer(
    case: SinkCase, of: Callable[[SinkWindow], float]
) -> tuple[tuple[int, float], ...]:
    return tuple((layer, fmean(map(of, windows))) for layer, windows in case.layers.items())
