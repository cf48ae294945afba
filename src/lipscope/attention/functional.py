"""Attention as a function of queries, keys and values: twice differentiable in linear memory."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.passes import Rules, attend
from lipscope.errors import InputError, check_finite_number, shown


def attention(
    q: Float[Tensor, "*b n k"],
    k: Float[Tensor, "*c m k"],
    v: Float[Tensor, "*d m v"],
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "*e n v"]:
    """``softmax(scale q k^T + mask) v``, as ``scaled_dot_product_attention`` computes it.

    Memory grows with n and m, not with their product, for the value and for its derivatives:
    forward mode (``torch.func.jvp``, dual tensors), reverse mode, and each over the other, as
    training through a Jacobian-vector product and Hessian-vector products ask for; ``vmap`` of
    all of them. Third derivatives, and forward over forward, are refused. The gradient of an
    additive mask is as large as the mask.

    Half precision is computed in float32 and rounded once. Under autocast the inputs are cast
    as for torch's function. ``torch.compile`` leaves the call out of its graph.

    Args:
        q: Queries, any number of axes in front.
        k: Keys; the axes in front broadcast against those of ``q``. Fewer heads (third axis from
            the end) are shared by groups of query heads, as with ``enable_gqa=True``.
        v: Values, likewise.
        mask: Broadcastable to ``(..., n, m)``: booleans, True where a query may read a key, or
            numbers that are added to the scores, with gradients if they want some. A query that
            may read nothing gives zero, and has a derivative of zero. What no query may read may
            be anything, NaN too.
        causal: Query i reads keys j <= i only; with a mask, those that both allow.
        scale: ``1 / sqrt(k)`` if None.

    Returns:
        ``(..., n, v)``, in the dtype of the inputs.

    Raises:
        InputError: If shapes or dtypes do not fit together, or there is no key.

    Source: derived here (``docs/theory/attention-jacobian.md``).

    >>> q = torch.zeros(2, 1)
    >>> attention(q, q, torch.tensor([[1.0], [3.0]]), causal=True).flatten().tolist()
    [1.0, 2.0]
    """
    _check(q, k, v, mask, causal, scale)
    dtype = q.dtype
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    lead = _lead(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    q = q.to(exact) * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = (_flat(t, lead) for t in (q, k.to(exact), v.to(exact)))
    own: tuple[int, ...] = ()
    if mask is not None:
        mask, own = _masks(mask, (*lead, n, m), dtype)
        unread = (~mask if mask.dtype == torch.bool else mask == -torch.inf).all(-2)
        k, v = (t.masked_fill(unread[list(own), :, None], 0.0) for t in (k, v))
    o = attend(Rules(causal, own), q, k, v, mask)
    return o.to(dtype).reshape(*lead, n, v.shape[-1])


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: object, scale: object
) -> None:
    for name, t in (("q", q), ("k", k), ("v", v), ("mask", mask)):
        if not isinstance(t, Tensor) and (name != "mask" or t is not None):
            raise InputError(f"`{name}` should be a tensor. Found `{type(t).__name__}`.")
    if not isinstance(causal, bool):
        raise InputError(f"`causal` should be True or False. Found `causal = {shown(causal)}`.")
    if scale is not None and not isinstance(scale, Tensor):
        check_finite_number("scale", scale)
    if any(isinstance(t, Tensor) and t.is_meta for t in (q, k, v, mask)):
        raise InputError("`q`, `k` and `v` should hold numbers. Found tensors on the meta device.")
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise InputError(
            "`q`, `k` and `v` should have shapes (..., n, k), (..., m, k) and (..., m, v). "
            f"Found {shapes}."
        )
    if not k.shape[-2] or not k.shape[-1]:
        raise InputError(
            f"`k` should hold at least one key, of one entry or more. Found {tuple(k.shape)}."
        )
    kinds = {t.dtype for t in (q, k, v)}
    mixed = len(kinds) > 1 and not torch.is_autocast_enabled(q.device.type)
    if mixed or not all(kind.is_floating_point for kind in kinds):
        found = ", ".join(str(t.dtype)[6:] for t in (q, k, v))
        raise InputError(f"`q`, `k` and `v` should be floats of one dtype. Found {found}.")


def _lead(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The axes in front, after heads of keys and values are shared."""
    leads = [t.shape[:-2] for t in (q, k, v)]
    heads = max([1, *(lead[-1] for lead in leads if lead)])
    leads = [
        (*lead[:-1], heads) if lead and lead[-1] and heads % lead[-1] == 0 else lead
        for lead in leads
    ]
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise InputError(
            "The axes of `q`, `k` and `v` before the last two should broadcast, or the heads of "
            f"`q` be a multiple of the others. Found shapes {found}."
        ) from None


def _flat(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """All axes in front as one, heads shared by groups repeated."""
    if t.ndim > 2 and 1 < t.shape[-3] < lead[-1]:
        t = t.repeat_interleave(lead[-1] // t.shape[-3], dim=-3)
    return t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), *t.shape[-2:])


def _masks(
    mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, tuple[int, ...]]:
    """Different masks as ``(c, n or 1, m or 1)``, and which of them is that of each head."""
    if mask.dtype not in (torch.bool, dtype, torch.float32):
        raise InputError(
            f"`mask` should hold booleans or {str(dtype)[6:]}. Found {str(mask.dtype)[6:]}."
        )
    try:
        mask.expand(shape)
    except RuntimeError:
        raise InputError(
            f"`mask` should broadcast to {shape}. Found {tuple(mask.shape)}."
        ) from None
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    lead = mask.shape[:-2]
    which = torch.arange(math.prod(lead)).view(lead).expand(shape[:-2])
    return mask.reshape(-1, *mask.shape[-2:]), tuple(which.flatten().tolist())
