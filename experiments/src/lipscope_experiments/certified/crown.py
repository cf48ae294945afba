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

from lipscope.models import Network
from lipscope_experiments.certified.classifiers import first_maps, scores


def peer() -> Any:
    """The package, or None where it or something that it imports is missing."""
    try:
        return importlib.import_module("auto_LiRPA")
    except ImportError:
        return None


class Moved(nn.Module):
    """A network of parts as a function of the move alone.

    A move meets one linear map first, ``[I; W_Q; W_K; W_V]``, the network's own or the identity:
    only of such a map are the package's l2 intervals right.
    """

    def __init__(self, network: Network, d: int) -> None:
        super().__init__()
        first = network.branches[0]
        maps = first_maps(first) if first.norm is None else []
        self.stream = not maps or first.skip is not False
        if self.stream:
            maps.insert(0, (torch.eye(d).to(network.head), None))
        self.network, self.widths = network, [len(weight) for weight, _ in maps]
        self.bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in maps])
        self.map = nn.Linear(d, len(self.bias), bias=False)
        self.map.weight = nn.Parameter(torch.cat([w for w, _ in maps]), requires_grad=False)

    def forward(self, move: Tensor, base: Tensor, moves: Tensor) -> Tensor:
        """Scores: tokens move by ``moves * move`` from where ``base`` is what the map makes."""
        z = base + moves * self.map(move)
        parts = list(z.split(self.widths, -1))
        return scores(self.network, parts.pop(0) if self.stream else z, parts)


def peer_radius(
    network: Network,
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
        moved = Moved(network, x.shape[1])
        move = torch.zeros_like(x if bool(moves.all()) else x[:1])[None]
        base = moved.map(x)[None] + moved.bias
        one = torch.eye(len(network.head)).to(x)
        sides = (one[label] - one[torch.arange(len(one)) != label])[None]
        bounded = package.BoundedModule(moved, (move, base, moves[None]), verbose=False)

        def proved(radius: float) -> bool:
            ball = package.PerturbationLpNorm(norm=2, eps=radius)
            inputs = (package.BoundedTensor(move, ball), base, moves[None])
            try:
                with torch.no_grad():  # a graph of all its products would take gigabytes
                    low = bounded.compute_bounds(inputs, C=sides, method=method, bound_upper=False)
            except AssertionError:
                return False
            return float(low[0].min()) > 0

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
