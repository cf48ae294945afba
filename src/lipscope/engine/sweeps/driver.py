"""The driver of a sweep: the only process that writes to the folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lipscope.engine.checks import argument, whole
from lipscope.engine.plan import Job, Shape, plan, row_ids
from lipscope.engine.progress import Progress, told
from lipscope.engine.runs import folder_of
from lipscope.engine.session import Result
from lipscope.engine.spec import Request, spec_of
from lipscope.engine.survey_cache import surveys_in
from lipscope.engine.sweeps.local import cores, local_results
from lipscope.engine.sweeps.survey import surveys_of
from lipscope.engine.sweeps.written import read_spec
from lipscope.errors import InputError, install
from lipscope.pages import Rows
from lipscope.records import Place, RunFolder, provenance, stable_id


def sweep(
    spec: str | Path | Mapping[str, Any],
    out: str | Path | Place | None = None,
    *,
    workers: int | None = None,
    cluster: str | None = None,
    progress: Progress | None = None,
) -> Rows:
    """Measure every combination of models, layers, maps, lengths, texts, … of a specification.

    Rows reach the folder as they come. The same request on the same folder does what is
    missing, also with more layers, lengths or samples. A job that fails is a row with its error;
    it is tried again only if it failed for want of a worker, memory or disk.

    Args:
        spec: Path of a YAML file, or its entries (`lipscope.engine.spec.Spec` lists them).
        out: Run folder; ``runs/NAME`` after the file if None, or after the entries, numbered
            where that name holds another sweep.
        workers: Processes on this machine; 2 if None, as far as there are cores. Its threads
            are divided among them.
        cluster: Address of a Dask scheduler, such as ``tcp://host:8786``: its workers do
            the jobs, and this process writes.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            in rows.

    Returns:
        The rows in the order of the specification, those of earlier runs included.

    Raises:
        InputError: For every entry that cannot be, a folder that cannot be used, or a disk
            that is full.
    """
    request = read_spec(spec)
    count = number_of_workers(workers, cluster)
    path = place_of(request, out)
    origin = provenance(workers=cluster or f"{count} local")
    with RunFolder(path, request.spec.as_dict(), origin, growing=True) as folder:
        request = replace(request, spec=spec_of(folder.spec))
        surveys = surveys_of(request, surveys_in(folder), folder)
        shapes, jobs = [one.shape for one in surveys], plan(request.spec, surveys)
        ids = [one for job in jobs for one in row_ids(job, shapes[job.model])]
        folder.planned(ids)
        todo = left_over(jobs, shapes, folder.done)
        if todo:
            results = _results(request, shapes, todo, count, cluster)
            _write(request, folder, results, progress, ids)
        return Rows(
            [folder.done[one] for one in ids],
            tokens=folder.tokens() if request.spec.tokens else (),
            windows=request.spec.windows,  # pyright: ignore[reportArgumentType]
            bounds=folder.bounds(),
        )


def number_of_workers(workers: int | None, cluster: str | None) -> int:
    """The number of local processes that is meant."""
    if workers is not None and cluster is not None:
        raise InputError("`workers` and `cluster` exclude each other. Found both.")
    if workers is None:
        return min(2, cores())
    return argument(whole(1, 1024), "workers", workers)


def place_of(request: Request, out: str | Path | Place | None) -> Place:
    """Where a sweep goes: the same place for the same request, so that it goes on."""
    if out is not None:
        return folder_of(out)
    name = request.name or f"sweep-{stable_id(request.spec.as_dict())}"
    return Place(None, name, dated=False)


def left_over(jobs: Sequence[Job], shapes: Sequence[Shape], done: Mapping[str, Any]) -> list[Job]:
    """The jobs that lack a row."""
    return [job for job in jobs if not all(one in done for one in row_ids(job, shapes[job.model]))]


def _results(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    workers: int,
    cluster: str | None,
) -> Iterator[list[Result]]:
    if cluster is None:
        return local_results(request, shapes, jobs, workers)
    if importlib.util.find_spec("distributed") is None:
        raise InputError(
            f"`--cluster` needs the extra `cluster`; run `{install('cluster')}` in the folder of "
            "lipscope."
        )
    from lipscope.engine.sweeps.cluster import cluster_results

    return cluster_results(request, shapes, jobs, cluster)


def _write(
    request: Request,
    folder: RunFolder,
    results: Iterator[list[Result]],
    progress: Progress | None,
    ids: Sequence[str],
) -> None:
    tell, total = told(progress), len(ids)
    done = sum(one in folder.done for one in ids)
    tell(done, total, None)
    for some in results:
        for one in some:
            if one.about:
                folder.add_model(request.spec.models[one.model].name, one.about)
        new = [each for one in some for each in one.finished if each.row.id not in folder.done]
        folder.extend(new)
        done += len(new)
        tell(done, total, some[-1].finished[-1].row)
