"""BERT and its copies: separate query, key and value; projection in a module of its own."""

from __future__ import annotations

from lipscope.attention import DotProduct
from lipscope.models.families.affine import projected
from lipscope.models.tracing.sites import AttentionCall, family


@family(
    *(
        f"{name}{kind}Attention"
        for name in (
            "Bert",
            "BertGeneration",
            "BridgeTower",
            "Camembert",
            "Data2VecText",
            "Electra",
            "Ernie",
            "RoCBert",
            "RobertaPreLayerNorm",
            "Roberta",
            "XLMRoberta",
            "XLMRobertaXL",
            "Xmod",
        )
        for kind in ("Self", "Cross")
    ),
)
def bert(call: AttentionCall) -> DotProduct:
    """Read ``query``, ``key``, ``value`` and the traced output projection."""
    return projected(call, "query key value", heads=call.module.num_attention_heads)
