"""The chunked core: products with the Jacobian of ``(q, k, v) -> o`` in closed form.

Notation: tokens are rows, ``q, k, v`` carry the heads in front, ``p`` are the weights of a row
of logits, ``o = p v``. Logits are scores, soft-capped where the layer does so, plus a bias and
the mask; what becomes of them is the weighting's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.blocks import Block, parted
from lipscope.attention.layer import Layer, of_heads
from lipscope.attention.precision import uncast
from lipscope.attention.weighting import At

# One chunk of scores stays near the last-level cache; larger ones are bound by memory.
CHUNK_BYTES = 2**24
SURE = 1e-4  # a shift of scores that changes no weight by more than its own share
_SHARE = 0.5  # of the memory, for stored weights; the rest is the solver's


class ChunkedCore:
    """``(dq, dk, dv) -> do`` and its transpose at one input, by blocks of heads and rows.

    A block holds no keys that a causal mask or a window hides from all of its rows.

    Args:
        layer: The layer; gives projections, score, weighting and mask.
        x: Tokens of the queries, ``(n, d)``.
        memory: Bytes for stored weights and chunks; half of it may be kept.
        context: Tokens of keys and values, ``(m, d)``; those of the queries if None.
        log_weights: Logarithms of the weights of the keys, ``(m,)``; none if None.
    """

    def __init__(
        self,
        layer: Layer,
        x: Tensor,
        memory: int,
        context: Tensor | None = None,
        log_weights: Tensor | None = None,
    ) -> None:
        self.layer, self.weighting, self.log_weights = layer, layer.weighting, log_weights
        self.q, self.k, self.v = (t.contiguous() for t in layer.project(x, context))
        with uncast(x.device):
            self._attend(memory)

    def _attend(self, memory: int) -> None:
        """Outputs, and what the derivatives ask for."""
        layer, (heads, n, _) = self.layer, self.q.shape
        self.blocks = parted(
            heads,
            n,
            self.k.shape[1],
            int(min(CHUNK_BYTES, memory // 8)) // self.q.element_size(),
            causal=layer.causal,
            window=layer.window,
            all_rows=self.weighting.all_rows,
        )
        # A soft cap needs its slope besides.
        kept = self.weighting.kept + (layer.softcap is not None)
        total = sum(b.size for b in self.blocks) * self.q.element_size()
        fits = kept * total <= _SHARE * memory
        # Every pass over scores goes through this memory: fresh pages cost as much as flops.
        largest = max(b.size for b in self.blocks)
        self.scratch = self.q.new_empty(1 if fits else 2, largest)
        self.o = self.v.new_empty(heads, n, self.v.shape[-1])
        # Derivatives of weights that add up to 1 see differences of values only: what values have
        # in common is taken away, and cannot round.
        self.middle = self.v.mean(-2, keepdim=True) if self.weighting.normalised else None
        # Rows whose weights do not move at all: head and row of each, by block.
        self.settled: list[tuple[Tensor, ...] | None] = []
        empty = layer.empty_rows(self.k)
        self.empty = None if empty is None else empty[..., None]
        # Either the weights are kept, or a number for each row to rebuild them from.
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
        """Rows in which one token has all weight, to rounding: no score moves any of it.

        Left to the products, the two halves of ``w_j (v_j - o)`` would leave their rounding, as
        large as the scores are.
        """
        if not self.weighting.normalised:
            return None
        head, row = (p.amax(-1) == 1.0).nonzero(as_tuple=True)
        return (head, row) if len(row) else None

    def doubt(self) -> float:
        """How far rounding may shift a score, where that may change a weight."""
        info, cap = torch.finfo(self.q.dtype), self.layer.softcap
        shift = info.eps * self.layer.score_size(self.q, self.k)
        shift = shift if cap is None else shift.clamp_max(1.5 * cap * info.eps)
        if not float(shift.max()) > SURE:
            return 0.0
        worst = 0.0
        for block in self.blocks:
            own = shift[block.heads, block.rows]
            open_ = self.weighting.open(self._logits(block)[0], own)
            worst = max(worst, float(own.where(open_, 0.0).max()))
        return worst

    def _room(self, block: Block, which: int = 0) -> Tensor:
        return self.scratch[which, : block.size].view(block.shape)

    def _logits(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Logits of a block, and the soft cap's slope there, ``1 - tanh(s / c)²``."""
        q, k = self.q[block.heads, block.rows], self.k[block.heads, block.keys]
        s = self.layer.score(q, k, out=self._room(block))
        cap, slope = self.layer.softcap, None
        if cap is not None:
            s = s.div_(cap).tanh_()
            slope = 1 - s.square()
            s = s.mul_(cap)
        bias = self.layer.bias(self.k, block.rows, block.keys, self.log_weights)
        return s if bias is None else s.add_(of_heads(bias, block.heads)), slope

    def _at(self, block: Block) -> tuple[At, Tensor | None]:
        """What the weighting keeps of a block, and the slope of the soft cap."""
        if self.stored:
            return self.stored[block.index]
        s, slope = self._logits(block)
        return self.weighting.again(s, self.statistics[block.index]), slope

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """``do``, shape ``(h, n, d_v)``, for ``dq, dk, dv`` with heads in front."""
        do, (v, o) = torch.empty_like(self.o), self.apart
        for block in self.blocks:
            own, other = (block.heads, block.rows), (block.heads, block.keys)
            at, slope = self._at(block)
            ds = self.layer.score_jvp(
                self.q[own], self.k[other], dq[own], dk[other], out=self._room(block, -1)
            )
            ds = ds if slope is None else ds.mul_(slope)
            if (still := self.settled[block.index]) is not None:
                ds[still] = 0.0
            do[own] = self.weighting.push(at, ds, v[other], dv[other], o[own])
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
            own, other = (block.heads, block.rows), (block.heads, block.keys)
            at, slope = self._at(block)
            gp = torch.bmm(go[own], v[other].mT, out=self._room(block, -1))
            gs = self.weighting.pull(at, gp, mean[own])
            gs = gs if slope is None else gs.mul_(slope)
            if (still := self.settled[block.index]) is not None:
                gs[still] = 0.0
            gq[own], more = self.layer.score_vjp(self.q[own], self.k[other], gs)
            gk[other] += more
            gv[other] += torch.bmm(at[0].mT, go[own])
        return gq, gk, gv
