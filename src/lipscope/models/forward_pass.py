"""A module as a function of its stream, and what one run of it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.tracing.calls import Stream, Streams, Trace
from lipscope.models.tracing.map_endpoints import rerun
from lipscope.models.tracing.maps import WHOLE, build_map, norm_before
from lipscope.models.tracing.recorder import (
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
from lipscope.models.tracing.sites import AttentionCall, block_of, first_block_of, is_norm

_SAME = 1e-9  # two tensors, relative to the largest entry: float64, after some hundred layers
# What autograd may have seen between stream and scores, besides attention and norms.
_LINEAR = (
    "AccumulateGrad|Add|Addmm|Addmv|Alias|AsStrided|Baddbmm|Bmm|Cat|Clone|Copy|CopyBackwards"
    "|CopySlices|Div|Dot|Expand|Index|IndexSelect|Gather|Linear|Mean|Mm|Mul|Mv|Neg|Permute"
    "|ReshapeAlias|Repeat|Roll|Select|Slice|Split|SplitWithSizes|SafeSplit|Squeeze|Stack|Sub|Rsub"
    "|Sum|T|ToCopy|Transpose|Unbind|UnsafeSplit|UnsafeView|Unsqueeze|View|Identity"
)
# One of these is in each activation, of the kind that stands beside it.
_ACTIVATIONS = {"Relu": "relu", "Erf": "gelu", "Gelu": "gelu", "Sigmoid": "silu", "Silu": "silu"}
_ACTIVATIONS |= {"GeluTanh": "tanh", "Tanh": "tanh"}
_KNOWN = regex.compile(f"(?:{_LINEAR}|{'|'.join(_ACTIVATIONS)}|Exp|Pow|Rsqrt|Sqrt)(?:Backward)?$")


def function_of(record: Trace) -> StreamFunction:
    """The module from its first block on; without blocks, from the first attention or its norm."""
    call = record.calls[0]
    if call.end.refusal:
        raise InputError(call.end.refusal)
    block, norm = block_of(record.model, call.name), norm_before(record, call)
    first = None if block is None else record.firsts.get(first_block_of(block))
    if first is not None:
        return _from_part(record, *first)
    if norm is not None:
        total = as_tokens(norm.x, call.token_axis) + call.end.output
        if any(same(total, as_tokens(one.value, call.token_axis)) for one in record.seen.sums):
            names = (next(iter(named_arguments(norm.module, (norm.x,), {}))),)
            return _from_part(record, norm.module, Stream(names, norm.x, None))
    return _from_part(record, call.module, Stream(call.hidden, call.kept[0], None))


def _from_part(record: Trace, part: nn.Module, stream: Stream) -> StreamFunction:
    moved = Streams([stream], record.calls[0].token_axis)
    function = rerun(record, {part: moved}, "", once=True)
    return StreamFunction(record, moved.x.detach().clone(), function, record.calls)


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

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """What it returns: a row, or one for every token."""
        return _rows(self.function(x))


def _rows(x: Tensor) -> Tensor:
    """One sample as a matrix, a token or the pooled vector a row."""
    return x.reshape(-1, x.shape[-1])


class ModuleCall(NamedTuple):
    """A call of a module: when, and what it took and returned, as rows."""

    time: int
    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


class ForwardPass:
    """What modules take and return in one run, the sums formed, and what the scores are made of."""

    def __init__(self, function: StreamFunction) -> None:
        record = function.record
        sites = {call.module for call in record.calls} | {
            record.model.get_submodule(name) for name in record.others
        }
        inside = {m for site in sites for m in site.modules()} - sites
        self.sites, self.time = sites, 0
        self.paths = {call.name for call in record.calls}
        self.calls: list[ModuleCall] = []
        self._tensors: dict[torch.Size, list[Tensor]] = {}
        self._jumps: dict[Node, list[Node]] = {}
        sums = SumRecorder(TensorStore(copies=True))
        with Recorder() as recorder, torch.enable_grad():
            for name, module in record.model.named_modules():
                if name and module not in inside:
                    self._watch(recorder, name, module)
            recorder.enter_context(sums)
            out = function(function.x.clone().requires_grad_())
        self.output = out.detach().clone()
        for total in sums.sums:
            self._keep(total.value)
        self._keep(self.output)
        self.functions = self._functions(out)
        self.unknown = sorted(f for f in self.functions if not _KNOWN.match(f))
        # An activation may be as good as linear, or zero, at this input, and not at another.
        kinds = (_ACTIVATIONS.get(name) for name in self.functions.elements())
        self.activations = Counter(kind for kind in kinds if kind is not None)

    def _watch(self, recorder: Recorder, name: str, module: nn.Module) -> None:
        started: list[tuple[int, list[Tensor], list[Node]]] = []

        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [v for v in (*args, *kwargs.values()) if _is_matrix(v)]
            self.time += 1
            nodes = [v.grad_fn for v in given if v.grad_fn is not None]
            started.append((self.time, [self._keep(v) for v in given], nodes))

        def finish(_: nn.Module, __: Any, out: Any) -> None:
            time, given, nodes = started.pop()
            several = [v for v in tensors_in(out) if _is_matrix(v)]
            kept = [self._keep(v) for v in several]
            if given and kept:
                self.calls.append(ModuleCall(time, name, module, given[0], kept[0]))
            if module in self.sites or (is_norm(module) and not list(module.children())):
                made = (v.grad_fn for v in several)
                self._jumps.update({node: nodes for node in made if node is not None})

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

    def _functions(self, out: Tensor) -> Counter[str]:
        """The functions that lead from the stream to the output, by name, and how often each."""
        made = (node for node in origins(out.grad_fn, self._jumps) if node not in self._jumps)
        return Counter(map(_name, made))


def _name(node: Node) -> str:
    name = regex.sub(r"(Backward)?\d*$", "", type(node).__name__)
    return name + "Tanh" * (name == "Gelu" and getattr(node, "_saved_approximate", "") == "tanh")


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0 and has_storage(x)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices agree up to the rounding of float64."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    size = _SAME * float(b.abs().max()) if b.numel() else 0.0
    return bool((a[:1] - b[:1]).abs().max() <= size) and bool((a - b).abs().max() <= size)
