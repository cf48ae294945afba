"""Signals of a layer at an input: sigma, and logits, entropy and sinks beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, exact


@dataclass(frozen=True)
class Reading:
    """The signals of one layer after a step; None where there is none.

    One rule for every number: it is that of the worst entry of the probe and of the worst head
    there, the largest one; of the entropy, the smallest.

    Attributes:
        step: Step of training.
        layer: Index from 0.
        module: Path of its module.
        sigma: The local Lipschitz constant; None where it cannot be measured, likewise the two that
            follow.
        relative: ``sigma ‖X‖ / ‖f(X)‖``.
        top_share: Share of the most sensitive token.
        radius: Largest token norm of the map's input.
        largest_logit: Over the pairs of tokens that see each other.
        entropy: Mean over rows, in nats.
        sink_mass: Mean over rows of the attention that one token gets.
        weight_norm: Frobenius norm of all its parameters.
        update_norm: Frobenius norm of what the step changed in them.
        logits: Largest logit of every head.
        entropies: Entropy of every head.
        sinks: Sink mass of every head.
        problem: Why float32, or nothing, can measure sigma; None where all is well.
    """

    step: int
    layer: int
    module: str
    sigma: float | None
    relative: float | None
    top_share: float | None
    radius: float | None
    largest_logit: float | None
    entropy: float | None
    sink_mass: float | None
    weight_norm: float
    update_norm: float | None
    logits: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    sinks: tuple[float, ...] = ()
    problem: str | None = None

    def signals(self) -> dict[str, float | None]:
        """The numbers, one for each signal."""
        return {k: v for k, v in asdict(self).items() if k not in _NO_SIGNALS}


_NO_SIGNALS = ("step", "layer", "module", "logits", "entropies", "sinks", "problem")


def furthest(readings: Sequence[Reading]) -> str:
    """Which layer's sigma rose most from the first reading to the last, as the end of a line."""
    first = {one.layer: one for one in reversed(readings) if one.sigma}
    last = {one.layer: one for one in readings if one.sigma}
    if not first:
        return ""
    ratios = {i: (last[i].sigma or 0.0) / (first[i].sigma or 1.0) for i in first}
    most = max(ratios, key=lambda i: ratios[i])
    one, now = first[most], last[most]
    return (
        f"; sigma of layer {most} ({one.module}) went furthest, from {one.sigma:.4g} at step "
        f"{one.step} to {now.sigma:.4g} at step {now.step}"
    )


@torch.no_grad()
@exact
def largest_logits(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, " h"]:
    """The largest score of every head over the pairs that its mask lets see each other.

    Scaled and soft-capped, before a bias of the scores. Holds for every variant.

    Args:
        layer: The layer.
        x: Its input.

    Returns:
        One number a head.
    """
    q, k, _ = layer.project(x)
    s = layer.capped(layer.score(q, k))
    every = slice(0, len(x))
    visible = layer.visible(every, every, x.device)
    return (s if visible is None else s.masked_fill(~visible, -torch.inf)).flatten(1).amax(1)


@torch.no_grad()
@exact
def entropy_and_sink(
    layer: Attention, x: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """The spread of every head's attention, and the share that one token gets.

    Mean over rows of ``-Σ_j P_ij log P_ij`` in nats, and the largest over tokens ``j`` of the mean
    over rows of ``P_ij``: between ``1/n`` and 1, at 1 all rows read one token.

    Holds for every variant; rows of weights that do not add up to 1 are divided by their sum.

    Args:
        layer: The layer.
        x: Its input.

    Returns:
        Entropy and sink mass, one number a head each.
    """
    p = _shares(layer, x)
    return torch.special.entr(p).sum(-1).mean(-1), p.mean(-2).amax(-1)


@torch.no_grad()
@exact
def attention_received(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, "h n"]:
    """The attention that every token gets: the mean over rows of ``P_ij``, from every head.

    Sums to 1 over tokens. Holds for every variant; rows are divided by their sum, as in
    `entropy_and_sink`. Under a causal mask a late token is read by few rows, and gets little.

    Args:
        layer: The layer.
        x: Its input.

    Returns:
        One number a head and token.
    """
    return _shares(layer, x).mean(-2)


def _shares(layer: Attention, x: Tensor) -> Tensor:
    """Attention weights ``(h, n, n)``, rows divided by their sum."""
    q, k, _ = layer.project(x)
    p = layer.weights(q, k)
    return p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)


def joint_norm(tensors: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> float:
    """Frobenius norm of all tensors together, or of what has changed in them since ``before``."""
    parts = [t.detach().float() for t in tensors]
    if before is not None:
        parts = [now - then for now, then in zip(parts, before, strict=True)]
    return math.sqrt(sum(float(part.square().sum()) for part in parts))
