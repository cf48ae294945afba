"""Rows of a layer at inputs that were built rather than captured."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.engine.answer import Question, answer
from lipscope.engine.rows import row_of
from lipscope.models import LayerMap, LoadedModel, Sample
from lipscope.models.data.windows import digest
from lipscope.records.rows import Measurement, stable_id


def measure_given(
    layer: Attention,
    x: Float[Tensor, "n d"],
    *,
    kind: str,
    model: str = "layer",
    index: int = 0,
    sample: int = 0,
    weights: str = "float32",
    tol: float = 1e-3,
    delta: float = 1e-6,
    seed: int = 0,
    memory: int = 2**30,
) -> Measurement:
    """Sigma of one layer at one input, as a row like those of `measure`.

    ``sigma = max ‖J e‖_F / ‖e‖_F`` of the map ``attention``, from a start of its own: an input
    that was found by maximising sigma keeps a valid interval.

    Holds for every `Attention` layer, in the dtype of its weights.

    Args:
        layer: The layer.
        x: The input.
        kind: What the input is, for the row's ``input``: for example ``two_cluster``.
        model: Name of the model that the layer is from.
        index: Its layer index.
        sample: Index among inputs of the same length.
        weights: What the weights were stored as.
        tol: Relative tolerance.
        delta: Failure probability of the interval.
        seed: Of the random start.
        memory: Budget for chunks and the solver's basis.

    Returns:
        The row.

    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> round(measure_given(layer, torch.zeros(3, 2), kind="zeros").sigma, 6)
    1.0
    """
    x = x.to(layer.query)
    question = Question(
        map="attention",
        per_head=False,
        metric="frobenius",
        move="all",
        read="all",
        rest=False,
        average=False,
        tol=tol,
        delta=delta,
        tight=False,
        dtype=x.dtype,
        seed=seed,
        memory=memory,
    )
    content = digest(x)
    (reply,) = answer(_as_map(layer, x, index), question, f"{model}|{index}|{kind}|{content}")
    named = {"model": model, "layer": index, "input": kind, "sample": sample}
    return row_of(
        reply,
        id=stable_id({**named, "tokens": content, **question.as_spec()}),
        loaded=LoadedModel(model, layer, None, None, weights),
        question=question,
        item=Sample(kind, {}, sample, None, len(x), content, None),
        layer=index,
        device=x.device,
    )


def _as_map(layer: Attention, x: Tensor, index: int) -> LayerMap:
    with torch.no_grad():
        output = layer(x)
    return LayerMap(
        index,
        "attention",
        x,
        output,
        layer,
        lambda at, memory, per_head: layer.linearise(at, memory=memory, per_head=per_head),
        layer,
        layer.num_heads,
        lambda: output[None],
    )
