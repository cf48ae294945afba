"""Lower the sigma of a layer by gradient descent, and see what that costs.

A causal layer learns to copy the token before: each output should be the input one place back.
A penalty on sigma, in the same loss, trades error for sensitivity.

Run: python examples/penalise_sigma.py
"""

import torch
from torch import nn

import lipscope as ls

N, D, STEPS = 12, 16, 40


def layer() -> ls.Attention:
    """A causal layer with two heads; tokens carry their position in the first entries."""
    gen = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(D, D, generator=gen) / D**0.5) for _ in range(4)]
    return ls.DotProduct(*weights, heads=2, causal=True)


def tokens(gen: torch.Generator) -> torch.Tensor:
    """Random tokens with a position code."""
    x = torch.randn(N, D, generator=gen)
    angle = torch.arange(N)[:, None] * torch.tensor([0.5, 0.25])
    x[:, :4] = torch.cat([angle.cos(), angle.sin()], dim=1) * 2
    return x


def train(weight: float) -> tuple[float, float]:
    """Error and sigma on fresh tokens after training with ``weight`` times sigma added."""
    model = layer()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
    gen = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = [tokens(gen) for _ in range(8)]
        loss = torch.stack([(model(x)[1:] - x[:-1]).square().mean() for x in batch]).mean()
        if weight:
            loss = loss + weight * ls.sigma(model, batch[0], generator=gen)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    fresh = [tokens(torch.Generator().manual_seed(100 + i)) for i in range(16)]
    with torch.no_grad():
        error = torch.stack([(model(x)[1:] - x[:-1]).square().mean() for x in fresh]).mean()
    # A penalty is no measurement: sigma is measured again, with an interval.
    tops = [ls.top_singular(ls.linearise(model, x), generator=gen) for x in fresh]
    return float(error), max(top.sigma for top in tops)


for weight in (0.0, 0.1):
    error, worst = train(weight)
    print(f"penalty {weight:4.2f}: error {error:.3f}, largest sigma on fresh tokens {worst:.2f}")
