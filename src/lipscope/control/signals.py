"""What can be read off a layer at an input besides sigma: logits, entropy, sinks."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention


@torch.no_grad()
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
def entropy_and_sink(
    layer: Attention, x: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """How far the attention of every head is spread, and how much of it one token gets.

    Mean over rows of ``-Σ_j P_ij log P_ij`` in nats, and the largest over tokens ``j`` of the mean
    over rows of ``P_ij``: between ``1/n`` and 1, at 1 all rows read one token.

    Holds for every variant; rows of weights that do not add up to 1 are divided by their sum.

    Args:
        layer: The layer.
        x: Its input.

    Returns:
        Entropy and sink mass, one number a head each.
    """
    q, k, _ = layer.project(x)
    p = layer.weights(q, k)
    p = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return torch.special.entr(p).sum(-1).mean(-1), p.mean(-2).amax(-1)
