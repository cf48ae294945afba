"""From a module to its `Network`: which of its parts follow which, found by values and proved.

A module runs once from the stream that enters its first block. What its norms, linear maps and
attention layers take and return there tells in what order they make its scores; sums are found
among the tensors that it forms. What is found is then held against the module itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import regex
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.families.affine import Affine, affine
from lipscope.models.network import ACTIVATIONS, ActivationName, Branch, Feed, Network, Norm
from lipscope.models.tracing.calls import Stream, Streams, Trace
from lipscope.models.tracing.map_endpoints import rerun
from lipscope.models.tracing.maps import norm_before
from lipscope.models.tracing.prepare import ExactNorm, implementation_for, prepared
from lipscope.models.tracing.recorder import (
    Inputs,
    Node,
    Recorder,
    SumRecorder,
    TensorStore,
    as_tokens,
    has_storage,
    named_arguments,
    tensors_in,
    to_device,
)
from lipscope.models.tracing.sites import (
    attention_sites,
    block_of,
    closed_form,
    first_block_of,
    is_linear,
    is_norm,
    is_plain,
    why_run,
)
from lipscope.models.tracing.trace import trace

Pooled = Literal["mean", "first", "last"] | int
Scores = Callable[[Tensor], Tensor]

_SAME = 1e-9  # two tensors, relative to the largest entry: float64, after some hundred layers
_AGREES = 1e-6  # the network and the module: scores, gradients, curvature
_MOVES = (1e-2, 1e-1, 1.0)  # of the stream, relative to its root mean square
_MANY = 4  # classes whose gradients are compared
_CPU = torch.device("cpu")
_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
# What autograd may have seen between stream and scores, besides attention and norms. Analytic
# functions that agree at one input agree at all; of the others ReLU alone is known.
_LINEAR = (
    "AccumulateGrad|Add|Addmm|Addmv|Alias|AsStrided|Baddbmm|Bmm|Cat|Clone|Copy|CopyBackwards"
    "|CopySlices|Div|Dot|Expand|Index|IndexSelect|Gather|Linear|Mean|Mm|Mul|Mv|Neg|Permute"
    "|ReshapeAlias|Repeat|Roll|Select|Slice|Split|SplitWithSizes|SafeSplit|Squeeze|Stack|Sub|Rsub"
    "|Sum|T|ToCopy|Transpose|Unbind|UnsafeSplit|UnsafeView|Unsqueeze|View|Identity"
)
_ANALYTIC = "Erf|Exp|Gelu|Pow|Relu|Rsqrt|Sigmoid|Silu|Sqrt|Tanh"
_KNOWN = regex.compile(f"(?:{_LINEAR}|{_ANALYTIC})(?:Backward)?$")
# Of which functions an activation may be written.
_WRITTEN: dict[ActivationName, set[str]] = {
    "relu": {"Relu"},
    "gelu": {"Gelu", "Erf"},
    "gelu_tanh": {"Gelu", "Tanh"},
    "silu": {"Silu", "Sigmoid"},
    "tanh": {"Tanh"},
}


def read_network(
    model: nn.Module,
    inputs: Inputs,
    *,
    at_layer: int = 0,
    head: Float[Tensor, "c d"] | None = None,
    bias: Float[Tensor, " c"] | None = None,
    names: tuple[str, ...] = (),
    pool: Pooled | None = None,
    modules: str | None = None,
) -> tuple[Network, Float[Tensor, "n d"]]:
    """The network that a module is at an input, and the stream that enters it, in float64.

    The stream is what enters the first block: embeddings with their positions and norm. Masks are
    those of this input. The network is held against a float64 copy of the module
    (`check_network`).

    Holds for blocks of dot-product attention and token-wise networks in turn, each with or without
    a residual sum and a norm before it or after the sum; for pools that are fixed means of tokens;
    for linear heads, layers of activations before them. Dropout is off, so it is the identity.

    Args:
        model: A module that ends in scores, ``(1, c)`` or for every token ``(1, n, c)``, or in a
            hidden state if ``head`` is given.
        inputs: Its arguments, of one sample: by name, or a tuple.
        at_layer: The attention layer before which the stream is taken.
        head: Rows that score the pooled hidden state of a model without a head.
        bias: Their bias.
        names: What to call the classes; those of the model's configuration if empty.
        pool: Which tokens are read where the model does not pool them itself: their mean without
            padding, the first or last real token, or a token by its index. Default: the last of a
            causal model, the mean with ``head``.
        modules: Which modules are attention, as for `attention_sites`.

    Returns:
        The network, and its input ``(n, d)``.

    Raises:
        InputError: If the module holds anything else, by name, or disagrees with what was found.

    >>> pair = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)
    >>> network, x = read_network(nn.Sequential(*pair), (torch.randn(1, 5, 8),), pool="mean")
    >>> len(network.branches), tuple(network(x).shape)
    (4, (3,))
    """
    given = to_device(inputs, _CPU, torch.float64)
    if head is not None:
        head = torch.as_tensor(head).detach().to(_CPU, torch.float64)
        names = names or tuple(map(str, range(len(head))))
    with ExitStack() as stack:
        own, _ = stack.enter_context(
            prepared(
                model,
                dtype=torch.float64,
                device=_CPU,
                implementation=implementation_for(model, closed=True),
            )
        )
        record = trace(
            own, given, _sites(own, modules), norms=True, blocks=True, dtype=torch.float64
        )
        found = _Search(_module_of(record), head, bias, pool).found()
        network = replace(found.network, names=names or _class_names(own, len(found.network.bias)))
        check_network(network, found.scores, found.x)
    if not 0 <= at_layer < len(found.starts):
        raise InputError(
            f"`at_layer` should be between 0 and {len(found.starts) - 1} for this model. Found "
            f"{at_layer}."
        )
    x, start = found.x, found.starts[at_layer] if at_layer else 0
    with torch.no_grad():
        for branch in network.branches[:start]:
            x = branch(x)
    return replace(network, branches=network.branches[start:]), x


def check_network(network: Network, scores: Scores, x: Float[Tensor, "n d"]) -> None:
    """Refuse a network that is not the function ``scores`` of the stream.

    Compared to 1e-6, at ``x`` and after random moves of three sizes: scores, gradients (of the
    largest scores at ``x``, then of a random combination of them), and products with the Hessian
    there, by central differences along a random direction.

    Args:
        network: The description.
        scores: The module itself from the same stream, ``(n, d) -> (c,)``.
        x: The stream.

    Raises:
        InputError: If they differ: in what, where, and by how much.
    """
    generator = start_named("network and module")
    size = float(x.square().mean().sqrt()) or 1.0

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=x.dtype)

    with torch.no_grad():
        mine, own = network(x), scores(x)
    _compare("scores", "at the input", mine, own, float(own.norm()))
    top = own.topk(min(_MANY, len(own))).indices
    for move in (0.0, *_MOVES):
        at = x + move * size * drawn(*x.shape)
        where = f"after a random move of {move:g} times the stream" if move else "at the input"
        weights = drawn(1, len(top)) if move else torch.eye(len(top), dtype=x.dtype)
        (mine, slopes), (own, expected) = (
            _gradients(f, at, top, weights) for f in (network, scores)
        )
        _compare("scores", where, mine, own, float(own.norm()))
        length = float(expected.norm())
        _compare("gradients", where, slopes, expected, length)
        if move:
            step = 1e-4 * size * drawn(*x.shape)
            ends = [
                [_gradients(f, end, top, weights)[1] for end in (at - step, at + step)]
                for f in (network, scores)
            ]
            change, expected = (after - before for before, after in ends)
            # Beside the rounding of the gradients themselves.
            _compare("curvature", where, change, expected, float(expected.norm()) + 1e-4 * length)


def _compare(what: str, where: str, mine: Tensor, own: Tensor, size: float) -> None:
    error = float((mine - own).norm()) if mine.shape == own.shape else math.inf
    if not error <= _AGREES * size:
        raise InputError(
            f"The network should have the {what} of the module itself. Found a relative difference "
            f"of {error / size if size else error:.2g} {where}: the module computes something that "
            "lipscope does not read; certify one of its layers."
        )


def _gradients(
    f: Scores, x: Tensor, classes: Tensor, weights: Float[Tensor, "r k"]
) -> tuple[Float[Tensor, " c"], Float[Tensor, "r n d"]]:
    """All scores, and gradients of combinations of those of some classes."""
    with torch.enable_grad():
        x = (x.detach() + 0.0).requires_grad_()
        scores = f(x)
        rows = [row @ scores[classes] + 0.0 * x.sum() for row in weights]
        parts = [torch.autograd.grad(row, x, retain_graph=True)[0] for row in rows]
    return scores.detach(), torch.stack(parts)


def layer_network(
    layer: DotProduct,
    num_tokens: int,
    head: Float[Tensor, "c d_out"],
    bias: Float[Tensor, " c"] | None = None,
    *,
    pool: Pooled = "mean",
    names: tuple[str, ...] = (),
) -> Network:
    """One attention layer alone, its pooled output scored: no residual sum, no norm.

    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> layer_network(layer, 3, torch.eye(2))(torch.zeros(3, 2, dtype=torch.float64)).tolist()
    [0.0, 0.0]
    """
    head = head.detach().to(_CPU, torch.float64)
    bias = head.new_zeros(len(head)) if bias is None else bias.detach().to(head)
    share = _share(pool, torch.ones(num_tokens, dtype=torch.bool))
    return Network((Branch(layer.in_double(), skip=False),), share, head, bias, names=names)


# --- where the stream enters


def _sites(model: nn.Module, modules: str | None) -> dict[str, nn.Module]:
    """Attention modules, and layers of lipscope's own that stand alone."""
    alone = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    if modules is not None or not alone:
        return attention_sites(model, modules)
    try:
        named = attention_sites(model)
    except InputError:  # none is named so
        named = dict[str, nn.Module]()
    inside = tuple(f"{name}." for name in named)
    return named | {n: m for n, m in alone.items() if not n.startswith(inside)}


def _module_of(record: Trace) -> _Module:
    """The module from its first block on; without blocks, from the first attention or its norm."""
    call = record.calls[0]
    if call.refusal:
        raise InputError(call.refusal)
    block, norm = block_of(record.model, call.name), norm_before(record, call)
    first = None if block is None else record.firsts.get(first_block_of(block))
    if first is not None:
        return _Module(record, *first)
    if norm is not None:
        total = as_tokens(norm.x, call.token_axis) + call.output
        if any(_same(total, as_tokens(one.value, call.token_axis)) for one in record.seen.sums):
            names = (next(iter(named_arguments(norm.module, (norm.x,), {}))),)
            return _Module(record, norm.module, Stream(names, norm.x, None))
    return _Module(record, call.module, Stream(call.hidden, call.kept[0], None))


class _Module:
    """A module as a function of the stream that one of its parts takes."""

    def __init__(self, record: Trace, part: nn.Module, stream: Stream) -> None:
        moved = Streams([stream], record.calls[0].token_axis)
        self.record, self.x = record, moved.x.detach().clone()
        self._function = rerun(record, {part: moved}, "", once=True)

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """What it returns: a row, or one for every token."""
        return _rows(self._function(x))


def _rows(x: Tensor) -> Tensor:
    """One sample as a matrix, a token or the pooled vector a row."""
    return x.reshape(-1, x.shape[-1])


# --- what a run shows


class _Taken(NamedTuple):
    """A call of a module: when, and what it took and returned, as rows."""

    time: int
    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


class _View:
    """What modules take and return in one run, the sums formed, and what the scores are made of."""

    def __init__(self, function: _Module) -> None:
        record = function.record
        sites = {call.module for call in record.calls} | {
            record.model.get_submodule(name) for name in record.others
        }
        inside = {m for site in sites for m in site.modules()} - sites
        self.sites, self.time = sites, 0
        self.paths = {call.name for call in record.calls}
        self.calls: list[_Taken] = []
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
                self.calls.append(_Taken(time, name, module, given[0], kept[0]))
            if module in self.sites or (is_norm(module) and not list(module.children())):
                made = (v.grad_fn for v in several)
                self._jumps.update({node: nodes for node in made if node is not None})

        recorder.before(module, start)
        recorder.after(module, finish)

    def _keep(self, x: Tensor) -> Tensor:
        x = _rows(x.detach()).clone()  # a module may write into it
        self._tensors.setdefault(x.shape, []).append(x)
        return x

    def holds(self, x: Tensor) -> bool:
        """Whether a module took or returned this matrix, or a sum made it."""
        return any(_same(x, other) for other in self._tensors.get(x.shape, ()))

    def like(self, x: Tensor) -> list[Tensor]:
        """All matrices of a shape."""
        return self._tensors.get(x.shape, [])

    def _functions(self, out: Tensor) -> set[str]:
        """Names of the functions that lead from the stream to the output."""
        seen: set[Node] = set()
        names: set[str] = set()
        waiting = [out.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._jumps:
                waiting += self._jumps[node]
                continue
            names.add(regex.sub(r"(Backward)?\d*$", "", type(node).__name__))
            waiting += [before for before, _ in node.next_functions]
        return names


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0 and has_storage(x)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices agree up to the rounding of float64."""
    if a.shape != b.shape:
        return False
    size = _SAME * float(b.abs().max()) if b.numel() else 0.0
    return bool((a[:1] - b[:1]).abs().max() <= size) and bool((a - b).abs().max() <= size)


# --- the parts of a network, one after the other


@dataclass(frozen=True)
class _State:
    """How far the network is known: up to the stream ``v``, or up to a pooled row."""

    v: Tensor
    time: int = 0  # when the last module of it was called
    branches: tuple[Branch, ...] = ()
    starts: tuple[int, ...] = ()  # the branches that are attention layers
    share: Tensor | None = None
    tail: tuple[Branch, ...] = ()

    def then(self, branch: Branch, v: Tensor, time: int) -> _State:
        """With one more branch."""
        if self.share is not None:
            return replace(self, v=v, time=time, tail=(*self.tail, branch))
        here = (len(self.branches),) if isinstance(branch.part, DotProduct) else ()
        starts = self.starts + here
        return replace(self, v=v, time=time, branches=(*self.branches, branch), starts=starts)


class _Part(NamedTuple):
    """A part, what it gives, and when its last module was called."""

    part: DotProduct | Feed
    out: Tensor
    time: int


class _Found(NamedTuple):
    """A network, the branches of its attention layers, its stream, and the module as scores."""

    network: Network
    starts: tuple[int, ...]
    x: Tensor
    scores: Scores


class _Search:
    """A search for the parts of a module from one entry on; its state says how far it came."""

    def __init__(
        self,
        function: _Module,
        head: Tensor | None,
        bias: Tensor | None,
        pool: Pooled | None,
    ) -> None:
        self.function, self.record = function, function.record
        self.head, self.bias, self.pool = head, bias, pool
        self.view = view = _View(function)
        self.norms = [c for c in view.calls if is_norm(c.module) and c.module not in view.sites]
        self.linears = [c for c in view.calls if is_linear(c.module)]
        times = {name: [c.time for c in view.calls if c.name == name] for name in view.paths}
        self.times = [times[call.name][call.turn] for call in self.record.calls]
        self.layers: dict[int, DotProduct] = {}
        self.read_norms: dict[nn.Module, Norm | None] = {}
        self.furthest = _State(self.function.x)
        self.real = _real_tokens(self.record.inputs, len(function.x))

    def found(self) -> _Found:
        """The network.

        Raises:
            InputError: If there is none.
        """
        unknown = sorted(f for f in self.view.functions if not _KNOWN.match(f))
        if unknown:
            raise InputError(
                "A network should be made of attention, norms, linear maps and relu, gelu, silu or "
                f"tanh. Found `{', '.join(unknown)}` (as autograd calls it) between the stream and "
                "the output; certify one layer."
            )
        found = self._follow(_State(self.function.x))
        if found is None:
            raise self._stuck()
        return found

    def _follow(self, state: _State) -> _Found | None:
        """Depth first; the sums and parts that the module forms leave little choice."""
        if (len(state.starts), state.time) > (len(self.furthest.starts), self.furthest.time):
            self.furthest = state
        complete = len(state.starts) == len(self.record.calls)
        found = self._ended(state) if complete else None
        following = () if found is not None else self._next(state, complete)
        return found or next(filter(None, map(self._follow, following)), None)

    def _next(self, state: _State, complete: bool) -> Iterator[_State]:
        v, pooled = state.v, state.share is not None
        normed = list(self._norms(v, state.time))
        for norm, y, time in ((None, v, state.time), *normed):
            for part, p, then in self._parts(y, time, len(state.starts)) if not pooled else ():
                if p.shape == v.shape and self.view.holds(v + p):
                    yield state.then(Branch(part, norm), v + p, then)
                elif p.shape == v.shape and (scaled := self._scaled(part, v, p)) is not None:
                    yield state.then(Branch(scaled[0], norm), scaled[1], then)
                if self.view.holds(p):
                    yield state.then(Branch(part, norm, skip=False), p, then)
        for norm, y, time in normed:
            yield state.then(Branch(None, norm, skip=False), y, time)
        if complete:
            for feed, p, time in self._activations(v, state.time):
                yield state.then(Branch(feed, skip=False), p, time)
        if complete and not pooled:
            for share in self._shares():
                if self.view.holds((share @ v)[None]):
                    yield replace(state, v=(share @ v)[None], share=share)

    # --- norms

    def _norms(self, v: Tensor, time: int) -> Iterator[tuple[Norm, Tensor, int]]:
        for call in self.norms:
            if call.time > time and _same(v, call.x):
                norm = self._norm(call.module, v.shape[-1])
                if norm is not None and _same(norm(v), call.y):
                    yield norm, call.y, call.time

    def _norm(self, module: nn.Module, width: int) -> Norm | None:
        if module not in self.read_norms:
            self.read_norms[module] = _read_norm(module, width)
        return self.read_norms[module]

    # --- attention and token-wise networks

    def _parts(self, y: Tensor, time: int, done: int) -> Iterator[_Part]:
        if done < len(self.record.calls) and self.times[done] > time:
            call = self.record.calls[done]
            if _same(y, call.x):
                yield _Part(self._layer(done), call.output, self.times[done])
        inner = list(self._inner(y, time))
        for one in inner:
            for name, a in self._activated(one.z):
                for last in self._taking(a, one.time):
                    yield self._feed(name, one, None, last)
                for two in inner:
                    if two is not one and two.z.shape == a.shape:
                        for last in self._taking(a * two.z, max(one.time, two.time)):
                            yield self._feed(name, one, two, last)

    def _layer(self, index: int) -> DotProduct:
        """An attention layer at its input, which gives what the module gave."""
        if index not in self.layers:
            call = self.record.calls[index]
            own = isinstance(call.module, Attention)
            layer = call.module if own else closed_form(call)
            if not isinstance(layer, DotProduct):
                why = why_run(call.module) if layer is None else f"it is `{type(layer).__name__}`"
                raise InputError(
                    f"A network should be of dot-product attention. Found `{call.name}`: {why}; "
                    "measure it instead."
                )
            layer = layer.in_double()
            with torch.no_grad():
                same = _same(layer(call.x), call.output)
            if not same:
                raise InputError(
                    f"`{call.name}` should be what its family computes, for every token. Found "
                    "another output; leave out padding, which may read no token."
                )
            self.layers[index] = layer
        return self.layers[index]

    def _taking(self, x: Tensor, time: int) -> list[_Taken]:
        """Calls of linear maps that take a matrix."""
        return [c for c in self.linears if c.time > time and _same(x, c.x)]

    def _inner(self, y: Tensor, time: int) -> Iterator[_Inner]:
        """What linear maps make of a matrix; one that is cut in two gives both halves too."""
        for call in self._taking(y, time):
            whole = _affine(call)
            yield _Inner(whole, call.y, call.time)
            if len(whole.weight) % 2 == 0:
                sizes = [len(whole.weight) // 2] * 2
                for part, z in zip(whole.rows(sizes), call.y.split(sizes, dim=1), strict=True):
                    yield _Inner(part, z, call.time)

    def _activated(self, z: Tensor) -> Iterator[tuple[ActivationName, Tensor]]:
        for name, written in _WRITTEN.items():
            if written & self.view.functions:
                yield name, ACTIVATIONS[name](z)

    def _feed(self, name: ActivationName, one: _Inner, two: _Inner | None, last: _Taken) -> _Part:
        feed = _feed(name, one.map, _affine(last), None if two is None else two.map)
        return _Part(feed, last.y, last.time)

    def _activations(self, v: Tensor, time: int) -> Iterator[tuple[Feed, Tensor, int]]:
        """A linear map and an activation that lead on as they are, as in a tanh pooler."""
        for one in self._inner(v, time):
            for name, a in self._activated(one.z):
                if self.view.holds(a):
                    eye = torch.eye(a.shape[1], dtype=a.dtype)
                    yield _feed(name, one.map, Affine(eye, None), None), a, one.time

    def _scaled(self, part: DotProduct | Feed, v: Tensor, p: Tensor) -> Any:
        """A part with a factor by channel in its last map, where ``v + factor p`` is seen."""
        total = p.square().sum(0)
        for z in self.view.like(v) if len(v) > 1 and bool((total > 0).all()) else ():
            factor = ((z - v) * p).sum(0) / total
            if bool((factor != 0).all()) and _same(v + factor * p, z):
                if isinstance(part, Feed):
                    outer, shift = factor[:, None] * part.outer, factor * part.outer_bias
                    return replace(part, outer=outer, outer_bias=shift), z
                if part.output is not None:
                    shift = None if part.output_bias is None else factor * part.output_bias
                    return part.replace(output=factor[:, None] * part.output, output_bias=shift), z
        return None

    # --- pool and head

    def _shares(self) -> Iterator[Tensor]:
        """Pools that are tried: a token, the mean of all, of the real ones, without the first."""
        n = len(self.function.x)
        eye = torch.eye(n, dtype=torch.float64)
        yield from eye[[0, *range(n - 1, 0, -1)]]
        later = torch.arange(n) > 0
        for chosen in (torch.ones(n, dtype=torch.bool), self.real, later, later & self.real):
            if bool(chosen.any()):
                yield chosen.double() / chosen.sum()

    def _ended(self, state: _State) -> _Found | None:
        """The network if the output follows from here, by linear maps alone."""
        if self.head is not None:
            return self._ended_hidden(state)
        if _same(state.v, self.view.output):
            raise InputError(
                "A decision needs scores. Found a model that ends in its hidden state; give "
                "`head`, or pass the model with its head."
            )
        for weight, bias, o in self._linear_chains(state.v, state.time):
            final = self.view.output
            if state.share is None and len(o) > 1:
                if len(final) == 1:
                    for share in self._shares():
                        if _same((share @ o)[None], final):
                            return self._network(state, share, weight, bias, whole=True)
                elif _same(o, final):
                    return self._network(state, self._asked_share(), weight, bias, whole=False)
            elif _same(o, final):
                share = torch.ones(1, dtype=torch.float64) if state.share is None else state.share
                return self._network(state, share, weight, bias, whole=True)
        return None

    def _linear_chains(self, v: Tensor, time: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Weight, bias and output of linear maps, and of those that take what one gives."""
        for call in self._taking(v, time):
            one = _affine(call)
            bias = _bias(one)
            yield one.weight.clone(), bias, call.y
            for weight, shift, o in self._linear_chains(call.y, call.time):
                yield weight @ one.weight, weight @ bias + shift, o

    def _ended_hidden(self, state: _State) -> _Found | None:
        """With a head that was given: where the output is the stream, or the pooled row."""
        head = self.head
        assert head is not None
        if head.ndim != 2 or head.shape[1] != self.view.output.shape[1]:
            raise InputError(
                f"`head` should have a row of {self.view.output.shape[1]} numbers for every class. "
                f"Found shape {tuple(head.shape)}."
            )
        if not _same(state.v, self.view.output):
            return None
        bias = head.new_zeros(len(head)) if self.bias is None else self.bias.to(head)
        if state.share is not None:
            return self._network(state, state.share, head, bias, whole=True)
        return self._network(state, self._asked_share(), head, bias, whole=False)

    def _asked_share(self) -> Tensor:
        """Which tokens are read where the module leaves that open."""
        pool = self.pool
        if pool is None and self.head is not None:
            pool = "mean"
        elif pool is None and all(layer.causal for layer in self.layers.values()):
            pool = "last"
        if pool is None:
            raise InputError(
                "`pool` should say which token's scores decide: the model has scores for every "
                "token. Found none; give first, last, mean or an index."
            )
        return _share(pool, self.real)

    def _network(
        self, state: _State, share: Tensor, weight: Tensor, bias: Tensor, *, whole: bool
    ) -> _Found:
        """What was found; ``whole``: the module's output is the scores, else those of tokens."""
        if whole and self.pool is not None:
            raise InputError(
                "`pool` should be left out for a model that pools its tokens itself. Found "
                f"`pool = {self.pool}`."
            )
        if len(weight) < 2:
            raise InputError("A decision needs two scores. Found one; nothing is decided.")
        network = Network(state.branches, share, weight, bias, state.tail)
        head, given = self.head, bias

        def scores(x: Tensor) -> Tensor:
            out = self.function(x)
            out = out[0] if whole else share @ out
            return out if head is None else head @ out + given

        return _Found(network, state.starts, self.function.x, scores)

    def _stuck(self) -> InputError:
        """What takes the furthest stream that could be followed, and is not known."""
        at, v = self.furthest, self.furthest.v
        streams = [v, *(y for _, y, _ in self._norms(v, at.time))]
        takers = [
            c
            for c in self.view.calls
            if c.time > at.time and any(_same(y, c.x) for y in streams) and _is_leaf(c.module)
        ]
        said = list(dict.fromkeys(f"`{c.name}` ({type(c.module).__name__})" for c in takers))
        found = ", ".join(said[:4]) if said else "a function that is no module of its own"
        count = len(at.starts)
        return InputError(
            "A network should be attention and token-wise networks in turn, each added to the "
            "stream with a norm before or after, then a fixed pool and a linear head. Found "
            f"otherwise after {count} attention layer{'' if count == 1 else 's'} and "
            f"{len(at.branches) + len(at.tail)} parts: the stream there goes to {found}; certify "
            "one layer, or describe the model as a `Network`."
        )


class _Inner(NamedTuple):
    """What a linear map makes of the stream."""

    map: Affine
    z: Tensor
    time: int


def _affine(call: _Taken) -> Affine:
    if not is_plain(call.module):
        raise InputError(
            f"`{call.name}` should be a linear map with a weight of its own. Found "
            f"`{type(call.module).__name__}`, which is not read; merge it into the model first."
        )
    return affine(call.module)


def _bias(one: Affine) -> Tensor:
    return one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.clone()


def _feed(name: ActivationName, inner: Affine, outer: Affine, gate: Affine | None) -> Feed:
    return Feed(
        inner.weight.clone(),
        _bias(inner),
        outer.weight.clone(),
        _bias(outer),
        name,
        None if gate is None else gate.weight.clone(),
        None if gate is None or gate.bias is None else gate.bias.clone(),
    )


def _is_leaf(module: nn.Module) -> bool:
    return not list(module.children()) and not isinstance(module, nn.Dropout | nn.Identity)


def _read_norm(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module is: gain and shift from random tokens, confirmed at three sizes."""
    eps = next((e for e in (getattr(module, n, None) for n in _EPS) if isinstance(e, float)), 0.0)
    generator, ask = start_named("norm"), ExactNorm(module)
    probe = torch.randn(8, width, generator=generator, dtype=torch.float64)
    one, zero = probe.new_ones(width), probe.new_zeros(width)
    try:
        with torch.no_grad():
            answers = {size: ask(size * probe[None])[0] for size in (1.0, 1e-3, 1e3)}
            for centred, scaled in ((True, True), (False, True), (True, False)):
                unit, y = Norm(one, zero, eps, centred, scaled)(probe), answers[1.0]
                spread = unit - unit.mean(0)
                gain = (spread * y).sum(0) / spread.square().sum(0)
                shift = y.mean(0) - gain * unit.mean(0)
                gain = _stored(module, "weight", gain)
                norm = Norm(gain, _stored(module, "bias", shift), eps, centred, scaled)
                if all(_same(norm(size * probe), y) for size, y in answers.items()):
                    return norm
    except (RuntimeError, ValueError, TypeError, IndexError):  # no norm of tokens
        pass
    return None


def _stored(module: nn.Module, name: str, found: Tensor) -> Tensor:
    """What was found, without its rounding: zero, one, or the module's own weight."""
    own = getattr(module, name, None)
    kept = [own.detach()] if isinstance(own, Tensor) and own.shape == found.shape else []
    near = (t for t in (*kept, torch.zeros_like(found), torch.ones_like(found)))
    return next((t.clone() for t in near if (t - found).abs().max() <= 1e-9), found)


def _share(pool: Pooled, real: Tensor) -> Float[Tensor, " n"]:
    """Of each token in a pool of the real ones."""
    n, index = len(real), cast(Any, pool)
    if pool == "mean":
        return real.double() / real.sum()
    if pool in ("first", "last"):
        index = int(real.nonzero()[0 if pool == "first" else -1, 0])
    if isinstance(index, bool) or not isinstance(index, int) or not -n <= index < n:
        raise InputError(
            f"`pool` should be mean, first, last or the index of one of {n} tokens. Found `{pool}`."
        )
    if not bool(real[index]):
        raise InputError(f"`pool` should be a token that is read. Found padding at {index}.")
    return (torch.arange(n) == index % n).double()


def _real_tokens(inputs: Inputs, n: int) -> Tensor:
    """Which tokens are no padding, by the model's attention mask."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.numel() == n and bool(mask.any()):
        return mask.reshape(-1) != 0
    return torch.ones(n, dtype=torch.bool)


def _class_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Names of the classes in a configuration, unless they only number them."""
    named: Any = getattr(getattr(model, "config", None), "id2label", None) or {}
    found = tuple(str(named.get(index, "")) for index in range(count))
    return found if all(found) and not all(n.startswith("LABEL_") for n in found) else ()
