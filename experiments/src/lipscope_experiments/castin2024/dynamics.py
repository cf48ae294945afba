"""Tokens that flow through attention: clusters, consensus, and sigma along depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipscope import (
    Attention,
    DotProduct,
    InputError,
    L2Attention,
    SigmoidAttention,
    SinkhornAttention,
)
from lipscope import SinkhornAttention as Sinkhorn
from lipscope.charts import Panel, Scene, Series
from lipscope.dynamics import (
    Trajectory,
    clusters,
    diameter,
    evolve,
    leaders,
    phases,
    residual,
    sigma_along,
    sigma_of_blocks,
)
from lipscope.linalg import start_named
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.castin2024.splitting import multiple
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import (
    Claim,
    Findings,
    Record,
    Table,
    average,
    geometric,
    grouped,
    share,
)
from lipscope_experiments.texts import Text

_RADIUS = 0.05  # of clusters of renormalised tokens, whose own spread is about 1
_NEAR = 0.1  # of clusters on the unit sphere
_STEP = 0.1  # of Euler's method in public code
_END, _LONG = 10.0, 100.0
_SHOWN = 6  # the cloud of the figures, one that Euler's steps divide otherwise
_DEPTHS = (8, 16, 32, 64, 128)


@experiment(
    "castin2024/dynamics",
    title="Deep attention as a flow: clusters, consensus, and sigma along depth",
    cite="castin2024",
    models=("minilm", "smollm2"),
    quick_models=("minilm",),
)
def dynamics(study: Study) -> Findings:
    """Adaptive flows beside fixed steps; variants; spheres; products of layers."""
    order = study.values("order", [_order_job(seed) for seed in range(study.pick(3, 20))])
    seeds = range(study.pick(8, 100))
    found = study.values("clusters", [_cluster_job(seed) for seed in seeds])
    kinds = study.values(
        "variants", [_kind_job(k, s) for k in _KINDS for s in range(study.pick(2, 12))]
    )
    sphere = study.values(
        "sphere",
        [_sphere_job(b, s) for b in _BETAS for s in range(study.pick(2, 30))],
    )
    deep = depths(study)
    _draw(study, kinds, sphere, deep)
    remarks = _animations(study)
    return Findings(
        (
            Claim(
                "error of L residual layers at t = 1, as a power of L",
                "-1: Euler's method (Section 4 of the slides)",
                average([r["slope"] for r in order]),
            ),
            *_of_clusters(found),
            *_of_spheres(sphere),
            *deep.claims,
        ),
        (_kinds_table(kinds), _phases_table(sphere), *deep.tables),
        (
            f"Clusters: connected components of pairs of tokens nearer than {_RADIUS} "
            f"(renormalised; standard normal starts, 40 tokens in the plane) or {_NEAR} (unit "
            "sphere, 32 tokens). Leaders: tokens to which some token gives more than half of its "
            "weight.",
            "Intervals are 95 % over independent starts (Student; shares: Clopper–Pearson), for "
            "models of the mean logarithm over windows of text, where there are three or more, "
            "beside geometric means.",
            "Adaptive: order 8, relative tolerance 1e-6. Euler: fixed steps of the same flow.",
            *remarks,
        ),
    )


def cloud(name: str, seed: int, n: int, d: int) -> Tensor:
    """A standard normal start."""
    return torch.randn(n, d, generator=start_named(f"{name}|{seed}"), dtype=torch.float64)


def _plane(seed: int) -> Tensor:
    """The clouds of the figures: by torch's own seed, so that anyone can draw them again."""
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(seed)).double()


# --- Euler's order, and what it gets wrong


def _order_job(seed: int) -> ValueJob:
    def compute() -> Record:
        a, v, x = (
            cloud("order", 3 * seed + i, *size) for i, size in enumerate([(3, 3)] * 2 + [(8, 3)])
        )
        eye = torch.eye(3, dtype=torch.float64)
        layer = DotProduct(0.5 * a, eye, 0.5 * v, scale=1.0)
        exact = evolve(layer, x, [1.0], rtol=1e-10).end
        ends = [residual(layer, x, step=1 / k, layers=k).end for k in _DEPTHS]
        errors = [float((end - exact).norm()) for end in ends]
        return {"errors": errors, "slope": slope_of(zip(_DEPTHS, errors, strict=True))}

    return {"seed": seed}, compute


def _cluster_job(seed: int) -> ValueJob:
    def compute() -> Record:
        layer, x = multiple(1.0, 2), _plane(seed)
        flow = evolve(layer, x, [0.0, 5.0, _END], renormalise=True, rtol=1e-6)
        count = int(_END / _STEP)
        steps = residual(layer, x, step=_STEP, layers=count, renormalise=True)
        plain = residual(layer, x, step=_STEP, layers=count).end * math.exp(-_END)
        fine = residual(layer, x, step=_STEP / 8, layers=8 * count, renormalise=True)
        weights = flow.attention(-1)
        ends = {"flow": flow.end, "steps": steps.end, "plain": plain, "fine": fine.end}
        return {
            "start": clusters(x, _RADIUS).count,
            "leaders": len(leaders(weights)),
            "largest": float(weights.amax(-1).mean()),
            "evaluations": flow.evaluations,
            **{name: clusters(end, _RADIUS).count for name, end in ends.items()},
        }

    return {"seed": seed}, compute


def _of_clusters(found: Sequence[Record]) -> list[Claim]:
    def wrong(name: str) -> str:
        return share(sum(r[name] != r["flow"] for r in found), len(found))

    led = sum(r["leaders"] == r["flow"] for r in found)
    return [
        Claim(
            f"V = A = I, renormalised: clusters of 40 tokens at t = {_END:g}",
            "vertices of a convex polytope ([geshkovski2023])",
            f"{average([r['start'] for r in found])} become {average([r['flow'] for r in found])}",
        ),
        Claim(
            "each cluster has one leader, which takes all weight",
            "leaders (slides)",
            f"as many leaders as clusters in {share(led, len(found))} of starts; largest weight of "
            f"a token, mean {average([r['largest'] for r in found])}",
        ),
        Claim(
            f"another number of clusters by Euler's steps of {_STEP:g}",
            "public code steps so",
            f"{wrong('steps')} of starts on y, {wrong('plain')} on x; with steps of "
            f"{_STEP / 8:g} {wrong('fine')}",
        ),
    ]


# --- variants


def _two_heads() -> DotProduct:
    """Heads that read by one coordinate each, with values of one sum."""
    eye = torch.eye(2, dtype=torch.float64)
    value, output = torch.cat([eye, eye]), torch.cat([eye, eye], 1) / 2
    query = torch.stack([eye[0], eye[1]])
    return DotProduct(query, query, value, output, heads=2, scale=1.0)


def _layer(kind: Callable[..., Attention]) -> Attention:
    eye = torch.eye(2, dtype=torch.float64)
    return kind(eye, eye) if kind is L2Attention else kind(eye, eye, eye, scale=1.0)


_KINDS: dict[str, Callable[[], Attention]] = {
    "dot product": lambda: multiple(1.0, 2),
    "causal": lambda: multiple(1.0, 2).replace(causal=True),
    "window of 8": lambda: multiple(1.0, 2).replace(causal=True, window=8),
    "two heads": _two_heads,
    "L2": lambda: _layer(L2Attention),
    "Sinkhorn, A = I / 10": lambda: _layer(Sinkhorn).replace(scale=0.1),
    "sigmoid": lambda: _layer(SigmoidAttention),
    "A = -I": lambda: multiple(-1.0, 2),
    "V = -I": lambda: multiple(1.0, 2).replace(value=-torch.eye(2, dtype=torch.float64)),
}


_DRAWN = ("dot product", "causal", "two heads", "L2", "Sinkhorn, A = I / 10", "A = -I")


def _kind_job(kind: str, seed: int) -> ValueJob:
    times = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]
    if kind.startswith("Sinkhorn"):  # scores grow like e^(2t), and its iteration ends before
        times = times[:7]

    def compute() -> Record:
        x = _plane(seed)
        plain = kind == "V = -I"  # contracts: what is renormalised would run away
        flow = evolve(_KINDS[kind](), x, times, renormalise=not plain, rtol=1e-5)
        states = flow.states / flow.states[0].norm(dim=-1).mean()
        spread = [diameter(s) / diameter(states[0]) for s in states]
        return {
            "times": flow.times.tolist(),
            "counts": [clusters(s, _RADIUS).count for s in states],
            "spread": spread[-1],
            "note": flow.note,
        }

    return {"kind": kind, "seed": seed}, compute


def _kinds_table(found: Sequence[Record]) -> Table:
    lines = []
    for kind in _KINDS:
        mine = [r for r in found if r["kind"] == kind]
        early = [r for r in mine if r["note"]]
        ends = ", ".join(sorted({f"{r['note']} from t = {r['times'][-1]:.2f}" for r in early})[:1])
        lines.append(
            (
                kind,
                average([r["counts"][0] for r in mine]),
                average([r["counts"][-1] for r in mine]),
                average([r["spread"] for r in mine]),
                "–" if not early else f"{len(early)} of {len(mine)}: {ends}",
            )
        )
    columns = ("layer", "clusters at 0", "at the end", "diameter / that at 0", "ended early")
    title = (
        "Variants at t = 5 (Sinkhorn: 2.5), V = A = I and renormalised unless another is named "
        "(V = -I: as it is)"
    )
    return Table(title, columns, tuple(lines))


# --- spheres

_BETAS = ((1.0, 3), (1.0, 8), (4.0, 3), (9.0, 3))


def _sphere_job(which: tuple[float, int], seed: int) -> ValueJob:
    beta, d = which

    def compute() -> Record:
        x = cloud("sphere", seed, 32, d)
        x = x / x.norm(dim=-1, keepdim=True)
        times = [0.0, *np.geomspace(0.1, _LONG, 61).tolist()]
        flow = evolve(multiple(beta, d), x, times, norm="rms", rtol=1e-6)
        counts = [clusters(s, _NEAR).count for s in flow.states]
        held = [p for p in phases(times, counts) if 1 < p.count < 16 and p.start > 0]
        longest = max(held, key=lambda p: p.end / p.start, default=None)
        euler = residual(multiple(beta, d), x, step=1.0, layers=int(_LONG), norm="rms").end
        return {
            "times": times,
            "counts": counts,
            "cosine": float((flow.end @ flow.end.T).min()),
            "phase": None if longest is None else [longest.count, longest.start, longest.end],
            "euler": clusters(euler, _NEAR).count,
        }

    return {"beta": beta, "d": d, "seed": seed}, compute


def _of_spheres(found: Sequence[Record]) -> list[Claim]:
    claims = []
    for beta, d in _BETAS:
        mine = [r for r in found if (r["beta"], r["d"]) == (beta, d)]
        one = [r for r in mine if r["counts"][-1] == 1]
        other = sum(r["euler"] != r["counts"][-1] for r in mine)
        said = "consensus ([geshkovski2024])" if beta == 1 else "metastable ([geshkovski2024])"
        times = [r["times"][r["counts"].index(1)] for r in one]
        claims.append(
            Claim(
                f"unit sphere, V = I, A = {beta:g} I, d = {d}: one cluster by t = {_LONG:g}",
                said,
                f"{share(len(one), len(mine))} of starts"
                + (f", at t = {average(times)}" if times else "")
                + f"; {average([r['counts'][-1] for r in mine])} clusters in the mean; Euler's "
                f"steps of 1 give another number for {share(other, len(mine))}",
            )
        )
    return claims


def _phases_table(found: Sequence[Record]) -> Table:
    lines = []
    for beta, d in _BETAS:
        mine = [r for r in found if (r["beta"], r["d"]) == (beta, d) and r["phase"]]
        if mine:
            longest = [r["phase"][2] / r["phase"][1] for r in mine]
            counts = sorted({r["phase"][0] for r in mine})
            lines.append(
                (
                    f"{beta:g}",
                    str(d),
                    ", ".join(map(str, counts)),
                    average([r["phase"][1] for r in mine]),
                    average(longest),
                )
            )
    columns = ("β", "d", "clusters", "from t", "lasts until t times")
    return Table("The longest phase of 2 to 15 clusters of every start", columns, tuple(lines))


# --- figures


def _draw(study: Study, kinds: list[Record], sphere: list[Record], deep: Depths) -> None:
    layer, x = multiple(1.0, 2), _plane(_SHOWN)
    times = torch.linspace(0, 6, 121)
    flow = evolve(layer, x, times, renormalise=True, rtol=1e-6)
    steps = residual(layer, x, step=_STEP, layers=60, renormalise=True)
    over = [
        Series(name, _counted(one.times, one.states))
        for name, one in (("flow", flow), (f"Euler, steps of {_STEP:g}", steps))
    ]
    places = (
        Series("on the way", _pairs(flow.states[::3].reshape(-1, 2)), "points"),
        Series("start", _pairs(x), "points"),
        Series("leaders", _pairs(flow.end[list(leaders(flow.attention(-1)))]), "points"),
    )
    panels = [
        Panel("40 tokens, V = A = I", places, "y₁", "y₂", log_x=False, log_y=False),
        Panel("the same: clusters", tuple(over), "t", "clusters", log_x=False),
    ]
    study.draw("clusters", "Tokens cluster once renormalised", panels)
    balls = tuple(
        Series(f"β = {b:g}, d = {d}", _course(r))
        for b, d in _BETAS
        for r in sphere
        if (r["beta"], r["d"], r["seed"]) == (b, d, 0)
    )
    drawn = {r["kind"]: r for r in kinds if r["seed"] == 0}
    variants = tuple(Series(kind, _course(drawn[kind])) for kind in _DRAWN)
    for stem, title, panel in (
        ("sphere", "On spheres: consensus, and phases", Panel("V = I", balls, "t", "clusters")),
        (
            "variants",
            "Clusters over time, variants of attention",
            Panel("one start, renormalised", variants, "t", "clusters", log_x=False),
        ),
    ):
        study.draw(stem, title, [panel])
    study.draw("depth", "Sigma of all layers together, and the product of them", deep.panels)


def _course(r: Record) -> tuple[tuple[float, int], ...]:
    return tuple(zip(r["times"], r["counts"], strict=True))


def _counted(times: Tensor, states: Tensor) -> tuple[tuple[float, int], ...]:
    counts = [clusters(s, _RADIUS).count for s in states]
    return tuple(zip(times.tolist(), counts, strict=True))


def _pairs(x: Tensor) -> tuple[tuple[float, float], ...]:
    return tuple((float(a), float(b)) for a, b in x)


def _animations(study: Study) -> list[str]:
    layer, x = multiple(1.0, 2), _plane(_SHOWN)
    times = torch.linspace(0, 6, 61)
    flow = evolve(layer, x, times, renormalise=True, rtol=1e-6)
    steps = residual(layer, x, step=_STEP, layers=60, renormalise=True)
    scenes = [
        _scene(f"{name}: {clusters(one.end, _RADIUS).count} clusters", one, _RADIUS)
        for name, one in (("adaptive steps", flow), ("Euler, steps of 0.1", steps))
    ]
    remarks = study.animate("clusters", "Renormalised tokens, V = A = I", scenes)
    start = cloud("sphere", 0, 32, 3)
    start = start / start.norm(dim=-1, keepdim=True)
    times = torch.tensor([0.0, *np.geomspace(0.1, _LONG, 50).tolist()])
    scenes = []
    for beta in (1.0, 9.0):
        flow = evolve(multiple(beta, 3), start, times, norm="rms", rtol=1e-6)
        scenes.append(_scene(f"A = {beta:g} I", flow, _NEAR, circle=True))
    return remarks + study.animate("sphere", "Tokens on the unit sphere", scenes)


def _scene(title: str, flow: Trajectory, radius: float, circle: bool = False) -> Scene:
    """Coloured by the clusters of the last state; a sphere from above."""
    states, outline = flow.states, None
    if circle:
        angle = np.linspace(0, 2 * np.pi, 120)
        curve = np.stack([np.cos(angle), np.sin(angle)], -1)
        outline = np.broadcast_to(curve, (len(states), *curve.shape))
    groups = clusters(states[-1], radius).labels.numpy()
    said = [f"t = {number(t, 2)}" for t in flow.times.tolist()]
    return Scene(title, states[..., :2].numpy(), groups, said, outline)


# --- sigma along depth: all layers together beside the product of them, in flows and in models ---

_TIMES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
_LENGTH = 32


@dataclass(frozen=True)
class Depths:
    """What is said and drawn of sigma along depth."""

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...]


def depths(study: Study) -> Depths:
    """Flows of small layers, and blocks of models on windows of text."""
    seeds = range(study.pick(2, 6))
    flows = study.values("depth", [_flow_job(kind, seed) for kind in _FLOWS for seed in seeds])
    models = [r for place in study.places() for r in _of_model(study, *place)]
    panels = [_panel(kind, _first(flows, kind)) for kind in ("A = +I", "A = -I")]
    panels += [
        _panel(f"{name}, {_LENGTH} tokens", next(r for r in models if r["model"] == name), "block")
        for name in dict.fromkeys(r["model"] for r in models)
    ]
    last = [r for r in flows if r["kind"] == "A = +I"]
    return Depths(
        (
            Claim(
                "flow, V = A = I, t = 2: product of infinitely thin layers / sigma of all together",
                "at least 1 (derived here)",
                average([r["product"][-1] / r["sigma"][-1] for r in last]),
            ),
            *(
                Claim(
                    f"{name}, {text}: product of the blocks' sigmas / sigma of all blocks together",
                    "at least 1",
                    geometric([r["product"][-1] / r["sigma"][-1] for r in mine]),
                )
                for (name, text), mine in grouped(models, "model", "text")
            ),
        ),
        (_flow_table(flows), _model_table(models)),
        tuple(panels),
    )


# --- flows


def _two_tied(d: int) -> Attention:
    eye = torch.eye(d, dtype=torch.float64)
    return L2Attention(eye, d**0.5 * eye)


def _sinkhorn(d: int) -> Attention:
    eye = torch.eye(d, dtype=torch.float64)
    return SinkhornAttention(eye, eye, eye, scale=0.1)


_FLOWS = {
    "A = +I": lambda d: multiple(1.0, d),
    "A = -I": lambda d: multiple(-1.0, d),
    "A = +I, causal": lambda d: multiple(1.0, d).replace(causal=True),
    "V = -I": lambda d: multiple(1.0, d).replace(value=-torch.eye(d, dtype=torch.float64)),
    "L2": _two_tied,
    "Sinkhorn, A = I / 10": _sinkhorn,
}


def _flow_job(kind: str, seed: int) -> ValueJob:
    def compute() -> Record:
        x = torch.randn(10, 2, generator=start_named(f"depth|{seed}"), dtype=torch.float64)
        found = sigma_along(_FLOWS[kind](2), x, _TIMES, rtol=1e-4)
        assert found.norms is not None
        names = ("times", "sigma", "product", "norms")
        return {name: getattr(found, name).tolist() for name in names}

    return {"kind": kind, "seed": seed}, compute


def _first(flows: Sequence[Record], kind: str) -> dict[str, Any]:
    return next(r for r in flows if r["kind"] == kind)


def _flow_table(flows: Sequence[Record]) -> Table:
    lines = []
    for kind in _FLOWS:
        mine = [r for r in flows if r["kind"] == kind]
        over = [r["product"][-1] / r["sigma"][-1] for r in mine]
        crude = [r["norms"][-1] / r["sigma"][-1] for r in mine]
        sigma = average([r["sigma"][-1] for r in mine])
        lines.append((kind, sigma, average(over), average(crude)))
    columns = ("layer", "sigma of the flow", "product / sigma", "exp ∫ ‖J‖ / sigma")
    return Table("Flows to t = 2, ten standard normal tokens in the plane", columns, tuple(lines))


# --- models: from block to block


def _of_model(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Record]:
    count = study.pick(1, 4)
    for window in range(count):
        part = text.content[window * len(text.content) // count :]
        key = {"model": loaded.name, "text": text.name, "window": window, "length": _LENGTH}
        yield from study.values("blocks", [(key, lambda part=part: _blocks(loaded, part))])


def _blocks(loaded: LoadedModel, text: str) -> dict[str, Any]:
    maps = layers_of(
        loaded, text, layers="all", lengths=[_LENGTH], samples=1, map="block", dtype="float32"
    )
    found = [(built.x, built.output, built.linearise()) for built in maps]
    together = all(
        bool(torch.allclose(y, x, rtol=1e-4, atol=1e-4 * float(x.abs().max())))
        for (_, y, _), (x, _, _) in pairwise(found)
    )
    if not together:
        raise InputError("A block should read what the one before it gives. Found another model.")
    last = len(found)
    ends = sorted({1, 2, 3, max(1, last // 2), last} & {*range(1, last + 1)})
    whole = sigma_of_blocks([op for _, _, op in found], depths=ends, tol=0.05)
    names = ("times", "sigma", "upper", "product")
    return {name: getattr(whole, name).tolist() for name in names}


def _model_table(models: Sequence[Record]) -> Table:
    lines = []
    for (name, text), mine in grouped(models, "model", "text"):
        for i, depth in enumerate(mine[0]["times"][1:], 1):
            sigma = geometric([r["sigma"][i] for r in mine])
            product = geometric([r["product"][i] for r in mine])
            over = geometric([r["product"][i] / r["sigma"][i] for r in mine])
            lines.append((name, text, f"{depth:g}", sigma, product, over))
    columns = ("model", "text", "blocks", "sigma together", "product", "product / sigma")
    title = f"From the entrance of the first block to the end of another, {_LENGTH} tokens"
    return Table(title, columns, tuple(lines))


# --- figures


def _panel(title: str, r: Record, x: str = "t") -> Panel:
    named = {"sigma": "all together", "product": "product", "norms": "exp ∫ ‖J‖"}
    series = [
        Series(name, tuple(zip(r["times"], r[key], strict=True)))
        for key, name in named.items()
        if key in r
    ]
    return Panel(title, tuple(series), x, "sigma", log_x=False)
