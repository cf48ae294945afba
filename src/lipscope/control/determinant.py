"""``log det(I + J)`` of a contraction: dense, a series with its error, or a series without bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.control.contraction import Contraction
from lipscope.display import Shown
from lipscope.errors import InputError, check_positive

_DENSE = 64  # entries of a sample up to which its Jacobian is formed
_TRACED = 1024  # up to which traces are exact: they take as many products a term
_CERTAIN = 4  # terms of the roulette that are never left out
_GOES_ON = 0.5  # its chance of one more term, at least


_Method = Literal["exact", "series", "roulette"]


@dataclass(frozen=True, repr=False)
class LogDeterminant(Shown):
    """``log det(I + J_g(X))`` of every sample.

    Attributes:
        value: The number or its estimate, differentiable.
        error: A bound of what a truncated series leaves out; 0 where nothing is.
        terms: Of the series; 0 where the Jacobian was formed.
        probes: Random vectors of each sample; 0 where traces are exact. Then ``value`` is
            random, right on average up to ``error``.
    """

    value: Float[Tensor, "*b"]
    error: float
    terms: int
    probes: int


def log_determinant(
    g: Contraction,
    x: Float[Tensor, "*b n d"],
    *,
    method: _Method | None = None,
    terms: int | None = None,
    probes: int | None = None,
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> LogDeterminant:
    """``log det(I + J_g(X))`` of every sample, ``Σ_{k≥1} (-1)^(k+1) tr(J^k) / k``.

    Args:
        g: A contraction, ``‖J‖ ≤ c < 1``.
        x: The samples.
        method: ``exact`` forms the Jacobian. ``series`` stops after ``terms``, which leaves out at
            most ``n d c^(K+1) / ((K+1) (1-c))``. ``roulette`` stops at random and weighs every
            term by its chance: no bias. The first for up to 64 entries, else the second, if
            None.
        terms: ``K`` of the series; as many as ``tol`` asks for if None.
        probes: Random signs ``v`` of each sample, ``E v^T J^k v = tr(J^k)``; exact traces, ``n d``
            products a term, if None, for up to 1,024 entries.
        tol: Of ``error`` where ``terms`` is None.
        generator: Of signs and of the roulette.

    Returns:
        The value, differentiable in ``X`` and the weights, with its error.

    Raises:
        InputError: If ``g`` is no contraction, or an option does not go with the method.

    Source: the series of [behrmann2019], the roulette of [chen2019].
    """
    if not isinstance(g, Contraction):
        raise InputError(f"`g` should be certified to contract. Found `{type(g).__name__}`.")
    g.check("x", x)
    check_positive("tol", tol)
    size = x.shape[-2] * x.shape[-1]
    method = method or ("exact" if size <= _DENSE else "series")
    if method not in get_args(_Method):
        known = ", ".join(get_args(_Method))
        raise InputError(f"`method` should be one of {known}. Found `{method}`.")
    for name, number in (("terms", terms), ("probes", probes)):
        if number is not None and (type(number) is not int or number < 1 or method == "exact"):
            raise InputError(
                f"`{name}` should be a positive integer, and left out of the method `exact`. "
                f"Found `{name} = {number}` and `{method}`."
            )
    if size > _TRACED and probes is None and method != "exact":
        raise InputError(
            f"`probes` should be given for samples of more than {_TRACED} entries. Found {size}, "
            "which exact traces would take as many products for."
        )
    if method == "exact":
        return LogDeterminant(_dense(g, x), 0.0, 0, 0)
    if method == "series":
        count = _terms(size, g.c, tol) if terms is None else terms
        weights = [1.0] * count
        error = _left_out(size, g.c, count)
    else:
        if terms is not None:
            raise InputError("`terms` should be left out of the method `roulette`. Found it.")
        goes_on = max(_GOES_ON, g.c)  # a smaller chance than c would let the weights outgrow J^k
        weights, chance = [], 1.0
        while len(weights) < _CERTAIN or float(torch.rand((), generator=generator)) < goes_on:
            chance *= goes_on if len(weights) >= _CERTAIN else 1.0
            weights.append(1 / chance)
        error = 0.0
    value = _series(g, x, weights, probes, generator)
    return LogDeterminant(value, error, len(weights), probes or 0)


def _dense(g: Contraction, x: Tensor) -> Tensor:
    size = x.shape[-2] * x.shape[-1]

    def jacobian(one: Tensor) -> Tensor:
        found = torch.func.jacrev(g)(one)
        assert isinstance(found, Tensor)
        return found.reshape(size, size)

    every = torch.func.vmap(jacobian)(x.reshape(-1, *x.shape[-2:]))
    wide = torch.promote_types(x.dtype, torch.float32)  # there is none in half precision
    eye = torch.eye(size, dtype=wide, device=x.device)
    return torch.linalg.slogdet(every + eye).logabsdet.to(x.dtype).reshape(x.shape[:-2])


def _series(
    g: Contraction,
    x: Tensor,
    weights: list[float],
    probes: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """``Σ_k (-1)^(k+1) w_k tr(J^k) / k`` with traces from products ``J^T v``."""
    learns = torch.is_grad_enabled()
    size = x.shape[-2] * x.shape[-1]
    shape = (size if probes is None else probes, *x.shape)
    if probes is None:
        v = torch.eye(size).to(x).reshape(size, *(1,) * (x.ndim - 2), *x.shape[-2:]).expand(shape)
    else:
        v = torch.randint(0, 2, shape, generator=generator).to(x) * 2 - 1
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        there = at.expand(shape) * 1.0  # a copy for every probe: products do not mix
        y, w, total = g(there), v, x.new_zeros(x.shape[:-2])
        for k, weight in enumerate(weights, 1):
            (w,) = torch.autograd.grad(y, there, w, create_graph=learns, retain_graph=True)
            trace = (w * v).flatten(-2).sum(-1).sum(0) / (probes or 1)
            total = total + (-1) ** (k + 1) * weight / k * trace
            w, total = (w, total) if learns else (w.detach(), total.detach())
    return total


def _left_out(size: int, c: float, terms: int) -> float:
    """``n d c^(K+1) / ((K+1) (1-c))``: ``|tr J^k| ≤ n d c^k``."""
    return size * c ** (terms + 1) / ((terms + 1) * (1 - c))


def _terms(size: int, c: float, tol: float) -> int:
    first = max(1, math.ceil(math.log(tol * (1 - c) / size) / math.log(c)) - 1)
    # That many are enough without the factor 1 / (K+1): some of them are not needed.
    return next(k for k in range(1, first + 1) if _left_out(size, c, k) <= tol or k == first)
