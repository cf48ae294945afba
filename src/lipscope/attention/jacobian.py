"""The closed-form Jacobian of an attention layer, computed in blocks of heads and rows.

Notation: tokens are rows; ``q, k, v`` have heads as the leading axis; ``p`` is a row of
attention weights and ``o = p v``. Logits are the scores, soft-capped if the layer does so, plus
bias and mask; the weighting turns logits into weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

from lipscope.attention.layer import Layer, Map, MovingSide, NormAt, Rotary, exact, select_heads
from lipscope.attention.weighting import At

_FEWEST_ROWS = 128  # per chunk while heads can be split instead: shorter products are slow
# Causal masks and windows are followed in this many steps: each step costs calls and saves half of
# its square. Shorter steps do not pay.
_STEPS, _SMALLEST_STEP = 8, 64


@dataclass(frozen=True)
class ScoreBlock:
    """A slice of heads and rows, and the keys that these rows may attend to."""

    heads: slice
    rows: slice
    keys: slice
    index: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of heads, rows and keys."""
        return tuple(s.stop - s.start for s in (self.heads, self.rows, self.keys))

    @property
    def size(self) -> int:
        """Number of scores."""
        heads, rows, keys = self.shape
        return heads * rows * keys


def score_blocks(
    heads: int,
    n: int,
    m: int,
    limit: int,
    *,
    causal: bool = False,
    window: int | None = None,
    all_rows: bool = False,
) -> list[ScoreBlock]:
    """Blocks of at most ``limit`` scores, or of the fewest rows of one head (``all_rows``: all)."""
    fewest = n if all_rows else min(n, _FEWEST_ROWS)
    together = max(1, min(heads, limit // (m * max(1, fewest))))
    rows = max(1, min(n, limit // (m * together)))
    if causal:
        rows = min(rows, max(_SMALLEST_STEP, -(-n // _STEPS)))
    if window is not None:
        rows = min(rows, max(_SMALLEST_STEP, window // _STEPS))
    if all_rows:
        rows = n
    found: list[ScoreBlock] = []
    for h in range(0, heads, together):
        for i in range(0, n, rows):
            chunk = slice(i, min(i + rows, n))
            part = slice(h, min(h + together, heads))
            found.append(ScoreBlock(part, chunk, reach(chunk, m, causal, window), len(found)))
    return found


def reach(rows: slice, num_keys: int, causal: bool, window: int | None) -> slice:
    """The keys that any of these rows may attend to under a causal mask or window."""
    last = min(rows.stop, num_keys) if causal else num_keys
    first = 0 if window is None else rows.start - window + 1
    return slice(min(max(first, 0), last - 1), last)


# A chunk of scores fits near the last-level cache; larger chunks are memory-bound.
CHUNK_BYTES = 2**24
_TOGETHER_BYTES = 2**24  # limit for the data of vectors multiplied together
SURE = 1e-4  # a smaller shift of the scores changes each weight by less than this relative amount
_SHARE = 0.5  # of the memory, for stored weights; the solver uses the rest


class ChunkedCore:
    """``(dq, dk, dv) -> do`` and its transpose at one input, by blocks of heads and rows.

    Blocks omit keys that a causal mask or a window hides from all of their rows. Stored weights
    take at most half of ``memory`` bytes. The output matches the layer if values include their
    bias (``biased``); derivatives do not need it if `Layer.bias_moves` is false.
    """

    def __init__(
        self,
        layer: Layer,
        x: Tensor,
        memory: int,
        context: Tensor | None = None,
        log_weights: Tensor | None = None,
        *,
        biased: bool = True,
    ) -> None:
        self.layer, self.weighting, self.log_weights = layer, layer.weighting, log_weights
        parts = layer.project(x, context, biased=biased)
        self.q, self.k, self.v = (t.contiguous() for t in parts)
        with torch.autocast(x.device.type, enabled=False):
            self._attend(memory)

    def _attend(self, memory: int) -> None:
        """Compute the outputs and the quantities that the derivatives need."""
        layer, (heads, n, _) = self.layer, self.q.shape
        self.blocks = score_blocks(
            heads,
            n,
            self.k.shape[1],
            int(min(CHUNK_BYTES, memory // 8)) // self.q.element_size(),
            causal=layer.causal,
            window=layer.window,
            all_rows=self.weighting.all_rows,
        )
        # A soft cap also stores its slope.
        kept = self.weighting.kept + (layer.softcap is not None)
        total = sum(b.size for b in self.blocks) * self.q.element_size()
        fits = kept * total <= _SHARE * memory
        # All passes over scores reuse this memory: fresh pages cost as much as the flops.
        largest = max(b.size for b in self.blocks)
        self.scratch = self.q.new_empty(1 if fits else 2, largest)
        self.o = self.v.new_empty(heads, n, self.v.shape[-1])
        # With weights that add up to 1, derivatives depend only on differences of values:
        # subtracting their mean avoids its rounding error.
        self.middle = self.v.mean(-2, keepdim=True) if self.weighting.normalised else None
        # Head and row indices, by block, of rows with constant weights.
        self.settled: list[tuple[Tensor, ...] | None] = []
        empty = layer.empty_rows(self.k)
        self.empty = None if empty is None else empty[..., None]
        # Either the weights are stored, or one number per row to recompute them.
        self.stored: list[tuple[At, Tensor | None]] = []
        self.statistics: list[Tensor | None] = []
        for block in self.blocks:
            s, slope = self._logits(block)
            if fits:
                at = self.weighting.at(s)
                self.stored.append((at, slope))
            else:
                self.statistics.append(self.weighting.statistic(s))
                at = self.weighting.again(s, self.statistics[-1])
            self.o[block.heads, block.rows] = torch.bmm(at[0], self.v[block.heads, block.keys])
            self.settled.append(self._settled(at[0]))
        if self.empty is not None:
            self.o.masked_fill_(self.empty, 0.0)
        self.apart = (self.v, self.o)
        if self.middle is not None:
            self.apart = (self.v - self.middle, self.o - self.middle)

    def _settled(self, p: Tensor) -> tuple[Tensor, ...] | None:
        """Rows in which one token has all the weight, up to rounding: their derivative is zero.

        Otherwise the two halves of ``w_j (v_j - o)`` would cancel only up to rounding errors as
        large as the scores.
        """
        if not self.weighting.normalised:
            return None
        head, row = (p.amax(-1) == 1.0).nonzero(as_tuple=True)
        return (head, row) if len(row) else None

    def doubt(self) -> float:
        """The largest rounding error of a score that may change a weight."""
        info, cap = torch.finfo(self.q.dtype), self.layer.softcap
        shift = info.eps * self.layer.score_size(self.q, self.k)
        shift = shift if cap is None else shift.clamp_max(1.5 * cap * info.eps)
        if not float(shift.max()) > SURE:
            return 0.0
        worst = 0.0
        for block in self.blocks:
            part = shift[block.heads, block.rows]
            open_ = self.weighting.open(self._logits(block)[0], part)
            worst = max(worst, float(part.where(open_, 0.0).max()))
        return worst

    def _room(self, block: ScoreBlock, which: int = 0) -> Tensor:
        return self.scratch[which, : block.size].view(block.shape)

    def _logits(self, block: ScoreBlock) -> tuple[Tensor, Tensor | None]:
        """Logits of a block, and the soft cap's slope there, ``1 - tanh(s / c)²``."""
        q, k = self.q[block.heads, block.rows], self.k[block.heads, block.keys]
        s = self.layer.score(q, k, out=self._room(block))
        cap, slope = self.layer.softcap, None
        if cap is not None:
            s = s.div_(cap).tanh_()
            slope = 1 - s.square()
            s = s.mul_(cap)
        bias = self.layer.bias(self.k, block.rows, block.keys, self.log_weights)
        return s if bias is None else s.add_(select_heads(bias, block.heads)), slope

    def _at(self, block: ScoreBlock) -> tuple[At, Tensor | None]:
        """The stored state of the weighting for a block, and the slope of the soft cap."""
        if self.stored:
            return self.stored[block.index]
        s, slope = self._logits(block)
        return self.weighting.again(s, self.statistics[block.index]), slope

    def joined(self, cores: Sequence[ChunkedCore]) -> ChunkedCore:
        """A core with the heads of several cores that have this shape and store their weights."""
        joint, heads = copy.copy(self), len(self.q)
        joint.q, joint.k, joint.v, joint.o = (
            torch.cat([getattr(one, name) for one in cores]) for name in ("q", "k", "v", "o")
        )
        v, o = zip(*(one.apart for one in cores), strict=True)
        joint.apart = torch.cat(v), torch.cat(o)
        joint.blocks = [replace(block, heads=slice(0, heads * len(cores))) for block in self.blocks]
        joint.scratch = self.q.new_empty(1, max(block.size for block in joint.blocks))
        joint.stored, joint.settled = [], []
        for block in self.blocks:
            ats, slopes = zip(*(one.stored[block.index] for one in cores), strict=True)
            at = tuple(torch.cat(same) for same in zip(*ats, strict=True))
            joint.stored.append((at, None if slopes[0] is None else torch.cat(slopes)))
            still = [
                (head + heads * i, row)
                for i, one in enumerate(cores)
                if (settled := one.settled[block.index]) is not None
                for head, row in [settled]
            ]
            joint.settled.append(
                tuple(torch.cat(same) for same in zip(*still, strict=True)) if still else None
            )
        return joint

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """``do``, shape ``(h, n, d_v)``, for ``dq, dk, dv`` with heads in front."""
        do, (v, o) = torch.empty_like(self.o), self.apart
        for block in self.blocks:
            rows, keys = (block.heads, block.rows), (block.heads, block.keys)
            at, slope = self._at(block)
            ds = self.layer.score_jvp(
                self.q[rows], self.k[keys], dq[rows], dk[keys], out=self._room(block, -1)
            )
            ds = ds if slope is None else ds.mul_(slope)
            if (still := self.settled[block.index]) is not None:
                ds[still] = 0.0
            do[rows] = self.weighting.push(at, ds, v[keys], dv[keys], o[rows])
        return do if self.empty is None else do.masked_fill_(self.empty, 0.0)

    def vjp(self, go: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(gq, gk, gv)`` for the cotangent ``go`` of the heads, ``(h, n, d_v)``."""
        gq = torch.empty_like(self.q)
        gk, gv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        if self.empty is not None:
            go = go.masked_fill(self.empty, 0.0)
        v, o = self.apart
        mean = (go * o).sum(-1, keepdim=True)
        for block in self.blocks:
            rows, keys = (block.heads, block.rows), (block.heads, block.keys)
            at, slope = self._at(block)
            gp = torch.bmm(go[rows], v[keys].mT, out=self._room(block, -1))
            gs = self.weighting.pull(at, gp, mean[rows])
            gs = gs if slope is None else gs.mul_(slope)
            if (still := self.settled[block.index]) is not None:
                gs[still] = 0.0
            gq[rows], more = self.layer.score_vjp(self.q[rows], self.k[keys], gs)
            gk[keys] += more
            gv[keys] += torch.bmm(at[0].mT, go[rows])
        return gq, gk, gv


# --- linear maps into queries, keys and values, and out of the heads

Parts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Projections:
    """The linear maps around the core: into queries, keys and values, and out of the heads."""

    enter: Callable[[Tensor], Parts]  # perturbation -> ``(dq, dk, dv)``, heads first
    enter_t: Callable[[Tensor, Tensor, Tensor], Tensor]  # its transpose
    leave: Callable[[Tensor], Tensor]  # outputs of the heads -> output of the map
    leave_t: Callable[[Tensor], Tensor]  # its transpose
    axes: int  # number of axes of an input
    width_out: int
    # Input and output matrices, and the row counts of queries, keys and values in the first; None
    # if the maps depend on more than these and the layer's options.
    weights: tuple[Tensor, Tensor | None, list[int]] | None = None


def _all_heads(layer: Layer, map: Map, x: Tensor) -> Projections:
    """The linear maps around the core for all heads together, norms linearised at ``x``."""
    query, key, value = layer.projections()
    weight = torch.cat([query * layer.scale, key, value])
    out = layer.output if map == "attention" else None
    sizes = [query.shape[0], key.shape[0], value.shape[0]]
    return _of_weights(layer, weight, out, sizes, _norms_at(layer, x), several=False)


_NO_NORMS: list[NormAt | None] = [None, None, None]


def _of_weights(
    layer: Layer,
    weight: Tensor,
    out: Tensor | None,
    sizes: list[int],
    norms: list[NormAt | None],
    *,
    several: bool,
) -> Projections:
    """The same maps from the matrices into and out of the core.

    With ``several`` inputs ``(b, n, d)``, the core stacks the heads of all inputs. Matrices
    belong to one layer, or are ``(b, ·, ·)`` for layers of the same shape.
    """
    counts, grouped = layer.head_counts, layer.num_groups != layer.num_heads

    def enter(e: Tensor) -> Parts:
        q, k, v = (
            (z if norm is None else norm.derivative(z)).unflatten(-1, (h, -1)).transpose(-3, -2)
            for z, norm, h in zip((e @ weight.mT).split(sizes, -1), norms, counts, strict=True)
        )
        q, k = _rotate(layer.rotary, q), _rotate(layer.rotary, k)
        if grouped:
            k, v = layer.repeat_groups(k), layer.repeat_groups(v)
        return (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)) if several else (q, k, v)

    def side_by_side(z: Tensor) -> Tensor:
        return z.transpose(-3, -2).flatten(-2)

    def by_layer(z: Tensor) -> Tensor:
        return z.unflatten(0, (-1, layer.num_heads)) if several else z

    def enter_t(gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        gq, gk, gv = by_layer(gq), by_layer(gk), by_layer(gv)
        if grouped:
            gk, gv = layer.sum_groups(gk), layer.sum_groups(gv)
        gq, gk = _rotate_t(layer.rotary, gq), _rotate_t(layer.rotary, gk)
        flat = gq.new_empty(*gq.shape[:-3], gq.shape[-2], sum(sizes))
        parts = zip((gq, gk, gv), norms, flat.split(sizes, -1), strict=True)
        for g, norm, into in parts:
            if norm is None:
                into.unflatten(-1, (g.shape[-3], -1)).copy_(g.transpose(-3, -2))
            else:
                into.copy_(norm.transpose(side_by_side(g)))
        return flat @ weight

    def leave(o: Tensor) -> Tensor:
        heads = side_by_side(by_layer(o))
        return heads if out is None else heads @ out.mT

    def leave_t(g: Tensor) -> Tensor:
        heads = g if out is None else g @ out
        heads = heads.unflatten(-1, (layer.num_heads, -1)).transpose(-3, -2)
        return heads.flatten(0, 1) if several else heads

    width_out = layer.num_heads * layer.value_width if out is None else out.shape[-2]
    kept = (weight, out, sizes) if norms == _NO_NORMS else None
    return Projections(enter, enter_t, leave, leave_t, 2 + several, width_out, kept)


def _per_head(layer: Layer, map: Map, x: Tensor) -> Projections:
    """The same maps with each head on its own copy of the input."""
    query, key, value = layer.projections()
    weights = (query * layer.scale, key, value)
    heads, counts = layer.num_heads, layer.head_counts
    by_head = [rows_by_head(w, c, heads) for w, c in zip(weights, counts, strict=True)]
    weight = torch.cat(by_head, dim=1)  # (h, 2k + d_v, d)
    sizes = [w.shape[1] for w in by_head]
    norms = [
        None if norm is None else _HeadNormAt(norm, w, c, heads)
        for norm, w, c in zip(_norms_at(layer, x), weights, counts, strict=True)
    ]
    out = None
    if map == "attention" and layer.output is not None:
        out = layer.output.unflatten(1, (heads, -1)).transpose(0, 1)

    def enter(e: Tensor) -> Parts:
        q, k, v = (
            z if norm is None else norm.derivative(z, e)
            for z, norm in zip((e @ weight.mT).split(sizes, -1), norms, strict=True)
        )
        return _rotate(layer.rotary, q), _rotate(layer.rotary, k), v

    def enter_t(gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        gq, gk = _rotate_t(layer.rotary, gq), _rotate_t(layer.rotary, gk)
        parts, along = [], gq.new_zeros(())
        for g, norm in zip((gq, gk, gv), norms, strict=True):
            parts.append(g if norm is None else norm.gain * g)
            if norm is not None:
                along = along + norm.along(parts[-1])
        return torch.cat(parts, dim=-1) @ weight - along

    def leave(o: Tensor) -> Tensor:
        return o if out is None else o @ out.mT

    def leave_t(g: Tensor) -> Tensor:
        return g if out is None else g @ out

    width_out = layer.value_width if out is None else out.shape[1]
    return Projections(enter, enter_t, leave, leave_t, 3, width_out)


class _HeadNormAt:
    """A linearised norm acting on a head that has its own copy ``e`` of the input.

    If the norm runs over all heads together, a head's copy moves all of them:
    ``dy_h = g_h (W_h e - u_h <W^T u, e>)``, with ``W`` and ``u`` over the norm's full width.
    """

    def __init__(self, norm: NormAt, weight: Tensor, count: int, heads: int) -> None:
        parts = norm.unit.shape[-2]
        self.gain, self.unit = (
            rows_by_head(t.flatten(-2).mT, count, heads).mT for t in (norm.gain, norm.unit)
        )
        pulled = norm.unit.transpose(0, 1) @ weight.unflatten(0, (parts, -1))  # (parts, n, d)
        self.pulled = pulled.repeat_interleave(heads // parts, dim=0)

    def derivative(self, dz: Tensor, e: Tensor) -> Tensor:
        """``dy`` for ``dz = W_h e``, each ``(h, n, ·)``."""
        return self.gain * (dz - self.unit * (self.pulled * e).sum(-1, keepdim=True))

    def along(self, gz: Tensor) -> Tensor:
        """The term that the transpose subtracts from the input cotangent, for ``gz = g_h gy``."""
        return self.pulled * (self.unit * gz).sum(-1, keepdim=True)


def _one_side(frame: Projections, side: MovingSide, core: ChunkedCore) -> Projections:
    """The frame if only the queries, or only the keys and values, move."""

    def enter(e: Tensor) -> Parts:
        dq, dk, dv = frame.enter(e)
        if side == "query":
            return dq, torch.zeros_like(core.k), torch.zeros_like(core.v)
        return torch.zeros_like(core.q), dk, dv

    def enter_t(gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        if side == "query":
            length = gq.shape[1]
            return frame.enter_t(gq, _zeros(gk, length), _zeros(gv, length))
        return frame.enter_t(_zeros(gq, gk.shape[1]), gk, gv)

    return replace(frame, enter=enter, enter_t=enter_t, weights=None)


def _zeros(like: Tensor, tokens: int) -> Tensor:
    return like.new_zeros(like.shape[0], tokens, like.shape[-1])


def _entered(frame: Projections, at: NormAt) -> Projections:
    """The frame with `Layer.entrance` applied to tokens first."""
    return replace(
        frame,
        enter=lambda e: frame.enter(at.derivative(e)),
        enter_t=lambda *g: at.transpose(frame.enter_t(*g)),
        weights=None,
    )


def _coupled(frame: Projections, layer: Layer, x: Tensor, context: Tensor | None) -> Projections:
    """The frame with queries divided by ``c(q, k, v)``, `Layer.divisor`.

    ``d(q / c) = dq / c - (q / c) d log c``; the gradient of ``c`` (one number per head) is
    computed once.
    """
    with torch.enable_grad():
        parts = [z.detach().requires_grad_() for z in layer.undivided(x, context)]
        c = layer.divisor(parts[0], parts[1], parts[2])
        assert c is not None
        slopes = torch.autograd.grad(c.sum(), parts)
    c = c.detach()
    slopes, q = [slope / c for slope in slopes], parts[0].detach() / c  # slopes of log c

    def enter(e: Tensor) -> Parts:
        dq, dk, dv = frame.enter(e)
        moves = zip(slopes, (dq, dk, dv), strict=True)
        change = torch.stack([(s * d).sum((-2, -1), keepdim=True) for s, d in moves]).sum(0)
        return dq / c - q * change, dk, dv

    def enter_t(gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        change = (q * gq).sum((-2, -1), keepdim=True)
        cotangents = (gq / c, gk, gv)
        return frame.enter_t(*(g - s * change for g, s in zip(cotangents, slopes, strict=True)))

    return replace(frame, enter=enter, enter_t=enter_t, weights=None)


def _norms_at(layer: Layer, x: Tensor) -> list[NormAt | None]:
    norms = layer.norms()
    if all(norm is None for norm in norms):
        return [None, None, None]
    z = layer.project_in(x)
    return [None if norm is None else norm.at(part) for norm, part in zip(norms, z, strict=True)]


def rows_by_head(w: Tensor, count: int, heads: int) -> Tensor:
    """Rows of a weight by query head, ``(h, k, ·)``, repeated within groups."""
    return w.unflatten(0, (count, -1)).repeat_interleave(heads // count, dim=0)


def _rotate(rotary: Rotary | None, x: Tensor) -> Tensor:
    return x if rotary is None else rotary(x)


def _rotate_t(rotary: Rotary | None, g: Tensor) -> Tensor:
    return g if rotary is None else rotary.transpose(g)


class Linearised:
    """A layer at one input: batched products with its Jacobian and the transpose."""

    def __init__(
        self,
        layer: Layer,
        x: Tensor,
        memory: int,
        *,
        map: Map,
        per_head: bool,
        context: Tensor | None,
        side: MovingSide,
        log_weights: Tensor | None,
    ) -> None:
        self.shares = False  # whether score derivatives depend only on queries and keys
        self.moved = x if context is None or side == "query" else context
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            biased = layer.bias_moves
            core = ChunkedCore(layer, x, memory, context, log_weights, biased=biased)
            frame = (_per_head if per_head else _all_heads)(layer, map, self.moved)
            if context is not None:
                frame = _one_side(frame, side, core)
            if (entrance := layer.entrance()) is not None:
                frame = _entered(frame, entrance.at(self.moved))
            if not layer.by_token:
                frame = _coupled(frame, layer, x, context)
            self.core, self.frame = core, frame
            self.doubt = core.doubt()
            self.copies: dict[int, Linearised | None] = {}  # by number of copies; at most two

    def matvec(self, e: Tensor) -> Tensor:
        """``J e``."""
        if e.ndim > self.frame.axes:
            return self._of_each(e, lambda at, one: at.matvec(one))
        with torch.no_grad(), torch.autocast(self.moved.device.type, enabled=False):
            return self.frame.leave(self.core.jvp(*self.frame.enter(e)))

    def rmatvec(self, g: Tensor) -> Tensor:
        """``J^T g``."""
        if g.ndim > self.frame.axes:
            return self._of_each(g, lambda at, one: at.rmatvec(one))
        with torch.no_grad(), torch.autocast(self.moved.device.type, enabled=False):
            return self.frame.enter_t(*self.core.vjp(self.frame.leave_t(g)))

    def _of_each(self, vectors: Tensor, product: Callable[[Linearised, Tensor], Tensor]) -> Tensor:
        """Products with each vector; small layers multiply several vectors at once."""
        core = self.core
        kept = sum(block.size for block in core.blocks) + core.k.numel()
        kept += 2 * (core.q.numel() + core.v.numel() + core.o.numel())
        most = _TOGETHER_BYTES // max(kept * core.q.element_size(), 1)
        if most < 2 or self.frame.axes > 2 or vectors.ndim > 3:
            return torch.stack([product(self, one) for one in vectors])
        found = []
        for chunk in vectors.split(most):
            at = self._copied(len(chunk))
            each = product(at, chunk) if at else torch.stack([product(self, one) for one in chunk])
            found.append(each)
        return torch.cat(found)

    def _copied(self, count: int) -> Linearised | None:
        if count < 2:
            return None
        if count not in self.copies:
            if len(self.copies) > 1:
                self.copies.pop(next(iter(self.copies)))
            # Later products write to these tensors, so they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                self.copies[count] = several_layers([self] * count)
        return self.copies[count]


def several_layers(parts: Sequence[Linearised]) -> Linearised | None:
    """Several layers of the same shape as one, stacked along a leading axis.

    None if their shapes differ or a product takes more than one pass over stored weights. One
    layer at several inputs multiplies by its matrices once.
    """
    first, weights = parts[0], [one.frame.weights for one in parts if one.frame.weights is not None]
    shared = len(weights) == len(parts) and all(one.shares for one in parts)
    if not shared or not all(_alike(first, one) for one in parts):
        return None
    joint, (into, out, sizes) = copy.copy(first), zip(*weights, strict=True)
    joint.core, joint.copies = first.core.joined([one.core for one in parts]), {}
    output = None if out[0] is None else _stacked(out)
    joint.frame = _of_weights(
        first.core.layer, _stacked(into), output, sizes[0], _NO_NORMS, several=True
    )
    return joint


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """The matrices stacked along a leading axis, or a single matrix if all are equal."""
    first = matrices[0]
    same = all(one is first or one.equal(first) for one in matrices)
    return first if same else torch.stack(list(matrices))


def _alike(one: Linearised, other: Linearised) -> bool:
    """Whether two layers differ only in weights and tokens, and both store their weights."""
    a, b = one.core, other.core
    capped = [layer.softcap is not None for layer in (a.layer, b.layer)]
    same = type(a.layer) is type(b.layer) and a.layer.num_groups == b.layer.num_groups
    same = same and a.weighting is b.weighting and capped[0] == capped[1]
    whole = all(block.heads == slice(0, len(a.q)) for block in a.blocks) and a.blocks == b.blocks
    kept = a.stored and b.stored and a.empty is None and b.empty is None
    sizes = [
        (t.dtype, t.device, t.shape, p.moved.shape, p.frame.width_out, p.frame.axes)
        for p in (one, other)
        for t in (p.core.q, p.core.k, p.core.v)
    ]
    if not (same and whole and kept and sizes[:3] == sizes[3:]):
        return False
    turn, turned = a.layer.rotary, b.layer.rotary
    if turn is None or turned is None:
        return turn is turned
    return turn.cos.equal(turned.cos) and turn.sin.equal(turned.sin)


# --- ``<g, J(x) e>``, differentiable in everything
_COPIES = 24  # approximate number of score-sized tensors alive while differentiating a chunk


@exact
def stretch_in_chunks(layer: Layer, x: Tensor, g: Tensor, e: Tensor, memory: int) -> Tensor:
    """See `Attention.stretch`."""
    project = functools.partial(layer.project, biased=layer.bias_moves)
    (q, k, v), (dq, dk, dv) = cast(Any, jvp(project, (x,), (e,)))
    heads = g if layer.output is None else g @ layer.output
    go = heads.unflatten(-1, (layer.num_heads, -1)).transpose(-3, -2)

    num_keys = k.shape[-2]

    def part(h: slice, start: int, *tensors: Tensor) -> Tensor:
        q, dq, go, k, v, dk, dv = tensors

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return layer.weights(q, k, start=start, heads=h, num_keys=num_keys) @ v

        return (jvp(attend, (q, k, v), (dq, dk, dv))[1] * go).sum()

    total, limit = x.new_zeros(()), memory // (_COPIES * x.element_size())
    all_rows = layer.weighting.all_rows
    blocks = score_blocks(layer.num_heads, q.shape[-2], num_keys, limit, all_rows=all_rows)
    for block in blocks:
        h, rows = block.heads, block.rows
        keys = slice(0, reach(rows, num_keys, layer.causal, layer.window).stop)
        tensors = [*(t[h, rows] for t in (q, dq, go)), *(t[h, keys] for t in (k, v, dk, dv))]
        if len(blocks) == 1:
            return part(h, rows.start, *tensors)
        total = total + checkpoint(part, h, rows.start, *tensors, use_reentrant=False)
    return total
