"""Figure 3: quadratic growth with the radius."""

from __future__ import annotations

import torch

from lipscope import DotProduct, top_singular
from lipscope.attacks import quadratic
from lipscope.charts import Panel, Series
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table


@experiment(
    "castin2024/figure3",
    title="How Smooth Is Attention?, Figure 3: quadratic growth with the radius",
    cite="castin2024",
    reads_text=False,
)
def figure3(study: Study) -> Findings:
    """One dimension, ``A = V = 1``: a token at 0, the others at ± R."""
    radii = [0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0]
    sizes = study.pick([3, 9, 33], [3, 4, 9, 10, 33, 34, 129])
    found = study.values("figure3", [_job(n, radius) for n in sizes for radius in radii])
    by_size = {n: [r for r in found if r["n"] == n] for n in sizes}
    curves = {n: tuple((r["radius"], r["sigma"]) for r in mine) for n, mine in by_size.items()}
    shares = {n: [(r["radius"], r["share"]) for r in mine[1:]] for n, mine in by_size.items()}
    series = [Series(f"n = {n}", tuple(curve)) for n, curve in shares.items() if n % 2]
    one = Series("σ = R²", ((radii[1], 1.0), (radii[-1], 1.0)), "dashes")
    panel = Panel("A = V = 1, d = 1", (*series, one), x="radius R", y="sigma / R²", log_y=False)
    study.draw("figure3", "A token at the origin, the others at ± R", [panel])
    slopes = [slope_of(curve[-4:]) for curve in curves.values()]
    odd = {n: mine[-1]["share"] for n, mine in by_size.items() if n % 2}
    error = max(abs(share * n / (n - 1) - 1) for n, share in odd.items())
    return Findings(
        (
            Claim(
                "exponent of sigma in R, R from 5 on",
                "2 (Appendix C.7)",
                f"{min(slopes):.4f} to {max(slopes):.4f}",
            ),
            Claim(
                "sigma / R² at R = 30, odd n",
                "tends to (n-1)/n, “a constant factor that is close to 1”",
                f"(n-1)/n to {error:.1e}: "
                + ", ".join(f"{share:.4f} (n = {n})" for n, share in odd.items()),
            ),
        ),
        (
            Table(
                "Sigma / R²",
                ("n", *(f"R = {radius:g}" for radius in radii)),
                tuple((str(n), *(number(r["share"]) for r in mine)) for n, mine in by_size.items()),
            ),
        ),
        ("For even n one token has no partner on the other side.",),
    )


def _job(n: int, radius: float) -> ValueJob:
    def compute() -> Record:
        one = torch.ones(1, 1, dtype=torch.float64)
        layer = DotProduct(one, one, one)
        x = quadratic(layer, num_tokens=n, radius=radius).x
        start = torch.Generator().manual_seed(0)
        top = top_singular(layer.linearise(x), tol=1e-8, generator=start)
        return {"sigma": top.sigma, "upper": top.upper, "share": top.sigma / radius**2}

    return {"n": n, "radius": radius}, compute
