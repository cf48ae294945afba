"""Base class of attention layers: arguments, norms, rotary embedding, masks; see `core`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, cast, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention.weighting import Softmax, Weighting
from lipscope.errors import (
    InputError,
    OptionError,
    check_count,
    check_finite_number,
    check_positive,
    shown,
    stated,
    type_and_shape,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def wide(t: Tensor) -> Tensor:
    """Promote half precision to float32: squares of 256 exceed float16.

    >>> wide(torch.ones(1).half()).dtype, wide(torch.ones(1).double()).dtype
    (torch.float32, torch.float64)
    """
    return t.to(torch.promote_types(t.dtype, torch.float32))


def returned(x: Tensor) -> torch.dtype:
    """The dtype of a linear map of ``x``: its own dtype, or autocast's."""
    device = x.device.type
    if x.dtype == torch.float64 or not _casts(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def uncast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, which would round wide tensors again."""
    if not _casts(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def exact(function: _Function) -> _Function:
    """Decorate a function to run in the dtype of its tensor arguments, even under autocast."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        found = next(one for one in args if isinstance(one, Tensor))
        with uncast(found.device):
            return function(*args, **options)

    return cast("_Function", run)


def _casts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


class TokenNorm(nn.Module):
    """RMSNorm of consecutive parts of a token, each as wide as the weight.

    ``z ↦ w z / √(|z|²/k + ε)`` with ``k`` the width of ``w``: the head width normalises each head
    separately, the width of all heads normalises the whole projection.

    >>> import torch
    >>> TokenNorm(torch.ones(2), eps=0.0)(torch.tensor([[3.0, 4.0]])) * 12.5**0.5
    tensor([[3., 4.]])
    """

    weight: Tensor

    def __init__(self, weight: Float[Tensor, " k"], eps: float) -> None:
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.register_parameter("weight", weight)
        else:
            self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, z: Float[Tensor, "*b n w"]) -> Float[Tensor, "*b n w"]:
        """The normalised tokens."""
        at = self.at(z)
        return (at.unit * self.weight * len(self.weight) ** 0.5).flatten(-2).to(z.dtype)

    def at(self, z: Float[Tensor, "*b n w"]) -> NormAt:
        """The norm linearised at ``z``."""
        parts = wide(z).unflatten(-1, (-1, len(self.weight)))
        length = (parts.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return NormAt(parts / length / len(self.weight) ** 0.5, self.weight / length)


class Clip(nn.Module):
    """Projection of every token onto a ball: ``x ↦ x min(1, R / |x|)``.

    >>> import torch
    >>> Clip(2.5)(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[1.5000, 2.0000],
            [0.0000, 1.0000]])
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """Project the tokens onto the ball."""
        z = wide(x)
        squares = z.square().sum(-1, keepdim=True)  # its root is not differentiable at zero
        return (z * (self.radius * squares.clamp_min(self.radius**2).rsqrt())).to(x.dtype)

    def at(self, x: Float[Tensor, "*b n d"]) -> NormAt:
        """The derivative: that of ``R x / |x|`` outside the ball, the identity inside."""
        x = wide(x)[..., None, :]
        length = x.square().sum(-1, keepdim=True).sqrt()
        outside = length > self.radius
        unit = torch.where(outside, x / length.clamp_min(self.radius), 0.0)
        gain = torch.where(outside, self.radius / length.clamp_min(self.radius), 1.0)
        return NormAt(unit, gain)


@dataclass(frozen=True)
class NormAt:
    """A norm linearised at one input: the derivative of each part is ``D_g (I - u u^T)``."""

    unit: Tensor  # ``u = z / (√k r)``, ``r`` the root mean square with ``ε``; ``(*b, n, parts, k)``
    gain: Tensor  # ``g = w / r``, ``(*b, n, parts, k)``

    def derivative(self, dz: Tensor) -> Tensor:
        """``D_g (I - u u^T) dz`` for tokens ``(*b, n, w)``."""
        dz = dz.unflatten(-1, (-1, self.unit.shape[-1]))
        along = (self.unit * dz).sum(-1, keepdim=True)
        return (self.gain * (dz - self.unit * along)).flatten(-2)

    def transpose(self, gy: Tensor) -> Tensor:
        """``(I - u u^T) D_g gy`` for cotangents ``(*b, n, w)``."""
        gz = self.gain * gy.unflatten(-1, (-1, self.unit.shape[-1]))
        return (gz - self.unit * (self.unit * gz).sum(-1, keepdim=True)).flatten(-2)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of one window, in half-split layout.

    ``rot(x) = x cos + half(x) sin`` with ``half((a, b)) = (-b, a)`` on the two halves of a
    head. Channels beyond the width of ``cos`` are unchanged.
    """

    cos: Float[Tensor, "n r"]
    sin: Float[Tensor, "n r"]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate queries or keys ``(..., n, k)``."""
        turned, rest = x.split([self.cos.shape[-1], x.shape[-1] - self.cos.shape[-1]], dim=-1)
        a, b = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat([-b, a], dim=-1) * self.sin
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def transpose(self, g: Tensor) -> Tensor:
        """Apply the transposed (inverse up to scale) rotation to cotangents ``(..., n, k)``."""
        turned, rest = g.split([self.cos.shape[-1], g.shape[-1] - self.cos.shape[-1]], dim=-1)
        a, b = (turned * self.sin).chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat([b, -a], dim=-1)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def norm(self, width: int) -> float:
        """Spectral norm of the rotation at width ``width``: 1 unless it includes a scaling."""
        (c1, c2), (s1, s2) = (w.double().chunk(2, dim=-1) for w in (self.cos, self.sin))
        # Each pair of channels is multiplied by [[c_1, -s_1], [s_2, c_2]].
        pairs = torch.stack([torch.stack([c1, -s1], -1), torch.stack([s2, c2], -1)], -2)
        rest = 1.0 if self.cos.shape[-1] < width else 0.0
        return max(float(torch.linalg.matrix_norm(pairs, 2).max()), rest)


def check_shapes(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor | None, heads: int, groups: int
) -> None:
    """Check weights against each other and the number of heads."""
    check_count("heads", heads)
    check_count("groups", groups)
    for one in (query, key, value):
        if not isinstance(one, Tensor) or one.ndim != 2 or not one.is_floating_point():
            raise InputError(
                "Weights should be matrices of real numbers, floating-point tensors of torch. "
                f"Found {type_and_shape(one)}."
            )
    if heads % groups:
        raise InputError(
            "`heads` should be a positive multiple of `groups`. "
            f"Found `heads = {heads}`, `groups = {groups}`."
        )
    for name, weight, parts in (
        ("query", query, heads),
        ("key", key, groups),
        ("value", value, groups),
    ):
        if weight.shape[0] % parts or weight.shape[1] != query.shape[1]:
            raise InputError(
                f"`{name}` should have shape ({parts} * head width, {query.shape[1]}). "
                f"Found {tuple(weight.shape)}."
            )
    if query.shape[0] // heads != key.shape[0] // groups:
        raise InputError(
            "Queries and keys should have the same head width. Found "
            f"{query.shape[0] // heads} and {key.shape[0] // groups}."
        )
    concat = heads * (value.shape[0] // groups)
    if output is not None and output.shape[1] != concat:
        raise InputError(f"`output` should have {concat} columns. Found {output.shape[1]}.")


def check_log_weights(log_weights: Tensor | None, keys: Tensor) -> None:
    """Require one number per key."""
    if not isinstance(keys, Tensor):
        raise InputError(f"Tokens should be a tensor, (..., n, d). Found `{type(keys).__name__}`.")
    if log_weights is None:
        return
    if not isinstance(log_weights, Tensor) or log_weights.shape != keys.shape[-2:-1]:
        found = tuple(log_weights.shape) if isinstance(log_weights, Tensor) else shown(log_weights)
        raise InputError(
            f"`log_weights` should be one number for each of {keys.shape[-2]} keys. Found {found}."
        )


class Masked(TypedDict, total=False):
    """Arguments of every variant for encoders and decoders, besides weights."""

    heads: int
    causal: bool
    mask: Bool[Tensor, "*h n n"] | None


class Framed(Masked, total=False):
    """Further arguments of softmax-like variants: biases and a scale."""

    query_bias: Float[Tensor, " hk"] | None
    key_bias: Float[Tensor, " hk"] | None
    value_bias: Float[Tensor, " hv"] | None
    output_bias: Float[Tensor, " d_out"] | None
    scale: float | None


def check_frame_of(frame: Mapping[str, object], takes: type) -> None:
    """Refuse arguments that a variant does not accept, in Python's wording."""
    for name in frame.keys() - takes.__annotations__.keys():
        raise OptionError(f"__init__() got an unexpected keyword argument '{name}'.")


def arguments(kind: type) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor, including those passed on to its base classes."""
    above = (one for one in kind.__mro__ if "__init__" in vars(one))
    found: dict[str, inspect.Parameter] = {}
    for one in above:
        own = dict([*inspect.signature(vars(one)["__init__"]).parameters.items()][1:])
        hands_on = [n for n, p in own.items() if p.kind.name.startswith("VAR_")]
        found = {n: p for n, p in own.items() if n not in hands_on} | found
        if (takes := vars(one).get("takes")) is not None:
            kind_of = inspect.Parameter.KEYWORD_ONLY
            more = {n: inspect.Parameter(n, kind_of, default=None) for n in takes.__annotations__}
            return found | more
        if not hands_on:
            break
    return found


def check_frame(
    causal: object, mask: object, scale: object, softcap: object, window: object
) -> None:
    """Refuse invalid options of scores and masks."""
    if scale is not None:
        check_finite_number("scale", scale)
    if softcap is not None:
        check_positive("softcap", softcap)
    if window is not None:
        check_count("window", window)
    if not isinstance(causal, bool):
        raise InputError(f"`causal` should be True or False. Found `causal = {shown(causal)}`.")
    if mask is None:
        return
    kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    if str(kind) != "torch.bool":
        raise InputError(f"`mask` should be a tensor of booleans. Found {kind!s}.")


Map = Literal["heads", "attention"]
MovingSide = Literal["query", "key"]
AnyLayer = TypeVar("AnyLayer", bound="Layer")

# Arguments stored under another name, and how arguments split by head.
_STORED = {"heads": "num_heads", "groups": "num_groups"}
_OF_A_HEAD = ("query", "query_bias")
_OF_A_GROUP = ("key", "key_bias", "value", "value_bias")
_OF_POSITIONS = ("mask", "score_bias")


class Layer(nn.Module, ABC):
    """The fields of an `Attention` (documented there) and the steps of its forward pass.

    A variant stores the weights of its paper. Derived quantities (`projections`, `norms`) are
    recomputed in every pass, so that the layer can be trained.
    """

    weighting: Weighting = Softmax()  # how scores become weights
    # Whether query, key and value depend on their token alone; if not, there is a `divisor`.
    by_token: bool = True
    # The class of copies, if not its own: the variant that it computes.
    _copied_as: ClassVar[type[Layer] | None] = None

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None
    score_bias: Tensor | None

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "gk _"],
        value: Float[Tensor, "gv _"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
        groups: int | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        window: int | None = None,
        mask: Bool[Tensor, "*h n m"] | None = None,
        rotary: Rotary | None = None,
        score_bias: Float[Tensor, "*hb n m"] | None = None,
        softcap: float | None = None,
        query_norm: TokenNorm | None = None,
        key_norm: TokenNorm | None = None,
        value_norm: TokenNorm | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = heads
        self.num_groups = heads if groups is None else groups
        check_shapes(query, key, value, output, heads, self.num_groups)
        check_frame(causal, mask, scale, softcap, window)
        self.hold(query=query, value=value, output=output)
        if not isinstance(getattr(type(self), "key", None), property):  # tied to another weight
            self.hold(key=key)
        self.hold(query_bias=query_bias, key_bias=key_bias, value_bias=value_bias)
        self.hold(output_bias=output_bias, score_bias=score_bias)
        self.head_width = query.shape[0] // heads
        self.value_width = value.shape[0] // self.num_groups
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.causal, self.window = causal, window
        self.mask = mask
        self.rotary = rotary
        self.softcap = softcap
        self.query_norm, self.key_norm, self.value_norm = query_norm, key_norm, value_norm

    def hold(self, **tensors: Tensor | None) -> None:
        """Store weights: parameters stay parameters, other tensors become buffers."""
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def _apply(self: AnyLayer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AnyLayer:
        """Apply ``to``, ``double`` and so on to the mask and rotary embedding too."""
        if self.mask is not None:
            self.mask = fn(self.mask)
        if self.rotary is not None:
            self.rotary = Rotary(fn(self.rotary.cos), fn(self.rotary.sin))
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Sizes and the options set for the scores."""
        out = self.num_heads * self.value_width if self.output is None else len(self.output)
        sizes = {"width": self.query.shape[1], "output width": out, "heads": self.num_heads}
        if self.num_groups != self.num_heads:
            sizes["groups"] = self.num_groups
        parts = [f"{name} {size}" for name, size in sizes.items()]
        parts += ["causal"] * self.causal + [f"window {self.window}"] * (self.window is not None)
        optional = {"mask": self.mask, "score bias": self.score_bias, "rotary": self.rotary}
        optional |= {"soft cap": self.softcap, "norms": self.query_norm, "biases": self.query_bias}
        return ", ".join([*parts, *(name for name, held in optional.items() if held is not None)])

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Numbers of heads of queries, keys and values."""
        return self.num_heads, self.num_groups, self.num_groups

    # --- copies

    def fields(self) -> dict[str, Any]:
        """The constructor arguments that reproduce this layer."""
        kind = type(self)._copied_as or type_before_parametrizations(self)
        try:
            return {name: getattr(self, _STORED.get(name, name)) for name in arguments(kind)}
        except AttributeError as why:
            said = "Layers should keep what their constructors take, for copies. Found otherwise:"
            raise InputError(f"{said} {why}; keep it, or hand on `**options`.") from None

    def replace(self: AnyLayer, **changes: Any) -> AnyLayer:
        """A layer with some fields replaced, by their names in the constructor.

        The others are shared with this layer, not copied; parameters stay the same objects.
        Parametrised fields take their current value.
        """
        kind: Any = type(self)._copied_as or type_before_parametrizations(self)
        return kind(**(self.fields() | changes))

    def head(self: AnyLayer, index: int) -> AnyLayer:
        """One query head as a layer, with its group's keys and values.

        It takes its part of the output projection and of masks and biases by head; the output
        bias is not split.
        """
        self.check_head(index)
        fields = self.fields()
        for name in ("query_norm", "key_norm", "value_norm"):
            norm = fields.get(name)
            width = self.value_width if name == "value_norm" else self.head_width
            if norm is not None and len(norm.weight) > width:
                raise InputError("not available: a norm of the layer joins its heads.")
        group = index * self.num_groups // self.num_heads
        for name, tensor in [(name, t) for name, t in fields.items() if t is not None]:
            if name in _OF_A_HEAD:
                fields[name] = tensor.chunk(self.num_heads)[index]
            elif name in _OF_A_GROUP:
                fields[name] = tensor.chunk(self.num_groups)[group]
            elif name == "output":
                fields[name] = tensor.chunk(self.num_heads, 1)[index]
            elif name in _OF_POSITIONS and tensor.ndim == 3:
                fields[name] = tensor[index]
            elif name in _STORED:
                fields[name] = 1
        return self.replace(**fields)

    def check_head(self, index: int) -> None:
        """Require a valid query head index."""
        whole = isinstance(index, Integral) and not isinstance(index, bool)
        if not whole or not 0 <= index < self.num_heads:
            raise InputError(
                f"`head` should be between 0 and {self.num_heads - 1}. Found "
                f"{stated('head', index)}."
            )

    def in_double(self: AnyLayer) -> AnyLayer:
        """A copy in float64 on the CPU, without gradients."""
        tensors = {n: t.detach() for n, t in self.fields().items() if isinstance(t, Tensor)}
        alone = copy.deepcopy(self.replace(**tensors))
        return alone.to("cpu", torch.float64).requires_grad_(False)

    # --- score of a variant and its two derivatives

    @abstractmethod
    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Scores ``(..., c, n)`` of scaled queries ``(..., c, k)`` and keys ``(..., n, k)``."""

    @abstractmethod
    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Change ``(..., c, n)`` of the scores along ``dq`` and ``dk``."""

    @abstractmethod
    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of queries and keys for the cotangent ``gs`` of the scores."""

    def score_size(self, q: Tensor, k: Tensor) -> Tensor:
        """The magnitude to which rounding of a row's scores is relative, ``(..., n)``, float64."""
        q, k = q.double().norm(dim=-1), k.double().norm(dim=-1)
        return q * k.amax(-1, keepdim=True)

    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value matrices."""
        return self.query, self.key, self.value

    def norms(self) -> tuple[TokenNorm | None, TokenNorm | None, TokenNorm | None]:
        """The norms of queries, keys and values."""
        return self.query_norm, self.key_norm, self.value_norm

    def entrance(self) -> TokenNorm | Clip | None:
        """The map applied to every token before the projections, or None."""
        return None

    def divisor(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The divisor of each head's queries, ``(..., h, 1, 1)``, shared by all tokens, or None."""
        return None

    def shift(self, num_keys: int, added: Tensor | None = None) -> float | Tensor | None:
        """Constant added to all scores of ``num_keys`` keys; the call's ``added`` may mask some."""

    # --- from tokens to weights

    @final  # the closed form uses score and weighting: override these
    @exact
    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        start: int = 0,
        heads: slice = slice(None),
        log_weights: Tensor | None = None,
        num_keys: int | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """Attention weights ``(..., h, c, m)`` of scaled queries and keys, for autograd.

        Queries are ``c`` rows starting at ``start``. ``num_keys`` is the number of keys if ``k``
        holds only the first ones; ``added`` is added to the scores, -inf where it masks.
        """
        rows = slice(start, start + q.shape[-2])
        s = self.capped(self.score(q, k))
        bias = self.bias(k, rows, slice(0, k.shape[-2]), log_weights, num_keys, added)
        s = s if bias is None else s + select_heads(bias, heads)
        if added is None:
            p = self.weighting.weights(s)
        else:
            s = s + added
            hidden = (s == -torch.inf).all(-1, keepdim=True)
            p = self.weighting.weights(s.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)
        empty = self.empty_rows(k)
        if empty is None:
            return p
        return p.masked_fill(select_heads(empty[..., rows, None], heads), 0.0)

    @final
    def capped(self, s: Tensor) -> Tensor:
        """``c tanh(s / c)``, or the scores unchanged without a cap."""
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    @final
    def project(
        self, x: Tensor, context: Tensor | None = None, *, biased: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled and divided queries, keys, values, ``(..., num_heads, n or m, width)``, `wide`.

        ``biased=False`` omits the bias of the values, a constant if weights add up to 1.
        """
        q, k, v = self.undivided(x, context, biased=biased)
        divisor = self.divisor(q, k, v)
        return q if divisor is None else q / divisor, k, v

    @final
    def undivided(
        self, x: Tensor, context: Tensor | None = None, *, biased: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `project`, without the divisor, which depends on all tokens."""
        parts = map(wide, self.project_in(x, context, biased=biased))
        q, k, v = (
            (z if norm is None else norm(z)).unflatten(-1, (heads, -1)).transpose(-3, -2)
            for z, norm, heads in zip(parts, self.norms(), self.head_counts, strict=True)
        )
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return q * self.scale, self.repeat_groups(k), self.repeat_groups(v)

    def project_in(
        self, x: Tensor, context: Tensor | None = None, *, biased: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values after the linear projections, heads concatenated."""
        others: Tensor = x if context is None else context
        (_, width), dtype = (weight := self.query).shape, weight.dtype
        for one in (x, others):
            fits = one.ndim >= 2 and one.shape[-2] and one.shape[-1] == width
            if not fits or not (one.dtype == dtype or _casts(one.device.type)):
                raise InputError(
                    f"A layer's input should have shape (..., n, {width}), at least one token, "
                    f"in {str(dtype)[6:]}. Found {tuple(one.shape)} in {str(one.dtype)[6:]}."
                )
        if (enter := self.entrance()) is not None:
            x, others = enter(x), enter(others)
        query, key, value = self.projections()
        return (
            nn.functional.linear(x, query, self.query_bias),
            nn.functional.linear(others, key, self.key_bias),
            nn.functional.linear(others, value, self.value_bias if biased else None),
        )

    @property
    def bias_moves(self) -> bool:
        """Whether the Jacobian depends on the bias of the values."""
        if self.value_bias is None:
            return False
        apart = self.weighting.normalised and self.by_token
        return not apart or self.norms()[2] is not None

    @final
    def project_out(self, heads: Tensor) -> Tensor:
        """Apply the output projection to concatenated heads ``(..., n, num_heads * d_v)``."""
        if self.output is None:
            return heads
        return nn.functional.linear(heads, self.output, self.output_bias)

    @final
    def repeat_groups(self, x: Tensor) -> Tensor:
        """Repeat keys or values for the query heads of each group."""
        times = self.num_heads // self.num_groups
        return x if times == 1 else x.repeat_interleave(times, dim=-3)

    @final
    def sum_groups(self, g: Tensor) -> Tensor:
        """The transpose of `repeat_groups`."""
        times = self.num_heads // self.num_groups
        return g if times == 1 else g.unflatten(-3, (self.num_groups, times)).sum(-3)

    # --- masks and biases

    @property
    def positional(self) -> bool:
        """Whether logits depend on token positions other than through the mask."""
        return self.rotary is not None or self.score_bias is not None

    @final
    def bias(
        self,
        k: Tensor,
        rows: slice,
        keys: slice,
        log_weights: Tensor | None = None,
        num_keys: int | None = None,
        called: Tensor | None = None,
    ) -> Tensor | None:
        """The term added to a block of scores, ``(h or none, rows or none, keys)``, like ``k``.

        The layer's bias and shift (which depends on the call's mask too), the log weights of the
        keys, and -inf for masked entries; None if all are absent. Rows that may attend to no token
        stay unmasked here; their weights are set to zero.
        """
        added = None if self.score_bias is None else self.score_bias[..., rows, keys]
        if log_weights is not None:
            added = log_weights[keys] if added is None else added + log_weights[keys]
        shift = self.shift(num_keys or k.shape[-2], called)
        if shift is not None:
            shift = torch.as_tensor(shift, dtype=k.dtype, device=k.device)
            added = shift if added is None else added + shift
        visible = self.visible(rows, keys, k.device)
        if visible is None:
            return added
        visible = visible | ~visible.any(-1, keepdim=True)
        if added is None:
            added = torch.zeros((), dtype=k.dtype, device=k.device)
        return torch.where(visible, added, -torch.inf)

    @final
    def visible(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Tensor | None:
        """True where a row may attend to a key, ``(h or none, rows, keys)``; None: everywhere."""
        found = None
        if self.causal or self.window is not None:
            row = torch.arange(rows.start, rows.stop, device=device)[:, None]
            behind = row - torch.arange(keys.start, keys.stop, device=device)
            found = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
            if self.window is not None:
                found &= behind < self.window
        if self.mask is not None:
            part = self.mask[..., rows, keys]
            found = part if found is None else part & found
        return found

    @final
    def empty_rows(self, k: Tensor) -> Tensor | None:
        """Rows that may attend to no token, ``(n,)`` or ``(h, n)``; None if there are none."""
        if self.mask is None:
            return None
        rows, keys = slice(0, self.mask.shape[-2]), slice(0, k.shape[-2])
        visible = self.visible(rows, keys, k.device)
        assert visible is not None
        empty = ~visible.any(-1)
        if not bool(empty.any()):
            return None
        if self.weighting.all_rows:
            raise InputError("`mask` should let every row read some token. Found an empty row.")
        return empty


def select_heads(t: Tensor, heads: slice) -> Tensor:
    """The given heads of a tensor ``(h, rows, keys)``, or the tensor itself if heads share it."""
    return t[heads] if t.ndim == 3 else t
