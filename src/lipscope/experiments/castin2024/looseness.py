"""Every theorem on real layers against the number of tokens, one metric at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope.experiments.experiment import Job, Study, experiment
from lipscope.experiments.findings import Claim, Findings, Table, middle
from lipscope.panels import Panel, Series
from lipscope.sandwich import METRICS, sandwich
from lipscope.table import number


@experiment(
    "castin2024/looseness",
    title="How far every theorem is above sigma on real layers",
    cite="castin2024",
    models=("minilm", "smollm2"),
    quick_models=("minilm",),
)
def looseness(study: Study) -> Findings:
    """Upper bounds divided by the measured norm of the same map, input and metric."""
    lengths = study.pick([16, 32], [16, 32, 64, 128])
    jobs = [
        _job(study, name, text.name, text.content, layer, n, metric)
        for name in study.models
        for text in study.texts
        for layer in _layers(study, name)
        for n in lengths
        for metric in METRICS[: study.pick(2, 3)]
    ]
    found = study.values("looseness", jobs)
    points = [one | {"n": r["n"], "metric": r["metric"]} for r in found for one in r["bounds"]]
    _draw(study, points)
    worst = [p for p in points if p["ratio"] < 1 - 1e-5]
    return Findings(
        (
            Claim(
                "bounds below the measured norm",
                "none",
                f"{len(worst)} of {len(points)}",
            ),
            *(
                Claim(f"{name}, Frobenius norm", said, _ratio(points, name))
                for name, said in (
                    ("castin_thm_3_3", "tight in n for reasonable lengths (Section 3.2)"),
                    ("global_g2", "below Theorem 3.3 (derived here)"),
                    ("f2", "local: reads the input (derived here)"),
                )
            ),
        ),
        (_table(points, lengths),),
        ("A ratio compares a bound with a measurement of the same map and metric only.",),
    )


def _layers(study: Study, name: str) -> list[int]:
    count = int(study.load(name).config.num_hidden_layers)
    return study.pick([count // 2], [0, count // 2, count - 1])


def _job(study: Study, name: str, text: str, content: str, layer: int, n: int, metric: str) -> Job:
    def compute() -> dict[str, Any]:
        rows = sandwich(
            study.load(name),
            content,
            layers=[layer],
            lengths=[n],
            metric=metric,
            special_tokens=False,
        )
        kept = [row for row in rows if row.looseness is not None]
        return {
            "bounds": [
                {"theorem": row.theorem, "scope": row.scope, "ratio": row.looseness} for row in kept
            ]
        }

    return {"model": name, "text": text, "layer": layer, "n": n, "metric": metric}, compute


def _ratio(points: Sequence[dict[str, Any]], theorem: str) -> str:
    ratios = [p["ratio"] for p in points if p["theorem"] == theorem and p["metric"] == "frobenius"]
    return f"{middle(ratios, 1)} times sigma" if ratios else "does not apply to these layers"


def _draw(study: Study, points: Sequence[dict[str, Any]]) -> None:
    panels = []
    for metric in dict.fromkeys(p["metric"] for p in points):
        names = dict.fromkeys(p["theorem"] for p in points if p["metric"] == metric)
        series = [
            Series(
                name,
                tuple(
                    (p["n"], p["ratio"])
                    for p in points
                    if p["theorem"] == name and p["metric"] == metric and p["ratio"] < 1e6
                ),
                "points",
            )
            for name in names
        ]
        panels.append(Panel(f"metric {metric}", tuple(series), y="bound / measured"))
    notes = ["Bounds more than a million times above are in the table only."]
    study.draw("looseness", "Every theorem above sigma", panels, notes, columns=2)


def _table(points: Sequence[dict[str, Any]], lengths: Sequence[int]) -> Table:
    lines = []
    for metric, name, scope in dict.fromkeys(
        (p["metric"], p["theorem"], p["scope"]) for p in points
    ):
        mine = [p for p in points if (p["metric"], p["theorem"]) == (metric, name)]
        cells = []
        for n in lengths:
            ratios = sorted(p["ratio"] for p in mine if p["n"] == n)
            cells.append(number(ratios[len(ratios) // 2], 3) if ratios else "–")
        lines.append((metric, name, scope, *cells))
    columns = ("metric", "theorem", "scope", *(f"n = {n}" for n in lengths))
    return Table("Bound / measured norm, median over layers and texts", columns, tuple(lines))
