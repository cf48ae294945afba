"""The witness that dot-product attention is not Lipschitz: a token at the origin, others far."""

from __future__ import annotations

from typing import Any

import torch

from lipscope import DotProduct, top_singular
from lipscope.attacks import quadratic
from lipscope.charts import Panel, Series, power_law
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table
from lipscope_experiments.kim2021.zero_token import proof_steps

_TOKENS = 9


@experiment(
    "witness",
    title="Dot-product attention is not Lipschitz: the witness in closed form",
    cite="kim2021",
    reads_text=False,
)
def witness(study: Study) -> Findings:
    """Sigma of one random head at (0, R u, -R u, …) against R, and every step of the proof."""
    radii = [10.0 ** (k / 4) for k in range(-4, study.pick(9, 17))]
    found = study.values("witness", [_job(radius) for radius in radii])
    steps = study.values("steps", [_step_job(seed) for seed in range(study.pick(5, 50))])
    _draw(study, found)
    large = [(r["radius"], r["sigma"]) for r in found if r["radius"] >= 10]
    names = [name for name in steps[0] if name != "seed"]
    worst = {name: max(step[name] for step in steps) for name in names}
    return Findings(
        (
            Claim(
                "sigma against R",
                "not Lipschitz: sigma is unbounded (Theorem 3.1); like R² (derived here)",
                f"exponent {slope_of(large):.4f} from R = 10 on; sigma = "
                f"{number(found[-1]['sigma'])} at R = {number(found[-1]['radius'])}",
            ),
            Claim(
                "closed form",
                "sigma ≥ ‖V (I/n + C A)‖ at the origin (derived here)",
                f"sigma / closed form {_ratio(found, min)} to {_ratio(found, max)}",
            ),
            Claim(
                "every step of the proof",
                "each inequality at random heads; the last step is derived here",
                f"largest relative error {max(worst.values()):.1e} over {len(steps)} random heads",
            ),
        ),
        (
            Table(
                f"One random head, n = {_TOKENS}",
                ("R", "sigma", "upper", "closed form", "sigma / R²"),
                tuple(
                    (
                        number(r["radius"], 3),
                        number(r["sigma"]),
                        number(r["upper"]),
                        number(r["closed"]),
                        number(r["sigma"] / r["radius"] ** 2),
                    )
                    for r in found
                ),
            ),
            Table(
                "Steps of the proof",
                ("step", "largest relative error"),
                tuple((name, f"{error:.1e}") for name, error in worst.items()),
            ),
        ),
        ("The note was read as a draft that ends before its last step.",),
    )


def _head(seed: int) -> DotProduct:
    gen = torch.Generator().manual_seed(seed)
    return DotProduct(*(torch.randn(4, 4, generator=gen, dtype=torch.float64) for _ in range(3)))


def _job(radius: float) -> ValueJob:
    def compute() -> Record:
        layer = _head(0)
        built = quadratic(layer, num_tokens=_TOKENS, radius=radius)
        start = torch.Generator().manual_seed(1)
        top = top_singular(layer.linearise(built.x), tol=1e-6, generator=start)
        return {"sigma": top.sigma, "upper": top.upper, "closed": built.predicted}

    return {"radius": radius, "n": _TOKENS}, compute


def _step_job(seed: int) -> ValueJob:
    def compute() -> Record:
        gen = torch.Generator().manual_seed(1000 + seed)
        x, e = (torch.randn(_TOKENS, 4, generator=gen, dtype=torch.float64) for _ in range(2))
        x[2] = 0.0
        return proof_steps(_head(seed), x, e, 2)

    return {"seed": seed}, compute


def _draw(study: Study, found: list[Record]) -> None:
    curve = tuple((r["radius"], r["sigma"]) for r in found)
    closed = tuple((r["radius"], r["closed"]) for r in found)
    large = [(r, s) for r, s in curve if r >= 10]
    panel = Panel(
        f"one random head, n = {_TOKENS}",
        (
            Series("sigma", curve, "points"),
            Series("closed form", closed),
            power_law(large, 2.0, "~ R²"),
        ),
        x="radius R",
    )
    study.draw("witness", "A token at the origin, the others at ± R u", [panel])


def _ratio(found: list[Record], pick: Any) -> str:
    return f"{pick(r['sigma'] / r['closed'] for r in found):.4f}"
