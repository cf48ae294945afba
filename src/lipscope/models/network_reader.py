"""From a module to its `Network`: which parts follow which, found by values and proved.

A module runs once from the stream that enters its first block. What its norms, linear maps and
attention layers take and return there tells in what order they make its scores; sums are found
among the tensors that it forms. What is found is then held against the module itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.forward_pass import (
    function_of,
    function_of_map,
    refuse_global_hooks,
    same,
)
from lipscope.models.network import Branch, Chain, Network, Norm, scaled, with_plain_sums
from lipscope.models.network_search import (
    Found,
    MapSearch,
    PartsSearch,
    Pooled,
    Scores,
    Search,
    layer_of,
    pool_weights,
    read_norm,
)
from lipscope.models.tracing.calls import Trace
from lipscope.models.tracing.map_endpoints import LayerMap
from lipscope.models.tracing.maps import build_map
from lipscope.models.tracing.prepare import implementation_for, make_weights, prepared, swapped
from lipscope.models.tracing.recorder import (
    Inputs,
    depends,
    each_tensor,
    first_tensor,
    to_device,
)
from lipscope.models.tracing.side_channels import kept_between_passes
from lipscope.models.tracing.sites import (
    AttentionCall,
    attention_sites,
    is_attention,
)
from lipscope.models.tracing.trace import checked_call, trace
from lipscope.records import MapName

_CPU = torch.device("cpu")
_MIXED = 8  # combinations of a map's outputs that are compared
_AGREES = 1e-6  # relative
_ROUNDING = 2.0**-51  # relative, of a stream that is the same
_SLOPES_AGREE = 1e-5  # relative: gradients by weights in float32 are in that
_MOVES = (1e-2, 1e-1, 1.0)  # of the stream, relative to its root mean square
_FAR = (1e1, 1e2, 1e4)  # moves of tokens, relative to the largest and as they are
_SMALL = (1e-2, 1e-4, 1e-8, 0.0)  # times the stream
_MANY = 4  # classes whose gradients are compared


def read_network(
    model: nn.Module,
    inputs: Inputs,
    *,
    at_layer: int = 0,
    read_out: Float[Tensor, "c d"] | None = None,
    bias: Float[Tensor, " c"] | None = None,
    names: tuple[str, ...] = (),
    pool: Pooled | None = None,
    modules: str | None = None,
) -> tuple[Network, Float[Tensor, "n d"]]:
    """The network that a module is at an input, and the stream that enters it, in float64.

    The stream is what enters the first block: embeddings with their positions and norm; vectors
    that a sequence takes itself, where more than a linear map makes a stream of them. Token ids
    are constants, and masks those of this input. What a method `as_network` of the module gives
    comes first, else what the values of a run show; all is held against a float64 copy of the
    module (`check_network`).

    Holds for blocks of dot-product attention and token-wise networks in turn, each with or without
    a residual sum and a norm before it or after the sum; for pools that are fixed means of tokens;
    for linear heads, layers of activations before them; of log-probabilities, for the scores
    centred, which differ as they do. Dropout is off, so it is the identity.

    Args:
        model: A module that ends in scores, ``(1, c)`` or for every token ``(1, n, c)``, or in a
            hidden state if ``read_out`` is given.
        inputs: Its arguments, of one sample: by name, or a tuple.
        at_layer: The attention layer before which the stream is taken.
        read_out: Rows that score the pooled hidden state of a model without a head.
        bias: Their bias.
        names: What to call the classes; those of the model's configuration if empty.
        pool: Which tokens are read where the model does not pool them itself: their mean without
            padding, the first or last real token, or a token by its index. Default: the last of a
            causal model, the mean with ``read_out``.
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
    own_head = None if read_out is None else _head(read_out, bias)
    with _traced(model, inputs, modules) as record:
        found = Search(function_of(record), own_head, pool).found()
        count = len(found.network.bias)
        if names and len(names) != count:
            raise InputError(f"`names` should name {count} classes. Found {len(names)}.")
        network = replace(found.network, names=names or _class_names(record.model, count))
        check_network(with_plain_sums(network), found.scores, found.x)
    if not 0 <= at_layer < len(found.starts):
        raise InputError(
            f"`at_layer` should be between 0 and {len(found.starts) - 1} for this model. Found "
            f"{at_layer}."
        )
    x, start = found.x, found.starts[at_layer] if at_layer else 0
    with torch.no_grad():
        x = Chain(network.branches[:start])(x)
    return with_plain_sums(replace(network, branches=network.branches[start:])), x


def read_map(
    model: nn.Module,
    inputs: Inputs,
    *,
    layer: int = 0,
    map: MapName = "block",
    modules: str | None = None,
) -> tuple[Chain, Float[Tensor, "n d"]]:
    """The branches that a map is at an input, and the stream that enters them, in float64.

    Holds as `read_network` does, for the maps ``attention``, ``residual``, ``block``, ``stack`` and
    ``model``, of which ``layer`` is of no account; held against the map itself in random
    combinations of its outputs. Arguments and errors are those of `read_network`.

    >>> pair = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)
    >>> found, x = read_map(nn.Sequential(*pair), (torch.randn(1, 5, 8),), map="residual")
    >>> len(found.branches), tuple(x.shape)
    (2, (5, 8))
    """
    with _traced(model, inputs, modules) as record:
        if map in ("attention", "residual"):
            built = build_map(record, layer, map)
            branches, x, function = _around(built, record.calls[layer]), built.x.clone(), built
        else:
            function = function_of_map(record, layer, map)
            branches, x = MapSearch(function).found().network.branches, function.x
        chain = Chain(branches)
        _check_outputs(chain, function, x, "map")
    return chain, x


def read_parts(model: nn.Module, inputs: Inputs) -> tuple[Network | Chain, Float[Tensor, "n d"]]:
    """The parts that a module is at an input, for bounds: with the weights that it has.

    As `read_network`, but attention may be of any kind that is read in closed form, residual sums
    may have weights, the module may give something of every token (then it is a `Chain`), and
    gradients with respect to what is found lead to the module's own weights. Arguments and errors
    are those of `read_network`; going back through what is found is an error where a weight would
    get another gradient than from the module: one whose function is a factor, say.

    >>> pair = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)
    >>> parts, x = read_parts(nn.Sequential(*pair), (torch.randn(1, 5, 8),))
    >>> len(parts.branches), tuple(parts(x).shape)
    (5, (5, 3))
    """
    if not any(isinstance(m, Attention) or is_attention(m) for m in model.modules()):
        raise InputError(
            "The network should hold attention that is read in closed form. Found none in "
            f"`{type(model).__name__}`; without attention the norms of its layers multiply."
        )
    weights = model.named_parameters(remove_duplicate=False)
    trained = {name: p for name, p in weights if p.requires_grad and not p.is_inference()}
    with _traced(model, inputs, None) as record:
        search = PartsSearch(function_of(record, any_ids=True))
        linked = _linked(record.model, trained)
        with swapped(linked):
            make_weights(record.model)
            found = search.found()
            network: Network | Chain = found.network
            if not len(network.bias):
                network = Chain(network.branches)
            unsure = _unsure(network, found, trained)
        _check_outputs(network, found.scores, found.x, "parts")
    if unsure:
        _refuse_gradients(unsure, (weight for *_, weight in linked))
    return network, found.x


def _refuse_gradients(unsure: Sequence[str], weights: Iterable[Tensor]) -> None:
    def refused(_: Tensor) -> None:
        raise InputError(
            "A bound that is differentiated should have the gradients of the module. Found others "
            f"for `{unsure[0]}`, and maybe more: the way from it to the parts was not seen; freeze "
            "it, or give the module a method `as_network`."
        )

    for weight in weights:
        weight.register_hook(refused)


def _unsure(found: Scores, own: Found, weights: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Weights by which what was found has other derivatives than the module, at a random stream."""
    if not weights or not torch.is_grad_enabled():
        return ()
    generator, x = start_named("weights"), own.x
    at = x + x.std() * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    mine, theirs = found(at), own.scores(at)
    mixed = torch.randn(theirs.shape, generator=generator, dtype=x.dtype)
    try:
        slopes = [
            torch.autograd.grad(
                (mixed * y).sum(), [*weights.values()], retain_graph=True, materialize_grads=True
            )
            for y in (mine, theirs)
        ]
    except RuntimeError:  # of a module that was compiled the graph is for one use
        return tuple(weights)
    floor = _AGREES * max(float(slope.norm()) for slope in slopes[1])
    return tuple(
        name
        for name, a, b in zip(weights, *slopes, strict=True)
        if not float((a - b).norm()) <= _SLOPES_AGREE * (float(b.norm()) + floor)
    )


def _linked(
    own: nn.Module, trained: Mapping[str, nn.Parameter]
) -> list[tuple[dict[str, Any], str, Any]]:
    """The weights of a copy, as functions of those that are trained, with where they lie."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for path, p in own.named_parameters(remove_duplicate=False):
        if path in trained:
            holder, _, name = path.rpartition(".")
            trained[path].requires_grad_()  # which it is not while the copy is the model itself
            weights: Any = own.get_submodule(holder)._parameters
            found.append((weights, name, trained[path].to(p) * 1.0))
    return found


def _around(built: LayerMap, call: AttentionCall) -> tuple[Branch, ...]:
    """An attention layer with the sum and the norms of its map, where there are any."""
    layer, norms = layer_of(call), built.norms
    if norms is None:
        return (Branch(layer, skip=False),)
    if norms.second is not None:
        raise InputError(
            "The map `residual` should add what attention gives as it is. Found a norm of it "
            f"before the sum, `{type(norms.second).__name__}`; certify the map `attention`."
        )
    part = layer if norms.scale is None else scaled(layer, norms.scale.detach().double())
    found = (Branch(part, None if norms.before is None else _norm(norms.before, built)),)
    if norms.outer is not None:
        found = (*found, Branch(None, _norm(norms.outer, built), skip=False))
    return found


def _norm(module: nn.Module, built: LayerMap) -> Norm:
    found = read_norm(module, built.x.shape[1])
    if found is None:
        raise InputError(
            f"The map `{built.map}` should have LayerNorm, RMSNorm or a norm without variance. "
            f"Found `{type(module).__name__}`; certify the map `attention`."
        )
    return found


@contextmanager
def _traced(model: nn.Module, inputs: Inputs, modules: str | None) -> Iterator[Trace]:
    """A pass of a copy in float64."""
    refuse_global_hooks()
    with prepared(
        model,
        dtype=torch.float64,
        device=_CPU,
        implementation=implementation_for(model, closed=True),
    ) as (own, _):
        given = each_tensor(to_device(inputs, _CPU, torch.float64), Tensor.detach)
        sites = _sites(own, modules)
        with kept_between_passes(own) as changed:
            record = trace(own, given, sites, norms=True, blocks=True, dtype=torch.float64)
        if changed:
            raise InputError(
                f"`{type(model).__name__}` should keep nothing of a pass for the next one. Found "
                f"that its forward pass changes `{min(changed)}`; if the first pass alone does, "
                "which fills a cache of masks, run the module once before."
            )
        if record.draws:
            raise InputError(
                f"`{type(model).__name__}` should give the same output every time. Found that its "
                "forward pass draws random numbers."
            )
        if record.output is not None and not bool(record.output.isfinite().all()):
            raise InputError(
                f"`{type(model).__name__}` should give finite numbers. Found NaN or Inf in its "
                "output; where every token is padding, or masked for a query, none is left to read."
            )
        with torch.no_grad():
            plain = first_tensor(checked_call(own, given))
        if record.output is not None and not same(plain, record.output, _AGREES):
            raise InputError(
                f"`{type(model).__name__}` should give the same output with and without gradients. "
                "Found another one without, as in inference, where `nn.TransformerEncoder` sets "
                "padding to zero and passes over hooks and subclasses; turn its fast path off, "
                "`torch.backends.mha.set_fastpath_enabled(False)`."
            )
        yield record


def layer_network(
    layer: DotProduct,
    num_tokens: int,
    read_out: Float[Tensor, "c d_out"],
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
    head, bias = _head(read_out, bias)
    share = pool_weights(pool, torch.ones(num_tokens, dtype=torch.bool))
    return Network((Branch(layer.in_double(), skip=False),), share, head, bias, names=names)


def _head(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A head that was given, in float64."""
    weight = weight.detach().to(_CPU, torch.float64)
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().to(weight)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InputError(
            "`read_out` should be a matrix (classes, width), and `bias` a number for every class. "
            f"Found {tuple(weight.shape)} and {tuple(bias.shape)}."
        )
    return weight, bias


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


def _class_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Names of the classes in a configuration, unless they only number them."""
    named: Any = getattr(getattr(model, "config", None), "id2label", None) or {}
    found = tuple(str(named.get(index, "")) for index in range(count))
    return found if all(found) and not all(n.startswith("LABEL_") for n in found) else ()


# --- whether a network is the module that it was read from


def check_network(network: Scores, scores: Scores, x: Float[Tensor, "n d"]) -> None:
    """Refuse a network that is not the function ``scores`` of the stream.

    Compared to 1e-6, at ``x`` and after random moves of three sizes: scores, gradients (of the
    largest scores at ``x``, then of a random combination of them), and products with the Hessian
    there, by differences along a random direction. Far away, at tokens of up to 1e4 and 1e4 times
    the largest one, and with small tokens or zero, scores alone: rounding spoils derivatives there.
    Last with other activations in both, which are zero for no stream: what silent units lead to.

    Args:
        network: The description, a `Network` or another function.
        scores: The module itself from the same stream, ``(n, d) -> (c,)``.
        x: The stream.

    Raises:
        InputError: If they differ: in what, where, and by how much.
    """
    generator = start_named("network and module")
    size = rms = float(x.square().mean().sqrt()) or 1.0

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
            near = at + 1e-4 * size * drawn(*x.shape)
            _, mine = _gradients(network, near, top, weights)
            _, own = _gradients(scores, near, top, weights)
            change = own - expected
            # Beside the rounding of the gradients themselves, which parts that cancel make large.
            _, other = _gradients(scores, (1 + _ROUNDING) * at, top, weights)
            floor = 1e-4 * length + 10 / _AGREES * float((other - expected).norm())
            _compare("curvature", where, mine - slopes, change, float(change.norm()) + floor)

    # What is silent, or as good as linear, near the input need not be so far from it, or where
    # tokens are small. Rounding of the scores aside it is the change that should agree.
    with torch.no_grad():
        mine, own = network(x), scores(x)
        for where, at in _elsewhere(x, drawn):
            here, there = network(at), scores(at)
            if bool(here.isfinite().all()) or bool(there.isfinite().all()):
                size = float((there - own).norm()) + _AGREES * float(there.norm())
                _compare("scores", where, here - mine, there - own, size)
    for move in _MOVES:
        at = (x + move * rms * drawn(*x.shape)).requires_grad_()
        with torch.enable_grad(), _OtherActivations(at):
            mine, own = (f(at).detach() for f in (network, scores))
        _compare("scores", "with other activations", mine, own, float(own.norm()))


def _bend(z: Tensor) -> Tensor:
    return z / (1 + z.square()).sqrt()


# Of no unit zero or constant at any stream; GELU and SiLU are made of erf, tanh and sigmoid.
_OTHERS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda z: 0.6 * z + 0.1,
    "erf": lambda z: 0.3 + 0.2 * _bend(z),
    "tanh": lambda z: 0.1 + 0.8 * _bend(z),
    "sigmoid": lambda z: 0.5 + 0.3 * _bend(z),
    "silu": lambda z: z * (0.5 + 0.3 * _bend(z)),
}


def _other_gelu(z: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        return 0.5 * z * (1 + _OTHERS["tanh"](inner))
    return 0.5 * z * (1 + _OTHERS["erf"](z / math.sqrt(2)))


class _OtherActivations(TorchDispatchMode):
    """Those of functions of a stream; gates that are made of weights are as they are."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.end: Any = x.view_as(x).grad_fn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        other = (_OTHERS | {"gelu": _other_gelu}).get(name.rstrip("_"))
        if other is None or not depends(args[0].grad_fn, self.end.next_functions[0][0]):
            return func(*args, **(kwargs or {}))
        y = other(*args, **(kwargs or {}))
        return args[0].copy_(y) if name.endswith("_") else y


def _elsewhere(
    x: Float[Tensor, "n d"], drawn: Callable[..., Tensor]
) -> Iterator[tuple[str, Float[Tensor, "n d"]]]:
    """Streams far from one, and such with small tokens, or zero; where they are, in words."""
    largest = float(torch.linalg.vector_norm(x, dim=-1).max()) or 1.0
    for far in sorted({*_FAR, *(times * largest for times in _FAR)}):
        e = drawn(*x.shape)
        e = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True)
        yield f"after a random move of each token by {far:.3g}", x + far * e
    second = (torch.arange(len(x)) % 2 == 0)[:, None]
    for small in _SMALL:
        yield f"at {small:g} times the stream", small * x
        yield f"at {small:g} times every second token", torch.where(second, small * x, x)


def _check_outputs(found: Scores, function: Scores, x: Tensor, name: str) -> None:
    """`check_network` of outputs of any shape, in random combinations drawn by name."""
    with torch.no_grad():
        count = function(x).numel()
    mixed = torch.randn(_MIXED, count, generator=start_named(name), dtype=torch.float64)
    check_network(lambda x: mixed @ found(x).flatten(), lambda x: mixed @ function(x).flatten(), x)


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
        try:
            parts = [torch.autograd.grad(row, x, retain_graph=True)[0] for row in rows]
        except RuntimeError as problem:  # of a module that writes over what its derivative needs
            raise InputError(
                "The module should have derivatives, to be compared with what is found. Found that "
                f"autograd raised: {' '.join(str(problem).split())[:150]}"
            ) from problem
    return scores.detach(), torch.stack(parts)
