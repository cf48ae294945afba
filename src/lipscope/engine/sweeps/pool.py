"""Worker processes on this machine, both ends: each holds one model and does one job at a time.

A worker is spoken to through its standard streams, one JSON object a line and no pickles. The first
line of its input holds the specification and the texts, every further one some jobs. It says that
it begins a job, answers it, and meanwhile that it lives. It ends when its input does.
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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, TextIO

from lipscope.engine.answer import explained
from lipscope.engine.checks import FREE
from lipscope.engine.model_decision import decision_at, missing_radius, radius_key
from lipscope.engine.plan import Job, Shape
from lipscope.engine.session import Result, Session, failed
from lipscope.engine.spec import Request, spec_of
from lipscope.errors import InputError, remark
from lipscope.records import AGAIN, Bound, Finished, Measurement, TokenShare

# Not `-m`: that would import this module twice.
COMMAND = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
TRIES = 3  # a job whose worker dies so often has failed
SILENCE = 90.0
"""Seconds after which a worker that says nothing is replaced."""
ALIVE, BEAT = '"alive"', 2.0
"""What a worker says between its answers, and every how many seconds."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MOMENT = 0.5  # seconds between looks at what else happens
_UNBORN = 5  # deaths of each worker before it begins a job, in a row
_LARGEST = 64  # jobs of a portion: what a lost message costs at most
_SHARES = 4  # portions for each worker, so that none is left alone with the last of them
_Told = queue.SimpleQueue[tuple["_Worker", bytes | None]]


def local_results(
    request: Request, shapes: Sequence[Shape], jobs: Sequence[Job], workers: int
) -> Iterator[list[Result]]:
    """Do jobs in worker processes; results as they come, those that are there at once together.

    A worker that dies, or is silent for long, gives its jobs back; the job that it had begun is
    tried three times.
    """
    pool = _Pool(request, shapes, Batches(jobs, workers), workers)
    left = len(jobs)
    try:
        for _ in range(pool.count):
            pool.start_one()
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


# --- what is still to be given out


class Batches:
    """The jobs that are still to be done, in the portions that so many workers take.

    Those of one model and one window are together.
    """

    def __init__(self, jobs: Sequence[Job], workers: int) -> None:
        self._waiting: dict[int, deque[list[Job]]] = {}
        for model, some in groupby(jobs, lambda job: job.model):
            self._waiting.setdefault(model, deque()).extend(_portions(list(some), workers))
        self._tries: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, model: int | None, busy: Collection[int | None]) -> list[Job]:
        """The next portion for a worker; empty if nothing is left.

        Jobs of the model that it holds come first, then those of a model that nobody is busy with.
        """
        left = {m: len(portions) for m, portions in self._waiting.items() if portions}
        if not left:
            return []
        if model not in left:
            free = [m for m in left if m not in busy]
            model = free[0] if free else max(left, key=lambda m: left[m])
        return self._waiting[model].popleft()

    def give_back(self, jobs: Sequence[Job], *, begun: bool = True) -> Job | None:
        """Take back the jobs of a worker that died on the first of them.

        One that it had not begun says nothing of that job. The first job is returned if it was
        tried often enough: then it is not done again.
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


# --- the driver's end


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
        threads, spec = threads_of(count), request.spec
        if spec.memory == FREE:
            spec = replace(spec, memory=f"{FREE}/{self.count}")
        self.start_line = json.dumps(
            {"spec": spec.as_dict(), "sources": dict(request.sources), "threads": threads}
        )
        self.environment = _environment(threads)
        self.workers: list[_Worker] = []
        self.unborn = 0  # deaths in a row before a job was begun
        self.told: _Told = queue.SimpleQueue()

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
                results += self._died(worker) if line is None else self._heard(worker, line)
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

    def _heard(self, worker: _Worker, line: bytes) -> list[Result]:
        if line.strip() == ALIVE.encode():
            return []
        said = json.loads(line)
        if isinstance(said, dict):
            worker.begun, self.unborn = said["begun"], 0
            return []
        result, job = decoded_result(line), worker.jobs.popleft()
        assert job.id == result.job
        worker.answered = True
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
        threading.Thread(target=_pass_on, args=(worker, self.told), daemon=True).start()
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
    return f"was killed by {name}" + ", perhaps for want of memory" * (status == -9)


def _pass_on(worker: _Worker, told: _Told) -> None:
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


# --- what is said, line by line


def encoded_result(result: Result) -> str:
    """A result as one line."""
    finished = [
        (one.row.to_dict(), [*map(vars, one.tokens)], [*map(vars, one.bounds)], one.radii)
        for one in result.finished
    ]
    return json.dumps([*result[:3], finished], ensure_ascii=True)


def decoded_result(line: str | bytes) -> Result:
    """The result of a line."""
    job, model, about, finished = json.loads(line)
    rows = [
        Finished(
            Measurement(**row),
            tuple(TokenShare(**one) for one in tokens),
            tuple(Bound(**one) for one in bounds),
            radii=tuple((key, content) for key, content in radii),
        )
        for row, tokens, bounds, radii in finished
    ]
    return Result(job, model, about, rows)


def encoded_jobs(jobs: Sequence[Job], shape: Shape) -> str:
    """Jobs of one window as one line."""
    return json.dumps([jobs, shape])


def decoded_jobs(line: str | bytes) -> tuple[list[Job], Shape]:
    """The jobs of a line, and the shape of their model."""
    jobs, (layers, heads) = json.loads(line)
    return [Job(*one) for one in jobs], Shape(layers, None if heads is None else tuple(heads))


# --- the worker's end


class Decisions(Session):
    """A session whose rows have the certificates of their decisions, where a sweep asks for them.

    A decision that cannot be certified says why in its bound; the row stands.
    """

    def result(self, job: Job, shape: Shape) -> Result:
        """The result of a job."""
        found = super().result(job, shape)
        if not self.spec.decisions:
            return found
        return found._replace(finished=[self._decided(job, one) for one in found.finished])

    def _decided(self, job: Job, one: Finished) -> Finished:
        if one.row.sigma is None:
            return one
        bounds, radii, decision = [], [], None
        for ball in self.spec.decisions:
            try:
                if decision is None:
                    at = self.at(job)
                    special = self.spec.special_tokens
                    decision = decision_at(at.model, at.item, special_tokens=special)
                groups = decision.groups(ball, None)
                found = [replace(decision.certified(ball, g), id=one.row.id) for g in groups]
                keys = [radius_key(one.row.id, ball, group) for group in groups]
            except Exception as problem:  # as of a row: the others go on
                bounds.append(missing_radius(one.row.id, ball, explained(problem)))
                continue
            bounds += [each.as_bound() for each in found]
            radii += [(key, asdict(each)) for key, each in zip(keys, found, strict=True)]
        return one._replace(bounds=(*one.bounds, *bounds), radii=tuple(radii))


def serve() -> None:
    """Answer jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_take_lines, args=(lines,), daemon=True).start()
    say = _Voice(answers)
    threading.Thread(target=say.that_it_lives, daemon=True).start()
    _work(json.loads(lines.get()), lines, say)


def _take_lines(lines: queue.SimpleQueue[bytes]) -> None:
    """Take lines as they come; end at once when the driver is gone, even in mid-job."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


class _Voice:
    """The stream of answers, in which two threads take turns line by line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.turn = stream, threading.Lock()

    def __call__(self, line: str) -> None:
        with self.turn:
            self.stream.write(line + "\n")
            self.stream.flush()

    def that_it_lives(self) -> None:
        """Say so again and again: a process that is stopped, or stuck in a call, is silent."""
        while True:
            self(ALIVE)
            time.sleep(BEAT)


def _work(start: dict[str, Any], lines: queue.SimpleQueue[bytes], say: _Voice) -> None:
    import torch

    torch.set_num_threads(start["threads"])
    session = Decisions(spec_of(start["spec"]), start["sources"])
    while True:
        jobs, shape = decoded_jobs(lines.get())
        for job in jobs:
            say(json.dumps({"begun": job.id}))
            say(encoded_result(session.result(job, shape)))
