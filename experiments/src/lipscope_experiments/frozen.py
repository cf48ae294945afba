"""One token's column of a layer whose attention is frozen, ``C_s = Σ_h (P_h e_s) ⊗ W_h``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from scipy.linalg import eigh
from torch import Tensor

from lipscope import Attention, Operator, linearise
from lipscope.linalg import restrict
from lipscope.records import slope_of
from lipscope_experiments.simple_layers import top


@dataclass(frozen=True)
class FrozenColumn:
    """The column of the token whose column is the largest, and what its heads receive."""

    token: int  # s: whose column has the largest Frobenius norm
    norm: float  # ‖C_s‖
    mass: float  # root mean square over rows of P_is, heads weighted by |W_h u|² (u: top of C_s)
    received: float  # plain mean over heads and rows of P_is
    # by head: the token that receives most (by squares), that root mean square, ‖C_s‖ of the head
    heads: tuple[tuple[int, float, float], ...]


def frozen_column(layer: Attention, x: Float[Tensor, "n d"]) -> FrozenColumn:
    """The largest frozen column at an input, in float64.

    ``‖C_s‖² = n λ_max(Σ_hg Γ_hg W_h^T W_g)`` with ``Γ_hg = mean_i P_h,is P_g,is``; of one head
    ``‖C_s‖ = √n ‖W_h‖ rms_i P_h,is``.

    Source: derived here (``docs/theory/sink.md``).
    """
    value, output, p = _parts(layer, x)
    n = p.shape[-1]
    received, inner, squares = _column_squares(value, output, p)
    token = int(squares.argmax())
    weighted = (received[token][:, None, :, None] * inner).flatten(2).flatten(0, 1)
    values = value.flatten(0, 1)
    gram = (values.T @ weighted @ values).numpy()
    (square,), vector = eigh(gram, subset_by_index=[len(gram) - 1] * 2)
    along = value @ torch.from_numpy(vector[:, 0])
    written = torch.einsum("ohv,hv->ho", output, along).square().sum(1)
    own = received.diagonal(dim1=1, dim2=2)  # (s, h): Σ_i P_h,is²
    mass = float((written / written.sum() * own[token]).sum() / n)
    best, places = own.max(0)
    folded = torch.linalg.qr(output.transpose(0, 1), mode="r").R @ value  # as large as O_h V_h
    sizes = torch.linalg.matrix_norm(folded, 2)
    heads = [
        (int(s), math.sqrt(float(m) / n), float(m.sqrt() * size))
        for s, m, size in zip(places, best, sizes, strict=True)
    ]
    norm = math.sqrt(max(float(square), 0.0))
    return FrozenColumn(token, norm, math.sqrt(mass), float(p[..., token].mean()), tuple(heads))


def column_sizes(layer: Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """``‖C_s‖_F`` of every token, in float64: what it moves while attention weights stay."""
    return _column_squares(*_parts(layer, x))[2].sqrt()


def frozen_norm(layer: Attention, x: Float[Tensor, "n d"]) -> float:
    """``‖Σ_h P_h ⊗ W_h‖``: sigma of the layer with its attention weights held fixed."""
    value, output, p = _parts(layer, x)

    def moved(e: Tensor) -> Tensor:
        read = p @ (e @ value.mT)
        return read.transpose(0, 1).flatten(1) @ output.flatten(1).T

    return top(linearise(moved, x.to(p)), tol=1e-2).sigma


def column_norm(op: Operator, token: int) -> float:
    """The norm of one token's column of a Jacobian: sigma of moves of that token alone."""
    return top(restrict(op, move=torch.tensor([token])), tol=1e-2).sigma


def _column_squares(value: Tensor, output: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``Σ_i P_h,is P_g,is`` ``(s, h, g)``, inner products of outputs, and ``‖C_s‖_F²``."""
    received = torch.einsum("his,gis->shg", p, p)
    values, outputs = value.flatten(0, 1), output.flatten(1)
    inner = (outputs.T @ outputs).view(*value.shape[:2], *value.shape[:2])
    sizes = (inner * (values @ values.T).view_as(inner)).sum((1, 3))
    return received, inner, (received * sizes).sum((1, 2))


def _parts(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values ``(h, k_v, d)``, output projection ``(o, h, k_v)``, weights ``(h, n, n)``."""
    own, x = layer.in_double(), x.detach().to("cpu", torch.float64)
    q, k, _ = own.project(x)
    value = own.repeat_groups(own.projections()[2].unflatten(0, (own.num_groups, -1)))
    width = own.num_heads * value.shape[1]
    output = torch.eye(width, dtype=x.dtype) if own.output is None else own.output
    return value, output.unflatten(1, (own.num_heads, -1)), own.weights(q, k)


# --- the exponents of a layer along lengths, measured and by its column

Curve = Sequence[Mapping[str, Any]]
"""One layer, or one head of it, on one passage: a record for every length, the longest one last."""


def _slope(name: str, start: float = 0.0) -> Callable[[Curve], float]:
    return lambda curve: start + slope_of((one["n"], one[name]) for one in curve)


def column_share(curve: Curve) -> float:
    """The frozen column over sigma, at the longest length."""
    return curve[-1]["norm"] / curve[-1]["sigma"]


MEASURED, PREDICTED = "measured", "predicted"
SLOPES = {
    MEASURED: _slope("sigma"),
    PREDICTED: _slope("mass", 0.5),
    "column": _slope("norm"),
    "plain attention": _slope("received", 0.5),
}
