"""The expected time of a sweep, and what it is based on."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipscope.engine.plan import Job, Shape, plan
from lipscope.engine.session import Session
from lipscope.engine.spec import Request, spec_of
from lipscope.engine.survey_cache import Held
from lipscope.engine.sweeps.driver import left_over, number_of_workers, place_of
from lipscope.engine.sweeps.local import start_time, threads_of
from lipscope.engine.sweeps.survey import surveys_of
from lipscope.engine.sweeps.written import read_spec
from lipscope.models import device_of
from lipscope.records import MANIFEST, SURVEY, Measurement, Place, check_same, read_run

_BUDGET = 10.0  # seconds of calibration
_LONG = 20.0  # seconds of a job that is not done at a second length when the budget is spent
_SLOPE = 2.0  # of the time in the number of tokens where two lengths do not say it
_SLOPES = (1.0, 3.0)  # what two noisy times may say

# Model, floating type, map, input, and whether it is the first of a length, which is checked.
JobKind = tuple[Any, ...]
Times = dict[JobKind, dict[int, float]]  # seconds of a job by number of tokens


class Estimate(NamedTuple):
    """The size and the expected time of a sweep.

    Attributes:
        jobs: All jobs.
        done: Those whose rows are in the folder.
        seconds: Expected time for the others.
        basis: What the time is from, as a sentence.
    """

    jobs: int
    done: int
    seconds: float
    basis: str


def estimate(
    spec: str | Path | Mapping[str, Any],
    out: str | Path | Place | None = None,
    *,
    workers: int | None = None,
    cluster: str | None = None,
) -> Estimate:
    """Estimate the number of jobs of a sweep and its time; nothing is written.

    Of every kind that is left (model, floating type, map, input, first of its length or not) some
    jobs are done now, with a worker's threads, at increasing lengths: for about ten seconds, or as
    long as two lengths of each take, one where that takes long. Other lengths are interpolated on
    logarithms, and beyond the longest one the time grows like the last two lengths say, or like n².
    Looking at the models, starting a worker and loading come on top, as long as they take now.
    Where a worker has one thread and no accelerator all of this is processor time: what else runs
    on the machine changes little, and the sweep takes longer by what its workers have to wait.

    Args:
        spec: As for `sweep`.
        out: As for `sweep`.
        workers: As for `sweep`.
        cluster: As for `sweep`; the estimate is that of one worker.

    Returns:
        The estimate.

    Raises:
        InputError: As `sweep` does.
    """
    request = read_spec(spec)
    count = 1 if cluster is not None else number_of_workers(workers, cluster)
    request, held, known = _held(place_of(request, out), request)
    clock = _clock(request, threads_of(count))
    began = clock()
    surveys = surveys_of(request, known)
    looked = clock() - began
    shapes, jobs = [one.shape for one in surveys], plan(request.spec, surveys)
    todo = left_over(jobs, shapes, held)
    if not todo:
        return Estimate(len(jobs), len(jobs), 0.0, "Nothing is left to do.")
    wanted = Counter((_kind(job), job.num_tokens or 0) for job in todo)
    times = _calibrated(request, shapes, todo, threads_of(count), clock)
    each_job = {one: seconds_at(times[one[0]], one[1]) for one in wanted}
    total = math.fsum(n * each_job[one] for one, n in wanted.items())
    working = max(total / count, *each_job.values())  # a job is never divided
    loads = len({(job.model, job.weights) for job in todo})
    each = looked / len({model.entry for model in request.spec.models})
    start = looked + loads * each / count + (0.0 if cluster is not None else start_time())
    measured = sorted({n for by_length in times.values() for n in by_length})
    beyond = sorted({n for _, n in wanted} - set(measured))
    words = f"From jobs done just now to see, at {_listed(measured)} tokens"
    if beyond:
        words += f"; {_listed(beyond)} tokens by interpolation or beyond"
    words += f". Of it {start:.0f} s to start and to load."
    return Estimate(len(jobs), len(jobs) - len(todo), start + working, words)


def seconds_at(times: Mapping[int, float], num_tokens: int) -> float:
    """Seconds of a job at a length, from those at others.

    Args:
        times: Seconds by number of tokens, at least one.
        num_tokens: The length.

    Returns:
        The time; a straight line on logarithms between two lengths and beyond the longest.

    >>> seconds_at({10: 1.0}, 20), round(seconds_at({10: 1.0, 40: 4.0}, 20), 9)
    (4.0, 2.0)
    """
    if num_tokens in times:
        return times[num_tokens]
    lengths = sorted(times)
    if num_tokens < lengths[0]:
        return times[lengths[0]]
    above = next((n for n in lengths if n > num_tokens), None)
    if len(lengths) == 1:
        start, slope = lengths[0], _SLOPE
    elif above is None:
        start, slope = lengths[-1], _slope(times, *lengths[-2:])
        slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
    else:
        start = max(n for n in lengths if n < num_tokens)
        slope = _slope(times, start, above)
    return times[start] * (num_tokens / start) ** slope


def _slope(times: Mapping[int, float], below: int, above: int) -> float:
    return math.log(times[above] / times[below]) / math.log(above / below)


def _held(place: Place, request: Request) -> tuple[Request, dict[str, Measurement], Held]:
    """What is asked for with what the folder holds, its rows, and what it knows of models."""
    spec = request.spec.as_dict()
    path = place.of(spec, growing=True)
    if place.replaces or not (path / MANIFEST).exists():
        return request, {}, {}
    run = read_run(path)
    both = check_same(path, run.manifest["spec"] or spec, spec, growing=True)
    rows = {row.id: row for row in run.measurements() if not row.passing}
    return replace(request, spec=spec_of(both)), rows, run.contents(SURVEY)


def _kind(job: Job) -> JobKind:
    return job.model, job.dtype, job.map, job.input, job.sample == 0


def _clock(request: Request, threads: int) -> Callable[[], float]:
    """What tells the time of one thread on a processor, or of the day."""
    alone = threads == 1 and device_of(request.spec.device).type == "cpu"
    return time.process_time if alone else time.perf_counter


def _calibrated(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    threads: int,
    clock: Callable[[], float],
) -> Times:
    """Seconds of one job of each kind, then of longer ones as long as there is time.

    The time of a window's forward pass is shared out among its jobs. What only a process's
    very first job takes is not counted.
    """
    first: dict[tuple[int, JobKind], Job] = {}
    windows = Counter(job.window for job in jobs)
    for job in jobs:
        first.setdefault((job.num_tokens or 0, _kind(job)), job)
    times: Times = {}
    session, before = Session(request.spec, request.sources), torch.get_num_threads()
    torch.set_num_threads(threads)
    began = time.perf_counter()
    kinds = {kind for _, kind in first}
    try:
        for (n, kind), job in sorted(first.items(), key=lambda one: (one[0][0], one[1].model)):
            late = time.perf_counter() - began > _BUDGET
            if late and all(_enough(times.get(one)) for one in kinds):
                break
            if not late or not _enough(times.get(kind)):
                capture, whole = session.seconds(job, shapes[job.model], clock)
                if not times and capture + whole < 1:
                    capture, whole = session.seconds(job, shapes[job.model], clock)
                times.setdefault(kind, {})[n] = whole + capture / windows[job.window]
    finally:
        session.close()
        torch.set_num_threads(before)
    return times


def _enough(times: Mapping[int, float] | None) -> bool:
    """Whether two lengths say how the time grows, or the first took long enough."""
    return times is not None and (len(times) > 1 or max(times.values()) > _LONG)


def _listed(lengths: Sequence[int]) -> str:
    """Lengths in words; many as a range."""
    if len(lengths) > 6:
        return f"{lengths[0]} to {lengths[-1]}"
    *others, last = map(str, lengths)
    return f"{', '.join(others)} and {last}" if others else last
