"""One solver a model, in a thread: the newest question of each window, and the last answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing

from lipscope.engine import OpenModel
from lipscope.errors import InputError
from lipscope.explore.answers import Event, events_of
from lipscope.explore.question import Question

_KEPT = 32  # answers


class SupersededError(BaseException):
    """Ends a question between two products: a newer one took its place, or nobody waits for it.

    No mistake of the question, so that nothing that handles mistakes stops it on its way.
    """


class Ticket:
    """A question that waits or is answered, and who is told of the answer."""

    def __init__(self, window: str, asked: Question, tell: Callable[[Event | None], None]) -> None:
        self.window, self.asked, self._tell = window, asked, tell
        self.over = threading.Event()

    def tell(self, event: Event | None) -> None:
        """Tell of an event, the last one None; nobody is told when it is over."""
        if not self.over.is_set():
            self._tell(event)

    def check(self) -> None:
        """Raise if nobody waits for the answer."""
        if self.over.is_set():
            raise SupersededError


class Solver:
    """A thread that answers the questions of one model, one after the other."""

    def __init__(self, model: OpenModel) -> None:
        self.model = model
        self._waiting: OrderedDict[tuple[str, str], Ticket] = OrderedDict()
        self._running: Ticket | None = None
        self._kept: OrderedDict[Question, list[Event]] = OrderedDict()
        self._change = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="solver", daemon=True)
        self._thread.start()

    def ask(self, window: str, asked: Question, tell: Callable[[Event | None], None]) -> Ticket:
        """Ask in the place of what this window asked before."""
        ticket = Ticket(window, asked, tell)
        with self._change:
            key = window, asked.kind
            running = self._running
            for older in (self._waiting.pop(key, None), running):
                if older and (older.window, older.asked.kind) == key:
                    older.tell(None)
                    older.over.set()
            if (kept := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
            else:
                self._waiting[key] = ticket
                self._change.notify()
        if kept is not None:
            for event in kept:
                ticket.tell(event)
            ticket.tell(None)
        return ticket

    def first(self, asked: Question) -> str | None:
        """Answer a question before any window asks; what went wrong, if something did."""
        events: list[Event] = []
        ended = threading.Event()

        def tell(event: Event | None) -> None:
            if event is None:
                ended.set()
            else:
                events.append(event)

        self.ask("", asked, tell)
        ended.wait()
        return next((one["text"] for one in events if one["event"] == "error"), None)

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for a question any more."""
        ticket.over.set()
        with self._change:
            if self._waiting.get((ticket.window, ticket.asked.kind)) is ticket:
                del self._waiting[ticket.window, ticket.asked.kind]

    def end(self) -> None:
        """End the thread, between two products at the latest."""
        with self._change:
            self._ended = True
            for ticket in (*self._waiting.values(), self._running):
                if ticket is not None:
                    ticket.over.set()
            self._change.notify()
        self._thread.join(2.0)

    def kept(self, asked: Question) -> list[Event] | None:
        """The last answers to a question, if they are kept."""
        with self._change:
            return self._kept.get(asked)

    def _work(self) -> None:
        while True:
            with self._change:
                self._running = None
                self._change.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                # Numbers before what takes long, each window in its turn.
                key = next(
                    (k for k in self._waiting if k[1] == "measure"), next(iter(self._waiting))
                )
                ticket = self._running = self._waiting.pop(key)
            self._answer(ticket)

    def _answer(self, ticket: Ticket) -> None:
        told: list[Event] = []
        try:
            ticket.check()
            with closing(events_of(self.model, ticket.asked, ticket.check, ticket.tell)) as events:
                for event in events:
                    ticket.check()
                    told.append(event)
                    ticket.tell(event)
        except SupersededError:
            return
        except Exception as problem:
            kind = "" if isinstance(problem, InputError) else f"{type(problem).__name__}: "
            text = " ".join(f"{kind}{problem}".split())[:500]
            told = []
            ticket.tell({"event": "error", "text": text})
        with self._change:
            if told and told[-2].get("event") != "file":  # which is large, and asked for once
                self._kept[ticket.asked] = told
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        ticket.tell(None)
