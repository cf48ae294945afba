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
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.operator import Operator, over_leading

# Probabilities below this change no digit of a product, but their subnormal multiples slow
# it down by up to a half on real weights.
_SMALLEST_PROBABILITY = 1e-30
# One chunk of scores stays near the last-level cache; larger ones are bound by memory.
_CHUNK_BYTES = 2**24
_SHARE = 0.5  # of the memory, for stored probabilities; the rest is the solver's

Part = Literal["heads", "attention"]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of one window, in half-split layout.

    ``rot(x) = x cos + half(x) sin`` with ``half((a, b)) = (-b, a)`` on the two halves of a
    head. Widths beyond that of ``cos`` are left as they are.

    Attributes:
        cos: ``(n, r)``.
        sin: ``(n, r)``.
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


class Attention(nn.Module, ABC):
    """A self-attention layer ``R^(n x d) -> R^(n x d_out)``, any number of heads.

    ``f(X) = concat_h(P_h V_h) W_O^T + b_O`` with ``P_h`` the masked row softmax of the
    variant's score of ``Q_h = X W_Q^T + b_Q`` and ``K_h``. Query heads share keys and values
    in groups of equal size where there are fewer of those.

    Holds for a fixed number of tokens where a mask or rotary embedding is given.

    Args:
        query: ``(num_heads * k, d)``.
        key: ``(num_groups * k, d)``.
        value: ``(num_groups * d_v, d)``.
        output: ``(d_out, num_heads * d_v)``, or None for concatenated heads.
        num_heads: Number of query heads.
        num_groups: Number of key/value heads; ``num_heads`` if None.
        query_bias: ``(num_heads * k,)``.
        key_bias: ``(num_groups * k,)``.
        value_bias: ``(num_groups * d_v,)``.
        output_bias: ``(d_out,)``.
        scale: Factor of the score; ``1 / sqrt(k)`` if None.
        causal: Token i reads tokens j <= i only.
        mask: ``(n, n)`` or ``(num_heads, n, n)``: True where i may read j.
        rotary: Rotary embedding of queries and keys.

    Raises:
        InputError: If the shapes do not fit together.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "gk d"],
        value: Float[Tensor, "gv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        num_heads: int = 1,
        num_groups: int | None = None,
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
        self.num_heads = num_heads
        self.num_groups = num_heads if num_groups is None else num_groups
        _check_shapes(query, key, value, output, num_heads, self.num_groups)
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
        self.head_width = query.shape[0] // num_heads
        self.value_width = value.shape[0] // self.num_groups
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.causal = causal
        self.mask = mask
        self.rotary = rotary

    # --- what a variant supplies: a score of queries and keys, and its two derivatives

    @abstractmethod
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores ``(..., c, n)`` of scaled queries ``(..., c, k)`` and keys ``(..., n, k)``."""

    @abstractmethod
    def score_jvp(self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
        """Change ``(..., c, n)`` of the scores along ``dq`` and ``dk``."""

    @abstractmethod
    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of queries and keys for the cotangent ``gs`` of the scores."""

    # --- the layer

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d_out"]:
        """The layer's output, differentiable by autograd; the closed form's reference."""
        q, k, v = self.project(x)
        p = torch.softmax(self.score(q, k) + self.bias(x, 0, x.shape[-2]), dim=-1)
        return self.project_out((p @ v).transpose(-3, -2).flatten(-2))

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

    def bias(self, x: Tensor, start: int, stop: int) -> Tensor:
        """What the mask adds to the scores of rows ``start:stop``: 0 or minus infinity."""
        n = x.shape[-2]
        visible = None
        if self.causal:
            rows = torch.arange(start, stop, device=x.device)[:, None]
            visible = torch.arange(n, device=x.device) <= rows
        if self.mask is not None:
            part = self.mask[..., start:stop, :]
            visible = part if visible is None else part & visible
        if visible is None:
            return x.new_zeros(())
        return torch.zeros_like(visible, dtype=x.dtype).masked_fill_(~visible, -torch.inf)

    def repeat_groups(self, x: Tensor) -> Tensor:
        """Give every query head its group's keys or values."""
        times = self.num_heads // self.num_groups
        return x if times == 1 else x.repeat_interleave(times, dim=-3)

    def sum_groups(self, g: Tensor) -> Tensor:
        """The transpose of `repeat_groups`."""
        times = self.num_heads // self.num_groups
        return g if times == 1 else g.unflatten(-3, (self.num_groups, times)).sum(-3)

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
            frame = _PerHead(self, part) if per_head else _AllHeads(self, part)
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
        stored = n * row <= _SHARE * memory
        self.stored: Tensor | None = x.new_empty(heads, n, n) if stored else None
        self.shift = x.new_empty(heads, n, 1)  # row logsumexp of the scores
        self.o = torch.empty_like(self.v)
        for rows in self._chunks():
            s = layer.score(self.q[:, rows], self.k) + layer.bias(x, rows.start, rows.stop)
            self.shift[:, rows] = s.logsumexp(-1, keepdim=True)
            p = self._exponential(s, rows)
            self.o[:, rows] = p @ self.v
            if self.stored is not None:
                self.stored[:, rows] = p

    def _chunks(self) -> list[slice]:
        n = self.q.shape[1]
        return [slice(i, min(i + self.rows, n)) for i in range(0, n, self.rows)]

    def _exponential(self, s: Tensor, rows: slice) -> Tensor:
        p = s.sub_(self.shift[:, rows]).exp_()
        return nn.functional.threshold_(p, _SMALLEST_PROBABILITY, 0.0)

    def _probabilities(self, rows: slice) -> Tensor:
        if self.stored is not None:
            return self.stored[:, rows]
        s = self.layer.score(self.q[:, rows], self.k)
        s += self.layer.bias(self.x, rows.start, rows.stop)
        return self._exponential(s, rows)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """``do``, shape ``(h, n, d_v)``, for ``dq, dk, dv`` with heads in front."""
        do = torch.empty_like(self.o)
        for rows in self._chunks():
            p = self._probabilities(rows)
            w = self.layer.score_jvp(self.q[:, rows], self.k, dq[:, rows], dk).mul_(p)
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
            gs = torch.bmm(go[:, rows], self.v.mT).sub_(mean[:, rows]).mul_(p)
            gq[:, rows], more_k = self.layer.score_vjp(self.q[:, rows], self.k, gs)
            more_v = torch.bmm(p.mT, go[:, rows])
            gk = more_k if gk is None else gk.add_(more_k)
            gv = more_v if gv is None else gv.add_(more_v)
        assert gk is not None and gv is not None
        return gq, gk, gv


class _AllHeads:
    """The linear maps around the core, all heads together."""

    axes = 2

    def __init__(self, layer: Attention, part: Part) -> None:
        self.layer = layer
        self.weight = torch.cat([layer.query * layer.scale, layer.key, layer.value])
        self.out = layer.output if part == "attention" else None
        self.heads, self.groups = layer.num_heads, layer.num_groups
        self.sizes = [layer.query.shape[0], layer.key.shape[0], layer.value.shape[0]]
        concat = layer.num_heads * layer.value_width
        self.width_out = concat if self.out is None else self.out.shape[0]

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        q, k, v = (e @ self.weight.T).split(self.sizes, dim=-1)
        q, k, v = (
            x.unflatten(-1, (h, -1)).transpose(0, 1)
            for x, h in ((q, self.heads), (k, self.groups), (v, self.groups))
        )
        q, k = _rotate(layer.rotary, q), _rotate(layer.rotary, k)
        return q, layer.repeat_groups(k), layer.repeat_groups(v)

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        layer = self.layer
        gk, gv = layer.sum_groups(gk), layer.sum_groups(gv)
        gq, gk = _rotate_t(layer.rotary, gq), _rotate_t(layer.rotary, gk)
        g = torch.cat([x.transpose(0, 1).flatten(1) for x in (gq, gk, gv)], dim=-1)
        return g @ self.weight

    def leave(self, o: Tensor) -> Tensor:
        heads = o.transpose(0, 1).flatten(1)
        return heads if self.out is None else heads @ self.out.T

    def leave_t(self, g: Tensor) -> Tensor:
        heads = g if self.out is None else g @ self.out
        return heads.unflatten(-1, (self.heads, -1)).transpose(0, 1)


class _PerHead:
    """The same maps with each head on its own copy of the input."""

    axes = 3

    def __init__(self, layer: Attention, part: Part) -> None:
        self.layer = layer
        times = layer.num_heads // layer.num_groups
        query = (layer.query * layer.scale).unflatten(0, (layer.num_heads, -1))
        key, value = (
            w.unflatten(0, (layer.num_groups, -1)).repeat_interleave(times, dim=0)
            for w in (layer.key, layer.value)
        )
        self.weight = torch.cat([query, key, value], dim=1)  # (h, 2k + d_v, d)
        self.sizes = [query.shape[1], key.shape[1], value.shape[1]]
        self.out = None
        self.width_out = layer.value_width
        if part == "attention" and layer.output is not None:
            self.out = layer.output.unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
            self.width_out = layer.output.shape[0]

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (e @ self.weight.mT).split(self.sizes, dim=-1)
        return _rotate(self.layer.rotary, q), _rotate(self.layer.rotary, k), v

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        gq, gk = _rotate_t(self.layer.rotary, gq), _rotate_t(self.layer.rotary, gk)
        return torch.cat([gq, gk, gv], dim=-1) @ self.weight

    def leave(self, o: Tensor) -> Tensor:
        return o if self.out is None else o @ self.out.mT

    def leave_t(self, g: Tensor) -> Tensor:
        return g if self.out is None else g @ self.out


def _rotate(rotary: Rotary | None, x: Tensor) -> Tensor:
    return x if rotary is None else rotary(x)


def _rotate_t(rotary: Rotary | None, g: Tensor) -> Tensor:
    return g if rotary is None else rotary.transpose(g)


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor | None, heads: int, groups: int
) -> None:
    """Say which weight does not fit the number of heads or the other weights."""
    if heads < 1 or groups < 1 or heads % groups:
        raise InputError(
            "`num_heads` should be a positive multiple of `num_groups`. "
            f"Found `num_heads = {heads}`, `num_groups = {groups}`."
        )
    for name, weight, parts in (("query", query, heads), ("key", key, groups), ("value", value, groups)):
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
        raise InputError(
            f"`output` should have {concat} columns. Found {output.shape[1]}."
        )


