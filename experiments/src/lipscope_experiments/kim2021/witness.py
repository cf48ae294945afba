"""The witness that dot-product attention is not Lipschitz: a token at the origin, others far."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import DotProduct, InputError, top_singular
from lipscope.attacks import quadratic
from lipscope.charts import Panel, Series, power_law
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table

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


# --- the steps of the proof ---


def proof_steps(
    layer: DotProduct, x: Float[Tensor, "n d"], e: Float[Tensor, "n d"], row: int
) -> dict[str, float]:
    """Every step of the proof that attention is not Lipschitz, as a relative error.

    For ``x_row = 0``: the row's logits are 0, its weights ``1/n``, the derivative of the
    softmax there ``I/n - 1 1^T/n^2``, and so the row of the output moves along ``E`` by
    ``V (C A e_row + mean_j e_j)`` with ``C`` the covariance of the tokens, which grows like
    ``R^2`` as the other tokens do.

    Holds for one unmasked head without biases.

    Args:
        layer: One head.
        x: Tokens, the one in ``row`` at the origin.
        e: Direction ``E``.
        row: Which token is at the origin.

    Returns:
        For each step, the largest deviation of what it says from automatic differentiation or
        direct evaluation, relative to the largest entry.

    Raises:
        InputError: If the layer or the tokens are not as asked.

    Source: a note on scaled dot-product attention, of which a draft without its last step was
    read; the last step is derived here.
    """
    if layer.num_heads != 1 or layer.causal or layer.mask is not None:
        raise InputError("`layer` should be one unmasked head. Found another layer.")
    if bool(x[row].any()):
        raise InputError(f"Token {row} of `x` should be zero. Found another vector.")
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
        "chain rule: dAtt = M X W_V + softmax(P) X' W_V": _error(
            (through @ x + weights @ e) @ layer.value.T, exact
        ),
        "the logits of the zero token vanish": float(logits[row].abs().max()),
        "its weights are 1/n": _error(weights[row], torch.full_like(weights[row], 1 / n)),
        "softmax'(0) = I/n - 11'/n²": _error(slope, uniform),
        "its logits move by X v, v = A e": _error(moved[row], x @ a @ e[row]),
        "its output moves by V (C A e + mean e) (derived here)": _error(last, exact[row]),
    }


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
