"""Which parts of a module follow which: a search through the values of one run."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.families.affine import Affine, affine
from lipscope.models.forward_pass import (
    ForwardPass,
    ModuleCall,
    StreamFunction,
    own_parts,
    same,
)
from lipscope.models.network import (
    ACTIVATIONS,
    ActivationName,
    Branch,
    Feed,
    Network,
    Norm,
    scaled,
)
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.models.tracing.recorder import Inputs, tensors_in
from lipscope.models.tracing.sites import (
    AttentionCall,
    closed_form,
    is_linear,
    is_norm,
    is_plain,
    why_run,
)

Pooled = Literal["mean", "first", "last"] | int
Scores = Callable[[Tensor], Tensor]
_Kind = TypeVar("_Kind", bound=Attention)

_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_SMALL, _LARGE = 1e-3, 1e3  # sizes of tokens that feel ε, and that do not
_NO_EPS = 1e-19  # beside the square of a small token, what float64 rounds away


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
        if self.share is not None:
            return replace(self, v=v, time=time, tail=(*self.tail, branch))
        here = (len(self.branches),) if isinstance(branch.part, Attention) else ()
        starts = self.starts + here
        return replace(self, v=v, time=time, branches=(*self.branches, branch), starts=starts)


class _Part(NamedTuple):
    """A part, what it gives, and when its last module was called."""

    part: Attention | Feed
    out: Tensor
    time: int


class _Inner(NamedTuple):
    """What a linear map makes of the stream."""

    map: Affine
    z: Tensor
    time: int


class Found(NamedTuple):
    """A network, the branches of its attention layers, its stream, and the module as scores."""

    network: Network
    starts: tuple[int, ...]
    x: Tensor
    scores: Scores


class Search:
    """A search for the parts of a module from one entry on; its state says how far it came."""

    meant = (
        "A network should be attention and token-wise networks in turn, each added to the stream "
        "with a norm before or after, then a fixed pool and a linear head.",
        "certify one layer, or describe the model as a `Network`",
    )
    linked = False  # whether weights are the module's own, not copies
    of_scores = True  # whether only their differences count

    def __init__(
        self,
        function: StreamFunction,
        head: tuple[Tensor, Tensor] | None = None,
        pool: Pooled | None = None,
    ) -> None:
        self.function, self.record = function, function.record
        self.head, self.pool = head, pool
        self.view = view = ForwardPass(function)
        # Of log-probabilities: the scores are known up to what is added to all of them.
        self.centred = self.of_scores and head is None and view.unknown == ["LogSoftmax"]
        if head is not None and head[0].shape[1] != view.output.shape[1]:
            raise InputError(
                f"`read_out` should have shape (classes, {view.output.shape[1]}). "
                f"Found {tuple(head[0].shape)}."
            )
        self.norms = [c for c in view.calls if is_norm(c.module) and c.module not in view.sites]
        self.linears = [c for c in view.calls if is_linear(c.module)]
        times = {n: iter([c.time for c in view.calls if c.name == n]) for n in view.paths}
        self.times = [next(times[call.name]) for call in function.calls]
        self.own: tuple[Branch, ...] = ()
        self.layers: dict[int, Attention] = {}
        self.uses: dict[int, tuple[int, str]] = {}  # what parameters that are factors weigh
        self.read_norms: dict[nn.Module, Norm | None] = {}
        self.furthest, self.hidden = _State(self.function.x), False
        self.real = _unpadded(self.record.inputs, len(function.x))

    def found(self) -> Found:
        """The network.

        Raises:
            InputError: If there is none.
        """
        unknown = ", ".join(self.view.unknown)
        instead = "certify one layer" if self.of_scores else self.meant[1]
        if unknown and not self.centred:
            are_shares = bool((self.view.output.sum(-1) - 1).abs().max() < 1e-3)
            if self.of_scores and unknown == "Softmax" and are_shares:
                instead = "return the scores before it, which decide alike"
            raise InputError(
                "A network should be made of attention, norms (modules named so), linear maps and "
                f"relu, gelu, silu or tanh. Found `{unknown}` (as autograd calls it) between the "
                f"stream and the output; {instead}."
            )
        if self.view.read is not None:
            how, source = self.view.read.function, self.view.read.source
            raise InputError(
                "A network should depend on its stream by functions that have derivatives, and on "
                f"its input by the stream alone. Found that `{how}` reads {source}: the network "
                f"may be another one at other times; {instead}."
            )
        own = self._as_network()
        self.own = own if self.linked else copy.deepcopy(own)
        found = self._follow(_State(self.function.x))
        if found is None and self.hidden:
            raise InputError(
                "A decision needs scores. Found a model that ends in its hidden state; pass it "
                "with its head, or say what it decides (`between`, `read_out`)."
            )
        if found is None:
            raise self._stuck()
        return found

    def _as_network(self) -> tuple[Branch, ...]:
        """What the module's own `as_network` has, from the first layer here on."""
        own = own_parts(self.record.model)
        branches = () if own is None else own.branches
        layers = [i for i, one in enumerate(branches) if isinstance(one.part, Attention)]
        before = next(i for i, c in enumerate(self.record.calls) if c is self.function.calls[0])
        return branches[layers[before] :] if before < len(layers) else ()

    def _follow(self, state: _State) -> Found | None:
        """Depth first; the sums and parts that the module forms leave little choice."""
        if (len(state.starts), state.time) > (len(self.furthest.starts), self.furthest.time):
            self.furthest = state
        complete = len(state.starts) == len(self.times)
        parts = (one.part for one in (*state.branches, *state.tail))
        feeds = [one for one in parts if isinstance(one, Feed)]
        used = Counter(one.activation.removeprefix("gelu_") for one in feeds)
        del used["identity"]
        gates = sum(one.gate is not None for one in feeds)
        cubes = sum(one.activation == "gelu_tanh" for one in feeds)
        whole = complete and used == self.view.activations
        whole = whole and self.view.holds_products(gates, cubes)
        found = self._ended(state) if whole else None
        following = () if found is not None else self._next(state, complete)
        return found or next(filter(None, map(self._follow, following)), None)

    def _next(self, state: _State, complete: bool) -> Iterator[_State]:
        v, pooled = state.v, state.share is not None
        if not pooled:
            yield from self._said(state)
        normed = list(self._norms(v, state.time))
        for norm, y, time in ((None, v, state.time), *normed):
            for part, p, then in self._parts(y, time, len(state.starts)) if not pooled else ():
                if p.shape == v.shape and self.view.holds(v + p):
                    yield state.then(Branch(part, norm), v + p, then)
                for kept, factor, z in self._weighted_sums(v, p) if p.shape == v.shape else ():
                    at = len(state.branches)
                    skip = kept if isinstance(kept, bool) else self._own(kept, (at, "skip"))
                    own = scaled(part, self._own(factor, (at, "part")))
                    yield state.then(Branch(own, norm, skip), z, then)
                if self.view.holds(p):
                    _check_seen(p, (v, y))
                    yield state.then(Branch(part, norm, skip=False), p, then)
        for norm, y, time in normed:
            yield state.then(Branch(None, norm, skip=False), y, time)
        if complete or not state.starts:
            for feed, p, time in self._alone(v, state.time, complete):
                yield state.then(Branch(feed, skip=False), p, time)
        if complete and not pooled:
            for share in self._shares():
                if self.view.holds((share @ v)[None]):
                    self._check_apart(v)
                    yield replace(state, v=(share @ v)[None], share=share)

    def _said(self, state: _State) -> Iterator[_State]:
        """By the module's own word: the weights of a sum do not show where its part is silent."""
        for branch in self.own[len(state.branches) :][:1]:
            done, time = len(state.starts), state.time
            if isinstance(branch.part, Attention):
                if done == len(self.times):
                    return
                self._layer(done)  # refused where it would be without that word
                time = self.times[done]
            try:
                y = branch(state.v)
            except RuntimeError:  # it takes tokens of another width
                return
            if self.view.holds(y):
                yield state.then(branch, y, time)

    # --- norms

    def _norms(self, v: Tensor, time: int) -> Iterator[tuple[Norm, Tensor, int]]:
        for call in self.norms:
            if call.time > time and same(v, call.x):
                if call.module not in self.read_norms:
                    self.read_norms[call.module] = read_norm(call.module, v.shape[-1])
                norm, scaling = self.read_norms[call.module], call.module in self.view.scaling
                if norm is not None and norm.scaled == scaling and same(norm(v), call.y):
                    yield norm, call.y, call.time

    # --- attention and token-wise networks

    def _parts(self, y: Tensor, time: int, done: int) -> Iterator[_Part]:
        if done < len(self.times) and self.times[done] > time:
            call = self.function.calls[done]
            if same(y, call.x):
                yield _Part(self._layer(done), call.end.output, self.times[done])
        inner = list(self._inner(y, time))
        for one in inner:
            for name, a in self._activated(one.z):
                for last in self._taking(a, one.time):
                    yield self._feed(name, one, None, last)
                for two in inner:
                    if two is not one and two.z.shape == a.shape:
                        for last in self._taking(a * two.z, max(one.time, two.time)):
                            yield self._feed(name, one, two, last)

    def _layer(self, index: int) -> Attention:
        if index not in self.layers:
            call = self.function.calls[index]
            own = _agreeing(call, _as_layer(call), Attention) if self.linked else layer_of(call)
            self.layers[index] = own
        return self.layers[index]

    def _taking(self, x: Tensor, time: int) -> list[ModuleCall]:
        """Calls of linear maps that take a matrix."""
        return [c for c in self.linears if c.time > time and same(x, c.x)]

    def _inner(self, y: Tensor, time: int) -> Iterator[_Inner]:
        """What linear maps make of a matrix; one that is cut in two gives both halves too."""
        for call in self._taking(y, time):
            whole = _affine_of(call)
            yield _Inner(whole, call.y, call.time)
            if len(whole.weight) % 2 == 0:
                sizes = [len(whole.weight) // 2] * 2
                for part, z in zip(whole.rows(sizes), call.y.split(sizes, dim=1), strict=True):
                    yield _Inner(part, z, call.time)

    def _activated(self, z: Tensor) -> Iterator[tuple[ActivationName, Tensor]]:
        for name, function in ACTIVATIONS.items():
            if name != "identity" and self.view.applies(name, z):
                yield name, function(z)

    def _feed(
        self, name: ActivationName, one: _Inner, two: _Inner | None, last: ModuleCall
    ) -> _Part:
        feed = _feed_of(name, one.map, _affine_of(last), None if two is None else two.map)
        return _Part(feed, last.y, last.time)

    def _alone(self, v: Tensor, time: int, complete: bool) -> Iterator[tuple[Feed, Tensor, int]]:
        """A linear map before all layers; one and an activation there, or as in a tanh pooler."""
        for one in self._inner(v, time):
            plain: tuple[ActivationName, Tensor] = ("identity", one.z)
            for name, a in (*([] if complete else [plain]), *self._activated(one.z)):
                if self.view.holds(a):
                    eye = torch.eye(a.shape[1], dtype=a.dtype)
                    yield _feed_of(name, one.map, Affine(eye, None), None), a, one.time

    def _own(self, factor: Tensor, use: tuple[int, str]) -> Tensor:
        """What a factor that was seen is of the module's own; itself where it is copied."""
        del use
        return factor

    def _weighted_sums(
        self, v: Tensor, p: Tensor
    ) -> Iterator[tuple[bool | Tensor, Tensor, Tensor]]:
        """Sums with weights that are seen: ``v + f p``, f by channel, or ``s v + t p``."""
        total = p.square().sum(0)
        for z in self.view.like(v) if len(v) > 1 and bool((total > 0).all()) else ():
            if same(v, z) or same(v + p, z):
                continue
            factor = ((z - v) * p).sum(0) / total
            if bool((factor != 0).all()) and same(v + factor * p, z):
                yield True, factor, z
                continue
            pair = torch.stack([v.flatten(), p.flatten()], 1)
            s, t = torch.linalg.lstsq(pair, z.flatten()[:, None]).solution[:, 0]
            both = not same(s * v, z) and not same(t * p, z)
            if both and same(s * v + t * p, z):
                yield s, t.expand(v.shape[1]), z

    # --- pool and head

    def _check_apart(self, v: Tensor) -> None:
        if len(v) > 1 and same(v[:1].expand_as(v), v):
            raise InputError(
                "The tokens of the input should differ, to show which of them the model pools. "
                "Found that all come out alike; give another input."
            )

    def _shares(self) -> Iterator[Tensor]:
        """Pools that are tried: a token; mean or sum of all, the real ones, without the first."""
        n = len(self.function.x)
        eye = torch.eye(n, dtype=torch.float64)
        yield from eye[[0, *range(n - 1, 0, -1)]]
        every = torch.ones(n, dtype=torch.bool)
        beside = [x.reshape(-1) for x in tensors_in(self.record.inputs) if x.numel() == n]
        # Padding is at an end, and ids and masks differ there from those of real tokens.
        real = (x != end for x in beside for end in (x[-1], x[0]))
        for one in (every, *real):
            for chosen in (one.double(), (one & (torch.arange(n) > 0)).double()):
                if bool(chosen.any()):
                    yield from (chosen / chosen.sum(), chosen)

    def _ended(self, state: _State) -> Found | None:
        """The network if the output follows from here, by linear maps alone."""
        final, pooled = self._scores(self.view.output), state.share
        if self.head is None and same(state.v, final):
            self.hidden = True  # unless another way leads to scores: of one token several do
            return None
        for weight, bias, o in self._scaled_chains(state.v, state.time):
            if len(o) == 1 and same(o, final):
                alone = torch.ones(1, dtype=torch.float64)
                return self._network(state, alone if pooled is None else pooled, weight, bias)
            if same(o, final):
                return self._network(state, self._asked_share(), weight, bias, of_tokens=True)
            for share in self._shares() if pooled is None and len(final) == 1 < len(o) else ():
                if same((share @ o)[None], final):
                    self._check_apart(o)
                    return self._network(state, share, weight, bias)
        return None

    def _linear_chains(self, v: Tensor, time: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Weight, bias and output of linear maps, and of those that take what one gives.

        With a head that was given: its own, and what the module hands to it.
        """
        if self.head is not None:
            yield *self.head, v
            return
        for call in self._taking(v, time):
            one = _affine_of(call)
            yield one.weight.clone(), _bias_of(one), call.y
            for weight, shift, o in self._linear_chains(call.y, call.time):
                yield weight @ one.weight, weight @ _bias_of(one) + shift, o

    def _scaled_chains(self, v: Tensor, time: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The same, and times the number by which the module may multiply the scores."""
        final = self._scores(self.view.output)
        for weight, bias, made in self._linear_chains(v, time):
            yield weight, bias, (o := self._scores(made))
            if self.head is None and o.shape == final.shape and bool(o.any()):
                factor = (final * o).sum() / o.square().sum()
                own = self._own(factor, (0, "scores"))
                yield own * weight, own * bias, factor * o

    def _scores(self, z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True) if self.centred else z

    def _asked_share(self) -> Tensor:
        """Which tokens are read where the module leaves that open."""
        pool = self.pool
        if pool is None and self.head is not None:
            pool = "mean"
        elif pool is None and all(map(_is_causal, self.layers.values(), self.record.calls)):
            pool = "last"
        if pool is None:
            raise InputError(
                "`pool` should say which token's scores decide: the model has scores for every "
                "token. Found none; give first, last, mean or an index."
            )
        return pool_weights(pool, self.real)

    def _network(
        self, state: _State, share: Tensor, weight: Tensor, bias: Tensor, *, of_tokens: bool = False
    ) -> Found:
        """What was found; ``of_tokens``: the module gives a row for every token."""
        if not of_tokens and self.pool is not None:
            raise InputError(
                "`pool` should be left out for a model that pools its tokens itself. Found "
                f"`pool = {self.pool}`."
            )
        if len(weight) < 2:
            raise InputError(
                "A decision needs two scores. Found one; if its sign decides, let an "
                "`nn.Linear(1, 2, bias=False)` of weight 0 and 1 follow."
            )

        def scores(x: Tensor) -> Tensor:
            out = self._scores(self.function(x))
            out = share @ out if of_tokens else out[0]
            return out if self.head is None else weight @ out + bias

        weight, bias = self._scores(weight.T).T, self._scores(bias)
        network = Network(state.branches, share, weight, bias, state.tail)
        return Found(network, state.starts, self.function.x, scores)

    def _whole(self, state: _State, branches: tuple[Branch, ...]) -> Found:
        """Without a pool; or a pooled row as it is."""
        v, share, rows = state.v, state.share, 0 if state.share is None else state.v.shape[1]
        share = v.new_zeros(len(self.function.x)) if share is None else share
        eye = torch.eye(rows, v.shape[1], dtype=v.dtype)
        network = Network(branches, share, eye, eye.new_zeros(rows), state.tail)
        function = self.function if rows == 0 else lambda x: self.function(x)[0]
        return Found(network, state.starts, self.function.x, function)

    def _stuck(self) -> InputError:
        """What takes the furthest stream that could be followed, and is not known."""
        at, v = self.furthest, self.furthest.v
        streams = [v, *(y for _, y, _ in self._norms(v, at.time))]
        takers = [
            c
            for c in self.view.calls
            if c.time > at.time and any(same(y, c.x) for y in streams) and _is_leaf(c.module)
        ]
        said = list(dict.fromkeys(f"`{c.name}` ({type(c.module).__name__})" for c in takers))
        found = ", ".join(said[:4]) if said else "a function that is no module of its own"
        count = len(at.starts)
        what, instead = self.meant
        return InputError(
            f"{what} Found otherwise after {count} attention layer{'' if count == 1 else 's'} and "
            f"{len(at.branches) + len(at.tail)} parts: the stream there goes to {found}; {instead}."
        )


class MapSearch(Search):
    """The same search where all tokens come out, and nothing is pooled or scored."""

    meant = (
        "A map should be attention and token-wise networks in turn, each added to the stream with "
        "a norm before or after.",
        "certify the map `attention`",
    )

    of_scores = False

    def _shares(self) -> Iterator[Tensor]:
        return iter(())

    def _ended(self, state: _State) -> Found | None:
        return self._whole(state, state.branches) if same(state.v, self.view.output) else None


class PartsSearch(Search):
    """The same search for a bound: attention of any kind, weighted sums, weights not copied.

    What the module gives of every token is a last branch; a pool is one of its own.
    """

    meant = (
        "A network should be attention and token-wise networks in turn, each added to the stream "
        "with a norm before or after, then maybe a fixed pool and a linear head.",
        "give the module a method `as_network`, or describe it as a `Network`",
    )

    linked, of_scores = True, False

    def _own(self, factor: Tensor, use: tuple[int, str]) -> Tensor:
        """The module's own parameter where it is one: of equal ones the next that is not used.

        One number may weigh all channels.
        """
        for one in self.record.model.parameters():
            fits = one.shape == factor.shape or one.numel() == 1
            if fits and self.uses.get(id(one), use) == use:
                each = one.reshape(()) if one.numel() == 1 else one
                if same(each.expand(factor.shape).reshape(1, -1), factor.reshape(1, -1)):
                    self.uses[id(one)] = use
                    return each.expand(factor.shape)
        return factor

    def _ended(self, state: _State) -> Found | None:
        final, v = self.view.output, state.v
        if same(v, final):
            return self._whole(state, state.branches)
        for weight, bias, o in self._scaled_chains(v, state.time):
            for share in self._shares() if state.share is None and len(final) == 1 < len(o) else ():
                if same((share @ o)[None], final):  # scores of tokens are pooled
                    self._check_apart(o)
                    return self._pooled(state, share, weight, bias)
            if not same(o, final):
                continue
            if state.share is not None:
                return self._pooled(state, state.share, weight, bias)
            eye = torch.eye(weight.shape[1], dtype=weight.dtype)  # a vocabulary squared is too much
            head = Feed(eye, torch.zeros_like(eye[0]), weight, bias, "identity")
            return self._whole(state, (*state.branches, Branch(head, skip=False)))
        return None

    def _pooled(self, state: _State, share: Tensor, weight: Tensor, bias: Tensor) -> Found:
        network = Network(state.branches, share, weight, bias, state.tail)
        return Found(network, state.starts, self.function.x, lambda x: self.function(x)[0])


def layer_of(call: AttentionCall) -> DotProduct:
    """An attention layer at its input in float64, which gives what the module gave."""
    layer = _as_layer(call)
    return _agreeing(call, None if layer is None else layer.in_double(), DotProduct)


def _as_layer(call: AttentionCall) -> Attention | None:
    return call.module.replace() if isinstance(call.module, Attention) else closed_form(call)


def _agreeing(call: AttentionCall, layer: Attention | None, kind: type[_Kind]) -> _Kind:
    """A layer that is of a kind, and gives what the module gave."""
    if not isinstance(layer, kind):
        what = "dot-product attention" if kind is DotProduct else "attention in closed form"
        why = why_run(call.module) if layer is None else f"it is `{type(layer).__name__}`"
        other = ", or describe it as a family (`lipscope.models.family`)" * (layer is None)
        raise InputError(
            f"A network should be of {what}. Found `{call.name}`: {why}; measure it instead{other}."
        )
    with torch.no_grad():
        agrees = same(layer(call.x), call.end.output)
    if not agrees:
        raise InputError(
            f"`{call.name}` should be what its family computes, for every token. Found another "
            "output; mend its description, or leave out padding, which may read no token."
        )
    return layer


def _check_seen(p: Tensor, beside: tuple[Tensor, ...]) -> None:
    """Refuse a part that hides, by rounding, whether the stream is added to it."""
    if any(p.shape == v.shape and bool(v.any()) and same(v + p, p) for v in beside):
        raise InputError(
            "What a part gives should leave its stream to be seen where both are added. Found "
            "that it is a billion times as large, so that rounding hides the sum; scale its "
            "weights down."
        )


def _is_causal(layer: Attention, call: AttentionCall) -> bool:
    """Whether no token reads a later one, by a causal mask or one that hides padding besides."""
    every = slice(0, call.num_tokens)
    seen = layer.visible(every, every)
    return seen is not None and not bool(seen.triu(1).any())


def _is_leaf(module: nn.Module) -> bool:
    return not list(module.children()) and not isinstance(module, nn.Dropout | nn.Identity)


def pool_weights(pool: str | int, real: Tensor) -> Float[Tensor, " n"]:
    """Of each token in a pool of the real ones."""
    n = len(real)
    if pool == "mean":
        return real.double() / real.sum()
    if pool in ("first", "last"):
        pool = int(real.nonzero()[0 if pool == "first" else -1, 0])
    if isinstance(pool, bool) or not isinstance(pool, int) or not -n <= pool < n:
        raise InputError(
            f"`pool` should be mean, first, last or the index of one of {n} tokens. Found `{pool}`."
        )
    if not bool(real[pool]):
        raise InputError(f"`pool` should be a token that is read. Found padding at {pool}.")
    return (torch.arange(n) == pool % n).double()


def _unpadded(inputs: Inputs, n: int) -> Tensor:
    """Which tokens are no padding, by the model's attention mask."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.numel() == n and bool(mask.any()):
        return mask.reshape(-1) != 0
    return torch.ones(n, dtype=torch.bool)


# --- the parts, out of modules


def _affine_of(call: ModuleCall) -> Affine:
    """The map of a module that is nothing else."""
    if not is_plain(call.module):
        raise InputError(
            f"`{call.name}` should be a linear map with a weight of its own. Found "
            f"`{type(call.module).__name__}`, which is not read; merge it into the model first."
        )
    return affine(call.module)


def _bias_of(one: Affine) -> Tensor:
    """Its bias, zero if it has none; a copy."""
    return one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.clone()


def _feed_of(name: ActivationName, inner: Affine, outer: Affine, gate: Affine | None) -> Feed:
    """The token-wise network of two linear maps, or three, copied."""
    return Feed(
        inner.weight.clone(),
        _bias_of(inner),
        outer.weight.clone(),
        _bias_of(outer),
        name,
        None if gate is None else gate.weight.clone(),
        None if gate is None or gate.bias is None else gate.bias.clone(),
    )


def read_norm(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module is: gain, shift and ε from random tokens, confirmed at three sizes.

    What a module calls its weights does not matter: some store ``γ - 1``.

    >>> kinds = (nn.LayerNorm(4), nn.RMSNorm(4), nn.Tanh())
    >>> [found and found.centred for found in (read_norm(kind.double(), 4) for kind in kinds)]
    [True, False, None]
    """
    generator, ask = start_named("norm"), ExactNorm(module)
    probe = torch.randn(8, width, generator=generator, dtype=torch.float64)
    one, zero = probe.new_ones(width), probe.new_zeros(width)
    try:
        answers = {size: ask(size * probe[None])[0] for size in (1.0, _SMALL, _LARGE)}
        odd = [
            ask(size * probe[None])[0] - ask(-size * probe[None])[0] for size in (_SMALL, _LARGE)
        ]
        for centred, scaled in ((True, True), (False, True), (True, False)):
            eps = _epsilon(module, Norm(one, zero, centred=centred).size(probe), *odd)
            unit, y = Norm(one, zero, eps, centred, scaled)(probe), answers[1.0]
            spread = unit - unit.mean(0)
            gain = (spread * y).sum(0) / spread.square().sum(0)
            shift = y.mean(0) - gain * unit.mean(0)
            gain = _stored(module, "weight", gain)
            norm = Norm(gain, _stored(module, "bias", shift), eps, centred, scaled)
            if all(same(norm(size * probe), y) for size, y in answers.items()):
                return norm
    except (RuntimeError, ValueError, TypeError, IndexError):  # no norm of tokens
        pass
    return None


def _epsilon(module: nn.Module, sizes: Tensor, small: Tensor, large: Tensor) -> float:
    """ε by its name, else from what a norm makes of small tokens and of large ones.

    A token of mean square ``m`` comes out ``q = s √(L² m + ε) / (L √(s² m + ε))`` times as large,
    ``s`` times as small as it is, as it does ``L`` times as large.
    """
    for name in _EPS:
        if hasattr(module, name):  # of torch's RMSNorm None is that of the dtype
            named = getattr(module, name)
            if isinstance(named, Tensor):
                return float(named.detach())
            return torch.finfo(torch.float64).eps if named is None else named
    square = sizes.square() / small.shape[1]
    ratio = small.detach().square().sum(1) / large.detach().square().sum(1)
    found = (_SMALL * _LARGE) ** 2 * square * (1 - ratio) / (ratio * _LARGE**2 - _SMALL**2)
    eps = float(found.median())
    return eps if _NO_EPS < eps < _LARGE else 0.0  # what does not normalise seems to have more


def _stored(module: nn.Module, name: str, found: Tensor) -> Tensor:
    """What was found, without its rounding: zero, one, or the module's own weight."""
    own = getattr(module, name, None)
    kept = [own] if isinstance(own, Tensor) and own.shape == found.shape else []
    moved = found - found.detach()  # zero, with the derivative of what was found
    near = (*kept, torch.zeros_like(found) + moved, torch.ones_like(found) + moved)
    return next((t.clone() for t in near if (t - found).abs().max() <= 1e-9), found)
