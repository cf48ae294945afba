"""Which sums of token matrices a model forms, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ADDS = ("add", "add_", "__add__", "__radd__", "__iadd__")


@dataclass
class NormCall:
    """One call of a normalisation module: ``y = module(x)``; places are addresses in memory."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor
    x_place: int
    y_place: int


@dataclass
class Sum:
    """A sum of two tensors of one shape, and what the model did with it next.

    Attributes:
        value: The sum.
        read: Whether anything but another sum used it: a partial sum is not the stream.
        added: Whether it was a term of another sum: the stream goes on from here.
        norm: The norm that took it, or None.
    """

    value: Tensor
    read: bool = False
    added: bool = False
    norm: NormCall | None = None


@dataclass
class Kept:
    """Tensors of one forward pass, kept alive so that none takes the place of another.

    Attributes:
        copies: Keep the values as they were when the tensor was seen. Only models that write
            into their activations (``x += attention(x)``) need this.
    """

    copies: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor:
        """The tensor without its marks, or a copy of it."""
        x = x.detach()
        if not x.is_inference():
            self.versions.append((x, x._version))
        return x.clone() if self.copies else x

    def overwritten(self) -> bool:
        """Whether the model wrote into a tensor after it was seen."""
        return any(x._version != version for x, version in self.versions)


class SeenSums(TorchFunctionMode):
    """Watch a forward pass for sums of tensors of one shape."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.sums: list[Sum] = []
        self.latest: dict[int, Sum] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        terms = [a for a in args if isinstance(a, Tensor)]
        if name == "__get__":  # a shape or a dtype, no computation
            return func(*args, **(kwargs or {}))
        adds = name in _ADDS and _alike(terms)
        for known in filter(None, (self.latest.get(t.data_ptr()) for t in terms)):
            known.added |= adds
            known.read |= not adds
        out = func(*args, **(kwargs or {}))
        if adds and isinstance(out, Tensor):
            seen = Sum(self.kept.keep(out))
            self.sums.append(seen)
            self.latest[out.data_ptr()] = seen
        return out

    def of(self, place: int) -> Sum | None:
        """The sum that lies at a place in memory."""
        return self.latest.get(place)


def _alike(terms: list[Tensor]) -> bool:
    """Whether these are two token matrices; scores have more axes, masks another shape."""
    return len(terms) == 2 and terms[0].ndim in (2, 3) and terms[0].shape == terms[1].shape


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest entry of ``b``."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny))


def close(seen: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree up to rounding."""
    if seen.shape != expected.shape:
        return False
    if bool(expected.isfinite().all()):
        return distance(seen, expected) <= 1e-5
    return torch.allclose(seen, expected, rtol=1e-5, equal_nan=True)
