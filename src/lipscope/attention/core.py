"""Softmax calculus: forward, JVP and VJP of an attention layer in closed form.

A variant supplies a score and its two derivatives (`Attention.score`, `score_jvp`,
`score_vjp`); heads, grouped keys and values, biases, masks, rotary embedding, chunking
and the output projection live here, once.

Notation: tokens are rows, ``q, k, v`` carry the heads in front, ``p`` is the softmax of a
row of scores, ``o = p v``. With ``w = p * ds`` the differential of the softmax is
``w - p rowsum(w)``, so that ``do = w v - rowsum(w) o + p dv``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lipscope.attention.projections import AllHeads, Frame, Part, PerHead, Rotary
from lipscope.errors import InputError
from lipscope.operator import Operator, over_leading

# Probabilities below this change no digit of a product, but their subnormal multiples slow
# it down by up to a half on real weights.
_SMALLEST_PROBABILITY = 1e-30
# One chunk of scores stays near the last-level cache; larger ones are bound by memory.
_CHUNK_BYTES = 2**24
_SHARE = 0.5  # of the memory, for stored probabilities; the rest is the solver's


class Attention(nn.Module, ABC):
    """A self-attention layer ``R^(n x d) -> R^(n x d_out)``, any number of heads.

    ``f(X) = concat_h(P_h V_h) W_O^T + b_O`` with ``P_h`` the masked row softmax of the
    variant's score of ``Q_h = X W_Q^T + b_Q`` and ``K_h``. Query heads share keys and values
    in groups of equal size where there are fewer of those.

    Holds for a fixed number of tokens where a mask or rotary embedding is given.

    Args:
        query: ``(heads * k, d)``.
        key: ``(groups * k, d)``.
        value: ``(groups * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        heads: Number of query heads.
        groups: Number of key/value heads; ``heads`` if None.
        query_bias: ``(heads * k,)``.
        key_bias: ``(groups * k,)``.
        value_bias: ``(groups * d_v,)``.
        output_bias: ``(d_out,)``.
        scale: Factor of the score; ``1 / sqrt(k)`` if None.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j.
        rotary: Rotary embedding of queries and keys.

    Raises:
        InputError: If the shapes do not fit together.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None

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
        mask: Bool[Tensor, "*h n n"] | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = heads
        self.num_groups = heads if groups is None else groups
        _check_shapes(query, key, value, output, heads, self.num_groups)
        for name, tensor in {
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "query_bias": query_bias,
            "key_bias": key_bias,
            "value_bias": value_bias,
            "output_bias": output_bias,
        }.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.head_width = query.shape[0] // heads
        self.value_width = value.shape[0] // self.num_groups
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.causal = causal
        self.mask = mask
        self.rotary = rotary

    # --- what a variant supplies: a score of queries and keys, and its two derivatives

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

    # --- the layer

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d_out"]:
        """The layer's output, differentiable by autograd; the closed form's reference."""
        if not torch.is_grad_enabled() and x.ndim == 2:
            return self.project_out(self.heads(x))
        q, k, v = self.project(x)
        return self.project_out((self.probabilities(q, k) @ v).transpose(-3, -2).flatten(-2))

    def heads(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n hv"]:
        """Concatenated heads before the projection; in chunks where no gradient is wanted."""
        if not torch.is_grad_enabled():
            return _Core(self, x, 8 * _CHUNK_BYTES).o.transpose(0, 1).flatten(1)
        q, k, v = self.project(x)
        return (self.probabilities(q, k) @ v).transpose(-3, -2).flatten(-2)

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Attention weights ``(..., num_heads, n, n)`` of scaled queries and keys."""
        s, bias = self.score(q, k), self.bias(q, 0, q.shape[-2])
        return torch.softmax(s if bias is None else s + bias, dim=-1)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries, keys and values, each ``(..., num_heads, n, width)``."""
        q = self._split(nn.functional.linear(x, self.query, self.query_bias), self.num_heads)
        k = self._split(nn.functional.linear(x, self.key, self.key_bias), self.num_groups)
        v = self._split(nn.functional.linear(x, self.value, self.value_bias), self.num_groups)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return q * self.scale, self.repeat_groups(k), self.repeat_groups(v)

    def project_out(self, heads: Tensor) -> Tensor:
        """Concatenated heads ``(..., n, num_heads * d_v)`` through the output projection."""
        if self.output is None:
            return heads
        return nn.functional.linear(heads, self.output, self.output_bias)

    def bias(self, x: Tensor, start: int, stop: int) -> Tensor | None:
        """What the mask adds to the scores of rows ``start:stop``: 0, -inf; None if nothing."""
        n = x.shape[-2]
        visible = None
        if self.causal:
            rows = torch.arange(start, stop, device=x.device)[:, None]
            visible = torch.arange(n, device=x.device) <= rows
        if self.mask is not None:
            part = self.mask[..., start:stop, :]
            visible = part if visible is None else part & visible
        if visible is None:
            return None
        return torch.zeros_like(visible, dtype=x.dtype).masked_fill_(~visible, -torch.inf)

    def repeat_groups(self, x: Tensor) -> Tensor:
        """Give every query head its group's keys or values."""
        times = self.num_heads // self.num_groups
        return x if times == 1 else x.repeat_interleave(times, dim=-3)

    def sum_groups(self, g: Tensor) -> Tensor:
        """The transpose of `repeat_groups`."""
        times = self.num_heads // self.num_groups
        return g if times == 1 else g.unflatten(-3, (self.num_groups, times)).sum(-3)

    def frame(self, x: Tensor, part: Part, *, per_head: bool) -> Frame:
        """The linear maps around the core at ``x``; a variant may add to them."""
        del x
        return PerHead(self, part) if per_head else AllHeads(self, part)

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(-3, -2)

    def linearise(
        self,
        x: Float[Tensor, "n d"],
        *,
        memory: int = 2**30,
        part: Part = "attention",
        per_head: bool = False,
    ) -> Operator:
        """The Jacobian at ``x`` in closed form: 8 n d^2 + 8 n^2 d flops a product (MHA).

        Queries, keys, values, softmax statistics and, where they fit, probabilities are
        computed once; a product costs matrix multiplications and one elementwise pass.

        Args:
            x: The point, ``(n, d)``.
            memory: Bytes for stored probabilities and chunks; half of it may be kept.
            part: ``attention``, or ``heads`` for the concatenation before the output
                projection.
            per_head: One operator per query head, on a leading axis of length
                ``num_heads``: the head's slice for ``heads``, its contribution through its
                part of the projection for ``attention``.

        Returns:
            Operator ``(n, d) -> (n, d_out)``; with ``per_head`` the products take and return
            the leading axis of heads.

        Source: Lemma C.2 of [castin2024], in matrix form (``docs/theory``).
        """
        with torch.no_grad():
            core = _Core(self, x, memory)
            frame = self.frame(x, part, per_head=per_head)
        n, d = x.shape

        def mv(e: Tensor) -> Tensor:
            with torch.no_grad():
                return frame.leave(core.jvp(*frame.enter(e)))

        def rmv(g: Tensor) -> Tensor:
            with torch.no_grad():
                return frame.enter_t(*core.vjp(frame.leave_t(g)))

        return Operator(
            over_leading(mv, frame.axes),
            over_leading(rmv, frame.axes),
            (n, d),
            (n, frame.width_out),
            x.dtype,
            x.device,
        )


class _Core:
    """``(dq, dk, dv) -> do`` and its transpose at one input, chunked over query rows."""

    def __init__(self, layer: Attention, x: Tensor, memory: int) -> None:
        self.layer, self.x = layer, x
        self.q, self.k, self.v = (t.contiguous() for t in layer.project(x))
        heads, n, _ = self.q.shape
        row = heads * n * x.element_size()
        self.rows = max(1, min(n, int(min(_CHUNK_BYTES, memory // 8) // row)))
        # Every pass over scores goes through this memory: fresh pages cost as much as flops.
        self.scratch = x.new_empty(heads * self.rows * n)
        self.o = torch.empty_like(self.v)
        # Either the probabilities are kept, or each row's log-sum-exp to rebuild them from.
        stored = n * row <= _SHARE * memory
        self.stored: Tensor | None = x.new_empty(heads, n, n) if stored else None
        self.shift: Tensor | None = None if stored else x.new_empty(heads, n, 1)
        for rows in self._chunks():
            s = self._scores(rows)
            if self.shift is not None:
                self.shift[:, rows] = s.logsumexp(-1, keepdim=True)
                p = self._rebuilt(s, rows)
            else:
                p = _without_tiny(torch.softmax(s, -1, out=s))
            if self.stored is not None:
                self.stored[:, rows] = p
            self.o[:, rows] = torch.bmm(p, self.v)

    def _chunks(self) -> list[slice]:
        n = self.q.shape[1]
        return [slice(i, min(i + self.rows, n)) for i in range(0, n, self.rows)]

    def _room(self, rows: slice) -> Tensor:
        heads, n, _ = self.k.shape
        count = rows.stop - rows.start
        return self.scratch[: heads * count * n].view(heads, count, n)

    def _scores(self, rows: slice) -> Tensor:
        s = self.layer.score(self.q[:, rows], self.k, out=self._room(rows))
        bias = self.layer.bias(self.x, rows.start, rows.stop)
        return s if bias is None else s.add_(bias)

    def _rebuilt(self, s: Tensor, rows: slice) -> Tensor:
        assert self.shift is not None
        return _without_tiny(s.sub_(self.shift[:, rows]).exp_())

    def _probabilities(self, rows: slice) -> Tensor:
        if self.stored is not None:
            return self.stored[:, rows]
        return self._rebuilt(self._scores(rows), rows)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """``do``, shape ``(h, n, d_v)``, for ``dq, dk, dv`` with heads in front."""
        do = torch.empty_like(self.o)
        for rows in self._chunks():
            p = self._probabilities(rows)
            room = self._room(rows) if self.stored is not None else None
            w = self.layer.score_jvp(self.q[:, rows], self.k, dq[:, rows], dk, out=room).mul_(p)
            part = torch.bmm(w, self.v)
            part.addcmul_(w.sum(-1, keepdim=True), self.o[:, rows], value=-1)
            do[:, rows] = part.baddbmm_(p, dv)
        return do

    def vjp(self, go: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(gq, gk, gv)`` for the cotangent ``go`` of the heads, ``(h, n, d_v)``."""
        gq, gk, gv = torch.empty_like(self.q), None, None
        mean = (go * self.o).sum(-1, keepdim=True)
        for rows in self._chunks():
            p = self._probabilities(rows)
            room = self._room(rows) if self.stored is not None else None
            gs = torch.bmm(go[:, rows], self.v.mT, out=room).sub_(mean[:, rows]).mul_(p)
            gq[:, rows], more_k = self.layer.score_vjp(self.q[:, rows], self.k, gs)
            more_v = torch.bmm(p.mT, go[:, rows])
            gk = more_k if gk is None else gk.add_(more_k)
            gv = more_v if gv is None else gv.add_(more_v)
        assert gk is not None and gv is not None
        return gq, gk, gv


def _without_tiny(p: Tensor) -> Tensor:
    return torch.threshold_(p, _SMALLEST_PROBABILITY, 0.0)


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor | None, heads: int, groups: int
) -> None:
    """Say which weight does not fit the number of heads or the other weights."""
    if heads < 1 or groups < 1 or heads % groups:
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
            "Queries and keys should have one head width. Found "
            f"{query.shape[0] // heads} and {key.shape[0] // groups}."
        )
    concat = heads * (value.shape[0] // groups)
    if output is not None and output.shape[1] != concat:
        raise InputError(f"`output` should have {concat} columns. Found {output.shape[1]}.")
