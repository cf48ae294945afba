"""Solving ahead: sigma of the next layers, one thread each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from threading import Event
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from lipscope.engine.answer import Question, Solve
from lipscope.engine.plan import Job
from lipscope.engine.ready_model import ModelAtInput
from lipscope.engine.spec import REAL, Spec
from lipscope.errors import InputError
from lipscope.linalg import SPECTRAL, USUAL_STEPS, Watch, one_thread

_MOST_WORKERS = 4
_WAITING = 2  # solves beyond one per thread, so that none is idle while a row is made
# Maximum number of input entries: products of larger inputs use all processors.
_FEW = 2**16


class _OverError(BaseException):
    """Ends a solve that is no longer needed, between two products."""


@runtime_checkable
class _Map(Protocol):
    """A map at its input, as in a session."""

    job: Job
    window: ModelAtInput

    @property
    def question(self) -> Question: ...


M = TypeVar("M", bound=_Map)


class SolveQueue(Generic[M]):
    """Solves for sigma of maps before it is requested, within ``memory`` bytes per solve.

    ``make`` builds the map of a job at a window; ``jobs`` will be requested in order; ``watch``
    returns a callback for a layer, which receives its intervals as they narrow.
    """

    def __init__(
        self,
        spec: Spec,
        memory: int,
        make: Callable[[Job, ModelAtInput], M],
        jobs: Sequence[Job],
        watch: Callable[[int | None], Watch] | None,
    ) -> None:
        self._spec, self._memory, self._make, self._watch = spec, memory, make, watch
        self._next = dict(pairwise(jobs))  # the following job, by job
        self._ahead: dict[Job, M] = {}
        self._begun: dict[Job, Future[Solve]] = {}
        self._coming: M | None = None  # the next map to start
        self._pool: ThreadPoolExecutor | None = None
        self._over = Event()

    def watching(self, layer: int | None) -> Watch:
        """A callback for every step of a solve, which stops solves of a finished session."""
        callback = None if self._watch is None else self._watch(layer)

        def watch(now: Callable[[], Sequence[tuple[float, float]]]) -> None:
            if self._over.is_set():
                raise _OverError
            if callback is not None:
                callback(now)

        return watch

    def solved(self, one: M) -> Solve | None:
        """The solve of a map, run in parallel with the next ones; None to solve it alone.

        The next ones are other layers at the same input, in closed form and with few tokens. They
        run in as many threads as torch has, with one each: several small solves at once use
        processors better than several threads per product, and never wait for each other.
        """
        workers, job = min(torch.get_num_threads(), _MOST_WORKERS), one.job
        if job not in self._begun:
            self._coming = one
        while self._coming is not None and workers > 1 and len(self._begun) < workers + _WAITING:
            coming, self._coming = self._coming, None
            # A failure is reported when its row is made.
            with self.beside(), suppress(InputError, RuntimeError, MemoryError):
                self._coming = self._begin(coming, workers)
        self._ahead.pop(job, None)  # no longer needed
        return self._begun.pop(job).result() if job in self._begun else None

    def beside(self) -> AbstractContextManager[None]:
        """Limit this thread to one processor while solves run ahead."""
        return one_thread() if self._begun else nullcontext()

    def _begin(self, one: M, workers: int) -> M | None:
        """Start solving a map; return the next one, if it is alike."""
        after = self._next.get(one.job)
        alike = after is not None and after == one.job._replace(id=after.id, layer=after.layer)
        if not (alike or self._begun) or not self._is_small(one):
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(workers, "", torch.set_num_threads, (1,))
        self._begun[one.job] = self._pool.submit(solve_ahead, one.question)
        self._ahead[one.job] = one
        return self._make(after, one.window) if after is not None and alike else None

    def _is_small(self, one: M) -> bool:
        """Whether a solve may have its own thread: it is small and runs no module of the model."""
        plain = one.job.input == REAL and one.job.metric in SPECTRAL
        if one.job.map not in ("attention", "heads") or not plain or self._spec.per_head:
            return False
        layer, x = one.question.layer, one.question.layer.x
        basis = 2 * USUAL_STEPS * x.numel() * x.element_size()
        fits = x.numel() <= _FEW and 2 * (_MOST_WORKERS + _WAITING) * basis <= self._memory
        with one.window.ready() as ready:
            alone = layer.attention is not None and ready.resident is None
        return alone and fits and x.device.type == "cpu"

    def taken(self, job: Job) -> M | None:
        """The map of a job whose solve has started."""
        return self._ahead.pop(job, None)

    def end(self) -> None:
        """Stop solving ahead, between two products."""
        if self._pool is not None:
            self._over.set()
            self._pool.shutdown(cancel_futures=True)
            # New threads inherit the last thread count set anywhere, which was one: set it back.
            torch.set_num_threads(torch.get_num_threads())
        self._pool, self._coming, self._over = None, None, Event()
        self._ahead.clear()
        self._begun.clear()


def solve_ahead(asked: Question) -> Solve:
    """The solve of a question, with its sigma."""
    solve = Solve(asked)
    solve.solve()
    return solve
