"""The radius that auto_LiRPA proves, where it can be imported: no registry of packages has it."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope_experiments.certified.classifiers import Block, Classifier, Mixing


def peer() -> Any:
    """The package, or None where it or something that it imports is missing."""
    try:
        return importlib.import_module("auto_LiRPA")
    except ImportError:
        return None


class _Moved(nn.Module):
    """The classifier as a function of the move alone.

    A move meets one linear map first, ``[I; W_Q; W_K; W_V]`` or the network's own: only of such a
    map are the package's l2 intervals right.
    """

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        first = model.blocks[0]
        mixing = first.attention if isinstance(first, Block) else first
        assert isinstance(mixing, Mixing)
        self.model, self.mixing, d = model, mixing, model.head.in_features
        if model.front is None:
            parts = (mixing.query, mixing.key, mixing.value)
            weight = torch.cat([torch.eye(d).double(), *(p.weight for p in parts)])
            self.bias = torch.cat([torch.zeros(d).double(), *(p.bias for p in parts)])
        else:
            weight, self.bias = model.front.weight, model.front.bias
        self.map = nn.Linear(*weight.T.shape, bias=False)
        self.map.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, move: Tensor, base: Tensor, moves: Tensor) -> Tensor:
        z, model = base + moves * self.map(move), self.model
        blocks, d = list(model.blocks), model.head.in_features
        if model.front_norm is not None:
            x = model.front_norm(z)
        else:
            x, q, k, v = (z[..., i * d : (i + 1) * d] for i in range(4))
            mixed, first = self.mixing.mix(q, k, v), blocks.pop(0)
            x = first.after(x, mixed) if isinstance(first, Block) else mixed
        for block in blocks:
            x = block(x)
        return model.read(x)


def peer_radius(
    model: Classifier,
    x: Float[Tensor, "n d"],
    label: int,
    moves: Float[Tensor, "n 1"],
    most: float,
    method: Literal["CROWN", "IBP"],
) -> tuple[float, float] | None:
    """The l2 radius, up to ``most``, that a method of auto_LiRPA proves, and processor seconds.

    ``moves`` holds 1 for all tokens or for one. A variance whose lower bound reaches 0, where the
    package stops, counts as not proved. None where it has no bound for an operation (exact GELU).
    """
    package, before = peer(), torch.get_default_dtype()
    torch.set_default_dtype(x.dtype)  # its constants are of that type
    try:
        moved, move = _Moved(model), torch.zeros_like(x if bool(moves.all()) else x[:1])[None]
        base, side = moved.map(x)[None] + moved.bias, torch.tensor([[[-1.0, 1.0]]])
        side = side if label else -side
        bounded = package.BoundedModule(moved, (move, base, moves[None]), verbose=False)

        def proved(radius: float) -> bool:
            ball = package.PerturbationLpNorm(norm=2, eps=radius)
            inputs = (package.BoundedTensor(move, ball), base, moves[None])
            try:
                with torch.no_grad():  # a graph of all its products would take gigabytes
                    low = bounded.compute_bounds(inputs, C=side, method=method, bound_upper=False)
            except AssertionError:
                return False
            return float(low[0]) > 0

        return bisected(proved, most)
    except NotImplementedError:
        return None
    finally:
        torch.set_default_dtype(before)


def bisected(proved: Callable[[float], bool], most: float) -> tuple[float, float]:
    """The largest radius proved, to 2 %; 0 if a thousandth of the most is not; seconds."""
    began, low, high, middle = time.process_time(), 0.0, most, 0.3 * most
    while high > 1e-3 * most and (low == 0 or high / low > 1.02):
        low, high = (middle, high) if proved(middle) else (low, middle)
        middle = math.sqrt(low * high) if low else high / 3
    return low, time.process_time() - began
