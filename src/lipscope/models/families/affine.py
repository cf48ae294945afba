"""Affine maps out of modules, and the layer that four of them make with a call's own mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lipscope.attention import DotProduct, Rotary, TokenNorm
from lipscope.models.families.masks import read_mask
from lipscope.models.tracing.sites import AttentionCall, NotCoveredError, is_plain


class Affine(NamedTuple):
    """``x -> x W^T + b``.

    Attributes:
        weight: W, ``(out, in)``.
        bias: b, ``(out,)``, or None.
    """

    weight: Tensor
    bias: Tensor | None

    def rows(self, sizes: Sequence[int]) -> list[Affine]:
        """The maps to consecutive parts of the output, of the given widths."""
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(list(sizes))
        return [Affine(*both) for both in zip(self.weight.split(list(sizes)), biases, strict=True)]


def affine(module: Any) -> Affine:
    """The map of ``nn.Linear``, or of the ``Conv1D`` of GPT-2, which keeps W transposed.

    Raises:
        NotCoveredError: If the module is another, such as an adapter around one of them.
    """
    if not is_plain(module):
        raise NotCoveredError
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
    return Affine(weight, module.bias)


def projected(call: AttentionCall, names: str, **options: Any) -> DotProduct:
    """The layer of four linear modules of a call's own.

    Args:
        call: The call.
        names: What its module calls those of queries, keys, values and the output, with a space
            between them; three where the output's is one of the model. Those of queries and keys
            may be followed by a `TokenNorm`, in an ``nn.Sequential``.
        **options: As in `dot_product`.

    Returns:
        The layer.
    """
    modules = [getattr(call.module, name) for name in names.split()]
    for i, side in enumerate(("query_norm", "key_norm")):
        match modules[i]:
            case nn.Sequential() as pair if len(pair) == 2 and isinstance(pair[1], TokenNorm):
                modules[i], options[side] = pair[0], pair[1]
    maps = [affine(module) for module in modules]
    if len(maps) < 4 and call.projection is not None:
        maps.append(affine(call.projection))
    return dot_product(call, *maps, **options)


def dot_product(
    call: AttentionCall,
    query: Affine,
    key: Affine,
    value: Affine,
    output: Affine | None = None,
    **options: Any,
) -> DotProduct:
    """The layer of these maps, with the model's scale and the mask and angles that it passed in.

    Args:
        call: The call.
        query: To all queries, head after head.
        key: To all keys.
        value: To all values.
        output: From the concatenated heads; None where there is no projection.
        **options: Further fields of the layer, ``heads`` among them; a ``score_bias`` is added
            to the mask's own.

    Returns:
        The layer.
    """
    masking = read_mask(call)
    added = [b for b in (masking.bias, options.pop("score_bias", None)) if b is not None]
    angles = call.arguments.get("position_embeddings")
    return DotProduct(
        query.weight,
        key.weight,
        value.weight,
        None if output is None else output.weight,
        query_bias=query.bias,
        key_bias=key.bias,
        value_bias=value.bias,
        output_bias=None if output is None else output.bias,
        scale=getattr(call.module, "scaling", None),
        causal=masking.causal,
        window=masking.window,
        mask=masking.mask,
        rotary=None if angles is None else Rotary(angles[0][0], angles[1][0]),
        score_bias=sum(added[1:], added[0]) if added else None,
        **options,
    )
