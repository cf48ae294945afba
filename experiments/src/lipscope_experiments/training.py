"""Training of smooth Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.optim import AdamW, Muon

from lipscope import SmoothTransformer

SHARPER = 8.0
"""What scores are multiplied by in a loss: caps would leave them small, and answers unsure."""
_RATES = (0.1, 0.01)  # of Muon and of AdamW, the largest


def train(
    model: SmoothTransformer, loss_of: Callable[[], Tensor], steps: int
) -> Iterator[tuple[int, float]]:
    """Muon on the matrices, AdamW on the rest, rates that fall to zero; steps and losses."""
    kinds = ((Muon, model.matrices), (AdamW, model.others))
    optimisers = [kind(weights, lr=1.0, weight_decay=0.0) for kind, weights in kinds]
    for step in range(steps):
        loss = loss_of()
        for optimiser, rate in zip(optimisers, _RATES, strict=True):
            optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
            optimiser.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        model.cap_weights()
        yield step + 1, float(loss.detach())
