"""Small heads whose Jacobians are known or quickly formed."""

import torch
from torch import Tensor

import lipscope as ls

ONE = torch.eye(1).double()


def dense(layer: ls.Attention, x: Tensor) -> Tensor:
    return ls.to_dense(layer.linearise(x))


def sigma(layer: ls.Attention, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense(layer, x), 2))


def drawn(seed: int, *, d: int = 4, k: int = 3, causal: bool = False, bias: bool = False):
    """One head with Gaussian weights, and its generator."""
    gen = torch.Generator().manual_seed(seed)
    q, key, v = (torch.randn(r, d, generator=gen).double() for r in (k, k, d))
    b = torch.randn(k, generator=gen).double() if bias else None
    return ls.DotProduct(q, key, v, query_bias=b, causal=causal)


def line(gamma: float = 1.0, **options) -> ls.DotProduct:
    """One dimension, ``A = -gamma``, ``V = 1``."""
    return ls.DotProduct(ONE, -gamma * ONE, ONE, **options)
