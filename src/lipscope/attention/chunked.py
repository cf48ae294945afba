"""The chunked softmax core: products with the Jacobian of ``(q, k, v) -> o`` in closed form.

Notation: tokens are rows, ``q, k, v`` carry the heads in front, ``p`` is the softmax of a
row of logits, ``o = p v``. Logits are scores, soft-capped where the layer does so, plus a bias
and the mask. With ``w = p * cap'(s) * ds`` the differential of the softmax is
``w - p rowsum(w)``, so that ``do = w v - rowsum(w) o + p dv``.
"""

from __future__ import annotations

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


class ChunkedCore:
    """``(dq, dk, dv) -> do`` and its transpose at one input, chunked over query rows.

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
        m = self.k.shape[1]
        row = heads * m * x.element_size()
        self.rows = max(1, min(n, int(min(CHUNK_BYTES, memory // 8) // row)))
        # Every pass over scores goes through this memory: fresh pages cost as much as flops.
        self.scratch = x.new_empty(heads * self.rows * m)
        self.o = self.v.new_empty(heads, n, self.v.shape[-1])
        self.empty = layer.empty_rows(self.k)
        # Either the probabilities are kept, or each row's log-sum-exp to rebuild them from.
        # A soft cap doubles what is kept: probabilities times its slope.
        capped = layer.softcap is not None
        fits = (2 if capped else 1) * n * row <= _SHARE * memory
        self.stored: Tensor | None = x.new_empty(heads, n, m) if fits else None
        self.sloped = x.new_empty(heads, n, m) if fits and capped else self.stored
        self.shift: Tensor | None = None if fits else x.new_empty(heads, n, 1)
        for rows in self._chunks():
            s, slope = self._logits(rows)
            if self.shift is not None:
                self.shift[:, rows] = s.logsumexp(-1, keepdim=True)
                p = self._rebuilt(s, rows)
            else:
                p = self._cleaned(torch.softmax(s, -1, out=s), rows)
            if self.stored is not None:
                self.stored[:, rows] = p
            if self.sloped is not None and slope is not None:
                self.sloped[:, rows] = slope.mul_(p)
            self.o[:, rows] = torch.bmm(p, self.v)

    def _chunks(self) -> list[slice]:
        n = self.q.shape[1]
        return [slice(i, min(i + self.rows, n)) for i in range(0, n, self.rows)]

    def _room(self, rows: slice) -> Tensor:
        heads, m, _ = self.k.shape
        count = rows.stop - rows.start
        return self.scratch[: heads * count * m].view(heads, count, m)

    def _logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Logits of some rows, and the soft cap's slope there, ``1 - tanh(s / c)²``."""
        s = self.layer.score(self.q[:, rows], self.k, out=self._room(rows))
        cap, slope = self.layer.softcap, None
        if cap is not None:
            s = s.div_(cap).tanh_()
            slope = 1 - s.square()
            s = s.mul_(cap)
        bias = self.layer.bias(self.k, rows.start, rows.stop)
        return s if bias is None else s.add_(bias), slope

    def _rebuilt(self, s: Tensor, rows: slice) -> Tensor:
        assert self.shift is not None
        return self._cleaned(s.sub_(self.shift[:, rows]).exp_(), rows)

    def _cleaned(self, p: Tensor, rows: slice) -> Tensor:
        """No tiny probabilities, and none at all in rows that may read no token."""
        if self.empty is not None:
            p.masked_fill_(self.empty[..., rows, None], 0.0)
        return _without_tiny(p)

    def _probabilities(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Probabilities of some rows, and the same times the slope of the soft cap."""
        if self.stored is not None and self.sloped is not None:
            return self.stored[:, rows], self.sloped[:, rows]
        s, slope = self._logits(rows)
        p = self._rebuilt(s, rows)
        return p, p if slope is None else slope.mul_(p)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """``do``, shape ``(h, n, d_v)``, for ``dq, dk, dv`` with heads in front."""
        do = torch.empty_like(self.o)
        for rows in self._chunks():
            p, sloped = self._probabilities(rows)
            room = self._room(rows) if self.stored is not None else None
            ds = self.layer.score_jvp(self.q[:, rows], self.k, dq[:, rows], dk, out=room)
            w = ds.mul_(sloped)
            part = torch.bmm(w, self.v)
            part.addcmul_(w.sum(-1, keepdim=True), self.o[:, rows], value=-1)
            do[:, rows] = part.baddbmm_(p, dv)
        return do

    def vjp(self, go: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(gq, gk, gv)`` for the cotangent ``go`` of the heads, ``(h, n, d_v)``."""
        gq, gk, gv = torch.empty_like(self.q), None, None
        mean = (go * self.o).sum(-1, keepdim=True)
        for rows in self._chunks():
            p, sloped = self._probabilities(rows)
            room = self._room(rows) if self.stored is not None else None
            gs = torch.bmm(go[:, rows], self.v.mT, out=room).sub_(mean[:, rows]).mul_(sloped)
            gq[:, rows], more_k = self.layer.score_vjp(self.q[:, rows], self.k, gs)
            more_v = torch.bmm(p.mT, go[:, rows])
            gk = more_k if gk is None else gk.add_(more_k)
            gv = more_v if gv is None else gv.add_(more_v)
        assert gk is not None and gv is not None
        return gq, gk, gv


def _without_tiny(p: Tensor) -> Tensor:
    return torch.threshold_(p, _SMALLEST_PROBABILITY, 0.0)
