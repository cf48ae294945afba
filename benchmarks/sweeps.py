"""Sweeps at scale: planning, the overhead of a job, reading rows back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from made_up import made_up
from tables import Section, Target, milliseconds, say, table

import lipscope as ls
from lipscope.engine.plan import plan
from lipscope.engine.session import Session
from lipscope.engine.sweep import read_spec
from lipscope.engine.sweep.survey import surveys_of
from lipscope.records.folder import Finished, RunFolder
from lipscope.records.rows import Measurement

TINY = "random:bert:hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16"
_PLAN = """
import sys, time
began = time.perf_counter()
from lipscope.engine.sweep import read_spec
from lipscope.engine.plan import InputKey, Shape, Survey, plan
loaded = time.perf_counter()
spec = read_spec({"models": [f"m{i}" for i in range(10)], "lengths": "10:100:10",
                  "samples": int(sys.argv[1]), "seeds": "0:9"}).spec
items = [InputKey(n, s, 100 * s, f"{n} {s}") for n in spec.lengths for s in range(spec.samples)]
jobs = plan(spec, [Survey(Shape(10, None), {"default": items}, None)] * 10)
ended = time.perf_counter()
sys.path.insert(0, sys.argv[2])
from memory import peak
print(len(jobs), loaded - began, ended - loaded, peak() / 2**20)
"""


def section(*, quick: bool) -> Section:
    """The scale that a thesis may reach; figures of one process, nothing else running."""
    count = 10_000 if quick else 100_000
    out = Section("Sweeps")
    out.add(
        f"""{count:,} jobs and {count:,} rows, as from 10 models, 10 layers, 10 lengths, 10 seeds
and {count // 10_000} samples. *Planning* is reading the specification and listing the jobs with
their ids, in a process of its own; its memory is that process's peak, torch included. *Overhead*
is the time of a job in a sweep with one worker, driver and worker on one and the same core, less
the time of the same job without driver, files and messages; with and without the 16 tokens of
each row. It means something on an idle machine only."""
    )
    here = str(Path(__file__).resolve().parent)
    words = _run(_PLAN, str(count // 10_000), here).split()
    jobs, imported, planned, memory = int(words[0]), *map(float, words[1:])
    assert jobs == count
    lines = [
        [
            f"import, then plan {count:,} jobs",
            f"{imported:.1f} s + {planned:.1f} s, {memory:.0f} MB",
        ]
    ]
    out.targets = [
        Target(f"plan {count:,} jobs: below 10 s", f"{planned:.1f} s", planned < 10),
        Target(f"plan {count:,} jobs: below 500 MB", f"{memory:.0f} MB", memory < 500),
    ]
    for tokens in (True, False):
        spent = overhead(100 if quick else 1000, tokens=tokens)
        kind = "with tokens" if tokens else "without"
        lines.append([f"overhead of a job, {kind}", f"{milliseconds(spent)} ms"])
        out.targets.append(
            Target(
                f"overhead of a job, {kind}: below 5 ms", f"{milliseconds(spent)} ms", spent < 5e-3
            )
        )
    lines += _folder(count)
    out.add(table(["what", "takes"], lines))
    return out


def overhead(samples: int, *, tokens: bool) -> float:
    """Seconds that a job takes in a sweep with one worker beside the job itself."""
    asked: dict[str, Any] = {"models": [TINY], "lengths": [16], "samples": samples}
    asked["tokens"] = tokens
    request = read_spec(asked)
    surveys = surveys_of(request, {})
    shape, jobs = surveys[0].shape, plan(request.spec, surveys)
    times: list[tuple[int, float]] = []
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # inherited: driver and worker share this core
    try:
        with tempfile.TemporaryDirectory() as folder:
            ls.sweep(
                asked,
                Path(folder) / "run",
                workers=1,
                progress=lambda done, *_: times.append((done, time.perf_counter())),
            )
        # From an early batch on: the first jobs wait for the worker to start and to load.
        (first, began), (last, ended) = times[len(times) // 10], times[-1]
        swept = (ended - began) / (last - first)
        torch.set_num_threads(1)
        session = Session(request.spec, request.sources)
        for job in jobs[:first]:
            session.result(job, shape)
        began = time.perf_counter()
        for job in jobs[first:]:
            session.result(job, shape)
        return swept - (time.perf_counter() - began) / (last - first)
    finally:
        os.sched_setaffinity(0, before)


def _folder(count: int) -> list[list[str]]:
    """A folder of so many rows, written in portions, read back, and opened to go on."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run"
        say(f"sweeps: writing {count:,} rows")
        with RunFolder(path, {}) as folder:
            for start in range(0, count, 1000):
                folder.extend([Finished(_row(i)) for i in range(start, start + 1000)])
            compacted = _timed(folder.compact)
        read = _timed(lambda: ls.read_run(path).measurements())
        opened = _timed(lambda: RunFolder(path, {}).done)
    return [
        [f"compact {count:,} rows", f"{compacted:.1f} s"],
        [f"read {count:,} rows back, as records", f"{read:.1f} s"],
        ["open the folder to go on", f"{opened:.1f} s"],
    ]


def _row(i: int) -> Measurement:
    return made_up(
        i,
        1.0 + i / 7,
        model=f"model-{i % 10}",
        layer=i // 10 % 10,
        num_tokens=10 * (1 + i // 100 % 10),
        sample=i // 1000,
        tokens_sha256=f"{i % 10000:064x}",
    )


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _run(code: str, *arguments: str) -> str:
    """What a program prints in a process of its own."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
