"""Attention on measures: ratios and their limits, masks and the conditional distance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lipscope import Attention, DotProduct, top_singular
from lipscope.charts import LineKind, Panel, Series
from lipscope.linalg import start_named
from lipscope.measures import (
    TokenMeasure,
    conditional_distance,
    in_order,
    lipschitz_ratio,
    local_constant,
    push_forward,
    search_ratio,
    wasserstein,
    weighted_jacobian,
)
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import share_interval
from lipscope.theorems import catalogue, evaluate
from lipscope_experiments.castin2024.splitting import SIGNS, multiple
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import Claim, Findings, Record, Table, middle

_SIZES = (1e-1, 1e-2, 1e-3, 1e-4)
_STATED, _CORRECTED = "castin_thm_4_4", "causal_mean_field"
_NEAR = 1e-6  # above 1: what transport's rounding can do


@experiment(
    "castin2024/measures",
    title="How Smooth Is Attention? on measures: ratios, masks, and the conditional distance",
    cite="castin2024",
    models=("minilm",),
    reads_text=False,
)
def measures(study: Study) -> Findings:
    """Lemmas 3.2, 4.2 and C.5, Definition 4.1, Theorems 4.3 and 4.4, and a search."""
    limits = study.values("limits", _limit_jobs(study))
    order = study.values("order", [_order_job(seed) for seed in range(study.pick(20, 200))])
    finite = study.values("theorem 4.3", _finite_jobs(study))
    hardy = study.values("running mean", [_hardy_job(n) for n in _lengths(study)])
    masked = study.values("theorem 4.4", [_masked_job(s) for s in range(study.pick(40, 400))])
    search = study.values("search", _search_jobs(study))
    _draw(study, limits, hardy, finite)
    return Findings(
        (
            Claim(
                "ratios of small moves along the top singular vector, over the local constant",
                "tend to 1 (Lemmas 3.2, 4.2, C.5)",
                "; ".join(f"{size:g}: {middle(r[_key(size)] for r in limits)}" for size in _SIZES)
                + f", {len(limits)} layers and inputs",
            ),
            Claim(
                "a text and its shuffled copy, W_2 without positions",
                "the distance of Definition 4.1 is needed",
                f"W_2 = {max(r['plain'] for r in order):.1g} for all {len(order)} pairs, outputs "
                f"of causal attention at W_2 {middle(r['outputs'] for r in order)}; conditional "
                f"distances {middle(r['conditional'] for r in order)}",
            ),
            Claim(
                "Theorem 4.3: ratios of causal attention over the bound",
                "at most 1",
                _below([r["found"] / r["bound"] for r in finite]),
            ),
            Claim(
                "Theorem 4.4, distance and p as taken here, at A = 0, V = 1 (slides: 1)",
                "false for every finite p; for p = 2 the supremum is 2 (Hardy; derived here)",
                "; ".join(f"n = {r['n']}: {number(r['ratio'], 5)}" for r in hardy),
            ),
            Claim(
                "the same, ratios of random pairs with ‖A‖R² at most 1",
                "exceeded by many (derived here)",
                _exceeded(masked, "stated"),
            ),
            Claim(
                "the corrected constant, the same pairs",
                "‖V‖ (α + 2 (1 + 2α) e^(2α)): never exceeded (derived here)",
                _exceeded(masked, "corrected"),
            ),
            Claim(
                "largest ratios that a search found, over the mean-field bound",
                "at most 1; of the order of 1 for A = -I (Proposition 3.6)",
                "; ".join(
                    f"{r['sign']}, R = {r['radius']:g}: {number(r['ratio'])} of "
                    f"{number(r['mean_field'])}"
                    for r in search
                ),
            ),
        ),
        (_search_table(search),),
        (
            "Distances are exact transport, p = 2; intervals are 95 % Clopper–Pearson over pairs "
            "that were drawn independently.",
            "Real layers: MiniLM's own tokens as a uniform measure, unmasked.",
            "Theorem 4.4 was read on the authors' slides only (January 2025). They say that the "
            "upper bound of the unmasked layer holds, ‖V‖ (1 + 3 ‖A‖ R²) e^(2 ‖A‖ R²), and give "
            "neither the distance nor p. Taken with the conditional distance of Definition 4.1, it "
            "fails for every finite p by Hardy's inequality: at A = 0 attention is the running "
            "mean, whose norm for many tokens is p / (p - 1), and unbounded for p = 1. Here p = 2. "
            "What the printed theorem says is not known to us.",
        ),
    )


# --- limits


def _key(size: float) -> str:
    return f"at {size:g}"


def _limit_jobs(study: Study) -> Iterator[ValueJob]:
    for seed in range(study.pick(2, 10)):
        for kind in ("uniform", "weighted", "causal"):
            yield _limit_job({"kind": kind, "seed": seed})
    for name in study.models:
        layers = study.pick([0], [0, 2, 5])
        for layer in layers:
            yield _limit_job({"kind": name, "layer": layer}, study.load(name))


def _limit_job(key: dict[str, Any], model: LoadedModel | None = None) -> ValueJob:
    def compute() -> Record:
        layer, mu = _drawn(key) if model is None else _real(model, key["layer"])
        constant = local_constant(layer, mu)
        start = torch.Generator().manual_seed(0)
        e = top_singular(weighted_jacobian(layer, mu), generator=start, tol=1e-6).v
        move = mu.radius * e / mu.weights.sqrt()[:, None]
        found = {
            _key(size): lipschitz_ratio(layer, mu, mu.moved(mu.points + size * move)) / constant
            for size in _SIZES
        }
        return {"constant": constant, **found}

    return key, compute


def _drawn(key: dict[str, Any]) -> tuple[Attention, TokenMeasure]:
    gen = start_named(f"measures|{key['kind']}|{key['seed']}")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    causal = key["kind"] == "causal"
    layer = DotProduct(normal(3, 3), normal(3, 3), normal(3, 3), causal=causal)
    x, w = normal(6, 3), torch.rand(6, generator=gen, dtype=torch.float64) + 0.1
    if causal:
        return layer, in_order(x)
    return layer, TokenMeasure(x, w / w.sum() if key["kind"] == "weighted" else None)


def _real(model: LoadedModel, layer: int) -> tuple[Attention, TokenMeasure]:
    one = next(layers_of(model, layers=[layer], lengths=[16]))
    return one.attention, TokenMeasure(one.x)


# --- positions


def _order_job(seed: int) -> ValueJob:
    def compute() -> Record:
        layer, mu = _drawn({"kind": "causal", "seed": 1000 + seed})
        order = torch.randperm(6, generator=start_named(f"measures|order|{seed}"))
        nu = in_order(mu.points[order])
        images = [push_forward(layer, one) for one in (mu, nu)]
        return {
            "plain": float(wasserstein(mu, nu)),
            "outputs": float(wasserstein(*images)),
            "conditional": float(conditional_distance(mu, nu)),
        }

    return {"seed": seed}, compute


def _finite_jobs(study: Study) -> list[ValueJob]:
    some = study.pick(10, 100)
    return [_finite_job(n, seed) for n in (2, 5, 10, 20) for seed in range(some)]


def _finite_job(n: int, seed: int) -> ValueJob:
    """A random causal layer: the local constant and a finite ratio, in a ball, under the bound."""

    def compute() -> Record:
        gen = start_named(f"measures|4.3|{n}|{seed}")
        weights = [torch.randn(3, 3, generator=gen, dtype=torch.float64) for _ in range(3)]
        layer, radius = DotProduct(*weights, causal=True), 1.5
        x, y = (radius * _in_ball(n, 3, gen) for _ in range(2))
        mu, nu = in_order(x), in_order(y)
        found = max(local_constant(layer, mu), lipschitz_ratio(layer, mu, nu))
        return {"found": found, "bound": _bound("castin_thm_3_3", layer, radius, n)}

    return {"n": n, "seed": seed}, compute


def _in_ball(n: int, d: int, gen: torch.Generator) -> Tensor:
    x = torch.randn(n, d, generator=gen, dtype=torch.float64)
    far = torch.rand(n, 1, generator=gen, dtype=torch.float64) ** (1 / d)
    return far * x / x.norm(dim=-1, keepdim=True)


def _lengths(study: Study) -> list[int]:
    return study.pick([2, 10, 100], [2, 3, 5, 10, 30, 100, 300, 1000])


def _hardy_job(n: int) -> ValueJob:
    """The worst pair for the running mean of n tokens, in the conditional distance."""

    def compute() -> Record:
        one = torch.ones(1, 1, dtype=torch.float64)
        layer = DotProduct(0 * one, one, one, causal=True)
        mean = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
        worst = torch.linalg.svd(mean)[2][0][:, None]
        mu, nu = in_order(torch.zeros(n, 1)), in_order(worst)
        return {
            "ratio": lipschitz_ratio(layer, mu, nu),
            "stated": _bound(_STATED, layer, 1.0),
            "corrected": _bound(_CORRECTED, layer, 1.0),
        }

    return {"n": n}, compute


def _masked_job(seed: int) -> ValueJob:
    """A random causal layer with ``‖A‖R² <= 1``, and a pair along its steepest direction."""

    def compute() -> Record:
        gen = start_named(f"measures|4.4|{seed}")
        alpha = float(torch.rand(1, generator=gen))
        a = torch.randn(2, 2, generator=gen, dtype=torch.float64)
        a *= alpha / torch.linalg.matrix_norm(a, 2)
        eye = torch.eye(2, dtype=torch.float64)
        layer = DotProduct(a, eye, eye, scale=1.0, causal=True)
        mu = in_order(_in_ball(8, 2, gen))
        e = top_singular(weighted_jacobian(layer, mu), generator=gen, tol=1e-6).v
        ratio = lipschitz_ratio(layer, mu, mu.moved(mu.points + 1e-4 * e))
        bounds = {"stated": _STATED, "corrected": _CORRECTED}
        return {"ratio": ratio, **{k: _bound(name, layer, 1.0) for k, name in bounds.items()}}

    return {"seed": seed}, compute


def _bound(name: str, layer: Attention, radius: float, n: int | None = None) -> float:
    known = {one.name: one for one in catalogue()}
    return evaluate(known[name], layer, radius=radius, num_tokens=n)


def _exceeded(found: list[Record], key: str) -> str:
    return _below([r["ratio"] / r[key] for r in found])


def _below(shares: list[float]) -> str:
    above = sum(share > 1 + _NEAR for share in shares)
    low, high = share_interval(above, len(shares))
    return (
        f"exceeded by {above} of {len(shares)} pairs [{low:.1%}, {high:.1%}], largest ratio over "
        f"the bound {number(max(shares))}"
    )


# --- a search


def _search_jobs(study: Study) -> list[ValueJob]:
    radii = study.pick((1.0, 2.0), (0.5, 1.0, 1.5, 2.0, 2.5))
    return [_search_job(study, sign, radius) for sign in SIGNS for radius in radii]


def _search_job(study: Study, sign: str, radius: float) -> ValueJob:
    steps, starts = study.pick((300, 2), (1000, 4))

    def compute() -> Record:
        layer = multiple(SIGNS[sign], 1)
        found = search_ratio(layer, radius=radius, num_atoms=2, steps=steps, starts=starts)
        names = {"mean_field": "mean_field", "stated": "geshkovski_mean_field"}
        return {
            "ratio": found.ratio,
            "light": float(found.mu.weights.min()),
            "apart": float((found.mu.points[0] - found.mu.points[1]).norm()) / radius,
            **{key: _bound(name, layer, radius) for key, name in names.items()},
        }

    return {"sign": sign, "radius": radius, "steps": steps, "starts": starts}, compute


def _search_table(found: list[Record]) -> Table:
    columns = (
        "A",
        "R",
        "largest ratio",
        "mean-field bound",
        "Theorem 3.5",
        "lighter atom",
        "apart / R",
    )
    keys = ("ratio", "mean_field", "stated", "light", "apart")
    lines = tuple((r["sign"], f"{r['radius']:g}", *(number(r[key]) for key in keys)) for r in found)
    return Table("Pairs of two weighted atoms, d = 1", columns, lines)


# --- figures


def _draw(
    study: Study,
    limits: list[Record],
    hardy: list[Record],
    finite: list[Record],
) -> None:
    kinds = dict.fromkeys(r["kind"] for r in limits)
    near = tuple(
        Series(
            kind,
            tuple(
                (size, abs(r[_key(size)] - 1))
                for r in limits
                if r["kind"] == kind
                for size in _SIZES
            ),
            "points",
        )
        for kind in kinds
    )
    norms: list[tuple[str, str, LineKind]] = [
        ("largest ratio", "ratio", "line"),
        ("as on the slides: 1", "stated", "dashes"),
        ("corrected: 2 (Hardy)", "corrected", "dashes"),
    ]
    means = tuple(Series(n, tuple((r["n"], r[k]) for r in hardy), kind) for n, k, kind in norms)
    under = (
        Series("ratio / bound", tuple((r["n"], r["found"] / r["bound"]) for r in finite), "points"),
        Series("the bound", tuple((r["n"], 1.0) for r in finite), "dashes"),
    )
    panels = [
        Panel("|ratio / local constant - 1|", near, x="size of the move / R", y="deviation"),
        Panel("the running mean (A = 0, V = 1)", means, y="ratio", log_y=False),
        Panel("causal layers under Theorem 4.3", under, y="ratio / bound"),
    ]
    study.draw("measures", "Attention on measures", panels)
