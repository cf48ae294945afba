"""Dot-product attention with the score ``<q_i, k_j>`` of Vaswani et al."""

from __future__ import annotations

from lipscope.attention.core import InnerProduct, variant


@variant
class DotProduct(InnerProduct):
    """Attention with ``S_ij = scale <Q x_i + b_Q, K x_j + b_K>``.

    Holds for encoders and decoders, grouped keys and values, biases, rotary embeddings, soft-capped
    scores, normalised queries and keys, and any 0/-inf mask. Bounds from weights cover less:
    none holds with a soft cap or with normalised queries or keys.

    One head with ``Q = K = V = I`` at zero tokens averages them, so its Jacobian is
    ``1/n`` in every block and its norm 1:

    >>> import torch
    >>> from lipscope.linalg.operator import to_dense
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> jacobian = to_dense(layer.linearise(torch.zeros(3, 2)))
    >>> round(float(torch.linalg.matrix_norm(jacobian, 2)), 6)
    1.0
    """
