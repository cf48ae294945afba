"""Layers on few different tokens that are repeated very often: exact, whatever their number.

A token repeated c times moves in two ways: all copies together (their mean), or against
each other. The first is attention with weights on the tokens, the second is felt by the
copies' own queries only; the two are orthogonal and do not mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, Softmax
from lipscope.errors import InputError
from lipscope.measures.splitting import split_at

_LARGEST_DENSE = 1024  # tokens up to which the norm of an n x n matrix is computed


@dataclass(frozen=True)
class Repeated:
    """Sigma of a layer on repeated tokens, and what it is made of.

    Attributes:
        sigma: The larger of the two below.
        moving: Largest gain of moves that keep equal tokens equal.
        splitting: Largest gain of moves that take equal tokens apart; 0 if none is repeated.
        num_tokens: All tokens, copies counted.
    """

    sigma: float
    moving: float
    splitting: float
    num_tokens: int


def repeated_tokens(
    layer: Attention, atoms: Float[Tensor, "m d"], counts: tuple[int, ...]
) -> Repeated:
    """Sigma of ``layer`` on ``counts[i]`` copies of each ``atoms[i]``, at the cost of m tokens.

    ``‖J(X)‖ = max( ‖D^(1/2) J_w D^(-1/2)‖, max_i ‖T_i‖ )``: ``J_w`` is the Jacobian of
    attention with weights ``w = counts / n`` (``log w`` added to the logits),
    ``D = diag(w)``, and ``T_i`` is the derivative of token i's output along its own query,
    keys and values held fixed (``sum_h W_h V_h C_i^h A_h`` for dot products); the maximum
    runs over tokens that occur at least twice.

    Holds for unmasked softmax layers without rotary embedding or bias of the scores, whose
    queries, keys and values are made token by token, with any number of heads, biases and the
    output projection. With a causal mask the copies differ in
    what they read.

    Args:
        layer: The layer; computed in float64.
        atoms: The different tokens.
        counts: How often each occurs, any size: at least 1.

    Returns:
        `Repeated`; exact up to rounding (dense singular values).

    Raises:
        InputError: For a masked or rotary layer, another weighting, or counts that do not fit.

    Source: derived here (``docs/theory/inputs.md``); weights as in Appendix C of [castin2024].

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> repeated_tokens(layer, torch.zeros(1, 2), (10**9,)).sigma
    1.0
    """
    _check(layer, atoms, counts)
    layer = layer.in_double()
    x = atoms.detach().to("cpu", torch.float64)
    log_weights = torch.tensor(counts, dtype=torch.float64).log()
    found = split_at(layer, x, log_weights=log_weights)
    gains = found.gains[torch.tensor(counts) > 1]
    moving, splitting = found.moving, float(gains.max()) if len(gains) else 0.0
    return Repeated(max(moving, splitting), moving, splitting, sum(counts))


def uniform_gain(layer: Attention, num_tokens: int) -> float | None:
    """Sigma of the layer on equal tokens: ``‖P‖ ‖sum_h W_h V_h‖``, ``P`` uniform over its rows.

    With equal tokens ``x_j - m_i = 0``, so only ``P ⊗ V`` is left of the Jacobian.

    Holds for unmasked and causal layers of every variant whose values are linear and whose
    weights add up to 1 row by row, without rotary embedding or a bias of the scores; None for
    the others, for other masks, and with a causal mask beyond 1,024 tokens.

    Source: derived here (``docs/theory/inputs.md``).
    """
    n = num_tokens
    if layer.mask is not None and not bool(layer.mask.all()):
        return None
    if layer.positional or layer.window is not None or layer.norms()[2] is not None:
        return None
    if layer.entrance() is not None or not layer.weighting.normalised:
        return None
    if layer.causal and n > _LARGEST_DENSE:
        return None
    value = layer.projections()[2].unflatten(0, (layer.num_groups, -1))
    value = layer.repeat_groups(value).flatten(0, 1)
    value = value.detach().to("cpu", torch.float64)
    if layer.output is not None:
        value = layer.output.detach().to("cpu", torch.float64) @ value
    if not layer.causal:
        return _norm(value)
    rows = torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    return _norm(torch.ones(n, n, dtype=torch.float64).tril() / rows) * _norm(value)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def _check(layer: Attention, atoms: Tensor, counts: tuple[int, ...]) -> None:
    if layer.positional:
        raise InputError("not available: logits depend on position; copies are not alike.")
    if not (layer.by_token and isinstance(layer.weighting, Softmax)):
        raise InputError("not available: copies do not act like a weight of their key.")
    hides = layer.mask is not None and not bool(layer.mask.all())
    if layer.causal or layer.window is not None or hides:
        raise InputError("not available: the layer is masked, so copies read different tokens.")
    if len(counts) != atoms.shape[0] or min(counts, default=0) < 1:
        raise InputError(
            f"`counts` should be {atoms.shape[0]} numbers of at least 1. Found `counts = {counts}`."
        )
