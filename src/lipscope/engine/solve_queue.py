"""Solves ahead of what is asked: layers that come next, in threads, by products that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from threading import Event
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from lipscope.engine.answer import Question, Solve, solved_together
from lipscope.engine.plan import Job
from lipscope.engine.ready_model import ModelAtInput
from lipscope.engine.spec import REAL, Spec
from lipscope.errors import InputError
from lipscope.linalg import SPECTRAL, USUAL_STEPS, Watch, one_thread

_TOGETHER = 3  # layers whose products are one, at most: more fill no processor better
_MOST_GROUPS = 4  # of them, solved at a time
_WAITING = 1  # groups begun while no thread is free, so that none is idle until that is seen
# Entries of an input up to which they are: 100 tokens of width 576 gain a fifth, 200 nothing.
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
        self._groups: list[Future[None]] = []  # what solves them, a group at a time
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
        """Sigma of a map, found together with those that are asked for next; None for it alone.

        These are other layers at the same input, in closed form and of few tokens. Some of them
        share their products, and such groups are solved in threads beside this one, as many at a
        time as torch has threads, each with one: several small solves at once use processors
        better than several threads a product, and never wait for each other.
        """
        workers, job = min(torch.get_num_threads(), _MOST_GROUPS), one.job
        if job not in self._begun:
            self._coming = one
        while self._coming is not None and workers > 1:
            if sum(not group.done() for group in self._groups) >= workers + _WAITING:
                break
            coming, self._coming = self._coming, None
            # What fails is told where its row is made.
            with self.beside(), suppress(InputError, RuntimeError, MemoryError):
                self._coming = self._begin(coming, workers)
        self._ahead.pop(job, None)  # it is at hand
        if job not in self._begun:
            return None
        return self._begun.pop(job).result()

    def beside(self) -> AbstractContextManager[None]:
        """What this thread does beside the solves takes no processor from them."""
        return one_thread() if self._begun else nullcontext()

    def _begin(self, first: M, workers: int) -> M | None:
        """Begin to solve a map and some that follow it; the one after them, if it is like them."""
        jobs, job = [first.job], self._next.get(first.job)
        while job is not None and job == first.job._replace(id=job.id, layer=job.layer):
            jobs.append(job)
            job = self._next.get(job)
        if not self._shares(first) or (len(jobs) < 2 and not self._begun):
            return None
        # The first by itself: somebody may wait for its interval.
        share = max(2, -(-len(jobs) // workers))
        size = 1 if self._pool is None else min(_TOGETHER, share)
        maps = [first, *(self._make(job, first.window) for job in jobs[1:size])]
        maps = [one for one in maps if self._shares(one)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(workers, "", torch.set_num_threads, (1,))
        begun = {one.job: Future[Solve]() for one in maps}
        questions = [one.question for one in maps]
        self._groups = [group for group in self._groups if not group.done()]
        self._groups.append(self._pool.submit(_solve_group, questions, [*begun.values()]))
        self._begun |= begun
        self._ahead |= {one.job: one for one in maps}
        return None if len(jobs) <= size else self._make(jobs[size], first.window)

    def _shares(self, one: M) -> bool:
        """Whether a solve may share products: it runs no module of the model, and is small."""
        plain = one.job.input == REAL and one.job.metric in SPECTRAL
        if one.job.map not in ("attention", "heads") or not plain or self._spec.per_head:
            return False
        layer, x = one.question.layer, one.question.layer.x
        basis = 2 * USUAL_STEPS * x.numel() * x.element_size()
        fits = x.numel() <= _FEW and 2 * _TOGETHER * _MOST_GROUPS * basis <= self._memory
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
        self._groups.clear()


def _solve_group(questions: Sequence[Question], solves: list[Future[Solve]]) -> None:
    """Solve them together; each is told as soon as it is there."""
    try:
        solved_together(questions, lambda i, solve: solves[i].set_result(solve))
    except BaseException as problem:
        # Whoever holds one holds the problem, and so this frame: it may hold none of them, or what
        # was ended midway stays in memory.
        while solves:
            if not solves[-1].done():
                solves[-1].set_exception(problem)
            solves.pop()
