"""Questions to events: what the page is told, number by number, as it is solved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lipscope.engine import LayerAtInput, OpenModel
from lipscope.errors import InputError
from lipscope.explore.question import MOST_TOKENS, Question, as_command, as_python
from lipscope.models import whole_text
from lipscope.pages import token_shares, token_words

Event = dict[str, Any]
Tell = Callable[[Event], None]
Check = Callable[[], None]
_EVERY = 0.03  # seconds between two intervals of one layer
_ROUGH = 3  # steps before the first interval is told: earlier ones say little
_ROW = (
    *("id", "model", "layer", "head", "map", "metric", "move", "read", "num_tokens", "sigma"),
    *("upper", "delta", "relative", "status", "note", "error", "top_token", "top_share"),
    *("derivative_error", "products", "seconds"),
)


def events_of(model: OpenModel, asked: Question, check: Check, tell: Tell) -> Iterator[Event]:
    """What a question is answered with; rough intervals are told aside, as nobody keeps them.

    ``check`` is called between products and raises when nobody waits any more.
    """
    began = time.perf_counter()
    if not asked.text.strip():
        raise InputError("Type a text: there is none yet.")
    yield from _ANSWERS[asked.kind](model, asked, check, tell)
    yield {"event": "done", "seconds": time.perf_counter() - began}


def tokens_of(model: OpenModel, text: str) -> tuple[int, bool]:
    """How many tokens of a text are read, and whether it has more."""
    most = min(MOST_TOKENS, model.loaded.max_tokens or MOST_TOKENS)
    ids = whole_text(text, model.loaded.reader_of_text(), longest=most + 1)
    count = min(ids.shape[1], most)
    return count, ids.shape[1] > most


def _measured(model: OpenModel, asked: Question, check: Check, tell: Tell) -> Iterator[Event]:
    length, cut = tokens_of(model, asked.text)
    yield {
        "event": "asked",
        "length": length,
        "cut": cut,
        "python": as_python(asked, model.name, length),
        "command": as_command(asked, model.name, length),
    }
    for at in _layers(model, asked, length):
        check()
        rows = at.rows(_Watch(at.layer, check, tell))
        tokens = {row.id: [t for t in rows.tokens if t.id == row.id] for row in rows}
        yield {
            "event": "rows",
            "layer": at.layer,
            "words": token_words(tokens[rows[0].id]),
            "rows": [
                {name: getattr(row, name) for name in _ROW} | token_shares(tokens[row.id])
                for row in rows
            ],
        }


def _layers(model: OpenModel, asked: Question, length: int) -> Iterator[LayerAtInput]:
    layers = "all" if asked.layer is None else [asked.layer]
    yield from model.layers(asked.text, lengths=length, layers=layers, **asked.options)


class _Watch:
    """Tells intervals as they narrow, not oftener than an eye can follow."""

    def __init__(self, layer: int | None, check: Check, tell: Tell) -> None:
        self._layer, self._check, self._tell = layer, check, tell
        self._steps, self._next = 0, 0.0

    def __call__(self, now: Callable[[], Sequence[tuple[float, float]]] | None) -> None:
        self._check()
        if now is None:
            return
        self._steps += 1
        if self._steps < _ROUGH or time.perf_counter() < self._next:
            return
        ends = now()
        if all(math.isfinite(upper) for _, upper in ends):
            self._tell({"event": "rough", "layer": self._layer, "ends": ends})
        self._next = time.perf_counter() + _EVERY


_ANSWERS: dict[str, Callable[..., Iterator[Event]]] = {"measure": _measured}
