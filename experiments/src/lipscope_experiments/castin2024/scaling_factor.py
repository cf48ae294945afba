"""The scaling factor gamma R²: the adversarial exponent against it, and where it breaks off."""

from __future__ import annotations

import math

import torch

from lipscope import DotProduct, top_singular
from lipscope.attacks import two_cluster, weighted_two_atoms
from lipscope.certificates import in_double
from lipscope.charts import Panel, Series
from lipscope.pages import number
from lipscope.records import off_line, percent_off, slope_of
from lipscope.theorems import castin_thm_e_3, eigen_directions, heads_of
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import Claim, Findings, Record, Table, grouped

_FACTORS = (0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 10.0)
_IDEAL = "A = -I"


@experiment(
    "castin2024/scaling-factor",
    title="How Smooth Is Attention?: the adversarial exponent against the scaling factor",
    cite="castin2024",
    models=("minilm",),
    reads_text=False,
)
def scaling_factor(study: Study) -> Findings:
    """Exponent over 10 to 100 tokens, and the n of the largest sigma, for each gamma R²."""
    layers = {_IDEAL: _ideal()} | _heads(study)
    lengths = [round(10 ** (1 + k / study.pick(4, 10))) for k in range(1 + study.pick(4, 10))]
    wide = [round(2 ** (k / 2)) for k in range(2, study.pick(40, 60))]
    found = study.values(
        "exponents", [_job(name, layers[name], t, lengths) for name in layers for t in _FACTORS]
    )
    peaks = study.values("peaks", [_peak_job(layers[_IDEAL], t, wide) for t in _FACTORS[3:8]])
    _draw(study, found, peaks)
    small = [r for r in found if r["layer"] == _IDEAL]
    reached = next((r["t"] for r in small if r["slope"] >= 0.45), math.nan)
    steepest = max(small, key=lambda r: r["slope"])
    shares = [p["n"] / math.exp(2 * p["t"]) for p in peaks]
    last = _FACTORS[-1]
    real = [r["slope"] for r in found if r["layer"] != _IDEAL and r["t"] >= 4]
    return Findings(
        (
            Claim(
                "exponent over n = 10 to 100 against γR²",
                "smaller radii grow slower than √n; left open (Section 5.2)",
                f"{_IDEAL}: first above 0.45 at γR² = {reached:g}, where e^(2γR²) = "
                f"{math.exp(2 * reached):.0f}; largest {steepest['slope']:.2f} at γR² = "
                f"{steepest['t']:g}; {small[-1]['slope']:.2f} at γR² = {small[-1]['t']:g}",
            ),
            Claim(
                "the n of the largest sigma",
                "of the order of e^(2γR²) (Proposition 3.4); 3 e^(2γR²) for large γR² (derived "
                "here)",
                f"{min(shares):.2f} to {max(shares):.2f} times e^(2γR²) for γR² from "
                f"{peaks[0]['t']:g} to {peaks[-1]['t']:g}",
            ),
            Claim(
                "single heads of a pretrained layer, γR² ≥ 4",
                "growth like √n",
                f"exponents {min(real):.2f} to {max(real):.2f}" if real else "not run",
            ),
            Claim(
                f"Theorem E.3 (Theorem 3.3 with biases) over that sigma, γR² = {last:g}, "
                "n = 10 and 100",
                "the same, if √n is tight in n",
                "; ".join(f"{r['layer']}: {_both(r['above'])}" for r in found if r["t"] == last),
            ),
        ),
        (_table(found), _peak_table(peaks)),
        (
            "Heads alone, with biases, at their own two clusters and the radius that gives γR².",
            "The n of the largest sigma is found on a grid of ratio √2, exactly (weighted tokens).",
        ),
    )


def _both(ends: list[float]) -> str:
    return " and ".join(number(end) for end in ends)


def _ideal() -> DotProduct:
    eye = torch.eye(2, dtype=torch.float64)
    return DotProduct(eye, -eye, eye, scale=1.0)


def _heads(study: Study) -> dict[str, DotProduct]:
    """Some heads of the middle layer of each model, each as a layer of its own."""
    found = {}
    for name in study.models:
        loaded = study.load(name)
        layer = int(loaded.config.num_hidden_layers) // 2
        one = next(layers_of(loaded, layers=[layer], lengths=[16]))
        for head in range(0, one.attention.num_heads, study.pick(6, 3)):
            alone = in_double(one.attention, head)
            if eigen_directions(heads_of(alone)[0]) and alone.rotary is None and not alone.causal:
                found[f"{name}, layer {layer}, head {head}"] = alone
    return found


def _radius(layer: DotProduct, t: float) -> float:
    return math.sqrt(t / eigen_directions(heads_of(layer)[0])[0].gamma)


def _sigma(layer: DotProduct, n: int, radius: float) -> float:
    x = two_cluster(layer, num_tokens=n, radius=radius).x
    start = torch.Generator().manual_seed(0)
    return top_singular(layer.linearise(x), tol=1e-4, generator=start).sigma


def _job(name: str, layer: DotProduct, t: float, lengths: list[int]) -> ValueJob:
    def compute() -> Record:
        radius = _radius(layer, t)
        points = [(n, _sigma(layer, n, radius)) for n in lengths]
        (head,) = heads_of(layer)
        above = [castin_thm_e_3(head, n, radius) / sigma for n, sigma in points]
        slope, sigma = slope_of(points), points[-1][1]
        ends = {"above": [above[0], above[-1]], "off": off_line(points)}
        return {"radius": radius, "slope": slope, "sigma": sigma, **ends}

    return {"layer": name, "t": t, "lengths": ",".join(map(str, lengths))}, compute


def _peak_job(layer: DotProduct, t: float, lengths: list[int]) -> ValueJob:
    def compute() -> Record:
        radius = _radius(layer, t)
        points = [
            (weighted_two_atoms(layer, radius=radius, num_tokens=n).sigma, n) for n in lengths
        ]
        sigma, n = max(points)
        return {"n": n, "sigma": sigma}

    return {"t": t, "longest": lengths[-1]}, compute


def _draw(study: Study, found: list[Record], peaks: list[Record]) -> None:
    slopes = tuple(
        Series(name, tuple((r["t"], r["slope"]) for r in mine))
        for name, mine in grouped(found, "layer")
    )
    half = Series("1/2", ((_FACTORS[0], 0.5), (_FACTORS[-1], 0.5)), "dashes")
    left = Panel("exponent over n = 10 to 100", (*slopes, half), "γ R²", "exponent", log_y=False)
    right = Panel(
        f"n of the largest sigma, {_IDEAL}",
        (
            Series("measured", tuple((p["t"], p["n"]) for p in peaks), "points"),
            Series("e^(2γR²)", tuple((p["t"], math.exp(2 * p["t"])) for p in peaks), "dashes"),
            Series(
                "3 e^(2γR²)", tuple((p["t"], 3 * math.exp(2 * p["t"])) for p in peaks), "dashes"
            ),
        ),
        "γ R²",
        "number of tokens n",
        log_x=False,
    )
    study.draw("scaling-factor", "The scaling factor", [left, right], columns=2)


def _table(found: list[Record]) -> Table:
    names = list(dict.fromkeys(r["layer"] for r in found))
    value = {
        (r["layer"], r["t"]): f"{r['slope']:.2f}, off by {percent_off(r['off'])} %" for r in found
    }
    lines = tuple((f"{t:g}", *(value[name, t] for name in names)) for t in _FACTORS)
    title = "Exponent of sigma over n = 10 to 100, and how far sigma leaves that power law"
    return Table(title, ("γR²", *names), lines)


def _peak_table(peaks: list[Record]) -> Table:
    lines = tuple(
        (f"{p['t']:g}", f"{p['n']:,}", number(math.exp(2 * p["t"])), number(p["sigma"]))
        for p in peaks
    )
    return Table("Where sigma is largest, A = -I", ("γR²", "n", "e^(2γR²)", "sigma"), lines)
