"""Normal laws that flow through attention: closures beside exact solutions, Euler, particles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from torch import Tensor

from lipscope import Attention, DotProduct, L2Attention, SinkhornAttention
from lipscope.charts import Panel, Scene, Series
from lipscope.dynamics import closure, evolve, gaussian_flow
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, average, grouped, line, share
from lipscope_experiments.simple_layers import eye, multiple, normal

# Public code: Euler's steps, projected to semidefinite matrices; blown up where the trace
# exceeds 1,000, at rest where the velocity is below 1e-4; directions above 0.1 count.
_STEP, _BLOWN, _REST, _COUNTS, _MOST = 0.01, 1e3, 1e-4, 0.1, 60_000
_STEPS = {3: 0.09, 4: 0.05, 5: 0.02}  # its steps by dimension, for ranks
_OFF = 0.05  # what is called wrong
_FAR = 1e8  # a time at which limits are nearly reached
_SCALES = (0.25, 1.0)  # of A in one dimension: a σ² is twice as much at the end


@experiment("castin2024/gaussian", cite="castin2025", reads_text=False)
def gaussian(study: Study) -> None:
    """Normal laws under attention: blow-up, rank collapse, and particles."""
    pick = study.pick
    blown = study.values("blow-up", grid(d=(1, 2, 4, 8), seed=range(pick(10, 100))), _blow_up)
    ranks = study.values("ranks", grid(d=_STEPS, seed=range(pick(4, 30))), _rank)
    drawn = grid(kind=_LAYERS, d=(3, 4), seed=range(pick(5, 20)))
    limits = study.values("limits", [one for one in drawn if one["kind"] != "L2"], _limit)
    sizes = (100, 1000, 10_000, 100_000)[: pick(3, 4)]
    few, seeds = (100, 400)[: pick(1, 2)], range(pick(4, 8))
    keys = grid(a=_SCALES, n=sizes, seed=seeds)
    particles = study.values("particles", keys, _particles_on_a_line)
    plane = study.values("plane", grid(kind=_LAYERS, n=few, seed=seeds), _particles_in_the_plane)
    _draw_laws(study, particles)
    _animation(study)
    _of_blow_up(study, blown)
    _of_ranks(study, ranks)
    for a, mine in grouped(particles, "a"):
        errors = ((n, average([r["error"] for r in own])) for n, own in grouped(mine, "n"))
        words = "; ".join(f"{n:,}: {error}" for n, error in errors)
        slope = slope_of((r["n"], r["error"]) for r in mine)
        study.claim(
            f"particles against the closure, d = 1, aσ² from {a:g} to {2 * a:g}: variance",
            "like 1 / √N (sampling), as long as e^(a x y) is averaged well by N tokens",
            f"relative error {words}; like N^{number(slope, 2)}",
        )

    lines = []
    for (kind, d), mine in grouped(limits, "kind", "d"):
        ends = [r["ranks"] for r in mine if r["status"] == "done"]
        low = share(sum(rank <= (d + 1) // 2 for rank in ends), len(ends)) if ends else "–"
        blown_up = sum(r["status"] == "blow-up" for r in mine)
        lines.append((kind, d, share(blown_up, len(mine)), low))
    title = "V positive semidefinite, K = -Q: eigenvalues above 1 % of the largest"
    columns = ("layer", "d", "blow-up", "others: rank at most ⌈d/2⌉ at t = 10⁴")
    study.table(title, lines, columns)
    lines = [
        (kind, f"{n:,}", *(average([r[key] for r in mine]) for key in ("mean", "cov")))
        for (kind, n), mine in grouped(plane, "kind", "n")
    ]
    title = "Particles against the closure in the plane, t = 0.5: relative errors"
    study.table(title, lines, ("layer", "particles", "mean", "covariance"))
    study.remark(
        "Blow-up: V = I, A normal, so that Σ⁻¹ = Σ₀⁻¹ − t(A + Aᵀ) exactly; starts whose "
        "largest eigenvalue of Σ₀(A + Aᵀ) is positive.",
        "Ranks: V = I, K = −Q of rank ⌊d/2⌋, as in public code; the limit of Σ has the rank of "
        "the kernel of Q. Counted as there: eigenvalues above 0.1 once |Σ'| < 1e-4.",
        "Euler's steps: those of public code, written anew: fixed, each projected to "
        "semidefinite matrices.",
        "Intervals are 95 % over independent draws (Student; shares: Clopper–Pearson).",
    )


def _euler_steps(cov: Tensor, a: Tensor, step: float) -> Iterator[tuple[np.ndarray, float]]:
    """Euler's steps for V = I, projected: eigenvalues, and the norm of the velocity before."""
    s, both = cov.numpy(), (a + a.T).numpy()
    while True:
        rate = s @ both @ s
        s = s + step * rate
        values, vectors = np.linalg.eigh((s + s.T) / 2)
        values[values < 0] = 1e-14
        s = vectors * values @ vectors.T
        yield values, float(np.linalg.norm(rate))


def _euler(cov: Tensor, a: Tensor, step: float, rest: float = 0.0) -> tuple[Tensor, int, bool]:
    """Until they rest or blow up: eigenvalues, how many steps, whether the latter."""
    values, count = np.zeros(0), 0
    for count, (values, rate) in enumerate(_euler_steps(cov, a, step), 1):
        if rate < rest or values.sum() > _BLOWN or count == _MOST:
            break
    return torch.from_numpy(values), count, bool(values.sum() > _BLOWN)


def _blow_up(d: int, seed: int) -> Record:
    a, cov, first = next(one for one in _blow_up_starts(d, seed) if one[2] > 0.05)  # by t = 20
    exact = 1 / first
    layer = DotProduct(a, eye(d), eye(d), scale=1.0)
    found = gaussian_flow(layer, torch.zeros(d), cov, [2 * exact])
    _, count, blown = _euler(cov, a, _STEP)
    told = None if found.blow_up is None else found.blow_up / exact - 1
    return {"exact": exact, "told": told, "euler": count * _STEP / exact - 1 if blown else None}


def _blow_up_starts(d: int, seed: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """``A``, a start, and one over the time of its blow-up, if it has one."""
    for turn in itertools.count():
        a = normal(f"blow|{d}|{seed}|{turn}", d, d) / d**0.5
        cov = covariance(f"law|{d}|{seed}|{turn}", d) / d
        yield a, cov, float(torch.linalg.eigvals(cov @ (a + a.T)).real.max())


def _of_blow_up(study: Study, found: Sequence[Record]) -> None:
    met = [r for r in found if r["told"] is not None]
    late = [r for r in found if r["euler"] is None or abs(r["euler"]) > _OFF]
    off = [r["euler"] for r in found if r["euler"] is not None]
    study.claim(
        "time of the blow-up, V = I, any A (d = 1, 2, 4, 8)",
        "1 / λ_max(Σ₀(A + Aᵀ)) (derived here; d = 1: 1 / (2vaσ₀²))",
        f"met in {share(len(met), len(found))}; at most {max(abs(r['told']) for r in met):.0e} off",
    )
    study.claim(
        f"the same by Euler's steps of {_STEP:g} until the trace exceeds {_BLOWN:g}",
        "as in public code",
        f"more than {_OFF:.0%} off in {share(len(late), len(found))}; "
        f"relative error {average(off)} in the mean, {number(max(off), 3)} at most",
    )
    lines = []
    for d, mine in grouped(found, "d"):
        error = max(abs(r["told"]) for r in mine if r["told"] is not None)
        euler = average([r["euler"] for r in mine if r["euler"] is not None])
        lines.append((d, average([r["exact"] for r in mine]), f"{error:.0e}", euler))
    columns = ("d", "time", "largest error, adaptive", "mean error, Euler")
    study.table("Times of blow-up, relative errors", lines, columns)


def _rank(d: int, seed: int) -> Record:
    q, cov = normal(f"rank|{d}|{seed}", d // 2, d), covariance(f"start|{d}|{seed}", d)
    layer = DotProduct(q, -q, eye(d), scale=d**-0.5)
    a = -(q.T @ q) * d**-0.5
    stepped, count, _ = _euler(cov, a, _STEPS[d], _REST)
    flow = gaussian_flow(layer, torch.zeros(d), cov, [count * _STEPS[d], _FAR], rtol=1e-6)
    free = torch.linalg.svd(q)[2][d // 2 :].T  # the kernel of q
    limit = free @ torch.linalg.inv(free.T @ torch.linalg.solve(cov, free)) @ free.T
    size = float(torch.linalg.matrix_norm(limit, 2))
    return {
        "kernel": free.shape[1],
        "rank": flow.ranks(1e-6)[-1],
        "off": float(torch.linalg.matrix_norm(flow.covariances[-1] - limit, 2)) / size,
        "counted": int((flow.eigenvalues[0] > _COUNTS).sum()),
        "euler": int((stepped > _COUNTS).sum()),
        "euler_off": abs(float(stepped[-1]) / size - 1),
        "steps": count,
        "evaluations": flow.evaluations,
    }


def _of_ranks(study: Study, found: Sequence[Record]) -> None:
    right = sum(r["rank"] == r["kernel"] for r in found)
    lost = sum(r["euler"] < r["counted"] for r in found)
    off = sum(r["euler_off"] > _OFF for r in found)
    study.claim(
        "rank of the limit, V = I, K = -Q of rank ⌊d/2⌋, d = 3, 4, 5",
        "dim ker Q = ⌈d/2⌉ (derived here; at most that in the histograms of [castin2025])",
        f"equal in {share(right, len(found))}; limits at most "
        f"{max(r['off'] for r in found):.0e} from the exact ones",
    )
    study.claim(
        "the same by projected Euler steps (0.09, 0.05, 0.02)",
        "as in public code",
        f"directions lost in {share(lost, len(found))}, the largest eigenvalue more than "
        f"{_OFF:.0%} off in {share(off, len(found))}; "
        f"{average([float(r['steps']) for r in found])} steps, where the adaptive flow asks "
        f"{average([float(r['evaluations']) for r in found])} times, to t = {_FAR:g}",
    )
    kinds = {"exact limit": "kernel", "adaptive": "counted", "Euler": "euler"}
    study.table(
        "Ranks: of the exact limit, and eigenvalues above 0.1 at the same time",
        [
            (d, name, *(sum(r[key] == k for r in mine) for k in range(d + 1)), *["–"] * (5 - d))
            for d, mine in grouped(found, "d")
            for name, key in kinds.items()
        ],
        ("d", "by", *(f"rank {k}" for k in range(6))),
    )


def _particles_on_a_line(a: float, n: int, seed: int) -> Record:
    """One dimension, half of the way to the blow-up: the variance has doubled then."""
    x = normal(f"line|{n}|{seed}", n, 1)
    end = evolve(_interpolated(multiple(a, 1)), x, [1 / (4 * a)], rtol=1e-6).end
    return {"error": abs(float(end.var(correction=0)) / 2 - 1)}


def _interpolated(layer: Attention, nodes: int = 96) -> Any:
    """The layer on the line at Chebyshev's points, a polynomial in between: n instead of n²."""

    def velocity(x: Tensor) -> Tensor:
        def at(points: np.ndarray) -> np.ndarray:
            return layer(torch.from_numpy(points)[:, None], x)[:, 0].numpy()

        fitted = Chebyshev.interpolate(at, nodes - 1, [float(x.min()), float(x.max())])
        return torch.from_numpy(fitted(x.numpy()))

    return velocity


def _draw_laws(study: Study, particles: Sequence[Record]) -> None:
    times = torch.linspace(0, 0.48, 25)
    flow = gaussian_flow(multiple(1.0, 1), torch.zeros(1), eye(1), times)
    variance = flow.covariances[:, 0, 0].tolist()
    curves = [line("normal law", flow.times.tolist(), variance, "dashes")]
    for n in (100, study.pick(1000, 100_000)):
        x = normal(f"line|{n}|0", n, 1)
        end = evolve(_interpolated(multiple(1.0, 1)), x, times, rtol=1e-5)
        curves.append(line(f"{n:,} tokens", times.tolist(), end.states.var((1, 2)).tolist()))
    near = [
        line(f"A = {a:g}", [r["n"] for r in mine], [r["error"] for r in mine], "points")
        for a, mine in grouped(particles, "a")
    ]
    panels = [
        Panel("A = V = 1: blow-up at t = 1/2", curves, "t", "variance", log_x=False),
        Panel("particles half of the way to it", near, "tokens", "relative error"),
        Panel("K = -Q, d = 3: two eigenvalues stay", _decay(), "t", "eigenvalue of Σ"),
    ]
    study.draw("gaussian", "Normal laws under attention", panels)


def _decay() -> list[Series]:
    """The flow and projected Euler steps from the start of the tests, rank two in the limit."""
    q = torch.tensor([[2.0, 0.0, 0.0]]).double()
    cov = torch.tensor([[6.0, 3.0, 2.0], [3.0, 4.0, 1.0], [2.0, 1.0, 3.0]]).double()
    layer, a = DotProduct(q, -q, eye(3), scale=1.0), -(q.T @ q)
    flow = gaussian_flow(layer, torch.zeros(3), cov, torch.logspace(-2, 2, 41))
    shown = {round(1.25**i) for i in range(32)}
    steps = enumerate(itertools.islice(_euler_steps(cov, a, 0.09), 1111), 1)
    euler = [(0.09 * k, float(v)) for k, (values, _) in steps if k in shown for v in values]
    flows = flow.eigenvalues.T.tolist()
    return [
        *(line("flow", flow.times.tolist(), values) for values in flows),
        Series("Euler, steps of 0.09", [(t, v) for t, v in euler if v > 1e-4], "points"),
    ]


def _animation(study: Study) -> None:
    """Two laws in the plane with 200 tokens each: one loses a direction, the other blows up."""
    cov = torch.tensor([[1.0, 0.4], [0.4, 0.6]]).double()
    q = torch.tensor([[1.0, 0.5]]).double()
    lost = DotProduct(q, -q, eye(2), scale=1.0)
    grown = DotProduct(q, q, eye(2), scale=1.0)
    first = 1 / float(torch.linalg.eigvals(cov @ (2 * q.T @ q)).real.max())
    slow, fast = torch.linspace(0, 1, 41).square() * 40, torch.linspace(0, 0.93 * first, 41)
    scenes = [
        _law_scene("K = -Q: a direction is lost", lost, cov, slow),
        _law_scene("K = Q: blow-up", grown, cov, fast),
    ]
    study.animate("gaussian", "Normal laws in the plane", scenes)


def _law_scene(title: str, layer: DotProduct, cov: Tensor, times: Tensor) -> Scene:
    flow = gaussian_flow(layer, torch.zeros(2), cov, times)
    angle = torch.linspace(0, 2 * math.pi, 90).double()
    circle = 2 * torch.stack([angle.cos(), angle.sin()], -1)
    outline = circle @ torch.linalg.cholesky(flow.covariances).mT
    affine, x = closure(layer), normal("scene", 200, 2)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x))).T  # its covariance is I
    x = x @ torch.linalg.cholesky(cov).T

    def velocity(z: Tensor) -> Tensor:
        return z @ affine(torch.zeros(2), z.T @ z / len(z))[0].T

    states = evolve(velocity, x, times, rtol=1e-6).states
    said = [f"t = {t:.2f}" for t in times.tolist()]
    return Scene(title, states.numpy(), np.zeros(len(x), dtype=int), said, outline.numpy())


def covariance(name: str, d: int) -> Tensor:
    """A covariance: of Wishart's law with d degrees of freedom."""
    return (root := normal(name, d, d)) @ root.T


def _random_layer(kind: str, name: str, d: int) -> Attention:
    heads = 2 if kind == "two heads" else 1
    q, v = normal(name, heads * (d // 2), d), normal(f"{name}|v", d, d)
    value = v.T @ v / d  # positive semidefinite, as in public code
    if kind == "L2":
        return L2Attention(q, value)
    if kind == "two heads":
        values, output = torch.cat([value, value]), torch.cat([eye(d)] * 2, 1) / 2
        return DotProduct(q, -q, values, output, heads=2, scale=d**-0.5)
    of = SinkhornAttention if kind == "Sinkhorn" else DotProduct
    return of(q, -q, value, scale=d**-0.5)


_LAYERS = ("dot product", "two heads", "Sinkhorn", "L2")
"""The last grows exponentially: it has no limit."""


def _limit(kind: str, d: int, seed: int) -> Record:
    """What a law has become at t = 10⁴."""
    name = f"limit|{d}|{seed}"
    layer, cov = _random_layer(kind, name, d), covariance(f"{name}|start", d)
    found = gaussian_flow(layer, torch.zeros(d), cov, [1e4], rtol=1e-6)
    return {"status": found.note or "done", "ranks": found.ranks(1e-2)[-1]}


def _particles_in_the_plane(kind: str, n: int, seed: int) -> Record:
    """Particles beside the closure, as far as t = 1/2."""
    layer = _random_layer(kind, f"plane|{kind}", 2)
    m, cov = 0.5 * normal("plane|m", 2), 0.5 * covariance("plane|law", 2) / 2
    root = torch.linalg.cholesky(cov)
    x = m + normal(f"plane|{n}|{seed}", n, 2) @ root.T
    end = evolve(layer, x, [0.5], rtol=1e-4).end
    flow = gaussian_flow(layer, m, cov, [0.5])
    size = float(flow.covariances[-1].norm())
    return {
        "mean": float((end.mean(0) - flow.means[-1]).norm()) / size**0.5,
        "cov": float((end.T.cov() - flow.covariances[-1]).norm()) / size,
    }
