"""What carries the growth of Figure 1: one thing taken away or changed at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lipscope.experiments.experiment import Study
from lipscope.experiments.findings import Table
from lipscope.experiments.texts import Text
from lipscope.models import (
    LoadedModel,
    quantised,
    random_tokens,
    reinitialised,
    repeated_token,
    shuffled_words,
)
from lipscope.models.data.windows import special_tokens_of
from lipscope.pages.table import number
from lipscope.records.exponent import Growth
from lipscope.records.growth import groups, growth, top_held_fixed
from lipscope.records.rows import Measurement


@dataclass(frozen=True)
class Control:
    """Rows of one control, and their growth by layer.

    Attributes:
        name: What was changed.
        model: Name of the model.
        text: Name of the text.
        rows: The rows.
    """

    name: str
    model: str
    text: str
    rows: list[Measurement]

    @property
    def fits(self) -> dict[int, Growth | None]:
        """Growth by layer; samples are the same at every length, or prefixes of each other."""
        return {
            key.layer or 0: growth(part, paired=True) for key, part in groups(self.rows).items()
        }

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
        yield ask.repeated("one token, one position", loaded, same_place=True)
    if not trained:
        return  # the rest speaks of words and of trained weights
    yield ask.repeated("one token", loaded, same_place=False)
    yield ask.tokens("random tokens", loaded)
    yield ask.text("shuffled words", loaded, shuffled_words(text.content))
    if loaded.tokenizer is not None and any(special_tokens_of(loaded.tokenizer)):
        yield ask.text("no special tokens", loaded, text.content, special_tokens=False)
    yield ask.text("random weights", reinitialised(loaded), text.content)
    if loaded.weights == "float32":
        yield ask.text("Q4_1 weights", quantised(loaded), text.content)


def offsets(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Table]:
    """Sigma of the same windows at other positions, the number of tokens being the same.

    For models with learnt positions; with a rotary embedding only differences of positions
    enter, so that nothing changes.
    """
    if loaded.config.model_type not in ("bert", "gpt2") or loaded.max_tokens is None:
        return
    ask, n = _Ask(study, loaded, text), 64
    places = [k for k in (0, 16, 32, 64, 96, 128, 192, 256, 384) if k + n <= loaded.max_tokens]
    places = study.pick(places[:: max(1, len(places) - 1)], places)
    found = [ask.offset(n, k) for k in places]
    lines = tuple(
        (str(layer), *(number(_median(rows, layer), 3) for rows in found)) for layer in ask.layers
    )
    title = f"Position without length: {loaded.name}, {text.name}, n = {n}, median sigma"
    yield Table(title, ("layer", *(f"from position {k}" for k in places)), lines)


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

    def named(self, name: str, rows: Sequence[Measurement]) -> Control:
        return Control(name, self.loaded.name, self.text_name, list(rows))

    def part(self, name: str, source: str) -> str:
        return f"control-{name}-{self.loaded.name}-{source}"

    def text(self, name: str, loaded: LoadedModel, content: str, **options: Any) -> Control:
        usual = {"layers": self.layers, "lengths": self.lengths, "samples": self.samples}
        part = self.part(name, self.text_name)
        return self.named(name, self.study.measure(part, loaded, content, **(usual | options)))

    def tokens(self, name: str, loaded: LoadedModel) -> Control:
        rows: list[Measurement] = []
        for n in self.lengths:
            ids = random_tokens(loaded, n, self.samples)
            rows += self.study.measure(self.part(name, str(n)), loaded, ids, layers=self.layers)
        return self.named(name, rows)

    def offset(self, num_tokens: int, start: int) -> list[Measurement]:
        """Windows of the text whose positions begin at ``start``."""
        options = {"lengths": num_tokens, "position_offset": start}
        return self.text(f"from-position-{start}", self.loaded, self.content, **options).rows

    def repeated(self, name: str, loaded: LoadedModel, *, same_place: bool) -> Control:
        """One token again and again; at one position all its copies are equal vectors."""
        rows: list[Measurement] = []
        for n in self.lengths:
            ids = repeated_token(loaded, n, self.samples, special=False)
            batch: Any = {"input_ids": ids}
            if same_place:
                batch["position_ids"] = torch.zeros_like(ids)
            rows += self.study.measure(self.part(name, str(n)), loaded, batch, layers=self.layers)
        return self.named(name, rows)
