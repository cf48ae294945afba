"""``torch.nn.MultiheadAttention``, alone and in torch's own encoder layers."""

from __future__ import annotations

from torch import nn

from lipscope.attention import DotProduct
from lipscope.models.families.affine import Affine, affine, dot_product
from lipscope.models.tracing.sites import AttentionCall, NotCoveredError, family


@family("MultiheadAttention", package="torch.nn")
def multihead(call: AttentionCall) -> DotProduct:
    """Read ``in_proj_weight`` and ``out_proj``.

    Not covered: tokens that the module appends to keys and values (``add_bias_kv``,
    ``add_zero_attn``), and weights apart for keys or values of another width.
    """
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise NotCoveredError
    inside = Affine(module.in_proj_weight, module.in_proj_bias)
    query, key, value = inside.rows([module.embed_dim] * 3)
    return dot_product(call, query, key, value, affine(module.out_proj), heads=module.num_heads)
