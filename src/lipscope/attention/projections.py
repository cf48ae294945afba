"""The linear maps around the softmax: into queries, keys and values, and out of the heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lipscope.attention.layer import Layer, Map, MovingSide
from lipscope.attention.norms import NormAt
from lipscope.attention.rotary import Rotary


@runtime_checkable
class Frame(Protocol):
    """What stands around the core: linear maps into queries, keys and values, and out."""

    axes: int
    width_out: int

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)`` with heads in front, for the perturbation ``e``."""
        ...

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        ...

    def leave(self, o: Tensor) -> Tensor:
        """From the heads' outputs to the map's output."""
        ...

    def leave_t(self, g: Tensor) -> Tensor:
        """The transpose of `leave`."""
        ...


class AllHeads:
    """The linear maps around the core, all heads together, norms linearised at ``x``."""

    axes = 2

    def __init__(self, layer: Layer, map: Map, x: Tensor) -> None:
        self.layer = layer
        query, key, value = layer.projections()
        self.weight = torch.cat([query * layer.scale, key, value])
        self.norms = _norms_at(layer, x)
        self.out = layer.output if map == "attention" else None
        self.heads = layer.num_heads
        self.sizes = [query.shape[0], key.shape[0], value.shape[0]]
        concat = layer.num_heads * layer.value_width
        self.width_out = concat if self.out is None else self.out.shape[0]

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)`` with heads in front, for the perturbation ``e``."""
        layer = self.layer
        parts = (e @ self.weight.T).split(self.sizes, dim=-1)
        q, k, v = (
            (x if norm is None else norm.derivative(x)).unflatten(-1, (h, -1)).transpose(0, 1)
            for x, norm, h in zip(parts, self.norms, _counts(layer), strict=True)
        )
        q, k = _rotate(layer.rotary, q), _rotate(layer.rotary, k)
        return q, layer.repeat_groups(k), layer.repeat_groups(v)

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        layer = self.layer
        gk, gv = layer.sum_groups(gk), layer.sum_groups(gv)
        gq, gk = _rotate_t(layer.rotary, gq), _rotate_t(layer.rotary, gk)
        flat = (x.transpose(0, 1).flatten(1) for x in (gq, gk, gv))
        parts = [
            x if norm is None else norm.transpose(x)
            for x, norm in zip(flat, self.norms, strict=True)
        ]
        return torch.cat(parts, dim=-1) @ self.weight

    def leave(self, o: Tensor) -> Tensor:
        """From the heads' outputs to the map's output."""
        heads = o.transpose(0, 1).flatten(1)
        return heads if self.out is None else heads @ self.out.T

    def leave_t(self, g: Tensor) -> Tensor:
        """The transpose of `leave`."""
        heads = g if self.out is None else g @ self.out
        return heads.unflatten(-1, (self.heads, -1)).transpose(0, 1)


class PerHead:
    """The same maps with each head on its own copy of the input."""

    axes = 3

    def __init__(self, layer: Layer, map: Map, x: Tensor) -> None:
        self.layer = layer
        query, key, value = layer.projections()
        weights = (query * layer.scale, key, value)
        heads, counts = layer.num_heads, _counts(layer)
        by_head = [_by_head(w, c, heads) for w, c in zip(weights, counts, strict=True)]
        self.weight = torch.cat(by_head, dim=1)  # (h, 2k + d_v, d)
        self.sizes = [w.shape[1] for w in by_head]
        self.norms = [
            None if norm is None else _HeadNormAt(norm, w, c, heads)
            for norm, w, c in zip(_norms_at(layer, x), weights, counts, strict=True)
        ]
        self.out = None
        self.width_out = layer.value_width
        if map == "attention" and layer.output is not None:
            self.out = layer.output.unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
            self.width_out = layer.output.shape[0]

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)`` with heads in front, for the perturbation ``e``."""
        parts = (e @ self.weight.mT).split(self.sizes, dim=-1)
        q, k, v = (
            x if norm is None else norm.derivative(x, e)
            for x, norm in zip(parts, self.norms, strict=True)
        )
        return _rotate(self.layer.rotary, q), _rotate(self.layer.rotary, k), v

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        gq, gk = _rotate_t(self.layer.rotary, gq), _rotate_t(self.layer.rotary, gk)
        parts, along = [], gq.new_zeros(())
        for g, norm in zip((gq, gk, gv), self.norms, strict=True):
            parts.append(g if norm is None else norm.gain * g)
            if norm is not None:
                along = along + norm.along(parts[-1])
        return torch.cat(parts, dim=-1) @ self.weight - along

    def leave(self, o: Tensor) -> Tensor:
        """From the heads' outputs to the map's output."""
        return o if self.out is None else o @ self.out.mT

    def leave_t(self, g: Tensor) -> Tensor:
        """The transpose of `leave`."""
        return g if self.out is None else g @ self.out


class _HeadNormAt:
    """A linearised norm as one head feels it that has a copy ``e`` of the input to itself.

    Where the norm runs over all heads together, a head's own copy moves all of them:
    ``dy_h = g_h (W_h e - u_h <W^T u, e>)``, with ``W`` and ``u`` of the norm's whole part.
    """

    def __init__(self, norm: NormAt, weight: Tensor, count: int, heads: int) -> None:
        parts = norm.unit.shape[-2]
        self.gain, self.unit = (
            _by_head(t.flatten(-2).mT, count, heads).mT for t in (norm.gain, norm.unit)
        )
        pulled = norm.unit.transpose(0, 1) @ weight.unflatten(0, (parts, -1))  # (parts, n, d)
        self.pulled = pulled.repeat_interleave(heads // parts, dim=0)

    def derivative(self, dz: Tensor, e: Tensor) -> Tensor:
        """``dy`` for ``dz = W_h e``, each ``(h, n, ·)``."""
        return self.gain * (dz - self.unit * (self.pulled * e).sum(-1, keepdim=True))

    def along(self, gz: Tensor) -> Tensor:
        """What the transpose takes from the cotangent of the input, for ``gz = g_h gy``."""
        return self.pulled * (self.unit * gz).sum(-1, keepdim=True)


@dataclass
class OneSide:
    """Another frame of which only the queries, or only the keys and values, move.

    Attributes:
        inner: The frame at the tokens that move.
        side: Which of the two moves.
        q: Queries ``(h, n, k)``, for the shape.
        k: Keys ``(h, m, k)``.
        v: Values ``(h, m, d_v)``.
    """

    inner: Frame
    side: MovingSide
    q: Tensor
    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        self.axes, self.width_out = self.inner.axes, self.inner.width_out
        self.leave, self.leave_t = self.inner.leave, self.inner.leave_t

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, 0, 0)`` or ``(0, dk, dv)``."""
        dq, dk, dv = self.inner.enter(e)
        if self.side == "query":
            return dq, torch.zeros_like(self.k), torch.zeros_like(self.v)
        return torch.zeros_like(self.q), dk, dv

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        if self.side == "query":
            length = gq.shape[1]
            return self.inner.enter_t(gq, _zeros(gk, length), _zeros(gv, length))
        return self.inner.enter_t(_zeros(gq, gk.shape[1]), gk, gv)


@dataclass
class Entered:
    """Another frame whose tokens go through `Layer.entrance` first."""

    inner: Frame
    at: NormAt

    def __post_init__(self) -> None:
        self.axes, self.width_out = self.inner.axes, self.inner.width_out
        self.leave, self.leave_t = self.inner.leave, self.inner.leave_t

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)`` for the perturbation ``e`` before the entrance."""
        return self.inner.enter(self.at.derivative(e))

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        return self.at.transpose(self.inner.enter_t(gq, gk, gv))


class Coupled:
    """Another frame whose queries are divided by ``c(q, k, v)``, `Layer.divisor`.

    ``d(q / c) = dq / c - (q / c) d log c``; the gradient of ``c``, one number a head, is
    computed once.

    Args:
        inner: The frame of queries that are not divided.
        layer: Gives the divisor.
        x: Tokens of the queries.
        context: Tokens of keys and values, or None.
    """

    def __init__(self, inner: Frame, layer: Layer, x: Tensor, context: Tensor | None) -> None:
        self.inner = inner
        self.axes, self.width_out = inner.axes, inner.width_out
        self.leave, self.leave_t = inner.leave, inner.leave_t
        with torch.enable_grad():
            parts = [z.detach().requires_grad_() for z in layer.undivided(x, context)]
            divisor = layer.divisor(parts[0], parts[1], parts[2])
            assert divisor is not None
            slopes = torch.autograd.grad(divisor.sum(), parts)
        self.divisor = divisor.detach()
        self.slopes = [slope / self.divisor for slope in slopes]  # of log c
        self.q = parts[0].detach() / self.divisor

    def enter(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)``, queries divided."""
        dq, dk, dv = self.inner.enter(e)
        moves = zip(self.slopes, (dq, dk, dv), strict=True)
        change = torch.stack([(s * d).sum((-2, -1), keepdim=True) for s, d in moves]).sum(0)
        return dq / self.divisor - self.q * change, dk, dv

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        change = (self.q * gq).sum((-2, -1), keepdim=True)
        own = (gq / self.divisor, gk, gv)
        return self.inner.enter_t(*(g - s * change for g, s in zip(own, self.slopes, strict=True)))


def around(
    layer: Layer, frame: Frame, moved: Tensor, x: Tensor, context: Tensor | None = None
) -> Frame:
    """The frame with what a layer does to tokens first, and to its queries last."""
    if (entrance := layer.entrance()) is not None:
        frame = Entered(frame, entrance.at(moved))
    return frame if layer.by_token else Coupled(frame, layer, x, context)


def _zeros(like: Tensor, tokens: int) -> Tensor:
    return like.new_zeros(like.shape[0], tokens, like.shape[-1])


def _counts(layer: Layer) -> tuple[int, int, int]:
    """How many heads queries, keys and values have."""
    return layer.num_heads, layer.num_groups, layer.num_groups


def _norms_at(layer: Layer, x: Tensor) -> list[NormAt | None]:
    """The norms of queries, keys and values at the tokens ``x``."""
    norms = layer.norms()
    if all(norm is None for norm in norms):
        return [None, None, None]
    z = layer.project_in(x)
    return [None if norm is None else norm.at(part) for norm, part in zip(norms, z, strict=True)]


def _by_head(w: Tensor, count: int, heads: int) -> Tensor:
    """Rows of a weight by query head, ``(h, k, ·)``; those of a group are repeated."""
    return w.unflatten(0, (count, -1)).repeat_interleave(heads // count, dim=0)


def _rotate(rotary: Rotary | None, x: Tensor) -> Tensor:
    return x if rotary is None else rotary(x)


def _rotate_t(rotary: Rotary | None, g: Tensor) -> Tensor:
    return g if rotary is None else rotary.transpose(g)
