"""Attention divided by its constant: ``lipscope.control.ContractiveAttention``."""

from __future__ import annotations

from typing import Any

from lipscope.attention import Attention
from lipscope.models.tracing.sites import AttentionCall, family


@family("ContractiveAttention", package="lipscope")
def contractive(call: AttentionCall) -> Attention:
    """Take the layer inside, with the factor in its output projection."""
    module: Any = call.module
    return module.as_layer(call.num_tokens)
