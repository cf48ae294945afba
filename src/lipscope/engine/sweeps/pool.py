"""Local worker processes, both ends: each holds one model and does one job at a time.

A worker communicates by its standard streams, one JSON object per line, without pickles. The first
line of its input holds the specification and the texts, each further one a batch of jobs. It
reports the start of each job, its radii one by one, and its rows, and sends heartbeats. It ends
when its input does.
"""

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
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, TextIO

from lipscope.certificates import DecisionBall
from lipscope.engine.answer import explained
from lipscope.engine.checks import FREE
from lipscope.engine.model_decision import (
    DecisionCertificate,
    ModelDecision,
    decision_at,
    missing_radius,
)
from lipscope.engine.plan import Job, Shape
from lipscope.engine.session import Result, Session, failed, keep_last
from lipscope.engine.spec import Request, Spec, spec_of
from lipscope.errors import InputError, remark
from lipscope.records import AGAIN, Bound, Finished, Measurement, TokenShare

# Not `-m`: that would import this module twice.
COMMAND = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
TRIES = 3  # a job fails after this many deaths of its worker
SILENCE = 90.0
"""Seconds after which a silent worker is replaced."""
ALIVE, BEAT = '"alive"', 2.0
"""Heartbeat of a worker, and its interval in seconds."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MOMENT = 0.5  # polling interval, in seconds
_UNBORN = 5  # maximum number of consecutive deaths per worker before a job starts
_LARGEST = 64  # maximum number of jobs in a batch: the cost of a lost message
_SHARES = 4  # number of batches per worker, so that none works alone at the end for long
_Messages = queue.SimpleQueue[tuple["_Worker", bytes | None]]
Radii = dict[str, dict[str, Any]]
"""Certified decisions of a job, by key."""


def local_results(
    request: Request,
    shapes: Sequence[Shape],
    jobs: Sequence[Job],
    workers: int,
    held: Mapping[str, Radii],
) -> Iterator[list[Result]]:
    """Run jobs in worker processes; yield results as they come, grouped by arrival.

    The jobs of a worker that dies, or is silent for long, are reassigned; the job that it had
    started is tried three times. Radii ``held`` of the jobs, by id, are not computed again; new
    ones are added.
    """
    pool = _Pool(request, shapes, Batches(jobs, workers), workers, held)
    left = len(jobs)
    try:
        for _ in range(pool.count):
            pool.start_one()
        while left:
            results = pool.wait()
            left -= sum(one.radius is None for one in results)
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
    """Number of threads per worker."""
    return max(1, cores() // workers)


def start_time() -> float:
    """Processor seconds that a worker takes to start, measured with one without jobs."""
    before, began = os.times(), time.perf_counter()
    with contextlib.suppress(OSError):
        nothing = subprocess.DEVNULL
        subprocess.run(COMMAND, stdin=nothing, stdout=nothing, env=_environment(1), check=False)
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return used or time.perf_counter() - began  # unavailable on some systems


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, sys.path))
    return os.environ | {"PYTHONPATH": path} | dict.fromkeys(_THREADS, str(threads))


# --- batches of jobs


class Batches:
    """The remaining jobs, in batches for a number of workers.

    The jobs of a batch share model and window.
    """

    def __init__(self, jobs: Sequence[Job], workers: int) -> None:
        self._waiting: dict[int, deque[list[Job]]] = {}
        for model, some in groupby(jobs, lambda job: job.model):
            self._waiting.setdefault(model, deque()).extend(_portions(list(some), workers))
        self._tries: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, model: int | None, busy: Collection[int | None]) -> list[Job]:
        """The next batch for a worker; empty if nothing is left.

        Jobs of the worker's loaded model come first, then those of a model that no worker has.
        """
        left = {m: len(portions) for m, portions in self._waiting.items() if portions}
        if not left:
            return []
        if model not in left:
            free = [m for m in left if m not in busy]
            model = free[0] if free else max(left, key=lambda m: left[m])
        return self._waiting[model].popleft()

    def goes_on(self, job: Job) -> None:
        """Forget the deaths of workers during a job whose next radius is known."""
        del self._tries[job.id]

    def give_back(self, jobs: Sequence[Job], *, begun: bool = True) -> Job | None:
        """Take back the jobs of a worker that died during the first of them.

        Unless it had ``begun`` that job, the death is not counted as a try. The first job is
        returned, and not repeated, if it reached the maximum number of tries.
        """
        first, *rest = jobs
        self._tries[first.id] += begun
        lost = first if begun and self._tries[first.id] >= TRIES else None
        again = rest if lost else [first, *rest]
        if again:
            self._waiting[first.model].appendleft(again)
        return lost


def _portions(jobs: list[Job], workers: int) -> Iterator[list[Job]]:
    size = min(_LARGEST, max(1, len(jobs) // (_SHARES * workers)))
    for _, some in groupby(jobs, lambda job: job.window):
        window = list(some)
        for start in range(0, len(window), size):
            yield window[start : start + size]


# --- driver side


class _Worker:
    """A process, its loaded model and its assigned jobs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.model: int | None = None
        self.jobs: deque[Job] = deque()
        self.begun: str | None = None
        self.answered = False
        self.silent = 0.0  # seconds

    def send(self, text: str) -> None:
        """Write a line; errors are ignored, as a dead process is noticed on reading."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()


class _Pool:
    """Workers and their messages."""

    def __init__(
        self,
        request: Request,
        shapes: Sequence[Shape],
        batches: Batches,
        count: int,
        held: Mapping[str, Radii],
    ) -> None:
        self.spec, self.shapes, self.batches, self.held = request.spec, shapes, batches, held
        self.count = min(count, len(batches))
        threads, spec = threads_of(count), request.spec
        if spec.memory == FREE:
            spec = replace(spec, memory=f"{FREE}/{self.count}")
        self.start_line = json.dumps(
            {"spec": spec.as_dict(), "sources": dict(request.sources), "threads": threads}
        )
        self.environment = _environment(threads)
        self.workers: list[_Worker] = []
        self.unborn = 0  # consecutive deaths before a job started
        self.messages: _Messages = queue.SimpleQueue()

    def stop(self) -> None:
        """End all processes at once."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            _closed(worker.process)

    def wait(self) -> list[Result]:
        """Wait for results, and return all that are available.

        Waits in short intervals, so that interrupts are noticed and silent workers are replaced.
        Time during which this process was suspended does not count.
        """
        results: list[Result] = []
        while True:
            began = time.monotonic()
            with contextlib.suppress(queue.Empty):
                worker, line = self.messages.get(timeout=_MOMENT)
                worker.silent = 0.0
                results += self._died(worker) if line is None else self._heard(worker, line)
            self._look_for_silent(min(time.monotonic() - began, 2 * _MOMENT))
            if self.messages.empty() and results:
                return results

    def _look_for_silent(self, passed: float) -> None:
        for worker in self.workers:
            worker.silent += passed
            if worker.silent > SILENCE:
                worker.silent = 0.0
                remark(f"A worker was silent for {SILENCE:.0f} s and is replaced.")
                worker.process.kill()

    def _heard(self, worker: _Worker, line: bytes) -> list[Result]:
        if line.strip() == ALIVE.encode():
            return []
        message = json.loads(line)
        if isinstance(message, dict):
            worker.begun, self.unborn = message["begun"], 0
            return []
        result, job = decoded_result(line), worker.jobs[0]
        assert job.id == result.job
        worker.answered = True
        if result.radius is not None:
            self.held[job.id].update([result.radius])
            self.batches.goes_on(job)
            return [result]
        worker.jobs.popleft()
        if not worker.jobs:
            self._give(worker)
        return [result]

    def start_one(self) -> None:
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
        threading.Thread(target=_pass_on, args=(worker, self.messages), daemon=True).start()
        worker.send(self.start_line)
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        """Give a worker its next jobs, if there are any."""
        others = [one.model for one in self.workers if one is not worker and one.jobs]
        jobs = self.batches.take(worker.model, others)
        if jobs:
            worker.model = jobs[0].model
            worker.jobs.extend(jobs)
            worker.send(encoded_jobs(jobs, self.shapes[worker.model], self.held))

    def _died(self, worker: _Worker) -> list[Result]:
        status = _closed(worker.process)
        self.workers.remove(worker)
        if status > 0 and not worker.answered:
            raise InputError(
                f"A worker process ended with status {status} before its first answer; its output "
                "is above."
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
            self.start_one()
        return [] if lost is None else [self._lost(lost, status)]

    def _lost(self, job: Job, status: int) -> Result:
        error = f"The worker process {_how(status)}, {TRIES} times in a row; {AGAIN}"
        return failed(self.spec, job, self.shapes[job.model], error)


def _how(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else -status
    return f"was killed by {name}" + ", perhaps out of memory" * (status == -9)


def _pass_on(worker: _Worker, messages: _Messages) -> None:
    """Forward the lines of a worker, and finally None; incomplete lines are dropped."""
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        if line.endswith(b"\n"):
            messages.put((worker, line))
    messages.put((worker, None))


def _closed(process: subprocess.Popen[Any]) -> int:
    status = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()
    return status


# --- messages, one per line


def encoded_result(result: Result) -> str:
    """A result as one line."""
    finished = [
        (one.row.to_dict(), [*map(vars, one.tokens)], [*map(vars, one.bounds)])
        for one in result.finished
    ]
    return json.dumps([*result[:3], finished, result.radius], ensure_ascii=True)


def decoded_result(line: str | bytes) -> Result:
    """The result from a line."""
    job, model, about, finished, radius = json.loads(line)
    rows = [
        Finished(
            Measurement(**row),
            tuple(TokenShare(**one) for one in tokens),
            tuple(Bound(**one) for one in bounds),
        )
        for row, tokens, bounds in finished
    ]
    return Result(job, model, about, rows, radius)


def encoded_jobs(jobs: Sequence[Job], shape: Shape, held: Mapping[str, Radii]) -> str:
    """Jobs of one window as one line, with their radii that are known."""
    return json.dumps([jobs, shape, [held[job.id] for job in jobs]])


def decoded_jobs(line: str | bytes) -> tuple[list[tuple[Job, Radii]], Shape]:
    """The jobs from a line, each with its radii that are known, and the shape of their model."""
    jobs, (layers, heads), held = json.loads(line)
    shape = Shape(layers, None if heads is None else tuple(heads))
    return [(Job(*job), radii) for job, radii in zip(jobs, held, strict=True)], shape


# --- worker side


class Decisions(Session):
    """A session that adds certificates of decisions to its rows, if a sweep requests them.

    If a decision cannot be certified, its bound states the reason; the row remains.
    """

    def __init__(self, spec: Spec, sources: Mapping[str, Any]) -> None:
        super().__init__(spec, sources)
        self._decision: dict[Job, ModelDecision] = {}  # a cache of size one

    def close(self) -> None:
        """Restore the model and release it."""
        super().close()
        self._decision.clear()

    def results(self, job: Job, shape: Shape, held: Radii) -> Iterator[Result]:
        """The radii of a job one by one, except those ``held``, and last its rows."""
        found, rows = self.result(job, shape), list[Finished]()
        for one in found.finished:
            bounds = [*one.bounds]
            for ball in self.spec.decisions if one.row.sigma is not None else ():
                try:
                    for key, each, new in self._certificates(job, one.row.id, ball, held):
                        if new:
                            yield found._replace(finished=[], radius=(key, asdict(each)))
                        bounds.append(each.as_bound())
                except Exception as problem:  # as for a row: the others must go on
                    reason = explained(problem).removesuffix(f"; {AGAIN}")  # the row stays as it is
                    bounds.append(missing_radius(one.row.id, ball, reason))
            rows.append(one._replace(bounds=tuple(bounds)))
        self._decision.clear()
        yield found._replace(finished=rows)

    def _certificates(
        self, job: Job, id: str, ball: DecisionBall, held: Radii
    ) -> Iterator[tuple[str, DecisionCertificate, bool]]:
        def read() -> ModelDecision:
            at, special = self.at(job), self.spec.special_tokens
            return decision_at(at.model, at.item, special_tokens=special)

        decision = keep_last(self._decision, job, read)
        groups = decision.groups(ball, None)
        return decision.certificates(ball, groups, held, {"id": id})


def serve() -> None:
    """Answer jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # separates output of libraries from answers
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_take_lines, args=(lines,), daemon=True).start()
    say = _Voice(answers)
    threading.Thread(target=say.heartbeat, daemon=True).start()
    _work(json.loads(lines.get()), lines, say)


def _take_lines(lines: queue.SimpleQueue[bytes]) -> None:
    """Queue lines as they come; exit at once when the driver is gone, even during a job."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


class _Voice:
    """The stream of answers, shared by two threads line by line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.turn = stream, threading.Lock()

    def __call__(self, line: str) -> None:
        with self.turn:
            self.stream.write(line + "\n")
            self.stream.flush()

    def heartbeat(self) -> None:
        """Send heartbeats forever; a process that is stopped, or stuck in a call, is silent."""
        while True:
            self(ALIVE)
            time.sleep(BEAT)


def _work(start: dict[str, Any], lines: queue.SimpleQueue[bytes], say: _Voice) -> None:
    import torch

    torch.set_num_threads(start["threads"])
    session = Decisions(spec_of(start["spec"]), start["sources"])
    while True:
        jobs, shape = decoded_jobs(lines.get())
        for job, held in jobs:
            say(json.dumps({"begun": job.id}))
            for one in session.results(job, shape, held):
                say(encoded_result(one))
