"""An answer with its question: the row that tables, figures and pages read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lipscope.engine.checks import OF_TEXT
from lipscope.engine.plan import Job, Shape, heads_of, row_id
from lipscope.engine.result import Answer, no_answer
from lipscope.engine.spec import REAL, Spec
from lipscope.models import LayerMap, Sample, default_text
from lipscope.records import AGAIN, Measurement, version

IMAGE = "image"
_BEGINNING = 60  # characters of a text that has no name


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
    spec: Spec,
    job: Job,
    reply: Answer,
    about: Mapping[str, Any],
    *,
    of: LayerMap | None = None,
    item: Sample | None = None,
    device: str | None = None,
    notes: Iterable[str] = (),
) -> Measurement:
    """The row of an answer to a job.

    Args:
        spec: The specification.
        job: The job.
        reply: What the layer, or one head, answered.
        about: `LoadedModel.about` of its model, where known.
        of: The map, where it was built.
        item: The input, where it was had.
        device: Where it was computed; where it should have been if None.
        notes: Remarks on the model.

    Returns:
        The row.
    """
    model, weights = spec.models[job.model], about.get("weights", "unknown")
    if job.weights is not None and weights in ("random", "unknown"):
        weights = f"random, seed {job.weights}"
    usual = IMAGE if spec.images is not None else OF_TEXT
    return Measurement(
        id=row_id(job.id, reply.head),
        model=model.name,
        revision=about.get("revision"),
        weights=weights,
        layer=job.layer,
        head=reply.head,
        map=job.map,
        metric=job.metric,
        move=spec.move,
        read=spec.read,
        side=spec.side,
        position_offset=spec.position_offset,
        input=item.kind if item is not None else usual if job.input == REAL else job.input,
        num_tokens=reply.num_tokens,
        sample=job.sample,
        start=item.start if item is not None else None,
        delta=spec.delta,
        dtype=job.dtype,
        device=device or spec.device,
        seed=job.seed,
        tokens_sha256=item.sha256 if item is not None else "",
        version=version(),
        note="; ".join([*notes, *reply.notes]) or None,
        text=job.text or None,
        step=model.step,
        module=of.module if of is not None else None,
        argument=of.argument if of is not None else None,
        projection=of.projection if of is not None else None,
        trained_length=about.get("trained_length"),
        **reply.columns(),
    )


def failed_rows(
    spec: Spec, job: Job, shape: Shape, error: str, about: Mapping[str, Any]
) -> list[Measurement]:
    """The rows of a job that has no answer: one, or one for each head.

    Args:
        spec: The specification.
        job: The job.
        shape: That of its model.
        error: What went wrong, in one line.
        about: `LoadedModel.about` of its model, where known.
    """
    text = error if error.endswith(AGAIN) else " ".join(error.split())[:300]
    return [
        row_of(spec, job, no_answer(head, job.num_tokens or 0, text), about)
        for head in heads_of(job, shape)
    ]
