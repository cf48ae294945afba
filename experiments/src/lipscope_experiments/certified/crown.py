"""Certified radii beside those of auto_LiRPA, where it can be imported: no registry has it."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lipscope.attention import Clip, DotProduct
from lipscope.certificates import DecisionBall, certify_network
from lipscope.models import ACTIVATIONS, Branch, Feed, Network
from lipscope_experiments.findings import Record

Method = Literal["CROWN", "IBP"]


def peer() -> Any:
    """The package, or None where it or something that it imports is missing."""
    try:
        return importlib.import_module("auto_LiRPA")
    except ImportError:
        return None


def compared(
    network: Network,
    x: Float[Tensor, "n d"],
    free: Bool[Tensor, " n"],
    ball: DecisionBall = "joint",
    methods: Sequence[Method] = get_args(Method),
) -> Record:
    """The radius of a certificate, the smallest flip found, the peer's radii; processor seconds.

    A record without what was not found: a flip, a bound for an operation, the package.
    """
    began = time.process_time()
    found = certify_network(network, x, ball=ball, tokens=free)
    record: Record = {"ours": found.radius, "seconds, ours": time.process_time() - began}
    if found.attack is None:
        return record
    record["attack"] = found.attack
    for method in methods if peer() else ():
        theirs = peer_radius(network, x, free, found.decision, found.attack, method)
        if theirs is not None:
            record |= {method: theirs[0], f"seconds, {method}": theirs[1]}
    return record


def peer_radius(
    network: Network, x: Tensor, free: Tensor, label: int, most: float, method: Method
) -> tuple[float, float] | None:
    """The l2 radius, up to ``most``, that a method of auto_LiRPA proves, and processor seconds.

    All tokens are free to move, or one. A variance whose lower bound reaches 0, where the package
    stops, counts as not proved. None where it has no bound for an operation (exact GELU).
    """
    package, before = peer(), torch.get_default_dtype()
    torch.set_default_dtype(x.dtype)  # its constants are of that type
    try:
        moved, moves = Moved(network, x.shape[1]), free[None, :, None].to(x)
        move = torch.zeros_like(x if bool(free.all()) else x[:1])[None]
        base = moved.map(x)[None] + moved.bias
        one = torch.eye(len(network.head)).to(x)
        sides = (one[label] - one[torch.arange(len(one)) != label])[None]
        bounded = package.BoundedModule(moved, (move, base, moves), verbose=False)

        def proved(radius: float) -> bool:
            ball = package.PerturbationLpNorm(norm=2, eps=radius)
            inputs = (package.BoundedTensor(move, ball), base, moves)
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


# --- networks in torch's own operations, as the package reads them


class Moved(nn.Module):
    """A network of parts as a function of the move alone.

    A move meets one linear map first, ``[I; W_Q; W_K; W_V]``, the network's own or the identity:
    only of such a map are the package's l2 intervals right.
    """

    def __init__(self, network: Network, d: int) -> None:
        super().__init__()
        first = network.branches[0]
        maps = _first_maps(first) if first.norm is None else []
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


def scores(network: Network, x: Tensor, known: Sequence[Tensor] = ()) -> Tensor:
    """The scores ``(b, c)`` of a network at tokens ``(b, n, d)``.

    ``known``: what the maps that read ``x`` first give, if that is there already.
    """
    for branch in network.branches:
        x, known = _stream_after(branch, x, known), ()
    x = (network.share[:, None] * x).sum(1, keepdim=True)
    for branch in network.tail:
        x = _stream_after(branch, x)
    return nn.functional.linear(x[:, 0], network.head, network.bias)


def _first_maps(branch: Branch) -> list[tuple[Tensor, Tensor | None]]:
    """The linear maps, with biases, by which a branch reads the stream."""
    part = branch.part
    if isinstance(part, Feed) and part.gate is None:
        return [(part.inner, part.inner_bias)]
    if isinstance(part, DotProduct) and part.output is not None and not part.causal:
        names = ("query", "key", "value")
        return [(getattr(part, name), getattr(part, f"{name}_bias")) for name in names]
    if part is not None:
        raise NotImplementedError(f"no form of {type(part).__name__}")
    return []


def _stream_after(branch: Branch, x: Tensor, known: Sequence[Tensor] = ()) -> Tensor:
    part, norm, y = branch.part, branch.norm, x
    assert not isinstance(norm, Clip)
    if norm is not None:
        y = x - x.mean(-1, keepdim=True) if norm.centred else x
        if norm.scaled:
            # As a power: of a product of two factors, as `Norm` has it, CROWN's bound is looser.
            y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
        y = norm.weight * y + norm.bias
    read = known or [nn.functional.linear(y, *one) for one in _first_maps(branch)]
    if isinstance(part, DotProduct):
        q, k, v = (one.unflatten(-1, (part.num_heads, -1)).transpose(1, 2) for one in read)
        p = (q @ k.transpose(-1, -2) / (1 / part.scale)).softmax(-1)
        assert part.output is not None
        y = nn.functional.linear((p @ v).transpose(1, 2).flatten(2), part.output, part.output_bias)
    elif isinstance(part, Feed):
        hidden = ACTIVATIONS[part.activation](read[0])
        y = nn.functional.linear(hidden, part.outer, part.outer_bias)
    return x + y if branch.skip else y
