"""Side channels of a forward pass: uses of its values that autograd does not record.

Comparisons, decisions, numbers read from tensors, detached tensors, and functions of the input
beside the stream: one run does not show their effect at other values.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lipscope.models.tracing.recorder import Recorder

# Sources: token ids, other inputs, the stream, and whether gradients are recorded.
_IDS, _VALUES, _STREAM, _MODE = 1, 2, 3, 4
_SOURCES = {_IDS: "values of the input", _VALUES: "values of the input"}
_SOURCES |= {_STREAM: "values of the stream", _MODE: "whether gradients are recorded"}
# Functions by which PyTorch multiplies matrices depend on whether gradients are recorded.
_OF_MATRICES = (
    *("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "view", "_unsafe_view", "reshape"),
    *("expand", "t", "transpose", "permute", "squeeze", "unsqueeze", "clone", "detach", "alias"),
)
# Functions that expose the memory of a tensor, or print it, past the dispatcher.
_OF_MEMORY = (
    *("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "__reduce_ex__", "__repr__"),
    *("storage", "untyped_storage", "_typed_storage", "__format__", "apply_", "map_", "map2_"),
)
_OF_NUMBERS = ("tensor", "as_tensor", "asarray", "new_tensor")  # they read tensors in lists
_BY_INDEX = ("index", "index_select", "gather")
_ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "erf")
_HIDDEN = -1e4  # added to a score, this hides it
_MANY = 3  # maximum number of decisions by ids whose combinations are all tried
_DEEP = 3  # containers in each other that are looked into
_SAID = {"_local_scalar_dense": "item"}


class SideChannel(NamedTuple):
    """The function that read a value, and the source of the value."""

    function: str
    kind: int

    @property
    def source(self) -> str:
        """The source in words."""
        return _SOURCES[self.kind]


class _GoesOnError(BaseException):
    """A pass continues after a check that should have ended it."""


class Watch(TorchDispatchMode):
    """Watch a pass for values read from the stream, and for functions of the input beside it.

    Only the stream and its differentiable functions require a gradient. Calls are watched below
    autograd, where scripts and C++ code call the same functions.

    Args:
        inputs: The model's inputs, from which the stream is computed.
        turned: Indices of the decisions to invert in this pass.
        before: The watch of an earlier pass, of which this one may have kept something.
        any_ids: Whether token ids vary; else they are constants, and what they look up is not.
        grad: Whether gradients are recorded.
    """

    def __init__(
        self,
        inputs: Iterable[Tensor],
        turned: Iterable[int] = (),
        before: Watch | None = None,
        *,
        any_ids: bool = True,
        grad: bool = True,
    ) -> None:
        super().__init__()
        self.inputs, self.turned, self.grad = tuple(inputs), set(turned), grad
        self.again = functools.partial(Watch, self.inputs, any_ids=any_ids)
        self._fixed = 0 if any_ids else _IDS
        self.functions = Counter[str]()
        self.constants: list[tuple[str, Tensor]] = []  # not made here, by the function they meet
        self.goes_on = False  # whether the pass computed anything after a failed check
        self.decisions: list[SideChannel] = []
        self.used: SideChannel | None = None  # the first side channel other than a decision
        self.taken: list[tuple[str, Tensor]] = []  # inputs of activations, by name
        self._in_attention = 0
        self._ended = False  # whether a check has failed
        self._streams = set[int]()  # storages of the stream and its differentiable functions
        # By storage: tensors that carry values of a source (kept alive), and that source.
        self._heard: dict[int, tuple[Tensor, int]] = {} if before is None else {**before._heard}
        self._made: dict[int, Tensor] = {}  # by storage, of this pass
        for one in self.inputs:
            self._hear(one, _VALUES if one.is_floating_point() else _IDS)

    def __enter__(self) -> Watch:
        self._memory = _Memory(self)
        self._memory.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._memory.__exit__(*problem)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            name, kwargs = func.overloadpacket.__name__, kwargs or {}
            given = [*tensors_inside((*args, *kwargs.values()))]
            self.functions[name] += name not in _OF_MATRICES
            out = self._called(func, name, given, args, kwargs)
            before = {_place(one) for one in given if name != "lift_fresh"}
            self._made |= {
                at: one for one in tensors_inside((out,)) if (at := _place(one)) not in before
            }
            return out

    def _called(
        self, func: Any, name: str, given: list[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        kind = max(map(self.kind, given), default=0)
        if not kind or name.endswith("_like") or name.startswith("new_"):
            return func(*args, **kwargs)
        if self._ended:
            self.goes_on = True  # a script turns it into another error
            raise _GoesOnError
        live = any(t.requires_grad for t in given)
        if live and name.rstrip("_") in _ACTIVATIONS:
            by_tanh = "_tanh" * (kwargs.get("approximate") == "tanh")
            self.taken.append((name.rstrip("_") + by_tanh, args[0].detach().clone()))
        for one in (one for one in given if live and not one.requires_grad):
            if not self._may_join(name, one):
                self.use(name, self.kind(one))
            elif not self.kind(one) and _place(one) not in self._made:
                self.constants.append((name, one))
        recorded = live and torch.is_grad_enabled()
        if not recorded and any(_place(t) in self._streams for t in _written(func, args, kwargs)):
            self.use(name, _STREAM)  # another name of its memory
        out = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return self._decided(name, kind, out)
        if torch.Tag.dynamic_output_shape in func.tags:  # the shape tells how many
            of = [t for t in given[1:] if t.dtype == torch.bool] if name in _BY_INDEX else given
            self.use(name, max(map(self.kind, of), default=0))
        made = [*tensors_inside((out,))] or (given if func._schema.is_mutable else [])
        streams = (*made, *(one for one in given if one.requires_grad)) if recorded else ()
        self._streams.update(_place(one) for one in streams if one.is_floating_point())
        by_table = name in ("embedding", *_BY_INDEX) and args[0].is_floating_point()
        for one in made:  # what ids look up moves with the stream, so that it is no mask
            self._hear(one, max(kind, _VALUES) if by_table else kind)
            if live and one.is_floating_point() and one.dtype.itemsize < 8:
                self.use(name, kind)  # half precision discards values too
        return out

    def _decided(self, name: str, kind: int, out: Any) -> Any:
        if not isinstance(out, bool) or kind <= self._fixed:
            self.use(name, kind)
            return out
        self.decisions.append(SideChannel(_SAID.get(name, name), kind))
        if len(self.decisions) - 1 not in self.turned:
            return out
        self._ended = kind != _IDS
        return not out

    def _may_join(self, name: str, x: Tensor) -> bool:
        """Whether a tensor may be combined with the stream: ids may choose or mask tokens."""
        kind = self.kind(x)
        if kind != _IDS or self._fixed:
            return kind <= self._fixed
        if self._in_attention and x.dtype == torch.bool:
            return True
        if self._in_attention and x.is_floating_point():
            return bool(((x == 0) | (x < _HIDDEN)).all())
        return name in _BY_INDEX and not x.is_floating_point()

    def enter(self, by: int, *_: Any) -> None:
        """Enter attention, 1, or leave it, -1."""
        self._in_attention += by

    def use(self, name: str, kind: int) -> None:
        """Record the first side channel."""
        if kind > self._fixed:
            self.used = self.used or SideChannel(_SAID.get(name, name), kind)

    def kind(self, x: Tensor) -> int:
        """The source of a tensor; zero if it has none."""
        return _STREAM if x.requires_grad else self._heard.get(_place(x), (x, 0))[1]

    def _hear(self, x: Tensor, kind: int) -> None:
        place = _place(x)
        self._heard[place] = x, max(kind, self._heard.get(place, (x, 0))[1])


class _Memory(TorchFunctionMode):
    """Record reads past the dispatcher."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            some = args[:1] if name in _OF_MEMORY else ()
            if name in _OF_NUMBERS:
                some = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, list | tuple)]
            if kind := max(map(self.watch.kind, tensors_inside(some)), default=0):
                self.watch.use(name, kind)
        return func(*args, **(kwargs or {}))


def side_channel(
    first: Watch,
    out: Tensor,
    again: Callable[[Watch], Tensor],
    alike: Callable[[Tensor, Tensor], bool],
) -> SideChannel | None:
    """The side channel through which a pass depends on its values; None if there is none.

    A decision may be a check: inverted, it makes the pass raise before anything else is computed.
    Decisions by ids may also be warnings: inverted in any combination, they change nothing.

    Args:
        first: The watch of the pass.
        out: Output of the pass.
        again: Runs the pass again under another watch.
        alike: Whether two outputs are the same.
    """
    if first.used:
        return first.used
    if first.kind(out) and not out.requires_grad:
        return SideChannel("detach", first.kind(out))
    by_ids = [k for k, one in enumerate(first.decisions) if one.kind == _IDS]
    for k, one in enumerate(first.decisions):
        if k not in by_ids and not _raises(again, first.again((k,))):
            return one
    counts = range(1, len(by_ids) + 1)
    some = (turned for count in counts for turned in itertools.combinations(by_ids, count))
    for turned in some if len(by_ids) <= _MANY else [()]:
        same = False
        with contextlib.suppress(Exception):
            other = first.again(turned)
            y = again(other)
            decided = len(other.decisions) == len(first.decisions)
            same = bool(turned) and decided and other.used is None and alike(y, out)
        if not same:
            return first.decisions[by_ids[0]]
    return _changed(first, again)


def _changed(first: Watch, again: Callable[[Watch], Tensor]) -> SideChannel | None:
    """What is another function, or a constant from elsewhere, in the next pass."""
    second = first.again(before=first)
    again(second)
    if second.used:
        return second.used
    pairs = itertools.zip_longest(first.constants, second.constants)
    other = next((one or two for one, two in pairs if _address(one) != _address(two)), None)
    if other is not None:
        return SideChannel(other[0], _STREAM)  # it was made out of sight
    third = first.again(grad=False)
    again(third)
    some = (second.functions - third.functions) + (third.functions - second.functions)
    return next((SideChannel(_SAID.get(name, name), _MODE) for name in some), None)


def _address(constant: tuple[str, Tensor] | None) -> tuple[int, int] | None:
    """The memory of a constant, and how often it was written; the same if it has none."""
    if constant is None:
        return None
    try:
        return constant[1].data_ptr(), constant[1]._version
    except (RuntimeError, NotImplementedError):
        return 0, 0


def _raises(again: Callable[[Watch], Tensor], watch: Watch) -> bool:
    """Whether a pass raises at once when its check fails."""
    try:
        again(watch)
    except (_GoesOnError, Exception):  # a model raises what it likes
        return not watch.goes_on
    return False


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a function writes into."""
    given = itertools.zip_longest(func._schema.arguments, args[: len(func._schema.arguments)])
    for one, value in given:
        if one.alias_info is not None and one.alias_info.is_write:
            yield from tensors_inside((kwargs.get(one.name, value),))


def _place(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr() or -id(x)
    except (RuntimeError, NotImplementedError):  # it has no storage
        return -id(x)


def tensors_inside(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in their lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_inside(value)
        elif isinstance(value, dict):
            yield from tensors_inside(value.values())


# --- what a module keeps


@contextlib.contextmanager
def kept_between_passes(model: nn.Module) -> Iterator[set[str]]:
    """Names of what a model keeps that passes change: attributes and buffers of its modules."""
    changed, before = set[str](), list[tuple[str, Any, Any]]()

    def start(*_: Any) -> None:
        before[:] = _kept(model)

    def end(*_: Any) -> None:
        after = {name: (value, version) for name, value, version in _kept(model)}
        for name, value, version in before:
            now, later = after.pop(name, (None, 0))
            alike = now is value and later == version
            changed.update([name] * (not alike and not _equal(now, value)))
        changed.update(after)

    with Recorder() as recorder:
        recorder.around(model, start, end)
        yield changed


_OF_TORCH = vars(nn.Module()).keys()


def _kept(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """By name, with how often it was written over and its sum, or how much it holds."""
    seen = set[int]()
    for path, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
        for name, value in (own | module._parameters | module._buffers).items():
            yield from _held(f"{path}.{name}".lstrip("."), value, seen)


def _held(name: str, value: Any, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """A value, and what is in it: elements of containers, attributes of plain objects."""
    version: Any = len(value) if isinstance(value, list | dict | set | deque) else 0
    if isinstance(value, Tensor):  # what is written by `.data` is not counted
        counted = 0 if value.is_inference() else value._version
        version = counted, repr(value.detach().sum().tolist())  # NaN is NaN
    yield name, value, version
    inside: dict[Any, Any] = value if isinstance(value, dict) else {}
    if isinstance(value, list | tuple | deque):
        inside = dict(enumerate(value))
    elif not (callable(value) or isinstance(value, Tensor)):
        inside = inside or getattr(value, "__dict__", {})
    if inside and id(value) not in seen and depth < _DEEP:
        seen.add(id(value))
        for key, one in list(inside.items()):
            yield from _held(f"{name}.{key}", one, seen, depth + 1)


def _equal(a: Any, b: Any) -> bool:
    """Whether something was made anew as it was, such as a weight by its norm."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is not b and a.shape == b.shape and torch.equal(a, b)
    simple = bool | int | float | str | torch.Size | torch.dtype | torch.device
    several = list | tuple | deque | dict  # of equal length; what they hold is compared by itself
    alike = isinstance(a, several) and len(a) == len(b)
    return type(a) is type(b) and (alike or (isinstance(a, simple) and a == b))
