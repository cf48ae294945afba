"""The masked mean-field bound of "How Smooth Is Attention?" (Theorem 4.4), and where it fails.

Read on the authors' slides (January 2025): for causal attention too, the constant is that of
Theorem 3.5, |V| (1 + 3 |A| R²) e^(2 |A| R²). With A = 0 and V = 1 it is 1, while causal attention
is the running mean, a linear map of larger norm. The paper's own formula could not be read.

Run: python examples/stated_masked_bound.py
"""

import numpy as np

for n in (2, 10, 100):
    running_mean = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    print(f"n = {n:3d}: stated 1, causal attention {np.linalg.norm(running_mean, 2):.4f}")
