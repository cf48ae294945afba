"""Forward passes of one model that take turns, so that a block that is read serves all of them."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lipscope.linalg import torch_state

T = TypeVar("T")
_BEGIN, _END = "to begin", "to end"


class _Stopped(BaseException):
    """The others are to be ended too. No model catches it by mistake."""


class _Pass(threading.Thread, Generic[T]):
    """A pass in a thread of its own, which runs when it is let."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.place: str | None = _BEGIN  # what it waits for; None once it is done
        self.stopped = False
        self.found: T | BaseException = _Stopped()
        self._work = functools.partial(contextvars.copy_context().run, work)
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self.stopped:
                self.found = self._work()
        except BaseException as problem:
            self.found = problem
        self.place = None
        self._back.release()

    def wait(self, place: str) -> None:
        """In the pass: let the others go on, until it is its turn."""
        self.place = place
        self._back.release()
        self._go.acquire()
        if self.stopped:
            raise _Stopped

    def step(self) -> None:
        """Let it run until it waits again, or is done."""
        self._go.release()
        self._back.acquire()

    def stop(self) -> None:
        """End it where it waits, or will wait next."""
        self.stopped = True
        while self.place is not None:
            self.step()


class Turns:
    """Passes of which one runs at a time, each to the place where the others are.

    A place is a block of the model. All begin before the first goes on, and they end in reverse
    order: what a pass changes for its time (types, kernels, draws) it puts back as it found it.
    """

    def __init__(self) -> None:
        self._passes: dict[int | None, _Pass] = {}

    def run(self, works: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """What each pass gives, or what it raises."""
        with torch_state():  # of all passes together, which hold it in turns
            return self._run([_Pass(work) for work in works])

    def _run(self, passes: list[_Pass[T]]) -> list[T | BaseException]:
        try:
            for one in passes:
                one.start()
                self._passes[one.ident] = one
            while waiting := [one for one in passes if one.place is not None]:
                at = {one.place for one in waiting}
                place = next((one for one in at if one not in (_BEGIN, _END)), None)
                place = place or (_END if _END in at else _BEGIN)
                turn = [one for one in waiting if one.place == place]
                for one in reversed(turn) if place == _END else turn:
                    one.step()
        finally:
            for one in reversed(passes):
                one.stop()
            self._passes.clear()
        return [one.found for one in passes]

    def begin(self) -> None:
        """Wait until all others begin a pass, too."""
        self.wait_at(_BEGIN)

    def end(self) -> None:
        """Wait until all others are at the end of theirs."""
        self.wait_at(_END)

    def wait_at(self, place: str) -> None:
        """Wait until all others have come to a place; at once where there are none."""
        mine = self._passes.get(threading.get_ident())
        if mine is not None:
            mine.wait(place)
