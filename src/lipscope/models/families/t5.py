"""T5: no scale, no biases, and a relative position bias that all layers take from the first."""

from __future__ import annotations

from typing import Any

import torch

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family("T5Attention", "MT5Attention", scores="relative bias")
def t5(call: AttentionCall) -> DotProduct:
    """Read ``q``, ``k``, ``v``, ``o`` and the bias that is passed in or computed here."""
    module: Any = call.module
    bias = call.arguments.get("position_bias")
    if bias is None and module.has_relative_attention_bias:
        with torch.no_grad():
            bias = module.compute_bias(call.num_queries, call.num_keys, device=call.x.device)
    return projected(
        call,
        "q k v o",
        heads=module.n_heads,
        # Across encoder and decoder the bias that is passed on is zero.
        score_bias=bias[0] if bias is not None and bool(bias.any()) else None,
    )
