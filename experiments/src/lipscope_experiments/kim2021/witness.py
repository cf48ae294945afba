"""Sigma of one random head at (0, R u, -R u, …) against R, and every step of the proof."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope import DotProduct
from lipscope.attacks import quadratic
from lipscope.charts import Panel, power_law
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, curve
from lipscope_experiments.simple_layers import normal, top

_TOKENS = 9


@experiment("witness", cite="kim2021", reads_text=False)
def witness(study: Study) -> None:
    """Dot-product attention is not Lipschitz: the witness in closed form."""
    radii = [10.0 ** (k / 4) for k in range(-4, study.pick(9, 17))]
    found = study.values("witness", grid(radius=radii, n=[_TOKENS]), _sigma_beside)
    steps = study.values("steps", grid(seed=range(study.pick(5, 50))), proof_steps)
    series = curve("sigma", found, "radius", "sigma", "points")
    large = [point for point in series.points if point[0] >= 10]
    shown = (series, curve("closed form", found, "radius", "closed"), power_law(large, 2.0, "~ R²"))
    panel = Panel(f"one random head, n = {_TOKENS}", shown, x="radius R")
    study.draw("witness", "A token at the origin, the others at ± R u", [panel])
    ratios = [r["sigma"] / r["closed"] for r in found]
    worst = {name: max(step[name] for step in steps) for name in steps[0] if name != "seed"}
    study.claim(
        "sigma against R",
        "not Lipschitz: sigma is unbounded (Theorem 3.1); like R² (derived here)",
        f"exponent {slope_of(large):.4f} from R = 10 on; sigma = "
        f"{number(found[-1]['sigma'])} at R = {number(found[-1]['radius'])}",
    )
    study.claim(
        "closed form",
        "sigma ≥ ‖V (I/n + C A)‖ at the origin (derived here)",
        f"sigma / closed form {min(ratios):.4f} to {max(ratios):.4f}",
    )
    study.claim(
        "every step of the proof",
        "each inequality at random heads; the last step is derived here",
        f"largest relative error {max(worst.values()):.1e} over {len(steps)} random heads",
    )
    lines = [
        (number(at := r["radius"], 3), r["sigma"], r["upper"], r["closed"], r["sigma"] / at**2)
        for r in found
    ]
    columns = ("R", "sigma", "upper", "closed form", "sigma / R²")
    study.table(f"One random head, n = {_TOKENS}", lines, columns)
    lines = [(name, f"{error:.1e}") for name, error in worst.items()]
    study.table("Steps of the proof", lines, ("step", "largest relative error"))
    study.remark("The note was read as a draft that ends before its last step.")


def _random_head(seed: int) -> DotProduct:
    gen = torch.Generator().manual_seed(seed)
    return DotProduct(*normal(gen, 3, 4, 4))


def _sigma_beside(radius: float, n: int) -> Record:
    layer = _random_head(0)
    built = quadratic(layer, num_tokens=n, radius=radius)
    found = top(layer.linearise(built.x), 1, tol=1e-6)
    return {"sigma": found.sigma, "upper": found.upper, "closed": built.predicted}


def proof_steps(seed: int) -> Record:
    """Every step of the proof that attention is not Lipschitz, as a relative error.

    For ``x_row = 0``: the row's logits are 0, its weights ``1/n``, the derivative of the
    softmax there ``I/n - 1 1^T/n^2``, and so the row of the output moves along ``E`` by
    ``V (C A e_row + mean_j e_j)`` with ``C`` the covariance of the tokens, which grows like
    ``R^2`` as the other tokens do. The largest deviation of each from automatic differentiation or
    direct evaluation, relative to the largest entry; of one random head, tokens and moves.

    Source: a note on scaled dot-product attention; its last step is derived here.
    """
    layer, gen, row = _random_head(seed), torch.Generator().manual_seed(1000 + seed), 2
    x, e = (normal(gen, _TOKENS, 4) for _ in range(2))
    x[row] = 0.0
    n = len(x)
    a = layer.scale * layer.key.T @ layer.query  # logits <A x_i, x_j>
    logits, moved = x @ a.T @ x.T, e @ a.T @ x.T + x @ a.T @ e.T
    weights = torch.softmax(logits, dim=-1)
    exact = torch.func.jvp(layer, (x,), (e,))[1]
    slope = torch.func.jacrev(lambda z: torch.softmax(z, dim=-1))(torch.zeros(n).to(x))
    uniform = torch.eye(n).to(x) / n - torch.ones(n, n).to(x) / n**2
    through = torch.func.jvp(lambda s: torch.softmax(s, dim=-1), (logits,), (moved,))[1]
    spread = torch.cov(x.T, correction=0)
    last = layer.value @ (spread @ a @ e[row] + e.mean(0))
    return {
        "chain rule: dAtt = M X W_V + softmax(P) X' W_V": _relative_error(
            (through @ x + weights @ e) @ layer.value.T, exact
        ),
        "the logits of the zero token vanish": float(logits[row].abs().max()),
        "its weights are 1/n": _relative_error(weights[row], torch.full_like(weights[row], 1 / n)),
        "softmax'(0) = I/n - 11'/n²": _relative_error(slope, uniform),
        "its logits move by X v, v = A e": _relative_error(moved[row], x @ a @ e[row]),
        "its output moves by V (C A e + mean e) (derived here)": _relative_error(last, exact[row]),
    }


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
