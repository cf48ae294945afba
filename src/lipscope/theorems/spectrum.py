"""Norms of matrices as the theorems need them, in float64."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def spectral_norm(matrix: Float[Tensor, "r c"]) -> float:
    """``‖M‖``, on the CPU in float64."""
    return float(torch.linalg.matrix_norm(matrix.detach().to("cpu", torch.float64), 2))


def spectral_norms(m: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """Of many small matrices, from the smaller Gram matrix of each."""
    size = m.abs().amax((-2, -1), keepdim=True)  # squares must not underflow
    m = m / torch.where(size > 0, size, 1.0)
    return size[..., 0, 0] * eigenvalue(m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m).sqrt()


def eigenvalue(m: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    """Largest eigenvalues of positive semidefinite matrices; inf where they overflow."""
    if not bool(torch.isfinite(m).all()):
        return torch.full(m.shape[:-2], torch.inf, dtype=m.dtype)
    if m.shape[-1] == 1:
        return m[..., 0, 0].clamp_min(0.0)
    return torch.linalg.eigvalsh(m)[..., -1].clamp_min(0.0)
