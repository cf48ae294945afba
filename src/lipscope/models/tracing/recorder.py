"""Recording of a forward pass with hooks: inputs, outputs and dependencies of modules.

Argument names do not show which tensors depend on the input; the autograd graph does, here without
saved values. Hooks are registered only in this module.
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
Node = Any  # node of the autograd graph
BlockOutputs = Mapping[str, Any]  # outputs by block path
_Kind = inspect._ParameterKind
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
_ADDS = ("add", "add_", "__add__", "__radd__", "__iadd__")
_TIMES = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_")
_OVER = ("div", "div_", "__truediv__", "__itruediv__", "divide", "divide_", "true_divide")


class Reached(BaseException):
    """Stops a run after the requested result. A `BaseException`, so that models do not catch it."""


class Recorder(contextlib.ExitStack):
    """Hooks on modules, and runs of the model with them; removed on exit.

    Hooks run only for calls in the thread that created the recorder, as passes may share a model,
    or for ``all_threads``.
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
        """Call ``hook(module, args, kwargs)`` before a call; its result replaces the arguments."""
        handle = module.register_forward_pre_hook(_unseen()(self._seeing(hook)), with_kwargs=True)
        self.callback(handle.remove)
        return handle

    def after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args, out)`` after every call; its result replaces the output."""
        self.callback(module.register_forward_hook(_unseen()(self._seeing(hook))).remove)

    def around(self, module: nn.Module, start: Callable[..., Any], end: Callable[..., Any]) -> None:
        """Call ``start`` as in `before` and ``end`` as in `after`."""
        self.before(module, start)
        self.after(module, end)

    def after_each(self, hooks: Mapping[nn.Module, Callable[..., Any]]) -> None:
        """As `after`, for several modules."""
        for module, hook in hooks.items():
            self.after(module, hook)

    def arguments(self, module: nn.Module, note: Callable[[dict[str, Any]], Any]) -> list[Any]:
        """Results of ``note`` for the named arguments of every call, before the call."""
        found: list[Any] = []
        self.before(module, lambda m, a, k: found.append(note(bound_arguments(m, a, k))))
        return found

    def outputs(self, module: nn.Module) -> list[Any]:
        """The outputs of all calls."""
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
        """Run a model in exact maths, with unchanged buffers and fixed random numbers.

        ``call``: replaces the default call on copies of the inputs.
        """
        exact = exact_maths(dtype, differentiable=differentiable)
        with _same_draws(model), exact, undisturbed(model):
            if call is not None:
                return call(model, inputs)
            return called(model, each_tensor(inputs, torch.clone))


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Disable function modes in hooks: their computations are not part of the model."""
    with torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def _same_draws(model: nn.Module) -> Iterator[None]:
    """Fix the random numbers of a forward pass (such as noise for masked patches)."""
    gpus = model.parameters() if torch.cuda.is_initialized() else ()
    used = sorted({p.device.index for p in gpus if p.is_cuda})
    with draws_from(0, used):
        yield


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model without a key/value cache and with fixed random numbers."""
    with _same_draws(model):
        return called(model, inputs)


def called(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model without a key/value cache."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    extra = {}
    if "use_cache" in signature_of(model).parameters:
        extra["use_cache"] = False
    return model(**{**inputs, **extra})


# --- arguments by name

_SIGNATURES: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of ``forward``, cached per method, as inspection is slower than a layer."""
    method = getattr(module.forward, "__func__", None)
    if method is None:
        return inspect.signature(module.forward)
    if method not in _SIGNATURES:
        _SIGNATURES[method] = inspect.signature(module.forward)
    return _SIGNATURES[method]


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name; those in ``*args`` are named ``args[0]`` and so on."""
    signature = signature_of(module)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as problem:
        raise InputError(
            f"`{type(module).__name__}` should be called with the arguments of its `forward`. "
            f"Found that the model calls it differently: {problem}."
        ) from problem
    for name, parameter in signature.parameters.items():
        if parameter.kind is _Kind.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
        elif parameter.kind is _Kind.VAR_POSITIONAL:
            several = enumerate(arguments.pop(name, ()))
            arguments.update({f"{name}[{index}]": value for index, value in several})
    return arguments


def bound_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, without any key/value cache, which a replay would extend."""
    named = named_arguments(module, args, kwargs)
    return {k: None if k in _CACHES else v for k, v in named.items()}


def as_called(
    module: nn.Module, arguments: Mapping[str, Any], first: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert to ``args, kwargs``; the ``first`` and all before ``*args`` are positional."""
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
    """Apply ``change`` to every input tensor; identical tensors stay identical."""
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
    """Move and cast a model's inputs as in `cast_to`; None keeps their device."""
    return each_tensor(inputs, lambda x: cast_to(x, device, dtype))


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in a module's output: a tensor, a tuple or a record."""
    while isinstance(output, tuple | list) and output and isinstance(output[0], tuple | list):
        output = output[0]  # (outputs, scales) in I-BERT
    if isinstance(output, Tensor):
        return [output]
    values = getattr(output, "values", None)
    several = values() if callable(values) else output
    return [v for v in several if isinstance(v, Tensor)] if isinstance(several, Iterable) else []


def first_tensor(output: Any, at: int = 0) -> Tensor:
    """The main tensor of a module's output, a tuple or record possibly with a loss; or by index."""
    named = [] if at else [getattr(output, name, None) for name in ("last_hidden_state", "logits")]
    found = [one for one in named if isinstance(one, Tensor)] or tensors_in(output)
    if not found:
        raise InputError(f"A module should return a tensor. Found `{type(output).__name__}`.")
    return found[at]


def is_tokens(value: Any) -> bool:
    """Whether a value has the shape of a batch of token matrices."""
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()


def token_arguments(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments of a call that are batches of token matrices."""
    return {name: value for name, value in arguments.items() if is_tokens(value)}


def as_tokens(x: Tensor, token_axis: int) -> Tensor:
    """A batch of one as a token matrix ``(n, d)``."""
    if x.ndim != 3:
        return x.reshape(-1, x.shape[-1])
    batch = 1 - token_axis
    # Some models have tokens first inside and the batch first at the end (XLNet).
    return x.squeeze(batch if x.shape[batch] == 1 else token_axis)


def unmarked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Detach a call's arguments, including tensors in tuples and lists."""
    return {name: _nested(value, Tensor.detach) for name, value in arguments.items()}


def _nested(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to a tensor, or to all tensors in tuples and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_nested(one, change) for one in value)
    return value


def data_address(x: Tensor) -> int:
    """Memory address of a tensor; a unique negative number without storage (sparse, `vmap`)."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return -id(x)


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has storage; tensors inside `vmap`, used for masks, have none."""
    return data_address(x) != -id(x)


def same_tensor(a: Any, b: Tensor) -> bool:
    """Whether a value is the same tensor, or a view with the same memory and strides."""
    if a is b:
        return True
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if data_address(a) != data_address(b):
        return False
    steps = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(i == j or size == 1 for i, j, size in steps)


def names_of(arguments: Mapping[str, Any], x: Tensor) -> tuple[str, ...]:
    """The names of the arguments equal to this tensor (`same_tensor`)."""
    return tuple(name for name, value in arguments.items() if same_tensor(value, x))


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same address and number of entries."""
    return data_address(a) == data_address(b) and a.numel() == b.numel()


def same_or_copy(taken: Any, result: Tensor) -> bool:
    """Whether a tensor is a call's output or a copy: CANINE concatenates a single chunk."""
    if not isinstance(taken, Tensor):
        return False
    if data_address(taken) == data_address(result):
        return True
    try:
        return torch.equal(taken.detach().flatten(), result.flatten()) and bool(result.any())
    except RuntimeError:  # a tensor from a finished `vmap`: the call is refused elsewhere
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


# --- dependencies between tensors


def _gone(_: int) -> Tensor:
    raise AssertionError("no value was kept for a backward pass")


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Record the autograd graph, without the saved values for derivatives."""
    drop = torch.autograd.graph.saved_tensors_hooks(id, _gone)
    with torch.enable_grad(), drop:
        yield


def marked(x: Tensor) -> Tensor:
    """A copy that requires gradients, so that its dependents can be recognised."""
    if not x.is_floating_point():
        return x
    # The second clone is not a leaf, so that the model may write into it.
    return x.detach().clone().requires_grad_().clone()


def mark_embeddings(recorder: Recorder, model: nn.Module, inputs: Inputs) -> None:
    """Mark the embeddings of the model's token ids; position embeddings are not marked."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    ids = {data_address(v) for v in values if isinstance(v, Tensor) and not v.is_floating_point()}

    def mark(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        given = args and isinstance(args[0], Tensor) and data_address(args[0]) in ids
        return marked(out) if given and isinstance(out, Tensor) else None

    for module in model.modules() if ids else ():
        if isinstance(module, nn.Embedding):
            recorder.after(module, mark)


def origins(node: Node | None, jumps: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    """A node and its ancestors in the graph; ``jumps`` overrides the parents of some nodes."""
    seen, waiting = set[Node](), [node]
    while waiting:
        here = waiting.pop()
        if here is None or here in seen:
            continue
        seen.add(here)
        yield here
        parents = jumps[here] if here in jumps else [one for one, _ in here.next_functions]
        waiting.extend(parents)


def depends(node: Node | None, on: Node | None) -> bool:
    """Whether the result of a node depends on that of another."""
    return on is not None and any(one is on for one in origins(node, {}))


@dataclass
class TensorStore:
    """Tensors of one forward pass, kept alive so that their memory is not reused.

    ``copies``: store copies, for models that overwrite tensors (``x += attention(x)``).
    """

    copies: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor:
        """The detached tensor, or a copy of it."""
        x = x.detach()
        if not x.is_inference():
            self.versions.append((x, x._version))
        return x.clone() if self.copies else x

    def overwritten(self) -> bool:
        """Whether the model overwrote a recorded tensor."""
        return any(x._version != version for x, version in self.versions)


# --- sums and constant multiples of token matrices


@dataclass
class NormCall:
    """One call of a normalisation module, ``y = module(x)``, with the memory addresses of both."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor
    x_address: int
    y_address: int


@dataclass
class Sum:
    """A sum of two tensors of equal shape, and its later uses in the model."""

    value: Tensor  # the sum
    read: bool = False  # used other than in a sum; otherwise it is a partial sum, not the stream
    added: bool = False  # whether it is a term of another sum: the stream continues from here
    norm: NormCall | None = None  # the norm applied to it, or None


@dataclass
class Multiple:
    """A token matrix times a factor that does not depend on tokens."""

    factor: Tensor  # a scalar ``()`` or one factor per channel, ``(d,)``
    of: int  # memory address of the matrix
    address: int  # memory address of the product
    value: Tensor  # the product, kept alive so that its memory is not reused
    sums_before: int  # number of previous sums in the pass


class SumRecorder(TorchFunctionMode):
    """Record sums of tensors of equal shape in a forward pass, and their constant multiples."""

    def __init__(self, kept: TensorStore) -> None:
        self.kept = kept
        self.sums: list[Sum] = []
        self.multiples: list[Multiple] = []
        self.latest: dict[int, Sum] = {}  # by memory address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        terms = [a for a in args if isinstance(a, Tensor) and has_storage(a)]
        if name == "__get__":  # attribute access such as shape or dtype
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
        """Cumulative factors of the matrix at an address, after the given number of sums."""
        total = torch.ones((), dtype=torch.float64)
        for one in self.multiples:
            if one.of == address and one.sums_before >= sums_before:
                total, address = total * one.factor, one.address
                yield total


class AtSum(TorchFunctionMode):
    """Call ``reached`` with one sum of a forward pass, by its index in `SumRecorder.sums`."""

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
    """Whether a call adds two token matrices; scores have more axes, masks another shape."""
    terms = [a for a in args if isinstance(a, Tensor)]
    if getattr(func, "__name__", "") not in _ADDS or len(terms) != 2:
        return False
    same = terms[0].ndim in (2, 3) and terms[0].shape == terms[1].shape
    return same and all(map(has_storage, terms))


def _factors(name: str, args: Any) -> list[tuple[int, Tensor]]:
    """Addresses of the possible matrices in a product, each with its constant factor."""
    if name not in _TIMES + _OVER or len(args) != 2:
        return []
    pairs = [(args[0], args[1]), (args[1], args[0])]
    pairs = [(x, f) for x, f in pairs[: 1 if name in _OVER else 2] if _is_factor(f, x)]
    fixed = ((x.data_ptr(), _number_or_row(f)) for x, f in pairs)
    return [(address, 1 / f if name in _OVER else f) for address, f in fixed]


def _number_or_row(factor: Any) -> Tensor:
    if not isinstance(factor, Tensor):
        return torch.tensor(float(factor), dtype=torch.float64)  # 0-d: does not promote matrices
    return factor.detach().clone().reshape(() if factor.numel() == 1 else -1)


def _is_factor(factor: Any, x: Any) -> bool:
    """Whether a factor is the same for all tokens and independent of the input."""
    if not isinstance(x, Tensor) or x.ndim not in (2, 3) or not x.is_floating_point():
        return False
    if not has_storage(x):
        return False
    if not isinstance(factor, Tensor):
        return isinstance(factor, int | float)
    size = factor.numel()
    of_channels = factor.ndim > 0 and factor.shape[-1] == size == x.shape[-1]
    return not factor.requires_grad and (size == 1 or of_channels) and has_storage(factor)


# --- block outputs, which can replace the blocks in the next run


@dataclass(frozen=True)
class BlockRun:
    """Outputs of the blocks, the elements of the outermost module lists, in one run."""

    outputs: BlockOutputs  # in order of completion
    ended: Mapping[str, int]  # number of completed blocks at the start of each block

    def below(self, module: str) -> BlockOutputs:
        """Outputs of the blocks completed before the block of a module; empty without a block."""
        block = next((one for one in self.ended if f"{module}.".startswith(f"{one}.")), None)
        if block is None:
            return {}
        return dict([*self.outputs.items()][: self.ended[block]])


def run_of_blocks(
    model: nn.Module, inputs: Inputs, dtype: torch.dtype, until: str | None = None
) -> BlockRun:
    """Run a model, up to the first call of ``until`` if given, and record its block outputs."""

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
    """Record the block outputs of the next run; the yielded function returns them after the run.

    Nothing is recorded if outputs of two blocks share memory, which copies would not, if a block is
    called more than once, or if block outputs are not only tensors.
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
    """Temporarily replace some blocks of a model by their recorded outputs."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for path, output in outputs.items():
        around, _, name = path.rpartition(".")
        blocks: Any = model.get_submodule(around)._modules
        found.append((blocks, name, _KnownBlock(blocks[name], output)))
    return swapped(found)


class _KnownBlock(nn.Module):
    """Replacement of a block, with its attributes and its recorded output."""

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
            found |= {name: block for name, block in blocks if block is not None}  # None: Informer
    return found


def _places(output: Any) -> list[int]:
    """Memory addresses of the tensors of an output; -1 for other values."""
    if type(output) in (tuple, list):
        return [place for one in output for place in _places(one)]
    if isinstance(output, Tensor):
        return [data_address(output)]
    return [] if output is None else [-1]


def _copy(output: Any) -> Any:
    """A copy of a module's output, since the model may overwrite it."""
    return _nested(output, lambda x: x.detach().clone())
