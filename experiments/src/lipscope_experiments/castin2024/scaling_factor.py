"""The scaling factor gamma R²: the exponent over 10 to 100 tokens, and where it breaks off."""

from __future__ import annotations

import math

from lipscope import DotProduct
from lipscope.attacks import two_cluster, weighted_two_atoms
from lipscope.certificates import in_double
from lipscope.charts import Panel
from lipscope.pages import number
from lipscope.records import off_line, percent_off, slope_of
from lipscope.theorems import castin_thm_e_3, eigen_directions, heads_of
from lipscope_experiments.experiment import Source, Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, curve, grouped, level
from lipscope_experiments.simple_layers import multiple, top

_FACTORS = (0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 10.0)
_IDEAL = "A = -I"


@experiment("castin2024/scaling-factor", models=("minilm",), reads_text=False)
def scaling_factor(study: Study) -> None:
    """How Smooth Is Attention?: the adversarial exponent against the scaling factor."""
    layers = {_IDEAL: multiple(-1.0, 2)} | _single_heads(study)
    lengths = [round(10 ** (1 + k / study.pick(4, 10))) for k in range(1 + study.pick(4, 10))]
    wide = [round(2 ** (k / 2)) for k in range(2, study.pick(40, 60))]
    keys = grid(layer=layers, t=_FACTORS, lengths=[",".join(map(str, lengths))])
    found = study.values(
        "exponents", keys, lambda layer, t, **_: _exponent_at(layers[layer], t, lengths)
    )
    keys = grid(t=_FACTORS[3:8], longest=[wide[-1]])
    peaks = study.values("peaks", keys, lambda t, **_: _largest_n(layers[_IDEAL], t, wide))
    slopes = [curve(name, mine, "t", "slope") for name, mine in grouped(found, "layer")]
    half = level("1/2", 0.5, (_FACTORS[0], _FACTORS[-1]))
    left = Panel("exponent over n = 10 to 100", (*slopes, half), "γ R²", "exponent", log_y=False)
    right = Panel(
        f"n of the largest sigma, {_IDEAL}",
        (
            curve("measured", peaks, "t", "n", "points"),
            curve("e^(2γR²)", peaks, "t", lambda p: math.exp(2 * p["t"]), "dashes"),
            curve("3 e^(2γR²)", peaks, "t", lambda p: 3 * math.exp(2 * p["t"]), "dashes"),
        ),
        "γ R²",
        "number of tokens n",
        log_x=False,
    )
    study.draw("scaling-factor", "The scaling factor", [left, right], columns=2)
    by = {
        (r["layer"], r["t"]): f"{r['slope']:.2f}, off by {percent_off(r['off'])} %" for r in found
    }
    small = [r for r in found if r["layer"] == _IDEAL]
    reached = next((r["t"] for r in small if r["slope"] >= 0.45), math.nan)
    steepest = max(small, key=lambda r: r["slope"])
    shares = [p["n"] / math.exp(2 * p["t"]) for p in peaks]
    last = _FACTORS[-1]
    real = [r["slope"] for r in found if r["layer"] != _IDEAL and r["t"] >= 4]
    study.claim(
        "exponent over n = 10 to 100 against γR²",
        "smaller radii grow slower than √n; left open (Section 5.2)",
        f"{_IDEAL}: first above 0.45 at γR² = {reached:g}, where e^(2γR²) = "
        f"{math.exp(2 * reached):.0f}; largest {steepest['slope']:.2f} at γR² = "
        f"{steepest['t']:g}; {small[-1]['slope']:.2f} at γR² = {small[-1]['t']:g}",
    )
    study.claim(
        "the n of the largest sigma",
        "of the order of e^(2γR²) (Proposition 3.4); 3 e^(2γR²) for large γR² (derived here)",
        f"{min(shares):.2f} to {max(shares):.2f} times e^(2γR²) for γR² from "
        f"{peaks[0]['t']:g} to {peaks[-1]['t']:g}",
    )
    study.claim(
        "single heads of a pretrained layer, γR² ≥ 4",
        "growth like √n",
        f"exponents {min(real):.2f} to {max(real):.2f}" if real else "not run",
    )
    study.claim(
        f"Theorem E.3 (Theorem 3.3 with biases) over that sigma, γR² = {last:g}, n = 10 and 100",
        "the same, if √n is tight in n",
        "; ".join(
            f"{r['layer']}: {' and '.join(map(number, r['above']))}"
            for r in found
            if r["t"] == last
        ),
    )
    lines = [(f"{t:g}", *(by[name, t] for name in layers)) for t in _FACTORS]
    title = "Exponent of sigma over n = 10 to 100, and how far sigma leaves that power law"
    study.table(title, lines, ("γR²", *layers))
    lines = [(f"{p['t']:g}", f"{p['n']:,}", math.exp(2 * p["t"]), p["sigma"]) for p in peaks]
    columns = ("γR²", "n", "e^(2γR²)", "sigma")
    study.table("Where sigma is largest, A = -I", lines, columns)
    study.remark(
        "Heads alone, with biases, at their own two clusters and the radius that gives γR².",
        "The n of the largest sigma is found on a grid of ratio √2, exactly (weighted tokens).",
    )


def _single_heads(study: Study) -> dict[str, DotProduct]:
    """Some heads of the middle layer of each model, each as a layer of its own."""
    found = {}
    for name in study.models:
        source = Source(study.load(name))
        _, layer = source.first_and_middle
        one = next(layers_of(source.model, layers=[layer], lengths=[16]))
        for head in range(0, one.attention.num_heads, study.pick(6, 3)):
            alone = in_double(one.attention, head)
            if eigen_directions(heads_of(alone)[0]) and alone.rotary is None and not alone.causal:
                found[f"{name}, layer {layer}, head {head}"] = alone
    return found


def _radius_for(layer: DotProduct, t: float) -> float:
    return math.sqrt(t / eigen_directions(heads_of(layer)[0])[0].gamma)


def _exponent_at(layer: DotProduct, t: float, lengths: list[int]) -> Record:
    radius, (head,) = _radius_for(layer, t), heads_of(layer)
    inputs = [two_cluster(layer, num_tokens=n, radius=radius).x for n in lengths]
    points = [(len(x), top(layer.linearise(x), tol=1e-4).sigma) for x in inputs]
    above = [castin_thm_e_3(head, n, radius) / sigma for n, sigma in points]
    ends = {"above": [above[0], above[-1]], "off": off_line(points)}
    return {"radius": radius, "slope": slope_of(points), "sigma": points[-1][1], **ends}


def _largest_n(layer: DotProduct, t: float, lengths: list[int]) -> Record:
    radius = _radius_for(layer, t)
    found = (weighted_two_atoms(layer, radius=radius, num_tokens=n) for n in lengths)
    sigma, n = max((one.sigma, one.num_tokens) for one in found)
    return {"n": n, "sigma": sigma}
