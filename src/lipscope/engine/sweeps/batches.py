"""Jobs in the portions in which workers take them, and what is still to be given out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from lipscope.engine.plan import Job

TRIES = 3  # a job whose worker dies so often has failed
_LARGEST = 64  # jobs: what a lost message costs at most
_SHARES = 4  # portions for each worker, so that none is left alone with the last of them


class Batches:
    """The jobs that are still to be done, model by model.

    Args:
        jobs: Jobs, those of one model and one window together.
        workers: Number of workers that take them.
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

        Args:
            model: The model that it holds, whose jobs come first.
            busy: Models that other workers hold: a model that nobody holds comes next.
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

        Args:
            jobs: What it had not answered.
            begun: Whether it had begun the first: else its death says nothing of that job.

        Returns:
            The first job if it was tried often enough: then it is not done again.
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
