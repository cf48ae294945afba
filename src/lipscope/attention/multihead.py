"""Drop-in replacement for ``torch.nn.MultiheadAttention`` with any attention variant."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention import functional
from lipscope.attention.core import Attention, check_as_written, variants
from lipscope.attention.kinds.dot_product import DotProduct
from lipscope.attention.layer import arguments, returned, uncast
from lipscope.attention.weighting import Softmax
from lipscope.errors import InputError, check_count
from lipscope.linalg import Operator

_WEIGHTS = ("query", "key", "value", "output")
_BIASES = tuple(f"{name}_bias" for name in _WEIGHTS)


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention of any variant with the interface of ``torch.nn.MultiheadAttention``.

    Its submodule ``attention`` is the layer that `lipscope.sigma`, `measure` and `bounds`
    analyse: the trained layer is the measured layer. Weights are initialised as in torch's module
    (Xavier uniform for queries, keys and values, zero biases), identically for a given seed.

    ``state_dict()`` holds ``attention.query``, ``attention.key``, ``attention.value`` and
    ``attention.output``, each ``(embed_dim, embed_dim)``, ``attention.query_bias`` and so on if
    there are biases, and the variant's other tensors. The state of an ``nn.MultiheadAttention``
    can be loaded if the variant has the same weights; dot products then give the same output.

    Not covered: appended keys (``add_bias_kv``, ``add_zero_attn``), keys or values of another
    width (``kdim``, ``vdim``), nested tensors. A query that may attend to nothing outputs zero
    heads; torch returns NaN if weights are requested and zero if not.

    Args:
        num_heads: Number of heads, a divisor of ``embed_dim``.
        variant: Name of a variant: ``dot-product``, ``l2``, ``scaled-cosine``, …, or its class.
        dropout: Dropout probability of attention weights in training.
        bias: Whether projections have biases; None: if the variant supports them.
        batch_first: Tensors are ``(batch, tokens, width)``; else ``(tokens, batch, width)``.
        **options: Further options of the variant, such as ``temperature`` or ``causal``; a
            ``nn.Parameter`` is trained.

    Raises:
        InputError: If sizes do not fit, the variant is unknown or an option is missing.

    >>> layer = MultiheadAttention(8, 2, "l2", batch_first=True)
    >>> y, weights = layer(*[torch.zeros(1, 3, 8)] * 3)
    >>> y.shape, weights.shape
    (torch.Size([1, 3, 8]), torch.Size([1, 3, 3]))
    """

    attention: Attention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        variant: str | type[Attention] = "dot-product",
        *,
        dropout: float = 0.0,
        bias: bool | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super(nn.MultiheadAttention, self).__init__()
        kind = _variant_class(variant)
        taken = arguments(kind)
        _check_sizes(kind, taken, embed_dim, num_heads, dropout)
        _check_options(kind, taken, options, bias)
        if not isinstance(batch_first, bool):
            raise InputError(f"`batch_first` should be True or False. Found `{batch_first!r}`.")
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        # Attributes that torch's encoder layers check before their fused path.
        self._qkv_same_embed_dim, self.add_zero_attn = True, False
        self.in_proj_weight = self.in_proj_bias = self.bias_k = self.bias_v = None
        start = nn.MultiheadAttention(
            embed_dim, num_heads, bias=bias is not False, device=device, dtype=dtype
        )
        found = _split_packed(start.state_dict())
        weights = {n: nn.Parameter(t.clone()) for n, t in found.items() if n in taken}
        heads = {"heads": num_heads} if "heads" in taken else {}
        self.attention = kind(**weights, **heads, **options)
        self.register_load_state_dict_pre_hook(_from_torch)

    def extra_repr(self) -> str:
        """Options not shown by the inner layer."""
        parts = [f"dropout {self.dropout}"] if self.dropout else []
        return ", ".join([*parts, *["batch first"] * self.batch_first])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs, and weights if requested, as returned by torch's module.

        Args:
            query: ``(n, embed_dim)``, or batched as set by ``batch_first``.
            key: Likewise, m tokens.
            key_padding_mask: ``(batch, m)``: True, or -inf, for keys to be ignored.
            need_weights: Whether to return weights. If not, dot products with more scores than
                fit in cache are computed in blocks, in memory linear in n (`lipscope.attention`).
            attn_mask: ``(n, m)`` or ``(batch * num_heads, n, m)``: True, or -inf, where a query may
                not attend to a key; other numbers are added to the scores.
            average_attn_weights: Whether to average weights over heads.
            is_causal: Hint that ``attn_mask`` is causal; an error without a mask, as in torch.

        Returns:
            Output, in the shape of ``query``; weights, ``(batch, n, m)`` or
            ``(batch, num_heads, n, m)``, or None.

        Raises:
            InputError: If shapes do not fit, or the variant does not accept the mask.
        """
        layer, single = self.attention, query.ndim == 2
        self._check(query, key, value, attn_mask, is_causal=is_causal)
        axis = 1 if single or not self.batch_first else 0
        x, c, w = (t.unsqueeze(1) if single else t for t in (query, key, value))
        x, c, w = (t.movedim(axis, 0) for t in (x, c, w))
        mask = self._mask(x, c, key_padding_mask, attn_mask)
        if key_padding_mask is not None:  # padding may hold anything, even NaN
            padding = key_padding_mask
            hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
            unread = hidden.reshape(*c.shape[:2], 1)
            c, w = c.masked_fill(unread, 0.0), w.masked_fill(unread, 0.0)
        q, k, v = layer.project(x, None if key is query and key_padding_mask is None else c)
        if value is not key:
            v = layer.project(x, w)[2]
        live = self.dropout if self.training else 0.0
        p, dtype = None, returned(x)
        if need_weights or live or not self._in_blocks(q, k):
            p = layer.weights(q, k, added=mask)
            p = nn.functional.dropout(p, live) if live else p
            with uncast(x.device):
                o, p = p @ v, p.to(dtype)
        else:
            o = functional.attention(q, k, v, mask=mask, causal=layer.causal, scale=1.0)
        y = layer.project_out(o.transpose(-3, -2).flatten(-2).to(dtype)).movedim(0, axis)
        y = y.squeeze(1) if single else y
        if not need_weights or p is None:
            return y, None
        p = p.mean(1) if average_attn_weights else p
        return y, p.squeeze(0) if single else p

    @property
    def out_proj(self) -> nn.Linear:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The output projection as an ``nn.Linear`` that shares the weights, for torch's use."""
        weight, bias = self.attention.output, self.attention.output_bias
        assert weight is not None
        found = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
        found.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            found.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return found

    def linearise(self, x: Tensor, **options: Any) -> Operator:
        """The Jacobian of self-attention at one input ``(n, d)``; see `Attention.linearise`."""
        return self.as_layer().linearise(_single_input(x), **options)

    def stretch(self, x: Tensor, g: Tensor, e: Tensor, **options: Any) -> Tensor:
        """See `Attention.stretch`."""
        return self.as_layer().stretch(_single_input(x), g, e, **options)

    def as_layer(self) -> Attention:
        """The layer that this module is as self-attention without a mask, `attention`.

        Raises:
            InputError: If the module computes something else: a subclass or a hook may change it.
        """
        check_as_written(self, type(self).__name__)
        kind = type_before_parametrizations(self)
        fixed = {"__call__", "_call_impl", *vars(MultiheadAttention)} - {"__init__", "extra_repr"}
        below = kind.__mro__[: kind.__mro__.index(MultiheadAttention)]
        own = {name for one in below for name, value in vars(one).items() if callable(value)}
        if changed := own & fixed:
            raise InputError(
                f"`{kind.__name__}` should compute what `MultiheadAttention` computes. Found "
                f"another `{min(changed)}`; give its `attention`, if that is meant."
            )
        return self.attention

    def _in_blocks(self, q: Tensor, k: Tensor) -> bool:
        """Whether blockwise `functional.attention` applies and pays off."""
        layer = self.attention
        plain = isinstance(layer, DotProduct) and isinstance(layer.weighting, Softmax)
        other = (layer.mask, layer.window, layer.score_bias, layer.softcap)
        if not plain or any(one is not None for one in other) or torch.compiler.is_compiling():
            return False
        size = q.shape[:-1].numel() * k.shape[-2] * q.element_size()
        return size > functional.BLOCK_BYTES

    def _mask(
        self, x: Tensor, c: Tensor, padding: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """Both masks combined, as additive floats ``(batch or 1, heads or 1, n or 1, m)``."""
        (batch, n), m, found = x.shape[:2], c.shape[1], None
        if (attn_mask is not None or padding is not None) and (why := _unmasked(self.attention)):
            raise InputError(
                "`attn_mask` and `key_padding_mask` should be None for "
                f"{type(self.attention).__name__}, {why}. Found a mask."
            )
        shapes: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
            "attn_mask": (attn_mask, [(n, m), (batch * self.num_heads, n, m)]),
            "key_padding_mask": (padding, [(batch, m), (m,)] if batch == 1 else [(batch, m)]),
        }
        for name, (mask, wanted) in shapes.items():
            if mask is None:
                continue
            if tuple(mask.shape) not in wanted:
                raise InputError(
                    f"`{name}` should have shape {' or '.join(map(str, wanted))}. "
                    f"Found {tuple(mask.shape)}."
                )
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise InputError(f"`{name}` should hold booleans or floats. Found {mask.dtype}.")
            shown = mask.to(x.dtype)
            if mask.dtype == torch.bool:
                shown = torch.zeros_like(shown).masked_fill(mask, -torch.inf)
            if name == "key_padding_mask":
                shown = shown.reshape(batch, 1, 1, m)
            elif mask.ndim == 3:
                shown = shown.unflatten(0, (batch, self.num_heads))
            found = shown if found is None else found + shown
        return found

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
    ) -> None:
        layer, weight = self.attention, self.attention.query
        tensors = (query, key, value)
        kinds = [t.dtype if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
        cast = torch.is_autocast_enabled(weight.device.type)
        if not all(
            kind == weight.dtype or (cast and isinstance(kind, torch.dtype)) for kind in kinds
        ):
            found = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise InputError(
                "`query`, `key` and `value` should be tensors of the dtype of the weights, "
                f"{str(weight.dtype)[6:]}. Found {found}."
            )
        shapes = [tuple(t.shape) for t in tensors]
        batches = [s[:-2] if self.batch_first else s[1:-1] for s in shapes]
        fit = query.ndim in (2, 3) and {len(s) for s in shapes} == {query.ndim}
        fit = fit and {s[-1] for s in shapes} == {self.embed_dim} and shapes[1] == shapes[2]
        if not fit or (query.ndim == 3 and batches[0] != batches[1]):
            first = "batch, tokens" if self.batch_first else "tokens, batch"
            raise InputError(
                f"`query`, `key` and `value` should have shapes (tokens, {self.embed_dim}) or "
                f"({first}, {self.embed_dim}), the last two the same one. "
                f"Found {', '.join(map(str, shapes))}."
            )
        if is_causal and mask is None:
            raise InputError(
                "`is_causal` says what `attn_mask` is. Found no mask; give it, or build the module "
                "with `causal=True`."
            )
        if key is not value and not layer.by_token:
            raise InputError(
                f"`value` should be `key`: {type(layer).__name__} divides by a function of both. "
                "Found two tensors."
            )


def _single_input(x: Tensor) -> Tensor:
    if x.ndim != 2:
        raise InputError(f"`x` should be one input, (tokens, width). Found shape {tuple(x.shape)}.")
    return x


def _variant_class(variant: str | type[Attention]) -> type[Attention]:
    """The class of a variant name: ``scaled-cosine`` for ``ScaledCosineAttention``."""
    if isinstance(variant, type) and issubclass(variant, Attention):
        return variant
    known = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", one.__name__.removesuffix("Attention")).lower(): one
        for one in variants()
    }
    if not isinstance(variant, str) or variant not in known:
        raise InputError(
            f"`variant` should be one of {', '.join(known)}. Found {variant!r}; other arguments "
            "go by their names."
        )
    return known[variant]


def _unmasked(layer: Attention) -> str:
    """The reason why a variant accepts no mask in a call; empty if it accepts one."""
    if "mask" not in layer.fields():
        return "in which every token attends to every other"
    return "whose weights depend on the scores of other rows" if layer.weighting.all_rows else ""


def _check_sizes(
    kind: type[Attention], taken: Any, embed_dim: int, num_heads: int, dropout: float
) -> None:
    check_count("embed_dim", embed_dim)
    check_count("num_heads", num_heads)
    if embed_dim % num_heads:
        raise InputError(
            "`embed_dim` should be a multiple of `num_heads`. "
            f"Found `embed_dim = {embed_dim}`, `num_heads = {num_heads}`."
        )
    if "heads" not in taken and num_heads > 1:
        raise InputError(
            f"`num_heads` should be 1 for {kind.__name__}. Found `num_heads = {num_heads}`."
        )
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise InputError(f"`dropout` should be between 0 and 1. Found `dropout = {dropout!r}`.")


def _check_options(
    kind: type[Attention], taken: Any, options: dict[str, Any], bias: bool | None
) -> None:
    if bias is not None and not isinstance(bias, bool):
        raise InputError(f"`bias` should be True, False or None. Found `bias = {bias!r}`.")
    names = [n for n in taken if n not in ("heads", "groups", *_WEIGHTS, *_BIASES)]
    if unknown := [name for name in options if name not in names]:
        known = f"`{'`, `'.join(names)}` as options" if names else "no options"
        raise InputError(
            f"{kind.__name__} takes {known}. Found `{unknown[0]} = {options[unknown[0]]!r}`; "
            "leave it out."
        )
    needed = [n for n in names if taken[n].default is inspect.Parameter.empty and n not in options]
    if needed:
        raise InputError(
            f"{kind.__name__} needs {', '.join(f'`{name}`' for name in needed)}. Found none; give "
            "it by its name."
        )
    if bias and "query_bias" not in taken:
        raise InputError(
            f"`bias` should be False or None for {kind.__name__}, which has no biases. Found True."
        )


def _split_packed(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The weights of torch's module under this package's names."""
    found: dict[str, Tensor] = {}
    for last, end in (("weight", ""), ("bias", "_bias")):
        if (packed := state.get(f"{prefix}in_proj_{last}")) is not None:
            names = (f"{name}{end}" for name in _WEIGHTS[:3])
            found |= dict(zip(names, packed.chunk(3), strict=True))
        if (output := state.get(f"{prefix}out_proj.{last}")) is not None:
            found[f"output{end}"] = output
    return found


def _from_torch(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Rename the weights of an ``nn.MultiheadAttention`` while loading."""
    for name, tensor in _split_packed(state, prefix).items():
        state[f"{prefix}attention.{name}"] = tensor
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        state.pop(prefix + name, None)
