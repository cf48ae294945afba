"""What makes sigma grow in Figure 1: one thing taken away or changed at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope import Measurement
from lipscope.models import (
    Keeps,
    LoadedModel,
    Which,
    quantised,
    random_tokens,
    reinitialised,
    repeated_token,
    scrambled,
    shuffled_words,
    special_tokens_of,
    windows_of_text,
)
from lipscope.pages import number
from lipscope.records import Growth, groups, growth, top_held_fixed
from lipscope_experiments.experiment import Study
from lipscope_experiments.findings import Record, exponent
from lipscope_experiments.texts import Text


@dataclass(frozen=True)
class Control:
    """Rows of one control on a model and text; ``seed`` is None where nothing was drawn."""

    name: str
    model: str
    text: str
    rows: list[Measurement]
    seed: int | None = None

    @property
    def fits(self) -> dict[int, Growth | None]:
        """Growth by layer; samples are the same at every length, or prefixes of each other."""
        return {
            key.layer or 0: growth(part, paired=True) for key, part in groups(self.rows).items()
        }

    def median(self, layer: int) -> float:
        """Median sigma of a layer at the largest length."""
        longest = max(row.num_tokens for row in self.rows)
        return _median([row for row in self.rows if row.num_tokens == longest], layer)

    def spread(self) -> float:
        """Largest relative range of sigma over lengths, of one sample and layer."""
        curves: dict[Any, list[float]] = {}
        for row in self.rows:
            curves.setdefault((row.layer, row.sample), []).append(row.sigma or 0.0)
        return max(max(c) / min(c) - 1 for c in curves.values())


def controls(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Control]:
    """Every control on one model and text, at the same lengths and layers."""
    ask = _Ask(study, loaded, text)
    family, trained = loaded.config.model_type, not loaded.weights.startswith("random")
    base = ask.text("text", loaded, text.content, rest=True)
    yield base
    yield ask.named("top token fixed", top_held_fixed(base.rows))
    for name in study.pick(("normed",), ("normed", "residual", "block")):
        yield ask.text(name, loaded, text.content, map=name)
    yield ask.text("token-relative", loaded, text.content, metric="token-relative")
    if family == "bert":
        yield ask.repeated("one token, one position", same_place=True)
    if not trained:
        return  # the rest speaks of words and of trained weights
    if family == "bert":
        # In training position 0 was [CLS]'s alone; one in the middle was that of any token.
        for place in (0, (loaded.trained_length or loaded.max_tokens or 0) // 2):
            yield ask.in_place(
                f"text, all at position {place}", lambda n, at=place: torch.full((n,), at)
            )
    yield ask.repeated("one token", same_place=False)
    if loaded.tokenizer is not None and any(special_tokens_of(loaded.tokenizer)):
        yield ask.text("no special tokens", loaded, text.content, special_tokens=False)
    if loaded.weights == "float32":
        yield ask.text("Q4_1 weights", quantised(loaded), text.content)
    for seed in range(study.pick(1, 3)):
        yield from _random_controls(ask, loaded, seed)


def _random_controls(ask: _Ask, loaded: LoadedModel, seed: int) -> Iterator[Control]:
    """Controls with something random in them, for one seed."""
    drawn = [{"input_ids": random_tokens(loaded, n, ask.samples, seed)} for n in ask.lengths]
    yield ask.batches("random tokens", loaded, drawn, seed)
    words = shuffled_words(ask.content, seed)
    yield ask.text("shuffled words", loaded, words, seed=seed)
    yield ask.text("weights of a new model", reinitialised(loaded, seed), ask.content, seed=seed)
    lost: tuple[tuple[Keeps, str], ...] = (
        ("entries", "entries shuffled"),
        ("spectrum", "singular values only"),
    )
    for keeps, name in lost:
        other = scrambled(loaded, keeps, seed=seed)
        yield ask.text(f"{name}, whole model", other, ask.content, seed=seed)
    halves: tuple[Which, ...] = ("query and key", "value and output")
    for which in halves:
        # One layer at a time: what it reads stays what it was trained to read.
        name, rows = f"entries of {which} shuffled, this layer", list[Measurement]()
        for layer in ask.layers:
            other = scrambled(loaded, "entries", which, layer=layer, seed=seed)
            rows += ask.text(name, other, ask.content, layers=[layer], seed=seed).rows
        yield ask.named(name, rows, seed)


def offsets(study: Study, loaded: LoadedModel, text: Text) -> None:
    """Sigma of the same windows at other positions, the number of tokens being the same.

    For models with learnt positions; with a rotary embedding only differences of positions
    enter, so that nothing changes.
    """
    if loaded.config.model_type not in ("bert", "gpt2") or loaded.max_tokens is None:
        return
    ask, n = _Ask(study, loaded, text), 64
    places = [k for k in (0, 16, 32, 64, 96, 128, 192, 256, 384) if k + n <= loaded.max_tokens]
    places = study.pick(places[:: max(1, len(places) - 1)], places)
    columns = ("layer", *(f"from position {k}" for k in places))
    found = {"all tokens": [ask.offset(n, k) for k in places]}
    if loaded.tokenizer is not None and any(special_tokens_of(loaded.tokenizer)):
        found["the first token stays"] = [ask.after_the_first(n, k) for k in places]
    for moved, runs in found.items():
        lines = [
            (str(layer), *(number(_median(rows, layer), 3) for rows in runs))
            for layer in ask.layers
        ]
        where = f"{loaded.name}, {text.name}, n = {n}, {moved}"
        study.table(f"Position without length: {where}, median sigma", lines, columns)


def control_tables(study: Study, controlled: Sequence[Control]) -> None:
    """By model and text: what was changed; then what was drawn, each seed by itself."""
    for model, text in dict.fromkeys((c.model, c.text) for c in controlled):
        mine = [c for c in controlled if (c.model, c.text) == (model, text)]
        layers = list(dict.fromkeys(layer for c in mine for layer in c.fits))
        for drawn in (False, True):
            part = [c for c in mine if (c.seed is not None) is drawn]
            lines = tuple(
                (
                    c.name if c.seed is None else f"{c.name}, seed {c.seed}",
                    *(exponent(c.fits.get(layer)) for layer in layers),
                    *(number(c.median(layer), 3) for layer in layers),
                )
                for c in sorted(part, key=lambda c: c.name if drawn else "")
            )
            if lines:
                longest = max(row.num_tokens for c in part for row in c.rows)
                columns = (
                    "changed",
                    *(f"exponent, layer {layer}" for layer in layers),
                    *(f"sigma at n = {longest}, layer {layer}" for layer in layers),
                )
                what = "Growth after one change" + ", drawn at random" * drawn
                study.table(f"{what}: {model}, {text}", lines, columns)


def _median(rows: Sequence[Measurement], layer: int) -> float:
    return statistics.median(row.sigma or 0.0 for row in rows if row.layer == layer)


class _Ask:
    """The questions of all controls, alike in everything but the control."""

    def __init__(self, study: Study, loaded: LoadedModel, text: Text) -> None:
        self.study, self.loaded, self.text_name = study, loaded, text.name
        self.content = text.content
        count = int(loaded.config.num_hidden_layers)
        self.layers = study.pick([0, count // 2], [0, count // 2, count - 1])
        self.lengths = study.pick([16, 32, 64], [16, 32, 64, 128])
        self.samples = study.pick(3, 10)

    def named(self, name: str, rows: Sequence[Measurement], seed: int | None = None) -> Control:
        return Control(name, self.loaded.name, self.text_name, list(rows), seed)

    def part(self, name: str, source: str) -> str:
        return f"control-{name}-{self.loaded.name}-{source}"

    def text(
        self, name: str, loaded: LoadedModel, content: str, seed: int | None = None, **options: Any
    ) -> Control:
        usual = {"layers": self.layers, "lengths": self.lengths, "samples": self.samples}
        part = self.part(name, self.text_name)
        rows = self.study.measure(part, loaded, content, **(usual | options))
        return self.named(name, rows, seed)

    def batches(
        self, name: str, loaded: LoadedModel, batches: Sequence[Record], seed: int | None = None
    ) -> Control:
        """Rows of one batch for each length."""
        rows: list[Measurement] = []
        for batch in batches:
            part = self.part(name, str(batch["input_ids"].shape[1]))
            rows += self.study.measure(part, loaded, batch, layers=self.layers)
        return self.named(name, rows, seed)

    def in_place(
        self, name: str, positions: Callable[[int], Tensor], lengths: Sequence[int] | None = None
    ) -> Control:
        """The windows of the text with positions of their own."""
        asked = self.lengths if lengths is None else lengths
        cut = windows_of_text(
            self.content, self.loaded.tokenizer, lengths=asked, samples=self.samples
        )
        batches = []
        for n in asked:
            ids = torch.cat([window.ids for window in cut if window.num_tokens == n])
            batches.append({"input_ids": ids, "position_ids": positions(n).expand_as(ids)})
        return self.batches(name, self.loaded, batches)

    def offset(self, num_tokens: int, start: int) -> list[Measurement]:
        """Windows of the text whose positions begin at ``start``."""
        options = {"lengths": num_tokens, "position_offset": start}
        return self.text(f"from-position-{start}", self.loaded, self.content, **options).rows

    def after_the_first(self, num_tokens: int, start: int) -> list[Measurement]:
        """The same windows; the first token keeps position 0, the others begin at ``start``."""
        later = torch.arange(num_tokens) + start
        later[0] = 0
        name = f"from-position-{start}-after-the-first"
        return self.in_place(name, lambda _: later, [num_tokens]).rows

    def repeated(self, name: str, *, same_place: bool) -> Control:
        """One token again and again; at one position all its copies are equal vectors."""
        every = [repeated_token(self.loaded, n, self.samples, special=False) for n in self.lengths]
        where = [{"position_ids": torch.zeros_like(ids)} if same_place else {} for ids in every]
        batches = [{"input_ids": ids, **at} for ids, at in zip(every, where, strict=True)]
        return self.batches(name, self.loaded, batches)
