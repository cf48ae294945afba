"""How close L2 attention comes to its infinity-norm bound: bound, closed form, best found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipscope import Attention, L2Attention
from lipscope.attacks import check_size
from lipscope.charts import Panel, Series
from lipscope.pages import number
from lipscope.theorems import infinity_norm, kim_thm_3_2_infinity, tight_input, tight_value
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table

_DENSE = 1001  # up to here the whole Jacobian is formed

_MANY_STARTS = 11


@experiment(
    "kim2021/tightness",
    title="The Lipschitz Constant of Self-Attention: tightness of the infinity-norm bound",
    cite="kim2021",
    reads_text=False,
)
def tightness(study: Study) -> Findings:
    """One head of width one with unit weights, an odd number N of tokens."""
    sizes = study.pick([3, 5, 11, 101, 10001], [3, 5, 11, 51, 101, 301, 1001, 10001])
    sizes = sorted({*sizes, 100001, 1000001})
    found = study.values("tightness", [_job(study, n) for n in sizes])
    _draw(study, found)
    return _findings(found)


def _job(study: Study, n: int) -> ValueJob:
    searched = n <= study.pick(11, 51)
    # Each step forms the dense Jacobian of every start.
    restarts, steps = study.pick((6, 100), (50 if n <= _MANY_STARTS else 8, 300))

    def compute() -> Record:
        one = torch.ones(1, 1, dtype=torch.float64)
        layer = L2Attention(one, one)
        exact = best = None
        if n <= _DENSE:
            exact = infinity_norm(layer.linearise(tight_input(n))).lower
        if searched:
            best = ascend_infinity(layer, num_tokens=n, restarts=restarts, steps=steps)
        return {
            "bound": kim_thm_3_2_infinity(layer, n),
            "closed": tight_value(n),
            "measured": exact,
            "best": best,
        }

    return {"n": n, "restarts": restarts, "steps": steps}, compute


def _draw(study: Study, found: list[Record]) -> None:
    def curve(name: str, key: str, kind: Any = "line") -> Series:
        return Series(name, tuple((r["n"], r[key]) for r in found if r[key] is not None), kind)

    norms = Panel(
        "infinity norm of the Jacobian",
        (
            curve("upper bound, Theorem 3.2", "bound"),
            curve("closed form at the opposed input", "closed"),
            curve("measured there", "measured", "points"),
            curve("best found by ascent", "best", "points"),
        ),
        x="number of tokens N",
        y="norm",
        log_y=False,
    )
    ratio = tuple((r["n"], r["bound"] / r["closed"]) for r in found)
    shares = Panel(
        "bound divided by the closed form",
        (Series("ratio", ratio),),
        x="number of tokens N",
        y="ratio",
        log_y=False,
    )
    study.draw("tightness", "L2 attention against its infinity-norm bound", [norms, shares])


def _findings(found: list[Record]) -> Findings:
    last = found[-1]
    gap = max(r["bound"] - r["closed"] for r in found)
    error = max(abs(r["measured"] / r["closed"] - 1) for r in found if r["measured"])
    above = [r["best"] / r["closed"] for r in found if r["best"]]
    inside = all(r["best"] <= r["bound"] for r in found if r["best"])
    lines = tuple(
        (
            str(r["n"]),
            *(number(r[key]) for key in ("bound", "closed", "measured", "best")),
            number(r["bound"] / r["closed"]),
        )
        for r in found
    )
    columns = ("N", "upper bound", "closed form", "measured there", "best found", "bound / closed")
    return Findings(
        (
            Claim(
                "asymptotic tightness in the infinity norm",
                "empirical evidence of it (abstract); by optimisation over inputs",
                f"bound / closed form falls to {number(last['bound'] / last['closed'])} at "
                f"N = {last['n']:,}; their difference is at most {number(gap)}",
            ),
            Claim(
                "closed form of the norm at the opposed input",
                "4 φ⁻¹ - 1 + 2 / (1 + φ⁻¹), φ⁻¹ = φ⁻¹(N-1) (derived here)",
                f"equal to the measured norm to {error:.1e}",
            ),
            Claim(
                "best input found by ascent",
                "50 random starts, N to 1000 (as recalled from the authors' reply to reviewers)",
                f"best found / closed form {min(above):.4f} to {max(above):.4f}; "
                + ("never above the bound" if inside else "ABOVE THE BOUND"),
            ),
        ),
        (Table("One head of width one, unit weights", columns, lines),),
        (
            "The opposed input (one token at the origin, the others at opposite points) is derived "
            "here; the paper's own figure was not seen.",
            f"Ascent by Adam from random starts, of a full run 50 to N = {_MANY_STARTS}, then 8.",
        ),
    )


# --- inputs on which the infinity norm of the Jacobian is large, found by gradient ascent ---

_RATE = 0.05
_SPREADS = 4.0  # random starts have entries up to this many standard deviations of scale


def ascend_infinity(
    layer: Attention, *, num_tokens: int, restarts: int = 50, steps: int = 300, seed: int = 0
) -> float:
    """The largest ``‖J(X)‖_∞ = max_o sum_i |J_oi|`` that Adam finds from random starts.

    Holds for every layer; a lower value of the supremum, the best over all iterates. The dense
    Jacobian is formed: ``num_tokens · d`` up to some hundreds.

    Args:
        layer: The layer.
        num_tokens: Number of tokens.
        restarts: Random starts, normal with scales from 0.1 to 4.
        steps: Steps of each.
        seed: Of the starts.

    Returns:
        The largest value.

    Raises:
        InputError: For no tokens.
    """
    check_size(num_tokens, 1.0)
    gen = torch.Generator().manual_seed(seed)
    shape = (restarts, num_tokens, layer.query.shape[1])
    scale = torch.linspace(0.1, _SPREADS, restarts)[:, None, None]
    x = (torch.randn(shape, generator=gen) * scale).to(layer.query).requires_grad_(True)
    adam = torch.optim.Adam([x], lr=_RATE)
    best = 0.0
    for _ in range(steps):
        adam.zero_grad()
        values = _norms(layer, x)
        best = max(best, float(values.detach().nan_to_num(nan=0.0).max()))
        (-values.sum()).backward()
        adam.step()
    return best


def _norms(layer: Attention, x: Tensor) -> Tensor:
    """``‖J‖_∞`` of each input of a batch, differentiable."""
    size = x.shape[1] * x.shape[2]
    dense = torch.func.vmap(torch.func.jacrev(layer))(x)
    return dense.reshape(len(x), -1, size).abs().sum(-1).amax(-1)
