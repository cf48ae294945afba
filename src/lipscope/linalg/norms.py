"""Operator norms: spectral, infinity and max-token norms of Jacobians and matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.linalg.operator import Operator, Product, start_named, to_dense
from lipscope.linalg.singular import OVERFLOWS, SLACK, TopSingular
from lipscope.linalg.torch_state import by_threads

# Metrics of inputs and outputs. ``frobenius``: root of the sum of squares; the norm of a Jacobian
# is then its top singular value. ``token-relative``: the same, each token's move in proportion to
# its norm. ``max-token``: largest norm of a token. ``infinity``: largest entry.
Metric = Literal["frobenius", "token-relative", "max-token", "infinity"]
SPECTRAL = ("frobenius", "token-relative")  # metrics whose constant is a singular value

# Maximum size of a dense Jacobian, in entries: 128 MiB in float64.
_DENSE = 2**24
_STARTS = 8
_ITERATIONS = 50
_SHARED = 2**16  # batch entries per thread for threading to pay: 64 matrices of 32 rows
_EXACT_NORM = 1024  # largest nonnegative matrix (rows) to be decomposed fully


@dataclass(frozen=True)
class NormInterval:
    """Lower and upper bound of an operator norm."""

    lower: float  # attained by some input, never above the norm; NaN if a product overflows
    upper: float | None  # never below the norm; None if not computed


def bracketed(op: Operator, metric: str, *, tol: float, delta: float, seed: int) -> TopSingular:
    """The norm in the metric ``max-token`` or ``infinity`` as a solver record.

    The interval is deterministic, its upper end raised for rounding; there are no singular
    vectors, so ``u`` and ``v`` are NaN.
    """
    norm = max_token_norm if metric == "max-token" else infinity_norm
    found = norm(op, seed=seed)
    upper = math.inf if found.upper is None else found.upper * (1 + SLACK[op.dtype])
    finite = math.isfinite(found.lower)
    status = "converged" if upper <= (1 + tol) * found.lower else "max_steps"
    note = None if found.upper is not None else f"too large for an upper end in {metric}"
    return TopSingular(
        sigma=found.lower,
        upper=upper,
        delta=delta,
        u=torch.full(op.out_shape, math.nan),
        v=torch.full(op.in_shape, math.nan),
        solver_residual=math.nan,
        products=0,
        status=status if finite else "non_finite",
        note=note if finite else OVERFLOWS,
    )


def infinity_norm(op: Operator, *, dense: int = _DENSE, seed: int = 0) -> NormInterval:
    """Largest entry of ``J e`` over inputs with entries of at most 1 in magnitude.

    ``‖J‖_∞ = max_o Σ_i |J_oi|``: exact if the operator has at most ``dense`` entries, else a
    lower bound by Hager's iteration on the transpose.

    Holds for any real operator.

    Source: [higham2000], block size 1 with several starts.

    >>> op = Operator(lambda e: e @ torch.ones(2, 3).T, lambda g: g @ torch.ones(2, 3), (3,), (2,))
    >>> infinity_norm(op).lower
    3.0
    """
    if _overflows(op):
        return NormInterval(math.nan, None)
    if op.in_size * op.T.in_size <= dense:
        value = float(to_dense(op).abs().sum(1).max())
        return NormInterval(value, value)
    best = 0.0
    for start in _random_batch(op.out_shape, op, seed):
        g = start.abs() / start.abs().sum()
        seen = -1
        for _ in range(_ITERATIONS):
            move = torch.where(op.rmatvec(g) < 0, -1.0, 1.0).to(op.dtype)
            out = op.matvec(move)
            best = max(best, float(out.abs().max()))
            where = int(out.abs().argmax())
            if where == seen:
                break
            seen = where
            g = torch.zeros_like(out)
            g.view(-1)[where] = out.reshape(-1)[where].sign()
    return NormInterval(best, None)


def max_token_norm(op: Operator, *, dense: int = _DENSE, seed: int = 0) -> NormInterval:
    """Largest token norm of ``J e`` over inputs whose tokens have norm at most 1.

    ``max_i max_{|e_j| ≤ 1} |Σ_j J_ij e_j|``. Lower bound: alternating maximisation, ``e_j`` along
    ``J_ij^T g`` for the unit vector ``g`` along the output token, from several starts. Upper
    bound, if the operator has at most ``dense`` entries: ``Σ_j |J_ij^T g| ≤ √(Σ_j c_j ·
    λ_max(Σ_j J_ij J_ij^T / c_j))`` for the better of two choices of ``c_j > 0``, and
    ``Σ_j ‖J_ij‖``.

    Holds for operators on tokens, ``(n, d) -> (m, d')``; exact for scalar outputs per token.

    Source: the power method of [boyd1974] for norms between non-Euclidean spaces.

    >>> weight = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> op = Operator(lambda e: weight @ e, lambda g: weight.T @ g, (2, 1), (2, 1))
    >>> max_token_norm(op)
    NormInterval(lower=1.0, upper=1.0)
    """
    if _overflows(op):
        return NormInterval(math.nan, None)
    starts = _unit_tokens(_random_batch(op.in_shape, op, seed))
    if op.in_size * op.T.in_size > dense:
        return NormInterval(_alternated(op.matvec, op.rmatvec, starts), None)
    matrix = to_dense(op)
    # Squares must not underflow; a power of two rounds nothing.
    size = 2.0 ** (math.frexp(max(float(matrix.abs().max()), _tiny(matrix)))[1] - 1)
    matrix = matrix / size
    best = _alternated(
        lambda e: (e.flatten(1) @ matrix.T).view(-1, *op.out_shape),
        lambda g: (g.flatten(1) @ matrix).view(-1, *op.in_shape),
        starts,
    )
    blocks = matrix.reshape(*op.out_shape, *op.in_shape).permute(0, 2, 1, 3)
    best = max([best, *[float(_ascend(row).sum()) for row in blocks]])
    upper = max(_row_upper(row) for row in blocks)
    return NormInterval(best * size, max(best, upper) * size)


def _alternated(matvec: Product, rmatvec: Product, e: Float[Tensor, "s n d"]) -> float:
    """The best value of the ascents from ``e``, each until it stops to rise."""
    best, last = 0.0, e.new_full((len(e),), -1.0)
    for _ in range(_ITERATIONS):
        out = matvec(e)
        most, where = out.norm(dim=-1).max(-1)
        rising = most > last * (1 + 1e-12)
        if not bool(rising.any()):
            break
        out, last, where = out[rising], most[rising], where[rising]
        best = max(best, float(last.max()))
        here = torch.arange(len(out), device=out.device), where
        g = torch.zeros_like(out)
        g[here] = out[here] / last.clamp_min(_tiny(out))[:, None]
        e = _unit_tokens(rmatvec(g))
    return best


def _ascend(row: Tensor) -> Tensor:
    """``|J_ij^T g|`` after ascent in ``g``, for one output token; blocks ``(n, d', d)``."""
    g = torch.linalg.eigh((row @ row.mT).sum(0)).eigenvectors[:, -1]
    for _ in range(_ITERATIONS):
        pulled = row.mT @ g
        g = _unit_tokens((row @ _unit_tokens(pulled)[..., None]).sum(0)[:, 0])
    return (row.mT @ g).norm(dim=-1)


def _row_upper(row: Tensor) -> float:
    """An upper bound of ``max_{|g|≤1} Σ_j |J_ij^T g|`` for one output token."""
    gram, sizes = row @ row.mT, torch.linalg.matrix_norm(row, 2)
    values = [float(sizes.sum())]
    for c in (sizes, _ascend(row)):
        shares = c.clamp_min(1e-9 * float(sizes.max()) + _tiny(c))
        weighted = torch.linalg.eigvalsh((gram / shares[:, None, None]).sum(0))[-1]
        values.append(float((shares.sum() * weighted.clamp_min(0)).sqrt()))
    return min(values)


def _unit_tokens(e: Tensor) -> Tensor:
    e = e / e.abs().amax(-1, keepdim=True).clamp_min(_tiny(e))  # squares must not underflow
    return e / e.norm(dim=-1, keepdim=True).clamp_min(_tiny(e))


def _tiny(e: Tensor) -> float:
    """The smallest normal number of the dtype: dividing zero by it gives zero."""
    return torch.finfo(e.dtype).tiny


def _overflows(op: Operator) -> bool:
    return not bool(op.matvec(_random_batch(op.in_shape, op, 0)[0]).isfinite().all())


def _random_batch(shape: tuple[int, ...], op: Operator, seed: int) -> Tensor:
    gen = start_named(f"norm|{seed}")
    return torch.randn(_STARTS, *shape, generator=gen, dtype=torch.float64).to(op.device, op.dtype)


def frobenius_interval(
    value: float, sigma: float, probes: int, delta: float
) -> tuple[float, float]:
    """Interval for ``F = ‖J‖_F`` from ``X = mean ‖J z‖^2 = value^2`` over Gaussian probes.

    With ``s = sqrt(log(2 / delta) / probes)`` and ``sigma >= ‖J‖_2``,
    ``sqrt(max(X - sigma^2 s^2, 0)) - sigma s <= F <= sigma s + sqrt(X + sigma^2 s^2)``
    with probability at least ``1 - delta``.

    Holds because ``X`` is a weighted sum of chi-squares with weights ``s_i^2 / probes``,
    ``sum s_i^4 <= sigma^2 F^2``, and Lemma 1 of [laurent2000] bounds both of its tails.

    >>> low, high = frobenius_interval(10.0, 1.0, 16, 0.01)
    >>> low < 10.0 < high
    True
    """
    s = sigma * math.sqrt(math.log(2 / delta) / probes)
    low = math.sqrt(max(value**2 - s**2, 0.0)) - s
    return max(low, 0.0), s + math.sqrt(value**2 + s**2)


# --- matrices


def norm_in_double(matrix: Float[Tensor, "r c"]) -> float:
    """``‖M‖`` in float64 on the CPU."""
    return float(torch.linalg.matrix_norm(matrix.detach().to("cpu", torch.float64), 2))


def norms_of_many(m: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """Spectral norms of many small matrices, from the smaller Gram matrix of each."""
    size = m.abs().amax((-2, -1), keepdim=True)  # squares must not underflow
    m = m / torch.where(size > 0, size, 1.0)
    return size[..., 0, 0] * eigenvalue(m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m).sqrt()


def nonnegative_norm(m: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """An upper bound of ``‖M‖`` for matrices without negative entries.

    Exact up to rounding for small matrices; else the Collatz-Wielandt bound
    ``lam_max(G) <= max_j (G w)_j / w_j`` for ``G = M^T M`` and any ``w > 0``.
    """
    gram = m.mT @ m
    if m.shape[-2] <= _EXACT_NORM:
        return eigenvalue(gram).sqrt()
    w, best = m.new_ones(*m.shape[:-2], m.shape[-1], 1), m.new_tensor(math.inf)
    for _ in range(100):
        moved = gram @ w
        best = torch.minimum(best, (moved / w).amax((-2, -1)))
        w = (moved / moved.amax(-2, keepdim=True).clamp_min(1e-300)).clamp_min(1e-12)
    return best.sqrt().nan_to_num(math.inf, math.inf)


def eigenvalue(m: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    """Largest eigenvalues of positive semidefinite matrices; inf on overflow."""
    finite = None
    if not bool(torch.isfinite(m.sum())):  # a finite sum excludes infinite and NaN entries
        finite = torch.isfinite(m).all(-1).all(-1)
        m = m.masked_fill(~finite[..., None, None], 0.0)
    tops = m[..., 0, 0] if m.shape[-1] == 1 else _top_eigenvalues(m)
    tops = tops.clamp_min(0.0)
    return tops if finite is None else tops.masked_fill(~finite, torch.inf)


def _top_eigenvalues(m: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    def top(part: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(part)[..., -1]

    if m.ndim < 3 or m.numel() < _SHARED or m.device.type != "cpu":
        return top(m)
    return by_threads(top, m.flatten(0, -3)).view(m.shape[:-2])
