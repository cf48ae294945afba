"""What dividing attention by a bound of itself costs and buys: a vision Transformer on digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lipscope import MultiheadAttention
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import mean_interval
from lipscope_experiments.castin2024.digits import (
    BLOCKS,
    HEADS,
    PATCHES,
    RADIUS,
    WIDTH,
    Classifier,
    Digits,
    Linear,
    attacked,
    digits,
    trained,
)
from lipscope_experiments.experiment import Study, ValueJob, experiment
from lipscope_experiments.findings import Claim, Findings, Record, Table

_DIVISORS = ("theorem-3.3", "G2", "mean-field")
_KINDS = ("undivided", *(f"divided by {by}" for by in _DIVISORS), "L2")
_CONTROLS = "no attention", "linear softmax"
_SIZES = (0.01, 0.03, 0.1, 0.3)  # of moves of an image, Frobenius norm
_MEASURED = 4  # test images at which sigma is measured


@experiment(
    "castin2024/divide-by-bound",
    title="How Smooth Is Attention?: attention divided by its bound, in a vision Transformer",
    cite="castin2024",
    reads_text=False,
)
def divide_by_bound(study: Study) -> Findings:
    """Accuracy, sigma, certified and adversarial accuracy of five kinds of attention, and none."""
    data = digits()
    runs = study.values("runs", _jobs(study, data))
    _draw(study, runs)
    return _findings(study, runs)


def _jobs(study: Study, data: Digits) -> Iterator[ValueJob]:
    epochs = study.pick(5, 15)
    for seed in range(study.pick(2, 5)):
        for kind in (*_KINDS, *_CONTROLS):
            key = {"kind": kind, "seed": seed, "epochs": epochs, "radius": RADIUS}
            yield key, lambda kind=kind, seed=seed: _run(study, data, kind, seed, epochs)


def attention_of(kind: str) -> Callable[[], MultiheadAttention | None]:
    """What makes the attention of a kind."""
    if kind == "no attention":
        return lambda: None
    options: dict[str, Any] = {"batch_first": True}
    if kind == "L2":
        return lambda: MultiheadAttention(WIDTH, HEADS, "l2", **options)
    if kind == "undivided":
        return lambda: MultiheadAttention(WIDTH, HEADS, bias=False, **options)
    ball = {"num_tokens": PATCHES, "radius": RADIUS}
    options |= {"by": kind.removeprefix("divided by "), "bias": False, **ball}
    return lambda: MultiheadAttention(WIDTH, HEADS, "divided", **options)


def _run(study: Study, data: Digits, kind: str, seed: int, epochs: int) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Linear() if kind == "linear softmax" else Classifier(attention_of(kind))
    net = trained(net, data, epochs, seed)
    images, labels = data.test_images, data.test_labels
    measured: dict[str, Any] = {}
    if kind in _KINDS:
        assert isinstance(net, Classifier)
        rows = study.measure(
            "sigma",
            LoadedModel(f"{kind}, seed {seed}", net, None, None, "trained"),
            images[:_MEASURED],
            tol=1e-2,
        )
        sigma = sum(row.sigma or 0.0 for row in rows) / len(rows)
        measured = {"sigma": sigma, "constant": max(net.constants()), "slope": net.slope()}
    radii = net.certified(images, labels)
    return measured | {
        "accuracy": _share(net(images).argmax(1) == labels),
        "certified": [_share(radii > eps) for eps in _SIZES],
        "adversarial": [_share(attacked(net, images, labels, eps)) for eps in _SIZES],
    }


def _share(which: torch.Tensor) -> float:
    return float(which.double().mean())


def _of(runs: Sequence[Record], kind: str, name: str, at: int | None = None) -> list[float]:
    own = [one[name] for one in runs if one["kind"] == kind]
    return own if at is None else [one[at] for one in own]


def _mean(values: Sequence[float], *, percent: bool = False) -> str:
    """A mean over seeds with its interval."""
    mean, low, high = mean_interval(values)
    if percent:
        low, high = max(low, 0.0), min(high, 1.0)
        return f"{100 * mean:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{number(mean)} [{number(low)}, {number(high)}]"


def _draw(study: Study, runs: Sequence[Record]) -> None:
    panels = []
    for name, title in (("adversarial", "under attack"), ("certified", "certified")):
        series = []
        for kind in _KINDS:
            by_size = {eps: _of(runs, kind, name, at) for at, eps in enumerate(_SIZES)}
            seeds = tuple((eps, value) for eps, values in by_size.items() for value in values)
            means = tuple((eps, mean_interval(values)[0]) for eps, values in by_size.items())
            label = kind.replace("theorem", "Theorem").replace("-", " ")
            series += [Series(label, seeds, "points"), Series(label, means)]
        axes = "size of the move (Frobenius)", "share of test images"
        panels.append(Panel(title, tuple(series), *axes, log_y=False))
    title = "Accuracy of a vision Transformer on digits under moves of an image"
    notes = ["Lines: mean over seeds; dots: single seeds."]
    study.draw("divide-by-bound", title, panels, notes, columns=2)


def _findings(study: Study, runs: Sequence[Record]) -> Findings:
    every = (*_KINDS, *_CONTROLS)
    accuracy = {kind: _mean(_of(runs, kind, "accuracy"), percent=True) for kind in every}
    sure = {kind: _mean(_of(runs, kind, "certified", 0), percent=True) for kind in every}
    lines = [
        (
            kind,
            accuracy[kind],
            _mean(_of(runs, kind, "sigma")),
            _mean(_of(runs, kind, "constant")),
            _mean(_of(runs, kind, "slope")),
        )
        for kind in _KINDS
    ]
    robust = [
        (
            kind,
            *(
                _mean(_of(runs, kind, name, at), percent=True)
                for at in range(len(_SIZES))
                for name in ("certified", "adversarial")
            ),
        )
        for kind in every
    ]
    columns = [f"{name}, {eps:g}" for eps in _SIZES for name in ("certified", "under attack")]
    plain = accuracy["undivided"]
    return Findings(
        (
            Claim(
                "accuracy, attention divided by Theorem 3.3",
                "a promising option at a fixed number of tokens",
                f"{accuracy['divided by theorem-3.3']}; undivided {plain}",
            ),
            Claim(
                "accuracy, attention divided by the mean-field bound",
                "a dramatic loss of expressive power",
                f"{accuracy['divided by mean-field']}; undivided {plain}",
            ),
            Claim(
                f"certified accuracy at moves of {_SIZES[0]:g}",
                "–",
                "; ".join(f"{kind} {sure[kind]}" for kind in _KINDS),
            ),
            Claim(
                f"controls: accuracy, and certified at moves of {_SIZES[0]:g}",
                "–",
                "; ".join(f"{kind} {accuracy[kind]}, {sure[kind]}" for kind in _CONTROLS),
            ),
        ),
        (
            Table(
                "Accuracy and smoothness",
                ("attention", "accuracy", "sigma", "bound of a layer", "bound of the network"),
                tuple(lines),
            ),
            Table("Accuracy under moves of an image", ("attention", *columns), tuple(robust)),
        ),
        (
            f"Means over {study.pick(2, 5)} seeds of weights and batches, with 95 % Student "
            "intervals: they say nothing about other test images, of which there are 450.",
            f"{BLOCKS} blocks of width {WIDTH}, {HEADS} heads, {PATCHES} patches; no layer norm: "
            f"tokens are brought into the ball of radius {RADIUS:g} (its nearest point) before "
            "attention. Weights behind the attention and beside it have spectral norm 1 in every "
            "run (the last linear map is free), so that only attention sets the smoothness; "
            "queries, keys and values are free.",
            "Sigma: mean over layers and four test images, rows of the run folder. Bound of a "
            "layer: the least of the catalogue on the ball, the larger of the two layers. Bound of "
            "the network: product over its parts, from pixels between 0 and 1 to the sum of "
            "the last tokens; an image is certified where its margin exceeds what that lets a move "
            "do.",
            "The mean-field bound makes sigma so small that its networks have no attention to "
            "speak of. How far another kind is above them in accuracy is what its attention is "
            f"worth here, after {study.pick(5, 15)} epochs; longer training was not run.",
            "Controls: the same network without its attention, and a linear map of the pixels, "
            "whose certificates are exact. They are not in the figure.",
            "Under attack: projected gradient ascent of the loss, 10 steps from the image, pixels "
            "not kept between 0 and 1. The robust accuracy lies between the two.",
            "The mean-field bound here has half the exponent of the paper's Theorem 3.5: the loss "
            "that it causes is the smaller one.",
        ),
    )
