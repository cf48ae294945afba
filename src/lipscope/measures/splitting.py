"""Mass splitting: when splitting a token increases sigma more than moving it.

Two halves of a token that move in opposite directions change no weighted mean over tokens, so
each half affects only its own query. The effect is given by one matrix per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipscope.attention import Attention, Softmax, check_layer
from lipscope.display import Shown
from lipscope.errors import (
    InputError,
    check_finite_numbers,
    check_positive,
    check_tokens,
)
from lipscope.linalg import Operator, linearise, start_named, top_singular_batch
from lipscope.measures.mean_field import (
    TokenMeasure,
    check_measure,
    largest,
    push_forward,
    weighted,
)
from lipscope.measures.transport import wasserstein

Function = Callable[[Tensor], Tensor]

_LARGE = 2**22  # maximum number of entries of all tokens' matrices without the solver
_SYMMETRY = 1e-6  # accepted difference between copies, relative to the largest entry
_TOL = 1e-6


@dataclass(frozen=True, eq=False, repr=False)
class Split(Shown):
    """The gains of splitting the tokens of an input, and of moving them."""

    moving: float  # largest gain of moves that keep copies together
    # largest gain of moving the copies of a token in opposite directions, ``‖T_i‖``, ``(n,)``
    gains: Float[Tensor, " n"]
    token: int  # the token with the largest gain
    # unit move of its first copy, ``(d,)``; the second moves in the opposite direction
    direction: Float[Tensor, " d"]

    @property
    def splitting(self) -> float:
        """The largest gain of splitting."""
        return float(self.gains[self.token])

    @property
    def ratio(self) -> float:
        """``max_i ‖T_i‖ / moving``: above 1, splitting beats every move of whole tokens.

        NaN if no move has any effect.
        """
        if self.moving > 0:
            return self.splitting / self.moving
        return float("inf") if self.splitting > 0 else float("nan")


def split_at(
    f: Attention | Function,
    x: Float[Tensor, "n d"],
    *,
    log_weights: Float[Tensor, " n"] | None = None,
) -> Split:
    """Gains of splitting every token, and of moving whole tokens.

    Consider every token repeated m >= 2 times, with any shares. For a map that is invariant under
    this, ``‖J(X^(m))‖ = max( ‖J(X)‖, max_i ‖T_i‖ )``: ``T_i`` is the derivative of token i's output
    with respect to its own query, keys and values held fixed (``Σ_h W_h V_h C_i^h A_h`` for dot
    products). ``split_ratio > 1`` if and only if splitting beats moving.

    In closed form for `Attention` with softmax weights of token-wise scores: copies share position,
    mask and visible keys, so masks, windows, rotary embeddings and score biases are allowed. Any
    other map is evaluated on the doubled input, and must be permutation-equivariant; ``moving``
    is then the gain on the doubled input with copies moving together.

    Args:
        f: A layer, or any function of ``(n, d)`` for every n.
        log_weights: Logarithms of the tokens' weights, for `Attention`; norms are weighted by
            them. None: uniform.

    Raises:
        InputError: If the input is not finite, or a function distinguishes copies or permuted
            tokens, or has weights.

    Source: derived here (``docs/theory/splitting.md``).

    >>> from lipscope.attention import DotProduct
    >>> one = torch.ones(1, 1).double()
    >>> found = split_at(DotProduct(-one, one, one), torch.tensor([[-3.0], [-0.3]]).double())
    >>> found.token, round(found.splitting, 4), round(found.moving, 4)
    (1, 1.5535, 1.2187)
    """
    check_tokens("x", x)
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"`x` should be in float32 or float64. Found {str(x.dtype)[6:]}.")
    if log_weights is not None:
        log_weights = torch.as_tensor(log_weights).to(x)
        check_finite_numbers("log_weights", log_weights)
    if not callable(f):
        raise InputError(f"`f` should be a layer or a function. Found `{type(f).__name__}`.")
    if isinstance(f, Attention) and f.query.dtype != x.dtype:
        raise InputError(
            f"`x` should be as precise as the layer, {str(f.query.dtype)[6:]}. Found "
            f"{str(x.dtype)[6:]}; `layer.in_double()` is the layer in float64."
        )
    if in_closed_form(f):
        assert isinstance(f, Attention)
        separate = own_operator(f, x, log_weights=log_weights)
        jacobian = f.linearise(x, log_weights=log_weights)
        moving = largest(jacobian if log_weights is None else weighted(jacobian, log_weights))
    elif log_weights is not None:
        raise InputError(
            "`log_weights` go with softmax attention. Found another map; leave them out."
        )
    else:
        separate, together = _doubled_operators(f, x)
        moving = largest(together)
    gains, token, direction = _best_split(separate)
    return Split(moving, gains, token, direction)


def in_closed_form(f: object) -> bool:
    """Whether copies of a token act as a weight, so that the input need not be doubled."""
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
    """``(e_i) -> (T_i e_i)``: the effect of tokens through their own queries only."""
    if not in_closed_form(layer):
        raise InputError("not available: copies count otherwise than as a weight of their key.")
    options = {"memory": memory, "map": map, "per_head": per_head}
    return layer.linearise(x, context=x, log_weights=log_weights, **options)


def token_blocks(op: Operator) -> Float[Tensor, "n d_out d"]:
    """The matrices ``T_i`` of a block-diagonal operator, from d products."""
    n, d = op.in_shape
    eye = torch.eye(d, dtype=op.dtype, device=op.device)
    return op.matvec(eye[:, None].expand(d, n, d)).permute(1, 2, 0)


def finite_split(
    layer: Attention, mu: TokenMeasure, found: Split, *, size: float, whole: bool = False
) -> float:
    """``W_2(F(μ'), F(μ)) / W_2(μ', μ)``: halves of one token moved by ``± size`` along a direction.

    Exact transport: the ratio tends to ``found.splitting`` as the size tends to 0. With ``whole``,
    both halves move in the same direction.
    """
    check_measure(mu)
    check_positive("size", size)
    halves = mu.copied(torch.tensor([0.5, 0.5]))
    points = halves.points.clone()
    step = size * found.direction.to(points)
    points[2 * found.token] += step
    points[2 * found.token + 1] -= -step if whole else step
    moved = halves.moved(points)
    out = wasserstein(push_forward(layer, moved), push_forward(layer, mu))
    return float(out / wasserstein(moved, mu))


# --- operators


def _doubled_operators(f: Function, x: Tensor) -> tuple[Operator, Operator]:
    """Operators of opposite and joint moves of copies, on the doubled input."""
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
    # Unreversed, it would leave two tokens in place.
    order = torch.randperm(len(twice), generator=torch.Generator().manual_seed(0)).flip(0)
    try:
        with torch.no_grad():
            y, permuted = f(twice), f(twice[order])
    except (RuntimeError, TypeError) as problem:
        raise InputError(
            f"`f` should run on tokens {tuple(twice.shape)}. Found that it raised "
            f"{type(problem).__name__}: {problem}"
        ) from problem
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


def _best_split(op: Operator) -> tuple[Tensor, int, Tensor]:
    """``‖T_i‖`` of every token, the token with the largest one, and its direction.

    Many large matrices are solved jointly, with one product for all tokens: upper ends.
    """
    (n, d), d_out = op.in_shape, op.out_shape[1]
    if n * d * d_out <= _LARGE:
        _, sizes, right = torch.linalg.svd(token_blocks(op), full_matrices=False)
        gains, directions = sizes[:, 0].to("cpu", torch.float64), right[:, 0]
    else:
        alone = Operator(op.matvec, op.rmatvec, (d,), (d_out,), op.dtype, op.device)
        starts = [start_named(f"split|{i}") for i in range(n)]
        tops = top_singular_batch(alone, starts, tol=_TOL)
        gains = torch.tensor([top.upper for top in tops], dtype=torch.float64)
        directions = [top.v for top in tops]
    token = int(gains.argmax())
    return gains, token, directions[token]


# --- few distinct tokens, repeated any number of times

_LARGEST_DENSE = 1024  # maximum number of tokens for computing the norm of an n x n matrix


@dataclass(frozen=True)
class Repeated:
    """Sigma of a layer on repeated tokens, with its two components."""

    sigma: float  # the larger of the two below
    moving: float  # largest gain of moves that keep equal tokens equal
    splitting: float  # largest gain of moves that separate equal tokens; 0 if none is repeated
    num_tokens: int  # number of tokens, including copies


def repeated_tokens(
    layer: Attention, atoms: Float[Tensor, "m d"], counts: tuple[int, ...]
) -> Repeated:
    """Sigma of ``layer`` on ``counts[i]`` copies of each ``atoms[i]``, at the cost of m tokens.

    ``‖J(X)‖ = max( ‖D^(1/2) J_w D^(-1/2)‖, max_i ‖T_i‖ )``: ``J_w`` is the Jacobian of
    attention with weights ``w = counts / n`` (``log w`` added to the logits),
    ``D = diag(w)``, and ``T_i`` is the derivative of token i's output along its own query,
    keys and values held fixed (``sum_h W_h V_h C_i^h A_h`` for dot products); the maximum
    runs over tokens that occur at least twice.

    Holds for unmasked softmax layers without rotary embedding or score bias and with token-wise
    queries, keys and values, for any number of heads, biases and the output projection. With a
    causal mask copies see different keys.

    Source: derived here (``docs/theory/inputs.md``); weights as in Appendix C of [castin2024].

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> repeated_tokens(layer, torch.zeros(1, 2), (10**9,)).sigma
    1.0
    """
    check_layer(layer)
    check_tokens("atoms", atoms)
    if (why := _unlike_copies(layer)) is not None:
        raise InputError(f"not available: {why}.")
    counts = tuple(counts.tolist() if isinstance(counts, Tensor) else counts)
    if len(counts) != atoms.shape[0] or any(type(k) is not int or k < 1 for k in counts):
        raise InputError(
            f"`counts` should be {atoms.shape[0]} whole numbers of at least 1. Found "
            f"`counts = {counts}`."
        )
    layer = layer.in_double()
    x = atoms.detach().to("cpu", torch.float64)
    log_weights = torch.tensor(counts, dtype=torch.float64).log()
    found = split_at(layer, x, log_weights=log_weights)
    gains = found.gains[torch.tensor(counts) > 1]
    moving, splitting = found.moving, float(gains.max()) if len(gains) else 0.0
    return Repeated(max(moving, splitting), moving, splitting, sum(counts))


@dataclass(frozen=True)
class Grouped:
    """An input with few distinct tokens: a repeated one is a first copy plus the rest."""

    tokens: Float[Tensor, "m d"]  # one per group; repeated tokens have two groups
    group: Int[Tensor, " n"]  # of each input token
    log_weights: Float[Tensor, " m"]  # logarithms of the group sizes

    def spread(self, e: Float[Tensor, "m d"]) -> Float[Tensor, "n d"]:
        """The move of all tokens, of equal norm, corresponding to the move ``e`` of the groups."""
        return (e / (0.5 * self.log_weights).exp()[:, None])[self.group]


def grouped(layer: Attention, x: Float[Tensor, "n d"]) -> Grouped | None:
    """Groups of equal tokens of an input, whose joint moves attain the norm of the Jacobian.

    Moves that separate equal tokens act only through their own queries, by the same ``T_i`` for
    all of them: moving one copy against the others is enough. So with ``J_w`` and ``D`` as in
    `repeated_tokens`, and the first copy and the others as two tokens,
    ``‖J(X)‖ = ‖D^(1/2) J_w D^(-1/2)‖``, at the cost of m tokens.

    Hypotheses as for `repeated_tokens`; None if they fail, or if there are more groups than half
    of the tokens.

    Source: derived here (``docs/theory/inputs.md``).
    """
    if _unlike_copies(layer) is not None:
        return None
    if layer.mask is not None and layer.mask.shape[-1] != len(x):
        return None
    tokens, group, counts = torch.unique(x, dim=0, return_inverse=True, return_counts=True)
    again = (counts > 1).nonzero().flatten()
    if 2 * (len(tokens) + len(again)) > len(x):
        return None
    group = group.clone()
    for k, i in enumerate(again.tolist()):
        group[int((group == i).nonzero()[0])] = len(tokens) + k
    tokens = torch.cat([tokens, tokens[again]])
    return Grouped(tokens, group, group.bincount().to(x).log())


def uniform_gain(layer: Attention, num_tokens: int) -> float | None:
    """Sigma of the layer on equal tokens: ``‖P‖ ‖sum_h W_h V_h‖``, ``P`` uniform over its rows.

    With equal tokens ``x_j - m_i = 0``, so only ``P ⊗ V`` is left of the Jacobian.

    Holds for unmasked and causal layers of every variant with linear values and weights that add
    up to 1 in each row, without rotary embedding or score bias; None for the others, for other
    masks, and with a causal mask beyond 1,024 tokens.

    Source: derived here (``docs/theory/inputs.md``).
    """
    n, masked = num_tokens, layer.mask is not None and not bool(layer.mask.all())
    norms = layer.norms()[2] is not None or layer.entrance() is not None
    if masked or layer.positional or layer.window is not None or norms:
        return None
    if not layer.weighting.normalised or (layer.causal and n > _LARGEST_DENSE):
        return None
    value = layer.projections()[2].unflatten(0, (layer.num_groups, -1))
    value = layer.repeat_groups(value).flatten(0, 1)
    value = value.detach().to("cpu", torch.float64)
    if layer.output is not None:
        value = layer.output.detach().to("cpu", torch.float64) @ value
    if not layer.causal:
        return _dense_norm(value)
    rows = torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    return _dense_norm(torch.ones(n, n, dtype=torch.float64).tril() / rows) * _dense_norm(value)


def _dense_norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def _unlike_copies(layer: Attention) -> str | None:
    """Why copies of a token do not act like a single weighted token; None if they do."""
    if layer.positional:
        return "logits depend on position; copies are not alike"
    if not in_closed_form(layer):
        return "copies do not act like a weight of their key"
    hides = layer.mask is not None and not bool(layer.mask.all())
    if layer.causal or layer.window is not None or hides:
        return "the layer is masked, so copies read different tokens"
    return None
