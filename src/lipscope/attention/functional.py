"""Attention as a function of queries, keys and values: twice differentiable in linear memory.

Weights are recomputed block by block. Four maps: the output ``o``, its derivative ``J e``
(`_Push`), the transpose ``J^T g`` (`_Pull`), and ``h(e, g)`` (`_Bend`), the gradient of
``<g, J e>`` in queries, keys and values. ``J e`` has the derivatives ``J^T g`` and ``h(e, g)``;
``J^T g`` along ``e`` has ``h(e, g)`` again, as second derivatives are symmetric, and ``J e``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch._compile import _disable_dynamo

from lipscope.attention.jacobian import ScoreBlock, score_blocks
from lipscope.attention.layer import exact
from lipscope.errors import InputError, check_finite_number, shown

BLOCK_BYTES = 2**22  # per block of scores: four or five such tensors fit in a core's cache


@dataclass(frozen=True)
class Rules:
    """Non-tensor options of the scores: causality and the mask of each head."""

    causal: bool
    mask_of_head: tuple[int, ...]
    mask_gradient: bool = False

    def part(self, masks: Tensor, block: ScoreBlock) -> Tensor:
        """The masks ``(c, n or 1, m or 1)`` of a block; a single one if all its heads share it."""
        index = self.mask_of_head[block.heads]
        part = _in_block(masks, block)
        return part[index[0]] if len(set(index)) == 1 else part[list(index)]

    def spread(self, masks: Tensor, block: ScoreBlock, gs: Tensor) -> None:
        """Add the cotangent of a block of scores to the cotangent of the masks."""
        part = _in_block(masks, block)
        index = torch.tensor(self.mask_of_head[block.heads], device=gs.device)
        part.index_add_(0, index, gs.sum_to_size(len(gs), *part.shape[1:]))


def _in_block(masks: Tensor, block: ScoreBlock) -> Tensor:
    rows = block.rows if masks.shape[1] > 1 else slice(None)
    return masks[:, rows, block.keys if masks.shape[2] > 1 else slice(None)]


def _weighted_blocks(
    rules: Rules, q: Tensor, k: Tensor, mask: Tensor | None, more: int = 0
) -> Iterator[tuple[ScoreBlock, Tensor, list[Tensor]]]:
    """Yield each block with its weights and 1 + ``more`` scratch tensors of its size."""
    limit = BLOCK_BYTES // q.element_size()
    blocks = score_blocks(len(q), q.shape[1], k.shape[1], limit, causal=rules.causal)
    scratch = q.new_empty(2 + more, max((b.size for b in blocks), default=0))
    for block in blocks:
        s, p, *rest = (room[: block.size].view(block.shape) for room in scratch)
        torch.bmm(q[block.heads, block.rows], k[block.heads, block.keys].mT, out=s)
        if rules.causal:
            unmasked = torch.ones(block.shape[1:], dtype=torch.bool, device=q.device)
            s.masked_fill_(unmasked.triu_(1 + block.rows.start), -torch.inf)
        if mask is not None and mask.dtype == torch.bool:
            s.masked_fill_(~rules.part(mask, block), -torch.inf)
        elif mask is not None:
            s.add_(rules.part(mask, block))
        torch.softmax(s, dim=-1, out=p)
        if mask is not None:  # torch's softmax of a fully masked row is NaN
            p.masked_fill_(s.amax(-1, keepdim=True) == -torch.inf, 0.0)
        yield block, p, [s, *rest]


def _score_change(
    rules: Rules, block: ScoreBlock, left: Tensor, right: Tensor, dmask: Tensor | None, room: Tensor
) -> Tensor:
    """``ds = dq k^T + q dk^T + dmask`` of a block, for ``[dq, q]`` and ``[k, dk]``."""
    rows, keys = left[block.heads, block.rows], right[block.heads, block.keys]
    ds = torch.bmm(rows, keys.mT, out=room)
    return ds if dmask is None else ds.add_(rules.part(dmask, block))


class _Blockwise(torch.autograd.Function):
    """A blockwise pass; the first arguments are ``rules, q, k, v, masks``, heads first."""

    masks: tuple[int, ...] = (4,)  # which arguments are masks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rules, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @classmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[Any, Any]:
        """Fold the new axis into the heads; unbatched masks stay shared."""
        size, rules = info.batch_size, inputs[0]
        several = rules.mask_gradient or any(in_dims[i] is not None for i in cls.masks)
        flat: list[Any] = []
        for i, (t, axis) in enumerate(zip(inputs[1:], in_dims[1:], strict=True), start=1):
            if t is None or (i in cls.masks and not several):
                flat.append(t)
                continue
            every = t.expand(size, *t.shape) if axis is None else t.movedim(axis, 0)
            flat.append(every.flatten(0, 1))
        count = len(flat[3]) // size if several and flat[3] is not None else 0
        index = tuple(i * count + j for i in range(size) for j in rules.mask_of_head)
        found = cls.apply(replace(rules, mask_of_head=index), *flat)
        if isinstance(found, Tensor):
            return found.unflatten(0, (size, -1)), 0
        parts = [None if t is None else t.unflatten(0, (size, -1)) for t in found]
        return tuple(parts), tuple(None if t is None else 0 for t in parts)


class _Attend(_Blockwise):
    """``o = P v``."""

    @staticmethod
    @exact
    def forward(rules: Rules, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        o = v.new_empty(*q.shape[:2], v.shape[-1])
        for block, p, _ in _weighted_blocks(rules, q, k, mask):
            o[block.heads, block.rows] = torch.bmm(p, v[block.heads, block.keys])
        return o

    @staticmethod
    def backward(ctx: Any, go: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore
        if go is None:
            return (None,) * 5
        return None, *_back(_Pull, ctx, 4, *ctx.saved_tensors, go)

    @staticmethod
    def jvp(ctx: Any, _: Any, *moves: Tensor | None) -> Tensor:  # pyright: ignore
        at = ctx.saved_tensors
        return _Push.apply(ctx.rules, *at, *_filled(at, moves))  # pyright: ignore


class _Push(_Blockwise):
    """``J e``: ``do = dP v + P dv`` with ``dP = P (ds - rowsum(P ds))``."""

    masks = (4, 8)

    @staticmethod
    @exact
    def forward(rules: Rules, *inputs: Any) -> Tensor:
        q, k, v, mask, dq, dk, dv, dmask = inputs
        left, right = torch.cat([dq, q], -1), torch.cat([k, dk], -1)
        do = v.new_empty(*q.shape[:2], v.shape[-1])
        for block, p, (room,) in _weighted_blocks(rules, q, k, mask):
            keys = (block.heads, block.keys)
            dp = _score_change(rules, block, left, right, dmask, room).mul_(p)
            dp.addcmul_(p, dp.sum(-1, keepdim=True), value=-1)
            do[block.heads, block.rows] = torch.bmm(dp, v[keys]).baddbmm_(p, dv[keys])
        return do

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore
        at, e = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        first = second = (None,) * 4
        if g is not None and any(ctx.needs_input_grad[1:5]):
            first = _back(_Bend, ctx, 4, *at, *e, g)
        if g is not None and any(ctx.needs_input_grad[5:9]):
            second = _back(_Pull, ctx, 8, *at, g)
        return None, *first, *second

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Tensor:  # pyright: ignore
        raise InputError(_TOO_MANY.format("a forward-mode derivative in forward mode"))


class _Pull(_Blockwise):
    """``J^T g``: with ``gp = g v^T`` and ``gs = P (gp - rowsum(P gp))``, ``(gs k, gs^T q, P^T g)``.

    The cotangent of the masks, the last output, is None unless requested.
    """

    @staticmethod
    @exact
    def forward(
        rules: Rules, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        gq, gk, gv, gmask = _cotangents(rules, q, k, v, mask)
        for block, p, (room,) in _weighted_blocks(rules, q, k, mask):
            rows, keys = (block.heads, block.rows), (block.heads, block.keys)
            gs = torch.bmm(g[rows], v[keys].mT, out=room).mul_(p)
            gs.addcmul_(p, gs.sum(-1, keepdim=True), value=-1)
            gq[rows] = torch.bmm(gs, k[keys])
            gk[keys].baddbmm_(gs.mT, q[rows])
            gv[keys].baddbmm_(p.mT, g[rows])
            if gmask is not None:
                rules.spread(gmask, block, gs)
        return gq, gk, gv, gmask

    @staticmethod
    def backward(ctx: Any, *e: Tensor | None) -> tuple[Any, ...]:
        *at, g = ctx.saved_tensors
        moves = _filled(at, e)
        first = (
            _back(_Bend, ctx, 4, *at, *moves, g) if any(ctx.needs_input_grad[1:5]) else (None,) * 4
        )
        last = _Push.apply(ctx.rules, *at, *moves) if ctx.needs_input_grad[5] else None
        return None, *first, last

    @staticmethod
    def jvp(ctx: Any, _: Any, *moves: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore
        (*at, g), (*e, dg) = ctx.saved_tensors, moves
        rules = ctx.rules
        found = _Bend.apply(rules, *at, *_filled(at, e), g)
        if dg is None:
            return found  # pyright: ignore
        more: Any = _Pull.apply(rules, *at, dg)
        return tuple(
            None if a is None else a + b
            for a, b in zip(found, more, strict=True)  # pyright: ignore
        )


class _Bend(_Blockwise):
    """``h(e, g)``, the gradient of ``<g, J e>`` in queries, keys, values and masks.

    With ``a = ds - rowsum(P ds)``, ``b = gp - rowsum(P gp)`` and ``t = a b + g dv^T``:
    ``gs = P (t - rowsum(P t))``, and ``(gs k + P b dk, gs^T q + (P b)^T dq, (P a)^T g)``.
    """

    masks = (4, 8)

    @staticmethod
    @exact
    def forward(rules: Rules, *inputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, mask, dq, dk, dv, dmask, g = inputs
        left, right = torch.cat([dq, q], -1), torch.cat([k, dk], -1)
        gq, gk, gv, gmask = _cotangents(rules, q, k, v, mask)
        for block, p, rooms in _weighted_blocks(rules, q, k, mask, more=3):
            rows, keys = (block.heads, block.rows), (block.heads, block.keys)
            a = _score_change(rules, block, left, right, dmask, rooms[0])
            b = torch.bmm(g[rows], v[keys].mT, out=rooms[1])
            t = torch.bmm(g[rows], dv[keys].mT, out=rooms[2])
            a.sub_(torch.mul(p, a, out=rooms[3]).sum(-1, keepdim=True))
            b.sub_(torch.mul(p, b, out=rooms[3]).sum(-1, keepdim=True))
            gs = t.addcmul_(a, b).mul_(p)
            gs.addcmul_(p, gs.sum(-1, keepdim=True), value=-1)
            pa, pb = a.mul_(p), b.mul_(p)
            gq[rows] = torch.bmm(gs, k[keys]).baddbmm_(pb, dk[keys])
            gk[keys].baddbmm_(gs.mT, q[rows]).baddbmm_(pb.mT, dq[rows])
            gv[keys].baddbmm_(pa.mT, g[rows])
            if gmask is not None:
                rules.spread(gmask, block, gs)
        return gq, gk, gv, gmask

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise InputError(_TOO_MANY.format("a third derivative"))

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        raise InputError(_TOO_MANY.format("a third derivative"))


_TOO_MANY = (
    "`attention` should be differentiated at most twice, at most once in forward mode. "
    "Found {}; write softmax(scale q k^T) v for that."
)


def _cotangents(
    rules: Rules, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Buffers for the cotangents of queries, keys, values and, if requested, masks."""
    gmask = torch.zeros_like(mask) if mask is not None and rules.mask_gradient else None
    return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), gmask


def _filled(at: Any, moves: Any) -> list[Tensor | None]:
    """Tangents of queries, keys, values and masks; None becomes zeros except for masks."""
    *first, last = moves
    found = [torch.zeros_like(x) if e is None else e for x, e in zip(at, first, strict=False)]
    return [*found, last]


def _back(kind: type[_Blockwise], ctx: Any, masks: int, *inputs: Any) -> Any:
    return kind.apply(replace(ctx.rules, mask_gradient=ctx.needs_input_grad[masks]), *inputs)


# Like `torch.compiler.disable`, without importing Dynamo first: Dynamo cannot trace functions with
# custom forward-mode derivatives, and would unroll the blocks of the others.
@_disable_dynamo
def attend(rules: Rules, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """``P v``; arguments as for `_Attend`."""
    return cast(Tensor, _Attend.apply(rules, q, k, v, mask))


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

    Memory grows with n and m, not with their product, for the value and all derivatives:
    forward mode (``torch.func.jvp``, dual tensors), reverse mode and their compositions, as
    needed for Hessian-vector products and for training through Jacobian-vector products, and
    ``vmap`` of all of them. Third derivatives and forward over forward raise an error. The
    gradient of an additive mask is as large as the mask.

    Half precision is computed in float32 and rounded once. Under autocast the inputs are cast
    as for torch's function. ``torch.compile`` leaves the call out of its graph.

    Args:
        k: Keys; leading axes broadcast against those of ``q``. Fewer heads (third axis from
            the end) are shared by groups of query heads, as with ``enable_gqa=True``.
        v: Values, likewise.
        mask: Broadcastable to ``(..., n, m)``: booleans, True where a query may attend to a key,
            or floats added to the scores (gradients supported). A query that may attend to
            nothing outputs zero and has a zero derivative. Keys that no query may attend to may
            hold anything, even NaN.
        causal: Query i attends only to keys j <= i; combined with a mask, both must allow it.
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
    _check_queries(q, k, v, mask, causal, scale)
    dtype = q.dtype
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    lead = _lead(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    q = q.to(exact) * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = (_flat(t, lead) for t in (q, k.to(exact), v.to(exact)))
    index: tuple[int, ...] = ()
    if mask is not None:
        mask, index = _masks(mask, (*lead, n, m), dtype)
        unread = (~mask if mask.dtype == torch.bool else mask == -torch.inf).all(-2)
        k, v = (t.masked_fill(unread[list(index), :, None], 0.0) for t in (k, v))
    o = attend(Rules(causal, index), q, k, v, mask)
    return o.to(dtype).reshape(*lead, n, v.shape[-1])


def _check_queries(
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
            f"`k` should hold at least one key with at least one entry. Found {tuple(k.shape)}."
        )
    kinds = {t.dtype for t in (q, k, v)}
    mixed = len(kinds) > 1 and not torch.is_autocast_enabled(q.device.type)
    if mixed or not all(kind.is_floating_point for kind in kinds):
        found = ", ".join(str(t.dtype)[6:] for t in (q, k, v))
        raise InputError(f"`q`, `k` and `v` should be floats of one dtype. Found {found}.")


def _lead(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The leading axes after sharing of key/value heads."""
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
    """Flatten the leading axes, repeating heads shared by groups."""
    if t.ndim > 2 and 1 < t.shape[-3] < lead[-1]:
        t = t.repeat_interleave(lead[-1] // t.shape[-3], dim=-3)
    return t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), *t.shape[-2:])


def _masks(
    mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, tuple[int, ...]]:
    """The distinct masks as ``(c, n or 1, m or 1)``, and the index of each head's mask."""
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
