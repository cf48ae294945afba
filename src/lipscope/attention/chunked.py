"""The chunked softmax core: products with the Jacobian of ``(q, k, v) -> o`` in closed form.

Notation: tokens are rows, ``q, k, v`` carry the heads in front, ``p`` is the softmax of a
row of logits, ``o = p v``. Logits are scores, soft-capped where the layer does so, plus a bias
and the mask. With ``w = p * cap'(s) * ds`` the differential of the softmax is
``w - p rowsum(w)``, so that ``do = w v - rowsum(w) o + p dv``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lipscope.attention.core import Attention

# Probabilities below this change no digit of a product, but their subnormal multiples slow
# it down by up to a half on real weights.
_SMALLEST_PROBABILITY = 1e-30
# One chunk of scores stays near the last-level cache; larger ones are bound by memory.
CHUNK_BYTES = 2**24
_SHARE = 0.5  # of the memory, for stored probabilities; the rest is the solver's
_FEWEST_ROWS = 128  # of a chunk where heads can be parted instead: shorter products are slow
# A mask of one side is followed in this many steps: each costs calls, and saves half of its
# square. Steps of fewer rows cost more than they save.
_STEPS, _SMALLEST_STEP = 8, 64


@dataclass(frozen=True)
class _Block:
    """Some heads and rows, the keys that these rows may read, and the probabilities if kept."""

    heads: slice
    rows: slice
    keys: slice
    index: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(s.stop - s.start for s in (self.heads, self.rows, self.keys))

    @property
    def size(self) -> int:
        heads, rows, keys = self.shape
        return heads * rows * keys


class ChunkedCore:
    """``(dq, dk, dv) -> do`` and its transpose at one input, by blocks of heads and rows.

    A block holds no keys that a causal mask or a window hides from all of its rows.

    Args:
        layer: The layer; gives projections, score and mask.
        x: Tokens of the queries, ``(n, d)``.
        memory: Bytes for stored probabilities and chunks; half of it may be kept.
        context: Tokens of keys and values, ``(m, d)``; those of the queries if None.
    """

    def __init__(
        self, layer: Attention, x: Tensor, memory: int, context: Tensor | None = None
    ) -> None:
        self.layer = layer
        self.q, self.k, self.v = (t.contiguous() for t in layer.project(x, context))
        heads, n, _ = self.q.shape
        self.blocks = self._parted(int(min(CHUNK_BYTES, memory // 8)))
        # A soft cap doubles what is kept: probabilities times its slope.
        capped = layer.softcap is not None
        total = sum(b.size for b in self.blocks) * x.element_size()
        fits = (2 if capped else 1) * total <= _SHARE * memory
        # Every pass over scores goes through this memory: fresh pages cost as much as flops.
        largest = max(b.size for b in self.blocks)
        self.scratch = x.new_empty(1 if fits else 2, largest)
        self.o = self.v.new_empty(heads, n, self.v.shape[-1])
        self.empty = layer.empty_rows(self.k)
        # Either the probabilities are kept, or each row's log-sum-exp to rebuild them from.
        self.stored: list[tuple[Tensor, Tensor]] = []
        self.shift: Tensor | None = None if fits else x.new_empty(heads, n, 1)
        for block in self.blocks:
            s, slope = self._logits(block)
            if self.shift is not None:
                self.shift[block.heads, block.rows] = s.logsumexp(-1, keepdim=True)
                p = self._rebuilt(s, block)
            else:
                p = self._cleaned(torch.softmax(s, -1), block)
                self.stored.append((p, p if slope is None else slope.mul_(p)))
            self.o[block.heads, block.rows] = torch.bmm(p, self.v[block.heads, block.keys])

    def _parted(self, limit: int) -> list[_Block]:
        """Blocks of at most ``limit`` bytes of scores, or one row of one head."""
        heads, n, _ = self.q.shape
        m, layer = self.k.shape[1], self.layer
        row = m * self.q.element_size()  # of one head
        together = max(1, min(heads, limit // (row * min(n, _FEWEST_ROWS))))
        rows = max(1, min(n, limit // (row * together)))
        if layer.causal:
            rows = min(rows, max(_SMALLEST_STEP, -(-n // _STEPS)))
        if layer.window is not None:
            rows = min(rows, max(_SMALLEST_STEP, layer.window // _STEPS))
        found: list[_Block] = []
        for h in range(0, heads, together):
            for i in range(0, n, rows):
                chunk = slice(i, min(i + rows, n))
                part = slice(h, min(h + together, heads))
                found.append(_Block(part, chunk, layer.reach(chunk, m), len(found)))
        return found

    def _room(self, block: _Block, which: int = 0) -> Tensor:
        return self.scratch[which, : block.size].view(block.shape)

    def _logits(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Logits of a block, and the soft cap's slope there, ``1 - tanh(s / c)²``."""
        q, k = self.q[block.heads, block.rows], self.k[block.heads, block.keys]
        s = self.layer.score(q, k, out=self._room(block))
        cap, slope = self.layer.softcap, None
        if cap is not None:
            s = s.div_(cap).tanh_()
            slope = 1 - s.square()
            s = s.mul_(cap)
        bias = self.layer.bias(self.k, block.rows, block.keys)
        if bias is not None:
            s = s.add_(bias[block.heads] if bias.ndim == s.ndim else bias)
        return s, slope

    def _rebuilt(self, s: Tensor, block: _Block) -> Tensor:
        assert self.shift is not None
        return self._cleaned(s.sub_(self.shift[block.heads, block.rows]).exp_(), block)

    def _cleaned(self, p: Tensor, block: _Block) -> Tensor:
        """No tiny probabilities, and none at all in rows that may read no token."""
        if self.empty is not None:
            empty = self.empty[..., block.rows, None]
            p.masked_fill_(empty[block.heads] if empty.ndim == p.ndim else empty, 0.0)
        return _without_tiny(p)

    def _probabilities(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Probabilities of a block, and the same times the slope of the soft cap."""
        if self.stored:
            return self.stored[block.index]
        s, slope = self._logits(block)
        p = self._rebuilt(s, block)
        return p, p if slope is None else slope.mul_(p)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """``do``, shape ``(h, n, d_v)``, for ``dq, dk, dv`` with heads in front."""
        do = torch.empty_like(self.o)
        for block in self.blocks:
            own, other = (block.heads, block.rows), (block.heads, block.keys)
            p, sloped = self._probabilities(block)
            ds = self.layer.score_jvp(
                self.q[own], self.k[other], dq[own], dk[other], out=self._room(block, -1)
            )
            w = ds.mul_(sloped)
            part = torch.bmm(w, self.v[other])
            part.addcmul_(w.sum(-1, keepdim=True), self.o[own], value=-1)
            do[own] = part.baddbmm_(p, dv[other])
        return do

    def vjp(self, go: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(gq, gk, gv)`` for the cotangent ``go`` of the heads, ``(h, n, d_v)``."""
        gq = torch.empty_like(self.q)
        gk, gv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        mean = (go * self.o).sum(-1, keepdim=True)
        for block in self.blocks:
            own, other = (block.heads, block.rows), (block.heads, block.keys)
            p, sloped = self._probabilities(block)
            gp = torch.bmm(go[own], self.v[other].mT, out=self._room(block, -1))
            gs = gp.sub_(mean[own]).mul_(sloped)
            gq[own], more = self.layer.score_vjp(self.q[own], self.k[other], gs)
            gk[other] += more
            gv[other] += torch.bmm(p.mT, go[own])
        return gq, gk, gv


def _without_tiny(p: Tensor) -> Tensor:
    return torch.threshold_(p, _SMALLEST_PROBABILITY, 0.0)
