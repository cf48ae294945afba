"""Measure attention inside a module of your own, and the Jacobian of any function.

Run: python examples/your_own_model.py
"""

import torch
from torch import nn

import lipscope as ls

torch.manual_seed(0)

# Any torch module with attention inside: two samples of 20 tokens of width 32.
encoder = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1),
    num_layers=3,
    enable_nested_tensor=False,
)
batch = torch.randn(2, 20, 32)
for row in ls.measure(encoder, batch, modules=r"layers\.\d+\.self_attn$"):
    print(f"layer {row.layer}, sample {row.sample}: sigma {row.sigma:.4f}, {row.note}")

# Any function of a tensor: the top singular value of its Jacobian, with an interval.
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
x = torch.randn(64)
top = ls.top_singular(
    ls.linearise(mlp, x), tol=1e-3, delta=1e-6, generator=torch.Generator().manual_seed(1)
)
dense = torch.linalg.matrix_norm(ls.to_dense(ls.linearise(mlp, x)), 2)
print(f"MLP: sigma {top.sigma:.4f}, upper {top.upper:.4f}, dense SVD {dense:.4f}")

# An attention layer in closed form: the map that is measured is the map that is written here.
layer = ls.DotProduct(*(torch.randn(48, 48) / 7 for _ in range(4)), heads=4, causal=True)
tokens = torch.randn(128, 48)
top = ls.top_singular(ls.linearise(layer, tokens), generator=torch.Generator().manual_seed(2))
share = top.v.square().sum(dim=1)
print(f"closed form: sigma {top.sigma:.3f}; token {int(share.argmax())} carries {share.max():.0%}")
