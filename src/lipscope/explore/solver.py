"""A worker thread that answers the latest question of each place, with a cache of answers."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from lipscope.engine import OpenModel
from lipscope.errors import InputError
from lipscope.explore.answers import Event, Question, events_of

_KEPT = 32  # maximum number of cached answers
T = TypeVar("T")
Listener = Callable[[Event | None], None]


class SupersededError(BaseException):
    """Aborts a question between two products: it was replaced by a newer one, or abandoned.

    A `BaseException`, so that it is not caught by error handlers.
    """


class Place(NamedTuple):
    """Where an answer is shown; a new question replaces the previous one of the same place."""

    window: str  # browser window
    part: str  # part of the page


class Ticket:
    """A waiting or running question, with the listener for its events."""

    def __init__(self, place: Place, asked: Question, listener: Listener) -> None:
        self.place, self.asked, self._listener = place, asked, listener
        self._over = threading.Event()

    def tell(self, event: Event | None) -> None:
        """Send an event to the listener, None as the last one; ignored after the end."""
        if not self._over.is_set():
            self._listener(event)

    def end(self) -> None:
        """Send the last event and ignore all later ones."""
        self.tell(None)
        self._over.set()

    def check(self) -> None:
        """Raise `SupersededError` after the end."""
        if self._over.is_set():
            raise SupersededError


class Solver:
    """A thread that answers the questions to one model sequentially."""

    def __init__(self, model: OpenModel) -> None:
        self.model = model
        self._threads = torch.get_num_threads()
        self._waiting: OrderedDict[Place, Ticket] = OrderedDict()
        self._running: Ticket | None = None
        self._kept: OrderedDict[Question, list[Event]] = OrderedDict()
        self._change = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="solver", daemon=True)
        self._thread.start()

    def ask(self, place: Place, asked: Question, listener: Listener) -> Ticket:
        """Queue a question, which replaces the previous one of the same place."""
        ticket = Ticket(place, asked, listener)
        self.drop(place)
        with self._change:
            if self.model.changed:
                self._kept.clear()
            if (kept := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
            else:
                self._waiting[place] = ticket
                self._change.notify()
        for event in kept or ():
            ticket.tell(event)
        if kept is not None:
            ticket.end()
        return ticket

    def drop(self, place: Place | str, ticket: Ticket | None = None) -> None:
        """Abandon the questions of a place or a whole window, or only the given ticket."""
        with self._change:
            for one in (*self._waiting.values(), self._running):
                if one is None or (ticket is not None and one is not ticket):
                    continue
                if place in (one.place, one.place.window):
                    one.end()
                    if self._waiting.get(one.place) is one:
                        del self._waiting[one.place]

    def first(self, asked: Question) -> str | None:
        """Answer a question before any window is open; returns the error message, if any."""
        events: list[Event] = []
        ended = threading.Event()

        def listener(event: Event | None) -> None:
            if event is None:
                ended.set()
            else:
                events.append(event)

        self.ask(Place("", ""), asked, listener)
        ended.wait()
        return next((one["text"] for one in events if one["event"] == "error"), None)

    def end(self) -> None:
        """Stop the thread, at the latest after the current product."""
        with self._change:
            self._ended = True
            for ticket in (*self._waiting.values(), self._running):
                if ticket is not None:
                    ticket.end()
            self._change.notify()
        self._thread.join(1.0)

    def _work(self) -> None:
        while True:
            with self._change:
                self._running = None
                self._change.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                _, ticket = self._waiting.popitem(last=False)
                self._running = ticket
            by_itself(lambda ticket=ticket: self._answer(ticket), self._threads)

    def _answer(self, ticket: Ticket) -> None:
        sent: list[Event] = []
        asked, check = ticket.asked, ticket.check
        try:
            with closing(events_of(self.model, asked, check, ticket.tell)) as events:
                for event in events:
                    sent.append(event)
                    ticket.tell(event)
        except SupersededError:
            return
        except Exception as problem:
            kind = "" if isinstance(problem, InputError) else f"{type(problem).__name__}: "
            text = " ".join(f"{kind}{problem}".split())[:500]
            sent = []
            ticket.tell({"event": "error", "text": text})
        with self._change:
            if sent and not asked.is_file:  # files are large and requested once
                self._kept[asked] = sent
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        ticket.end()


def by_itself(work: Callable[[], T], threads: int | None = None) -> T:
    """Run ``work`` in a temporary thread, so that its OpenMP threads end with it.

    ``threads`` is the number of OpenMP threads; None for that of the caller. Set explicitly, since
    new threads may start with fewer while others are running.

    OpenMP keeps a thread pool per calling thread; if there are more threads than processors, they
    sleep at every product, which takes 1.6 times as long (SmolLM2 at 58 tokens, two processors).
    """
    count = threads or torch.get_num_threads()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(count,)) as pool:
        return pool.submit(work).result()


def twin(model: OpenModel) -> OpenModel:
    """A copy of the model with shared weights, so that two threads can run it concurrently."""
    module = model.model
    weights: dict[int, Any] = {id(one): one for one in (*module.parameters(), *module.buffers())}
    for one in module.parameters():
        if type(one) is nn.Parameter:  # same memory, but each thread sets `requires_grad` itself
            weights[id(one)] = nn.Parameter(one.detach(), requires_grad=one.requires_grad)
    other, stored = copy.deepcopy(module, weights), model.loaded.stored
    stored = stored and replace(stored, skeleton=other)
    return OpenModel(replace(model.loaded, model=other, stored=stored))
