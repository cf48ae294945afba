"""Classifiers with capped weights: what their bound certifies at once, and certificates beside."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import InputError, SmoothTransformer, lipschitz_bound, load_model
from lipscope.attention import Clip
from lipscope.charts import Panel
from lipscope.control import MeanPool
from lipscope_experiments.certified.crown import peer, peer_radius
from lipscope_experiments.data import Task, digits, folder_for, sentences
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, line, middle, percentage, ratios
from lipscope_experiments.training import SHARPER, certified_radii, norm_of, seeded, train

CAPS = {"cap 0.5": 0.5, "cap 1": 1.0, "cap 2": 2.0, "ordinary": None}
LINEAR = "linear"
_ASKED = {"SST": 10, "digits": 30}  # of the first test inputs, whose decisions are certified
_MANY = 20  # of these, for a curve
_STEPS = (150, 1000)  # of a quick run, and of a full one
_SIZES: dict[str, Any] = {"width": 16, "heads": 4, "depth": 2}
_CAPPED: dict[str, Any] = {"pool": "mean", "capped": "after-step", "activation": "relu", **_SIZES}
_WORDS = 16  # of a sentence, the first ones
_BY = ("bound", "certificate", "CROWN", "no flip")  # what proves radii, and an attack
_PAIRS = (("certificate", "CROWN", "–"), ("no flip", "certificate", "at least 1"))
_RADII = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def task(name: str) -> Task:
    """The digits as eight rows of eight pixels, or sentences of SST, cut or filled to 16 words."""
    if name == "digits":
        return digits()
    parts = [sentences(folder_for("SST"), part) for part in ("train", "test")]
    counts = Counter(w for words, _ in parts[0] for w in words)
    index = {w: i + 2 for i, w in enumerate(sorted(w for w, k in counts.items() if k > 9))}

    def as_ids(words: list[str]) -> list[int]:
        ids = [index.get(w, 1) for w in words[:_WORDS]]
        return ids + [0] * (_WORDS - len(ids))

    pairs = ([(as_ids(words), label) for words, label in part] for part in parts)
    (x, y), (tested, labels) = (map(torch.tensor, zip(*some, strict=True)) for some in pairs)
    return Task((x, y), (tested, labels), len(index) + 2)


def fitted(of: Task, kind: str, steps: int, seed: int) -> Any:
    """A classifier of a kind, trained: a linear one reads all pixels, or the mean word vector."""
    (x, y), gen = of.train, torch.Generator().manual_seed(seed)
    classes, width = int(y.max()) + 1, _SIZES["width"]

    def loss() -> Tensor:
        some = torch.randint(len(y), (64,), generator=gen)
        return nn.functional.cross_entropy(SHARPER * model(x[some]), y[some])

    sizes: Record = {"outputs": classes, "length": x.shape[1]}
    sizes |= {"vocabulary": of.vocabulary} if of.vocabulary else {"features": x.shape[-1]}
    with seeded(seed):
        if kind != LINEAR:
            model: Any = SmoothTransformer(**_CAPPED, **sizes, cap=CAPS[kind])
            for _ in train(model, loss, steps):
                pass
            return model.eval()
        model, read = nn.Sequential(nn.Flatten()), x[0].numel()
        if of.vocabulary:
            words, read = nn.Embedding(of.vocabulary, width), width
            nn.init.normal_(words.weight)
            model = nn.Sequential(words, Clip(width**0.5), MeanPool())
        model.add_module("head", nn.Linear(read, classes, bias=False))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        adam.zero_grad()
        loss().backward()
        adam.step()
    return model.eval()


def slope_before_head(model: Any) -> float:
    """A bound of how far what the head reads moves, by the joint l2 move of inputs.

    Of a linear classifier the slope itself: of an image, or of the mean of words.
    """
    if not isinstance(model, SmoothTransformer):
        return 1.0 if isinstance(model[0], nn.Flatten) else _WORDS**-0.5
    num_tokens = len(model.positions)  # which all inputs have
    whole = float(lipschitz_bound(model, norm="frobenius", num_tokens=num_tokens))
    return whole * _entry(model) / norm_of(model.head.weight)


def _entry(model: SmoothTransformer) -> float:
    """How far the stream moves at most by a move of the input: of word vectors, as far."""
    return norm_of(model.embedding.weight) if isinstance(model.embedding, nn.Linear) else 1.0


def beside(model: SmoothTransformer, x: Tensor) -> Record:
    """The radii of a certificate, of CROWN and of the smallest flip found, at one input."""
    decision = load_model(model).decision(x[None])
    found = decision.certify()
    known = {"certificate": found.radius, "no flip": found.attack}
    if peer() is not None and found.attack is not None:
        every, most = torch.ones_like(decision.x[:, :1]), found.attack
        crown = peer_radius(decision.network, decision.x, found.decision, every, most, "CROWN")
        known["CROWN"] = None if crown is None else crown[0]
    return {name: r and r / _entry(model) for name, r in known.items()}


def classified(study: Study, name: str, of: Task) -> list[Record]:
    """A record a classifier, with the radii of its first inputs by everything that certifies."""
    steps, asked = study.pick(*_STEPS), [*CAPS][: study.pick(1, None)]
    model = functools.cache(lambda kind, seed: fitted(of, kind, steps, seed))

    def whole(kind: str, seed: int, shown: int, **_: Any) -> Record:
        net, (x, y) = model(kind, seed), of.test
        with torch.no_grad():
            scores = net(x)
        sure = certified_radii(scores, net.head.weight, y, slope := slope_before_head(net))
        return {
            "accuracy": int((scores.argmax(1) == y).sum()),
            "tested": len(y),
            "slope": slope,
            "certified": [int((sure > r).sum()) for r in _RADII],
            "first": sure[:shown].tolist(),
        }

    found, shown = list[Record](), {"shown": study.pick(1, _ASKED[name])}
    keys = grid(task=[name], kind=(*CAPS, LINEAR), steps=[steps], seed=[0])
    for key, one in zip(keys, study.values(name, [k | shown for k in keys], whole), strict=True):
        right = [i for i, r in enumerate(one["first"]) if r > 0 and one["kind"] in asked]
        each = study.values(
            f"{name}, inputs",
            [key | {"index": i} for i in right],
            lambda kind, seed, index, **_: beside(model(kind, seed), of.test[0][index]),
        )
        found.append(one | {"inputs": [r | {"bound": one["first"][r["index"]]} for r in each]})
    return found


def by_each(one: Record) -> list[Record]:
    """Certified accuracy at the first inputs of a classifier, by all that certifies it."""
    each = {by: [r[by] or 0.0 for r in one["inputs"] if by in r] for by in _BY}
    if one["kind"] == LINEAR:
        each["exact"] = [r for r in one["first"] if r > 0]
    return [
        {**one, "by": by, "tested": one["shown"], "median": median(known)}
        | {"certified": [sum(r > at for r in known) for at in (0.0, *_RADII)]}
        for by, known in each.items()
        if known
    ]


@experiment("certified/smooth", cite="newhouse2025", reads_text=False)
def smooth(study: Study) -> None:
    """Classifiers with a bound: sentences and digits."""
    found = dict[str, list[Record]]()
    for name in _ASKED:
        try:
            of = task(name)
        except InputError as why:
            study.missing.append(str(why))
            continue
        found[name] = classified(study, name, of)
        _of_task(study, name, found[name])
    _draw(study, found)
    study.remark(
        f"Width {_SIZES['width']}, {_SIZES['heads']} heads, {_SIZES['depth']} blocks with ReLU, a "
        f"mean pool, {study.pick(*_STEPS)} steps of 64 inputs, one seed; cross-entropy of "
        f"{SHARPER:g} times the scores. Caps after each step. Ordinary: the same training without "
        "caps.",
        f"Radii of SST are joint l2 moves of the vectors of {_WORDS} words (the first ones of a "
        "sentence, or filled up), each of norm at most 4; of digits, of the image. Linear: the "
        "mean of word vectors in the same ball, or all pixels, and one linear map: its radius is "
        "exact.",
        "By the bound: margin over (slope of what the head reads, times the distance of two rows "
        "of the head), in the norm frobenius; all test inputs at once.",
        "Certificate: `certify_decision`, of joint moves of the stream behind the clip, which are "
        "no larger than those before it; of digits its radius over the norm of the first linear "
        "map, so of the image. No flip: the smallest one found in that stream, above which neither "
        "certificate can be; it need come from no image. Wrong answers are not certified, and not "
        "in the medians.",
        "CROWN: auto_LiRPA on the same parts and stream in float64, by bisection to 2 %, over the "
        "same norm."
        if peer()
        else "CROWN was left out: auto_LiRPA cannot be imported.",
    )


def _of_task(study: Study, name: str, found: list[Record]) -> None:
    """Claims and tables of one task."""
    study.claim(
        f"{name}: accuracy",
        "–",
        "; ".join(f"{one['kind']}: {one['accuracy'] / one['tested']:.1%}" for one in found),
    )
    for above, below, said in _PAIRS:
        both = ((one["kind"], ratios(one["inputs"], above, below)) for one in found)
        study.claim(
            f"{name}: {above} over {below}, radii of the same inputs",
            said,
            "; ".join(f"{kind}: {middle(known)}" for kind, known in both if known),
        )
    title = f"{name}: accuracy, and certified accuracy by the bound, at radii"
    lines = [
        (
            *(one["kind"], one["slope"], percentage(one["accuracy"], one["tested"])),
            *(f"{k / one['tested']:.1%}" for k in one["certified"]),
        )
        for one in found
    ]
    study.table(title, lines, ("classifier", "slope", "accuracy", *map("{:g}".format, _RADII)))
    title = f"{name}: certified accuracy of the first {found[0]['shown']} test inputs, at radii"
    columns = ("classifier", "by", "median radius", "right", *map("{:g}".format, _RADII))
    lines = [
        (
            *(row["kind"], row["by"], row["median"]),
            *(percentage(k, row["tested"], ".0%") for k in row["certified"]),
        )
        for one in found
        for row in by_each(one)
    ]
    study.table(title, lines, columns)


def _draw(study: Study, found: Mapping[str, list[Record]]) -> None:
    """Certified accuracy against the radius: by the bound of all, by certificates of the first."""
    panels, curves, axes = list[Panel](), list[Panel](), ("radius (joint l2)", "certified accuracy")
    for name, mine in found.items():
        rows = (row for one in mine for row in by_each(one))
        proved = [row for row in rows if row["by"] in ("certificate", "exact")]
        whole, few = (
            [
                line(r["kind"], _RADII, [k / r["tested"] for k in r["certified"][-len(_RADII) :]])
                for r in shown
            ]
            for shown in (mine, proved)
        )
        panels.append(Panel(f"{name}: by the bound", whole, *axes, log_y=False))
        if mine[0]["shown"] >= _MANY:
            title = f"{name}: by certificates, {mine[0]['shown']} inputs"
            curves.append(Panel(title, few, *axes, log_y=False))
    study.draw("smooth", "Certified accuracy", panels + curves, columns=2)
