"""Solves ahead of what is asked: layers that come next, a thread each."""

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
_WAITING = 2  # solves beyond one a thread, so that none is idle while a row is made
# Entries of an input up to which they are: products of larger ones fill the processors.
_FEW = 2**16


class _OverError(BaseException):
    """Ends a solve between two products: nobody will ask for it."""


@runtime_checkable
class _Asked(Protocol):
    """A map at its input, as a session has it."""

    job: Job
    window: ModelAtInput

    @property
    def question(self) -> Question: ...


M = TypeVar("M", bound=_Asked)


class SolveQueue(Generic[M]):
    """Finds sigma of maps before they are asked for, within so many bytes of memory a solve.

    ``make`` gives the map of a job at a window; the jobs will be asked one after the other; what
    ``watch`` gives for a layer is told of its intervals as they narrow.
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
        self._next = dict(pairwise(jobs))  # by job, the one that is asked after it
        self._ahead: dict[Job, M] = {}
        self._begun: dict[Job, Future[Solve]] = {}
        self._coming: M | None = None  # the next one to begin with
        self._pool: ThreadPoolExecutor | None = None
        self._over = Event()

    def watching(self, layer: int | None) -> Watch:
        """What is called after every step of a solve; it ends those of a session that is over."""
        told = None if self._watch is None else self._watch(layer)

        def watch(now: Callable[[], Sequence[tuple[float, float]]]) -> None:
            if self._over.is_set():
                raise _OverError
            if told is not None:
                told(now)

        return watch

    def solved(self, one: M) -> Solve | None:
        """Sigma of a map, found beside those that are asked for next; None for it alone.

        These are other layers at the same input, in closed form and of few tokens. They are solved
        in threads beside this one, as many as torch has, each with one: several small solves at
        once use processors better than several threads a product, and never wait for each other.
        """
        workers, job = min(torch.get_num_threads(), _MOST_WORKERS), one.job
        if job not in self._begun:
            self._coming = one
        while self._coming is not None and workers > 1 and len(self._begun) < workers + _WAITING:
            coming, self._coming = self._coming, None
            # What fails is told where its row is made.
            with self.beside(), suppress(InputError, RuntimeError, MemoryError):
                self._coming = self._begin(coming, workers)
        self._ahead.pop(job, None)  # it is at hand
        return self._begun.pop(job).result() if job in self._begun else None

    def beside(self) -> AbstractContextManager[None]:
        """What this thread does beside the solves takes no processor from them."""
        return one_thread() if self._begun else nullcontext()

    def _begin(self, one: M, workers: int) -> M | None:
        """Begin to solve a map; the one after it, if it is like it."""
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
        """Whether a solve has a thread of its own: it runs no module of the model."""
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
        """The map of a job whose solve has begun."""
        return self._ahead.pop(job, None)

    def end(self) -> None:
        """End what is solved ahead, between two products."""
        if self._pool is not None:
            self._over.set()
            self._pool.shutdown(cancel_futures=True)
            # A thread that begins has as many as the one that set its own last: those were of one.
            torch.set_num_threads(torch.get_num_threads())
        self._pool, self._coming, self._over = None, None, Event()
        self._ahead.clear()
        self._begun.clear()


def solve_ahead(asked: Question) -> Solve:
    """The solve of a question, with its sigma."""
    solve = Solve(asked)
    solve.solve()
    return solve
