"""The linear maps around the softmax: into queries, keys and values, and out of the heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from lipscope.attention.core import Attention

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
        """``(dq, dk, dv)`` with heads in front, for the perturbation ``e``."""
        layer = self.layer
        q, k, v = (e @ self.weight.T).split(self.sizes, dim=-1)
        q, k, v = (
            x.unflatten(-1, (h, -1)).transpose(0, 1)
            for x, h in ((q, self.heads), (k, self.groups), (v, self.groups))
        )
        q, k = _rotate(layer.rotary, q), _rotate(layer.rotary, k)
        return q, layer.repeat_groups(k), layer.repeat_groups(v)

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        layer = self.layer
        gk, gv = layer.sum_groups(gk), layer.sum_groups(gv)
        gq, gk = _rotate_t(layer.rotary, gq), _rotate_t(layer.rotary, gk)
        g = torch.cat([x.transpose(0, 1).flatten(1) for x in (gq, gk, gv)], dim=-1)
        return g @ self.weight

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
        """``(dq, dk, dv)`` with heads in front, for the perturbation ``e``."""
        q, k, v = (e @ self.weight.mT).split(self.sizes, dim=-1)
        return _rotate(self.layer.rotary, q), _rotate(self.layer.rotary, k), v

    def enter_t(self, gq: Tensor, gk: Tensor, gv: Tensor) -> Tensor:
        """The transpose of `enter`."""
        gq, gk = _rotate_t(self.layer.rotary, gq), _rotate_t(self.layer.rotary, gk)
        return torch.cat([gq, gk, gv], dim=-1) @ self.weight

    def leave(self, o: Tensor) -> Tensor:
        """From the heads' outputs to the map's output."""
        return o if self.out is None else o @ self.out.mT

    def leave_t(self, g: Tensor) -> Tensor:
        """The transpose of `leave`."""
        return g if self.out is None else g @ self.out


def _rotate(rotary: Rotary | None, x: Tensor) -> Tensor:
    return x if rotary is None else rotary(x)


def _rotate_t(rotary: Rotary | None, g: Tensor) -> Tensor:
    return g if rotary is None else rotary.transpose(g)
