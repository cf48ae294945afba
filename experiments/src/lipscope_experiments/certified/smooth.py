"""Classifiers with capped weights: what their bound certifies at once, and certificates beside."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import InputError, SmoothTransformer, lipschitz_bound, load_model
from lipscope.attention import Clip
from lipscope.charts import Panel
from lipscope.control import MeanPool
from lipscope_experiments.certified.crown import compared, peer
from lipscope_experiments.data import WORDS, Task, digits, first_words, folder_for
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, chosen, line, middle, percentage, ratios
from lipscope_experiments.training import RATE, SHARPER, certified_radii, fit, norm_of, seeded

CAPS = {"cap 0.5": 0.5, "cap 1": 1.0, "cap 2": 2.0, "ordinary": None}
LINEAR = "linear"
_ASKED = {"SST": 10, "digits": 30}  # of the first test inputs, whose decisions are certified
_MANY = 20  # of these, for a curve
_STEPS = (150, 1000)  # of a quick run, and of a full one
_SIZES: dict[str, Any] = {"width": 16, "heads": 4, "depth": 2}
_CAPPED: dict[str, Any] = {"pool": "mean", "capped": "after-step", "activation": "relu", **_SIZES}
_ALL = "bound, all"  # test inputs, not the first ones
_PAIRS = (("certificate", "CROWN", "–"), ("no flip", "certificate", "at least 1"))
_RADII = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def fitted(of: Task, kind: str, steps: int, seed: int) -> Any:
    """A classifier of a kind, trained: a linear one reads all pixels, or the mean word vector."""
    x, classes, width = of.train[0], int(of.train[1].max()) + 1, _SIZES["width"]
    sizes: Record = {"outputs": classes, "length": x.shape[1]}
    sizes |= {"vocabulary": of.vocabulary} if of.vocabulary else {"features": x.shape[-1]}
    with seeded(seed):
        if kind != LINEAR:
            model: Any = SmoothTransformer(**_CAPPED, **sizes, cap=CAPS[kind])
        else:
            model, read = nn.Sequential(nn.Flatten()), x[0].numel()
            if of.vocabulary:
                words, read = nn.Embedding(of.vocabulary, width), width
                model = nn.Sequential(words, Clip(width**0.5), MeanPool())
            model.add_module("head", nn.Linear(read, classes, bias=False))
    return fit(model, of, steps, RATE, seed, SHARPER)


def slope_before_head(model: Any) -> float:
    """A bound of how far what the head reads moves, by the joint l2 move of inputs.

    Of a linear classifier the slope itself: of an image, or of the mean of words.
    """
    if not isinstance(model, SmoothTransformer):
        return 1.0 if isinstance(model[0], nn.Flatten) else WORDS**-0.5
    num_tokens = len(model.positions)  # which all inputs have
    whole = float(lipschitz_bound(model, norm="frobenius", num_tokens=num_tokens))
    return whole * _entry(model) / norm_of(model.head.weight)


def _entry(model: SmoothTransformer) -> float:
    """How far the stream moves at most by a move of the input: of word vectors, as far."""
    return norm_of(model.embedding.weight) if isinstance(model.embedding, nn.Linear) else 1.0


def beside(model: SmoothTransformer, x: Tensor) -> Record:
    """The radii of a certificate, of CROWN and of the smallest flip found, at one input."""
    decision = load_model(model).decision(x[None])
    free = torch.ones(len(decision.x), dtype=torch.bool)
    found = compared(decision.network, decision.x, free, methods=("CROWN",))
    names = {"certificate": "ours", "no flip": "attack", "CROWN": "CROWN"}
    return {by: found[one] / _entry(model) for by, one in names.items() if one in found}


def classified(study: Study, name: str, of: Task) -> Iterator[Record]:
    """Radii of the right answers of every classifier, by everything that certifies them."""
    steps, shown = study.pick(*_STEPS), study.pick(1, _ASKED[name])
    model = functools.cache(lambda kind, seed, **_: fitted(of, kind, steps, seed))

    def every(**key: Any) -> Record:
        net, (x, y) = model(**key), of.test
        slope = slope_before_head(net)
        with torch.no_grad():
            return {"radii": certified_radii(net(x), net.head.weight, y, slope).tolist()}

    keys = grid(task=[name], kind=(*CAPS, LINEAR), steps=[steps], seed=[0])
    for key, one in zip(keys, study.values(name, keys, every), strict=True):
        first = {i: r for i, r in enumerate(one["radii"][:shown]) if r > 0}
        asked = first if key["kind"] in [*CAPS][: study.pick(1, None)] else {}
        each = study.values(
            f"{name}, inputs",
            [key | {"index": i} for i in asked],
            lambda index, **key: beside(model(**key), of.test[0][index]),
        )
        radii = {_ALL: [r for r in one["radii"] if r > 0], "bound": [*first.values()]}
        for by in ("certificate", "CROWN", "no flip"):
            radii[by] = [r[by] or 0.0 for r in each if by in r]
        if key["kind"] == LINEAR:
            radii["certificate"] = radii.pop("bound")  # which is exact
        for by, right in radii.items():
            tested = len(one["radii"]) if by == _ALL else shown
            if right:
                yield {**key, "by": by, "right": right, "tested": tested, "inputs": each}


def _share_within(row: Record, radius: float) -> float:
    return sum(r > radius for r in row["right"]) / row["tested"]


@experiment("certified/smooth", cite="newhouse2025", reads_text=False)
def smooth(study: Study) -> None:
    """Classifiers with a bound: sentences and digits."""
    columns: dict[str, Any] = {"classifier": "kind", "by": "by"}
    columns["median radius"] = lambda r: median(r["right"])
    columns["right"] = lambda r: percentage(len(r["right"]), r["tested"])
    for at in _RADII:
        columns[f"{at:g}"] = lambda r, at=at: f"{_share_within(r, at):.1%}"
    panels, axes = list[Panel](), ("radius (joint l2)", "certified accuracy")
    for name, asked in _ASKED.items():
        try:
            of = digits() if name == "digits" else first_words(folder_for(name))
        except InputError as why:
            study.missing.append(str(why))
            continue
        rows, shown = [*classified(study, name, of)], study.pick(1, asked)
        for above, below, said in _PAIRS:
            both = ((r["kind"], ratios(r["inputs"], above, below)) for r in chosen(rows, by=_ALL))
            found = "; ".join(f"{kind}: {middle(known)}" for kind, known in both if known)
            about = f"{name}: {above} over {below}, radii of the same inputs"
            study.claim(about, said, found or "not found")
        title = f"{name}: certified accuracy at radii, of all test inputs and of the first {shown}"
        study.table(title, rows, columns)
        for by in (_ALL, "certificate")[: 1 + (shown >= _MANY)]:
            lines = [
                line(r["kind"], _RADII, [_share_within(r, at) for at in _RADII])
                for r in chosen(rows, by=by)
            ]
            panels.append(Panel(f"{name}: by {by}", lines, *axes, log_y=False))
    study.draw("smooth", "Certified accuracy", panels, columns=2)
    study.remark(
        f"Width {_SIZES['width']}, {_SIZES['heads']} heads, {_SIZES['depth']} blocks with ReLU, a "
        f"mean pool, {study.pick(*_STEPS)} steps of 64 inputs, one seed; cross-entropy of "
        f"{SHARPER:g} times the scores. Caps after each step. Ordinary: the same without caps.",
        f"Radii of SST are joint l2 moves of the vectors of {WORDS} words (the first ones, or "
        "filled up), each of norm at most 4; of digits, of the image. Linear: the mean of word "
        "vectors in the same ball, or all pixels, and one linear map, whose bound is exact.",
        "Bound: margin over (slope of what the head reads, times the distance of two rows of the "
        "head), in the norm frobenius. Medians are over right answers.",
        "Certificate: `certify_decision`, of joint moves of the stream behind the clip, which are "
        "no larger than those before it; of digits its radius over the norm of the first linear "
        "map. No flip: the smallest one found in that stream, above which neither certificate can "
        "be; it need come from no image.",
        "CROWN: auto_LiRPA on the same parts and stream in float64, by bisection to 2 %."
        if peer()
        else "CROWN was left out: auto_LiRPA cannot be imported.",
    )
