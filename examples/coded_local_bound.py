"""The local bound of "How Smooth Is Attention?" (Theorem C.3) as its scripts compute it.

Read in github.com/vcastin/how-smooth-is-attention, commit eff2f2a, `compute_bound`, for one head:
|V| sqrt(rho² r² (n + 1) + n) with rho = max |A x_i| and r = max |x_i - x_j|. Whether the printed
theorem asks for |A^T x_i| as well could not be read; without it, sigma can be larger.

Run: python examples/coded_local_bound.py
"""

import torch

a = 3 * torch.outer(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
x = torch.tensor([[3.0, 0.0], [-3.0, 0.0]]).repeat(4, 1)


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ a.T @ x.T, -1) @ x


jacobian = torch.autograd.functional.jacobian(attention, x).reshape(16, 16)
rho, r, n = (x @ a.T).norm(dim=1).max(), torch.cdist(x, x).max(), len(x)
coded, sigma = (rho**2 * r**2 * (n + 1) + n) ** 0.5, torch.linalg.norm(jacobian, 2)
print(f"as coded {coded:.2f}, sigma {sigma:.2f}")
