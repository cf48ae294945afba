"""What dividing attention by a bound of itself costs and buys: a vision Transformer on digits."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lipscope import Attention, MultiheadAttention
from lipscope.attention import Clip
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel
from lipscope.records import mean_interval
from lipscope.theorems import NotApplicableError, catalogue, evaluate
from lipscope_experiments.digits import Digits, digits
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, average

PATCHES, WIDTH, HEADS, BLOCKS = 16, 32, 2, 2
RADIUS = 4.0  # of the ball that tokens are brought into before attention
_BATCH, _RATE = 64, 1e-2
_ASCENTS = 10


class SmoothBlock(nn.Module):
    """``X + F(N(X))`` with ``N`` the nearest point of a ball, then two linear maps likewise.

    All weights behind the attention have spectral norm 1, so that the block's constant is decided
    by ``F``.
    """

    def __init__(self, attention: MultiheadAttention | None) -> None:
        super().__init__()
        self.enter = Clip(RADIUS)
        self.attention = attention
        if attention is not None:
            spectral_norm(attention.attention, "output")
        inner = 2 * WIDTH
        self.up, self.down = (
            spectral_norm(nn.Linear(a, b)) for a, b in ((WIDTH, inner), (inner, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after the block."""
        if self.attention is not None:
            near = self.enter(x)
            x = x + self.attention(near, near, near, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class VisionTransformer(nn.Module):
    """Patches of 2 x 2, two blocks, the sum of tokens over √n, a linear map to ten scores."""

    def __init__(self, attention: Callable[[], MultiheadAttention | None]) -> None:
        super().__init__()
        self.patches = nn.Linear(4, WIDTH)
        self.positions = nn.Parameter(0.3 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.Sequential(*(SmoothBlock(attention()) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Ten scores."""
        patches = nn.functional.unfold(pixel_values, 2, stride=2).mT
        x = self.blocks(self.patches(patches) + self.positions)
        return self.head(x.sum(-2) * PATCHES**-0.5)

    @torch.no_grad()
    def slope(self) -> float:
        """``L``: a bound of the map from pixels to what the last linear map takes.

        ``‖E‖ Π (1 + L_F) (1 + ‖W_1‖ ‖W_2‖)``, ``L_F`` the least bound of the catalogue
        for the ball; holds at all images.
        """
        found = _spectral_norm(self.patches.weight)
        for block, layer in zip(self.blocks, self.constants(), strict=True):
            assert isinstance(block, SmoothBlock)
            up, down = block.up.weight, block.down.weight
            assert isinstance(up, Tensor) and isinstance(down, Tensor)
            found *= (1 + layer) * (1 + _spectral_norm(up) * _spectral_norm(down))
        return found

    def constants(self) -> list[float]:
        """A bound of every attention layer on the ball: the least of the catalogue."""
        layers = (block.attention for block in self.blocks if isinstance(block, SmoothBlock))
        return [0.0 if one is None else least_constant(one.attention) for one in layers]

    @torch.no_grad()
    def certified(self, images: Tensor, labels: Tensor) -> Tensor:
        """The radius within which no image changes the answer; 0 where it is wrong.

        ``min_c (z_y - z_c) / (L |w_y - w_c|)`` over the other classes ``c``.
        """
        return _margin_radii(self(images), self.head.weight, labels) / self.slope()


class Linear(nn.Module):
    """The pixels and one linear map to ten scores: what is reached without a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Ten scores."""
        return self.head(pixel_values.flatten(1))

    def slope(self) -> float:
        """1: the linear map takes the pixels themselves."""
        return 1.0

    @torch.no_grad()
    def certified(self, images: Tensor, labels: Tensor) -> Tensor:
        """The distance to the nearest image with another answer, exactly; 0 where it is wrong."""
        return _margin_radii(self(images), self.head.weight, labels)


Net = TypeVar("Net", bound=VisionTransformer | Linear)


def _margin_radii(scores: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``min_c (z_y - z_c) / |w_y - w_c|`` over the classes ``c`` other than ``y``; 0 at least."""
    w, scores = weight.double(), scores.double()
    apart = torch.cdist(w[None], w[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
    own = scores.gather(1, labels[:, None])
    each = (own - scores) / apart[labels].clamp_min(1e-30)
    others = torch.nn.functional.one_hot(labels, 10).bool()
    return each.masked_fill(others, math.inf).amin(1).clamp_min(0.0)


def least_constant(layer: Attention) -> float:
    """The least bound of the catalogue for all inputs on the ball."""
    exact, found = layer.in_double(), []
    for one in catalogue():
        if one.kind == "upper" and one.sound and one.metric == "frobenius" and "x" not in one.needs:
            with contextlib.suppress(NotApplicableError):
                found.append(evaluate(one, exact, num_tokens=PATCHES, radius=RADIUS))
    return min(found)


def _spectral_norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.double(), 2))


def trained(net: Net, data: Digits, epochs: int, seed: int) -> Net:
    """The classifier, trained with Adam."""
    gen = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=_RATE)
    for _ in range(epochs):
        for some in torch.randperm(len(data.labels), generator=gen).split(_BATCH):
            loss = nn.functional.cross_entropy(net(data.images[some]), data.labels[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net.eval().requires_grad_(False)


def attacked(net: VisionTransformer | Linear, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Whether each image is still answered rightly after projected gradient ascent of its loss.

    On the ball ``‖E‖ ≤ eps``, pixels not kept between 0 and 1: an upper end of what is robust.
    """
    move = torch.zeros_like(images)
    safe = net(images).argmax(1) == labels
    for _ in range(_ASCENTS):
        x = (images + move).requires_grad_()
        (slope,) = torch.autograd.grad(
            nn.functional.cross_entropy(net(x), labels, reduction="sum"), x
        )
        move = move + 2.5 * eps / _ASCENTS * slope / _image_norms(slope).clamp_min(1e-30)
        move = move * (eps / _image_norms(move).clamp_min(1e-30)).clamp_max(1.0)
        safe &= net(images + move).argmax(1) == labels
    return safe


def _image_norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)[:, None, None, None]


_DIVISORS = ("theorem-3.3", "G2", "mean-field")
_KINDS = ("undivided", *(f"divided by {by}" for by in _DIVISORS), "L2")
_CONTROLS = "no attention", "linear softmax"
_SIZES = (0.01, 0.03, 0.1, 0.3)  # of moves of an image, Frobenius norm
_MEASURED = 4  # test images at which sigma is measured


@experiment(
    "castin2024/divide-by-bound",
    title="How Smooth Is Attention?: attention divided by its bound, in a vision Transformer",
    reads_text=False,
)
def divide_by_bound(study: Study) -> None:
    """Accuracy, sigma, certified and adversarial accuracy of five kinds of attention, and none."""
    data = digits()
    keys = grid(
        seed=range(study.pick(2, 5)),
        kind=(*_KINDS, *_CONTROLS),
        epochs=[study.pick(5, 15)],
        radius=[RADIUS],
    )
    runs = study.values("runs", keys, functools.partial(_trained_run, study, data))
    _draw_accuracy(study, runs)
    _of_accuracy(study, runs)


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


def _trained_run(
    study: Study, data: Digits, kind: str, seed: int, epochs: int, **_: float
) -> Record:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Linear() if kind == "linear softmax" else VisionTransformer(attention_of(kind))
    net = trained(net, data, epochs, seed)
    images, labels = data.test_images, data.test_labels
    measured: dict[str, Any] = {}
    if kind in _KINDS:
        assert isinstance(net, VisionTransformer)
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
        "accuracy": _share_of(net(images).argmax(1) == labels),
        "certified": [_share_of(radii > eps) for eps in _SIZES],
        "adversarial": [_share_of(attacked(net, images, labels, eps)) for eps in _SIZES],
    }


def _share_of(which: torch.Tensor) -> float:
    return float(which.double().mean())


def _by_seed(runs: Sequence[Record], kind: str, name: str, at: int | None = None) -> list[float]:
    own = [one[name] for one in runs if one["kind"] == kind]
    return own if at is None else [one[at] for one in own]


def _in_percent(values: Sequence[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{100 * mean:.1f} % [{100 * max(low, 0.0):.1f}, {100 * min(high, 1.0):.1f}]"


def _draw_accuracy(study: Study, runs: Sequence[Record]) -> None:
    panels = []
    for name, title in (("adversarial", "under attack"), ("certified", "certified")):
        series = []
        for kind in _KINDS:
            by_size = {eps: _by_seed(runs, kind, name, at) for at, eps in enumerate(_SIZES)}
            seeds = tuple((eps, value) for eps, values in by_size.items() for value in values)
            means = tuple((eps, mean_interval(values)[0]) for eps, values in by_size.items())
            label = kind.replace("theorem", "Theorem").replace("-", " ")
            series += [Series(label, seeds, "points"), Series(label, means)]
        axes = "size of the move (Frobenius)", "share of test images"
        panels.append(Panel(title, tuple(series), *axes, log_y=False))
    title = "Accuracy of a vision Transformer on digits under moves of an image"
    notes = ["Lines: mean over seeds; dots: single seeds."]
    study.draw("divide-by-bound", title, panels, notes, columns=2)


def _of_accuracy(study: Study, runs: Sequence[Record]) -> None:
    every = (*_KINDS, *_CONTROLS)
    accuracy = {kind: _in_percent(_by_seed(runs, kind, "accuracy")) for kind in every}
    sure = {kind: _in_percent(_by_seed(runs, kind, "certified", 0)) for kind in every}
    plain = accuracy["undivided"]
    study.claim(
        "accuracy, attention divided by Theorem 3.3",
        "a promising option at a fixed number of tokens",
        f"{accuracy['divided by theorem-3.3']}; undivided {plain}",
    )
    study.claim(
        "accuracy, attention divided by the mean-field bound",
        "a dramatic loss of expressive power",
        f"{accuracy['divided by mean-field']}; undivided {plain}",
    )
    study.claim(
        f"certified accuracy at moves of {_SIZES[0]:g}",
        "–",
        "; ".join(f"{kind} {sure[kind]}" for kind in _KINDS),
    )
    study.claim(
        f"controls: accuracy, and certified at moves of {_SIZES[0]:g}",
        "–",
        "; ".join(f"{kind} {accuracy[kind]}, {sure[kind]}" for kind in _CONTROLS),
    )
    lines = []
    for kind in _KINDS:
        values = (_by_seed(runs, kind, key) for key in ("sigma", "constant", "slope"))
        smooth = (average(one, digits=4, least=0) for one in values)
        lines.append((kind, accuracy[kind], *smooth))
    columns = ("attention", "accuracy", "sigma", "bound of a layer", "bound of the network")
    study.table("Accuracy and smoothness", lines, columns)
    robust = {"certified": "certified", "under attack": "adversarial"}
    cells = [(at, key) for at in range(len(_SIZES)) for key in robust.values()]
    lines = [
        (kind, *(_in_percent(_by_seed(runs, kind, key, at)) for at, key in cells)) for kind in every
    ]
    columns = (f"{column}, {eps:g}" for eps in _SIZES for column in robust)
    study.table("Accuracy under moves of an image", lines, ("attention", *columns))
    study.remark(
        f"Means over {study.pick(2, 5)} seeds of weights and batches, with 95 % Student "
        "intervals: they say nothing about other test images, of which there are 450.",
        f"{BLOCKS} blocks of width {WIDTH}, {HEADS} heads, {PATCHES} patches; no layer norm: "
        f"tokens are brought into the ball of radius {RADIUS:g} (its nearest point) before "
        "attention. Weights behind the attention and beside it have spectral norm 1 in every "
        "run (the last linear map is free), so that only attention sets the smoothness; "
        "queries, keys and values are free.",
        "Sigma: mean over layers and four test images, rows of the run folder. Bound of a layer: "
        "the least of the catalogue on the ball, the larger of the two layers. Bound of the "
        "network: product over its parts, from pixels between 0 and 1 to the sum of the last "
        "tokens; an image is certified where its margin exceeds what that lets a move do.",
        "The mean-field bound makes sigma so small that its networks have no attention to "
        "speak of. How far another kind is above them in accuracy is what its attention is "
        f"worth here, after {study.pick(5, 15)} epochs; longer training was not run.",
        "Controls: the same network without its attention, and a linear map of the pixels, "
        "whose certificates are exact. They are not in the figure.",
        "Under attack: projected gradient ascent of the loss, 10 steps from the image, pixels "
        "not kept between 0 and 1. The robust accuracy lies between the two.",
        "The mean-field bound here has half the exponent of the paper's Theorem 3.5: the loss "
        "that it causes is the smaller one.",
    )
