"""Sigma along depth, compared with the product of layer constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope import linalg
from lipscope.attention import Attention, check_layer
from lipscope.display import Shown
from lipscope.dynamics.integrate import Happened, integrate
from lipscope.dynamics.particles import Field, Function, residual
from lipscope.errors import InputError
from lipscope.measures import TokenMeasure

_DENSE = 1024  # maximum number of input entries for integrating the Jacobian of a flow
_SMALL = 256  # maximum number of input entries for dense Jacobians of layers


@dataclass(frozen=True, eq=False, repr=False)
class Depth(Shown):
    """Local Lipschitz constants of the map from the start to several depths."""

    times: Float[Tensor, " t"]  # depths
    # of the map from the start, ``(t,)``: a lower bound if from the solver, beyond 256 entries
    sigma: Float[Tensor, " t"]
    # an upper bound, with the solver's probability; ``sigma`` if exact
    upper: Float[Tensor, " t"]
    product: Float[Tensor, " t"]  # of the layer constants; ``exp ∫ μ`` in the limit of thin layers
    # ``exp ∫ ‖J‖``, from ``‖I + h J‖ <= 1 + h ‖J‖``; None for given operators
    norms: Float[Tensor, " t"] | None
    events: tuple[Happened, ...] = ()  # reasons for an early end

    @property
    def excess(self) -> Float[Tensor, " t"]:
        """``product / sigma``: the factor by which the product overestimates, at most."""
        return self.product / self.sigma


def sigma_along(
    f: Attention | Function,
    x: Float[Tensor, "n d"],
    times: Sequence[float] | Tensor,
    *,
    rtol: float = 1e-6,
) -> Depth:
    """``‖DΦ_t(X)‖`` of the flow ``X' = f(X)``, and its product over infinitely thin layers.

    ``M' = J(X) M`` is integrated with ``X``. ``‖I + h J‖ = 1 + h μ(J) + O(h²)`` with the
    logarithmic norm ``μ(J) = λ_max(J + J^T) / 2``, so the product of the constants of layers of
    thickness h tends to ``exp ∫ μ``. Always ``‖DΦ_t‖ <= exp ∫ μ <= exp ∫ ‖J‖``.

    Source: derived here (``docs/theory/dynamics.md``).

    A rotation preserves lengths, as does the bound from μ:

    >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    >>> found = sigma_along(lambda x: x @ turn.T, torch.ones(1, 2), [0.0, 1.0])
    >>> [round(float(v[-1]), 6) for v in (found.sigma, found.product, found.norms)]
    [1.0, 1.0, 2.718282]
    """
    _check_tokens(x)
    field = Field(f, x)
    start, size = field.start, field.start.numel()
    if size > _DENSE:
        raise InputError(
            f"`x` should hold at most {_DENSE:,} numbers. Found {size:,}; use `sigma_through` on "
            "residual layers."
        )

    def velocity(_: float, state: Tensor) -> Tensor:
        at, moved = state[:size].reshape(start.shape), state[size:-2].reshape(size, size)
        jacobian = linalg.to_dense(linalg.linearise(field.f, at))
        rate = torch.linalg.eigvalsh((jacobian + jacobian.T) / 2)[-1]
        norm = torch.linalg.matrix_norm(jacobian, 2)
        out = [field.read(at).flatten(), (jacobian @ moved).flatten(), rate[None], norm[None]]
        return torch.cat(out)

    both = torch.cat([start.flatten(), torch.eye(size).to(start).flatten(), start.new_zeros(2)])
    found = integrate(velocity, both, times, rtol=rtol)
    moved = found.states[:, size:-2].unflatten(1, (size, size))
    sigma = torch.linalg.matrix_norm(moved, 2)
    rate, norm = found.states[:, -2:].unbind(1)
    return Depth(found.times, sigma, sigma, rate.exp(), norm.exp(), found.events)


def _check_tokens(x: object) -> None:
    if isinstance(x, TokenMeasure):
        raise InputError(
            "`x` should be tokens: norms are not weighted. Found a measure; `local_constant` "
            "covers small moves of its atoms."
        )


def sigma_through(
    f: Attention | Sequence[Attention],
    x: Float[Tensor, "n d"],
    *,
    step: float,
    layers: int | None = None,
    tol: float = 1e-3,
) -> Depth:
    """Sigma of composed residual layers ``x <- x + step f(X)``, and the product of their sigmas.

    Uses products with the closed form of every layer (one shared layer or one per step), for any
    number of tokens and any width.
    """
    _check_tokens(x)
    parts = list(f) if isinstance(f, Sequence | nn.ModuleList) else [f]
    for layer in parts:
        check_layer(layer)
    path = residual(f, x, step=step, layers=layers)
    parts = [layer.in_double() for layer in parts]
    jacobians = []
    for i, state in enumerate(path.states[:-1]):
        jacobians.append(_residual_operator(step, parts[i % len(parts)].linearise(state)))
    at = range(1, len(jacobians) + 1)
    found = _along_depth(jacobians, path.times, at, tol, "residual")
    return replace(found, events=path.events)


def sigma_of_blocks(
    blocks: Sequence[linalg.Operator],
    *,
    depths: Sequence[int] | None = None,
    tol: float = 1e-3,
) -> Depth:
    """Sigma from the input of the first block to the output of several others, and the products.

    Blocks are Jacobians, each at the output of the previous one, such as those of the map ``block``
    at all layers of a model on one input; ``depths`` are numbers of blocks; None: all.
    """
    several = isinstance(blocks, Sequence) and all(isinstance(b, linalg.Operator) for b in blocks)
    if not several or not blocks or any(a.out_shape != b.in_shape for a, b in pairwise(blocks)):
        raise InputError(
            "`blocks` should be Jacobians whose shapes follow each other, at least one."
        )
    ends = range(1, len(blocks) + 1)
    several = ends if depths is None else depths
    at = list(several) if isinstance(several, Iterable) else []
    if not at or at != sorted(set(at)) or not set(at) <= set(ends):
        raise InputError(
            f"`depths` should be increasing, from 1 to {len(blocks)}. Found `depths = {depths}`."
        )
    times = torch.tensor([0, *at], dtype=torch.float64)
    return _along_depth(blocks, times, at, tol, "blocks")


def _along_depth(
    jacobians: Sequence[linalg.Operator], times: Tensor, at: Sequence[int], tol: float, name: str
) -> Depth:
    """Sigma of every operator, and of their compositions up to some depths."""
    sigma, upper, products, product = [1.0], [1.0], [1.0], 1.0
    dense = all(op.in_size <= _SMALL for op in jacobians)
    matrix: Tensor | None = None
    together: linalg.Operator | None = None
    for i, op in enumerate(jacobians[: max(at, default=0)], 1):
        if dense:
            alone = linalg.to_dense(op).double()
            matrix = alone if matrix is None else alone @ matrix
            product *= float(torch.linalg.matrix_norm(alone, 2))
        else:
            together = op if together is None else linalg.compose(op, together)
            product *= _solve_named(op, f"{name}|{i}|alone", tol).sigma
        if i in at:
            if matrix is not None:
                exact = float(torch.linalg.matrix_norm(matrix, 2))
                ends = exact, exact
            else:
                assert together is not None
                whole = _solve_named(together, f"{name}|{i}", tol)
                ends = whole.sigma, whole.upper
            sigma.append(ends[0])
            upper.append(ends[1])
            products.append(product)
    found = (torch.tensor(v, dtype=torch.float64) for v in (sigma, upper, products))
    return Depth(times, *found, norms=None)


def _solve_named(op: linalg.Operator, name: str, tol: float) -> linalg.TopSingular:
    return linalg.top_singular(op, tol=tol, generator=linalg.start_named(name))


def _residual_operator(step: float, op: linalg.Operator) -> linalg.Operator:
    """The Jacobian of ``x + step f(x)``."""
    return replace(
        op, matvec=lambda e: e + step * op.matvec(e), rmatvec=lambda g: g + step * op.rmatvec(g)
    )
