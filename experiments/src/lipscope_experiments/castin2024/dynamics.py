"""Tokens that flow through attention: adaptive and fixed steps, variants, spheres, depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lipscope import DotProduct, InputError, L2Attention, SigmoidAttention, SinkhornAttention
from lipscope.charts import Panel, Scene
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
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import slope_of
from lipscope_experiments.experiment import Source, Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, chosen, geometric, grouped, line, share
from lipscope_experiments.simple_layers import dots, eye, multiple, normal

_RADIUS = 0.05  # of clusters of renormalised tokens, whose own spread is about 1
_NEAR = 0.1  # of clusters on the unit sphere
_STEP = 0.1  # of Euler's method in public code
_END, _LONG = 10.0, 100.0
_SHOWN = 6  # the cloud of the figures, one that Euler's steps divide otherwise
_DEPTHS = (8, 16, 32, 64, 128)
_BETAS = ((1.0, 3), (1.0, 8), (4.0, 3), (9.0, 3))
_TIMES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
_LENGTH = 32


@experiment("castin2024/dynamics", models=("minilm", "smollm2"))
def dynamics(study: Study) -> None:
    """Deep attention as a flow: clusters, consensus, and sigma along depth."""
    pick = study.pick
    order = study.values("order", grid(seed=range(pick(3, 20))), _order_of_euler)
    found = study.values("clusters", grid(seed=range(pick(8, 100))), _clusters_at_the_end)
    keys = grid(kind=_KINDS, seed=range(pick(2, 12)))
    kinds = study.values("variants", keys, _clusters_over_time)
    keys = [{"beta": b, "d": d, "seed": s} for b, d in _BETAS for s in range(pick(2, 30))]
    sphere = study.values("sphere", keys, _sphere)
    flows = study.values("depth", grid(kind=_FLOWS, seed=range(pick(2, 6))), _sigma_of_flow)
    models = [r for source in study.sources() for r in _sigmas_of_blocks(study, source)]
    _draw_clusters(study, kinds, sphere)
    _draw_depth(study, flows, models)
    _animations(study)
    study.claim(
        "error of L residual layers at t = 1, as a power of L",
        "-1: Euler's method (Section 4 of the slides)",
        average([r["slope"] for r in order]),
    )
    _of_clusters(study, found)
    _kinds_table(study, kinds)
    _of_spheres(study, sphere)
    _of_depth(study, flows, models)
    study.remark(
        f"Clusters: connected components of pairs of tokens nearer than {_RADIUS} (renormalised; "
        f"standard normal starts, 40 tokens in the plane) or {_NEAR} (unit sphere, 32 tokens). "
        "Leaders: tokens to which some token gives more than half of its weight.",
        "Intervals are 95 % over independent starts (Student; shares: Clopper–Pearson), for "
        "models of the mean logarithm over windows of text, where there are three or more, "
        "beside geometric means.",
        "Adaptive: order 8, relative tolerance 1e-6. Euler: fixed steps of the same flow.",
    )


# --- clusters of renormalised tokens


def _plane(seed: int) -> Tensor:
    """The clouds of the figures: by torch's own seed, so that anyone can draw them again."""
    return torch.randn(40, 2, generator=torch.Generator().manual_seed(seed)).double()


def _order_of_euler(seed: int) -> Record:
    a, v, x = (normal(f"order|{3 * seed + i}", n, 3) for i, n in enumerate((3, 3, 8)))
    layer = DotProduct(0.5 * a, eye(3), 0.5 * v, scale=1.0)
    exact = evolve(layer, x, [1.0], rtol=1e-10).end
    ends = [residual(layer, x, step=1 / k, layers=k).end for k in _DEPTHS]
    errors = [float((end - exact).norm()) for end in ends]
    return {"errors": errors, "slope": slope_of(zip(_DEPTHS, errors, strict=True))}


def _clusters_at_the_end(seed: int) -> Record:
    layer, x = multiple(1.0, 2), _plane(seed)
    flow = evolve(layer, x, [0.0, 5.0, _END], renormalise=True, rtol=1e-6)
    count = int(_END / _STEP)
    steps = residual(layer, x, step=_STEP, layers=count, renormalise=True)
    plain = residual(layer, x, step=_STEP, layers=count).end * math.exp(-_END)
    fine = residual(layer, x, step=_STEP / 8, layers=8 * count, renormalise=True)
    weights = flow.attention(-1)
    ends = {"start": x, "flow": flow.end, "steps": steps.end, "plain": plain, "fine": fine.end}
    return {
        "leaders": len(leaders(weights)),
        "largest": float(weights.amax(-1).mean()),
        "evaluations": flow.evaluations,
        **{name: clusters(end, _RADIUS).count for name, end in ends.items()},
    }


def _of_clusters(study: Study, found: Sequence[Record]) -> None:
    def wrong(name: str) -> str:
        return share(sum(r[name] != r["flow"] for r in found), len(found))

    study.claim(
        f"V = A = I, renormalised: clusters of 40 tokens at t = {_END:g}",
        "vertices of a convex polytope ([geshkovski2023])",
        f"{average([r['start'] for r in found])} become {average([r['flow'] for r in found])}",
    )
    led = sum(r["leaders"] == r["flow"] for r in found)
    study.claim(
        "each cluster has one leader, which takes all weight",
        "leaders (slides)",
        f"as many leaders as clusters in {share(led, len(found))} of starts; largest weight of "
        f"a token, mean {average([r['largest'] for r in found])}",
    )
    study.claim(
        f"another number of clusters by Euler's steps of {_STEP:g}",
        "public code steps so",
        f"{wrong('steps')} of starts on y, {wrong('plain')} on x; with steps of "
        f"{_STEP / 8:g} {wrong('fine')}",
    )


def _coordinate_heads() -> DotProduct:
    """Heads that read by one coordinate each, with values of one sum."""
    value, output = torch.cat([eye(2)] * 2), torch.cat([eye(2)] * 2, 1) / 2
    return DotProduct(eye(2), eye(2), value, output, heads=2, scale=1.0)


_KINDS = {
    "dot product": lambda: multiple(1.0, 2),
    "causal": lambda: multiple(1.0, 2).replace(causal=True),
    "window of 8": lambda: multiple(1.0, 2).replace(causal=True, window=8),
    "two heads": _coordinate_heads,
    "L2": lambda: L2Attention(eye(2), eye(2)),
    "Sinkhorn, A = I / 10": lambda: SinkhornAttention(eye(2), eye(2), eye(2), scale=0.1),
    "sigmoid": lambda: SigmoidAttention(eye(2), eye(2), eye(2), scale=1.0),
    "A = -I": lambda: multiple(-1.0, 2),
    "V = -I": lambda: multiple(1.0, 2).replace(value=-eye(2)),
}
_DRAWN = ("dot product", "causal", "two heads", "L2", "Sinkhorn, A = I / 10", "A = -I")


def _clusters_over_time(kind: str, seed: int) -> Record:
    times = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]
    if kind.startswith("Sinkhorn"):  # scores grow like e^(2t), and its iteration ends before
        times = times[:7]
    plain = kind == "V = -I"  # contracts: what is renormalised would run away
    flow = evolve(_KINDS[kind](), _plane(seed), times, renormalise=not plain, rtol=1e-5)
    states = flow.states / flow.states[0].norm(dim=-1).mean()
    return {
        "times": flow.times.tolist(),
        "counts": [clusters(s, _RADIUS).count for s in states],
        "spread": diameter(states[-1]) / diameter(states[0]),
        "note": flow.note,
    }


def _kinds_table(study: Study, found: Sequence[Record]) -> None:
    lines = []
    for kind, mine in grouped(found, "kind"):
        ended = [f"{r['note']} from t = {r['times'][-1]:.2f}" for r in mine if r["note"]]
        early = f"{len(ended)} of {len(mine)}: {min(ended)}" if ended else "–"
        counts = (average([r["counts"][at] for r in mine]) for at in (0, -1))
        lines.append((kind, *counts, average([r["spread"] for r in mine]), early))
    title = (
        "Variants at t = 5 (Sinkhorn: 2.5), V = A = I and renormalised unless another is named "
        "(V = -I: as it is)"
    )
    columns = ("layer", "clusters at 0", "at the end", "diameter / that at 0", "ended early")
    study.table(title, lines, columns)


# --- spheres


def _on_sphere(seed: int, d: int) -> Tensor:
    x = normal(f"sphere|{seed}", 32, d)
    return x / x.norm(dim=-1, keepdim=True)


def _sphere(beta: float, d: int, seed: int) -> Record:
    x = _on_sphere(seed, d)
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


def _of_spheres(study: Study, found: Sequence[Record]) -> None:
    for (beta, d), mine in grouped(found, "beta", "d"):
        one = [r for r in mine if r["counts"][-1] == 1]
        other = sum(r["euler"] != r["counts"][-1] for r in mine)
        said = "consensus ([geshkovski2024])" if beta == 1 else "metastable ([geshkovski2024])"
        times = [r["times"][r["counts"].index(1)] for r in one]
        study.claim(
            f"unit sphere, V = I, A = {beta:g} I, d = {d}: one cluster by t = {_LONG:g}",
            said,
            f"{share(len(one), len(mine))} of starts"
            + (f", at t = {average(times)}" if times else "")
            + f"; {average([r['counts'][-1] for r in mine])} clusters in the mean; Euler's "
            f"steps of 1 give another number for {share(other, len(mine))}",
        )
    lines = []
    for (beta, d), mine in grouped([r for r in found if r["phase"]], "beta", "d"):
        counts, starts, ends = zip(*(r["phase"] for r in mine), strict=True)
        lasts = [end / start for start, end in zip(starts, ends, strict=True)]
        said = ", ".join(map(str, sorted({*counts})))
        lines.append((f"{beta:g}", d, said, average(starts), average(lasts)))
    columns = ("β", "d", "clusters", "from t", "lasts until t times")
    study.table("The longest phase of 2 to 15 clusters of every start", lines, columns)


# --- figures


def _draw_clusters(study: Study, kinds: list[Record], sphere: list[Record]) -> None:
    (flow, steps), x = _shown_flow(121), _plane(_SHOWN)
    places = (
        dots("on the way", flow.states[::3].reshape(-1, 2)),
        dots("start", x),
        dots("leaders", flow.end[list(leaders(flow.attention(-1)))]),
    )
    over = [
        line(name, one.times.tolist(), [clusters(s, _RADIUS).count for s in one.states])
        for name, one in (("flow", flow), (f"Euler, steps of {_STEP:g}", steps))
    ]
    panels = [
        Panel("40 tokens, V = A = I", places, "y₁", "y₂", log_x=False, log_y=False),
        Panel("the same: clusters", over, "t", "clusters", log_x=False),
    ]
    study.draw("clusters", "Tokens cluster once renormalised", panels)
    balls = [
        line(f"β = {r['beta']:g}, d = {r['d']}", r["times"], r["counts"])
        for r in chosen(sphere, seed=0)
    ]
    panel = Panel("V = I", balls, "t", "clusters")
    study.draw("sphere", "On spheres: consensus, and phases", [panel])
    first = [chosen(kinds, kind=kind, seed=0)[0] for kind in _DRAWN]
    drawn = [line(r["kind"], r["times"], r["counts"]) for r in first]
    panel = Panel("one start, renormalised", drawn, "t", "clusters", log_x=False)
    study.draw("variants", "Clusters over time, variants of attention", [panel])


def _shown_flow(times: int) -> tuple[Trajectory, Trajectory]:
    """The cloud of the figures by adaptive steps and by Euler's."""
    layer, x = multiple(1.0, 2), _plane(_SHOWN)
    flow = evolve(layer, x, torch.linspace(0, 6, times), renormalise=True, rtol=1e-6)
    return flow, residual(layer, x, step=_STEP, layers=60, renormalise=True)


def _animations(study: Study) -> None:
    named = zip(("adaptive steps", "Euler, steps of 0.1"), _shown_flow(61), strict=True)
    scenes = [
        _tokens_scene(f"{name}: {clusters(one.end, _RADIUS).count} clusters", one, _RADIUS)
        for name, one in named
    ]
    study.animate("clusters", "Renormalised tokens, V = A = I", scenes)
    times, scenes = torch.tensor([0.0, *np.geomspace(0.1, _LONG, 50).tolist()]), []
    for beta in (1.0, 9.0):
        flow = evolve(multiple(beta, 3), _on_sphere(0, 3), times, norm="rms", rtol=1e-6)
        scenes.append(_tokens_scene(f"A = {beta:g} I", flow, _NEAR, circle=True))
    study.animate("sphere", "Tokens on the unit sphere", scenes)


def _tokens_scene(title: str, flow: Trajectory, radius: float, circle: bool = False) -> Scene:
    """Coloured by the clusters of the last state; a sphere from above."""
    states, outline = flow.states, None
    if circle:
        angle = np.linspace(0, 2 * np.pi, 120)
        curve = np.stack([np.cos(angle), np.sin(angle)], -1)
        outline = np.broadcast_to(curve, (len(states), *curve.shape))
    groups = clusters(states[-1], radius).labels.numpy()
    said = [f"t = {number(t, 2)}" for t in flow.times.tolist()]
    return Scene(title, states[..., :2].numpy(), groups, said, outline)


# --- sigma along depth

_FLOWS = {
    "A = +I": lambda d: multiple(1.0, d),
    "A = -I": lambda d: multiple(-1.0, d),
    "A = +I, causal": lambda d: multiple(1.0, d).replace(causal=True),
    "V = -I": lambda d: multiple(1.0, d).replace(value=-eye(d)),
    "L2": lambda d: L2Attention(eye(d), d**0.5 * eye(d)),
    "Sinkhorn, A = I / 10": lambda d: SinkhornAttention(eye(d), eye(d), eye(d), scale=0.1),
}


def _sigma_of_flow(kind: str, seed: int) -> Record:
    found = sigma_along(_FLOWS[kind](2), normal(f"depth|{seed}", 10, 2), _TIMES, rtol=1e-4)
    assert found.norms is not None
    names = ("times", "sigma", "product", "norms")
    return {name: getattr(found, name).tolist() for name in names}


def _sigmas_of_blocks(study: Study, source: Source) -> list[Record]:
    model, text, count = source.model, source.asked["data"], study.pick(1, 4)
    keys = grid(model=[model.name], text=[source.name], window=range(count), length=[_LENGTH])
    parts = [text[window * len(text) // count :] for window in range(count)]
    return study.values("blocks", keys, lambda window, **_: _blocks(model, parts[window]))


def _blocks(loaded: LoadedModel, text: str) -> Record:
    asked = {"layers": "all", "lengths": [_LENGTH], "samples": 1, "dtype": "float32"}
    maps = layers_of(loaded, text, map="block", **asked)
    found = [(built.x, built.output, built.linearise()) for built in maps]
    if not all(
        torch.allclose(y, x, rtol=1e-4, atol=1e-4 * float(x.abs().max()))
        for (_, y, _), (x, _, _) in pairwise(found)
    ):
        raise InputError("A block should read what the one before it gives. Found another model.")
    last = len(found)
    ends = sorted({1, 2, 3, max(1, last // 2), last} & {*range(1, last + 1)})
    whole = sigma_of_blocks([op for _, _, op in found], depths=ends, tol=0.05)
    names = ("times", "sigma", "upper", "product")
    return {name: getattr(whole, name).tolist() for name in names}


def _over_sigma(records: Sequence[Record], key: str = "product", at: int = -1) -> list[float]:
    return [r[key][at] / r["sigma"][at] for r in records]


def _of_depth(study: Study, flows: Sequence[Record], models: Sequence[Record]) -> None:
    study.claim(
        "flow, V = A = I, t = 2: product of infinitely thin layers / sigma of all together",
        "at least 1 (derived here)",
        average(_over_sigma(chosen(flows, kind="A = +I"))),
    )
    for (name, text), mine in grouped(models, "model", "text"):
        about = f"{name}, {text}: product of the blocks' sigmas / sigma of all blocks together"
        study.claim(about, "at least 1", geometric(_over_sigma(mine)))
    lines = []
    for kind, mine in grouped(flows, "kind"):
        over = (average(_over_sigma(mine, key)) for key in ("product", "norms"))
        lines.append((kind, average([r["sigma"][-1] for r in mine]), *over))
    columns = ("layer", "sigma of the flow", "product / sigma", "exp ∫ ‖J‖ / sigma")
    study.table("Flows to t = 2, ten standard normal tokens in the plane", lines, columns)
    lines = [
        (
            *(*where, f"{mine[0]['times'][at]:g}"),
            *(geometric([r[key][at] for r in mine]) for key in ("sigma", "product")),
            geometric(_over_sigma(mine, at=at)),
        )
        for where, mine in grouped(models, "model", "text")
        for at in range(1, len(mine[0]["times"]))
    ]
    columns = ("model", "text", "blocks", "sigma together", "product", "product / sigma")
    title = f"From the entrance of the first block to the end of another, {_LENGTH} tokens"
    study.table(title, lines, columns)


def _draw_depth(study: Study, flows: Sequence[Record], models: Sequence[Record]) -> None:
    shown = [(kind, chosen(flows, kind=kind)[0], "t") for kind in ("A = +I", "A = -I")]
    for name, mine in grouped(models, "model"):
        shown.append((f"{name}, {_LENGTH} tokens", mine[0], "block"))
    named = {"sigma": "all together", "product": "product", "norms": "exp ∫ ‖J‖"}
    panels = []
    for title, r, x in shown:
        lines = [line(name, r["times"], r[key]) for key, name in named.items() if key in r]
        panels.append(Panel(title, lines, x, log_x=False))
    study.draw("depth", "Sigma of all layers together, and the product of them", panels)
