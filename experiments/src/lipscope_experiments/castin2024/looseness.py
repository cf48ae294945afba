"""Every theorem over the measured norm of the same map, input and metric, by number of tokens."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import cast

from lipscope import Bound, L2Attention
from lipscope.charts import Panel
from lipscope.linalg import Metric, infinity_norm
from lipscope.records import looseness as looseness_of
from lipscope.theorems import bounds_at
from lipscope_experiments.experiment import Source, Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, chosen, grouped, line, middle
from lipscope_experiments.simple_layers import top

_DIVISOR = "global_rows_capped"
_SHOWN = {
    "castin_thm_e_3": "Theorem E.3",
    _DIVISOR: "G2",
    "castin_thm_c_3": "Theorem C.3",
    "yudin_centred": "Yudin et al., centred",
    "local_rows": "F2",
    "row_gram_joint": "row-Gram certificate, all heads",
}
_METRICS: tuple[Metric, ...] = ("frobenius", "max-token")


@experiment("castin2024/looseness", models=("minilm", "smollm2"))
def looseness(study: Study) -> None:
    """How far every theorem is above sigma on real layers."""
    lengths = study.pick([16, 32], [16, 32, 64])
    sources = list(study.sources())
    points = [point for source in sources for point in _above_sigma(study, source, lengths)]
    # The infinity norm is that of a theorem on L2 attention: the same weights with its score.
    for source in sources:
        if source.model.config.model_type != "bert":  # a rotary embedding, or groups: it has none
            continue
        key = {"model": [source.model.name], "text": [source.name]}
        key |= {"layer": study.some_layers(source), "n": lengths, "layers": ["L2 attention"]}
        found = study.values("l2-attention", grid(**key), functools.partial(_as_l2, source))
        points += [one | {"n": r["n"], "layers": r["layers"]} for r in found for one in r["bounds"]]
    _draw_bounds(study, points)
    worst = [p for p in points if p["ratio"] < 1 - 1e-5]
    study.claim("bounds below the measured norm", "none", f"{len(worst)} of {len(points)}")
    for name, norm, said in (
        ("castin_thm_3_3", "Frobenius", "tight in n (Section 3.2)"),
        ("castin_thm_e_3", "Frobenius", "Theorem 3.3 with biases (Appendix E.3)"),
        (_DIVISOR, "Frobenius", "below Theorem 3.3 (derived here)"),
        ("local_rows", "Frobenius", "local: reads the input (derived here)"),
        ("row_gram_joint", "Frobenius", "local, all heads at once (derived here)"),
        ("local_max_token_scalar", "largest-token", "local, without n (derived here)"),
        ("kim_thm_3_2_infinity", "infinity", "asymptotically tight (abstract)"),
    ):
        study.claim(f"{name}, {norm} norm", said, _ratio_of(points, name))
    study.claim(
        "attention divided by global_rows_capped",
        "a promising option at a fixed number of tokens (Section 5.3)",
        f"costs a factor of the order of 10³ on these layers: {_ratio_of(points, _DIVISOR)}",
    )
    keys = ("layers", "metric", "theorem", "scope")
    lines = []
    for where, mine in grouped(points, *keys):
        ratios = ([p["ratio"] for p in chosen(mine, n=n)] for n in lengths)
        lines.append((*where, *(statistics.median_high(some) if some else None for some in ratios)))
    columns = (*keys, *(f"n = {n}" for n in lengths))
    study.table("Bound / measured norm, median over layers and texts", lines, columns, digits=3)
    study.remark(
        "A ratio compares a bound with a measurement of the same map and metric only.",
        "L2 attention: the layer's own query, value and output weights and its own input, "
        "with tied keys and without biases; no model was trained so. Its infinity norm is a "
        "lower value by Hager's iteration, so that ratios are at most those shown.",
        "No theorem of the catalogue on dot-product attention is stated in the infinity norm.",
    )


def _above_sigma(study: Study, source: Source, lengths: Sequence[int]) -> Iterator[Record]:
    for metric in _METRICS:
        rows = study.bounds(
            f"{source.where}, {metric}",
            source.model,
            **source.asked,
            layers=study.some_layers(source),
            lengths=lengths,
            samples=1,
            metric=metric,
            radius="row",
            sharp=study.pick(False, True),
            special_tokens=False,
        )
        measured = {row.id: row for row in rows}
        for bound in rows.bounds:
            row = measured[bound.id]
            if (ratio := looseness_of(bound, row)) is not None:
                point = _bound_point(bound, metric, ratio)
                yield point | {"n": row.num_tokens, "layers": "as they are"}


def _as_l2(source: Source, layer: int, n: int, **_: str) -> Record:
    asked = {**source.asked, "layers": [layer], "lengths": [n], "special_tokens": False}
    one = next(layers_of(source.model, **asked))
    own = one.attention
    l2 = L2Attention(own.query, own.value, own.output, heads=own.num_heads)
    inner = l2.linearise(one.x)
    measured = {"frobenius": top(inner).sigma, "infinity": infinity_norm(inner).lower}
    return {
        "bounds": [
            _bound_point(bound, metric, bound.value / norm)
            for metric, norm in measured.items()
            for bound in bounds_at(l2, one.x, metric=cast("Metric", metric))
            if bound.value is not None and bound.kind == "upper"
        ]
    }


def _bound_point(of: Bound, metric: str, ratio: float) -> Record:
    return {"theorem": of.theorem, "scope": of.scope, "metric": metric, "ratio": ratio}


def _ratio_of(points: Sequence[Record], theorem: str) -> str:
    if not (mine := chosen(points, theorem=theorem)):
        return "does not apply to these layers"
    return f"{middle((p['ratio'] for p in mine), 1)} times the measured norm"


def _draw_bounds(study: Study, points: Sequence[Record]) -> None:
    """Medians over layers and texts, of the theorems that the findings speak of."""
    mine = chosen(points, layers="as they are", metric="frobenius")
    series = []
    for theorem, name in _SHOWN.items():
        if by := dict(grouped(chosen(mine, theorem=theorem), "n")):
            ratios = {n: statistics.median(p["ratio"] for p in by[n]) for n in sorted(by)}
            series.append(line(name, ratios, ratios.values()))
    panel = Panel("Frobenius norm", series, y="bound / sigma")
    study.draw("looseness", "Bounds above sigma", [panel], ["Medians over layers and texts."])
