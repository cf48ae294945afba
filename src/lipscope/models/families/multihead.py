"""``torch.nn.MultiheadAttention`` and ``lipscope``'s, alone and in torch's own encoder layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lipscope.attention import Attention, MultiheadAttention
from lipscope.models.families.affine import Affine, Masking, affine, dot_product, read_mask
from lipscope.models.tracing.sites import AttentionCall, NotCoveredError, family


@family("MultiheadAttention", package=("torch.nn", "lipscope"))
def multihead(call: AttentionCall) -> Attention:
    """Read ``in_proj_weight`` and ``out_proj``, or take the layer of lipscope's own.

    Not covered: tokens that the module appends to keys and values (``add_bias_kv``,
    ``add_zero_attn``), and weights apart for keys or values of another width.
    """
    module = call.module
    if isinstance(module, MultiheadAttention):
        return _layer_inside(call, module.attention)
    assert isinstance(module, nn.MultiheadAttention)
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise NotCoveredError
    inside = Affine(module.in_proj_weight, module.in_proj_bias)
    query, key, value = inside.rows([module.embed_dim] * 3)
    return dot_product(call, query, key, value, affine(module.out_proj), heads=module.num_heads)


def _layer_inside(call: AttentionCall, layer: Attention) -> Attention:
    """The layer inside, with the call's mask besides its own."""
    masking, changes = read_mask(call), dict[str, Any]()
    if masking.bias is not None:
        if "score_bias" not in layer.fields():
            raise NotCoveredError
        own = layer.score_bias
        changes["score_bias"] = masking.bias if own is None else own + masking.bias
    if masking._replace(bias=None) != Masking():
        n, m = call.num_queries, call.num_keys
        seen = torch.ones(n, m, dtype=torch.bool, device=call.x.device)
        if masking.causal:
            seen = seen.tril().triu(1 - (masking.window or n))
        for mask in (masking.mask, layer.visible(slice(0, n), slice(0, m), call.x.device)):
            seen = seen if mask is None else seen & mask
        alone = bool(seen.equal(torch.ones_like(seen).tril()))
        changes |= {"causal": alone, "mask": None if alone else seen}
        changes |= {"window": None} if "window" in layer.fields() else {}
    return layer.replace(**changes)
