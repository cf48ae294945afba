"""Certified radii of small classifiers beside CROWN's and an attack's: by depth, width, length."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import InputError
from lipscope.attacks import of_size
from lipscope.certificates import DecisionBall, NetworkBall, certify_network
from lipscope.charts import Panel, Series
from lipscope.models import check_network
from lipscope_experiments.certified.classifiers import LICENCES, Recipe, Trained, network_of, scores
from lipscope_experiments.certified.crown import peer, peer_radius
from lipscope_experiments.data import folder_for
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import Record, chosen, grouped, middle, ratios

BALLS: dict[DecisionBall, str] = {"joint": "all tokens move", "token": "one token moves"}
SHARES = (0.4, 0.8, 1.0, 1.15, 1.4)  # of our radius: where its lower bound is attacked
PAIRS = (("ours", "CROWN"), ("ours", "attack"), ("CROWN", "attack"), ("IBP", "attack"))
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
_AT_ONCE = 500  # points through a network


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
    gaps = [gap for record in found for gap in gaps_of(record) if gap is not None]
    study.claim(
        "least margin found in a ball, less its certified lower bound, over the margin",
        "at least 0 at every radius",
        f"{min(gaps):.3g} at the least, in {sum(r['points'] for r in found):,} points",
    )
    _draw(study, found)
    seconds = [f"seconds, {who}" for who in ("ours", "CROWN", "attack")]
    lines = [
        (
            *(*one, len(mine), f"{mine[0]['accuracy']:.2f}"),
            *(middle(ratios(mine, *pair)) for pair in PAIRS),
            *(
                f"{median(own):.1f}" if (own := [r[k] for r in mine if k in r]) else "–"
                for k in seconds
            ),
        )
        for one, mine in grouped(found, "name", "ball")
    ]
    columns = ("network", "ball", "inputs", "accuracy", *map(" / ".join, PAIRS), *seconds)
    study.table("Medians, with the smallest and the largest", lines, columns)
    study.remark(
        "A: attention, mean pool, linear head; N, S: post-norm blocks of four heads and a ReLU "
        "network, without variance in their norms and with standard LayerNorm; then the number of "
        "blocks. 8 tokens and d = 32 unless said. Two licences are told apart by windows of words, "
        "two works of prose where the name says so; the inputs are correctly classified held-out "
        "windows in an order drawn once. DeepT: certifiably trained networks (Bonaert et al. 2021) "
        "of 1 and 3 blocks, d = 64, on sentences of SST of at most 16 and 12 tokens.",
        "l2 balls of the embeddings. The token that moves is that of the largest gradient. The "
        "attack's radius is that of the smallest flip found, an upper value. A dash: no bound for "
        "an operation of the network.",
        *([] if peer() else ["CROWN and IBP were left out: auto_LiRPA cannot be imported."]),
    )


def _of_network(study: Study, name: str, counts: tuple[int, int]) -> list[Record]:
    try:
        source = functools.cache(_source(study, name))
    except InputError as why:
        study.missing.append(str(why))
        return []
    asked = zip(BALLS, counts, strict=True)
    keys = [{"name": name, "ball": b, "index": i} for b, k in asked for i in range(k)]
    points = math.ceil(_POINTS / len(keys) / len(SHARES))
    return study.values(name, keys, lambda ball, index, **_: decided(source(), ball, index, points))


def _source(study: Study, name: str) -> Callable[[], Trained]:
    """What gives a network; an error says why there is none."""
    if name.startswith("DeepT"):
        return functools.partial(Trained.deept, folder_for(name), int(name[-1]))
    recipe = Recipe.of(name)
    texts = [path.read_text("utf-8") for path in LICENCES if path.is_file()]
    if "prose" in name:
        texts = [text.content for text in study.texts[:2]]
    if len(texts) < 2:
        raise InputError(f"{name} was left out: one of its two texts is not there.")
    return functools.partial(Trained.of, recipe, texts)


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
    """Radii and a processor's seconds at an input; margins found beside our bound."""
    x, label = trained.inputs[index], trained.labels[index]
    network = network_of(trained.weights, trained.recipe, len(x))
    model = functools.partial(scores, network)
    check_network(network, lambda z: model(z[None])[0], x)
    search = Search(model, x, label, torch.ones_like(x[:, :1]))
    margin, slope = search.with_slopes(torch.zeros_like(x)[None])
    if ball == "token":
        token = int(slope[0].norm(dim=1).argmax())
        search = replace(search, moves=torch.eye(len(x)).to(x)[:, token, None])
    began = time.process_time()
    attack, point = search.smallest_flip()
    found = {
        "accuracy": trained.accuracy,
        "kind": trained.recipe.kind,
        "blocks": trained.recipe.blocks,
        "n": len(x),
        "d": x.shape[1],
        "margin": float(margin),
        "attack": attack,
        "seconds, attack": time.process_time() - began,
    }
    for method in ("CROWN", "IBP") if peer() else ():
        if (theirs := peer_radius(network, x, label, search.moves, attack, method)) is not None:
            found |= {method: theirs[0], f"seconds, {method}": theirs[1]}
    began, free = time.process_time(), search.moves[:, 0] > 0
    ours = certify_network(network, x, ball=ball, tokens=free).radius
    found |= {"ours": ours, "seconds, ours": time.process_time() - began}
    bounds, below = NetworkBall(network, x, free), []
    for radius in (share * ours for share in SHARES):
        move = 0.3 * of_size(point[free], radius).flatten()
        low = bounds.lower(move, label, 1 - label)[0] if bounds.grow(radius) else None
        below.append([low, search.least_margin(radius, point, points)])
    return found | {"below": below, "points": points * len(SHARES)}


def gaps_of(record: Record) -> list[float | None]:
    """Least margins found, less the certified bounds, over the margin: below 0 is wrong."""
    return [
        None if low is None else (least - low) / record["margin"] for low, least in record["below"]
    ]


# --- attacks


@dataclass(frozen=True)
class Search:
    """For moves of some tokens after which a class has the smaller one of two scores."""

    model: Callable[[Tensor], Tensor]  # from tokens ``(b, n, d)`` to two scores
    x: Float[Tensor, "n d"]
    label: int
    moves: Float[Tensor, "n 1"]  # 1 for tokens that may move, 0 for others

    def margins(self, e: Float[Tensor, "b n d"]) -> Float[Tensor, " b"]:
        """Score of the class minus the other's, after moves."""
        scores = self.model(self.x + e)
        return scores[:, self.label] - scores[:, 1 - self.label]

    def with_slopes(self, e: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor]:
        """Margins, and their gradients by the tokens that move."""
        e = e.detach().requires_grad_(True)
        found = self.margins(e)
        return found.detach(), torch.autograd.grad(found.sum(), e)[0] * self.moves

    def _drawn(self, count: int, size: Tensor | float, source: torch.Generator) -> Tensor:
        e = torch.randn(count, *self.x.shape, generator=source).to(self.x)
        return _sized(e * self.moves, size)

    def smallest_flip(
        self, restarts: int = 8, steps: int = 250
    ) -> tuple[float, Float[Tensor, "n d"]]:
        """Size of the smallest move found that changes the answer, and the move; inf if none did.

        From random moves of several sizes: a step along the gradient of the margin on a sphere that
        shrinks where the answer has changed and grows where it has not; then bisection along the
        ray.

        Source: the decoupled direction and norm of Rony et al. (2019); an upper value.
        """
        source = torch.Generator().manual_seed(0)
        margin, slope = self.with_slopes(torch.zeros_like(self.x)[None])
        size = 2 * float(margin / slope.norm()) * torch.rand(restarts, generator=source).to(self.x)
        e = self._drawn(restarts, size, source)
        least, best = torch.full_like(size, math.inf), torch.zeros_like(e)
        for k in range(steps):
            margin, slope = self.with_slopes(e)
            flipped = margin <= 0
            better = flipped & (size < least)
            least, best = torch.where(better, size, least), torch.where(_wide(better), e, best)
            rate = 0.1 * 0.05 ** (k / steps)
            e = e - _sized(slope, 0.5 * 0.02 ** (k / steps) * size)
            size = size * torch.where(flipped, 1 - rate, 1 + rate)
            e = _sized(e, size)
        low, high = torch.zeros_like(size), torch.ones_like(size)
        for _ in range(20):
            middle = (low + high) / 2
            flipped = self.margins(best * _wide(middle)) <= 0
            low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
        at = int((least * high).argmin())
        return float(least[at] * high[at]), best[at] * high[at]

    def least_margin(self, radius: float, point: Tensor, points: int = 1000) -> float:
        """The least margin of some points in a ball, at least 600.

        Random points of the sphere, mixtures of them with an attack's end, and descents.
        """
        source, few = torch.Generator().manual_seed(0), 12
        many = points - 40 * few
        e = self._drawn(many, radius, source)
        mix = torch.rand(many, 1, 1, generator=source).to(e)
        mix[::4], mix[1] = 0, 1
        e = _inside(mix * _sized(point[None], radius) + (1 - mix) * e, radius)
        with torch.no_grad():  # in parts: a graph of all points would take gigabytes
            least = min(float(self.margins(some).min()) for some in e.split(_AT_ONCE))
        e = e[:few]
        for k in range(40):
            e = _inside(e - _sized(self.with_slopes(e)[1], 0.4 * radius * 0.03 ** (k / 40)), radius)
            least = min(least, float(self.margins(e).detach().min()))
        return least


def _sized(e: Tensor, size: Tensor | float) -> Tensor:
    return e * _wide(size / e.flatten(1).norm(dim=1).clamp_min(1e-12))


def _inside(e: Tensor, radius: float) -> Tensor:
    return _sized(e, e.flatten(1).norm(dim=1).clamp_max(radius))


def _wide(scalars: Tensor) -> Tensor:
    return scalars[:, None, None]
