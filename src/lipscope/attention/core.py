"""Softmax calculus: forward, JVP and VJP of an attention layer in closed form.

A variant supplies a score and its two derivatives (`Attention.score`, `score_jvp`,
`score_vjp`); heads, grouped keys and values, biases, masks, rotary embedding, chunking
and the output projection live here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lipscope.attention.chunked import CHUNK_BYTES, ChunkedCore
from lipscope.attention.norms import TokenNorm
from lipscope.attention.projections import (
    AllHeads,
    Frame,
    OneSide,
    Part,
    PerHead,
    Rotary,
    Side,
)
from lipscope.errors import InputError
from lipscope.linalg.operator import Operator, over_leading


class Attention(nn.Module, ABC):
    """An attention layer ``R^(n x d) -> R^(n x d_out)``, any number of heads.

    ``f(X) = concat_h(P_h V_h) W_O^T + b_O`` with ``P_h`` the masked row softmax of
    ``cap(S_h) + B_h``, ``S_h`` the variant's score of ``Q_h = X W_Q^T + b_Q`` and ``K_h``,
    ``cap(s) = c tanh(s / c)`` where a soft cap is given. Query heads share keys and values
    in groups of equal size where there are fewer of those. With a ``context``, keys and values
    are made of its tokens (cross-attention).

    A row that may read no token gives zero heads: a defined result, and a derivative of zero.

    Holds for a fixed number of tokens where a mask, a bias of the logits or a rotary embedding
    is given.

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
        window: Token i reads tokens j > i - window only.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may read j. ``(n, m)`` for
            queries and keys of different tokens, likewise ``score_bias``.
        rotary: Rotary embedding of queries and keys.
        score_bias: ``B``, ``(n, n)`` or ``(heads, n, n)``, added to the (capped) scores.
        softcap: ``c``, positive; scores are not capped if None.
        query_norm: Norm of the queries, before the rotary embedding and the scale.
        key_norm: Norm of the keys, before the rotary embedding.
        value_norm: Norm of the values.

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
        _check_shapes(query, key, value, output, heads, self.num_groups)
        for option, number in (("softcap", softcap), ("window", window)):
            if number is not None and not number > 0:
                raise InputError(f"`{option}` should be positive. Found `{option} = {number}`.")
        for name, tensor in {
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "query_bias": query_bias,
            "key_bias": key_bias,
            "value_bias": value_bias,
            "output_bias": output_bias,
            "score_bias": score_bias,
        }.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.head_width = query.shape[0] // heads
        self.value_width = value.shape[0] // self.num_groups
        self.scale = self.head_width**-0.5 if scale is None else scale
        self.causal, self.window = causal, window
        self.mask = mask
        self.rotary = rotary
        self.softcap = softcap
        self.query_norm, self.key_norm, self.value_norm = query_norm, key_norm, value_norm

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        """What ``to``, ``double`` and the like do, to what is no weight too."""
        if self.mask is not None:
            self.mask = fn(self.mask)
        if self.rotary is not None:
            self.rotary = Rotary(fn(self.rotary.cos), fn(self.rotary.sin))
        return super()._apply(fn, recurse)

    @property
    def positional(self) -> bool:
        """Whether logits depend on where two tokens are, beyond what the mask hides."""
        return self.rotary is not None or self.score_bias is not None

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

    def forward(
        self, x: Float[Tensor, "*b n d"], context: Float[Tensor, "*b m d"] | None = None
    ) -> Float[Tensor, "*b n d_out"]:
        """The layer's output, differentiable by autograd; the closed form's reference."""
        return self.project_out(self.heads(x, context))

    def heads(
        self, x: Float[Tensor, "*b n d"], context: Float[Tensor, "*b m d"] | None = None
    ) -> Float[Tensor, "*b n hv"]:
        """Concatenated heads before the projection; in chunks where no gradient is wanted."""
        if not torch.is_grad_enabled() and x.ndim == 2:
            return ChunkedCore(self, x, 8 * CHUNK_BYTES, context).o.transpose(0, 1).flatten(1)
        q, k, v = self.project(x, context)
        return (self.probabilities(q, k) @ v).transpose(-3, -2).flatten(-2)

    def probabilities(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """Attention weights ``(..., num_heads, c, m)`` of scaled queries and keys.

        Args:
            q: Queries of ``c`` consecutive rows.
            k: Keys.
            start: The first of the rows.
        """
        rows = slice(start, start + q.shape[-2])
        s, bias = self.capped(self.score(q, k)), self.bias(k, rows, slice(0, k.shape[-2]))
        p = torch.softmax(s if bias is None else s + bias, dim=-1)
        empty = self.empty_rows(k)
        return p if empty is None else p.masked_fill(empty[..., rows, None], 0.0)

    def capped(self, s: Tensor) -> Tensor:
        """``c tanh(s / c)``, or the scores as they are."""
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries, keys and values, each ``(..., num_heads, n or m, width)``."""
        q, k, v = self.project_in(x, context)
        q = self._split(_normed(self.query_norm, q), self.num_heads)
        k = self._split(_normed(self.key_norm, k), self.num_groups)
        v = self._split(_normed(self.value_norm, v), self.num_groups)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return q * self.scale, self.repeat_groups(k), self.repeat_groups(v)

    def project_in(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the weights make them, heads side by side."""
        context = x if context is None else context
        return (
            nn.functional.linear(x, self.query, self.query_bias),
            nn.functional.linear(context, self.key, self.key_bias),
            nn.functional.linear(context, self.value, self.value_bias),
        )

    def project_out(self, heads: Tensor) -> Tensor:
        """Concatenated heads ``(..., n, num_heads * d_v)`` through the output projection."""
        if self.output is None:
            return heads
        return nn.functional.linear(heads, self.output, self.output_bias)

    def bias(self, k: Tensor, rows: slice, keys: slice) -> Tensor | None:
        """What is added to a block of scores, ``(h or none, rows, keys)``, like ``k``.

        The layer's own bias, and -inf where the mask hides; None if nothing. Rows that may
        read no token are left unmasked here and set to zero after the softmax.
        """
        added = None if self.score_bias is None else self.score_bias[..., rows, keys]
        visible = self.visible(rows, keys, k.device)
        if visible is None:
            return added
        visible = visible | ~visible.any(-1, keepdim=True)
        if added is None:
            added = torch.zeros((), dtype=k.dtype, device=k.device)
        return torch.where(visible, added, -torch.inf)

    def visible(
        self, rows: slice, keys: slice, device: torch.device | None = None
    ) -> Tensor | None:
        """True where a row may read a key, ``(h or none, rows, keys)``; None: all."""
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

    def reach(self, rows: slice, num_keys: int) -> slice:
        """The keys that some of these rows may read: causal layers and windows see no others."""
        last = min(rows.stop, num_keys) if self.causal else num_keys
        first = 0 if self.window is None else rows.start - self.window + 1
        return slice(min(max(first, 0), last - 1), last)

    def empty_rows(self, k: Tensor) -> Tensor | None:
        """Rows that may read no token, ``(n,)`` or ``(h, n)``; None if there is none."""
        if self.mask is None:
            return None
        rows, keys = slice(0, self.mask.shape[-2]), slice(0, k.shape[-2])
        visible = self.visible(rows, keys, k.device)
        assert visible is not None
        empty = ~visible.any(-1)
        return empty if bool(empty.any()) else None

    def repeat_groups(self, x: Tensor) -> Tensor:
        """Give every query head its group's keys or values."""
        times = self.num_heads // self.num_groups
        return x if times == 1 else x.repeat_interleave(times, dim=-3)

    def sum_groups(self, g: Tensor) -> Tensor:
        """The transpose of `repeat_groups`."""
        times = self.num_heads // self.num_groups
        return g if times == 1 else g.unflatten(-3, (self.num_groups, times)).sum(-3)

    def frame(self, x: Tensor, part: Part, *, per_head: bool) -> Frame:
        """The linear maps around the core at ``x``."""
        return PerHead(self, part, x) if per_head else AllHeads(self, part, x)

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
        context: Float[Tensor, "m d"] | None = None,
        side: Side = "query",
    ) -> Operator:
        """The Jacobian at ``x`` in closed form: 8 n d^2 + 8 n^2 d flops a product (MHA).

        Queries, keys, values, softmax statistics and, where they fit, probabilities are
        computed once; a product costs matrix multiplications and one elementwise pass. Blocks
        that a causal mask or a window hides are skipped: causal layers cost about half.

        Args:
            x: The point, ``(n, d)``.
            memory: Bytes for stored probabilities and chunks; half of it may be kept.
            part: ``attention``, or ``heads`` for the concatenation before the output
                projection.
            per_head: One operator per query head, on a leading axis of length
                ``num_heads``: the head's slice for ``heads``, its contribution through its
                part of the projection for ``attention``.
            context: Tokens ``(m, d)`` of keys and values, for cross-attention; those of ``x``
                if None.
            side: With a context, which of the two moves while the other stays: ``query``
                (``x``) or ``key`` (the context).

        Returns:
            Operator ``(n, d) -> (n, d_out)``, for ``side = "key"`` ``(m, d) -> (n, d_out)``;
            with ``per_head`` the products take and return the leading axis of heads.

        Source: Lemma C.2 of [castin2024], in matrix form (``docs/theory``).
        """
        moved = x if context is None or side == "query" else context
        with torch.no_grad():
            core = ChunkedCore(self, x, memory, context)
            frame = self.frame(moved, part, per_head=per_head)
            if context is not None:
                frame = OneSide(frame, side, core.q, core.k, core.v)

        def matvec(e: Tensor) -> Tensor:
            with torch.no_grad():
                return frame.leave(core.jvp(*frame.enter(e)))

        def rmatvec(g: Tensor) -> Tensor:
            with torch.no_grad():
                return frame.enter_t(*core.vjp(frame.leave_t(g)))

        return Operator(
            over_leading(matvec, frame.axes),
            over_leading(rmatvec, frame.axes),
            tuple(moved.shape),
            (x.shape[0], frame.width_out),
            x.dtype,
            x.device,
        )


def _normed(norm: TokenNorm | None, z: Tensor) -> Tensor:
    return z if norm is None else norm(z)


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
