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

from lipscope.attention import Clip, DotProduct
from lipscope.models import ACTIVATIONS, Branch, Feed, Network, Norm


def peer() -> Any:
    """The package, or None where it or something that it imports is missing."""
    try:
        return importlib.import_module("auto_LiRPA")
    except ImportError:
        return None


class _Through(nn.Module):
    """A branch in operations that the package knows."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        part, norm, self.skip = branch.part, branch.norm, branch.skip
        assert not isinstance(norm, Clip)
        self.part, self.norm, self.reads = part, norm, nn.ModuleList()
        if isinstance(part, Feed) and part.gate is None:
            self.reads.append(_linear(part.inner, part.inner_bias))
            self.writes = _linear(part.outer, part.outer_bias)
        elif isinstance(part, DotProduct) and part.output is not None and not part.causal:
            for name in ("query", "key", "value"):
                self.reads.append(_linear(getattr(part, name), getattr(part, f"{name}_bias")))
            self.writes = _linear(part.output, part.output_bias)
        elif part is not None:
            raise NotImplementedError(f"no form of {type(part).__name__}")

    def forward(self, x: Tensor, *known: Tensor) -> Tensor:
        """The stream ``x`` after the branch, where its first maps may be known already."""
        y = x if self.norm is None else _normed(self.norm, x)
        read = known or [one(y) for one in self.reads]
        if isinstance(self.part, DotProduct):
            heads = self.part.num_heads
            q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in read)
            p = (q @ k.transpose(-1, -2) * self.part.scale).softmax(-1)
            y = self.writes((p @ v).transpose(1, 2).flatten(2))
        elif isinstance(self.part, Feed):
            y = self.writes(ACTIVATIONS[self.part.activation](read[0]))
        return x + y if self.skip else y


def _normed(norm: Norm, x: Tensor) -> Tensor:
    c = x - x.mean(-1, keepdim=True) if norm.centred else x
    if norm.scaled:
        # As a power: of a product of two factors, as `Norm` has it, the package's bound is looser.
        c = c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * c + norm.bias


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    found = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype).requires_grad_(False)
    found.weight.copy_(weight)
    found.bias.copy_(torch.zeros_like(found.bias) if bias is None else bias)
    return found


class Moved(nn.Module):
    """A network of parts as a function of the move alone.

    A move meets one linear map first, ``[I; W_Q; W_K; W_V]``, the network's own or the identity:
    only of such a map are the package's l2 intervals right.
    """

    def __init__(self, network: Network, d: int) -> None:
        super().__init__()
        self.first, *others = map(_Through, network.branches)
        self.others = nn.Sequential(*others)
        self.tail = nn.Sequential(*map(_Through, network.tail))
        maps: list[Any] = list(self.first.reads) if self.first.norm is None else []
        self.stream = not maps or self.first.skip is not False
        if self.stream:
            maps.insert(0, _linear(torch.eye(d).to(network.head)))
        self.widths = [len(one.weight) for one in maps]
        self.bias = torch.cat([one.bias for one in maps])
        self.map = nn.Linear(d, len(self.bias), bias=False)
        self.map.weight = nn.Parameter(torch.cat([one.weight for one in maps]), requires_grad=False)
        self.share, self.head = network.share[:, None], _linear(network.head, network.bias)

    def forward(self, move: Tensor, base: Tensor, moves: Tensor) -> Tensor:
        """Scores: tokens move by ``moves * move`` from where ``base`` is what the map makes."""
        z = base + moves * self.map(move)
        parts = list(z.split(self.widths, -1))
        x = parts.pop(0) if self.stream else z
        x = self.others(self.first(x, *parts))
        return self.head(self.tail((self.share * x).sum(1, keepdim=True))[:, 0])


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
        others = [c for c in range(len(network.head)) if c != label]
        one = torch.eye(len(network.head)).to(x)
        sides = (one[label] - one[others])[None]
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
