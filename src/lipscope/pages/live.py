"""The parts of the report that a page about an open model is made of as well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from lipscope.charts import spaced
from lipscope.display import printable
from lipscope.pages.directions import as_plain, by_rank
from lipscope.pages.html_page import SHARED, asset, charts_of, vega
from lipscope.pages.windows import SCALE, window_shares
from lipscope.records import Direction, TokenShare

_DRAWN = ("push",)  # charts of the report that it draws


def live_script() -> str:
    """Vega, the scripts of every page, and those of the sections that both have."""
    names = (*SHARED, "push")
    return "\n".join([vega(), '"use strict";', *(asset(f"{name}.js") for name in names)])


def live_style() -> str:
    """The report's style."""
    return asset("page.css")


def live_section(name: str) -> str:
    """A section of the report, such as ``push``, as HTML."""
    return asset(f"{name}.html")


def live_data(**more: Any) -> str:
    """What the scripts start from, as JSON that HTML may hold: blank charts, and ``more``."""
    specs, inks = charts_of((), None)
    held = {
        "strict": True,
        "specs": {name: specs[name] for name in _DRAWN},
        "inks": inks,
        "scale": SCALE,
    }
    text = json.dumps(printable(held | {"pushes": []} | more), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def token_words(tokens: Sequence[TokenShare]) -> list[str]:
    """Tokens as they are shown, a space in front where a word begins."""
    return spaced(tokens)


def token_shares(tokens: Sequence[TokenShare]) -> dict[str, Any]:
    """Shares and norms of the tokens of a row, as the scripts read them."""
    return window_shares(tokens)


def directions_in_words(parts: Iterable[Direction]) -> list[dict[str, Any]]:
    """The directions of one row, as the scripts read them."""
    return [one for ranks in by_rank(parts).values() for one in as_plain(ranks)]
