"""Long inputs: two clusters to 131,072 tokens, and real text as far as a model allows."""

from __future__ import annotations

import torch

from lipscope import DotProduct, Rows, top_singular
from lipscope.attacks import two_cluster, weighted_two_atoms
from lipscope.charts import Panel, Point, Series, power_law, training_end
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope_experiments.castin2024.protocol import first_and_middle
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import (
    Claim,
    Findings,
    Record,
    Table,
    exponent,
    law,
    middle,
    plain_exponent,
)
from lipscope_experiments.texts import Text

_RADII = {"γR² = 4": 2.0, "γR² = 9": 3.0}  # of A = -I, whose gamma is 1


@experiment(
    "castin2024/long-context",
    title="How Smooth Is Attention?: long contexts",
    cite="castin2024",
    models=("smollm2",),
    quick_models=("minilm",),
)
def long_context(study: Study) -> Findings:
    """Sigma against n, far beyond the lengths of Figure 1."""
    counts = [2**k for k in range(3, 18)]
    measured = 2 ** study.pick(10, 11)
    clusters = study.values(
        "clusters", [_job(name, n, n <= measured) for name in _RADII for n in counts]
    )
    real = {
        f"{loaded.name}, {text.name}": _rows(study, loaded, text) for loaded, text in study.places()
    }
    _draw(study, clusters, real)
    both = [r for r in clusters if r["direct"] is not None]
    error = max(abs(r["direct"] / r["sigma"] - 1) for r in both)
    claims = [
        Claim(
            f"two clusters, {name}",
            "√n while n - 1 ≤ e^(2γR²), then less (Propositions 3.4 and 3.6)",
            _course([r for r in clusters if r["case"] == name]),
        )
        for name in _RADII
    ]
    claims.append(
        Claim(
            "weighted tokens against the layer on all tokens",
            "equal (derived here)",
            f"to {error:.1e} up to n = {max(r['n'] for r in both):,}",
        )
    )
    slopes = [fit for rows in real.values() for fit in rows.growth().values() if fit]
    longest = max(row.num_tokens for rows in real.values() for row in rows)
    claims.append(
        Claim(
            f"real text to n = {longest:,}",
            "growth close to n^(1/4) (slides)",
            f"exponents {middle(fit.slope for fit in slopes if fit.fits is not False)}; no power "
            f"law in {sum(fit.fits is False for fit in slopes)} of {len(slopes)}",
        )
    )
    lines = tuple(
        (place, str(key.layer), exponent(fit))
        for place, rows in real.items()
        for key, fit in rows.growth().items()
    )
    return Findings(
        tuple(claims), (_table(clusters), Table("Real text", ("where", "layer", "exponent"), lines))
    )


def _layer() -> DotProduct:
    eye = torch.eye(2, dtype=torch.float64)
    return DotProduct(eye, -eye, eye, scale=1.0)


def _job(name: str, n: int, measured: bool) -> ValueJob:
    def compute() -> Record:
        layer, radius, direct = _layer(), _RADII[name], None
        if measured:
            x = two_cluster(layer, num_tokens=n, radius=radius).x
            start = torch.Generator().manual_seed(0)
            direct = top_singular(layer.linearise(x), tol=1e-6, generator=start).sigma
        sigma = weighted_two_atoms(layer, radius=radius, num_tokens=n).sigma
        return {"sigma": sigma, "direct": direct}

    return {"case": name, "n": n, "measured": measured}, compute


def _rows(study: Study, loaded: LoadedModel, text: Text) -> Rows:
    most = min(loaded.max_tokens or 2**13, study.pick(256, 2**13))
    return study.measure(
        f"real-{loaded.name}-{text.name}",
        loaded,
        text.content,
        layers=first_and_middle(loaded),
        lengths=[2**k for k in range(5, 14) if 2**k <= most],
        samples=study.pick(2, 5),
        special_tokens=False,
    )


def _course(records: list[Record]) -> str:
    top = max(records, key=lambda r: r["sigma"])
    early = plain_exponent([(r["n"], r["sigma"]) for r in records if 32 <= r["n"] <= 512])
    late = plain_exponent([(r["n"], r["sigma"]) for r in records if r["n"] >= 2**15])
    return (
        f"exponent {early} from 32 to 512; {late} from 32,768 to 131,072; largest sigma "
        f"{number(top['sigma'])} at n = {top['n']:,}"
    )


def _draw(study: Study, clusters: list[Record], real: dict[str, Rows]) -> None:
    curves = {n: tuple((r["n"], r["sigma"]) for r in clusters if r["case"] == n) for n in _RADII}
    lines = (Series(n, c) for n, c in curves.items())
    panels = [Panel("two clusters, A = -I", (*lines, _law(curves["γR² = 9"], lift=2.0)))]
    for place, rows in real.items():
        layers = dict.fromkeys(row.layer for row in rows)
        series: list[Series] = [
            Series(
                f"layer {layer}",
                tuple((r.num_tokens, r.sigma or 0.0) for r in rows if r.layer == layer),
                "points",
            )
            for layer in layers
        ]
        laws = power_law(series[0].points, 0.25, "~ n^(1/4)"), _law(series[-1].points)
        said = (f"layer {key.layer} {law(fit)}" for key, fit in rows.growth().items())
        panels.append(
            Panel(f"{place}: {', '.join(said)}", (*series, *laws), end=training_end(rows))
        )
    study.draw("long-context", "Long contexts", panels, columns=2)


def _law(points: tuple[Point, ...], lift: float = 1.0) -> Series:
    return power_law(points, 0.5, "~ n^(1/2)", lift)


def _table(clusters: list[Record]) -> Table:
    value = {(r["case"], r["n"]): r for r in clusters}
    lines = tuple(
        (f"{n:,}", *(number(value[name, n]["sigma"]) for name in _RADII))
        for n in dict.fromkeys(r["n"] for r in clusters)
    )
    return Table("Two clusters, A = -I: sigma", ("n", *_RADII), lines)
