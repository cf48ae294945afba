"""Key figures and the sentence of one curve on a page, from the same line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipscope.pages.items import Item
from lipscope.pages.points import Points, compared, label, short
from lipscope.pages.sentences import remarkable, sentences
from lipscope.pages.table import Line, stable_rank

MAX_SAID = 300
"""Curves whose sentences a page carries: they are long."""


@dataclass(frozen=True)
class Card:
    """One curve on real inputs.

    Attributes:
        s: Index of its setting.
        item: One of its measurements.
        line: Its middle row at the largest length, its growth and its top token.
        said: The same in words; None where there are too many curves.
        first: Whether it is the most remarkable of those it is compared with.
    """

    s: int
    item: Item
    line: Line
    said: str | None
    first: bool

    def as_plain(self) -> dict[str, Any]:
        """The card as the scripts of the page read it."""
        row = self.line.row
        values = (
            {}
            if row is None
            else {
                "sample": row.sample,
                "sigma": short(row.sigma),
                "upper": short(row.upper),
                "relative": short(row.relative),
                "share": short(row.top_share),
                "token": row.top_token,
                "rest": short(row.sigma_rest),
                "rank": short(stable_rank(row)),
            }
        )
        return values | {
            "s": self.s,
            "source": self.item.source,
            "layer": label(self.item.row.layer),
            "head": self.item.row.head,
            "n": self.line.num_tokens,
            "word": self.line.token,
            "said": self.said,
            "first": self.first,
        }


def cards_of(points: Points, tops: Mapping[str, str]) -> list[Card]:
    """A card for every line.

    Args:
        points: With their lines.
        tops: Text of the top token, by row.

    Returns:
        The cards, in the order of the lines.
    """
    index = {item.setting: p["s"] for item, p in zip(points.items, points.points, strict=True)}
    named = [
        (item, replace(line, token=None if line.row is None else tops.get(line.row.id)))
        for item, line in points.lines
    ]
    beside: dict[tuple[Any, ...], list[Line]] = {}
    for item, line in named:
        beside.setdefault(compared(item.curve), []).append(line)
    best = {key: remarkable(lines) for key, lines in beside.items()}
    cards = []
    for k, (item, line) in enumerate(named):
        key = compared(item.curve)
        first = best[key] is line
        said = None
        if k < MAX_SAID or first:
            said = _named(points.settings, item) + sentences(beside[key], line)
        cards.append(Card(index[item.setting], item, line, said, first))
    return cards


def _named(settings: Sequence[Mapping[str, Any]], item: Item) -> str:
    """What tells a curve from those of other settings and folders."""
    model, map_name, *_, text = item.setting
    words = [f"{model}, map {map_name}"] if len(settings) > 1 else []
    words += [text] if len({one["text"] for one in settings}) > 1 else []
    words += [f"folder {item.source}"] if item.source is not None else []
    return ", ".join(filter(None, words)) + ": " * bool(words)


def headlines(cards: Iterable[Card], most: int = 4) -> list[str]:
    """Sentences on the most remarkable curves, one of each setting, layers before heads."""
    first = sorted((c for c in cards if c.first and c.said), key=lambda c: c.s)
    found: dict[tuple[Any, ...], str] = {}
    for card in sorted(first, key=lambda c: c.item.row.head is not None):
        found.setdefault((card.s, card.item.source), card.said or "")
    return list(found.values())[:most]
