"""Sweeps at scale: planning, the overhead of a job, reading rows back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from made_up import made_up
from tables import Raw, Section, Target, at_most, milliseconds, say, table

import lipscope as ls
from lipscope.engine.plan import plan
from lipscope.engine.session import Session
from lipscope.engine.sweeps import read_spec
from lipscope.engine.sweeps.driver import surveys_of
from lipscope.records.folder import Finished, RunFolder
from lipscope.records.rows import Measurement

TINY = "random:bert:hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16"
PAIRS = 5
_PLAN = """
import sys, time
began = time.perf_counter()
from lipscope.engine.sweeps import read_spec
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


def measure(*, quick: bool) -> Raw:
    """The scale that a thesis may reach; figures of one process, nothing else running."""
    count = 10_000 if quick else 100_000
    here = str(Path(__file__).resolve().parent)
    words = _run(_PLAN, str(count // 10_000), here).split()
    jobs, imported, planned, memory = int(words[0]), *map(float, words[1:])
    assert jobs == count
    raw: Raw = [{"jobs": jobs, "import": imported, "plan": planned, "MB": memory}]
    for tokens in (True, False):
        say(f"scale: overhead of a job, tokens {tokens}")
        raw.append({"tokens": tokens, **_pairs(100 if quick else 500, tokens=tokens)})
    return [*raw, _folder(count)]


def render(raw: Raw) -> Section:
    """One line for each question."""
    planned, with_tokens, without, folder = raw
    count = f"{planned['jobs']:,}"
    out = Section("Sweeps")
    out.add(
        f"""{count} jobs and {count} rows, as from 10 models, 10 layers, 10 lengths, 10 seeds
and {planned["jobs"] // 10_000} samples. *Planning* is reading the specification and listing the
jobs with their ids, in a process of its own; its memory is that process's peak, torch included.
*Overhead* is the time of a job in a sweep with one worker, driver and worker on one and the same
core, less the time of the same job without driver, files and messages; with and without the 16
tokens of each row. Both are timed in turn, {len(without["sweep"])} times: median of the
differences, in brackets smallest and largest. It means something on an idle machine only."""
    )
    seconds, megabytes = f"{planned['plan']:.1f} s", f"{planned['MB']:.0f} MB"
    lines = [
        [f"import, then plan {count} jobs", f"{planned['import']:.1f} s + {seconds}, {megabytes}"]
    ]
    out.targets = [
        Target(f"plan {count} jobs: below 10 s", seconds, planned["plan"] < 10),
        Target(f"plan {count} jobs: below 500 MB", megabytes, planned["MB"] < 500),
    ]
    for kind, one in (("with tokens", with_tokens), ("without", without)):
        spent = [a - b for a, b in zip(one["sweep"], one["alone"], strict=True)]
        middle, low, high = (milliseconds(f(spent)) for f in (median, min, max))
        text = f"{middle} ms ({low} to {high})"
        lines.append([f"overhead of a job, {kind}", text])
        goal = f"overhead of a job, {kind}: below 5 ms"
        out.targets.append(Target(goal, text, at_most(spent, 5e-3)))
    rows = f"{folder['rows']:,} rows"
    lines += [
        [f"compact {rows}", f"{folder['compact']:.1f} s"],
        [f"read {rows} back, as records", f"{folder['read']:.1f} s"],
        ["open the folder to go on", f"{folder['open']:.1f} s"],
    ]
    out.add(table(["what", "takes"], lines))
    return out


def _pairs(samples: int, *, tokens: bool) -> dict[str, list[float]]:
    """Seconds of a job in a sweep with one worker, and by itself, in turn."""
    asked: dict[str, Any] = {"models": [TINY], "lengths": [16], "samples": samples}
    asked["tokens"] = tokens
    request = read_spec(asked)
    surveys = surveys_of(request, {})
    shape, jobs = surveys[0].shape, plan(request.spec, surveys)
    early = len(jobs) // 10  # the first jobs load the model

    def alone() -> float:
        session = Session(request.spec, request.sources)
        first, rest = jobs[:early], jobs[early:]
        for job in first:
            session.result(job, shape)
        return _timed(lambda: [session.result(job, shape) for job in rest]) / len(rest)

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(before)})  # inherited: driver and worker share this core
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"sweep": [], "alone": []}
    try:
        for _ in range(PAIRS):
            found["sweep"].append(_swept(asked))
            found["alone"].append(alone())
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
    return found


def _swept(asked: dict[str, Any]) -> float:
    """Seconds of a job, from an early batch on: the first wait for the worker to start and load."""
    times: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        ls.sweep(
            asked,
            Path(folder) / "run",
            workers=1,
            progress=lambda done, *_: times.append((done, time.perf_counter())),
        )
    (first, began), (last, ended) = times[len(times) // 10], times[-1]
    return (ended - began) / (last - first)


def _folder(count: int) -> dict[str, float]:
    """A folder of so many rows, written in portions, read back, and opened to go on."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run"
        say(f"scale: writing {count:,} rows")
        with RunFolder(path, {}) as folder:
            for start in range(0, count, 1000):
                folder.extend([Finished(_row(i)) for i in range(start, start + 1000)])
            compacted = _timed(folder.compact)
        read = _timed(lambda: ls.read_run(path).measurements())
        opened = _timed(lambda: RunFolder(path, {}).done)
    return {"rows": count, "compact": compacted, "read": read, "open": opened}


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
