"""Mass splitting: when a token should be taken apart rather than moved.

Two halves of a token that move against each other change no weighted mean that others read, so
that each half feels its own query alone. How far that carries is one matrix a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, Softmax
from lipscope.display import Shown
from lipscope.errors import InputError, shown
from lipscope.linalg import Operator, linearise, start_named, top_singular_batch
from lipscope.measures.mean_field import largest, push_forward, weighted
from lipscope.measures.tokens import TokenMeasure
from lipscope.measures.transport import wasserstein

Function = Callable[[Tensor], Tensor]

_LARGE = 2**22  # entries of all tokens' matrices, beyond which the solver takes over
_SYMMETRY = 1e-6  # by how much copies may differ, relative to the largest entry
_TOL = 1e-6


@dataclass(frozen=True, eq=False, repr=False)
class Split(Shown):
    """The effect of splitting the tokens of an input, beside that of moving them.

    Attributes:
        moving: Largest gain of moves that keep copies together.
        gains: Largest gain of taking the copies of one token apart, ``‖T_i‖``, ``(n,)``.
        token: The token of the largest.
        direction: Unit move of its first copy, ``(d,)``; the second moves against it.
    """

    moving: float
    gains: Float[Tensor, " n"]
    token: int
    direction: Float[Tensor, " d"]

    @property
    def splitting(self) -> float:
        """The largest gain of splitting."""
        return float(self.gains[self.token])

    @property
    def ratio(self) -> float:
        """``max_i ‖T_i‖ / moving``: above 1, splitting beats every move of whole tokens."""
        return self.splitting / self.moving if self.moving > 0 else float("inf")


def split_at(
    f: Attention | Function,
    x: Float[Tensor, "n d"],
    *,
    log_weights: Float[Tensor, " n"] | None = None,
) -> Split:
    """Gains of splitting every token, and of moving whole ones.

    Let every token be there m >= 2 times, in any shares. For a map whose value does not change by
    that, ``‖J(X^(m))‖ = max( ‖J(X)‖, max_i ‖T_i‖ )``: ``T_i`` is the derivative of token i's
    output along its own query, keys and values held fixed (``Σ_h W_h V_h C_i^h A_h`` for dot
    products). ``split_ratio > 1`` if and only if splitting beats moving.

    For `Attention` whose weights are a softmax of scores of single tokens, in closed form:
    copies share position, mask and what they read, so masks, windows, rotary embeddings and
    biases of scores are allowed. Any other map is asked on the doubled input, and must be
    permutation-equivariant; ``moving`` is then that of the doubled input, copies together.

    Args:
        f: A layer, or any function of ``(n, d)`` for every n.
        x: The input.
        log_weights: Logarithms of the tokens' weights, for `Attention`; norms are weighted by
            them. Uniform if None.

    Returns:
        `Split`, exact up to rounding; to 1e-6 for large inputs.

    Raises:
        InputError: If the input is not finite, or a function tells copies or permuted tokens
            apart, or has weights.

    Source: derived here (``docs/theory/splitting.md``).

    >>> from lipscope.attention import DotProduct
    >>> one = torch.ones(1, 1).double()
    >>> found = split_at(DotProduct(-one, one, one), torch.tensor([[-3.0], [-0.3]]).double())
    >>> found.token, round(found.splitting, 4), round(found.moving, 4)
    (1, 1.5535, 1.2187)
    """
    if not isinstance(x, Tensor) or x.ndim != 2 or not bool(x.isfinite().all()):
        found = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
        held = isinstance(x, Tensor) and x.ndim == 2
        raise InputError(
            f"`x` should be finite numbers, (n, d). Found {found}"
            f"{', NaN or Inf among them' if held else ''}."
        )
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"`x` should be in float32 or float64. Found {str(x.dtype)[6:]}.")
    if log_weights is not None and not bool(torch.as_tensor(log_weights).isfinite().all()):
        raise InputError("`log_weights` should be finite. Found NaN or Inf.")
    if in_closed_form(f):
        assert isinstance(f, Attention)
        own = own_operator(f, x, log_weights=log_weights)
        jacobian = f.linearise(x, log_weights=log_weights)
        moving = largest(jacobian if log_weights is None else weighted(jacobian, log_weights))
    elif log_weights is not None:
        raise InputError(
            "`log_weights` go with softmax attention. Found another map; leave them out."
        )
    else:
        own, together = _doubled(f, x)
        moving = largest(together)
    gains, token, direction = _best(own)
    return Split(moving, gains, token, direction)


def in_closed_form(f: object) -> bool:
    """Whether copies of a token count as a weight of it, so that nothing need be doubled."""
    return isinstance(f, Attention) and f.by_token and isinstance(f.weighting, Softmax)


def own_operator(
    layer: Attention,
    x: Float[Tensor, "n d"],
    *,
    log_weights: Float[Tensor, " n"] | None = None,
    memory: int = 2**30,
    map: str = "attention",
    per_head: bool = False,
) -> Operator:
    """``(e_i) -> (T_i e_i)``: what tokens do by their own queries alone.

    Args:
        layer: A layer that is `in_closed_form`.
        x: The input.
        log_weights: As for `split_at`.
        memory: As for `Attention.linearise`, likewise the next two.
        map: ``attention`` or ``heads``.
        per_head: One operator for each head.

    Returns:
        Operator ``(n, d) -> (n, d_out)``, block-diagonal in the tokens.

    Raises:
        InputError: If the layer is not in closed form.
    """
    if not in_closed_form(layer):
        raise InputError("not available: copies count otherwise than as a weight of their key.")
    options = {"memory": memory, "map": map, "per_head": per_head}
    return layer.linearise(x, context=x, log_weights=log_weights, **options)


def blocks(own: Operator) -> Float[Tensor, "n d_out d"]:
    """The matrices ``T_i`` of a block-diagonal operator, at the cost of d products."""
    n, d = own.in_shape
    eye = torch.eye(d, dtype=own.dtype, device=own.device)
    return own.matvec(eye[:, None].expand(d, n, d)).permute(1, 2, 0)


def token_gains(
    own: Operator, *, tol: float = _TOL, delta: float = 0.01, name: str = "split"
) -> Float[Tensor, " n"]:
    """``‖T_i‖`` of every token by the solver, all tokens in one product; upper ends.

    Args:
        own: Block-diagonal operator.
        tol: As for the solver.
        delta: As for the solver.
        name: Names the random starts.
    """
    return torch.tensor([top.upper for top in _solved(own, tol, delta, name)], dtype=torch.float64)


def finite_split(
    layer: Attention, mu: TokenMeasure, found: Split, *, size: float, whole: bool = False
) -> float:
    """``W_2(F(μ'), F(μ)) / W_2(μ', μ)``: halves of one token moved by ``± size`` along a direction.

    Exact transport: as the size tends to 0 the ratio tends to ``found.splitting``.

    Args:
        layer: As for `push_forward`, without positions.
        mu: The measure of the input.
        found: The token and the direction.
        size: Length of the move of each half.
        whole: Move both halves the same way instead.

    Returns:
        The ratio.
    """
    halves = mu.copied(torch.tensor([0.5, 0.5]))
    points = halves.points.clone()
    step = size * found.direction.to(points)
    points[2 * found.token] += step
    points[2 * found.token + 1] -= -step if whole else step
    moved = halves.moved(points)
    out = wasserstein(push_forward(layer, moved), push_forward(layer, mu))
    return float(out / wasserstein(moved, mu))


# --- operators


def _doubled(f: Function, x: Tensor) -> tuple[Operator, Operator]:
    """Copies against each other, and together, on the doubled input."""
    twice = torch.cat([x, x])
    _check_equivariant(f, twice)
    inner = linearise(f, twice)
    n = len(x)

    def half(y: Tensor, sign: float) -> Tensor:
        return (y[..., :n, :] + sign * y[..., n:, :]) / 2

    def both(e: Tensor, sign: float) -> Tensor:
        return torch.cat([e, sign * e], dim=-2)

    def acting(sign: float) -> Operator:
        return Operator(
            lambda e: half(inner.matvec(both(e, sign)), sign),
            lambda g: half(inner.rmatvec(both(g, sign)), sign),
            (n, inner.in_shape[1]),
            (n, inner.out_shape[1]),
            inner.dtype,
            inner.device,
        )

    return acting(-1.0), acting(1.0)


def _check_equivariant(f: Function, twice: Tensor) -> None:
    order = torch.randperm(len(twice), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, permuted = f(twice), f(twice[order])
    if y.shape[:1] != twice.shape[:1]:
        raise InputError(
            f"`f` should give one output for each token. Found the shape {tuple(y.shape)} for "
            f"{len(twice)} tokens."
        )
    off = float((permuted - y[order]).abs().max())
    if not off <= _SYMMETRY * max(float(y.abs().max()), 1e-300):
        raise InputError(
            f"`f` should not depend on the order of its tokens. Found outputs {off:.2g} apart: "
            "positions or a mask; copies are then not alike."
        )


def _best(own: Operator) -> tuple[Tensor, int, Tensor]:
    n, d = own.in_shape
    if n * d * own.out_shape[1] <= _LARGE:
        _, sizes, right = torch.linalg.svd(blocks(own), full_matrices=False)
        gains = sizes[:, 0].to("cpu", torch.float64)
        token = int(gains.argmax())
        return gains, token, right[token, 0]
    tops = _solved(own, _TOL, 0.01, "split")
    gains = torch.tensor([top.upper for top in tops], dtype=torch.float64)
    token = int(gains.argmax())
    return gains, token, tops[token].v


def _solved(own: Operator, tol: float, delta: float, name: str) -> list:
    """Every token's matrix as an operator of its own; they share their products."""
    (n, d), d_out = own.in_shape, own.out_shape[1]
    alone = Operator(own.matvec, own.rmatvec, (d,), (d_out,), own.dtype, own.device)
    starts = [start_named(f"{name}|{i}") for i in range(n)]
    return top_singular_batch(alone, starts, tol=tol, delta=delta)
