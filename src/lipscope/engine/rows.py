"""An answer with its question: the row that tables, figures and pages read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lipscope.engine.question import Answer, Question
from lipscope.models import LoadedModel, Sample, default_text
from lipscope.records.rows import Measurement, version

_BEGINNING = 60  # characters of a text that has no name


def named(loaded: LoadedModel) -> dict[str, str | None]:
    """What rows say about their model."""
    return {"model": loaded.name, "revision": loaded.revision, "weights": loaded.weights}


def source_of(data: Any, images: str | Path | None) -> dict[str, str]:
    """What a manifest says about what was measured on; never compared, as rows hold digests.

    Args:
        data: As for `measure`: a text, None for the default one, or a batch.
        images: As for `measure`.

    Returns:
        ``images``, or ``text`` (``default``, or how it begins) and ``text_sha256``; nothing for
        a batch.

    >>> source_of("It was late.", None)["text"]
    'It was late.'
    """
    if images is not None:
        return {"images": str(images)}
    text = default_text() if data is None else data
    if not isinstance(text, str):
        return {}
    begins = " ".join(text[:_BEGINNING].split()) + "…" * (len(text) > _BEGINNING)
    sha256 = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return {"text": "default" if data is None else begins, "text_sha256": sha256}


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
