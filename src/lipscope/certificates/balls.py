"""Several heads over a ball.

Derived here; proofs: ``docs/theory/ball-certificate.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Rotary
from lipscope.attention.projections import Part
from lipscope.certificates.expansion import rest
from lipscope.errors import InputError
from lipscope.linalg.singular import TopSingular, top_singular
from lipscope.theorems.derived.ball import Ball, least
from lipscope.theorems.derived.intervals import BallName
from lipscope.theorems.derived.row_gram import Weighted, row_gram_joint, weighted_head
from lipscope.theorems.head import check_scores
from lipscope.theorems.head_at import HeadAt
from lipscope.theorems.register import NotApplicableError
from lipscope.theorems.several import AskedLayer


@dataclass(frozen=True)
class BallValue:
    """A bound of sigma over a ball.

    Attributes:
        total: Of all heads together.
        form: How they were put together.
        heads: Value and smallest form of each.
    """

    total: float
    form: str
    heads: list[tuple[float, str]]


class BallLayer:
    """All heads of a layer at one centre.

    Args:
        layer: The layer.
        x: Centre of the ball.
        map: ``attention``: heads add up; ``heads``: they stand side by side.
        sharp: Also use the row-Gram certificate at the centre, and what is left of all heads
            together beyond it (`around`).
    """

    def __init__(self, layer: DotProduct, x: Tensor, map: Part, sharp: bool) -> None:
        self.layer = AskedLayer(layer, map, x=x)
        self.sharp = sharp
        self.centres = [HeadAt(head, x) for head in self.layer.heads]
        self.weighted = [weighted_head(c) if sharp else None for c in self.centres]
        self.local = [_local(*pair) for pair in zip(self.centres, self.weighted, strict=True)]
        self.several = len(self.centres) > 1
        self.joint = row_gram_joint(self.layer.together) if sharp and self.several else math.inf

    @cached_property
    def bare(self) -> list[HeadAt]:
        """The heads before the output projection, if there is one."""
        assert self.layer.x is not None
        return [HeadAt(head, self.layer.x) for head in self.layer.bare]

    @cached_property
    def bare_local(self) -> list[float]:
        """The best cheap certificate of each of them at the centre."""
        return [_local(c, None) for c in self.bare]

    def around(self, radii: Tensor, ball: BallName) -> tuple[float, list[float]]:
        """``>= ‖f(X') - f(X)‖ / ‖X' - X‖`` from X itself: sigma there plus the rest.

        Returns:
            Of the layer, infinite without ``sharp``, and of each head.
        """
        output = self.layer.attention.output if self.layer.projected else None
        together, each = rest(self.bare, output, radii, ball, together=self.sharp)
        heads = [local + one for local, one in zip(self.local, each, strict=True)]
        return (self.joint + together if self.several else heads[0]), heads

    def at(self, radii: Tensor, ball: BallName) -> BallValue:
        """Bounds of sigma over the ball of these radii."""
        # a Frobenius ball has one radius by definition
        eps = float(radii[0]) if ball == "frobenius" else radii
        balls = [Ball(c, eps, ball, w) for c, w in zip(self.centres, self.weighted, strict=True)]
        forms = [b.forms(local) for b, local in zip(balls, self.local, strict=True)]
        heads = [(least(f), min(f, key=lambda name: f[name])) for f in forms]
        if not self.several:
            return BallValue(heads[0][0], "one head", heads)
        values = torch.tensor([value for value, _ in heads], dtype=torch.float64)
        change = torch.tensor([b.change for b in balls], dtype=torch.float64)
        apart = not self.layer.projected or self.layer.norm_output == 0.0  # outputs side by side
        together = {
            "sum": float(values.norm() if apart else values.sum()),
            "joint": self.joint + float(change.norm() if apart else change.sum()),
        }
        if self.layer.projected:
            each = [
                least(Ball(c, eps, ball).forms(local))
                for c, local in zip(self.bare, self.bare_local, strict=True)
            ]
            together["projection"] = self.layer.norm_output * math.hypot(*each)
        form = min(together, key=lambda name: together[name])
        return BallValue(together[form], form, heads)


def _local(centre: HeadAt, weighted: Weighted | None) -> float:
    """The best certificate at the centre."""
    at = Ball(centre, 0.0)
    return min(at.by_rows, at.by_blocks, math.inf if weighted is None else weighted.value)


def sigma_of(layer: DotProduct, x: Tensor, map: Part = "attention", seed: int = 0) -> TopSingular:
    """Sigma of a layer at ``x``, from a start of its own."""
    generator = torch.Generator().manual_seed(seed)
    return top_singular(layer.linearise(x, part=map), tol=1e-4, generator=generator)


def in_double(layer: Attention, head: int | None) -> DotProduct:
    """The layer, or one head of it, in float64 on the CPU.

    Raises:
        InputError: For other variants, or a head that it does not have.
    """
    if not isinstance(layer, DotProduct):
        raise InputError(
            f"No certificate: the proof is for dot-product attention. Found "
            f"`{type(layer).__name__}`."
        )
    try:
        check_scores(layer)
    except NotApplicableError as why:
        raise InputError(f"No certificate: the proof does not cover this layer, {why}.") from None
    if head is not None and not 0 <= head < layer.num_heads:
        raise InputError(
            f"`head` should be between 0 and {layer.num_heads - 1}. Found `head = {head}`."
        )

    def rows(w: Tensor | None, heads: int) -> Tensor | None:
        if w is None:
            return None
        w = w.detach().to("cpu", torch.float64)
        if head is None:
            return w
        return w.unflatten(0, (heads, -1))[head * heads // layer.num_heads]

    def needed(w: Tensor, heads: int) -> Tensor:
        found = rows(w, heads)
        assert found is not None
        return found

    output, mask = layer.output, layer.mask
    if output is not None:
        output = output.detach().to("cpu", torch.float64)
        output = output if head is None else output.chunk(layer.num_heads, 1)[head]
    if mask is not None:
        mask = mask.cpu() if head is None or mask.ndim == 2 else mask[head].cpu()
    score_bias = layer.score_bias
    if score_bias is not None:
        score_bias = score_bias.detach().to("cpu", torch.float64)
        score_bias = score_bias if head is None or score_bias.ndim == 2 else score_bias[head]
    rotary = layer.rotary
    if rotary is not None:
        rotary = Rotary(*(w.to("cpu", torch.float64) for w in (rotary.cos, rotary.sin)))
    h, g = layer.num_heads, layer.num_groups
    bias = layer.output_bias
    return DotProduct(
        needed(layer.query, h),
        needed(layer.key, g),
        needed(layer.value, g),
        output,
        heads=h if head is None else 1,
        groups=g if head is None else 1,
        query_bias=rows(layer.query_bias, h),
        key_bias=rows(layer.key_bias, g),
        value_bias=rows(layer.value_bias, g),
        output_bias=None if bias is None else bias.detach().to("cpu", torch.float64),
        scale=layer.scale,
        causal=layer.causal,
        mask=mask,
        rotary=rotary,
        window=layer.window,
        score_bias=score_bias,
    )


def tokens_of(layer: DotProduct, x: Tensor) -> Tensor:
    """Tokens in float64 on the CPU, checked.

    Raises:
        InputError: If they do not fit the layer or are not finite.
    """
    width = layer.query.shape[1]
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != width:
        raise InputError(
            f"`x` should have shape (n, {width}), n at least 1. Found {tuple(x.shape)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise InputError("`x` should be finite. Found NaN or infinite tokens.")
    return x.detach().to("cpu", torch.float64)
