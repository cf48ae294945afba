"""The driver of a sweep, the only process that writes to its folder, and time estimates."""

from __future__ import annotations

import importlib.util
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipscope import records
from lipscope.engine.checks import argument, whole_number
from lipscope.engine.plan import Job, Shape, Survey, left_over, plan, row_ids
from lipscope.engine.runs import (
    Held,
    Progress,
    as_callback,
    as_voice,
    folder_of,
    survey_key,
    surveyed,
    tell_fewer,
)
from lipscope.engine.session import Result, Session
from lipscope.engine.spec import Request, read_spec, spec_of
from lipscope.engine.sweeps.pool import Radii, cores, local_results, start_time, threads_of
from lipscope.errors import InputError, install
from lipscope.models import device_of
from lipscope.pages import Rows


def sweep(
    spec: str | Path | Mapping[str, Any],
    out: str | Path | records.Place | None = None,
    *,
    workers: int | None = None,
    cluster: str | None = None,
    progress: Progress | None = None,
) -> Rows:
    """Measure every combination of models, layers, maps, lengths, texts, … of a specification.

    Rows are written to the folder as they come. The same request on the same folder computes what
    is missing, also with more layers, lengths or samples. A job that fails gives a row with its
    error; it is retried only if it failed for lack of a worker, memory or disk.

    Args:
        spec: Path of a YAML file, or its entries (`lipscope.engine.spec.Spec` lists them).
        out: Run folder; if None ``runs/NAME``, named after the file or the entries, and numbered
            if that folder holds another sweep.
        workers: Number of processes on this machine, which share its threads; if None 2, or 1 on
            a single core.
        cluster: Address of a Dask scheduler, such as ``tcp://host:8786``: its workers do
            the jobs, and this process writes.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            in rows.

    Returns:
        The rows in the order of the specification, those of earlier runs included.

    Raises:
        InputError: If an entry is invalid, the folder cannot be used, or the disk is full.
    """
    request = read_spec(spec)
    count = number_of_workers(workers, cluster)
    path = place_of(request, out)
    origin = records.provenance(workers=cluster or f"{count} local")
    with records.RunFolder(path, request.spec.as_dict(), origin, growing=True) as folder:
        request = replace(request, spec=spec_of(folder.spec))
        surveys = surveys_of(request, folder.values(records.SURVEY), folder)
        shapes, jobs = [one.shape for one in surveys], plan(request.spec, surveys)
        ids = [one for job in jobs for one in row_ids(job, shapes[job.model])]
        folder.planned(ids)
        todo = left_over(jobs, shapes, folder.done)
        if todo:
            results = _results(request, shapes, todo, count, cluster, _held(folder, todo))
            _write_results(request, folder, results, progress, ids)
        return Rows(
            [folder.done[one] for one in ids],
            tokens=folder.beside(records.TokenShare) if request.spec.tokens else (),
            windows=request.spec.windows,
            bounds=folder.beside(records.Bound),
        )


def number_of_workers(workers: int | None, cluster: str | None) -> int:
    """The number of local processes."""
    if workers is not None and cluster is not None:
        raise InputError("`workers` and `cluster` exclude each other. Found both.")
    if workers is None:
        return min(2, cores())
    return argument(whole_number(1, 1024), "workers", workers)


def place_of(request: Request, out: str | Path | records.Place | None) -> records.Place:
    """The folder of a sweep: the same for the same request, so that it continues."""
    if out is not None:
        return folder_of(out)
    name = Path(request.source.name).stem or f"sweep-{records.stable_id(request.spec.as_dict())}"
    return records.Place(None, name, dated=False)


def _results(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    workers: int,
    cluster: str | None,
    held: Mapping[str, Radii],
) -> Iterator[list[Result]]:
    if cluster is None:
        return local_results(request, shapes, jobs, workers, held)
    if importlib.util.find_spec("distributed") is None:
        raise InputError(
            f"`cluster` needs Dask. Found none; run `{install('cluster')}` in the folder of "
            "lipscope."
        )
    from lipscope.engine.sweeps.cluster import cluster_results

    return cluster_results(request, shapes, jobs, cluster, held)


def _held(folder: records.RunFolder, jobs: Sequence[Job]) -> dict[str, Radii]:
    """The radii in the folder of each job, whose row has the same id."""
    held: dict[str, Radii] = {job.id: {} for job in jobs}
    for key, content in folder.values(records.RADII).items():
        if content["id"] in held:
            held[content["id"]][key] = content
    return held


def _write_results(
    request: Request,
    folder: records.RunFolder,
    results: Iterator[list[Result]],
    progress: Progress | None,
    ids: Sequence[str],
) -> None:
    tell, total, radii = as_callback(progress), len(ids), 0
    done = sum(one in folder.done for one in ids)
    tell(done, total, None)
    for some in results:
        for one in some:
            if one.about:
                folder.add_model(request.spec.models[one.model].name, one.about)
            if one.radius is not None:
                folder.add_value(records.RADII, *one.radius)
                radii += 1
                as_voice(tell)(f"radii: {radii}")
        new = [each for one in some for each in one.finished if each.row.id not in folder.done]
        if new:
            folder.extend(new)
            done += len(new)
            tell(done, total, new[-1].row)


# --- surveys of models before jobs are listed: layers, heads and inputs ---


def surveys_of(
    request: Request, held: Held, folder: records.RunFolder | None = None
) -> list[Survey]:
    """The survey of every model; that of the first checkpoint serves for all of its entry.

    Every map is built once here, so that impossible requests fail before any job starts. Surveys
    in ``held`` are reused; new ones are stored in the folder, if there is one.
    """

    def look(index: int) -> Survey:
        try:
            with Session(request.spec, request.sources) as session:
                return session.survey(index)
        except InputError as problem:
            request.source.place(problem)

    found: dict[int, Survey] = {}
    for index, model in enumerate(request.spec.models):
        if model.entry not in found:
            key = survey_key(request.spec, index, {})
            found[model.entry], _ = surveyed(held, folder, key, lambda i=index: look(i))
    first = next(iter(found.values()))
    tell_fewer(request.spec, first)
    return [found[model.entry] for model in request.spec.models]


# --- the expected time of a sweep, and what it is based on ---

_BUDGET = 10.0  # seconds of calibration
_LONG = 20.0  # seconds; longer jobs are not timed at a second length beyond the budget
_SLOPE = 2.0  # default exponent of the time in the number of tokens
_SLOPES = (1.0, 3.0)  # range of exponents accepted from two noisy times

# Model, floating type, map, input, and whether it is the first of its length, which is checked.
JobKind = tuple[Any, ...]
Times = dict[JobKind, dict[int, float]]  # seconds of a job by number of tokens


class Estimate(NamedTuple):
    """The size and the expected time of a sweep."""

    jobs: int  # all jobs
    done: int  # those whose rows are in the folder
    seconds: float  # expected time for the others, without their decisions
    basis: str  # basis of the time, as a sentence
    decisions: int = 0  # those to be certified, whose time is not known before


def estimate(
    spec: str | Path | Mapping[str, Any],
    out: str | Path | records.Place | None = None,
    *,
    workers: int | None = None,
    cluster: str | None = None,
) -> Estimate:
    """Estimate the number of jobs of a sweep and its time; nothing is written.

    Some jobs of each remaining kind (model, floating type, map, input, first of its length or not)
    are run now, with a worker's threads, at increasing lengths: for about ten seconds, or until
    each has two lengths, or one if that is slow. Other lengths are interpolated on log scales, and
    extrapolated beyond the longest with the slope of the last two, or like n².
    The current times to survey the models, start a worker and load models are added.
    For workers with one thread and no accelerator, all of these are processor times: other load on
    the machine hardly affects them, and the sweep takes longer by the time its workers wait.
    Certificates of decisions are counted, not timed: at one length they differ by the window.

    Arguments and errors are those of `sweep`; on a cluster the estimate is for one worker.
    """
    request = read_spec(spec)
    count = 1 if cluster is not None else number_of_workers(workers, cluster)
    request, held, known = _from_folder(place_of(request, out), request)
    alone = threads_of(count) == 1 and device_of(request.spec.device).type == "cpu"
    clock = time.process_time if alone else time.perf_counter  # processor or wall-clock time
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
    working = max(total / count, *each_job.values())  # jobs are not divided
    loads = len({(job.model, job.weights) for job in todo})
    each = looked / len({model.entry for model in request.spec.models})
    start = looked + loads * each / count + (0.0 if cluster is not None else start_time())
    measured = sorted({n for by_length in times.values() for n in by_length})
    beyond = sorted({n for _, n in wanted} - set(measured))
    words = f"From jobs timed just now, at {_lengths_in_words(measured)} tokens"
    if beyond:
        words += f"; {_lengths_in_words(beyond)} tokens by interpolation or extrapolation"
    words += f". It includes {start:.0f} s to start and to load."
    decisions = len(todo) * len(request.spec.decisions)
    return Estimate(len(jobs), len(jobs) - len(todo), start + working, words, decisions)


def seconds_at(times: Mapping[int, float], num_tokens: int) -> float:
    """Seconds of a job at a length, from the times at other lengths.

    Linear on log scales between two lengths and beyond the longest.

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
        start, slope = lengths[-1], _growth_rate(times, *lengths[-2:])
        slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
    else:
        start = max(n for n in lengths if n < num_tokens)
        slope = _growth_rate(times, start, above)
    return times[start] * (num_tokens / start) ** slope


def _growth_rate(times: Mapping[int, float], below: int, above: int) -> float:
    return math.log(times[above] / times[below]) / math.log(above / below)


def _from_folder(
    place: records.Place, request: Request
) -> tuple[Request, dict[str, records.Measurement], Held]:
    """The request merged with that of the folder, the folder's rows, and its surveys."""
    spec = request.spec.as_dict()
    path = place.of(spec, growing=True)
    if place.replaces or not (path / records.MANIFEST).exists():
        return request, {}, {}
    run = records.read_run(path)
    both = records.check_same(path, run.manifest["spec"] or spec, spec, growing=True)
    rows = {row.id: row for row in run.measurements() if not row.passing}
    return replace(request, spec=spec_of(both)), rows, run.contents(records.SURVEY)


def _kind(job: Job) -> JobKind:
    return job.model, job.dtype, job.map, job.input, job.sample == 0


def _calibrated(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    threads: int,
    clock: Callable[[], float],
) -> Times:
    """Seconds of one job of each kind, then of longer ones while there is time.

    The time of a window's forward pass is divided among its jobs. The overhead of a process's
    first job is not counted.
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
    """Whether two lengths determine the growth of the time, or the first took long enough."""
    return times is not None and (len(times) > 1 or max(times.values()) > _LONG)


def _lengths_in_words(lengths: Sequence[int]) -> str:
    """Lengths in words; many as a range."""
    if len(lengths) > 6:
        return f"{lengths[0]} to {lengths[-1]}"
    *others, last = map(str, lengths)
    return f"{', '.join(others)} and {last}" if others else last
