"""Figure 3, in one dimension, ``A = V = 1``: a token at 0, the others at ± R."""

from __future__ import annotations

from lipscope import DotProduct
from lipscope.attacks import quadratic
from lipscope.charts import Panel
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, curve, grouped, level
from lipscope_experiments.simple_layers import eye, top


@experiment("castin2024/figure3", reads_text=False)
def figure3(study: Study) -> None:
    """How Smooth Is Attention?, Figure 3: quadratic growth with the radius."""
    radii = [0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0]
    sizes = study.pick([3, 9, 33], [3, 4, 9, 10, 33, 34, 129])
    found = study.values("figure3", grid(n=sizes, radius=radii), _sigma_at)
    by_size = dict(grouped(found, "n"))
    series = [curve(f"n = {n}", by_size[n][1:], "radius", "share") for n in sizes if n % 2]
    one = level("σ = R²", 1.0, (radii[1], radii[-1]))
    panel = Panel("A = V = 1, d = 1", (*series, one), x="radius R", y="sigma / R²", log_y=False)
    study.draw("figure3", "A token at the origin, the others at ± R", [panel])
    slopes = [slope_of((r["radius"], r["sigma"]) for r in mine[-4:]) for mine in by_size.values()]
    odd = {n: mine[-1]["share"] for n, mine in by_size.items() if n % 2}
    error = max(abs(share * n / (n - 1) - 1) for n, share in odd.items())
    found_slopes = f"{min(slopes):.4f} to {max(slopes):.4f}"
    study.claim("exponent of sigma in R, R from 5 on", "2 (Appendix C.7)", found_slopes)
    study.claim(
        "sigma / R² at R = 30, odd n",
        "tends to (n-1)/n, “a constant factor that is close to 1”",
        f"(n-1)/n to {error:.1e}: "
        + ", ".join(f"{share:.4f} (n = {n})" for n, share in odd.items()),
    )
    study.table(
        "Sigma / R²",
        tuple((str(n), *(number(r["share"]) for r in mine)) for n, mine in by_size.items()),
        ("n", *(f"R = {radius:g}" for radius in radii)),
    )
    study.remark("For even n one token has no partner on the other side.")


def _sigma_at(n: int, radius: float) -> Record:
    layer = DotProduct(eye(1), eye(1), eye(1))
    x = quadratic(layer, num_tokens=n, radius=radius).x
    found = top(layer.linearise(x), tol=1e-8)
    return {"sigma": found.sigma, "upper": found.upper, "share": found.sigma / radius**2}
