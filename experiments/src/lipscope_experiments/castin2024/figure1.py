"""Figure 1: growth of sigma with the number of tokens, on real text and on adversarial inputs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lipscope import Measurement, Rows
from lipscope.charts import Panel, Series, power_law
from lipscope.models import LoadedModel, as_decoder
from lipscope.records import Growth, growth, slope_of, steps, top_held_fixed
from lipscope_experiments.castin2024.controls import Control, control_tables, controls, offsets
from lipscope_experiments.castin2024.protocol import (
    Adversarial,
    Curves,
    adversarial,
    as_coded,
    as_in_the_paper,
    disjoint,
    first_and_middle,
    is_deep,
)
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import (
    Claim,
    Findings,
    Table,
    counted,
    exponent,
    law,
    middle,
    plain_exponent,
)
from lipscope_experiments.texts import AG_NEWS_TITLE, Text


@dataclass(frozen=True)
class Case:
    """One column of the figure: a model, perhaps masked, on one text.

    Attributes:
        loaded: The model.
        text: The text.
    """

    loaded: LoadedModel
    text: Text

    @property
    def family(self) -> str:
        """Model type of transformers."""
        return str(getattr(self.loaded.config, "model_type", ""))

    @property
    def layers(self) -> list[int]:
        """First and middle, as the paper's 0 and 6 of 12; of masked encoders the latter."""
        return first_and_middle(self.loaded)[self.loaded.name.endswith(", causal") :]

    @property
    def name(self) -> str:
        """As tables say it."""
        return f"{self.loaded.name}, {self.text.name}"


@experiment(
    "castin2024/figure1",
    title="How Smooth Is Attention?, Figure 1: growth with the number of tokens",
    cite="castin2024",
    models=("minilm", "smollm2", "random:gpt2", "random:bert"),
    quick_models=("minilm",),
)
def figure1(study: Study) -> Findings:
    """Both rows of the figure, what its scripts compute, and the controls."""
    cases = [Case(m, text) for m in _models(study) for text in study.texts]
    real = {case.name: disjoint(study, case.loaded, case.text, case.layers) for case in cases}
    coded = {case.name: _as_coded(study, case) for case in cases}
    paired = {case.name: _paired(study, case) for case in cases}
    worst = [
        found
        for case in cases
        if case.text is study.texts[0]
        for found in adversarial(study, case.loaded, case.layers, real[case.name])
    ]
    controlled = [
        found
        for case in cases
        if not case.loaded.name.endswith(", causal")
        for found in controls(study, case.loaded, case.text)
    ]
    _draw(study, cases, real, coded, worst)
    return Findings(
        claims=_claims(cases, real, paired, coded, worst, controlled),
        tables=(
            _exponents(cases, real, paired, coded),
            *_worst_tables(worst),
            *control_tables(controlled),
            *(table for case in cases for table in offsets(study, case.loaded, case.text)),
        ),
        remarks=(*_remarks(study), *_on_samples(paired)),
    )


def _models(study: Study) -> Iterator[LoadedModel]:
    for name in study.models:
        loaded = study.load(name)
        yield loaded
        encodes = getattr(loaded.config, "is_decoder", None) is False
        if encodes and loaded.config.model_type != "gpt2":  # which says so of itself
            yield as_decoder(loaded)


def _every(case: Case) -> list[int]:
    """All layers; of deep models every fifth, of random ones (all alike) three."""
    count = int(case.loaded.config.num_hidden_layers)
    if case.loaded.weights.startswith("random"):
        return sorted({0, count // 2, count - 1})
    return list(range(0, count, 5 if is_deep(case.loaded) else 1))


def _paired(study: Study, case: Case) -> Rows:
    """The same passages at every length: nested prefixes, for all layers."""
    usual = [8, 16, 32, 64, 128, 256]
    longer = (case.loaded.trained_length or 0) >= 512
    return study.measure(
        f"nested-{case.name}",
        case.loaded,
        case.text.content,
        layers=study.pick(case.layers, _every(case)),
        lengths=study.pick([16, 32, 64], [*usual, *[512] * longer]),
        samples=study.pick(3, 10),
        special_tokens=False,
        rest=True,
    )


def _as_coded(study: Study, case: Case) -> Curves:
    """The quantity of the published scripts on the windows of the first row, by layer."""
    options = as_in_the_paper(study, case.loaded, case.text)
    return as_coded(study, case.loaded, case.text, case.layers, options)


def _of(rows: Rows, layer: int) -> list[Measurement]:
    return [row for row in rows if row.layer == layer]


@functools.lru_cache(maxsize=64)
def _fits(rows: Rows) -> dict[int, Growth | None]:
    return {key.layer or 0: fit for key, fit in rows.growth().items()}


def _rest(rows: Rows, layer: int) -> Growth | None:
    """Growth with the top token held fixed."""
    return growth(top_held_fixed(_of(rows, layer)), paired=True)


# --- what is drawn ---------------------------------------------------------------------------


def _draw(
    study: Study,
    cases: Sequence[Case],
    real: dict[str, Rows],
    coded: dict[str, Curves],
    worst: Sequence[Adversarial],
) -> None:
    for text in study.texts:
        panels = [
            _real_panel(case, layer, real[case.name], coded[case.name][layer])
            for case in cases
            if case.text is text
            for layer in case.layers
        ]
        title, across = f"Figure 1, first row: {text.name}", 3 if len(panels) == 3 else 2
        study.draw(f"real-{text.name}", title, panels, [_HOW], columns=across)
    panels = [_worst_panel(one, name) for one in worst for name in one.rows]
    study.draw("adversarial", "Figure 1, second row: adversarial inputs", panels, columns=2)


_HOW = "Points: single windows (disjoint, as in the paper); both axes logarithmic."


def _real_panel(case: Case, layer: int, rows: Rows, coded: list[tuple[int, float]]) -> Panel:
    points = tuple((row.num_tokens, row.sigma or 0.0) for row in _of(rows, layer))
    return Panel(
        f"{case.loaded.name}, layer {layer}: sigma {law(_fits(rows)[layer])}",
        (
            Series("sigma of attention", points, "points"),
            Series("as in the published scripts", tuple(coded), "points"),
            power_law(points, 0.25, "~ n^(1/4)"),
            power_law(points, 0.5, "~ n^(1/2)"),
        ),
        y="sigma, or the scripts' quantity",
    )


def _worst_panel(one: Adversarial, name: str) -> Panel:
    heads = tuple((row.num_tokens, row.sigma or 0.0) for row in one.rows[name])
    lengths = dict.fromkeys(n for n, _ in heads)
    medians = tuple((n, statistics.median(y for m, y in heads if m == n)) for n in lengths)
    return Panel(
        f"{one.model}, layer {one.layer}, radius of {name}, {one.radii[name]:.3g}",
        (
            Series("one head places the tokens", heads, "points"),
            Series("median over heads", medians),
            power_law(medians, 0.5, "~ n^(1/2)"),
        ),
    )


# --- what is said ----------------------------------------------------------------------------


def _claims(
    cases: Sequence[Case],
    real: dict[str, Rows],
    paired: dict[str, Rows],
    coded: dict[str, Curves],
    worst: Sequence[Adversarial],
    controlled: Sequence[Control],
) -> tuple[Claim, ...]:
    fresh = [fit for case in cases for fit in _fits(real[case.name]).values() if fit]
    same = [fit for case in cases for fit in _fits(paired[case.name]).values() if fit]
    quarter = (
        "growth close to n^(1/4) (exponent as on the authors' slides, January 2025), whatever the "
        "text, the depth and the mask (Section 5.3)"
    )
    ratio = [
        slope_of(values) - fit.slope
        for case in cases
        for layer, values in coded[case.name].items()
        if (fit := _fits(real[case.name])[layer]) is not None
    ]
    heads = [slope_of(curve) for one in worst for name in one.rows for curve in one.curves(name)]
    return (
        Claim("real text, disjoint windows", quarter, counted(fit.law for fit in fresh)),
        Claim("real text, the same passages at every n", quarter, counted(f.law for f in same)),
        Claim(
            "exponents, all layers and texts",
            "1/4; the worst case is 1/2",
            f"disjoint {middle(f.slope for f in fresh)}, nested {middle(f.slope for f in same)}",
        ),
        Claim(
            "as in the published scripts: √‖Jᵀf(X)‖ instead of sigma",
            "named sigma there (read in the code, commit eff2f2a; whether the printed figures "
            "came from it is unknown)",
            f"its exponent minus that of sigma: {middle(ratio)}",
        ),
        Claim(
            "adversarial inputs",
            "growth like n^(1/2) (slides)",
            f"exponents {middle(heads)}" if worst else "not for rotary layers",
        ),
        Claim(
            "one token repeated, at one position",
            "exactly no growth in an unmasked layer (derived here, docs/theory/inputs.md)",
            _repeated(controlled),
        ),
        Claim(
            "prefixes in causal layers",
            "sigma can only grow (derived here)",
            _prefixes(cases, paired),
        ),
    )


def _repeated(controlled: Sequence[Control]) -> str:
    spreads = [c.spread() for c in controlled if c.name == "one token, one position"]
    return f"largest relative change {max(spreads):.1e}" if spreads else "not run"


def _prefixes(cases: Sequence[Case], paired: dict[str, Rows]) -> str:
    """How often sigma fell from one prefix to the next longer one, beyond the tolerance."""
    pairs = [
        (short, long)
        for case in cases
        if case.loaded.name.endswith(", causal") or case.family in ("gpt2", "llama")
        for short, long in steps(paired[case.name])
    ]
    fell = sum((long.upper or 0.0) < (short.sigma or 0.0) for short, long in pairs)
    return f"fell in {fell} of {len(pairs)} steps"


def _exponents(
    cases: Sequence[Case],
    real: dict[str, Rows],
    paired: dict[str, Rows],
    coded: dict[str, Curves],
) -> Table:
    lines = []
    for case in cases:
        first, second = _fits(real[case.name]), _fits(paired[case.name])
        for layer, fit in second.items():
            values = coded[case.name].get(layer)
            lines.append(
                (
                    case.name,
                    str(layer),
                    exponent(first.get(layer)),
                    exponent(fit),
                    exponent(_rest(paired[case.name], layer)),
                    "–" if values is None else plain_exponent(values),
                )
            )
    columns = (
        "model, text",
        "layer",
        "disjoint windows",
        "same passages",
        "top token fixed",
        "as in the scripts",
    )
    title = (
        "Exponents of sigma in n (interval over the sampling of text, 95 % unless named; off by: "
        "largest deviation of a mean from the line; ✗: no power law)"
    )
    return Table(title, columns, tuple(lines))


def _worst_tables(worst: Sequence[Adversarial]) -> Iterator[Table]:
    """One table, or none where no head can place tokens."""
    lines = tuple(
        (
            one.model,
            str(one.layer),
            f"{name}, {one.radii[name]:.3g}",
            one.exponents(name),
        )
        for one in worst
        for name in one.rows
    )
    columns = ("model", "layer", "radius of", "exponent: median and range over heads")
    if lines:
        yield Table("Adversarial inputs, one head placing the tokens, n ≥ 10", columns, lines)


def _on_samples(paired: dict[str, Rows]) -> Iterator[str]:
    """What few windows do to an interval."""
    notes = {fit.note for rows in paired.values() for fit in _fits(rows).values() if fit}
    yield from (f"Same passages: {note}." for note in sorted(filter(None, notes)))


def _remarks(study: Study) -> tuple[str, ...]:
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
