"""The protocol between a driver and its workers: one JSON object a line, no pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lipscope.engine.plan import Job, Shape
from lipscope.engine.session import Result
from lipscope.records import Bound, Finished, Measurement, TokenShare

ALIVE = '"alive"'
"""What a worker says between its answers, every `BEAT` seconds."""
BEAT = 2.0


def begun(job: Job) -> str:
    """A job that is being begun, as one line."""
    return json.dumps({"begun": job.id})


def has_begun(line: str | bytes) -> str | None:
    """The id of the job that a line says is begun; None for any other line."""
    said = json.loads(line)
    return said["begun"] if isinstance(said, dict) else None


def encoded(result: Result) -> str:
    """A result as one line."""
    finished = [
        (one.row.to_dict(), [vars(t) for t in one.tokens], [vars(b) for b in one.bounds])
        for one in result.finished
    ]
    return json.dumps([*result[:3], finished], ensure_ascii=True)


def decoded(line: str | bytes) -> Result:
    """The result of a line."""
    job, model, about, finished = json.loads(line)
    return Result(job, model, about, [_finished(*one) for one in finished])


def _finished(row: Mapping[str, Any], tokens: Sequence[Any], bounds: Sequence[Any]) -> Finished:
    return Finished(
        Measurement(**row),
        tuple(TokenShare(**one) for one in tokens),
        tuple(Bound(**one) for one in bounds),
    )


def encoded_jobs(jobs: Sequence[Job], shape: Shape) -> str:
    """Jobs of one window as one line."""
    return json.dumps([jobs, shape])


def decoded_jobs(line: str | bytes) -> tuple[list[Job], Shape]:
    """The jobs of a line, and the shape of their model."""
    jobs, shape = json.loads(line)
    layers, heads = shape
    known = Shape(layers, None if heads is None else tuple(heads))
    return [Job(*one) for one in jobs], known
