"""Training: from a seed, of smooth Transformers; and what a bound proves of a classifier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.overrides import TorchFunctionMode

from lipscope import SmoothTransformer
from lipscope_experiments.data import Task

SHARPER = 8.0
"""What scores are multiplied by in a loss: caps would leave them small, and answers unsure."""
RATE = 0.01
"""The largest rate of AdamW, unless another is given."""
_MUON = 0.1  # the largest rate of Muon


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What torch draws by itself, such as first weights, from a seed; afterwards as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def train(
    model: Any, loss_of: Callable[[], Tensor], steps: int, rate: float = RATE
) -> Iterator[tuple[int, float]]:
    """Muon on the matrices, AdamW on the rest, rates that fall to zero; steps and losses.

    Of a module that has no caps AdamW trains all. ``rate``: its largest one.
    """
    capped = isinstance(model, SmoothTransformer)
    optimisers: list[Any] = [
        AdamW(model.others if capped else model.parameters(), weight_decay=0.0)
    ]
    if capped:
        optimisers.insert(0, Muon(model.matrices, weight_decay=0.0))
    rates = (_MUON, rate)[-len(optimisers) :]
    for step in range(steps):
        loss = loss_of()
        for optimiser, most in zip(optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = most * (1 - step / steps)
            optimiser.zero_grad()
        loss.backward()
        with _Float32():
            for optimiser in optimisers:
                optimiser.step()
        if capped:
            model.cap_weights()
        yield step + 1, float(loss.detach())


def fit(
    model: nn.Module, of: Task, steps: int, rate: float, seed: int = 0, sharper: float = 1.0
) -> nn.Module:
    """Train a classifier on batches of 64, by the cross-entropy of its scores times a factor."""
    (x, y), gen = of.train, torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        some = torch.randint(len(y), (64,), generator=gen)
        return nn.functional.cross_entropy(sharper * model(x[some]), y[some])

    for _ in train(model, loss, steps, rate):
        pass
    return model.eval()


class _Float32(TorchFunctionMode):
    """Keep in float32 what Muon rounds to bfloat16, which many a processor emulates, slowly."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


def norm_of(weight: Tensor) -> float:
    """The spectral norm of a matrix, in float64."""
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))


def certified_radii(scores: Tensor, head: Tensor, labels: Tensor, slope: float) -> Tensor:
    """The radius within which no input changes its answer; 0 where the answer is wrong.

    ``min_c (z_y - z_c) / (L |w_y - w_c|)`` over the other classes ``c``, for scores ``z`` by the
    rows ``w`` of a head and a bound ``L`` of how far what it reads moves. Of a linear classifier
    the distance to the nearest input with another answer, exactly.
    """
    w, scores = head.detach().double(), scores.double()
    apart = (w[:, None] - w[None]).norm(dim=-1)[labels].clamp_min(1e-30)
    each = (scores.gather(1, labels[:, None]) - scores) / (slope * apart)
    own = nn.functional.one_hot(labels, len(w)).bool()
    return each.masked_fill(own, torch.inf).amin(1).clamp_min(0.0)
