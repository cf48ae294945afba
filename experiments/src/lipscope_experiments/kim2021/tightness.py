"""One head of L2 attention of width one: its bound, the closed form, the best input found."""

from __future__ import annotations

import functools

import torch

from lipscope import Attention, L2Attention
from lipscope.charts import Panel
from lipscope.linalg import infinity_norm
from lipscope.pages import number
from lipscope.theorems import kim_thm_3_2_infinity, tight_input, tight_value
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import Record, curve
from lipscope_experiments.simple_layers import eye

_DENSE = 1001  # up to here the whole Jacobian is formed
_MANY_STARTS = 11


@experiment("kim2021/tightness", reads_text=False)
def tightness(study: Study) -> None:
    """The Lipschitz Constant of Self-Attention: tightness of the infinity-norm bound."""
    few, many = [3, 5, 11, 101, 10001], [3, 5, 11, 51, 101, 301, 1001, 10001]
    sizes = [*study.pick(few, many), 100001, 1000001]
    keys = []
    for n in sizes:  # each step forms the dense Jacobian of every start
        restarts, steps = study.pick((6, 100), (50 if n <= _MANY_STARTS else 8, 300))
        keys.append({"n": n, "restarts": restarts, "steps": steps})
    found = study.values("tightness", keys, functools.partial(_bound_and_best, study.pick(11, 51)))
    series = (
        curve("upper bound, Theorem 3.2", found, "n", "bound"),
        curve("closed form at the opposed input", found, "n", "closed"),
        curve("measured there", found, "n", "measured", "points"),
        curve("best found by ascent", found, "n", "best", "points"),
    )
    ratio = curve("ratio", found, "n", lambda r: r["bound"] / r["closed"])
    x = "number of tokens N"
    panels = [
        Panel("infinity norm of the Jacobian", series, x, "norm", log_y=False),
        Panel("bound divided by the closed form", (ratio,), x, "ratio", log_y=False),
    ]
    study.draw("tightness", "L2 attention against its infinity-norm bound", panels)
    last = found[-1]
    gap = max(r["bound"] - r["closed"] for r in found)
    error = max(abs(r["measured"] / r["closed"] - 1) for r in found if r["measured"])
    above = [r["best"] / r["closed"] for r in found if r["best"]]
    inside = all(r["best"] <= r["bound"] for r in found if r["best"])
    study.claim(
        "asymptotic tightness in the infinity norm",
        "empirical evidence of it (abstract); by optimisation over inputs",
        f"bound / closed form falls to {number(last['bound'] / last['closed'])} at "
        f"N = {last['n']:,}; their difference is at most {number(gap)}",
    )
    study.claim(
        "closed form of the norm at the opposed input",
        "4 φ⁻¹ - 1 + 2 / (1 + φ⁻¹), φ⁻¹ = φ⁻¹(N-1) (derived here)",
        f"equal to the measured norm to {error:.1e}",
    )
    study.claim(
        "best input found by ascent",
        "50 random starts, N to 1000 (as recalled from the authors' reply to reviewers)",
        f"best found / closed form {min(above):.4f} to {max(above):.4f}; "
        + ("never above the bound" if inside else "ABOVE THE BOUND"),
    )
    columns = {"N": "n", "upper bound": "bound", "closed form": "closed"}
    columns |= {"measured there": "measured", "best found": "best"}
    lines = [(*(r[key] for key in columns.values()), r["bound"] / r["closed"]) for r in found]
    study.table("One head of width one, unit weights", lines, (*columns, "bound / closed"))
    study.remark(
        "The opposed input (one token at the origin, the others at opposite points) is derived "
        "here; the paper's own figure was not seen.",
        f"Ascent by Adam from random starts, of a full run 50 to N = {_MANY_STARTS}, then 8.",
    )


def _bound_and_best(searched: int, n: int, restarts: int, steps: int) -> Record:
    layer, exact, best = L2Attention(eye(1), eye(1)), None, None
    if n <= _DENSE:
        exact = infinity_norm(layer.linearise(tight_input(n))).lower
    if n <= searched:
        best = ascend_infinity(layer, num_tokens=n, restarts=restarts, steps=steps)
    known = {"bound": kim_thm_3_2_infinity(layer, n), "closed": tight_value(n)}
    return known | {"measured": exact, "best": best}


def ascend_infinity(layer: Attention, *, num_tokens: int, restarts: int, steps: int) -> float:
    """The largest ``‖J(X)‖_∞ = max_o sum_i |J_oi|`` that Adam finds from random starts.

    Holds for every layer; a lower value of the supremum, the best over all iterates. The dense
    Jacobian is formed: ``num_tokens · d`` up to some hundreds. Starts are normal, with scales from
    0.1 to 4.
    """
    gen = torch.Generator().manual_seed(0)
    shape = (restarts, num_tokens, layer.query.shape[1])
    scale = torch.linspace(0.1, 4.0, restarts)[:, None, None]
    x = (torch.randn(shape, generator=gen) * scale).to(layer.query).requires_grad_(True)
    adam = torch.optim.Adam([x], lr=0.05)
    best = 0.0
    for _ in range(steps):
        adam.zero_grad()
        dense = torch.func.vmap(torch.func.jacrev(layer))(x)
        values = dense.reshape(restarts, -1, x[0].numel()).abs().sum(-1).amax(-1)
        best = max(best, float(values.detach().nan_to_num(nan=0.0).max()))
        (-values.sum()).backward()
        adam.step()
    return best
