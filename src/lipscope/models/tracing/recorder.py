"""A forward pass as hooks see it: what modules take, what they return, and what it is made of.

Names of arguments tell little about what moves; the model's own computation tells it: autograd
carries the marks, and no value is kept for it. Hooks are registered here and nowhere else.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipscope.errors import InputError
from lipscope.linalg import draws_from
from lipscope.models.tracing.prepare import cast_to, exact_maths, swapped, undisturbed

Inputs = Mapping[str, Any] | tuple[Any, ...]
Node = Any  # of autograd's graph
BlockOutputs = Mapping[str, Any]  # by the paths of the blocks
_Kind = inspect._ParameterKind
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
_ADDS = ("add", "add_", "__add__", "__radd__", "__iadd__")
_TIMES = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_")
_OVER = ("div", "div_", "__truediv__", "__itruediv__", "divide", "divide_", "true_divide")


class Reached(BaseException):
    """What was asked for is there; what follows is not run. No model catches it by mistake."""


class Recorder(contextlib.ExitStack):
    """Hooks on modules, and runs of the model with them; on exit they are gone.

    They see the calls of the thread that made it, of passes that take turns with a model; or of
    ``all_threads``.
    """

    def __init__(self, *, all_threads: bool = False) -> None:
        super().__init__()
        self._thread = None if all_threads else threading.get_ident()

    def _seeing(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread
        if thread is None:
            return hook
        return lambda *call: hook(*call) if threading.get_ident() == thread else None

    def before(self, module: nn.Module, hook: Callable[..., Any]) -> Any:
        """Call ``hook(module, args, kwargs)`` before a call; what it returns takes their place."""
        handle = module.register_forward_pre_hook(_unseen()(self._seeing(hook)), with_kwargs=True)
        self.callback(handle.remove)
        return handle

    def after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args, out)`` after every call; what it returns takes its place."""
        self.callback(module.register_forward_hook(_unseen()(self._seeing(hook))).remove)

    def around(self, module: nn.Module, start: Callable[..., Any], end: Callable[..., Any]) -> None:
        """Call ``start`` before and ``end`` after every call, as these two do."""
        self.before(module, start)
        self.after(module, end)

    def after_each(self, hooks: Mapping[nn.Module, Callable[..., Any]]) -> None:
        """As `after`, of several modules."""
        for module, hook in hooks.items():
            self.after(module, hook)

    def arguments(self, module: nn.Module, note: Callable[[dict[str, Any]], Any]) -> list[Any]:
        """What is noted of the arguments by name of every call, before it."""
        found: list[Any] = []
        self.before(module, lambda m, a, k: found.append(note(bound_arguments(m, a, k))))
        return found

    def outputs(self, module: nn.Module) -> list[Any]:
        """What every call returns."""
        found: list[Any] = []
        self.after(module, lambda _, __, out: found.append(out))
        return found

    def run(
        self,
        model: nn.Module,
        inputs: Inputs,
        dtype: torch.dtype,
        *,
        differentiable: bool = True,
        call: Callable[[nn.Module, Inputs], Any] | None = None,
    ) -> Any:
        """Run a model in exact maths; its buffers stay as they are, and its draws are fixed.

        ``call``: instead of a call on copies of the inputs.
        """
        exact = exact_maths(dtype, differentiable=differentiable)
        with _same_draws(model), exact, undisturbed(model):
            if call is not None:
                return call(model, inputs)
            return called(model, each_tensor(inputs, torch.clone))


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """What a hook computes is none of the model's: no mode counts its sums or sets its types."""
    with torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def _same_draws(model: nn.Module) -> Iterator[None]:
    """What a forward pass draws (noise that masks patches) is the same each time it is run."""
    gpus = model.parameters() if torch.cuda.is_initialized() else ()
    used = sorted({p.device.index for p in gpus if p.is_cuda})
    with draws_from(0, used):
        yield


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model without a key/value cache; what it draws is the same each time."""
    with _same_draws(model):
        return called(model, inputs)


def called(model: nn.Module, inputs: Inputs) -> Any:
    """What the model returns, without a key/value cache."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    extra = {}
    if "use_cache" in signature_of(model).parameters:
        extra["use_cache"] = False
    return model(**{**inputs, **extra})


# --- arguments by name

_SIGNATURES: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def signature_of(module: nn.Module) -> inspect.Signature:
    """What ``forward`` takes; of each method it is read once, as that takes longer than a layer."""
    method = getattr(module.forward, "__func__", None)
    if method is None:
        return inspect.signature(module.forward)
    if method not in _SIGNATURES:
        _SIGNATURES[method] = inspect.signature(module.forward)
    return _SIGNATURES[method]


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name; those that ``*args`` takes are called ``args[0]`` and so on."""
    signature = signature_of(module)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as problem:
        raise InputError(
            f"`{type(module).__name__}` should be called as its `forward` is written. Found that "
            f"the model calls it otherwise: {problem}."
        ) from problem
    for name, parameter in signature.parameters.items():
        if parameter.kind is _Kind.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
        elif parameter.kind is _Kind.VAR_POSITIONAL:
            several = enumerate(arguments.pop(name, ()))
            arguments.update({f"{name}[{index}]": value for index, value in several})
    return arguments


def bound_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, without any key/value cache: a replay would grow it."""
    named = named_arguments(module, args, kwargs)
    return {k: None if k in _CACHES else v for k, v in named.items()}


def as_called(
    module: nn.Module, arguments: Mapping[str, Any], first: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as a call: the ``first`` ones, and those before ``*args``, have no name."""
    kinds = {n: p.kind for n, p in signature_of(module).parameters.items()}
    named, args = dict(arguments), list[Any]()
    several = any(k.endswith("]") for k in named)
    for index, (name, kind) in enumerate(kinds.items()):
        unnamed = kind is _Kind.POSITIONAL_OR_KEYWORD and (several or index < first)
        if kind is _Kind.VAR_POSITIONAL:
            args.extend(named.pop(k) for k in [*named] if k.startswith(f"{name}["))
        elif name not in named:
            continue
        elif kind is _Kind.POSITIONAL_ONLY or unnamed:
            args.append(named.pop(name))
    return tuple(args), named


# --- tensors among inputs and outputs


def each_tensor(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model's inputs with every tensor changed; one tensor stays one tensor."""
    once: dict[int, Tensor] = {}

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in once:
            once[id(value)] = change(value)
        return once[id(value)]

    if isinstance(inputs, Mapping):
        return {name: changed(value) for name, value in inputs.items()}
    return tuple(changed(value) for value in inputs)


def to_device(inputs: Any, device: torch.device | None, dtype: torch.dtype) -> Any:
    """A model's inputs on a device (None: where they are), as `cast_to` casts them."""
    return each_tensor(inputs, lambda x: cast_to(x, device, dtype))


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors that a module returns, in a tuple or a record or by itself."""
    while isinstance(output, tuple | list) and output and isinstance(output[0], tuple | list):
        output = output[0]  # outputs, their scales (I-BERT)
    if isinstance(output, Tensor):
        return [output]
    values = getattr(output, "values", None)
    several = values() if callable(values) else output
    return [v for v in several if isinstance(v, Tensor)] if isinstance(several, Iterable) else []


def first_tensor(output: Any, at: int = 0) -> Tensor:
    """The output of a module that may return a tuple or a record, a loss first; or by place."""
    named = [] if at else [getattr(output, name, None) for name in ("last_hidden_state", "logits")]
    found = [one for one in named if isinstance(one, Tensor)] or tensors_in(output)
    if not found:
        raise InputError(f"A module should return a tensor. Found `{type(output).__name__}`.")
    return found[at]


def is_tokens(value: Any) -> bool:
    """Whether a value has the shape of token matrices, one or several."""
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()


def token_arguments(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of a call's arguments that are token matrices, one or several."""
    return {name: value for name, value in arguments.items() if is_tokens(value)}


def as_tokens(x: Tensor, token_axis: int) -> Tensor:
    """A batch of one as a token matrix ``(n, d)``."""
    if x.ndim != 3:
        return x.reshape(-1, x.shape[-1])
    batch = 1 - token_axis
    # A model may put tokens first inside and the batch first at its end (XLNet).
    return x.squeeze(batch if x.shape[batch] == 1 else token_axis)


def unmarked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments without their marks; tensors in tuples and lists too."""
    return {name: _nested(value, Tensor.detach) for name, value in arguments.items()}


def _nested(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with its tensors changed, those in tuples and lists too."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_nested(one, change) for one in value)
    return value


def data_address(x: Tensor) -> int:
    """Where a tensor lies in memory; one that lies nowhere (sparse, inside `vmap`) is no other."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return -id(x)


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has a place in memory; inside `vmap`, where masks are made, none has."""
    return data_address(x) != -id(x)


def same_tensor(a: Any, b: Tensor) -> bool:
    """Whether a value is the same tensor, or a view of all of it in the same order."""
    if a is b:
        return True
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if data_address(a) != data_address(b):
        return False
    steps = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(i == j or size == 1 for i, j, size in steps)


def names_of(arguments: Mapping[str, Any], x: Tensor) -> tuple[str, ...]:
    """The names of the arguments that are this tensor."""
    return tuple(name for name, value in arguments.items() if same_tensor(value, x))


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one size begin at one place in memory."""
    return data_address(a) == data_address(b) and a.numel() == b.numel()


def same_or_copy(taken: Any, result: Tensor) -> bool:
    """Whether this is a call's output, or a copy: chunks of one are concatenated (CANINE)."""
    if not isinstance(taken, Tensor):
        return False
    if data_address(taken) == data_address(result):
        return True
    try:
        return torch.equal(taken.detach().flatten(), result.flatten()) and bool(result.any())
    except RuntimeError:  # of a `vmap` that has ended: the call is refused for what it was
        return False


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest entry of ``b``."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny))


def close(seen: Tensor, expected: Tensor, limit: float = 1e-5) -> bool:
    """Whether two tensors agree up to rounding."""
    if seen.shape != expected.shape:
        return False
    if bool(expected.isfinite().all()):
        return distance(seen, expected) <= limit
    return torch.allclose(seen, expected, rtol=limit, equal_nan=True)


# --- what is made of what


def _gone(_: int) -> Tensor:
    raise AssertionError("no value was kept for a backward pass")


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Record which tensors are made of which, without the values that a derivative needs."""
    drop = torch.autograd.graph.saved_tensors_hooks(id, _gone)
    with torch.enable_grad(), drop:
        yield


def marked(x: Tensor) -> Tensor:
    """A tensor whose consequences can be told from others."""
    if not x.is_floating_point():
        return x
    # A clone of a leaf is none, so that the model may write into it.
    return x.detach().clone().requires_grad_().clone()


def mark_embeddings(recorder: Recorder, model: nn.Module, inputs: Inputs) -> None:
    """Mark what tables give for the model's own token ids; positions are not marked."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    ids = {data_address(v) for v in values if isinstance(v, Tensor) and not v.is_floating_point()}

    def mark(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        given = args and isinstance(args[0], Tensor) and data_address(args[0]) in ids
        return marked(out) if given and isinstance(out, Tensor) else None

    for module in model.modules() if ids else ():
        if isinstance(module, nn.Embedding):
            recorder.after(module, mark)


def origins(node: Node | None, jumps: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    """The nodes of which a node is made, it first; of one in ``jumps`` those that are there."""
    seen, waiting = set[Node](), [node]
    while waiting:
        here = waiting.pop()
        if here is None or here in seen:
            continue
        seen.add(here)
        yield here
        made_of = jumps[here] if here in jumps else [one for one, _ in here.next_functions]
        waiting.extend(made_of)


def depends(node: Node | None, on: Node | None) -> bool:
    """Whether what a node made depends on what another one made."""
    return on is not None and any(one is on for one in origins(node, {}))


@dataclass
class TensorStore:
    """Tensors of one forward pass, kept alive so that none takes the place of another.

    ``copies``: as they were when seen, for models that write into them (``x += attention(x)``).
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


# --- what a module keeps


@contextlib.contextmanager
def kept_between_passes(model: nn.Module) -> Iterator[set[str]]:
    """Names of what a model keeps that passes change: attributes and buffers of its modules."""
    changed, before = set[str](), list[tuple[str, Any, int]]()

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


def _kept(model: nn.Module) -> Iterator[tuple[str, Any, int]]:
    """By name, with how often it was written over, or how much it holds."""
    for path, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
        for name, value in (own | module._parameters | module._buffers).items():
            version = len(value) if isinstance(value, list | dict | set) else 0
            if isinstance(value, Tensor) and not value.is_inference():
                version = value._version
            yield f"{path}.{name}".lstrip("."), value, version


def _equal(a: Any, b: Any) -> bool:
    """Whether something was made anew as it was, such as a weight by its norm."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is not b and a.shape == b.shape and torch.equal(a, b)
    simple = bool | int | float | str | torch.Size | torch.dtype | torch.device
    return isinstance(a, simple) and type(a) is type(b) and a == b


# --- sums and fixed multiples of token matrices


@dataclass
class NormCall:
    """One call of a normalisation module: ``y = module(x)``, and where both lie in memory."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor
    x_address: int
    y_address: int


@dataclass
class Sum:
    """A sum of two tensors of one shape, and what the model did with it next."""

    value: Tensor  # the sum
    read: bool = False  # whether anything but another sum used it: a partial sum is not the stream
    added: bool = False  # whether it was a term of another sum: the stream goes on from here
    norm: NormCall | None = None  # the norm that took it, or None


@dataclass
class Multiple:
    """A token matrix times a factor that depends on no token."""

    factor: Tensor  # one number, ``()``, or one for every channel, ``(d,)``
    of: int  # where the matrix lies in memory
    address: int  # where the product lies
    value: Tensor  # the product, kept alive so that nothing else takes its place
    sums_before: int  # number of sums that the model had formed before


class SumRecorder(TorchFunctionMode):
    """Watch a forward pass for sums of tensors of one shape, and for fixed multiples of them."""

    def __init__(self, kept: TensorStore) -> None:
        self.kept = kept
        self.sums: list[Sum] = []
        self.multiples: list[Multiple] = []
        self.latest: dict[int, Sum] = {}  # by where they lie in memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        terms = [a for a in args if isinstance(a, Tensor) and has_storage(a)]
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
            address, value, count = out.data_ptr(), self.kept.keep(out), len(self.sums)
            self.multiples += [Multiple(f, of, address, value, count) for of, f in factors]
        return out

    def factors(self, address: int, sums_before: int) -> Iterator[Tensor]:
        """By what the model multiplied the matrix at a place, after so many sums: step by step."""
        total = torch.ones((), dtype=torch.float64)
        for one in self.multiples:
            if one.of == address and one.sums_before >= sums_before:
                total, address = total * one.factor, one.address
                yield total


class AtSum(TorchFunctionMode):
    """Hand over the value of one sum of a forward pass: the one at this place of `SumRecorder`."""

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
    """Whether this adds two token matrices; scores have more axes, masks another shape."""
    terms = [a for a in args if isinstance(a, Tensor)]
    if getattr(func, "__name__", "") not in _ADDS or len(terms) != 2:
        return False
    same = terms[0].ndim in (2, 3) and terms[0].shape == terms[1].shape
    return same and all(map(has_storage, terms))


def _factors(name: str, args: Any) -> list[tuple[int, Tensor]]:
    """Which arguments of a product may be a matrix, and the factor that the other one is."""
    if name not in _TIMES + _OVER or len(args) != 2:
        return []
    pairs = [(args[0], args[1]), (args[1], args[0])]
    pairs = [(x, f) for x, f in pairs[: 1 if name in _OVER else 2] if _is_factor(f, x)]
    fixed = ((x.data_ptr(), _number_or_row(f)) for x, f in pairs)
    return [(address, 1 / f if name in _OVER else f) for address, f in fixed]


def _number_or_row(factor: Any) -> Tensor:
    if not isinstance(factor, Tensor):
        return torch.tensor(float(factor), dtype=torch.float64)  # makes no matrix double
    return factor.detach().clone().reshape(() if factor.numel() == 1 else -1)


def _is_factor(factor: Any, x: Any) -> bool:
    """Whether it multiplies every token in the same way, and no token moves it."""
    if not isinstance(x, Tensor) or x.ndim not in (2, 3) or not x.is_floating_point():
        return False
    if not has_storage(x):
        return False
    if not isinstance(factor, Tensor):
        return isinstance(factor, int | float)
    size = factor.numel()
    of_channels = factor.ndim > 0 and factor.shape[-1] == size == x.shape[-1]
    return not factor.requires_grad and (size == 1 or of_channels) and has_storage(factor)


# --- what blocks give, which can stand in for them in the next run


@dataclass(frozen=True)
class BlockRun:
    """What the blocks of a model gave in one run: the elements of its outermost module lists."""

    outputs: BlockOutputs  # of those that were called once, in the order in which they ended
    ended: Mapping[str, int]  # how many had ended when a block began that was called once

    def below(self, module: str) -> BlockOutputs:
        """Of the blocks that had ended when the one around a module began; none without one."""
        block = next((one for one in self.ended if f"{module}.".startswith(f"{one}.")), None)
        if block is None:
            return {}
        return dict([*self.outputs.items()][: self.ended[block]])


def run_of_blocks(
    model: nn.Module, inputs: Inputs, dtype: torch.dtype, until: str | None = None
) -> BlockRun:
    """Run a model, up to the first call of ``until`` if it is given; keep what its blocks give."""

    def end(*_: Any) -> None:
        raise Reached

    with watched_blocks(model) as found, Recorder() as recorder, torch.no_grad():
        if until is not None:
            recorder.before(model.get_submodule(until), end)
        with contextlib.suppress(Reached):
            recorder.run(model, inputs, dtype, differentiable=False)
    return found()


@contextlib.contextmanager
def watched_blocks(model: nn.Module) -> Iterator[Callable[[], BlockRun]]:
    """Keep what the blocks of a model give in the run that follows; ask for it after the run.

    Nothing is kept of a model two of whose blocks give the same memory, which copies would part,
    that calls a block more than once, or whose blocks give anything but tensors.
    """
    outputs, began, calls = dict[str, Any](), dict[str, int](), Counter[str]()

    def start(path: str, *_: Any) -> None:
        calls[path] += 1
        began.setdefault(path, len(outputs))

    def finish(path: str, _: Any, __: Any, out: Any) -> None:
        outputs[path] = out

    def found() -> BlockRun:
        places = Counter(place for out in outputs.values() for place in {*_places(out)})
        if any(count > 1 for count in (*places.values(), *calls.values())) or -1 in places:
            return BlockRun({}, {})
        return BlockRun({path: _copy(out) for path, out in outputs.items()}, began)

    with Recorder() as recorder:
        for path, block in outer_blocks(model).items():
            recorder.around(block, partial(start, path), partial(finish, path))
        yield found


def standing_in(model: nn.Module, outputs: BlockOutputs) -> contextlib.AbstractContextManager[None]:
    """A model some of whose blocks do not run: what they gave before stands in for them."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for path, output in outputs.items():
        around, _, name = path.rpartition(".")
        blocks: Any = model.get_submodule(around)._modules
        found.append((blocks, name, _KnownBlock(blocks[name], output)))
    return swapped(found)


class _KnownBlock(nn.Module):
    """In the place of a block: its settings, and what it gave before."""

    def __init__(self, block: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__ |= {"block": block, "output": output}

    def forward(self, *_: Any, **__: Any) -> Any:
        return _copy(self.output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)


def outer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The elements of the outermost module lists, by their paths."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{one}.") for one in found)
        if isinstance(module, nn.ModuleList) and not inside:
            blocks = ((f"{path}.{index}", block) for index, block in enumerate(module))
            found |= {name: block for name, block in blocks if block is not None}  # Informer's
    return found


def _places(output: Any) -> list[int]:
    """Where the tensors of an output lie; -1 for what is no tensor."""
    if type(output) in (tuple, list):
        return [place for one in output for place in _places(one)]
    if isinstance(output, Tensor):
        return [data_address(output)]
    return [] if output is None else [-1]


def _copy(output: Any) -> Any:
    """What a module gives, in memory of its own: a model may write into it."""
    return _nested(output, lambda x: x.detach().clone())
