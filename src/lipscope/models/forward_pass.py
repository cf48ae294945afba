"""A module as a function of its stream, and what one run of it shows."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as _hooks

from lipscope.attention import change_of, check_as_written
from lipscope.errors import InputError, shown
from lipscope.models.network import ActivationName, Chain, Network
from lipscope.models.tracing.calls import Stream, Streams, Trace
from lipscope.models.tracing.map_endpoints import rerun
from lipscope.models.tracing.maps import WHOLE, build_map, norm_before
from lipscope.models.tracing.recorder import (
    Inputs,
    Node,
    Recorder,
    SumRecorder,
    TensorStore,
    as_tokens,
    has_storage,
    named_arguments,
    origins,
    tensors_in,
)
from lipscope.models.tracing.side_channels import Watch, side_channel, tensors_inside
from lipscope.models.tracing.sites import (
    AttentionCall,
    block_of,
    first_block_of,
    is_linear,
    is_norm,
)
from lipscope.models.tracing.trace import OF_MODELS

_CONSTANTS = 1e-7  # relative: constants of activations are written with some eight digits
_SAME = 1e-9  # two tensors, relative to the largest entry: float64, after some hundred layers
# Functions that autograd may record between stream and scores, besides attention and norms.
_LINEAR = (
    "AccumulateGrad|Add|Addmm|Addmv|Alias|AsStrided|Baddbmm|Bmm|Cat|Clone|Copy|CopyBackwards"
    "|CopySlices|Div|Dot|Expand|Index|IndexSelect|Gather|Linear|MaskedFill|Mean|Mm|Mul|Mv|Neg|Permute"
    "|ReshapeAlias|Repeat|Roll|Select|Slice|Split|SplitWithSizes|SafeSplit|Squeeze|Stack|Sub|Rsub"
    "|Sum|T|ToCopy|Transpose|Unbind|UnsafeSplit|UnsafeView|Unsqueeze|View|Where|Identity"
)
# One of these is in each activation, of the kind that stands beside it.
_ACTIVATIONS = {"Relu": "relu", "Erf": "gelu", "Gelu": "gelu", "Sigmoid": "silu", "Silu": "silu"}
_ACTIVATIONS |= {"GeluTanh": "tanh", "Tanh": "tanh"}
_PLAIN = regex.compile(f"(?:{_LINEAR})$")
_KNOWN = regex.compile(f"(?:{_LINEAR}|{'|'.join(_ACTIVATIONS)}|Pow)$")
# Those of norms besides: a whole norm, a variance, a deviation, a root, an inverse, by letter.
_OF_NORMS: dict[str, str] = {}
_OF_NORMS |= dict.fromkeys(("NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm"), "N")
_OF_NORMS |= dict.fromkeys(("Var", "VarMean"), "v")
_OF_NORMS |= dict.fromkeys(("Std", "StdMean", "LinalgVectorNorm", "Norm"), "d")
_OF_NORMS |= {"Sqrt": "r", "Rsqrt": "r", "Reciprocal": "i"}
_POWERS = {2: "v", 0.5: "r", -0.5: "r", -1: "i"}
# How often they are in one norm, in order; p is a product. More of them may hide another function.
_ONE_NORM = ("N", "prv", "ppr", "iprv", "ippr", "dp", "dip")
# Indices of the factors among the arguments of functions that multiply.
_FACTORS: dict[str, tuple[int, int]] = {}
_FACTORS |= dict.fromkeys(("Mul", "Div", "Mm", "Bmm", "Mv", "Dot", "Linear"), (0, 1))
_FACTORS |= dict.fromkeys(("Addmm", "Addmv", "Baddbmm"), (1, 2))
# How an activation of z may be written: a function of torch, and what it takes.
_WRITTEN: dict[ActivationName, tuple[tuple[str, Callable[[Tensor], Tensor]], ...]] = {
    "relu": (("relu", lambda z: z),),
    "gelu": (("gelu", lambda z: z), ("erf", lambda z: z / math.sqrt(2))),
    "gelu_tanh": (
        ("gelu_tanh", lambda z: z),
        ("tanh", lambda z: math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
    ),
    "silu": (("silu", lambda z: z), ("sigmoid", lambda z: z)),
    "tanh": (("tanh", lambda z: z),),
}
# Names of inputs that are no sources of a stream; masked tokens are.
_BESIDE = regex.compile("mask(?!ed)|bias|position")
_CUBE = 3  # products in tanh's form of GELU: z³, and z times the rest; z³ as a power is two


def function_of(record: Trace, *, any_ids: bool = False) -> StreamFunction:
    """The module from its first block on; without blocks, from the first attention or its norm.

    Token ids are constants, unless what is found should hold for ``any_ids``; embeddings are none.
    """
    call = record.calls[0]
    if call.end.refusal:
        raise InputError(call.end.refusal)
    block, norm = block_of(record.model, call.name), norm_before(record, call)
    first = None if block is None else record.firsts.get(first_block_of(record.model, block))
    if first is not None:
        return _from_part(record, *first, any_ids)
    if norm is not None:
        before, part = as_tokens(norm.x, call.token_axis), call.end.output
        sums = (as_tokens(one.value, call.token_axis) for one in record.seen.sums)
        if any(_is_sum(total, before, part) for total in sums):
            names = (next(iter(named_arguments(norm.module, (norm.x,), {}))),)
            return _from_part(record, norm.module, Stream(names, norm.x, None), any_ids)
    return _from_part(record, call.module, Stream(call.hidden, call.kept[0], None), any_ids)


def _is_sum(total: Tensor, x: Tensor, part: Tensor) -> bool:
    """Whether a part is added to a stream: as it is, or with a factor for each channel."""
    if not total.shape == x.shape == part.shape:
        return False
    factor = ((total - x) * part).sum(0) / part.square().sum(0)
    return same(x + part, total) or same(x + factor * part, total)


def _from_part(record: Trace, part: nn.Module, stream: Stream, any_ids: bool) -> StreamFunction:
    moved = Streams([stream], record.calls[0].token_axis)
    function = rerun(record, {part: moved}, "", once=True)
    x, beside = moved.x.detach().clone(), tuple(_sources(record.inputs))
    return StreamFunction(record, x, function, record.calls, beside, any_ids)


def _sources(inputs: Inputs) -> Iterator[Tensor]:
    """The inputs that are embedded: no masks, no positions, no settings."""
    named = inputs.items() if isinstance(inputs, Mapping) else zip(("",), inputs, strict=False)
    for name, value in named:
        if isinstance(value, Tensor) and value.ndim > 1 and not _BESIDE.search(name):
            yield value


def function_of_map(record: Trace, layer: int, name: str) -> StreamFunction:
    """The maps ``block``, ``stack`` and ``model``, which run modules again."""
    built = build_map(record, None if name in WHOLE else layer, name)
    calls = record.calls if name in WHOLE else record.calls[: layer + 1]
    calls = calls[-1:] if name == "block" else calls
    return StreamFunction(record, built.x.detach().clone(), built, calls)


@dataclass(frozen=True, eq=False)
class StreamFunction:
    """A module as a function of the stream that one of its parts takes."""

    record: Trace  # the pass that it was found in
    x: Tensor  # the stream
    function: Callable[[Tensor], Tensor]
    calls: Sequence[AttentionCall]  # its attention layers, in the order in which they are called
    beside: tuple[Tensor, ...] = ()  # inputs that may act through the stream alone
    any_ids: bool = False  # whether token ids are among them

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """The output: one row, or one per token."""
        try:
            return _rows(self.function(x))
        except InputError:
            raise
        except Exception as problem:  # a module raises what it likes
            raise InputError(
                f"`{type(self.record.model).__name__}` should run on any stream, to be compared "
                f"with what is found. Found that it raised {type(problem).__name__}: "
                f"{' '.join(str(problem).split())[:300]}"
            ) from problem


def _rows(x: Tensor) -> Tensor:
    """One sample as a matrix, a token or the pooled vector a row."""
    if x.ndim == 0 or not x.numel():
        raise InputError(
            "The module should give a vector, or one for every token. Found a tensor of shape "
            f"{tuple(x.shape)}."
        )
    return x.reshape(-1, x.shape[-1])


class ModuleCall(NamedTuple):
    """A call of a module: when, and what it took and returned, as rows."""

    time: int
    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


class ForwardPass:
    """One run: inputs and outputs of modules, sums, and the functions behind the scores."""

    def __init__(self, function: StreamFunction) -> None:
        record = function.record
        sites = {call.module for call in record.calls}
        inside = {m for site in sites for m in site.modules()} - sites
        for call in record.calls:
            check_as_written(call.module, call.name)
        self.sites, self.time = sites, 0
        self.paths = {call.name for call in record.calls}
        self.calls: list[ModuleCall] = []
        self._tensors: dict[torch.Size, list[Tensor]] = {}
        self._jumps: dict[Node, list[Node]] = {}
        self.scaling = set[nn.Module]()  # modules that divide by what a norm divides by
        sums = SumRecorder(TensorStore(copies=True))
        with Recorder() as recorder:
            for name, module in record.model.named_modules():
                if name and module not in inside:
                    self._watch(recorder, name, module)
            recorder.enter_context(sums)
            first = Watch(function.beside, any_ids=function.any_ids)
            out = self._pass(function, first)
        self.output = out.detach().clone()
        for made in (*sums.sums, *sums.multiples):
            self._keep(made.value)
        self._keep(self.output)
        made = [n for n in origins(out.grad_fn, self._jumps) if n not in self._jumps]
        # The functions that lead from the stream to the output, by name, and how often each.
        self.functions = Counter(map(_name, made))
        self._products = sum(map(_products_in, made))
        self._taken = first.taken
        # Its dependence on values that autograd does not record.
        again = functools.partial(self._pass, function)
        self.read = side_channel(first, out, again, _made_alike)
        self.unknown = sorted(f for f in self.functions if not _KNOWN.match(f))
        twice = {call.name for call in record.calls} & {*record.others}
        self.unknown += [f"{name} with keys from elsewhere" for name in sorted(twice)]
        if self.functions["AccumulateGrad"] > 1:
            self.unknown.append("a tensor, not the stream, that requires a gradient")
        # An activation may be as good as linear, or zero, at this input, and not at another.
        kinds = (_ACTIVATIONS.get(name) for name in self.functions.elements())
        self.activations = Counter(kind for kind in kinds if kind is not None)

    def _pass(self, function: StreamFunction, watch: Watch) -> Tensor:
        x = function.x.clone().requires_grad_(watch.grad)
        with Recorder() as recorder, torch.set_grad_enabled(watch.grad), watch:
            for site in self.sites:
                recorder.around(site, *(functools.partial(watch.enter, by) for by in (1, -1)))
            return function(x)

    def _watch(self, recorder: Recorder, name: str, module: nn.Module) -> None:
        started: list[tuple[int, list[Tensor], list[Node], bool]] = []

        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [v for v in (*args, *kwargs.values()) if _is_matrix(v)]
            self.time += 1
            nodes = [v.grad_fn for v in given if v.grad_fn is not None]
            moved = _is_moved(module, (*args, *kwargs.values()))
            started.append((self.time, [self._keep(v) for v in given], nodes, moved))

        def finish(_: nn.Module, __: Any, out: Any) -> None:
            time, given, nodes, moved = started.pop()
            several = [v for v in tensors_in(out) if _is_matrix(v)]
            kept = [self._keep(v) for v in several]
            if given and kept:
                self.calls.append(ModuleCall(time, name, module, given[0], kept[0]))
            made = [v.grad_fn for v in several if v.grad_fn is not None]
            known = module in self.sites
            if is_norm(module) and _is_one_norm(module, made, nodes):
                known = True
                self.scaling.add(module)
            if known and not moved and not _reads_beside(made, nodes):
                self._jumps.update(dict.fromkeys(made, nodes))

        recorder.around(module, start, finish)

    def _keep(self, x: Tensor) -> Tensor:
        x = _rows(x.detach()).clone()  # a module may write into it
        self._tensors.setdefault(x.shape, []).append(x)
        return x

    def holds(self, x: Tensor) -> bool:
        """Whether a module took or returned this matrix, or a sum made it."""
        return any(same(x, other) for other in self._tensors.get(x.shape, ()))

    def like(self, x: Tensor) -> list[Tensor]:
        """All matrices of a shape."""
        return self._tensors.get(x.shape, [])

    def applies(self, activation: ActivationName, z: Tensor) -> bool:
        """Whether an activation met ``z`` in this run."""
        return any(
            name == written
            and v.numel() == z.numel()
            and torch.allclose(v.reshape(z.shape), given(z), rtol=_CONSTANTS, atol=0.0)
            for written, given in _WRITTEN[activation]
            for name, v in self._taken
        )

    def holds_products(self, gates: int, cubes: int) -> bool:
        """Whether tensors that depend on the stream multiply as gates and activations say.

        Args:
            gates: Token-wise networks with a gate.
            cubes: Those with GELU by tanh.
        """
        written = self.functions["Erf"] + self.functions["Sigmoid"]
        cubes = max(0, cubes - self.functions["GeluTanh"])
        return self._products == gates + written + _CUBE * cubes


def _made_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two passes gave the same, by the same functions."""
    made = (Counter(map(_name, origins(one.grad_fn, {}))) for one in (a, b))
    return same(a, b) and next(made) == next(made)


def _is_moved(module: nn.Module, arguments: Sequence[Any]) -> bool:
    """Whether a module is another function at other streams, by its weights or inside tuples."""
    own = (value for one in module.modules() for value in vars(one).values())
    inner = (a for a in arguments if not isinstance(a, Tensor))
    return any(one.requires_grad for one in tensors_inside((*own, *inner)))


def _reads_beside(made: list[Node], of: list[Node]) -> bool:
    """Whether a module depends on the stream by more than its arguments and weights."""

    def reached(nodes: list[Node], ends: Mapping[Node, list[Node]]) -> bool:
        return any(_name(one) == "AccumulateGrad" for node in nodes for one in origins(node, ends))

    # By none of them where the stream enters: they are replaced after this is noted.
    return reached(of, {}) and reached(made, {node: [] for node in of})


def _is_one_norm(module: nn.Module, made: list[Node], of: list[Node]) -> bool:
    """Whether what stands between the input and output of a module is that of one norm, divided."""
    ends = {node: [] for node in of}
    inner = {one: None for node in made for one in origins(node, ends) if one not in ends}
    kinds = "".join(sorted(map(_kind_in_norms, inner)))
    return not any(map(is_linear, module.modules())) and kinds in _ONE_NORM


def _kind_in_norms(node: Node) -> str:
    name = _name(node)
    if name == "Pow":
        return _POWERS.get(getattr(node, "_saved_exponent", None), "?")
    known = "" if _PLAIN.match(name) else "?"
    return _OF_NORMS.get(name, "p" if _products_in(node) else known)


def _name(node: Node) -> str:
    kind = type(node)
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return f"{kind.__name__}, a function of its own"
    name = regex.sub(r"(Backward)?\d*$", "", kind.__name__)
    return name + "Tanh" * (name == "Gelu" and getattr(node, "_saved_approximate", "") == "tanh")


def _products_in(node: Node) -> float:
    """How often tensors that depend on the stream multiply: no weight has a gradient here."""
    if _name(node) == "Pow":
        power = getattr(node, "_saved_exponent", None)  # none of a tensor to the power of one
        return power - 1.0 if power in (2, 3) else math.inf
    first, second = _FACTORS.get(_name(node), (0, 0))
    taken = [one for one, _ in node.next_functions]  # a number that multiplies is none of them
    return float(first < second < len(taken) and None not in (taken[first], taken[second]))


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0 and has_storage(x)


def same(a: Tensor, b: Tensor, rounding: float = _SAME) -> bool:
    """Whether two matrices agree up to the rounding of float64, or to another one."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    size = rounding * float(b.abs().max()) if b.numel() else 0.0
    return bool((a[:1] - b[:1]).abs().max() <= size) and bool((a - b).abs().max() <= size)


# --- what a module says itself


def refuse_global_hooks() -> None:
    """Refuse hooks that torch calls around every module."""
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        raise InputError(
            "A network should be computed as its modules are written. Found hooks for all modules "
            "(`register_module_forward_hook`), which may change it; take them away."
        )


def own_parts(model: nn.Module) -> Network | Chain | None:
    """What a module says itself that it is made of; None if it has no method ``as_network``."""
    model = getattr(model, "_orig_mod", model)  # what `torch.compile` wraps
    give: Any = getattr(model, "as_network", None)
    if not callable(give):
        return None
    refuse_global_hooks()
    # What is put in place of a method of the module itself is named below, but for `as_network`.
    for one in [model] if change_of(model).startswith("hooks") else model.children():
        check_as_written(one, type(model).__name__)
    patched = {k for k in vars(model) if callable(getattr(type(model), k, None))} - {"as_network"}
    if changed := _changed_since(type(model), "as_network") or patched:
        raise InputError(
            f"`as_network` should tell what `{type(model).__name__}` computes. Found a "
            f"`{min(changed)}` of its own beside it; define `as_network` there too."
        )
    try:
        found = give()
    except OF_MODELS as problem:
        if isinstance(problem, InputError):
            raise
        found = f"{type(problem).__name__}: {problem}"
    if not isinstance(found, Network | Chain):
        raise InputError(
            f"`as_network` of `{type(model).__name__}` should give a `Network` or `Chain` "
            f"(`lipscope.models`). Found `{shown(found)}`."
        )
    return found


def _changed_since(kind: type[nn.Module], name: str) -> set[str]:
    """What classes redefine of the class from which they have a method."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), kind)
    below = itertools.takewhile(lambda one: one is not owner, kind.__mro__)
    own = {key for key in vars(owner) if not key.startswith("__")} | {"forward", "__call__"}
    return own & {key for one in below for key in vars(one)}
