"""What a forward pass reads off its values without a derivative: comparisons, choices, numbers.

One run shows nothing of what comes of them at other values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipscope.models.tracing.recorder import Node, data_address, marked, origins

# What makes numbers, or a decision, of a tensor.
_READS = (
    *("__bool__", "is_nonzero", "equal", "allclose", "item", "tolist", "numpy", "__array__"),
    *("__float__", "__int__", "__index__", "__contains__"),
)
# Of these the first argument alone is what comes out.
_AS = ("to", "type_as", "expand_as", "view_as", "reshape_as")
_FAR = 10**9  # no ordinary number is so large
_TABLES = ("embedding", "__getitem__", "index_select")


class SideChannels(TorchFunctionMode):
    """Watch a pass for what is read off a tensor that requires a gradient, and has none itself.

    ``turned``: which of the numbers and decisions that are read is another one in this pass, and
    what that is.
    """

    def __init__(self, turned: int | None = None, other: Callable[[Any], Any] = bool) -> None:
        self.turned, self.other = turned, other
        self.reads: list[tuple[str, bool]] = []  # by which functions, and whether it decides
        self._read: dict[int, Tensor] = {}  # tensors that were read off, kept alive
        # What was made of such a tensor and of one that has derivatives, by which function.
        self._mixed: dict[Node, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        free = name.endswith("_like") or name.startswith("new_") or name == "broadcast_tensors"
        given = [*_tensors(args[:1] if name in _AS else (*args, *kwargs.values()))]
        if free or not any(t.requires_grad or self.has(t) for t in given):
            return out
        if name in _READS:
            self.reads.append((name, isinstance(out, bool)))
            return self.other(out) if len(self.reads) - 1 == self.turned else out
        mixed = any(map(self.has, given))
        for one in given[:1] if name == "__setitem__" else _tensors((out,)):
            if not one.requires_grad:
                self._read[id(one)] = one
            elif mixed or one.dtype.itemsize < 8:  # half precision is a choice of numbers too
                self._mixed[one.grad_fn] = name
        return out

    def has(self, x: Tensor) -> bool:
        """Whether a tensor was read off."""
        return id(x) in self._read

    def used(self, x: Tensor) -> str:
        """By which function a tensor came to depend on what was read off; empty if by none."""
        if self.has(x):
            return "detach"
        made = origins(x.grad_fn, {}) if self._mixed else ()
        return next((self._mixed[one] for one in made if one in self._mixed), "")


class MarkedTables(TorchFunctionMode):
    """Mark what tables give for some ids, by whatever function."""

    def __init__(self) -> None:
        self.addresses = set[int]()

    def of(self, values: Iterable[Any]) -> None:
        """The ids are those among these values."""
        ids = (t for t in _tensors(values) if not t.is_floating_point())
        self.addresses = {data_address(one) for one in ids}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _TABLES or not isinstance(out, Tensor):
            return out
        ids = (t for t in _tensors(args) if not t.is_floating_point())
        return marked(out) if any(data_address(t) in self.addresses for t in ids) else out


def side_channel(run: Callable[[], Tensor], alike: Callable[[Tensor, Tensor], bool]) -> str:
    """By which function the output of a pass hears of what it reads off; empty if by none.

    What is read as a number or a decision may be for a message or a check: the pass is run with
    another one in its place, which may raise, or should change nothing, ``alike``.
    """
    with (first := SideChannels()):
        out = run()
    if used := first.used(out):
        return used
    for index, (name, decides) in enumerate(first.reads):
        for value in (operator.not_,) if decides else _NUMBERS:
            with (other := SideChannels(index, value)):
                try:
                    again = run()
                except Exception:  # a model raises what it likes
                    if decides:
                        continue
                    return name
            if other.used(again) or not alike(again, out):
                return name
    return ""


def _number(value: Any, times: int, size: int) -> Any:
    if isinstance(value, list):
        return [_number(one, times, size) for one in value]
    return times * value + size


# Other numbers: near the one that is read, and far from it on both sides.
_NUMBERS = [
    functools.partial(_number, times=times, size=size)
    for times, size in ((1, 1), (0, _FAR), (0, -_FAR))
]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
