"""What dividing attention by a bound costs and buys, on digits and where attention is needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lipscope import MultiheadAttention
from lipscope.attention import Clip
from lipscope.charts import Panel
from lipscope.records import mean_interval
from lipscope_experiments.data import Task, digits
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, chosen, column_mean, grouped, line
from lipscope_experiments.simple_layers import bound_values
from lipscope_experiments.training import certified_radii, norm_of, seeded

PATCHES, WIDTH, HEADS, BLOCKS = 16, 32, 2, 2
RADIUS = 4.0  # of the ball that tokens are brought into before attention
_BATCH, _RATE = 64, 1e-2
_PATIENCE, _LOWER, _LEAST = 5, 0.3, 3e-4  # epochs without 1 % less loss; then the rate; its end
_SYMBOLS = 3
_ASCENTS = 10


def marked_pairs(count: int = 2000) -> Task:
    """Images of 16 patches, each a symbol and a mark; 1 where both marked ones show one symbol.

    A patch ``(mark, symbol 1, 2, 3)``, one of three symbols, drawn alike; two patches are marked.
    Half of the images show 1. A sum over patches of a function of each, also of its place, is
    right on at most 3/4: of the pairs aa, bb, ab, ba at two places the first two have the sum of
    the last two, so that no threshold parts them.
    """
    gen = torch.Generator().manual_seed(0)
    total = count + count // 2
    shown = torch.randint(_SYMBOLS, (total, PATCHES), generator=gen)
    places = torch.rand(total, PATCHES, generator=gen).argsort(1)[:, :2]
    labels = torch.arange(total) % 2
    first = shown.gather(1, places[:, :1])
    apart = torch.randint(1, _SYMBOLS, (total, 1), generator=gen)
    shown.scatter_(1, places[:, 1:], (first + apart * (1 - labels[:, None])) % _SYMBOLS)
    marks = torch.zeros(total, PATCHES).scatter_(1, places, 1.0)
    patches = torch.cat([marks[..., None], nn.functional.one_hot(shown, _SYMBOLS)], -1)
    images = nn.functional.fold(patches.mT, 8, 2, stride=2).squeeze(1)
    return Task((images[:count], labels[:count]), (images[count:], labels[count:]))


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
        self.up = spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = spectral_norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after the block."""
        if self.attention is not None:
            near = self.enter(x)
            x = x + self.attention(near, near, near, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class VisionTransformer(nn.Module):
    """Patches of 2 x 2, two blocks, the sum of tokens over √n, a linear map to ten scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.patches = nn.Linear(4, WIDTH)
        self.positions = nn.Parameter(0.3 * torch.randn(PATCHES, WIDTH))
        self.blocks: Any = nn.Sequential(*(SmoothBlock(attention_of(kind)) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Ten scores."""
        patches = nn.functional.unfold(pixel_values[:, None], 2, stride=2).mT
        x = self.blocks(self.patches(patches) + self.positions)
        return self.head(x.sum(-2) * PATCHES**-0.5)

    @torch.no_grad()
    def slope(self) -> float:
        """``L``: a bound of the map from pixels to what the last linear map takes.

        ``‖E‖ Π (1 + L_F) (1 + ‖W_1‖ ‖W_2‖)``, ``L_F`` the least bound of the catalogue
        for the ball; holds at all images.
        """
        found = norm_of(self.patches.weight)
        for block, layer in zip(self.blocks, self.constants(), strict=True):
            found *= (1 + layer) * (1 + norm_of(block.up.weight) * norm_of(block.down.weight))
        return found

    def constants(self) -> list[float]:
        """A bound of every attention layer on the ball: the least of the catalogue."""
        layers = (one.attention and one.attention.attention for one in self.blocks)
        return [min(bound_values(x, PATCHES, RADIUS).values()) if x else 0.0 for x in layers]


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


def train(net: VisionTransformer | Linear, data: Task, epochs: int, seed: int) -> int:
    """Train a classifier with Adam until its loss no longer falls; for how many epochs."""
    gen = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=_RATE)
    plan = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, factor=_LOWER, patience=_PATIENCE, threshold=1e-2
    )
    (images, labels), done = data.train, 0
    while done < epochs and optimiser.param_groups[0]["lr"] >= _LEAST:
        total, done = 0.0, done + 1
        for some in torch.randperm(len(labels), generator=gen).split(_BATCH):
            loss = nn.functional.cross_entropy(net(images[some]), labels[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach())
        plan.step(total)
    net.eval().requires_grad_(False)
    return done


def attacked(net: VisionTransformer | Linear, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Whether each image is still answered rightly after projected ascent of its loss in a ball."""
    move = torch.zeros_like(images)
    safe = net(images).argmax(1) == labels
    for _ in range(_ASCENTS):
        x = (images + move).requires_grad_()
        loss = nn.functional.cross_entropy(net(x), labels, reduction="sum")
        (slope,) = torch.autograd.grad(loss, x)
        up = nn.functional.normalize(slope.flatten(1), eps=1e-30).view_as(slope)
        move = (move + 2.5 * eps / _ASCENTS * up).renorm(2, 0, eps)
        safe &= net(images + move).argmax(1) == labels
    return safe


_DIVISORS = ("theorem-3.3", "mean-field")
_LINEAR, _NONE = "linear softmax", "no attention"
_KINDS = (_LINEAR, _NONE, "undivided", *(f"divided by {by}" for by in _DIVISORS), "L2", "cosine")
_TASKS = {"marked pair": "two marked patches: do they show one symbol?", "digits": "digits"}
_SIZES = (0.01, 0.1, 0.3)  # of moves of an image, Frobenius norm
_EPSILON = 1.0  # of cosine attention, whose constant goes like 1 / √ε
PLAN = (
    "Question: what does dividing attention by a bound of itself cost in accuracy and buy in "
    "certificates, once training has converged, beside a linear map, the same network without "
    "attention, and attention that is Lipschitz by itself (L2, scaled cosine)?",
    "Tasks: digits, which need no attention; and whether two marked patches of sixteen show the "
    "same of three symbols, which a sum over patches cannot tell: at most 3/4.",
    "Statistic: accuracy and certified accuracy on test images, means over seeds. Baselines: "
    "`linear softmax` (exact certificate) and `no attention`, in the same table.",
    "Dividing is of use on a task if its certified accuracy at some size is above that of both "
    "baselines beyond the 95 % interval over seeds; it keeps what attention is for if its "
    "accuracy on the marked pair is above that of `no attention` beyond the interval. Either is "
    "refuted otherwise.",
)


@experiment("castin2024/divide-by-bound", reads_text=False)
def divide_by_bound(study: Study) -> None:
    """How Smooth Is Attention?: attention divided by its bound, beside networks without it."""
    study.plan(*PLAN)
    data = {"marked pair": marked_pairs(study.pick(200, 2000)), "digits": digits()}
    seeds, epochs = study.pick((2, 3), (3, 60))
    keys = grid(seed=range(seeds), task=_TASKS, kind=_KINDS, epochs=[epochs], radius=[RADIUS])
    runs = study.values("runs", keys, functools.partial(_trained_run, data))
    _draw_accuracy(study, runs)
    for task in _TASKS:
        _of_task(study, task, chosen(runs, task=task))
    study.remark(
        f"Means over {seeds} seeds of weights and batches, with 95 % Student "
        "intervals: they say nothing about other test images, nor about other widths.",
        f"{BLOCKS} blocks of width {WIDTH}, {HEADS} heads, {PATCHES} patches; no layer norm: "
        f"tokens are brought into the ball of radius {RADIUS:g} (its nearest point) before "
        "attention. Weights behind the attention and beside it have spectral norm 1 in every "
        "run (the last linear map is free), so that only attention sets the smoothness; "
        "queries, keys and values are free.",
        f"Training: Adam from {_RATE:g}; the rate times {_LOWER:g} after {_PATIENCE} epochs "
        f"without 1 % less loss, until it is below {_LEAST:g}: converged in that sense, unless "
        f"{epochs} epochs came first.",
        "Bound of a layer: the least of the catalogue on the ball, the larger of two layers. "
        "Bound of the network: product over its parts, from pixels between 0 and 1 to the sum of "
        "the last tokens; an image is certified where its margin exceeds what that lets a move "
        f"do. Cosine attention has ε = {_EPSILON:g}.",
        "Under attack: projected gradient ascent of the loss, 10 steps from the image, pixels "
        "not kept between 0 and 1. The robust accuracy lies between the two.",
        "The mean-field bound here has half the exponent of the paper's Theorem 3.5: the loss "
        "that it causes is the smaller one.",
        "What it does not show: other learning rates by variant, and starts that keep attention "
        "alive.",
    )


def attention_of(kind: str) -> MultiheadAttention | None:
    """One attention layer of a kind."""
    if kind == _NONE:
        return None
    by = kind.removeprefix("divided by ")
    divided: dict[str, Any] = {"variant": "divided", "by": by, "bias": False}
    options = {
        "undivided": {"bias": False},
        "L2": {"variant": "l2"},
        "cosine": {"variant": "scaled-cosine", "bias": False, "temperature": 4.0, "eps": _EPSILON},
    }.get(kind, divided | {"num_tokens": PATCHES, "radius": RADIUS})
    return MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


def _trained_run(
    data: Mapping[str, Task], task: str, kind: str, seed: int, epochs: int, **_: float
) -> Record:
    with seeded(seed):
        net = Linear() if kind == _LINEAR else VisionTransformer(kind)
    done, (images, labels) = train(net, data[task], epochs, seed), data[task].test
    scores, slope = net(images).detach(), net.slope()
    radii = certified_radii(scores, net.head.weight, labels, slope)
    return {
        "done": done,
        "slope": slope,
        "constant": 0.0 if isinstance(net, Linear) else max(net.constants()),
        "accuracy": _share_of(scores.argmax(1) == labels),
        "certified": [_share_of(radii > eps) for eps in _SIZES],
        "adversarial": [_share_of(attacked(net, images, labels, eps)) for eps in _SIZES],
    }


def _share_of(which: Tensor) -> float:
    return float(which.double().mean())


def _in_percent(values: Sequence[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{100 * mean:.1f} % [{100 * max(low, 0.0):.1f}, {100 * min(high, 1.0):.1f}]"


def _draw_accuracy(study: Study, runs: Sequence[Record]) -> None:
    panels = []
    axes = "size of the move (Frobenius)", "share of test images certified"
    for task, words in _TASKS.items():
        series = []
        for kind, mine in grouped(chosen(runs, task=task), "kind"):
            means = map(fmean, zip(*(r["certified"] for r in mine), strict=True))
            series.append(line(kind.replace("theorem-", "Theorem "), _SIZES, means))
        panels.append(Panel(words, series, *axes, log_y=False))
    study.draw("divide-by-bound", "Certified accuracy, mean over seeds", panels, columns=2)


def _above(mine: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a mean is above another beyond the interval over seeds, pair by pair."""
    return mean_interval([a - b for a, b in zip(mine, other, strict=True)])[1] > 0


def _of_task(study: Study, task: str, runs: Sequence[Record]) -> None:
    by = dict(grouped(runs, "kind"))
    accuracy = {kind: [r["accuracy"] for r in mine] for kind, mine in by.items()}

    sure = {kind: [*zip(*(r["certified"] for r in mine), strict=True)] for kind, mine in by.items()}
    for kind in (f"divided by {one}" for one in _DIVISORS):
        better = [
            f"{eps:g}"
            for eps, mine, *others in zip(
                _SIZES, sure[kind], sure[_LINEAR], sure[_NONE], strict=True
            )
            if all(_above(mine, other) for other in others)
        ]
        study.claim(
            f"{task}: accuracy, attention {kind}",
            "promising" if "3.3" in kind else "a dramatic loss of expressive power",
            f"{_in_percent(accuracy[kind])}; undivided {_in_percent(accuracy['undivided'])}; "
            f"no attention {_in_percent(accuracy[_NONE])}; "
            f"linear {_in_percent(accuracy[_LINEAR])}. Above no attention beyond the interval: "
            f"{'yes' if _above(accuracy[kind], accuracy[_NONE]) else 'no'}",
        )
        study.claim(
            f"{task}: sizes of moves at which attention {kind} certifies more than both baselines",
            "at least one, if dividing is of use",
            ", ".join(better) or "none",
        )
    study.table(
        f"{task}: accuracy, robustness and smoothness",
        by.items(),
        {
            "attention": "kind",
            "accuracy": lambda kind, _: _in_percent(accuracy[kind]),
            **{
                f"{what}, {eps:g}": column_mean(lambda r, key=key, at=at: r[key][at], _in_percent)
                for at, eps in enumerate(_SIZES)
                for what, key in (("certified", "certified"), ("under attack", "adversarial"))
            },
            "bound of a layer": column_mean("constant"),
            "bound of the network": column_mean("slope"),
            "epochs": column_mean("done", lambda own: f"{min(own)} to {max(own)}"),
        },
    )
