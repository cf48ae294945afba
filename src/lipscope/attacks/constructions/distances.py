"""The configuration on which L2 attention comes close to its bound."""

from __future__ import annotations

import math

import torch

from lipscope.attacks.ascent import check_size
from lipscope.attacks.constructions.construction import Construction
from lipscope.attention import Attention, L2Attention, phi_inverse
from lipscope.errors import InputError


def l2_opposed(layer: Attention, *, head: int = 0, num_tokens: int, radius: float) -> Construction:
    """A token at the origin and the others at ``± r u``, ``r |W u| / k^(1/4) = c``.

    ``c^2 = 1 + phi^{-1}(n-1)`` with ``phi(x) = x e^{x+1}`` maximises the mean squared distance
    ``sum_j P_1j |x_j - x_1|^2 = phi^{-1}(n-1)`` that token 1 sees. For ``D = H = 1``, unit
    weights and odd ``n`` the infinity norm of the Jacobian is
    ``4 phi^{-1} - 1 + 2 / (1 + phi^{-1})``, within 2 of the upper bound. ``predicted`` is
    ``‖V (P_11 I + 2 C W W^T / sqrt(k))‖ <= sigma``. ``u`` is the top right singular vector of
    the queries, ``r`` at most the radius; the origin comes last under a causal mask.

    Holds for one head of `L2Attention` without a mask other than the causal one.

    Args:
        layer: The layer.
        head: Index of the head.
        num_tokens: At least 2.
        radius: Largest token norm allowed.

    Returns:
        The input.

    Raises:
        InputError: For other variants of attention, or arguments out of range.

    Source: Theorem 3.2 of [kim2021]; the configuration is derived here
    (``docs/theory/inputs.md``).
    """
    check_size(num_tokens, radius, least=2)
    if not isinstance(layer, L2Attention):
        raise InputError(f"not available: made for L2 attention. Found `{type(layer).__name__}`.")
    if not 0 <= head < layer.num_heads:
        raise InputError(
            f"`head` should be between 0 and {layer.num_heads - 1}. Found `head = {head}`."
        )
    if layer.mask is not None and not bool(layer.mask.all()):
        raise InputError("not available: its mask is neither empty nor causal.")
    query, value = (
        w.detach().to("cpu", torch.float64).unflatten(0, (layer.num_heads, -1))[head]
        for w in (layer.query, layer.value)
    )
    if layer.output is not None:
        parts = layer.output.detach().to("cpu", torch.float64).unflatten(1, (layer.num_heads, -1))
        value = parts[:, head] @ value
    _, size, right = torch.linalg.svd(query, full_matrices=False)
    if not size[0] > 0:
        raise InputError(f"not available: the queries of head {head} are zero.")
    c = math.sqrt(1 + phi_inverse(float(num_tokens - 1)))
    u, r = right[0], min(radius, c / float(size[0]))
    at = torch.zeros(num_tokens, dtype=torch.float64)
    at[1 : 1 + num_tokens // 2], at[1 + num_tokens // 2 :] = r, -r
    p = torch.softmax(-((at * size[0]) ** 2), dim=0)
    spread = float(p @ at**2 - (p @ at) ** 2)
    block = p[0] * value + 2 * spread * float(size[0]) ** 2 * torch.outer(value @ u, u)
    x = at[:, None] * u
    x = x.flip(0) if layer.causal else x
    return Construction(
        x.to(layer.query),
        "l2_opposed",
        "Theorem 3.2",
        "kim2021",
        float(torch.linalg.matrix_norm(block, 2)),
        head=head,
    )
