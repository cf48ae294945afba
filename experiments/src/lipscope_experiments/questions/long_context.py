"""What happens at long context: who moves the last token, the beginning, the middle or the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lipscope import Measurement
from lipscope.charts import Panel, training_end
from lipscope.models import reinitialised
from lipscope.records import growth
from lipscope_experiments.experiment import Source, Study, experiment
from lipscope_experiments.findings import average, exponent, grouped, line, share

_TOL = 1e-2
_MOST, _MOST_IF_DEEP = 2**9, 2**8  # tokens; where there are more than twelve layers
_ALL, _LAST = "all tokens", "read at the last token"
_PARTS = {"first tenth": "0%:10%", "middle tenth": "45%:55%", "last tenth": "90%:100%"}
_ALONE = {f"{name} moves": {"move": part} for name, part in _PARTS.items()}
_AT_LAST = {f"{name}, {_LAST}": {**asked, "read": "last"} for name, asked in _ALONE.items()}
_ASKED = {_ALL: {}, _LAST: {"read": "last"}, **_ALONE, **_AT_LAST}


@dataclass(frozen=True)
class RestrictedCase:
    """A model on a text, changed or not: rows by what was asked, then by layer."""

    where: str
    rows: dict[str, dict[int, list[Measurement]]]
    layers: list[int]
    lengths: list[int]  # numbers of tokens, increasing
    longest_trained: int  # of windows that the model was trained on, as far as its files say

    def sigmas(self, asked: str, layer: int, num_tokens: int) -> dict[int, float]:
        """Sigma of what was asked, by window."""
        rows = self.rows[asked][layer]
        return {row.sample: row.sigma for row in rows if row.num_tokens == num_tokens and row.sigma}

    def parts(self, asked: str, layer: int, num_tokens: int, of: str = _ALL) -> list[float]:
        """Sigma of what was asked, as a part of another one, by window."""
        mine, whole = (self.sigmas(one, layer, num_tokens) for one in (asked, of))
        return [mine[s] / whole[s] for s in sorted(whole.keys() & mine.keys())]


@experiment("questions/long-context", models=("minilm", "smollm2"))
def long_context(study: Study) -> None:
    """What happens at long context? Reading the last token, moving a tenth."""
    cases = list[RestrictedCase]()
    for source in study.sources():
        cases.append(_restricted_case(study, source, _ASKED))
        if not source.model.weights.startswith("random"):
            fresh = replace(source, model=reinitialised(source.model))
            cases.append(_restricted_case(study, fresh, [_ALL, _LAST, *_ALONE]))
    _draw_parts(study, cases)
    for case in cases:
        _of_parts(study, case)
        _tables(study, case)
    study.remark(
        f"The map `attention` of layer 0 and the middle one; sigma to {_TOL:.0%}. No two "
        "windows share text, at one length or at two, and none has special tokens. A tenth "
        "holds every token of which a part lies in it.",
        "What moves: the tokens that may change, all unless named. What is read: the tokens "
        "whose outputs count, all unless named.",
        "Lengths beyond those that a model was trained on are fitted apart, where its files "
        "say (MiniLM: 128 tokens) and there are three of them.",
        "One layer of attention by itself: what earlier layers carried to a token before it "
        "is in that token. In a causal layer the last tenth is read by itself alone, and the "
        "first by all.",
        "Control: the model's architecture with random weights. Uniform attention without a "
        "mask gives 1/√n to the last token, and about √(1/10) to a tenth (derived here: its "
        "Jacobian is 11ᵀ/n with the matrix of the values).",
        "Intervals: 95 %, Student's over windows (Clopper–Pearson of counts; of exponents see "
        "`growth`), for windows of this text.",
        f"Not run beyond {_MOST} tokens ({_MOST_IF_DEEP} above twelve layers). Two clusters to "
        "131,072 tokens, and all tokens of real text as far as a model allows, are in "
        "`castin2024/long-context`.",
    )


def _restricted_case(study: Study, source: Source, asked: Iterable[str]) -> RestrictedCase:
    loaded = source.model
    full = _MOST_IF_DEEP if source.is_deep else _MOST
    most = min(loaded.max_tokens or full, study.pick(2**7, full))
    found: dict[str, dict[int, list[Measurement]]] = {}
    for one in asked:
        rows = study.measure(
            f"{one}: {source.where}",
            loaded,
            **source.asked,
            layers=source.first_and_middle,
            lengths=[2**k for k in range(5, 10) if 2**k <= most],
            samples=study.pick(2, 4),
            windows="disjoint",
            special_tokens=False,
            tol=_TOL,
            **_ASKED[one],
        )
        found[one] = dict(grouped(rows, "layer"))
    layers = [*found[_ALL]]
    lengths = sorted({row.num_tokens for row in found[_ALL][layers[0]]})
    trained = found[_ALL][layers[0]][0].trained_length or math.inf
    longest = max((n for n in lengths if n <= trained), default=lengths[-1])
    return RestrictedCase(source.where, found, layers, lengths, longest)


def _of_parts(study: Study, case: RestrictedCase) -> None:
    n = case.longest_trained
    tenth = math.sqrt(math.ceil(n / 10) / n)
    asked = [
        (f"{_LAST}, n = {n}", f"{n**-0.5:.3f} = 1/√n", [_LAST]),
        (f"moves of a tenth, n = {n}: first; middle; last", f"{tenth:.3f} each", [*_ALONE]),
        (
            f"moves of a tenth, {_LAST}, n = {n}: first; middle; last",
            f"{tenth * n**-0.5:.3f} each",
            [*_AT_LAST],
        ),
    ]
    for about, uniform, names in asked:
        if names[0] in case.rows:
            study.claim(
                f"{case.where}: {about}, as a part of sigma of all tokens",
                f"{uniform} of uniform attention without a mask (derived here)",
                ". ".join(
                    f"Layer {layer}: "
                    + "; ".join(average(case.parts(one, layer, n), (0.0, 1.0)) for one in names)
                    for layer in case.layers
                ),
            )
    first, middle, wins = "first tenth moves", "middle tenth moves", list[str]()
    for layer in case.layers:
        hits = [part > 1 for n in case.lengths for part in case.parts(first, layer, n, middle)]
        wins.append(f"Layer {layer}: {share(sum(hits), len(hits))}")
    study.claim(
        f"{case.where}: the first tenth moves the output more than the middle one",
        "the sink, if it is at the beginning",
        ". ".join(wins) + " windows of all lengths",
    )


def _tables(study: Study, case: RestrictedCase) -> None:
    lines = [
        (name, str(layer), exponent(growth(rows, paired=False)))
        for name, layers in case.rows.items()
        for layer, rows in layers.items()
    ]
    columns = ("what moves and is read", "layer")
    ends = f"{case.lengths[0]} to {case.longest_trained}"
    title = f"{case.where}: exponents of sigma in n, {ends} tokens"
    study.table(title, lines, (*columns, "exponent"))
    lines = [
        (name, str(layer), *(average(case.parts(name, layer, n), (0.0, 1.0)) for n in case.lengths))
        for name in case.rows
        if name != _ALL
        for layer in case.layers
    ]
    title = f"{case.where}: part of sigma of all tokens"
    study.table(title, lines, (*columns, *(f"n = {n}" for n in case.lengths)))


def _draw_parts(study: Study, cases: Sequence[RestrictedCase]) -> None:
    """The first text of each model; the others are in the tables."""
    panels = []
    for _, (case, *_) in grouped(cases, lambda one: one.where.rpartition(",")[0]):
        for layer in case.layers:
            curves = []
            for name in (_ALL, _LAST, *_ALONE):
                means = [fmean(case.sigmas(name, layer, n).values()) for n in case.lengths]
                curves.append(line(name, case.lengths, means))
            end = training_end(case.rows[_ALL][layer])
            panels.append(Panel(f"{case.where}, layer {layer}", curves, end=end))
    study.draw("long-context", "Who moves whom at long context", panels, columns=2)
