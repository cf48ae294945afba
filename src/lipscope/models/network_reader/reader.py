"""From a module to its `Network`, held against the module itself."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, DotProduct
from lipscope.errors import InputError
from lipscope.models.network import Branch, Network
from lipscope.models.network_reader.agreement import check_network
from lipscope.models.network_reader.forward_pass import function_of
from lipscope.models.network_reader.search import Pooled, Search, share_of
from lipscope.models.tracing.prepare import implementation_for, prepared
from lipscope.models.tracing.recorder import Inputs, to_device
from lipscope.models.tracing.sites import attention_sites
from lipscope.models.tracing.trace import trace

_CPU = torch.device("cpu")


def read_network(
    model: nn.Module,
    inputs: Inputs,
    *,
    at_layer: int = 0,
    head: Float[Tensor, "c d"] | None = None,
    bias: Float[Tensor, " c"] | None = None,
    names: tuple[str, ...] = (),
    pool: Pooled | None = None,
    modules: str | None = None,
) -> tuple[Network, Float[Tensor, "n d"]]:
    """The network that a module is at an input, and the stream that enters it, in float64.

    The stream is what enters the first block: embeddings with their positions and norm. Masks are
    those of this input. The network is held against a float64 copy of the module
    (`check_network`).

    Holds for blocks of dot-product attention and token-wise networks in turn, each with or without
    a residual sum and a norm before it or after the sum; for pools that are fixed means of tokens;
    for linear heads, layers of activations before them. Dropout is off, so it is the identity.

    Args:
        model: A module that ends in scores, ``(1, c)`` or for every token ``(1, n, c)``, or in a
            hidden state if ``head`` is given.
        inputs: Its arguments, of one sample: by name, or a tuple.
        at_layer: The attention layer before which the stream is taken.
        head: Rows that score the pooled hidden state of a model without a head.
        bias: Their bias.
        names: What to call the classes; those of the model's configuration if empty.
        pool: Which tokens are read where the model does not pool them itself: their mean without
            padding, the first or last real token, or a token by its index. Default: the last of a
            causal model, the mean with ``head``.
        modules: Which modules are attention, as for `attention_sites`.

    Returns:
        The network, and its input ``(n, d)``.

    Raises:
        InputError: If the module holds anything else, by name, or disagrees with what was found.

    >>> pair = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)
    >>> network, x = read_network(nn.Sequential(*pair), (torch.randn(1, 5, 8),), pool="mean")
    >>> len(network.branches), tuple(network(x).shape)
    (4, (3,))
    """
    given = to_device(inputs, _CPU, torch.float64)
    own_head = None if head is None else _head(head, bias)
    with ExitStack() as stack:
        own, _ = stack.enter_context(
            prepared(
                model,
                dtype=torch.float64,
                device=_CPU,
                implementation=implementation_for(model, closed=True),
            )
        )
        record = trace(
            own, given, _sites(own, modules), norms=True, blocks=True, dtype=torch.float64
        )
        found = Search(function_of(record), own_head, pool).found()
        count = len(found.network.bias)
        if names and len(names) != count:
            raise InputError(f"`names` should name {count} classes. Found {len(names)}.")
        network = replace(found.network, names=names or _class_names(own, count))
        check_network(network, found.scores, found.x)
    if not 0 <= at_layer < len(found.starts):
        raise InputError(
            f"`at_layer` should be between 0 and {len(found.starts) - 1} for this model. Found "
            f"{at_layer}."
        )
    x, start = found.x, found.starts[at_layer] if at_layer else 0
    with torch.no_grad():
        for branch in network.branches[:start]:
            x = branch(x)
    return replace(network, branches=network.branches[start:]), x


def layer_network(
    layer: DotProduct,
    num_tokens: int,
    head: Float[Tensor, "c d_out"],
    bias: Float[Tensor, " c"] | None = None,
    *,
    pool: Pooled = "mean",
    names: tuple[str, ...] = (),
) -> Network:
    """One attention layer alone, its pooled output scored: no residual sum, no norm.

    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> layer_network(layer, 3, torch.eye(2))(torch.zeros(3, 2, dtype=torch.float64)).tolist()
    [0.0, 0.0]
    """
    head, bias = _head(head, bias)
    share = share_of(pool, torch.ones(num_tokens, dtype=torch.bool))
    return Network((Branch(layer.in_double(), skip=False),), share, head, bias, names=names)


def _head(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A head that was given, in float64."""
    weight = weight.detach().to(_CPU, torch.float64)
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().to(weight)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InputError(
            "`head` should be a matrix (classes, width), and `bias` a number for every class. "
            f"Found {tuple(weight.shape)} and {tuple(bias.shape)}."
        )
    return weight, bias


def _sites(model: nn.Module, modules: str | None) -> dict[str, nn.Module]:
    """Attention modules, and layers of lipscope's own that stand alone."""
    alone = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    if modules is not None or not alone:
        return attention_sites(model, modules)
    try:
        named = attention_sites(model)
    except InputError:  # none is named so
        named = dict[str, nn.Module]()
    inside = tuple(f"{name}." for name in named)
    return named | {n: m for n, m in alone.items() if not n.startswith(inside)}


def _class_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Names of the classes in a configuration, unless they only number them."""
    named: Any = getattr(getattr(model, "config", None), "id2label", None) or {}
    found = tuple(str(named.get(index, "")) for index in range(count))
    return found if all(found) and not all(n.startswith("LABEL_") for n in found) else ()
