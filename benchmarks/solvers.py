"""The solvers of the comparison, each from the same map, input and random start.

All peers but curvlinops take their products from ``torch.func``: a JVP by forward mode at every
product, a VJP by one pullback built once. primme is missing: its package has no wheels and asks for
LAPACK's development files when it is built.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import Case
from scipy.sparse import linalg
from torch import Tensor, nn

import lipscope as ls

Map = Callable[[Tensor], Tensor]
_SPARSE: Any = linalg  # its published types do not fit its calls
PROPACK_BASIS = 150  # its default of 10 fails on every case
TRUTH_TOL = 1e-4  # svds hands ARPACK the square: residuals of 1e-8


@dataclass(frozen=True)
class Answer:
    """What one run of a solver gave.

    Attributes:
        sigma: Top singular value; NaN if the solver failed.
        products: JVPs and VJPs.
        seconds: Wall time, set-up of the products included.
    """

    sigma: float
    products: int
    seconds: float


def start(x: Tensor, seed: int) -> Tensor:
    """The random start that lipscope draws from this seed: the same for every solver."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)


def lipscope(case: Case, seed: int, tol: float = 1e-3) -> Answer:
    """The library, by default at its default tolerance; linearisation included."""
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    top = ls.top_singular(case.map.linearise(case.x), tol=tol, generator=generator)
    return Answer(top.sigma, top.products, time.perf_counter() - began)


class _Products:
    """JVP and VJP of a function at a point through ``torch.func``, counted."""

    def __init__(self, f: Map, x: Tensor) -> None:
        self.f, self.x, self.count = f, x, 0
        self.pullback = torch.func.vjp(f, x)[1]

    def jvp(self, e: Tensor) -> Tensor:
        self.count += 1
        return torch.func.jvp(self.f, (self.x,), (e,))[1]

    def vjp(self, g: Tensor) -> Tensor:
        self.count += 1
        return self.pullback(g)[0]

    def operator(self) -> Any:
        kind = torch.empty(0, dtype=self.x.dtype).numpy().dtype

        def flat(product: Map) -> Callable[[np.ndarray], np.ndarray]:
            def multiply(vector: np.ndarray) -> np.ndarray:
                tensor = torch.from_numpy(np.ascontiguousarray(vector, dtype=kind))
                return product(tensor.reshape(self.x.shape)).numpy().reshape(-1)

            return multiply

        size = self.x.numel()
        return _SPARSE.LinearOperator(
            (size, size), matvec=flat(self.jvp), rmatvec=flat(self.vjp), dtype=kind
        )


def published(f: Map, x: Tensor, seed: int) -> Answer:
    """Power iteration as published [castin2024], with the index of its JVP corrected.

    It stops when sigma^2 changes by at most 1e-4 (absolute), or after 100 rounds.
    """
    began = time.perf_counter()
    products = _Products(f, x)
    u = start(x, seed)
    u = u / u.norm()
    before, rounds = torch.zeros(()), 0
    while True:
        v = products.vjp(products.jvp(u))
        square = torch.dot(u.flatten(), v.flatten())
        u = v / v.norm()
        if abs(square - before) <= 1e-4 or rounds == 100:
            break
        before, rounds = square, rounds + 1
    return Answer(float(square.sqrt()), products.count, time.perf_counter() - began)


def scipy_svds(f: Map, x: Tensor, seed: int, solver: str, tol: float) -> Answer:
    """SciPy's ``svds`` for the top singular value alone, without vectors.

    Args:
        f: The map.
        x: The point.
        seed: Seed of the start.
        solver: ``arpack`` or ``propack``.
        tol: Its tolerance.
    """
    began = time.perf_counter()
    products = _Products(f, x)
    try:
        values = _SPARSE.svds(
            products.operator(),
            k=1,
            tol=tol,
            v0=start(x, seed).numpy().reshape(-1),
            maxiter=PROPACK_BASIS if solver == "propack" else None,
            solver=solver,
            return_singular_vectors=False,
        )
    except np.linalg.LinAlgError:  # PROPACK, where its basis is too small
        return Answer(float("nan"), products.count, time.perf_counter() - began)
    return Answer(float(np.max(values)), products.count, time.perf_counter() - began)


def has_curvlinops() -> bool:
    """Whether the package is installed (`make bench` tries to)."""
    return importlib.util.find_spec("curvlinops") is not None


class _Moved(nn.Module):
    """A map at a point that is its only parameter: what curvlinops differentiates."""

    def __init__(self, f: Map, x: Tensor) -> None:
        super().__init__()
        self.f, self.x = f, nn.Parameter(x.clone())

    def forward(self, _: Tensor) -> Tensor:
        return self.f(self.x)[None]


def curvlinops_svds(f: Map, x: Tensor, seed: int, tol: float) -> Answer:
    """ARPACK over the Jacobian operator of curvlinops, in its own SciPy form."""
    from curvlinops import JacobianLinearOperator  # pyright: ignore[reportMissingImports]

    began = time.perf_counter()
    moved, nothing, count = _Moved(f, x), torch.zeros(1, 1), 0
    data = [(nothing, nothing)]
    own = JacobianLinearOperator(moved, [moved.x], data, check_deterministic=False)
    plain = own.to_scipy(dtype=torch.empty(0, dtype=x.dtype).numpy().dtype)

    def counted(product: Any) -> Any:
        def multiply(vector: np.ndarray) -> np.ndarray:
            nonlocal count
            count += 1
            return product(vector)

        return multiply

    operator = _SPARSE.LinearOperator(
        plain.shape,
        matvec=counted(plain.matvec),
        rmatvec=counted(plain.rmatvec),
        dtype=plain.dtype,
    )
    first = start(x, seed).numpy().reshape(-1)
    values = _SPARSE.svds(operator, k=1, tol=tol, v0=first, return_singular_vectors=False)
    return Answer(float(np.max(values)), count, time.perf_counter() - began)


def truth(case: Case) -> float:
    """The top singular value in float64, by ARPACK over products that lipscope has no part in."""
    answer = scipy_svds(case.exact, case.x.double(), 12345, "arpack", TRUTH_TOL)
    return answer.sigma
