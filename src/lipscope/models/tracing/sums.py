"""Sums and fixed multiples of token matrices that a model forms, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipscope.models.tracing.flow import lies

_ADDS = ("add", "add_", "__add__", "__radd__", "__iadd__")
_TIMES = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_")
_OVER = ("div", "div_", "__truediv__", "__itruediv__", "divide", "divide_", "true_divide")


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
class Multiple:
    """A token matrix times a factor that depends on no token.

    Attributes:
        factor: One number, ``()``, or one for every channel, ``(d,)``.
        of: Where the matrix lies in memory.
        place: Where the product lies.
        value: The product, kept alive so that nothing else takes its place.
        sums_before: Number of sums that the model had formed before.
    """

    factor: Tensor
    of: int
    place: int
    value: Tensor
    sums_before: int


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
    """Watch a forward pass for sums of tensors of one shape, and for fixed multiples of them."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.sums: list[Sum] = []
        self.multiples: list[Multiple] = []
        self.latest: dict[int, Sum] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        terms = [a for a in args if isinstance(a, Tensor) and lies(a)]
        if name == "__get__":  # a shape or a dtype, no computation
            return func(*args, **(kwargs or {}))
        adds = _adds(func, args)
        factors = [] if kwargs else _factors(name, args)
        for known in filter(None, (self.latest.get(t.data_ptr()) for t in terms)):
            known.added |= adds
            known.read |= not adds
        out = func(*args, **(kwargs or {}))
        if adds and isinstance(out, Tensor):
            seen = Sum(self.kept.keep(out))
            self.sums.append(seen)
            self.latest[out.data_ptr()] = seen
        elif factors and isinstance(out, Tensor):
            place, value, count = out.data_ptr(), self.kept.keep(out), len(self.sums)
            self.multiples += [Multiple(f, of, place, value, count) for of, f in factors]
        return out

    def of(self, place: int) -> Sum | None:
        """The sum that lies at a place in memory."""
        return self.latest.get(place)

    def factors(self, place: int, sums_before: int) -> Iterator[Tensor]:
        """By what the model multiplied the matrix at a place, after so many sums: step by step."""
        total = torch.ones((), dtype=torch.float64)
        for one in self.multiples:
            if one.of == place and one.sums_before >= sums_before:
                total, place = total * one.factor, one.place
                yield total


class AtSum(TorchFunctionMode):
    """Hand over the value of one sum of a forward pass: the one at this place among `SeenSums`."""

    def __init__(self, index: int, reached: Callable[[Tensor], None]) -> None:
        self.left, self.reached = index, reached

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _adds(func, args) and isinstance(out, Tensor):
            self.left -= 1
            if self.left < 0:
                self.reached(out)
        return out


def _adds(func: Any, args: Any) -> bool:
    terms = [a for a in args if isinstance(a, Tensor)]
    return getattr(func, "__name__", "") in _ADDS and _alike(terms)


def _factors(name: str, args: Any) -> list[tuple[int, Tensor]]:
    """Which arguments of a product may be a matrix, and the factor that the other one is."""
    if name not in _TIMES + _OVER or len(args) != 2:
        return []
    pairs = [(args[0], args[1]), (args[1], args[0])]
    pairs = [(x, f) for x, f in pairs[: 1 if name in _OVER else 2] if _is_factor(f, x)]
    fixed = ((x.data_ptr(), _number_or_row(f)) for x, f in pairs)
    return [(place, 1 / f if name in _OVER else f) for place, f in fixed]


def _number_or_row(factor: Any) -> Tensor:
    if not isinstance(factor, Tensor):
        return torch.tensor(float(factor), dtype=torch.float64)  # makes no matrix double
    return factor.detach().clone().reshape(() if factor.numel() == 1 else -1)


def _is_factor(factor: Any, x: Any) -> bool:
    """Whether it multiplies every token in the same way, and no token moves it."""
    if not isinstance(x, Tensor) or x.ndim not in (2, 3) or not x.is_floating_point():
        return False
    if not lies(x):
        return False
    if not isinstance(factor, Tensor):
        return isinstance(factor, int | float)
    size = factor.numel()
    of_channels = factor.ndim > 0 and factor.shape[-1] == size == x.shape[-1]
    return not factor.requires_grad and (size == 1 or of_channels) and lies(factor)


def _alike(terms: list[Tensor]) -> bool:
    """Whether these are two token matrices; scores have more axes, masks another shape."""
    alike = len(terms) == 2 and terms[0].ndim in (2, 3) and terms[0].shape == terms[1].shape
    return alike and all(map(lies, terms))


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
