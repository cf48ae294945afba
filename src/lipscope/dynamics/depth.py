"""Sigma along depth: of the flow map, beside what its layers allow one by one."""

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

_DENSE = 1024  # numbers of an input beyond which the Jacobian of a flow is not carried along
_SMALL = 256  # numbers up to which Jacobians of layers are formed


@dataclass(frozen=True, eq=False, repr=False)
class Depth(Shown):
    """Local constants of the map from the start to several depths."""

    times: Float[Tensor, " t"]  # depths
    # of the map from the start, ``(t,)``: a lower value where a solver was asked, for more than 256
    # numbers
    sigma: Float[Tensor, " t"]
    # an upper value, with the probability of the solver; ``sigma`` where it is exact
    upper: Float[Tensor, " t"]
    product: Float[Tensor, " t"]  # of the layers' constants; ``exp ∫ μ`` in the limit of thin ones
    # ``exp ∫ ‖J‖``, what ``‖I + h J‖ <= 1 + h ‖J‖`` leaves of the product; None for given operators
    norms: Float[Tensor, " t"] | None
    events: tuple[Happened, ...] = ()  # what ended it early

    @property
    def excess(self) -> Float[Tensor, " t"]:
        """``product / sigma``: by how much the product overestimates, at most."""
        return self.product / self.sigma


def sigma_along(
    f: Attention | Function,
    x: Float[Tensor, "n d"],
    times: Sequence[float] | Tensor,
    *,
    rtol: float = 1e-6,
) -> Depth:
    """``‖DΦ_t(X)‖`` of the flow ``X' = f(X)``, and the product of infinitely thin layers.

    ``M' = J(X) M`` is solved along with ``X``. ``‖I + h J‖ = 1 + h μ(J) + O(h²)`` with the
    logarithmic norm ``μ(J) = λ_max(J + J^T) / 2``, so the product of the constants of layers of
    thickness h tends to ``exp ∫ μ``. Always ``‖DΦ_t‖ <= exp ∫ μ <= exp ∫ ‖J‖``.

    Source: derived here (``docs/theory/dynamics.md``).

    A rotation keeps all lengths, and μ knows it:

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
            "`x` should be tokens: norms are not weighted. Found a measure; of small moves of its "
            "atoms `local_constant` speaks."
        )


def sigma_through(
    f: Attention | Sequence[Attention],
    x: Float[Tensor, "n d"],
    *,
    step: float,
    layers: int | None = None,
    tol: float = 1e-3,
) -> Depth:
    """Sigma of residual layers ``x <- x + step f(X)`` together, and the product of them one by one.

    By products with the closed form of every layer, given alone or one for each step: any number of
    tokens and widths.
    """
    _check_tokens(x)
    given = list(f) if isinstance(f, Sequence | nn.ModuleList) else [f]
    for layer in given:
        check_layer(layer)
    path = residual(f, x, step=step, layers=layers)
    given = [layer.in_double() for layer in given]
    jacobians = []
    for i, state in enumerate(path.states[:-1]):
        jacobians.append(_residual_operator(step, given[i % len(given)].linearise(state)))
    at = range(1, len(jacobians) + 1)
    found = _along_depth(jacobians, path.times, at, tol, "residual")
    return replace(found, events=path.events)


def sigma_of_blocks(
    blocks: Sequence[linalg.Operator],
    *,
    depths: Sequence[int] | None = None,
    tol: float = 1e-3,
) -> Depth:
    """Sigma from the entrance of the first block to the end of others, and the products.

    Blocks are Jacobians, each at the output of the one before, such as those of the map ``block``
    at all layers of a model on one input; ``depths`` are numbers of blocks, every one if None.
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
    """Every operator alone, and all together up to some of them."""
    sigma, upper, products, product = [1.0], [1.0], [1.0], 1.0
    dense = all(op.in_size <= _SMALL for op in jacobians)
    matrix: Tensor | None = None
    together: linalg.Operator | None = None
    for i, own in enumerate(jacobians[: at[-1]], 1):
        if dense:
            alone = linalg.to_dense(own).double()
            matrix = alone if matrix is None else alone @ matrix
            product *= float(torch.linalg.matrix_norm(alone, 2))
        else:
            together = own if together is None else linalg.compose(own, together)
            product *= _solve_named(own, f"{name}|{i}|alone", tol).sigma
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
