"""An answer with its question: the row that tables, figures and pages read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lipscope.capture import LoadedModel, Sample
from lipscope.record import Measurement, version
from lipscope.sensitivity import Answer, Question


def named(loaded: LoadedModel) -> dict[str, str | None]:
    """What rows say about their model."""
    return {"model": loaded.name, "revision": loaded.revision, "weights": loaded.weights}


def row_of(
    reply: Answer,
    *,
    id: str,
    loaded: LoadedModel,
    question: Question,
    item: Sample,
    layer: int | None,
    device: torch.device,
    notes: Iterable[str] = (),
) -> Measurement:
    """The row of an answer.

    Args:
        reply: What one layer, or one head, answered.
        id: Digest of everything that determines the row.
        loaded: The model.
        question: What was asked.
        item: The input.
        layer: Index of the layer.
        device: Where it was computed.
        notes: Remarks on the model.

    Returns:
        The row.
    """
    remarks = [*notes, *reply.notes]
    return Measurement(
        id=id,
        **named(loaded),  # pyright: ignore[reportArgumentType]
        layer=layer,
        head=reply.head,
        map=question.map,
        metric=question.metric,
        move=question.move,
        read=question.read,
        side=question.side,
        position_offset=question.position_offset,
        input=item.kind,
        num_tokens=reply.num_tokens,
        sample=item.sample,
        start=item.start,
        delta=question.delta,
        dtype=str(question.dtype)[6:],
        device=device.type,
        seed=question.seed,
        tokens_sha256=item.sha256,
        version=version(),
        note="; ".join(remarks) or None,
        **reply.columns(),
    )
