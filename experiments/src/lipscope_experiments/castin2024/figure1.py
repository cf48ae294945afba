"""Figure 1: growth of sigma with the number of tokens, on real text and on adversarial inputs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope import Measurement, Rows
from lipscope.charts import Panel, Series, power_law
from lipscope.models import (
    Keeps,
    LoadedModel,
    Which,
    as_decoder,
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
from lipscope.records import Growth, groups, growth, slope_of, steps, top_held_fixed
from lipscope_experiments.castin2024 import protocol
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import (
    Record,
    chosen,
    counted,
    curve,
    exponent,
    law,
    middle,
    plain_exponent,
)
from lipscope_experiments.texts import AG_NEWS_TITLE, Text


@dataclass(frozen=True)
class FigureColumn:
    """One column of the figure: a model, perhaps masked, on one text, with its rows."""

    loaded: LoadedModel
    text: Text
    layers: list[int]  # first and middle, as the paper's 0 and 6 of 12; of masked encoders this one
    real: Rows  # on disjoint windows
    coded: protocol.Curves  # the quantity of the published scripts on these windows, by layer
    paired: Rows  # the same passages at every length: nested prefixes, for all layers

    @property
    def name(self) -> str:
        """As tables say it."""
        return f"{self.loaded.name}, {self.text.name}"

    @property
    def masked(self) -> bool:
        """Whether it is an encoder that runs as a decoder."""
        return self.loaded.name.endswith(", causal")


@experiment(
    "castin2024/figure1",
    title="How Smooth Is Attention?, Figure 1: growth with the number of tokens",
    models=("minilm", "smollm2", "random:gpt2", "random:bert"),
)
def figure1(study: Study) -> None:
    """Both rows of the figure, what its scripts compute, and the controls."""
    cases = [
        _figure_column(study, m, text) for m in _models_and_masked(study) for text in study.texts
    ]
    worst = [
        found
        for case in cases
        if case.text is study.texts[0]
        for found in protocol.adversarial(study, case.loaded, case.layers, case.real)
    ]
    controlled = [
        found
        for case in cases
        if not case.masked
        for found in controls(study, case.loaded, case.text)
    ]
    _draw_rows(study, cases, worst)
    _of_growth(study, cases, worst, controlled)
    _exponent_table(study, cases)
    lines = [
        (one.model, str(one.layer), f"{name}, {one.radii[name]:.3g}", one.exponents(name))
        for one in worst
        for name in one.rows
    ]
    if lines:
        columns = ("model", "layer", "radius of", "exponent: median and range over heads")
        study.table("Adversarial inputs, one head placing the tokens, n ≥ 10", lines, columns)
    control_tables(study, controlled)
    for case in cases:
        offsets(study, case.loaded, case.text)
    notes = {fit.note for case in cases for fit in _fits(case.paired).values() if fit}
    few = (f"Same passages: {note}." for note in sorted(filter(None, notes)))
    study.remark(*_remarks_on(study), *few)


def _models_and_masked(study: Study) -> Iterator[LoadedModel]:
    for name in study.models:
        loaded = study.load(name)
        yield loaded
        encodes = getattr(loaded.config, "is_decoder", None) is False
        if encodes and loaded.config.model_type != "gpt2":  # which says so of itself
            yield as_decoder(loaded)


def _every(loaded: LoadedModel) -> list[int]:
    """All layers; of deep models every fifth, of random ones (all alike) three."""
    count = int(loaded.config.num_hidden_layers)
    if loaded.weights.startswith("random"):
        return sorted({0, count // 2, count - 1})
    return list(range(0, count, 5 if protocol.is_deep(loaded) else 1))


def _figure_column(study: Study, loaded: LoadedModel, text: Text) -> FigureColumn:
    layers = protocol.first_and_middle(loaded)[loaded.name.endswith(", causal") :]
    usual = [8, 16, 32, 64, 128, 256]
    longer = (loaded.trained_length or 0) >= 512
    return FigureColumn(
        loaded,
        text,
        layers,
        protocol.disjoint(study, loaded, text, layers),
        protocol.as_coded(
            study, loaded, text, layers, protocol.as_in_the_paper(study, loaded, text)
        ),
        study.measure(
            f"nested-{loaded.name}, {text.name}",
            loaded,
            text.content,
            layers=study.pick(layers, _every(loaded)),
            lengths=study.pick([16, 32, 64], [*usual, *[512] * longer]),
            samples=study.pick(3, 10),
            special_tokens=False,
            rest=True,
        ),
    )


@functools.lru_cache(maxsize=64)
def _fits(rows: Rows) -> dict[int, Growth | None]:
    return {key.layer or 0: fit for key, fit in rows.growth().items()}


def _draw_rows(
    study: Study, cases: Sequence[FigureColumn], worst: Sequence[protocol.Adversarial]
) -> None:
    for text in study.texts:
        mine = [case for case in cases if case.text is text]
        panels = [_real_panel(case, layer) for case in mine for layer in case.layers]
        title, across = f"Figure 1, first row: {text.name}", 3 if len(panels) == 3 else 2
        study.draw(f"real-{text.name}", title, panels, [_HOW], columns=across)
    panels = [_worst_panel(one, name) for one in worst for name in one.rows]
    study.draw("adversarial", "Figure 1, second row: adversarial inputs", panels, columns=2)


_HOW = "Points: single windows (disjoint, as in the paper); both axes logarithmic."


def _real_panel(case: FigureColumn, layer: int) -> Panel:
    rows = chosen(case.real, layer=layer)
    sigma = curve("sigma of attention", rows, "num_tokens", "sigma", "points")
    return Panel(
        f"{case.loaded.name}, layer {layer}: sigma {law(_fits(case.real)[layer])}",
        (
            sigma,
            Series("as in the published scripts", tuple(case.coded[layer]), "points"),
            power_law(sigma.points, 0.25, "~ n^(1/4)"),
            power_law(sigma.points, 0.5, "~ n^(1/2)"),
        ),
        y="sigma, or the scripts' quantity",
    )


def _worst_panel(one: protocol.Adversarial, name: str) -> Panel:
    heads = curve("one head places the tokens", one.rows[name], "num_tokens", "sigma", "points")
    lengths = dict.fromkeys(n for n, _ in heads.points)
    medians = tuple((n, statistics.median(y for m, y in heads.points if m == n)) for n in lengths)
    return Panel(
        f"{one.model}, layer {one.layer}, radius of {name}, {one.radii[name]:.3g}",
        (heads, Series("median over heads", medians), power_law(medians, 0.5, "~ n^(1/2)")),
    )


def _of_growth(
    study: Study,
    cases: Sequence[FigureColumn],
    worst: Sequence[protocol.Adversarial],
    controlled: Sequence[Control],
) -> None:
    fresh = [fit for case in cases for fit in _fits(case.real).values() if fit]
    same = [fit for case in cases for fit in _fits(case.paired).values() if fit]
    quarter = (
        "growth close to n^(1/4) (exponent as on the authors' slides, January 2025), whatever the "
        "text, the depth and the mask (Section 5.3)"
    )
    ratio = [
        slope_of(values) - fit.slope
        for case in cases
        for layer, values in case.coded.items()
        if (fit := _fits(case.real)[layer]) is not None
    ]
    heads = [slope_of(one) for found in worst for name in found.rows for one in found.curves(name)]
    spreads = [c.spread() for c in controlled if c.name == "one token, one position"]
    study.claim("real text, disjoint windows", quarter, counted(fit.law for fit in fresh))
    study.claim("real text, the same passages at every n", quarter, counted(f.law for f in same))
    study.claim(
        "exponents, all layers and texts",
        "1/4; the worst case is 1/2",
        f"disjoint {middle(f.slope for f in fresh)}, nested {middle(f.slope for f in same)}",
    )
    study.claim(
        "as in the published scripts: √‖Jᵀf(X)‖ instead of sigma",
        "named sigma there (read in the code, commit eff2f2a; whether the printed figures "
        "came from it is unknown)",
        f"its exponent minus that of sigma: {middle(ratio)}",
    )
    study.claim(
        "adversarial inputs",
        "growth like n^(1/2) (slides)",
        f"exponents {middle(heads)}" if worst else "not for rotary layers",
    )
    study.claim(
        "one token repeated, at one position",
        "exactly no growth in an unmasked layer (derived here, docs/theory/inputs.md)",
        f"largest relative change {max(spreads):.1e}" if spreads else "not run",
    )
    study.claim("prefixes in causal layers", "sigma can only grow (derived here)", _prefixes(cases))


def _prefixes(cases: Sequence[FigureColumn]) -> str:
    """How often sigma fell from one prefix to the next longer one, beyond the tolerance."""
    pairs = [
        (short, long)
        for case in cases
        if case.masked or getattr(case.loaded.config, "model_type", "") in ("gpt2", "llama")
        for short, long in steps(case.paired)
    ]
    fell = sum((long.upper or 0.0) < (short.sigma or 0.0) for short, long in pairs)
    return f"fell in {fell} of {len(pairs)} steps"


def _exponent_table(study: Study, cases: Sequence[FigureColumn]) -> None:
    def rest(case: FigureColumn, layer: int) -> Growth | None:
        return growth(top_held_fixed(chosen(case.paired, layer=layer)), paired=True)

    study.table(
        "Exponents of sigma in n (interval over the sampling of text, 95 % unless named; off by: "
        "largest deviation of a mean from the line; ✗: no power law)",
        [(case, layer) for case in cases for layer in _fits(case.paired)],
        {
            "model, text": lambda case, _: case.name,
            "layer": lambda _, layer: layer,
            "disjoint windows": lambda case, layer: exponent(_fits(case.real).get(layer)),
            "same passages": lambda case, layer: exponent(_fits(case.paired)[layer]),
            "top token fixed": lambda case, layer: exponent(rest(case, layer)),
            "as in the scripts": lambda case, layer: (
                plain_exponent(case.coded[layer]) if layer in case.coded else "–"
            ),
        },
    )


def _remarks_on(study: Study) -> tuple[str, ...]:
    return (
        *study.not_run("bert-base-uncased", "gpt2"),
        "Text: "
        + ", ".join(text.name for text in study.texts)
        + "."
        + " AG_NEWS was not run." * all(t.name != AG_NEWS_TITLE for t in study.texts),
        "A law that is counted lies inside the interval of an exponent: that does not show that it "
        "is the law. The range of exponents has those of no power law, too.",
        study.pick(
            "Quick: 3 windows a length, few lengths, two layers.",
            "10 windows a length. Disjoint ones: every even n from 2 to 100, or for models of "
            "more than 12 layers n = 10, 20, …, 100. Same passages: n = 8 to 256 (512 where the "
            "model was trained on as many), all layers, or every fifth of more than 12, or three "
            "of random weights. Controls: n = 16 to 128.",
        ),
        "Disjoint windows share no text, at one length or between lengths, as the paper says of "
        "its own; both kinds are spread over the whole text.",
        "The measured map is `attention`, Definition 2.2 of the paper, with the output projection.",
        "The masked encoder runs as a decoder, and its causal mask is part of the map; the "
        "scripts call the layer without a mask (read in bert_decoder/compute_bert_decoder.py). "
        "Their quantity is computed here on the masked layer.",
        "Random models are measured in eval mode; the scripts leave GPT-2 in train mode (read).",
        "Rotary layers have no two-cluster inputs: their logits depend on position.",
    )


# --- controls: one thing taken away or changed at a time


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
