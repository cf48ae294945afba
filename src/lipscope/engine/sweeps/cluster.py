"""Sweeps on a running Dask cluster: its workers do the jobs, this process writes the rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any
from uuid import uuid4

from distributed import Client, Future, KilledWorker, Worker, WorkerPlugin, get_worker, wait

from lipscope.engine.plan import Job, Shape
from lipscope.engine.session import Result, failed
from lipscope.engine.spec import Request, spec_of
from lipscope.engine.sweeps.pool import (
    Batches,
    Decisions,
    Radii,
    decoded_jobs,
    decoded_result,
    encoded_jobs,
    encoded_result,
)
from lipscope.errors import InputError, remark
from lipscope.records import AGAIN

_CONNECT = "20s"
_MOMENT = 1.0  # polling interval, in seconds
_TELL = 30.0  # seconds between remarks that there are no workers
_AHEAD = 2  # number of batches submitted per worker at a time


class Sessions(WorkerPlugin):
    """A session in every worker process, including those that join later."""

    def __init__(self, spec: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self.spec, self.sources = spec, sources

    def setup(self, worker: Worker) -> None:
        """Called by Dask in a worker."""
        import torch

        torch.set_num_threads(worker.state.nthreads)
        self.session = Decisions(spec_of(self.spec), self.sources)
        # Measuring modifies the model: one job at a time, with all threads.
        self.lock = threading.Lock()

    def teardown(self, worker: Worker) -> None:
        """Called by Dask when the sweep has ended."""
        del worker
        with self.lock:
            self.session.close()


def cluster_results(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    address: str,
    held: Mapping[str, Radii],
) -> Iterator[list[Result]]:
    """Run jobs on the cluster with this scheduler address; yield results as they come.

    Dask reassigns the jobs of a worker that dies. Jobs that repeatedly kill workers are tried one
    by one, and then fail. Radii ``held`` of the jobs, by id, are not computed again; new ones are
    added.
    """
    name = f"lipscope-{uuid4().hex}"
    with _connected(address) as client:
        try:
            client.register_plugin(Sessions(request.spec.as_dict(), request.sources), name=name)
            workers = max(1, len(client.nthreads()))
            batches = Batches(jobs, workers)
            yield from _Running(request, shapes, batches, client, name, held).results()
            client.unregister_worker_plugin(name)
        except (CancelledError, OSError, TimeoutError) as problem:
            raise InputError(
                f"The cluster at `{address}` went away ({type(problem).__name__}). Finished rows "
                "are kept; the same command continues from there."
            ) from problem
        except ImportError as problem:
            raise InputError(
                f"The workers at `{address}` should have lipscope. Found: {problem}."
            ) from problem


class _Running:
    """Jobs running on the cluster, and jobs waiting."""

    def __init__(
        self,
        request: Request,
        shapes: Sequence[Shape],
        batches: Batches,
        client: Any,  # its methods have the types of their async versions
        name: str,
        held: Mapping[str, Radii],
    ) -> None:
        self.spec, self.shapes, self.batches = request.spec, shapes, batches
        self.client, self.name, self.held = client, name, held
        # Batches to be submitted again, and the worker that has what they need.
        self.again: list[tuple[list[Job], str | None]] = []
        # Radii are answered one by one, each in turn with its driver: none from another row between
        self.ahead = 1 if request.spec.decisions else _AHEAD
        self.running: dict[Future, list[Job]] = {}

    def results(self) -> Iterator[list[Result]]:
        """Yield results until nothing is left."""
        while True:
            self._submit()
            if not self.running:
                return
            for future in self._ended():
                results = self._of(future, self.running.pop(future))
                if results:
                    yield results

    def _ended(self) -> list[Future]:
        """Futures that have finished; reports from time to time that there are no workers."""
        waited = 0.0
        while True:
            try:
                ended: Any = wait([*self.running], timeout=_MOMENT, return_when="FIRST_COMPLETED")
                return [*ended.done]
            except TimeoutError:
                waited = 0.0 if self.client.nthreads() else waited + _MOMENT
            if waited and waited % _TELL == _MOMENT * 5:
                remark(f"Waiting for workers at {self.client.scheduler.address}: there are none.")

    def _submit(self) -> None:
        room = self.ahead * max(1, len(self.client.nthreads()))
        while len(self.running) < room:
            jobs, worker = self.again.pop() if self.again else (self.batches.take(None, ()), None)
            if not jobs:
                return
            line = encoded_jobs(jobs, self.shapes[jobs[0].model], self.held)
            how: Any = {"pure": False, "workers": worker, "allow_other_workers": worker is not None}
            self.running[self.client.submit(_answers, self.name, line, **how)] = jobs

    def _of(self, future: Future, jobs: list[Job]) -> list[Result]:
        """The results of a batch; if it killed its workers, its jobs are tried one by one."""
        try:
            worker, lines = future.result()
        except KilledWorker as problem:
            if len(jobs) > 1:
                self.again += [([job], None) for job in jobs]
                return []
            error = (
                f"It killed {problem.allowed_failures + 1} workers, perhaps out of memory; {AGAIN}"
            )
            (job,) = jobs
            return [failed(self.spec, job, self.shapes[job.model], error)]
        results = [decoded_result(line) for line in lines]
        if results[-1].radius is not None:
            self.held[results[-1].job].update([results[-1].radius])
            self.again.append((jobs[len(results) - 1 :], worker))
        return results


def _answers(name: str, line: str) -> tuple[str, list[str]]:
    """Answer jobs in a worker, up to the next radius; returns the worker and the answers.

    So a radius is at the driver before the next is computed. Dask repeats what a dead worker had
    begun as it was submitted, without what came of it.
    """
    worker = get_worker()
    here = worker.plugins[name]
    assert isinstance(here, Sessions)
    (jobs, shape), lines = decoded_jobs(line), list[str]()
    with here.lock:
        for job, held in jobs:
            for one in here.session.results(job, shape, held):
                lines.append(encoded_result(one))
                if one.radius is not None:
                    return worker.address, lines
    return worker.address, lines


def _connected(address: str) -> Any:
    try:
        return Client(address, timeout=_CONNECT)
    except (OSError, TimeoutError, ValueError) as problem:
        raise InputError(
            f"`cluster` should be the address of a running Dask scheduler, such as "
            f"tcp://host:8786. Found `{address}`: {problem or 'no answer'}."
        ) from None
