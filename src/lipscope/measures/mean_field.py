"""Token measures and mean-field attention: the token map and push-forward."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, Softmax, check_layer
from lipscope.errors import InputError, check_numbers, check_tokens, type_and_shape
from lipscope.linalg import Operator, start_named, to_dense, top_singular

_SUM = 1e-6  # accepted deviation of the sum of weights from 1: float32 rounding


class TokenMeasure:
    """``μ = Σ_i w_i δ_(s_i, x_i)``: tokens with weights and optional positions.

    Everything is in float64 on the CPU. Points keep their gradients; weights and positions
    have none.

    Attributes:
        points: The tokens ``x_i``, ``(n, d)``.
        weights: ``w_i``, ``(n,)``: nonnegative, with sum 1 up to 1e-6 (then normalised); uniform
            if None.
        positions: ``s_i`` in [0, 1], ``(n,)``, used by causal attention; or None.

    Raises:
        InputError: If there are no tokens, values are not finite, weights are negative or do not
            add up to 1, positions are outside [0, 1], or sizes do not match.

    >>> TokenMeasure(torch.zeros(2, 3), torch.tensor([0.25, 0.75])).weights.tolist()
    [0.25, 0.75]
    """

    def __init__(
        self, points: Tensor, weights: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        whole = isinstance(points, Tensor) and not (
            points.is_floating_point() or points.is_complex()
        )
        check_tokens("points", points.double() if whole else points)
        self.points = points.to("cpu", torch.float64)
        n = len(self.points)
        row = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights
        row = _token_row("weights", row, n)
        if row.requires_grad:
            raise InputError(
                "`weights` should have no gradient: distances are differentiated in the points "
                "only. Found some that ask for it; detach them."
            )
        total, least = float(row.sum()), float(row.min())
        if least < 0 or abs(total - 1) > _SUM:
            raise InputError(
                "`weights` should be at least 0 and add up to 1. Found the least "
                f"{least:.4g} and the sum {total:.6g}."
            )
        self.weights = row / total
        self.positions: Tensor | None = None
        if positions is not None:
            self.positions = _token_row("positions", positions, n).detach()
            low, high = float(self.positions.min()), float(self.positions.max())
            if low < 0 or high > 1:
                raise InputError(
                    "`positions` should be between 0 and 1. Found some from "
                    f"{low:.4g} to {high:.4g}."
                )

    @property
    def num_tokens(self) -> int:
        """Number of atoms ``n``."""
        return len(self.points)

    @property
    def radius(self) -> float:
        """Largest norm of a token with positive weight."""
        return float(self.points.detach()[self.weights > 0].norm(dim=-1).max())

    def moved(self, points: Tensor) -> TokenMeasure:
        """The same weights and positions at other points: ``T # μ`` for ``T(x_i) = points[i]``."""
        return TokenMeasure(points, self.weights, self.positions)

    def copied(self, shares: Tensor) -> TokenMeasure:
        """The same measure with each atom i split into copies r of weight ``shares[r] w_i``."""
        check_numbers("shares", shares, None)
        m = len(shares)
        s = self.positions
        return TokenMeasure(
            self.points.repeat_interleave(m, 0),
            (self.weights[:, None] * shares.to(self.weights)).flatten(),
            None if s is None else s.repeat_interleave(m),
        )


def in_order(points: Tensor) -> TokenMeasure:
    """The measure of a sequence: uniform weights, positions ``i / n`` for ``i = 1 … n``.

    >>> in_order(torch.zeros(4, 1)).positions
    tensor([0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64)
    """
    check_tokens("points", points)
    n = len(points)
    return TokenMeasure(points, None, torch.arange(1, n + 1, dtype=torch.float64) / n)


def _token_row(name: str, values: Tensor, n: int) -> Tensor:
    check_numbers(name, values, n)
    return values.to("cpu", torch.float64)


_DENSE = 1024  # maximum number of inputs for computing an operator norm from its matrix
_TOL = 1e-9  # solver tolerance for larger ones


def token_map(
    layer: Attention,
    mu: TokenMeasure,
    points: Float[Tensor, "k d"],
    positions: Float[Tensor, " k"] | None = None,
) -> Float[Tensor, "k d_out"]:
    """``Γ_μ(s, x) = Σ_j P_j(x) V x_j``, ``P_j ∝ w_j e^(S(x, x_j))`` over atoms with ``s_j <= s``.

    Without positions all atoms are visible; atoms at equal positions see each other. Heads are
    zero at a position before all atoms.

    Holds for layers with softmax weights and token-wise queries, keys and values, without rotary
    embedding, score bias, mask or window, since measures have no indices. A ``causal`` layer needs
    a measure with positions; any other layer, one without.

    Source: Definitions 2.4 and 2.6 of [castin2024]; weights as in its Appendix C.
    """
    layer = of_measures(layer, mu)
    check_tokens("points", points, mu.points.shape[1])
    read = mu.weights > 0
    keys = mu.points[read]
    if layer.causal:
        assert mu.positions is not None
        if positions is None:
            raise InputError("A causal layer reads by position. Found points without positions.")
        seen = mu.positions[read] <= _token_row("positions", positions, len(points))[:, None]
        layer = layer.replace(causal=False, mask=seen)
    return layer(points.to(keys), keys, log_weights=mu.weights[read].log())


def push_forward(layer: Attention, mu: TokenMeasure, *, residual: bool = False) -> TokenMeasure:
    """``F(μ) = (Γ_μ) # μ``, or ``(id + Γ_μ) # μ``; every atom keeps its weight and position.

    Uniform weights give the layer itself:

    >>> from lipscope.attention import DotProduct
    >>> layer, x = DotProduct(*3 * [torch.eye(2).double()]), torch.eye(2).double()
    >>> bool(torch.allclose(push_forward(layer, TokenMeasure(x)).points, layer(x)))
    True
    """
    check_measure(mu)
    out = token_map(layer, mu, mu.points, mu.positions)
    if residual and out.shape != mu.points.shape:
        raise InputError(
            "A residual layer should keep the width of its tokens. Found "
            f"{mu.points.shape[1]} and {out.shape[1]}."
        )
    return mu.moved(mu.points + out if residual else out)


def weighted_jacobian(layer: Attention, mu: TokenMeasure) -> Operator:
    """``D^(1/2) J_w D^(-1/2)``: the Jacobian of weighted attention in the norm ``Σ w_i |e_i|²``.

    Its largest singular value is the local Lipschitz constant of ``F`` in ``W_2`` for moves of
    the atoms (in the conditional distance for a causal layer). For copies that move apart, see
    `lipscope.measures.splitting`.

    Source: Definition C.4 and Lemmas C.5, C.6 of [castin2024]; for a causal layer Lemma 4.2.
    """
    check_measure(mu)
    if not bool((mu.weights > 0).all()):
        raise InputError(
            "`weights` should be positive. Found an atom without weight; leave it out."
        )
    layer = of_measures(layer, mu)
    if layer.causal:
        assert mu.positions is not None
        seen = mu.positions <= mu.positions[:, None]
        layer = layer.replace(causal=False, mask=seen)
    log_weights = mu.weights.log()
    return weighted(layer.linearise(mu.points.detach(), log_weights=log_weights), log_weights)


def check_measure(mu: object) -> None:
    """Require a `TokenMeasure`."""
    if not isinstance(mu, TokenMeasure):
        raise InputError(f"`mu` should be a `TokenMeasure`. Found `{type(mu).__name__}`.")


def weighted(op: Operator, log_weights: Tensor) -> Operator:
    """``D^(1/2) J D^(-1/2)`` for an operator on tokens with weights ``D``, of any sum.

    For operators with joint products, weights are given for each, ``(b, n)``.
    """
    if not isinstance(log_weights, Tensor) or log_weights.shape[-1:] != op.in_shape[:1]:
        raise InputError(
            f"`log_weights` should be numbers in a tensor, one for each of "
            f"{op.in_shape[0]} tokens. Found {type_and_shape(log_weights)}."
        )
    root = (0.5 * (log_weights - log_weights.mean(-1, keepdim=True))).exp()[..., None]
    return replace(
        op,
        matvec=lambda e: root * op.matvec(e / root),
        rmatvec=lambda g: op.rmatvec(g * root) / root,
    )


def local_constant(layer: Attention, mu: TokenMeasure) -> float:
    """Largest singular value of `weighted_jacobian`: the gain of small moves of the atoms.

    Exact up to rounding; beyond 1,024 entries up to 1e-9, with failure probability 1e-6.

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(*3 * [torch.eye(2).double()])
    >>> round(local_constant(layer, TokenMeasure(torch.zeros(3, 2))), 12)
    1.0
    """
    return largest(weighted_jacobian(layer, mu))


def largest(op: Operator) -> float:
    """The norm of an operator: from its matrix if small, otherwise by the solver."""
    if op.in_size <= _DENSE:
        return float(torch.linalg.matrix_norm(to_dense(op), 2))
    start = start_named("largest")
    return top_singular(op, tol=_TOL, delta=1e-6, max_steps=2000, generator=start).upper


def of_measures(layer: Attention, mu: TokenMeasure) -> Attention:
    """The layer in float64, if it is defined on measures with such positions."""
    check_layer(layer)
    check_measure(mu)
    if layer.positional or layer.window is not None or layer.mask is not None:
        raise InputError("not available: scores depend on indices of tokens, which measures lack.")
    if not (layer.by_token and isinstance(layer.weighting, Softmax)):
        raise InputError("not available: weights of tokens count otherwise than as copies of them.")
    if layer.causal != (mu.positions is not None):
        raise InputError(
            "A causal layer should read a measure with positions, any other one without. Found "
            f"`causal = {layer.causal}` and {'no ' * (mu.positions is None)}positions."
        )
    if layer.query.shape[1] != mu.points.shape[1]:
        raise InputError(
            f"Tokens should have the width {layer.query.shape[1]} of the layer. Found "
            f"{mu.points.shape[1]}."
        )
    exact = layer.query.dtype == torch.float64 and layer.query.device.type == "cpu"
    return layer if exact else layer.in_double()
