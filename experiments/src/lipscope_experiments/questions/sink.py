"""Which token holds the most sensitive direction, and whether attention reads that one most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from lipscope import Measurement
from lipscope.charts import Panel, Series, visible
from lipscope.control import attention_received
from lipscope.models import reinitialised, special_tokens_of
from lipscope.records import mean_interval, rank_correlation
from lipscope_experiments.experiment import Source, Study, experiment, layers_of
from lipscope_experiments.findings import Record, Value, average, counted, grouped, middle, share

_TOKENS = 64
_LAYERS = 12  # at most so many of a model, evenly
_LATER = 32  # the position from which windows are read again
_WORDS = ("the", "dog", "seven", "green")  # that take one place of a window in turn
_PLACES = (0, 20)  # these places
FIRST, SPECIAL, MARK, OTHER = "first token", "special, not first", "punctuation", "other"
_KINDS = (FIRST, SPECIAL, MARK, OTHER)
_AS_IS, _BARE, _RANDOM = "as it is", "no special tokens", "random weights"
_MOVED, _BARE_MOVED = f"from position {_LATER}", f"no special tokens, from position {_LATER}"


@experiment("questions/sink", models=("minilm", "smollm2", "dinov2"))
def sink(study: Study) -> None:
    """Where is the sink? Which token holds the most sensitive direction."""
    sources = [*study.sources()]
    windows = [one for source in sources for one in _of_source(study, source)]
    _draw_shares(study, windows)
    for where, mine in grouped(windows, "where"):
        _of_the_sink(study, where, mine)
    for source in sources:
        if not source.sees:
            _erased_table(study, source)
    for (where, control), mine in grouped(windows, "where", "control"):
        _shares_table(study, f"{where}, {control}", mine)
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
        "What it does not show: why a token becomes a sink, and larger models.",
    )


def _of_source(study: Study, source: Source) -> Iterator[Record]:
    """The model as it is, without special tokens, at later positions, and with random weights."""
    model, cases = source.model, {_AS_IS: source}
    if not source.sees:
        moved, bare = {"position_offset": _LATER}, {"special_tokens": False}
        changes: dict[str, Record] = {_MOVED: moved}
        if model.tokenizer is not None and any(special_tokens_of(model.tokenizer)):
            changes |= {_BARE: bare, _BARE_MOVED: bare | moved}
        cases |= {name: replace(source, asked=source.asked | to) for name, to in changes.items()}
    if not model.weights.startswith("random"):
        cases[_RANDOM] = replace(source, model=reinitialised(model))
    for control, case in cases.items():
        yield from _windows(study, case, source.where, control)


def _windows(study: Study, source: Source, where: str, control: str) -> Iterator[Record]:
    """Every layer of a model at every window."""
    part, asked = f"{where}, {control}", source.asking(_TOKENS, study.pick(4, 10))
    asked["layers"] = source.even_layers(study.pick(4, _LAYERS))
    rows = study.measure(f"sigma, {part}", source.model, rest=True, **asked)
    key = {name: value for name, value in asked.items() if name != "data"}
    (found,) = study.values(f"received, {part}", [key], lambda **_: _received(source, asked))
    tokens = dict(grouped(sorted(rows.tokens, key=lambda one: one.index), "id"))
    specials = frozenset(getattr(source.model.tokenizer, "all_special_tokens", ()))
    for row in rows:
        if row.sigma is not None:
            mine = [
                (token_kind(t.index, t.text, specials), t.share_in or 0.0) for t in tokens[row.id]
            ]
            received = found["received"][f"{row.layer}, {row.sample}"]
            yield {"where": where, "control": control} | _window(row, mine, received)


def _window(row: Measurement, shares: list[tuple[str, float]], received: list[float]) -> Record:
    """One layer at one window, of the kind and share of every token and what each receives."""
    return {
        "layer": row.layer,
        "tokens": len(shares),
        **{kind: math.fsum(v for _, v in some) for kind, some in grouped(shares, lambda k, _: k)},
        "top": max(shares, key=lambda one: one[1])[0],
        "received": received[0],
        "agreement": rank_correlation([value for _, value in shares], received)[0],
        "kept": (row.sigma_rest or 0.0) / (row.sigma or math.inf),
    }


def _received(source: Source, asked: Record) -> Record:
    found = layers_of(source.model, dtype="float32", **asked)
    means = ((one, attention_received(one.attention, one.x).mean(0)) for one in found)
    return {"received": {f"{one.layer}, {one.sample}": mean.tolist() for one, mean in means}}


def _erased_table(study: Study, source: Source) -> None:
    """Whether a layer's input at one place of a window still says which word stands there."""
    layers = source.even_layers(study.pick(4, _LAYERS))
    key = {"layers": layers, "words": list(_WORDS), "places": list(_PLACES)}
    part = f"erased, {source.where}"
    (found,) = study.values(part, [key], lambda **_: _erased(source, layers))
    columns: dict[str, Value] = {"layer": lambda layer: layer}
    for place, at in found["places"].items():
        columns |= {
            f"position {place}: difference of two words": lambda i, at=at: f"{at[str(i)][0]:.2%}",
            f"position {place}: attention received": lambda i, at=at: f"{at[str(i)][1]:.1%}",
        }
    study.table(f"{source.where}: does the word at a position matter?", layers, columns)


def _erased(source: Source, layers: Sequence[int]) -> Record:
    """By place and layer: the distance of two words' inputs over their norm, attention received."""

    def ids(text: str) -> list[int]:
        return source.model.tokenizer(text, add_special_tokens=False)["input_ids"]

    window = torch.tensor(ids(source.asked["data"][:4000])[:_TOKENS])
    words = [ids(f" {word}")[-1] for word in _WORDS]
    places: dict[str, dict[str, tuple[float, float]]] = {}
    for place in _PLACES:
        batch = window.repeat(len(words), 1)
        batch[:, place] = torch.tensor(words)
        found = layers_of(source.model, batch, layers=layers, dtype="float32")
        for layer, some in grouped(found, "layer"):
            inputs = torch.stack([one.x[place] for one in some])
            apart = torch.pdist(inputs).mean() / inputs.norm(dim=1).mean()
            got = [attention_received(one.attention, one.x)[:, place].mean() for one in some]
            places.setdefault(str(place), {})[str(layer)] = float(apart), fmean(map(float, got))
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
    return OTHER if any(letter.isalnum() for letter in visible(text)) else MARK


def _by_layer(windows: Sequence[Record], name: str) -> dict[int, float]:
    """The mean over windows, of every layer."""
    by = grouped(windows, "layer")
    return {layer: fmean(one.get(name, 0.0) for one in some) for layer, some in by}


def _of_the_sink(study: Study, where: str, windows: Sequence[Record]) -> None:
    """What is said of one model on one text, as it is and changed."""
    alike = f"{1 / windows[0]['tokens']:.3f} if all tokens were alike"

    def middle_layer(name: str) -> Callable[[Sequence[Record]], str]:
        return lambda some: middle(_by_layer(some, name).values())

    questions = {
        "kind of token that holds most of |v|², by layer": (
            "the first token, if the direction sits where attention does",
            _largest_kinds,
        ),
        "|v|² on the first token": (alike, middle_layer(FIRST)),
        "attention that the first token receives": (alike, middle_layer("received")),
        "rank correlation over tokens of |v|² with the attention received": (
            "positive, if attention says where the direction is",
            _agreements,
        ),
        "sigma with the top token held fixed / sigma": (
            "small, if one token carries sigma",
            middle_layer("kept"),
        ),
    }
    for about, (said, of) in questions.items():
        found = (f"{control}: {of(some)}" for control, some in grouped(windows, "control"))
        study.claim(f"{where}: {about}", said, "; ".join(found))


def _largest_kinds(windows: Sequence[Record]) -> str:
    means = {kind: _by_layer(windows, kind) for kind in _KINDS}
    return counted(max(_KINDS, key=lambda kind: means[kind][layer]) for layer in means[FIRST])


def _agreements(windows: Sequence[Record]) -> str:
    every = (_finite(some, "agreement") for _, some in grouped(windows, "layer"))
    known = [mean_interval(values) for values in every if values]
    sure = sum(low > 0 for _, low, _ in known)
    means = middle(mean for mean, _, _ in known)
    return f"{means}, above 0 beyond the interval in {sure} of {len(known)} layers"


def _finite(windows: Sequence[Record], name: str) -> list[float]:
    return [value for one in windows if math.isfinite(value := one.get(name, 0.0))]


def _shares_table(study: Study, title: str, windows: Sequence[Record]) -> None:
    kinds = [kind for kind in _KINDS if any(kind in one for one in windows)]
    lines = []
    for layer, some in grouped(windows, "layer"):
        tops = [one["top"] for one in some]
        most = max(_KINDS, key=tops.count)
        names = (*kinds, "received", "kept")
        *shares, received, kept = (average(_finite(some, name), (0.0, 1.0)) for name in names)
        said = f"{most}: {share(tops.count(most), len(tops))}", received
        agreement = average(_finite(some, "agreement"), (-1.0, 1.0))
        lines.append((layer, *shares, *said, agreement, kept))
    columns = ("top token", "attention that the first token receives", "rank correlation")
    of_kinds = (f"|v|² on: {kind}" for kind in kinds)
    study.table(title, lines, ("layer", *of_kinds, *columns, "held fixed / sigma"))


def _draw_shares(study: Study, windows: Sequence[Record]) -> None:
    panels = []
    for where, mine in grouped(windows, "where"):
        series = []
        for control, some in grouped(mine, "control"):
            series.append(Series(f"held, {control}", [*_by_layer(some, FIRST).items()]))
            if control == _AS_IS:
                series.append(Series("attention received", [*_by_layer(some, "received").items()]))
        panels.append(Panel(where, series, "layer", "share of the first token", False, False))
    study.draw("sink", "What the first token holds, and what it receives", panels, columns=3)
