"""A small sweep with a job that fails, and what its rows must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars

import lipscope as ls
from command import BERT
from lipscope.engine.plan import Job, Shape
from lipscope.engine.session import Result
from lipscope.engine.spec import Request, spec_of
from lipscope.engine.sweeps import pool

# `l2_opposed` is made for another kind of attention: two of these ten jobs raise.
SPEC: dict[str, Any] = {
    "models": [BERT],
    "lengths": [6],
    "samples": 4,
    "inputs": ["real", "l2_opposed"],
    "theorems": ["castin_thm_3_3"],
}
JOBS, FAILED = 10, 2


def in_this_process(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    workers: int,
    held: Mapping[str, pool.Radii],
) -> Iterator[list[Result]]:
    """What a worker would answer, in its words: for tests of answers, not of processes."""
    assert workers == 1
    session = pool.Decisions(spec_of(request.spec.as_dict()), dict(request.sources))
    for job in jobs:
        (asked,), shape = pool.decoded_jobs(pool.encoded_jobs([job], shapes[job.model], held))
        for one in session.results(asked[0], shape, asked[1]):
            yield [pool.decoded_result(pool.encoded_result(one))]


def rows_of(folder: Path) -> polars.DataFrame:
    """All columns but the time, in an order that does not depend on who was first."""
    return ls.read_run(folder).rows.drop("seconds").sort("id")


def same_run(one: Path, other: Path) -> None:
    """The same rows, tokens and bounds, each once, in the lines and in their copies."""
    assert rows_of(one).equals(rows_of(other))
    for name, key in (("tokens", "index"), ("bounds", "theorem")):
        tables = [getattr(ls.read_run(p), name).sort("id", key) for p in (one, other)]
        assert tables[0].equals(tables[1])
    lines = (one / "rows.jsonl").read_text().splitlines()
    assert len(lines) == len(rows_of(one)) == len(polars.read_parquet(one / "rows.parquet"))
