"""Sinkhorn attention: weights with fixed row and column sums."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching
from torch import Tensor

from lipscope.attention.core import InnerProduct, variant
from lipscope.attention.weighting import At, Weighting
from lipscope.errors import InputError

# Sinkhorn steps before Newton steps: the former converge from anywhere, the latter quickly.
_FIRST, _MOST = 20, 500
_LARGEST_STEP = 3.0
_LEAST = 0.01  # accepted error of the sums if rounding prevents a smaller one
_REFINED = 2  # chord steps that carry derivatives: one per order of differentiation


class Sinkhorn(Weighting):
    """``P_ij = exp(s_ij + f_i + g_j)`` with row sums 1 and column sums ``c = n / m``.

    The derivative is that of the equations for ``f`` and ``g``, not of the solver's steps:
    ``dP = P (ds + df_i + dg_j)`` with ``H df = P κ / c - ρ``, ``dg = -(κ + P^T df) / c``,
    ``H = I - P P^T / c``, ``ρ`` and ``κ`` the row and column sums of ``P ds``. This linear map
    of ``ds`` is symmetric.
    """

    all_rows = True
    kept = 2

    def weights(self, s: Tensor) -> Tensor:
        """The weights, with correct first and second derivatives."""
        f, factor = _Balanced.apply(s.detach())
        for _ in range(_REFINED):  # f is exact already; each step adds a derivative order
            p = _balanced_weights(s, f)
            f = f - torch.cholesky_solve(p.sum(-1, keepdim=True) - 1, factor)
        return _balanced_weights(s, f)

    def at(self, s: Tensor) -> At:
        """The weights and the Cholesky factor of ``H``."""
        f, factor = _Balanced.apply(s)
        return _balanced_weights(s, f), factor

    def statistic(self, s: Tensor) -> Tensor:
        """``f``."""
        return _balance(s)

    def again(self, s: Tensor, statistic: Tensor | None) -> At:
        """Rebuild from ``f``: only ``H`` is factored again."""
        assert statistic is not None
        p = _balanced_weights(s, statistic)
        return p, _factor(p)

    def jvp(self, at: At, ds: Tensor) -> Tensor:
        """``P (ds + df_i + dg_j)``."""
        p, factor = at
        c = p.shape[-2] / p.shape[-1]
        w = p * ds
        rows, columns = w.sum(-1, keepdim=True), w.sum(-2, keepdim=True)
        df = torch.cholesky_solve(p @ columns.mT / c - rows, factor)
        dg = -(columns + df.mT @ p) / c
        return w.addcmul_(p, df + dg)

    def vjp(self, at: At, gp: Tensor) -> Tensor:
        """The same."""
        return self.jvp(at, gp)


@variant
class SinkhornAttention(InnerProduct):
    """Attention with doubly stochastic weights ``P_ij = exp(scale <q_i, k_j> + f_i + g_j)``.

    ``f`` and ``g`` make all row and column sums of ``P`` equal to 1: the limit of Sinkhorn's
    iteration, up to rounding. With ``m`` keys of other tokens, column sums are ``n / m``.

    Holds for encoders, and masks under which such weights exist. A causal mask allows only the
    identity: the first row gives all its weight to the first token, which exhausts its column.

    Args:
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may attend to j. Every True must lie
            on a permutation of the tokens that the mask allows.

    Raises:
        InputError: If the shapes do not fit together, no doubly stochastic weights are positive
            where the mask is True, or the scores differ too much for convergence.

    Source: Sinkformers [sander2022], with the derivative of the limit.

    >>> eye = torch.eye(2)
    >>> layer = SinkhornAttention(eye, eye, eye)
    >>> x = torch.tensor([[1.0, 0.0], [5.0, 0.0]])
    >>> layer.weights(*layer.project(x)[:2]).sum(-2).round(decimals=4)
    tensor([[1., 1.]])
    """

    weighting = Sinkhorn()

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        *,
        heads: int = 1,
        scale: float | None = None,
        causal: bool = False,
        mask: Bool[Tensor, "*h n n"] | None = None,
    ) -> None:
        if causal:
            raise InputError(
                "`causal` should be False: the only causal weights whose columns add up to 1 "
                "are the identity. Found `causal = True`."
            )
        if mask is not None:
            _check_support(mask)
        super().__init__(query, key, value, output, heads=heads, scale=scale, mask=mask)


class _Balanced(torch.autograd.Function):
    """``f`` and the factor of ``H``, constant under every transform."""

    @staticmethod
    def forward(s: Tensor) -> tuple[Tensor, Tensor]:
        f = _balance(s)
        return f, _factor(_balanced_weights(s, f))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(saved) for saved in ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Tensor) -> Any:
        return _Balanced.apply(args[0].movedim(in_dims[0], 0)), (0, 0)


def _column_potential(s: Tensor, f: Tensor) -> Tensor:
    """The ``g`` for which column sums are ``n / m``."""
    return math.log(s.shape[-2] / s.shape[-1]) - (s + f).logsumexp(-2, keepdim=True)


def _balanced_weights(s: Tensor, f: Tensor) -> Tensor:
    return (s + f + _column_potential(s, f)).exp()


def _factor(p: Tensor, *, sure: bool = True) -> Tensor:
    """The Cholesky factor of ``H + 1 1^T / n``; ``H`` is singular on constant ``f``.

    ``H`` is also nearly singular on groups of tokens that attend mostly to each other. Rounding
    errors of ``f`` there cancel in ``g`` if ``H`` is solved with, but not if it is inverted.
    """
    n, m = p.shape[-2:]
    h = torch.diag_embed(p.sum(-1)) - p @ p.mT * (m / n) + 1 / n
    rounding = 4 * max(n, m) * torch.finfo(p.dtype).eps
    eye = torch.eye(n, dtype=p.dtype, device=p.device)
    factor, failed = torch.linalg.cholesky_ex(h + rounding * eye)
    if sure and bool(failed.any()):
        raise InputError(
            "Scores should be close enough for Sinkhorn's derivative. Found weights that are "
            "nearly those of a permutation; scale queries, keys or tokens down."
        )
    return factor


def _balance(s: Tensor) -> Tensor:
    """The ``f`` for which row sums are 1 and column sums ``n / m``, up to rounding.

    Sinkhorn steps, then Newton steps on the row sums wherever they reduce the error. Stops only
    when the sums are correct.
    """
    size = s.masked_fill(s == -torch.inf, 0.0).abs().amax((-2, -1), keepdim=True)
    exact = 16 * torch.finfo(s.dtype).eps * (1 + size) * max(1.0, s.shape[-2] / s.shape[-1])
    exact = exact.clamp_max(_LEAST)
    f = -s.logsumexp(-1, keepdim=True)
    off = torch.full_like(size, torch.inf)
    for step in range(_MOST):
        p = _balanced_weights(s, f)
        off = (p.sum(-1, keepdim=True) - 1).abs().amax((-2, -1), keepdim=True)
        if bool((off <= exact).all()) or not bool(off.isfinite().all()):
            break
        if step >= _FIRST and step % 2 == 0:
            newton = torch.cholesky_solve(p.sum(-1, keepdim=True) - 1, _factor(p, sure=False))
            tried = f - newton.clamp(-_LARGEST_STEP, _LARGEST_STEP)
            sums = _balanced_weights(s, tried).sum(-1, keepdim=True)
            better = (sums - 1).abs().amax((-2, -1), keepdim=True) < off
            f = torch.where(better, tried, f)
        f = -(s + _column_potential(s, f)).logsumexp(-1, keepdim=True)
    if not bool((off <= exact).all()):
        raise InputError(
            f"Scores should be close enough for Sinkhorn's iteration. Found sums off by "
            f"{float(off.max()):.1g} after {_MOST} steps; scale queries, keys or tokens down."
        )
    return f


def _check_support(mask: Tensor) -> None:
    """Refuse masks with a True that lies on no allowed permutation.

    Given one permutation ``π``, the valid pairs ``(i, j)`` are those for which a chain of allowed
    exchanges leads from ``π^-1(j)`` back to ``i``: strongly connected components of a graph.
    """
    for one in mask.reshape(-1, *mask.shape[-2:]).cpu():
        if one.shape[0] != one.shape[1]:
            raise InputError(f"`mask` should be square. Found {tuple(mask.shape)}.")
        match = maximum_bipartite_matching(csr_matrix(one.numpy()), perm_type="column")
        if (match < 0).any():
            raise InputError(
                "`mask` should allow a permutation of the tokens: columns of weights cannot add "
                f"up to 1 otherwise. Found none, {int((~one.any(0)).sum())} tokens being hidden "
                "from every row."
            )
        graph = one[:, torch.as_tensor(match).long()]  # row i -> the row matched to its column
        part = torch.as_tensor(
            connected_components(csr_matrix(graph.numpy()), connection="strong")[1]
        )
        lost = int((graph & (part[:, None] != part)).sum())
        if lost:
            raise InputError(
                "`mask` should be True only where weights whose columns add up to 1 can be "
                f"positive. Found {lost} entries where they cannot, as in a causal mask."
            )
