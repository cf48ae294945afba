"""The attention modules of a model, their calls, and families with a closed form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import regex
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention import Attention, change_of
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


# The call for a function of a tensor, without a model.
OF_FUNCTION = "ls.top_singular(ls.linearise(f, x))"
_SECONDS = 1.0  # timeout of a regular expression search in one path
# Class names of attention, with suffixes of layout variants (channels last, strides).
_NAMED = regex.compile(
    "(Attention|Attn|GPSA|MHSA|MLA|XCA)(Cl|2d|Rope|V2|(2d)?Downsample|PoolFirst|Global|ConvRelPosEnc)?$"
    "|FlashAttention2$"
)


@dataclass
class Applied:
    """A call of a module with weights, ``y = module(x)``."""

    module: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class LayerEnd:
    """The end of a layer at its output projection, inside its module or after it."""

    output: Tensor  # output with the output projection, ``(n, d_out)``
    held: Tensor  # the model's own tensor of this output
    projection: nn.Module | None = None  # the output projection, if it is a separate module
    # Concatenated heads, the projection's input, ``(n, h d_v)``; None if unknown.
    heads: Tensor | None = None
    inside: bool = True  # whether the module applies the projection itself
    goes_on: bool = False  # whether the module continues after its projection (adds the residual)
    refusal: str = ""  # why the call is not an attention map of its input; empty if it is


@dataclass
class AttentionCall:
    """One call of an attention module in a forward pass.

    In cross-attention, the queries come from one set of tokens, the keys and values from another:
    one of the two is the layer's input here, the other is its fixed context.
    """

    name: str  # dotted path of the module in the model
    module: nn.Module
    arguments: dict[str, Any]  # bound arguments of its forward, by name
    hidden: tuple[str, ...]  # names of the arguments with the layer's input
    token_axis: int  # axis of the tokens in the input, 0 or 1; the other one has length 1
    x: Tensor  # input, ``(n, d)``
    output: Tensor  # output of the module; `end` has the output of the layer
    side: Side = "self"  # role of the input: all (``self``), queries, or keys and values
    context: Tensor | None = None  # cross-attention: the fixed tokens, ``(m, d)``; else None
    out_at: int = 0  # index of the output among the tensors that the module returns
    # Calls of modules with weights inside, in order.
    inside: list[Applied] = field(default_factory=list, repr=False)
    # Calls of modules with weights on its output.
    behind: list[Applied] = field(default_factory=list, repr=False)
    # Names of other token arguments that may be the source of keys.
    unsure: tuple[str, ...] = ()
    implementation: str | None = None  # attention implementation of the call
    sums_before: int = 0  # number of previous sums in the pass
    blocks_before: int = 0  # number of completed block calls at its start
    turn: int = 0  # index among the calls of its module, from 0
    refusal: str = ""  # reason for a refusal known at its start; see `end`
    # Whether it is a call on windows of tokens, or along another axis.
    in_parts: bool = False
    kept: list[Any] = field(default_factory=list, repr=False)
    # Loads the weights of its block, if the model is loaded block by block.
    have: Callable[[], None] = field(default=lambda: None, repr=False)

    @functools.cached_property
    def end(self) -> LayerEnd:
        """The end of the layer, computed on first access."""
        return _end_of(self)

    @property
    def num_tokens(self) -> int:
        """Number of tokens n of the input."""
        return self.x.shape[0]

    @property
    def num_queries(self) -> int:
        """Number of query tokens."""
        return self._tokens("query").shape[0]

    @property
    def num_keys(self) -> int:
        """Number of key tokens."""
        return self._tokens("key").shape[0]

    def _tokens(self, side: Side) -> Tensor:
        return self.x if self.context is None or self.side == side else self.context


def _end_of(call: AttentionCall) -> LayerEnd:
    """The end of a layer: the last affine map inside, or one applied to the module's output."""
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
        # With as many channels as tokens, a transposed input is recognised by its strides.
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
    """The outermost affine module, or the linear map inside it if it does nothing else."""
    affine = [one for one in applied if _is_affine(call, one)]
    if not affine:
        return None
    last = affine[-1]  # outer modules end after inner ones
    return next((one for one in affine if is_plain(one.module) and same_place(one.y, last.y)), last)


def _is_affine(call: AttentionCall, one: Applied) -> bool:
    """Whether a module with a weight matrix is an affine function ``x W + b`` of its input."""
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
    except Exception:  # it needs more than one tensor, or does not return one
        return False


def _term_of_sum(call: AttentionCall, out: Tensor, norm: Applied | None) -> Applied | None:
    """The projection in a module that adds the residual itself (BLOOM), and a norm (ALBERT)."""
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
    """A call of a known family that its closed form does not cover."""


WeightReader = Callable[[AttentionCall], Attention]
_READERS: dict[str, dict[str, WeightReader]] = {}  # by class name and package
Scores = Literal["plain", "rotary", "relative bias", "soft cap", "normalised"]


@dataclass(frozen=True)
class Family:
    """A family with a closed form."""

    reader: WeightReader  # reads the weights
    classes: tuple[str, ...]  # class names of its attention modules
    scores: Scores  # features of its logits besides inner products, masks and windows

    @property
    def title(self) -> str:
        """First line of the docstring of the reader's module."""
        text = inspect.getmodule(self.reader)
        return (text.__doc__ or "").strip().splitlines()[0] if text is not None else ""


_REGISTRY: list[Family] = []


def known_families() -> list[Family]:
    """Every family with a closed form, including plug-ins."""
    load_plugins(_PLUGINS)
    return sorted(_REGISTRY, key=lambda one: one.reader.__name__)


_PLUGINS = "lipscope.families"
_PLAIN = ("torch.nn.", "transformers.pytorch_utils")
# They compute nothing in eval mode, hold others, such as parametrizations, or are the softmax.
_USUAL = (nn.Dropout, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.Softmax)


def family(
    *class_names: str, package: str | tuple[str, ...] = "transformers", scores: Scores = "plain"
) -> Callable[[WeightReader], WeightReader]:
    """Register a weight reader for attention classes of a package, by class name.

    The reader takes a call of such a module, ``call.module``, and returns the layer that it
    computes, such as a `DotProduct`. For classes of your own, ``package=__name__`` where they are
    defined. Example: ``docs/tutorials/measure-my-module.md``.
    """
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

    Classes of the same name from other packages, and modules with other linear layers (adapters,
    packed weights), may compute something else: they are replayed, not read.
    """
    kind = type_before_parametrizations(module)
    reader = _reader_named(kind)
    if reader is None:
        load_plugins(_PLUGINS)
        reader = _reader_named(kind)
    return None if _unusual(module) else reader


def are_read(sites: Mapping[str, nn.Module]) -> bool:
    """Whether there is a reader for each of these attention modules."""
    return all(map(reader_of, sites.values()))


def _unusual(module: nn.Module) -> str:
    """The part of attention that replaced another (an activation as dropout), or that hooks change.

    Adapters are among the former.
    """
    own = type_before_parametrizations(module).__module__.split(".")[0]
    packages = ("transformers.", "lipscope.", *(() if own == "torch" else (f"{own}.",)))

    def is_usual(child: nn.Module) -> bool:
        if isinstance(child, nn.Sequential):
            return all(map(is_usual, child))
        written = f"{type_before_parametrizations(child).__module__}."
        if isinstance(child, Attention) or is_linear(child) or written.startswith(packages):
            return True
        torchs = written.startswith("torch.nn.") and not isinstance(child, nn.PReLU)
        return torchs and (hasattr(child, "weight") or isinstance(child, _USUAL))

    if changed := change_of(*module.modules()):
        return changed
    for name, part in module.named_modules():
        known = is_plain(part) if is_linear(part) else "." in name or not name or is_usual(part)
        if not known:
            kind = type_before_parametrizations(part)
            return f"`{name}` ({kind.__module__}.{kind.__name__})"
    return ""


def _reader_named(kind: type) -> WeightReader | None:
    known, here = _READERS.get(kind.__name__, {}).items(), f"{kind.__module__}."
    return next((read for package, read in known if here.startswith(f"{package}.")), None)


def why_run(module: nn.Module) -> str:
    """Why a module has no closed form, as far as its attributes show."""
    whole = type_before_parametrizations(module)
    kind = whole.__name__
    if kind in _READERS and _reader_named(whole) is None:
        packages = ", ".join(f"`{one}`" for one in _READERS[kind])
        return f"no closed form is known for `{kind}` of `{whole.__module__}`, only of {packages}"
    if kind in _READERS:
        part = _unusual(module) or "appended keys, say"
        return f"`{kind}` contains an adapter or another part that its family does not: {part}"
    if getattr(module, "attn_logit_softcapping", None):
        return f"no closed form is known for `{kind}`, which soft-caps its scores"
    if any(hasattr(module, name) for name in ("q_norm", "q_layernorm", "query_norm")):
        return f"no closed form is known for `{kind}`, which normalises its queries and keys"
    return f"no closed form is known for `{kind}`"


def closed_form(call: AttentionCall) -> Attention | None:
    """The layer of a call from its weights, or None if it has to be replayed."""
    reader = reader_of(call.module)
    if reader is None:
        return None
    call.have()
    try:
        found = reader(call)
    except NotCoveredError:
        return None
    if not isinstance(found, Attention):
        raise InputError(
            f"The family of `{type(call.module).__name__}` should return an attention layer. "
            f"Found `{type(found).__name__}`."
        )
    return found


def attention_sites(
    model: nn.Module, modules: str | None = None, *, side: Side = "self"
) -> dict[str, nn.Module]:
    """The attention modules of a model by dotted path, in model order.

    By default the innermost modules whose class name ends in ``Attention`` (``Attn``, ``XCA``); for
    self-attention, those named cross-attention are excluded. ``modules`` is a regular expression
    for the dotted paths instead, or one full path; modules inside a match are not matched.

    Raises:
        InputError: If nothing matches, a match only contains attention, or the expression is
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
                    f"`modules` should match attention. Found `{name}`, which contains it in "
                    f"`{name}.{held}`; match that, or give the full path of one module."
                )
        return outer
    # A variant inside other attention is not a layer of the model.
    whole = tuple(f"{n}." for n, m in named.items() if _is_whole(m))
    found = {n: m for n, m in named.items() if is_attention(m) and not n.startswith(whole)}
    inner = {n: m for n, m in found.items() if not any(o.startswith(f"{n}.") for o in found)}
    # Modules not named cross-attention may still have cross-attention calls: the trace decides.
    chosen = {n: m for n, m in inner.items() if side != "self" or not _is_cross(n, m)}
    if not chosen and is_attention(model):
        raise InputError(
            "The model should contain attention as a submodule. Found "
            f"`{type(model).__name__}` alone; give the model that contains it."
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
    """Whether a module is attention, by its class name, or torch's own under any name."""
    named = _NAMED.search(type_before_parametrizations(module).__name__) is not None
    return named or isinstance(module, nn.MultiheadAttention)


def _is_whole(module: nn.Module) -> bool:
    """Whether a module is one layer with all its parts: a variant, or a step without weights."""
    held = module.children() if is_attention(module) else ()
    parts = (isinstance(m, Attention) or (is_attention(m) and not has_weights(m)) for m in held)
    return isinstance(module, nn.MultiheadAttention) or any(parts)


def _is_cross(name: str, module: nn.Module) -> bool:
    own = (name.rsplit(".", 1)[-1] + type(module).__name__).lower()
    return (
        "cross" in own.replace("crosscovariance", "")  # cross-covariance is self-attention
        or bool(getattr(module, "is_cross_attention", False))
        or name.endswith(("EncDecAttention", "encoder_attn", "multihead_attn"))
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a module is `is_linear` and of a standard class, not an adapter."""
    kind = type_before_parametrizations(module)
    return is_linear(module) and kind.__module__.startswith(_PLAIN)


def has_weights(module: nn.Module, axes: int = 1) -> bool:
    """Whether a module has weights with at least ``axes`` axes; packed ones are buffers."""
    return any(t.ndim >= axes for t in (*module.parameters(), *module.buffers()))


def with_weights(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that have weights."""
    return [module for module in modules if has_weights(module)]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation, by its class name."""
    return "norm" in type(module).__name__.lower()


def is_linear(module: nn.Module) -> bool:
    """Whether a module is ``nn.Linear`` or the transposed ``Conv1D`` of GPT-2."""
    kind = type_before_parametrizations(module)
    return issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D"


def linears(module: nn.Module) -> list[nn.Module]:
    """The linear maps inside a module."""
    return [m for m in module.modules() if is_linear(m)]


def count_of_layers(model: nn.Module, sites: Collection[str]) -> int | None:
    """The number of attention layers, if the configuration agrees with the number of sites.

    None otherwise: sites may be called repeatedly or not at all, which only a pass can show.
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

    The innermost element of a module list with more weight matrices (an MLP, experts) than
    those of the site and its output projection.
    """
    parts = site.split(".")
    own = _matrices(model.get_submodule(site))
    for depth in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:depth])
        if parts[depth - 1].isdigit() and _matrices(model.get_submodule(path)) > own + 1:
            return path
    return None


def first_block_of(model: nn.Module, block: str) -> str:
    """Path of the first element in the outermost list with the block.

    Not of embeddings, with positions, that an ``nn.Sequential`` holds there before its blocks.
    """
    parts = block.split(".")
    depth = next(i for i, part in enumerate(parts) if part.isdigit())
    listed = [*model.get_submodule(".".join(parts[:depth])).named_children()]
    count = next(i for i, (_, one) in enumerate(listed) if not _embeds(one))
    first = listed[count if [*listed[count][1].children()] else 0][0]
    return ".".join([*parts[:depth], first])


def _embeds(module: nn.Module) -> bool:
    """Whether a module is a linear map or embeds: nothing but embeddings, positions, dropout."""
    alone = nn.Embedding | nn.Dropout | nn.Identity
    held = [isinstance(one, alone) for one in module.children()]
    container = bool(held) and all(held) and not module._parameters
    return is_linear(module) or isinstance(module, alone) or container


def _matrices(module: nn.Module) -> int:
    """Number of weights with two or more axes, including experts without linear layers."""
    return sum(p.ndim > 1 for p in module.parameters())


def _some(named: Collection[str]) -> str:
    names = list(named)
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
