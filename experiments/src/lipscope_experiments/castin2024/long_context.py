"""Long inputs: two clusters to 131,072 tokens, and real text as far as a model allows."""

from __future__ import annotations

from lipscope import Rows
from lipscope.attacks import two_cluster, weighted_two_atoms
from lipscope.charts import Panel, power_law, training_end
from lipscope.pages import number
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import (
    Record,
    chosen,
    curve,
    exponent,
    grouped,
    law,
    middle,
    plain_exponent,
)
from lipscope_experiments.simple_layers import multiple, top

_RADII = {"γR² = 4": 2.0, "γR² = 9": 3.0}  # of A = -I, whose gamma is 1


@experiment("castin2024/long-context", models=("smollm2",), quick_models=("minilm",))
def long_context(study: Study) -> None:
    """How Smooth Is Attention?: long contexts."""
    counts = [2**k for k in range(3, 18)]
    measured = 2 ** study.pick(10, 11)
    clusters = study.values(
        "clusters",
        [one | {"measured": one["n"] <= measured} for one in grid(case=_RADII, n=counts)],
        _two_clusters,
    )
    real: dict[str, Rows] = {}
    for source in study.sources():
        most = min(source.model.max_tokens or 2**13, study.pick(256, 2**13))
        real[source.where] = study.measure(
            source.where,
            source.model,
            **source.asked,
            layers=source.first_and_middle,
            lengths=[2**k for k in range(5, 14) if 2**k <= most],
            samples=study.pick(2, 5),
            special_tokens=False,
        )
    _draw_contexts(study, clusters, real)
    both = [r for r in clusters if r["direct"] is not None]
    error = max(abs(r["direct"] / r["sigma"] - 1) for r in both)
    for name in _RADII:
        study.claim(
            f"two clusters, {name}",
            "√n while n - 1 ≤ e^(2γR²), then less (Propositions 3.4 and 3.6)",
            _growth_of(chosen(clusters, case=name)),
        )
    study.claim(
        "weighted tokens against the layer on all tokens",
        "equal (derived here)",
        f"to {error:.1e} up to n = {max(r['n'] for r in both):,}",
    )
    fits = [(at, k.layer, fit) for at, rows in real.items() for k, fit in rows.growth().items()]
    slopes = [fit for *_, fit in fits if fit]
    longest = max(row.num_tokens for rows in real.values() for row in rows)
    study.claim(
        f"real text to n = {longest:,}",
        "growth close to n^(1/4) (slides)",
        f"exponents {middle(fit.slope for fit in slopes if fit.fits is not False)}; no power "
        f"law in {sum(fit.fits is False for fit in slopes)} of {len(slopes)}",
    )
    lines = [(f"{n:,}", *(r["sigma"] for r in mine)) for n, mine in grouped(clusters, "n")]
    study.table("Two clusters, A = -I: sigma", lines, ("n", *_RADII))
    lines = [(place, str(layer), exponent(fit)) for place, layer, fit in fits]
    study.table("Real text", lines, ("where", "layer", "exponent"))


def _two_clusters(case: str, n: int, measured: bool) -> Record:
    layer, radius, direct = multiple(-1.0, 2), _RADII[case], None
    if measured:
        x = two_cluster(layer, num_tokens=n, radius=radius).x
        direct = top(layer.linearise(x), tol=1e-6).sigma
    sigma = weighted_two_atoms(layer, radius=radius, num_tokens=n).sigma
    return {"sigma": sigma, "direct": direct}


def _growth_of(mine: list[Record]) -> str:
    most = max(mine, key=lambda r: r["sigma"])
    early = plain_exponent([(r["n"], r["sigma"]) for r in mine if 32 <= r["n"] <= 512])
    late = plain_exponent([(r["n"], r["sigma"]) for r in mine if r["n"] >= 2**15])
    return (
        f"exponent {early} from 32 to 512; {late} from 32,768 to 131,072; largest sigma "
        f"{number(most['sigma'])} at n = {most['n']:,}"
    )


def _draw_contexts(study: Study, clusters: list[Record], real: dict[str, Rows]) -> None:
    curves = [curve(name, mine, "n", "sigma") for name, mine in grouped(clusters, "case")]
    law_of = power_law(curves[-1].points, 0.5, "~ n^(1/2)", 2.0)
    panels = [Panel("two clusters, A = -I", (*curves, law_of))]
    for place, rows in real.items():
        series = [
            curve(f"layer {layer}", mine, "num_tokens", "sigma", "points")
            for layer, mine in grouped(rows, "layer")
        ]
        laws = (
            power_law(series[0].points, 0.25, "~ n^(1/4)"),
            power_law(series[-1].points, 0.5, "~ n^(1/2)"),
        )
        said = (f"layer {key.layer} {law(fit)}" for key, fit in rows.growth().items())
        title = f"{place}: {', '.join(said)}"
        panels.append(Panel(title, (*series, *laws), end=training_end(rows)))
    study.draw("long-context", "Long contexts", panels, columns=2)
