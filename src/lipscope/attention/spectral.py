"""Norms of weights that a layer is trained through."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention.precision import wide


def spectral_norm(matrix: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """``‖M‖``, with ``u v^T`` of its top singular vectors as derivative; in float32 at least.

    >>> spectral_norm(torch.tensor([[0.0, 3.0], [4.0, 0.0]])).item()
    4.0
    """
    matrix = wide(matrix)
    with torch.no_grad():
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u[..., 0] * (matrix @ vh[..., 0, :, None])[..., 0]).sum(-1)


def product_norm(
    left: Float[Tensor, "*b k d"], right: Float[Tensor, "*b k d"]
) -> Float[Tensor, "*b"]:
    """``‖L^T R‖``, from a matrix with ``k`` rows where these are the fewer.

    >>> product_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])).item()
    10.0
    """
    with torch.no_grad():
        small = torch.linalg.qr(left.mT, mode="r").R @ right
        v = torch.linalg.svd(small, full_matrices=False).Vh[..., 0, :, None]
        u = left.mT @ (right @ v)
        u = u / u.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
    return ((left @ u) * (right @ v)).sum((-2, -1))


def of_heads(
    heads: Float[Tensor, " h"], output: Float[Tensor, "d_out hv"] | None
) -> Float[Tensor, ""]:
    """``‖W_O‖ √(Σ_h c_h²)``: a bound of the layer from one ``c_h`` of every head."""
    together = torch.linalg.vector_norm(heads)
    return together if output is None else spectral_norm(output) * together
