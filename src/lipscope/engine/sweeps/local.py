"""Worker processes on this machine: each holds one model and does one job at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from lipscope.engine.plan import Job, Shape
from lipscope.engine.rows import failed_rows
from lipscope.engine.session import Result
from lipscope.engine.spec import Request
from lipscope.engine.sweeps.batches import TRIES, Batches
from lipscope.engine.sweeps.wire import ALIVE, decoded, encoded_jobs, has_begun
from lipscope.errors import InputError, remark
from lipscope.records import AGAIN, Finished

COMMAND = [sys.executable, "-m", "lipscope.engine.sweeps.worker"]
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MOMENT = 0.5  # seconds between looks at what else happens
_UNBORN = 5  # deaths of each worker before it begins a job, in a row
SILENCE = 90.0
"""Seconds after which a worker that says nothing is replaced."""
_Told = queue.SimpleQueue[tuple["_Worker", bytes | None]]


def local_results(
    request: Request, shapes: Sequence[Shape], jobs: Sequence[Job], workers: int
) -> Iterator[list[Result]]:
    """Do jobs in worker processes.

    A worker that dies, or is silent for long, gives its jobs back; the job that it had begun is
    tried three times.

    Args:
        request: The specification and its texts.
        shapes: Those of the models.
        jobs: What is to be done.
        workers: Number of processes.

    Yields:
        Results as they come, those that are there at once together.

    Raises:
        InputError: If processes cannot be started.
    """
    pool = _Pool(request, shapes, Batches(jobs, workers), workers)
    left = len(jobs)
    try:
        pool.start()
        while left:
            results = pool.wait()
            left -= len(results)
            if results:
                yield results
    finally:
        pool.stop()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(workers: int) -> int:
    """Threads of each of so many workers."""
    return max(1, cores() // workers)


def start_time() -> float:
    """Processor seconds that a worker takes to start: one with nothing to do ends when it has."""
    before, began = os.times(), time.perf_counter()
    with contextlib.suppress(OSError):
        nothing = subprocess.DEVNULL
        subprocess.run(COMMAND, stdin=nothing, stdout=nothing, env=_environment(1), check=False)
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return used or time.perf_counter() - began  # not every system says so


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, sys.path))
    return os.environ | {"PYTHONPATH": path} | dict.fromkeys(_THREADS, str(threads))


class _Worker:
    """A process, the model that it holds and the jobs that it was given."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.model: int | None = None
        self.jobs: deque[Job] = deque()
        self.begun: str | None = None
        self.answered = False
        self.silent = 0.0  # seconds

    def send(self, text: str) -> None:
        """Write a line; a process that is dead says so at the other end."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()


class _Pool:
    """Workers, and what they say."""

    def __init__(
        self, request: Request, shapes: Sequence[Shape], batches: Batches, count: int
    ) -> None:
        self.spec, self.shapes, self.batches = request.spec, shapes, batches
        self.count = min(count, len(batches))
        threads = threads_of(count)
        self.start_line = json.dumps(
            {"spec": request.spec.as_dict(), "sources": dict(request.sources), "threads": threads}
        )
        self.environment = _environment(threads)
        self.workers: list[_Worker] = []
        self.unborn = 0  # deaths in a row before a job was begun
        self.told: _Told = queue.SimpleQueue()

    def start(self) -> None:
        """Start the processes."""
        for _ in range(self.count):
            self._start_one()

    def stop(self) -> None:
        """End all processes at once."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            _closed(worker.process)

    def wait(self) -> list[Result]:
        """Wait for something to be told; what is told at once is taken together.

        Never longer than a moment at a time, so that an interrupt is heard, and a worker that
        says nothing any more is replaced. Time in which this process stood still does not count.
        """
        results: list[Result] = []
        while True:
            began = time.monotonic()
            with contextlib.suppress(queue.Empty):
                worker, line = self.told.get(timeout=_MOMENT)
                worker.silent = 0.0
                results += self._died(worker) if line is None else self._said(worker, line)
            self._look_for_silent(min(time.monotonic() - began, 2 * _MOMENT))
            if self.told.empty() and results:
                return results

    def _look_for_silent(self, passed: float) -> None:
        for worker in self.workers:
            worker.silent += passed
            if worker.silent > SILENCE:
                worker.silent = 0.0
                remark(f"A worker has said nothing for {SILENCE:.0f} s and is replaced.")
                worker.process.kill()

    def _said(self, worker: _Worker, line: bytes) -> list[Result]:
        if line.strip() == ALIVE.encode():
            return []
        job = has_begun(line)
        if job is None:
            return [self._answered(worker, line)]
        worker.begun, self.unborn = job, 0
        return []

    def _start_one(self) -> None:
        try:
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is for the driver
            )
        except OSError as problem:
            raise InputError(f"A worker process could not start: {problem}.") from None
        worker = _Worker(process)
        self.workers.append(worker)
        threading.Thread(target=_listen, args=(worker, self.told), daemon=True).start()
        worker.send(self.start_line)
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        """Give a worker its next jobs, if there are any."""
        others = [one.model for one in self.workers if one is not worker and one.jobs]
        jobs = self.batches.take(worker.model, others)
        if jobs:
            worker.model = jobs[0].model
            worker.jobs.extend(jobs)
            worker.send(encoded_jobs(jobs, self.shapes[worker.model]))

    def _answered(self, worker: _Worker, line: bytes) -> Result:
        result = decoded(line)
        job = worker.jobs.popleft()
        assert job.id == result.job
        worker.answered = True
        if not worker.jobs:
            self._give(worker)
        return result

    def _died(self, worker: _Worker) -> list[Result]:
        status = _closed(worker.process)
        self.workers.remove(worker)
        if status > 0 and not worker.answered:
            raise InputError(
                f"A worker process ended with status {status} before its first answer; its own "
                "words are above."
            )
        begun = bool(worker.jobs) and worker.begun == worker.jobs[0].id
        self.unborn += not begun
        if self.unborn > _UNBORN * self.count:
            raise InputError(
                f"Workers end before they begin a job, {self.unborn} of them in a row; the last "
                f"{_how(status)}. Finished rows are kept; use fewer `workers`."
            )
        lost = self.batches.give_back(worker.jobs, begun=begun) if worker.jobs else None
        if len(self.batches):
            self._start_one()
        return [] if lost is None else [self._lost(lost, status)]

    def _lost(self, job: Job, status: int) -> Result:
        error = f"The worker process {_how(status)}, {TRIES} times in a row; {AGAIN}"
        rows = failed_rows(self.spec, job, self.shapes[job.model], error, {})
        return Result(job.id, job.model, {}, [Finished(row) for row in rows])


def _how(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else -status
    return f"was killed by {name}" + ", perhaps for want of memory" * (status == -9)


def _listen(worker: _Worker, told: _Told) -> None:
    """Pass on what a worker says, and at last that it is gone; half a line says nothing."""
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        if line.endswith(b"\n"):
            told.put((worker, line))
    told.put((worker, None))


def _closed(process: subprocess.Popen[Any]) -> int:
    status = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()
    return status
