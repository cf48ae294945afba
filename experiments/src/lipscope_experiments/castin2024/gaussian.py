"""Normal laws that flow through attention: blow-up, rank collapse, particles beside the closure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipscope import Attention, DotProduct, L2Attention, SinkhornAttention
from lipscope.charts import Panel, Scene, Series
from lipscope.dynamics import closure, evolve, gaussian_flow
from lipscope.linalg import start_named
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import (
    Claim,
    Findings,
    Record,
    Table,
    average,
    chosen,
    grouped,
    share,
)

# Public code: Euler's steps, projected to semidefinite matrices; blown up where the trace
# exceeds 1,000, at rest where the velocity is below 1e-4; directions above 0.1 count.
_STEP, _BLOWN, _REST, _COUNTS, _MOST = 0.01, 1e3, 1e-4, 0.1, 60_000
_STEPS = {3: 0.09, 4: 0.05, 5: 0.02}  # its steps by dimension, for ranks
_OFF = 0.05  # what is called wrong
_FAR = 1e8  # a time at which limits are nearly reached
_SCALES = (0.25, 1.0)  # of A in one dimension: a σ² is twice as much at the end


@experiment(
    "castin2024/gaussian",
    title="Normal laws under attention: blow-up, rank collapse, and particles",
    cite="castin2025",
    reads_text=False,
)
def gaussian(study: Study) -> Findings:
    """Closures beside exact solutions, Euler's steps and particles."""
    count = study.pick(10, 100)
    blown = study.values("blow-up", [_blow_job(d, s) for d in (1, 2, 4, 8) for s in range(count)])
    ranks = study.values(
        "ranks", [_rank_job(d, s) for d in _STEPS for s in range(study.pick(4, 30))]
    )
    limits = study.values(
        "limits",
        [limit_job(k, d, s) for k in KINDS for d in (3, 4) for s in range(study.pick(5, 20))],
    )
    sizes = study.pick((100, 1000, 10_000), (100, 1000, 10_000, 100_000))
    seeds, few = range(study.pick(4, 8)), study.pick((100,), (100, 400))
    line = study.values(
        "particles", [_line_job(a, n, s) for a in _SCALES for n in sizes for s in seeds]
    )
    plane = study.values("plane", [plane_job(k, n, s) for k in ALL for n in few for s in seeds])
    _draw(study, line)
    remarks = _animation(study)
    return Findings(
        (*_of_blow_up(blown), *_of_ranks(ranks), *_of_particles(line, sizes)),
        (_blow_table(blown), _rank_table(ranks), limit_table(limits), plane_table(plane)),
        (
            "Blow-up: V = I, A normal, so that Σ⁻¹ = Σ₀⁻¹ − t(A + Aᵀ) exactly; starts whose "
            "largest eigenvalue of Σ₀(A + Aᵀ) is positive.",
            "Ranks: V = I, K = −Q of rank ⌊d/2⌋, as in public code; the limit of Σ has the rank of "
            "the kernel of Q. Counted as there: eigenvalues above 0.1 once |Σ'| < 1e-4.",
            "Euler's steps: those of public code, written anew: fixed, each projected to "
            "semidefinite matrices.",
            "Intervals are 95 % over independent draws (Student; shares: Clopper–Pearson).",
            *remarks,
        ),
    )


def _euler(cov: Tensor, a: Tensor, step: float, rest: float = 0.0) -> tuple[Tensor, int, bool]:
    """Euler's steps for V = I until they rest or blow up: state, how many, whether the latter."""
    s = cov.numpy().copy()
    both = (a + a.T).numpy()
    for count in range(_MOST):
        rate = s @ both @ s
        s = s + step * rate
        values, vectors = np.linalg.eigh((s + s.T) / 2)
        values[values < 0] = 1e-14
        s = vectors * values @ vectors.T
        if np.linalg.norm(rate) < rest or np.trace(s) > _BLOWN:
            return torch.from_numpy(s), count + 1, bool(np.trace(s) > _BLOWN)
    return torch.from_numpy(s), _MOST, False


# --- blow-up, exact for V = I


def _blow_job(d: int, seed: int) -> ValueJob:
    def compute() -> Record:
        a, cov, first = next(one for one in _drawn(d, seed) if one[2] > 0.05)  # by t = 20
        exact = 1 / first
        layer = DotProduct(a, eye(d), eye(d), scale=1.0)
        found = gaussian_flow(layer, torch.zeros(d), cov, [2 * exact])
        _, count, blown = _euler(cov, a, _STEP)
        told = None if found.blow_up is None else found.blow_up / exact - 1
        return {"exact": exact, "told": told, "euler": count * _STEP / exact - 1 if blown else None}

    return {"d": d, "seed": seed}, compute


def _drawn(d: int, seed: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """``A``, a start, and one over the time of its blow-up, if it has one."""
    for turn in itertools.count():
        a = normal(f"blow|{d}|{seed}|{turn}", d, d) / d**0.5
        cov = law(f"law|{d}|{seed}|{turn}", d) / d
        yield a, cov, float(torch.linalg.eigvals(cov @ (a + a.T)).real.max())


def _of_blow_up(found: Sequence[Record]) -> list[Claim]:
    met = [r for r in found if r["told"] is not None]
    late = [r for r in found if r["euler"] is None or abs(r["euler"]) > _OFF]
    off = [r["euler"] for r in found if r["euler"] is not None]
    return [
        Claim(
            "time of the blow-up, V = I, any A (d = 1, 2, 4, 8)",
            "1 / λ_max(Σ₀(A + Aᵀ)) (derived here; d = 1: 1 / (2vaσ₀²))",
            f"met in {share(len(met), len(found))}; at most {max(abs(r['told']) for r in met):.0e} "
            "off",
        ),
        Claim(
            f"the same by Euler's steps of {_STEP:g} until the trace exceeds {_BLOWN:g}",
            "as in public code",
            f"more than {_OFF:.0%} off in {share(len(late), len(found))}; "
            f"relative error {average(off)} in the mean, {number(max(off), 3)} at most",
        ),
    ]


def _blow_table(found: Sequence[Record]) -> Table:
    lines = []
    for d, mine in grouped(found, "d"):
        euler = [r["euler"] for r in mine if r["euler"] is not None]
        told = max(abs(r["told"]) for r in mine if r["told"] is not None)
        lines.append((str(d), average([r["exact"] for r in mine]), f"{told:.0e}", average(euler)))
    columns = ("d", "time", "largest error, adaptive", "mean error, Euler")
    return Table("Times of blow-up, relative errors", columns, tuple(lines))


# --- ranks, exact for V = I


def _rank_job(d: int, seed: int) -> ValueJob:
    def compute() -> Record:
        q, cov = normal(f"rank|{d}|{seed}", d // 2, d), law(f"start|{d}|{seed}", d)
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
            "euler": int((torch.linalg.eigvalsh(stepped) > _COUNTS).sum()),
            "euler_off": abs(float(torch.linalg.eigvalsh(stepped)[-1]) / size - 1),
            "steps": count,
            "evaluations": flow.evaluations,
        }

    return {"d": d, "seed": seed}, compute


def _of_ranks(found: Sequence[Record]) -> list[Claim]:
    right = sum(r["rank"] == r["kernel"] for r in found)
    lost = sum(r["euler"] < r["counted"] for r in found)
    off = sum(r["euler_off"] > _OFF for r in found)
    return [
        Claim(
            "rank of the limit, V = I, K = -Q of rank ⌊d/2⌋, d = 3, 4, 5",
            "dim ker Q = ⌈d/2⌉ (derived here; at most that in the histograms of [castin2025])",
            f"equal in {share(right, len(found))}; limits at most "
            f"{max(r['off'] for r in found):.0e} from the exact ones",
        ),
        Claim(
            "the same by projected Euler steps (0.09, 0.05, 0.02)",
            "as in public code",
            f"directions lost in {share(lost, len(found))}, the largest eigenvalue more than "
            f"{_OFF:.0%} off in {share(off, len(found))}; "
            f"{average([float(r['steps']) for r in found])} steps, where the adaptive flow asks "
            f"{average([float(r['evaluations']) for r in found])} times, to t = {_FAR:g}",
        ),
    ]


def _rank_table(found: Sequence[Record]) -> Table:
    lines = []
    for d, mine in grouped(found, "d"):
        for name, key in (("exact limit", "kernel"), ("adaptive", "counted"), ("Euler", "euler")):
            counts = [sum(r[key] == k for r in mine) for k in range(d + 1)]
            lines.append((str(d), name, *(str(c) for c in counts), *["–"] * (5 - d)))
    columns = ("d", "by", *(f"rank {k}" for k in range(6)))
    title = "Ranks: of the exact limit, and eigenvalues above 0.1 at the same time"
    return Table(title, columns, tuple(lines))


# --- particles beside the closure


def _line_job(a: float, n: int, seed: int) -> ValueJob:
    """One dimension, half of the way to the blow-up: the variance has doubled then."""

    def compute() -> Record:
        x = normal(f"line|{n}|{seed}", n, 1)
        end = evolve(_interpolated(_line(a)), x, [1 / (4 * a)], rtol=1e-6).end
        return {"error": abs(float(end.var(correction=0)) / 2 - 1)}

    return {"a": a, "n": n, "seed": seed}, compute


def _line(a: float) -> DotProduct:
    return DotProduct(a * eye(1), eye(1), eye(1), scale=1.0)


def _interpolated(layer: Attention, nodes: int = 96) -> Any:
    """The layer on the line: asked at Chebyshev's points, polynomials in between.

    ``Γ`` is analytic, so that the error falls geometrically with the points: all particles are
    read, at a cost of n instead of n².
    """
    unit = torch.cos(torch.pi * (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes)

    def velocity(x: Tensor) -> Tensor:
        low, high = x.min(), x.max()
        at = (low + high) / 2 + (high - low) / 2 * unit[:, None]
        values = layer(at, x)[:, 0].numpy()
        fitted = np.polynomial.chebyshev.chebfit(unit.numpy(), values, nodes - 1)
        scaled = ((x[:, 0] - (low + high) / 2) / ((high - low) / 2)).numpy()
        return torch.from_numpy(np.polynomial.chebyshev.chebval(scaled, fitted))[:, None]

    return velocity


def _of_particles(found: Sequence[Record], sizes: Sequence[int]) -> list[Claim]:
    claims = []
    for a in _SCALES:
        mine = [r for r in found if r["a"] == a]
        errors = ((n, average([r["error"] for r in mine if r["n"] == n])) for n in sizes)
        words = "; ".join(f"{n:,}: {error}" for n, error in errors)
        slope = slope_of((r["n"], r["error"]) for r in mine)
        claims.append(
            Claim(
                f"particles against the closure, d = 1, aσ² from {a:g} to {2 * a:g}: variance",
                "like 1 / √N (sampling), as long as e^(a x y) is averaged well by N tokens",
                f"relative error {words}; like N^{number(slope, 2)}",
            )
        )
    return claims


# --- figures


def _draw(study: Study, line: Sequence[Record]) -> None:
    times = torch.linspace(0, 0.48, 25)
    flow = gaussian_flow(_line(1.0), torch.zeros(1), eye(1), times)
    curves = [Series("normal law", _pairs(flow.times, flow.covariances[:, 0, 0]), "dashes")]
    for n in (100, study.pick(1000, 100_000)):
        x = normal(f"line|{n}|0", n, 1)
        end = evolve(_interpolated(_line(1.0)), x, times, rtol=1e-5)
        curves.append(Series(f"{n:,} tokens", _pairs(times, end.states.var((1, 2)))))
    near = tuple(
        Series(f"A = {a:g}", tuple((r["n"], r["error"]) for r in line if r["a"] == a), "points")
        for a in _SCALES
    )
    panels = [
        Panel("A = V = 1: blow-up at t = 1/2", tuple(curves), "t", "variance", log_x=False),
        Panel("particles half of the way to it", near, "tokens", "relative error"),
        Panel("K = -Q, d = 3: two eigenvalues stay", _decay(), "t", "eigenvalue of Σ"),
    ]
    study.draw("gaussian", "Normal laws under attention", panels)


def _decay() -> tuple[Series, ...]:
    """The flow and projected Euler steps from the start of the tests, rank two in the limit."""
    layer, cov = _collapsing()
    times = torch.logspace(-2, 2, 41)
    flow = gaussian_flow(layer, torch.zeros(3), cov, times)
    a = -(layer.query.T @ layer.query)
    stepped, euler = cov, []
    for k in range(1, 1112):
        moved = stepped @ a @ stepped
        values, vectors = torch.linalg.eigh(stepped + 0.09 * (moved + moved.T))
        stepped = vectors * values.clamp_min(1e-14) @ vectors.T
        if k in {round(1.25**i) for i in range(32)}:
            euler.append((0.09 * k, values.clamp_min(1e-14)))
    return (
        *(Series("flow", _pairs(flow.times, flow.eigenvalues[:, i])) for i in range(3)),
        Series(
            "Euler, steps of 0.09",
            tuple((t, float(v)) for t, values in euler for v in values if v > 1e-4),
            "points",
        ),
    )


def _collapsing() -> tuple[DotProduct, Tensor]:
    q = torch.tensor([[2.0, 0.0, 0.0]]).double()
    cov = torch.tensor([[6.0, 3.0, 2.0], [3.0, 4.0, 1.0], [2.0, 1.0, 3.0]]).double()
    return DotProduct(q, -q, eye(3), scale=1.0), cov


def _pairs(x: Tensor, y: Tensor) -> tuple[tuple[float, float], ...]:
    return tuple((float(a), float(b)) for a, b in zip(x, y, strict=True))


def _animation(study: Study) -> list[str]:
    """Two laws in the plane with 200 tokens each: one loses a direction, the other blows up."""
    cov = torch.tensor([[1.0, 0.4], [0.4, 0.6]]).double()
    q = torch.tensor([[1.0, 0.5]]).double()
    lost = DotProduct(q, -q, eye(2), scale=1.0)
    grown = DotProduct(q, q, eye(2), scale=1.0)
    first = 1 / float(torch.linalg.eigvals(cov @ (2 * q.T @ q)).real.max())
    scenes = [
        _scene("K = -Q: a direction is lost", lost, cov, torch.linspace(0, 1, 41).square() * 40),
        _scene("K = Q: blow-up", grown, cov, torch.linspace(0, 0.93 * first, 41)),
    ]
    return study.animate("gaussian", "Normal laws in the plane", scenes)


def _scene(title: str, layer: DotProduct, cov: Tensor, times: Tensor) -> Scene:
    flow = gaussian_flow(layer, torch.zeros(2), cov, times)
    angle = torch.linspace(0, 2 * math.pi, 90).double()
    circle = 2 * torch.stack([angle.cos(), angle.sin()], -1)
    roots = torch.linalg.cholesky(flow.covariances)
    outline = circle @ roots.mT
    affine, x = closure(layer), normal("scene", 200, 2)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x))).T  # its covariance is I
    x = x @ torch.linalg.cholesky(cov).T

    def velocity(z: Tensor) -> Tensor:
        return z @ affine(torch.zeros(2), z.T @ z / len(z))[0].T

    states = evolve(velocity, x, times, rtol=1e-6).states
    said = [f"t = {t:.2f}" for t in times.tolist()]
    return Scene(title, states.numpy(), np.zeros(len(x), dtype=int), said, outline.numpy())


# --- layers of random weights on normal laws in several dimensions: limits, and particles ---


def normal(name: str, *shape: int) -> Tensor:
    """Standard normal numbers by name."""
    return torch.randn(*shape, generator=start_named(name), dtype=torch.float64)


def law(name: str, d: int) -> Tensor:
    """A covariance: of Wishart's law with d degrees of freedom."""
    root = normal(name, d, d)
    return root @ root.T


def eye(d: int) -> Tensor:
    """The identity."""
    return torch.eye(d, dtype=torch.float64)


# --- other layers: how many directions are left


def _dot_product(name: str, d: int) -> Attention:
    q = normal(name, d // 2, d)
    return DotProduct(q, -q, _value(name, d), scale=d**-0.5)


def _two_heads(name: str, d: int) -> Attention:
    q = normal(name, 2 * (d // 2), d)
    value = _value(name, d)
    return DotProduct(
        q, -q, torch.cat([value, value]), torch.cat([eye(d)] * 2, 1) / 2, heads=2, scale=d**-0.5
    )


def _l2(name: str, d: int) -> Attention:
    return L2Attention(normal(name, d // 2, d), _value(name, d))


def _sinkhorn(name: str, d: int) -> Attention:
    q = normal(name, d // 2, d)
    return SinkhornAttention(q, -q, _value(name, d), scale=d**-0.5)


def _value(name: str, d: int) -> Tensor:
    """Positive semidefinite, as in public code."""
    v = normal(f"{name}|v", d, d)
    return v.T @ v / d


KINDS = {"dot product": _dot_product, "two heads": _two_heads, "Sinkhorn": _sinkhorn}
ALL = {**KINDS, "L2": _l2}  # the last grows exponentially: it has no limit


def limit_job(kind: str, d: int, seed: int) -> ValueJob:
    """What a law has become at t = 10⁴."""

    def compute() -> Record:
        name = f"limit|{d}|{seed}"
        layer, cov = KINDS[kind](name, d), law(f"{name}|start", d)
        found = gaussian_flow(layer, torch.zeros(d), cov, [1e4], rtol=1e-6)
        return {"status": found.note or "done", "ranks": found.ranks(1e-2)[-1]}

    return {"kind": kind, "d": d, "seed": seed}, compute


def limit_table(found: Sequence[Record]) -> Table:
    """Blow-ups, and ranks of the others."""
    lines = []
    for kind in KINDS:
        for d, mine in grouped(chosen(found, kind=kind), "d"):
            ends = [r for r in mine if r["status"] == "done"]
            low = sum(r["ranks"] <= (d + 1) // 2 for r in ends)
            words = share(low, len(ends)) if ends else "–"
            blown = sum(r["status"] == "blow-up" for r in mine)
            lines.append((kind, str(d), share(blown, len(mine)), words))
    columns = ("layer", "d", "blow-up", "others: rank at most ⌈d/2⌉ at t = 10⁴")
    title = "V positive semidefinite, K = -Q: eigenvalues above 1 % of the largest"
    return Table(title, columns, tuple(lines))


def plane_job(kind: str, n: int, seed: int) -> ValueJob:
    """Particles beside the closure, as far as t = 1/2."""

    def compute() -> Record:
        layer = ALL[kind](f"plane|{kind}", 2)
        m, cov = 0.5 * normal("plane|m", 2), 0.5 * law("plane|law", 2) / 2
        root = torch.linalg.cholesky(cov)
        x = m + normal(f"plane|{n}|{seed}", n, 2) @ root.T
        end = evolve(layer, x, [0.5], rtol=1e-4).end
        flow = gaussian_flow(layer, m, cov, [0.5])
        size = float(flow.covariances[-1].norm())
        return {
            "mean": float((end.mean(0) - flow.means[-1]).norm()) / size**0.5,
            "cov": float((end.T.cov() - flow.covariances[-1]).norm()) / size,
        }

    return {"kind": kind, "n": n, "seed": seed}, compute


def plane_table(found: Sequence[Record]) -> Table:
    """Errors of their means and covariances."""
    lines = []
    for (kind, n), mine in grouped(found, "kind", "n"):
        errors = (average([r[key] for r in mine]) for key in ("mean", "cov"))
        lines.append((kind, f"{n:,}", *errors))
    columns = ("layer", "particles", "mean", "covariance")
    title = "Particles against the closure in the plane, t = 0.5: relative errors"
    return Table(title, columns, tuple(lines))
