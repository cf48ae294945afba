"""The attention modules of a model, their calls, and the families known in closed form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import regex
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention import Attention
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.tracing.recorder import (
    as_tokens,
    close,
    distance,
    first_tensor,
    has_storage,
    same_place,
)
from lipscope.plugins import check_name, load_plugins

Side = Literal["self", "query", "key"]
SIDES: tuple[str, ...] = get_args(Side)


# What needs no model, only a function whose input is a tensor.
OF_FUNCTION = "ls.top_singular(ls.linearise(f, x))"
_SECONDS = 1.0  # that a search in one path may take
# Class names of attention, with what variants of one layout (channels last, a stride) add to them.
_NAMED = regex.compile(
    "(Attention|Attn|GPSA|MHSA|MLA|XCA)(Cl|2d|Rope|V2|(2d)?Downsample|PoolFirst|Global|ConvRelPosEnc)?$"
    "|FlashAttention2$"
)


@dataclass
class Applied:
    """A module with weights that was applied to a tensor."""

    module: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class LayerEnd:
    """Where a layer ends: at its output projection, in its module or beside it."""

    output: Tensor  # output with the output projection, ``(n, d_out)``
    held: Tensor  # the same as the model holds it
    projection: nn.Module | None = None  # the output projection, where a module of its own
    # Concatenated heads, the projection's input, ``(n, h d_v)``; None if unknown.
    heads: Tensor | None = None
    inside: bool = True  # whether the module applies the projection itself
    goes_on: bool = False  # whether the module does more after its projection (adds the residual)
    refusal: str = ""  # why the call is no attention map of its input; empty if it is one


@dataclass
class AttentionCall:
    """One call of an attention module, as the model made it on one input.

    In cross-attention, queries are made of some tokens and keys and values of others: one of
    the two is the layer's input here, the other its fixed context.
    """

    name: str  # dotted path of the module in the model
    module: nn.Module
    arguments: dict[str, Any]  # bound arguments of its forward, by name
    hidden: tuple[str, ...]  # names of the arguments that hold the layer's input
    token_axis: int  # axis of the tokens in the input, 0 or 1; the other one has length 1
    x: Tensor  # input, ``(n, d)``
    output: Tensor  # what the module returns; the layer's own output is that of its `end`
    side: Side = "self"  # what the input makes: all (``self``), queries, or keys and values
    context: Tensor | None = None  # cross-attention: the tokens that stay, ``(m, d)``; else None
    out_at: int = 0  # place of the output among the tensors that the module returns
    # Modules with weights that were applied inside, in their order.
    inside: list[Applied] = field(default_factory=list, repr=False)
    # Modules with weights beside it that took its output.
    behind: list[Applied] = field(default_factory=list, repr=False)
    # Names of other tokens that may be the source of keys, under names of their own.
    unsure: tuple[str, ...] = ()
    implementation: str | None = None  # attention implementation under which the call was made
    sums_before: int = 0  # number of sums that the model had formed before
    blocks_before: int = 0  # number of calls of blocks that had ended before
    turn: int = 0  # which of the calls of its module it is, from 0
    refusal: str = ""  # what speaks against it where it begins; see `end`
    # Whether it was made on windows of the tokens, or on tokens of other axes.
    in_parts: bool = False
    kept: list[Any] = field(default_factory=list, repr=False)
    # Has the weights of its block in memory, where they are read when they are needed.
    have: Callable[[], None] = field(default=lambda: None, repr=False)

    @functools.cached_property
    def end(self) -> LayerEnd:
        """Where the layer ends; looked for when it is first asked, of this layer alone."""
        return _end_of(self)

    @property
    def num_tokens(self) -> int:
        """Number of tokens n of the input."""
        return self.x.shape[0]

    @property
    def num_queries(self) -> int:
        """Number of tokens that read."""
        return self._tokens("query").shape[0]

    @property
    def num_keys(self) -> int:
        """Number of tokens that may be read."""
        return self._tokens("key").shape[0]

    def _tokens(self, side: Side) -> Tensor:
        return self.x if self.context is None or self.side == side else self.context


def _end_of(call: AttentionCall) -> LayerEnd:
    """The end of a layer: the last affine map inside, or one beside it that takes the output."""
    out, axis = call.kept[1], call.token_axis
    bare = LayerEnd(call.output, out, refusal=call.refusal)
    if call.in_parts:
        return bare
    if isinstance(call.module, nn.MultiheadAttention):
        return replace(bare, projection=call.module.out_proj)  # applied without being called
    given = call.kept[0]
    for one in call.inside:
        if not isinstance(one.module, nn.Conv1d) or one.x.shape != given.shape:
            continue
        # As many channels as tokens: what was transposed on the way is not contiguous.
        square = given.shape[-1] == given.shape[-2]
        if not square or one.x.is_contiguous() or same_place(one.x, given):
            raise InputError(
                f"`{call.name}` should take (batch, tokens, width). Found channels first: a "
                "convolution runs over its input without a transpose; this layout is not covered."
            )
    ends = [one for one in call.inside if same_place(one.y, out)]
    inner = _projection_of(call, ends)
    if inner is not None:
        return replace(bare, projection=inner.module, heads=as_tokens(inner.x, axis))
    norm = next((one for one in ends if is_norm(one.module)), None)
    term = _term_of_sum(call, out, norm)
    if norm is not None and term is None and not call.refusal:
        refusal = (
            f"`{call.name}` should end at its output projection. Found a norm at its end, so that "
            "its output is more than attention; use the map `block` or `model`."
        )
        return replace(bare, refusal=refusal, inside=False)
    outer = term or (None if call.refusal else _projection_of(call, call.behind))
    if outer is None:
        return replace(bare, inside=False)
    output, heads = (as_tokens(t, axis) for t in (outer.y, outer.x))
    found = LayerEnd(output, outer.y, outer.module, heads, refusal=call.refusal)
    return replace(found, inside=term is not None, goes_on=term is not None)


def _projection_of(call: AttentionCall, applied: list[Applied]) -> Applied | None:
    """The outermost of these modules that is affine; the linear map in it that is all it does."""
    affine = [one for one in applied if _is_affine(call, one)]
    if not affine:
        return None
    last = affine[-1]  # what holds a module is done after it
    return next((one for one in affine if is_plain(one.module) and same_place(one.y, last.y)), last)


def _is_affine(call: AttentionCall, one: Applied) -> bool:
    """Whether a module with a matrix maps its input, alone, to ``x W + b``."""
    if is_plain(one.module):
        return True
    if not has_weights(one.module, 2):
        return False
    call.have()
    noise = torch.randn(one.x.shape, generator=start_named("what changes")).to(one.x)
    try:
        with torch.no_grad():
            near, sum_, zero = (
                first_tensor(one.module(x)) for x in (noise, one.x + noise, torch.zeros_like(one.x))
            )
            return distance(sum_ - near, one.y - zero) < 1e-3
    except Exception:  # it takes more than one tensor, or returns something else
        return False


def _term_of_sum(call: AttentionCall, out: Tensor, norm: Applied | None) -> Applied | None:
    """The projection in a module that adds the residual itself (BLOOM; ALBERT: and a norm)."""
    axis = call.token_axis
    total = as_tokens(norm.x, axis) if norm is not None else call.output
    given = [v for k, v in call.arguments.items() if k not in call.hidden]
    given = [v for v in given if isinstance(v, Tensor) and v.shape == out.shape and has_storage(v)]
    terms = [call.x, *(as_tokens(v, axis) for v in given)]
    for one in reversed(call.inside):
        if one.y.shape != out.shape or not _is_affine(call, one):
            continue
        branch = as_tokens(one.y, axis)
        if any(close(total, branch + t) for t in terms if t.shape == branch.shape):
            return one
    return None


# --- families


class NotCoveredError(Exception):
    """A call of a known family with something that its closed form does not cover."""


WeightReader = Callable[[AttentionCall], Attention]
_READERS: dict[str, dict[str, WeightReader]] = {}  # of a class of a package
Scores = Literal["plain", "rotary", "relative bias", "soft cap", "normalised"]


@dataclass(frozen=True)
class Family:
    """A family whose weights are read."""

    reader: WeightReader  # how
    classes: tuple[str, ...]  # names of its attention modules
    scores: Scores  # what its logits are besides inner products, masks and windows

    @property
    def title(self) -> str:
        """What the file that reads it says it is."""
        text = inspect.getmodule(self.reader)
        return (text.__doc__ or "").strip().splitlines()[0] if text is not None else ""


_REGISTRY: list[Family] = []


def known_families() -> list[Family]:
    """Every family with a closed form; those of plug-ins too."""
    load_plugins(_PLUGINS)
    return sorted(_REGISTRY, key=lambda one: one.reader.__name__)


_PLUGINS = "lipscope.families"
_PLAIN = ("torch.nn.", "transformers.pytorch_utils")
_OWN = ("torch.nn.", "transformers.models.")  # norms, tables of positions


def family(
    *class_names: str, package: str | tuple[str, ...] = "transformers", scores: Scores = "plain"
) -> Callable[[WeightReader], WeightReader]:
    """Register how to read the weights of a package's attention modules with these names."""
    packages = (package,) if isinstance(package, str) else package

    def register(reader: WeightReader) -> WeightReader:
        for name in class_names:
            known = _READERS.setdefault(name, {})
            for one in packages:
                check_name("family's class", f"{one}: {name}", reader, known.get(one))
                known[one] = reader
        _REGISTRY.append(Family(reader, class_names, scores))
        return reader

    return register


def reader_of(module: nn.Module) -> WeightReader | None:
    """The reader for a module's class, or None for an unknown family.

    A class of the same name from elsewhere may compute something else, and so may a linear
    layer of another kind in it: an adapter or packed weights are run, not read.
    """
    kind = type_before_parametrizations(module)
    reader = _reader_named(kind)
    if reader is None:
        load_plugins(_PLUGINS)
        reader = _reader_named(kind)
    plain = all(map(is_plain, linears(module)))
    plain = plain and all(
        is_linear(c) or type(c).__module__.startswith(_OWN)
        for c in module.children()
        if hasattr(c, "weight")
    )
    return reader if plain else None


def _reader_named(kind: type) -> WeightReader | None:
    known, here = _READERS.get(kind.__name__, {}).items(), f"{kind.__module__}."
    return next((read for package, read in known if here.startswith(f"{package}.")), None)


def why_run(module: nn.Module) -> str:
    """What stands between a module and the closed form, where it can be seen."""
    kind = type_before_parametrizations(module).__name__
    if kind in _READERS:
        return f"`{kind}` holds something that its family does not (an adapter, appended keys)"
    if getattr(module, "attn_logit_softcapping", None):
        return f"no closed form is known for `{kind}`, which soft-caps its scores"
    if any(hasattr(module, name) for name in ("q_norm", "q_layernorm", "query_norm")):
        return f"no closed form is known for `{kind}`, which normalises its queries and keys"
    return f"no closed form is known for `{kind}`"


def closed_form(call: AttentionCall) -> Attention | None:
    """The layer of a call from its weights, or None where it has to be run instead."""
    reader = reader_of(call.module)
    if reader is None:
        return None
    call.have()
    try:
        return reader(call)
    except NotCoveredError:
        return None


def attention_sites(
    model: nn.Module, modules: str | None = None, *, side: Side = "self"
) -> dict[str, nn.Module]:
    """The attention modules of a model by dotted path, in model order.

    By default the innermost modules whose class name ends in ``Attention`` (``Attn``, ``XCA``); for
    self-attention without those that are named cross-attention. ``modules`` is a regular expression
    searched in the dotted paths instead, or one whole path; what lies inside a match is no match.

    Raises:
        InputError: If nothing matches, a match only holds attention, or the expression is
            malformed.
    """
    named = {name: m for name, m in model.named_modules() if name}
    if modules is not None and modules in named:
        return {modules: named[modules]}
    if modules is not None:
        try:
            pattern = regex.compile(modules)
            found = {n: m for n, m in named.items() if pattern.search(n, timeout=_SECONDS)}
        except (regex.error, RecursionError, OverflowError) as problem:
            raise InputError(
                f"`modules` should be a regular expression. Found {problem}."
            ) from None
        except TimeoutError:
            raise InputError(
                "`modules` should match, or fail to match, within a second. Found "
                f"`{modules}`, which tries too many ways; write it without nested repetitions."
            ) from None
        if not found:
            raise InputError(
                f"`modules` should match at least one module. Found none for `{modules}` among "
                f"{_some(named)}."
            )
        outer = {n: m for n, m in found.items() if not any(n.startswith(f"{o}.") for o in found)}
        for name, module in outer.items():
            held = next((n for n, m in module.named_modules() if n and is_attention(m)), None)
            if held is not None and not is_attention(module):
                raise InputError(
                    f"`modules` should match attention. Found `{name}`, which holds it in "
                    f"`{name}.{held}`; match that, or give the whole path of one module."
                )
        return outer
    # A variant inside other attention is no layer of the model.
    whole = tuple(f"{n}." for n, m in named.items() if _is_whole(m))
    found = {n: m for n, m in named.items() if is_attention(m) and not n.startswith(whole)}
    inner = {n: m for n, m in found.items() if not any(o.startswith(f"{n}.") for o in found)}
    # What is not named so may be called either way: the calls decide.
    chosen = {n: m for n, m in inner.items() if side != "self" or not _is_cross(n, m)}
    if not chosen and is_attention(model):
        raise InputError(
            "The model should hold attention in a module of its own. Found "
            f"`{type(model).__name__}` by itself; give the model that it is part of."
        )
    if not chosen:
        by_name = f"name the modules with `modules=` (a regular expression over {_some(named)}), or"
        raise InputError(
            "The model should contain a module whose class name ends in `Attention` or `Attn`. "
            f"Found none in `{type(model).__name__}`; {by_name if named else ''} measure any "
            f"function by `{OF_FUNCTION}`."
        )
    return chosen


def is_attention(module: nn.Module) -> bool:
    """Whether a module is attention by the name of its class."""
    return _NAMED.search(type_before_parametrizations(module).__name__) is not None


def _is_whole(module: nn.Module) -> bool:
    """Whether a module is one layer with all it holds: a variant, or a step without weights."""
    held = module.children() if is_attention(module) else ()
    parts = (isinstance(m, Attention) or (is_attention(m) and not has_weights(m)) for m in held)
    return isinstance(module, nn.MultiheadAttention) or any(parts)


def _is_cross(name: str, module: nn.Module) -> bool:
    own = (name.rsplit(".", 1)[-1] + type(module).__name__).lower()
    return (
        "cross" in own.replace("crosscovariance", "")  # of channels: it reads its own tokens
        or bool(getattr(module, "is_cross_attention", False))
        or name.endswith(("EncDecAttention", "encoder_attn", "multihead_attn"))
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a module is `is_linear` and its weights are all it computes with."""
    kind = type_before_parametrizations(module)
    return is_linear(module) and kind.__module__.startswith(_PLAIN)


def has_weights(module: nn.Module, axes: int = 1) -> bool:
    """Whether a module has weights of so many axes; packed ones are buffers."""
    return any(t.ndim >= axes for t in (*module.parameters(), *module.buffers()))


def with_weights(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of some modules that have weights."""
    return [module for module in modules if has_weights(module)]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation by the name of its class."""
    return "norm" in type(module).__name__.lower()


def is_linear(module: nn.Module) -> bool:
    """Whether a module is ``nn.Linear`` or the transposed ``Conv1D`` of GPT-2."""
    kind = type_before_parametrizations(module)
    return issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D"


def linears(module: nn.Module) -> list[nn.Module]:
    """The linear maps inside a module."""
    return [m for m in module.modules() if is_linear(m)]


def count_of_layers(model: nn.Module, sites: Collection[str]) -> int | None:
    """The number of attention layers, where the configuration counts as many as there are sites.

    None where some site may be called more than once, or not at all: only a pass can tell.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sides = [("encoder_layers", "num_layers"), ("decoder_layers", "num_decoder_layers")]
    names = sides if getattr(text, "is_encoder_decoder", False) else [("num_hidden_layers",)]
    found = [next((getattr(text, n) for n in side if hasattr(text, n)), None) for side in names]
    counts = [n for n in found if isinstance(n, int)]
    agree = len(counts) == len(names) and sum(counts) == len(sites)
    return len(sites) if agree else None


def block_of(model: nn.Module, site: str) -> str | None:
    """Path of the Transformer block around a site, or None.

    The innermost element of a module list that has weight matrices (an MLP, experts) besides
    the site's own and its output projection's.
    """
    parts = site.split(".")
    own = _matrices(model.get_submodule(site))
    for depth in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:depth])
        if parts[depth - 1].isdigit() and _matrices(model.get_submodule(path)) > own + 1:
            return path
    return None


def first_block_of(block: str) -> str:
    """Path of the first element of the outermost list that holds a block."""
    parts = block.split(".")
    depth = next(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join([*parts[:depth], "0"])


def _matrices(module: nn.Module) -> int:
    """Number of weights with two axes or more: experts keep theirs without linear layers."""
    return sum(p.ndim > 1 for p in module.parameters())


def _some(named: Collection[str]) -> str:
    names = list(named)
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
