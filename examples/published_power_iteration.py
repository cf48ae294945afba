"""What the published power iteration of "How Smooth Is Attention?" returns.

Read in github.com/vcastin/how-smooth-is-attention, commit eff2f2a, `loc_lipschitz`: index 0 of
`torch.func.jvp` is the value of the map, not its derivative along u, so u never enters.

Run: python examples/published_power_iteration.py
"""

import torch

weight = torch.diag(torch.tensor([3.0, 1.0]))
x = torch.tensor([0.0, 2.0])


def f(x: torch.Tensor) -> torch.Tensor:
    return weight @ x


pullback = torch.func.vjp(f, x)[1]
for index in (0, 1):  # 0 as published, 1 the derivative
    torch.manual_seed(0)
    u, mu = torch.nn.functional.normalize(torch.randn(2), dim=0), torch.tensor(0.0)
    for _ in range(50):
        v = pullback(torch.func.jvp(f, (x,), (u,))[index])[0]
        mu, u = torch.dot(u, v), v / v.norm()
    print(f"jvp(...)[{index}]: {mu.sqrt():.4f}")

print(f"|J^T f(x)|^(1/2) = {pullback(f(x))[0].norm().sqrt():.4f}, sigma = 3.0000")
