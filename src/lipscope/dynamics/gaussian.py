"""Gaussian token distributions under attention: closed equations for mean and covariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, DotProduct, L2Attention, SinkhornAttention, check_layer
from lipscope.dynamics.integrate import Event, Solution, integrate
from lipscope.dynamics.particles import value_maps
from lipscope.errors import InputError, check_numbers

Closure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_LIMIT = 1e50  # limit of the factor: closures use its fourth power
_LEFT = 1e-9  # a blow-up is reported when this share of the elapsed time remains


@dataclass(frozen=True, eq=False, repr=False)
class GaussianTrajectory(Solution):
    """A normal distribution at several times.

    The fields of `Solution`; states are ``(t, d, 1 + d)``: the mean, and ``F`` with ``Σ = F F^T``.
    """

    @property
    def means(self) -> Float[Tensor, "t d"]:
        """``m``."""
        return self.states[..., 0]

    @property
    def covariances(self) -> Float[Tensor, "t d d"]:
        """``Σ``."""
        factors = self.states[..., 1:]
        return factors @ factors.mT

    @property
    def eigenvalues(self) -> Float[Tensor, "t d"]:
        """Eigenvalues of the covariances, descending, resolved to 1e-30 of the largest."""
        return torch.linalg.svdvals(self.states[..., 1:]).square()

    @property
    def blow_up(self) -> float | None:
        """The time of the blow-up, or None."""
        return next((one.time for one in self.events if one.name == "blow-up"), None)

    def ranks(self, tol: float = 1e-6) -> list[int]:
        """Numbers of eigenvalues above ``tol`` times the largest, at every time.

        This is the numerical rank; the exact rank never changes, see the theory.
        """
        return (self.eigenvalues > tol * self.eigenvalues[:, :1]).sum(-1).tolist()


def closure(layer: Attention) -> Closure:
    """The action of a layer on a normal distribution: ``(m, Σ) -> (L, c)``, ``Γ(x) = L x + c``.

    With ``M_h = W_h V_h``, ``A_h = scale K_h^T Q_h``, ``b_h = scale K_h^T b_Q``:

    - dot products: ``L = Σ_h M_h Σ A_h``, ``c = Σ_h M_h (m + Σ b_h)``;
    - L2, ``S = -|W (x - y)|²``: ``L = Σ_h M_h G_h 2 Σ W_h^T W_h``, ``c = Σ_h M_h G_h m`` with
      ``G_h = (I + 2 Σ W_h^T W_h)^-1``;
    - Sinkhorn: ``L = Σ_h M_h N_h``, ``c = Σ_h M_h (m - N_h m)`` with ``N_h = R k(B B^T) R A_h``,
      ``R = Σ^(1/2)``, ``B = R A_h R``, ``k(s) = 2 / (1 + √(1 + 4 s))``.

    Exact: the map is affine and preserves normality. Biases of values and outputs are added
    to ``c``. Holds for these three without mask, rotary embedding, score bias, cap or norms.

    Source: [castin2025] for dot products; derived here for the others
    (``docs/theory/dynamics.md``).

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> slope, shift = closure(DotProduct(2 * one, one, one))(one[0], 3 * one)
    >>> slope.item(), shift.item()
    (6.0, 1.0)
    """
    check_layer(layer)
    layer = layer.in_double()
    kind = next((k for k in _CLOSURES if type(layer) is k), None)
    options = (layer.mask, layer.rotary, layer.score_bias, layer.softcap, layer.window)
    options += (layer.query_norm, layer.key_norm, layer.value_norm)
    if kind is None or layer.causal or any(one is not None for one in options):
        raise InputError(
            "not available: normality is preserved by dot-product, L2 and Sinkhorn attention "
            "without mask, positions, cap or norms. Found another layer."
        )
    maps = value_maps(layer)
    if maps.shape[1] != maps.shape[2]:
        raise InputError(
            "A flow needs a layer that keeps the width of its tokens. Found "
            f"{maps.shape[2]} and {maps.shape[1]}."
        )
    means = _CLOSURES[kind](layer)
    origin = torch.zeros(1, layer.query.shape[1]).to(layer.query)
    fixed = layer.project_out(layer.project(origin)[2].flatten())  # biases of values and output

    def affine(m: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        check_numbers("mean", m, maps.shape[2])
        _axes(cov, maps.shape[2])
        slopes, shifts = means(m.double(), cov.double())
        return (maps @ slopes).sum(0), (maps @ shifts[..., None]).sum(0)[:, 0] + fixed

    return affine


def gaussian_flow(
    layer: Attention,
    mean: Float[Tensor, " d"],
    covariance: Float[Tensor, "d d"],
    times: Sequence[float] | Tensor,
    *,
    rtol: float = 1e-8,
    max_evaluations: int = 200_000,
) -> GaussianTrajectory:
    """Mean and covariance of normally distributed tokens that follow ``x' = Γ(x)``.

    ``m' = L m + c`` and ``Σ' = L Σ + Σ L^T`` with the layer's `closure`. Integrated as ``F' = L F``
    with ``Σ = F F^T``: the covariance stays positive semidefinite, with constant rank.

    Under dot products it may become infinite in finite time: the event ``blow-up``, reported when
    the remaining time at the current rate is 1e-9 of the elapsed time.

    Source: [castin2025]; in one dimension ``σ² = σ_0² / (1 - 2 v a σ_0² t)``.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> found = gaussian_flow(DotProduct(one, one, one), one[0], one, [0.0, 0.25, 1.0])
    >>> round(found.covariances[1].item(), 6), round(found.blow_up, 6)
    (2.0, 0.5)
    """
    affine = closure(layer)
    d = layer.query.shape[1]
    start = torch.cat([_checked_mean(mean, d)[:, None], _root(covariance, d)], 1)

    def velocity(_: float, state: Tensor) -> Tensor:
        m, f = state[:, 0], state[:, 1:]
        slope, shift = affine(m, f @ f.T)
        return torch.cat([(slope @ m + shift)[:, None], slope @ f], 1)

    def left(t: float, state: Tensor) -> float:
        size = state[:, 1:].abs().max().clamp_min(1e-300)  # avoids overflow in squares
        f, moved = state[:, 1:] / size, velocity(t, state)[:, 1:] / size
        cov = f @ f.T
        rate = 2 * (cov * (moved @ f.T)).sum() / cov.square().sum().clamp_min(1e-300)
        return 1 - _LEFT * t * float(rate)

    options = {"rtol": rtol, "max_evaluations": max_evaluations, "limit": _LIMIT}
    found = integrate(velocity, start, times, events=[Event("blow-up", left)], **options)
    return GaussianTrajectory(**vars(found))


# --- mean value under a head's attention at x: slope x + shift


def _dot_product_closure(layer: Attention) -> Closure:
    query, key = _queries_and_keys(layer)
    a = layer.scale * key.mT @ query
    held = layer.query_bias
    bias = torch.zeros(len(query), query.shape[1]).to(query)
    bias = bias if held is None else held.unflatten(0, (layer.num_heads, -1))
    b = layer.scale * (key.mT @ bias[..., None])[..., 0]
    return lambda m, cov: (cov @ a, m + b @ cov)


def _l2_closure(layer: Attention) -> Closure:
    w, _ = _queries_and_keys(layer)
    gram = 2 * w.mT @ w

    def means(m: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        pulled = cov @ gram
        both = torch.cat([pulled, m[:, None].expand(len(w), len(m), 1)], -1)
        solved = torch.linalg.solve(torch.eye(len(m)).to(m) + pulled, both)
        return solved[..., :-1], solved[..., -1]

    return means


def _sinkhorn_closure(layer: Attention) -> Closure:
    query, key = _queries_and_keys(layer)
    a = layer.scale * key.mT @ query

    def means(m: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(cov)
        root = vectors * values.clamp_min(0).sqrt() @ vectors.T
        b = root @ a @ root
        squares, frame = torch.linalg.eigh(b @ b.mT)
        shrink = 2 / (1 + (1 + 4 * squares.clamp_min(0)).sqrt())
        slope = root @ (frame * shrink[:, None, :]) @ frame.mT @ root @ a
        return slope, m - (slope @ m)

    return means


_CLOSURES = {
    DotProduct: _dot_product_closure,
    L2Attention: _l2_closure,
    SinkhornAttention: _sinkhorn_closure,
}


def _queries_and_keys(layer: Attention) -> tuple[Tensor, Tensor]:
    """Queries and keys of every head, ``(h, k, d)``."""
    query, key, _ = layer.projections()
    keys = layer.repeat_groups(key.unflatten(0, (layer.num_groups, -1)))
    return query.unflatten(0, (layer.num_heads, -1)), keys


def _checked_mean(mean: Tensor, d: int) -> Tensor:
    check_numbers("mean", mean, d)
    return mean.detach().to("cpu", torch.float64)


def _root(covariance: Tensor, d: int) -> Tensor:
    values, vectors = _axes(covariance, d)
    return vectors * values.clamp_min(0).sqrt() @ vectors.T


def _axes(covariance: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a covariance, after a check that it is one."""
    check_numbers("covariance", covariance, d, d)
    cov = covariance.detach().to("cpu", torch.float64)
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    off, size = float((cov - cov.T).abs().max()), float(values.abs().max())
    if off > 1e-6 * size or float(values.min()) < -1e-6 * size:
        raise InputError(
            "`covariance` should be symmetric and positive semidefinite. Found a least eigenvalue "
            f"of {float(values.min()):.3g}, and entries {off:.2g} apart from their mirror image."
        )
    return values, vectors
