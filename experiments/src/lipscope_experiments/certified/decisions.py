"""Certified radii of small classifiers beside CROWN's and an attack's: by depth, width, length."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import InputError
from lipscope.certificates import DecisionBall, DecisionSearch
from lipscope.charts import Panel, Series
from lipscope_experiments.certified.classifiers import Recipe, Trained
from lipscope_experiments.certified.crown import compared, peer
from lipscope_experiments.data import LICENCES, folder_for
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import Record, Value, chosen, grouped, middle, ratios

BALLS: dict[DecisionBall, str] = {"joint": "all tokens move", "token": "one token moves"}
SHARES = (0.4, 0.8, 1.0, 1.15, 1.4)  # of our radius: where its lower bound is attacked
_PAIRS = (("ours", "CROWN"), ("ours", "attack"), ("CROWN", "attack"), ("IBP", "attack"))
_KINDS = {"N": "norms without variance", "S": "standard LayerNorm"}  # those that are drawn
_AXES = {"blocks": "number of blocks", "d": "width d", "n": "number of tokens n"}
# Networks with the number of inputs certified while all tokens move, and while one does.
_BOTH, _TOKEN, _JOINT = (10, 10), (0, 10), (10, 0)
_QUICK = {"N1": (2, 2)}
_FULL = dict.fromkeys(("N1", "N2", "S1", "A1"), _BOTH) | {"DeepT-1": _TOKEN}
_FULL |= dict.fromkeys(("N1-gelu", "N1-prose"), _BOTH)
_FULL |= dict.fromkeys(("S1-gelu", "S1-prose", "N1-n16", "N1-d64", "S1-n16", "S1-d64"), _TOKEN)
_FULL |= {"S2": _BOTH, "N3": _JOINT, "S3": _JOINT, "DeepT-3": _TOKEN}
_POINTS = 100_000  # at which the bounds of a network are held against its margins
_STARTS, _STEPS, _AT_ONCE = 12, 40, 500  # of descents; points through a network


@experiment("certified/decisions")
def decisions(study: Study) -> None:
    """How far may tokens move before a network's answer can change."""
    plan = study.pick(_QUICK, _FULL)
    found = [one for name, counts in plan.items() for one in _of_network(study, name, counts)]
    for (ball, words), over in itertools.product(BALLS.items(), ("CROWN", "attack")):
        by = grouped(chosen(found, ball=ball), "name")
        known = ((name, ratios(mine, "ours", over)) for name, mine in by)
        study.claim(
            f"certified radius over that of {over}, {words}",
            "above 1 is sharper" if over == "CROWN" else "at most 1",
            "; ".join(f"{name}: {middle(values)}" for name, values in known if values),
        )
    worst = min(gap for record in found for gap in gaps_of(record))
    study.claim(
        "least margin found in a ball, less its certified lower bound, over the margin",
        "at least 0 at every radius",
        f"{worst:.3g} at the least, in {sum(r['points'] for r in found):,} points",
    )
    _draw(study, found)
    columns: dict[str, Value] = {"network": "name", "ball": "ball"}
    columns |= {"inputs": lambda _, mine: len(mine), "accuracy": "accuracy"}
    for above, below in _PAIRS:
        of = functools.partial(ratios, above=above, below=below)
        columns[f"{above} / {below}"] = lambda _, mine, of=of: middle(of(mine))
    for one in ("attack", "seconds, ours", "seconds, CROWN"):
        columns[one] = lambda _, mine, one=one: middle([r[one] for r in mine if one in r])
    by = grouped(found, "name", "ball")
    study.table("Medians, with the smallest and the largest", by, columns, 2)
    columns = {"network": "name", "points": lambda _, mine: sum(r["points"] for r in mine)}
    for k, share in enumerate(SHARES):
        columns[f"{share:g}"] = lambda _, mine, k=k: min(gaps_of(r)[k] for r in mine)
    title = "Least margin found, less the certified bound, over the margin, at shares of our radius"
    study.table(title, [(name, mine) for name, mine in grouped(found, "name")], columns, 3)
    study.remark(
        "A: attention, mean pool, linear head; N, S: post-norm blocks of four heads and a ReLU "
        "network, norms without variance and standard LayerNorm; then the number of blocks. 8 "
        "tokens, d = 32 unless said. Two licences are told apart by windows of words, two works of "
        "prose where the name says so; inputs: held-out windows with the right answer, in an order "
        "drawn once. DeepT: certifiably trained networks (Bonaert et al. 2021) of 1 and 3 blocks, "
        "d = 64, on sentences of SST of at most 16 and 12 tokens.",
        "l2 balls of the embeddings, in float64. The token that moves is that of the largest "
        "gradient. The attack's radius is that of the smallest flip that `certify_network` found, "
        "an upper value; CROWN and IBP are auto_LiRPA's, by bisection to 2 %. Seconds are a "
        "processor's, ours with the attack. A dash: no bound for an operation of the network.",
        *([] if peer() else ["CROWN and IBP were left out: auto_LiRPA cannot be imported."]),
    )


def _of_network(study: Study, name: str, counts: tuple[int, int]) -> list[Record]:
    source = functools.cache(lambda: _trained(study, name))
    asked = zip(BALLS, counts, strict=True)
    keys = [{"name": name, "ball": b, "index": i} for b, k in asked for i in range(k)]
    points = math.ceil(_POINTS / len(keys) / len(SHARES))
    compute = lambda ball, index, **_: decided(source(), ball, index, points)  # noqa: E731
    try:
        return study.values(name, keys, compute)
    except InputError as why:
        study.missing.append(str(why))
        return []


def _trained(study: Study, name: str) -> Trained:
    if name.startswith("DeepT"):
        return Trained.deept(folder_for(name), int(name[-1]))
    texts = [path.read_text("utf-8") for path in LICENCES if path.is_file()]
    if "prose" in name:
        texts = [text.content for text in study.texts[:2]]
    if len(texts) < 2:
        raise InputError(f"{name} was left out: one of its two texts is not there.")
    return Trained.of(Recipe.of(name), texts)


def _draw(study: Study, found: Sequence[Record]) -> None:
    """Medians over the attack's radius, along one size at a time."""
    panels, y = [], "radius / radius of the attack"
    for (ball, words), (axis, label) in itertools.product(BALLS.items(), _AXES.items()):
        series = []
        for kind, who in itertools.product(_KINDS, ("ours", "CROWN")):
            rest = {one: getattr(Recipe(kind), one) for one in _AXES if one != axis}
            mine = grouped(chosen(found, ball=ball, kind=kind, **rest), axis)
            known = ((at, ratios(some, who, "attack")) for at, some in mine)
            points = [(at, median(values)) for at, values in known if values]
            series.append(Series(f"{who}, {_KINDS[kind]}", points))
        if any(len(one.points) > 1 for one in series):
            panels.append(Panel(f"{words}: by {label}", series, label, y, log_x=False))
    study.draw("decisions", "Certified radius as a share of the attack's", panels)


def decided(trained: Trained, ball: DecisionBall, index: int, points: int) -> Record:
    """Radii and a processor's seconds at an input; margins found beside our bounds."""
    x, label = trained.inputs[index], trained.labels[index]
    network, free = trained.network(x), torch.ones(len(x), dtype=torch.bool)
    search, rival = DecisionSearch(network, x, "joint", free), 1 - label
    if ball == "token":
        free = torch.arange(len(x)) == search.gradients()[rival].norm(dim=1).argmax()
        search = DecisionSearch(network, x, ball, free)
    found, below = compared(network, x, free, ball), list[list[float | None]]()
    for radius in (share * found["ours"] for share in SHARES):
        least, end = search.descend(rival, radius, starts=_STARTS, steps=_STEPS)
        some = _moves(end.view(-1, x.shape[1]), radius, points - _STARTS * _STEPS)
        least = min(least, *(float(search.margin(e, rival).min()) for e in some.split(_AT_ONCE)))
        low = search.lower(rival, end) if search.bounds.grow(radius) else -math.inf
        below.append([low if math.isfinite(low) else None, least])
    known = {"n": len(x), "accuracy": trained.accuracy, "margin": float(search.margins[rival])}
    found |= {"below": below, "points": points * len(SHARES)}
    return {**trained.recipe._asdict(), **known, **found}


def gaps_of(record: Record) -> list[float]:
    """Least margins found, less the certified bounds, over the margin: below 0 is wrong."""
    below, size = record["below"], record["margin"]
    return [math.inf if low is None else (least - low) / size for low, least in below]


def _moves(end: Float[Tensor, "s d"], radius: float, count: int) -> Float[Tensor, "b s d"]:
    """Random moves of the sphere, three of four mixed with the end of a descent."""
    source = torch.Generator().manual_seed(0)
    e = torch.randn(count, *end.shape, generator=source).to(end)
    mix = torch.rand(count, 1, 1, generator=source).to(end)
    mix[::4] = 0
    e = mix * end + (1 - mix) * radius * e / e.norm(dim=(1, 2), keepdim=True)
    return e * (radius / e.norm(dim=(1, 2), keepdim=True)).clamp_max(1)
