"""What a result shows of itself in a notebook: a small table and a figure, all text escaped."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import singledispatch
from typing import Any

LINES = 12
"""Most lines of a table; more are counted."""

_WORD = 160  # characters of a value


def card(result: Any) -> str:
    """A record as HTML: a table of its attributes, then those that show themselves."""
    pairs = [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]
    parts = [value for _, value in pairs if isinstance(value, Shown)]
    plain = [(n, v) for n, v in pairs if not (v is None or isinstance(v, Shown))]
    cells = [(name, said) for name, value in plain if (said := _said(value))]
    return table(type(result).__name__, (), cells) + "".join(map(as_html, parts))


as_html = singledispatch(card)
"""A result as HTML: by its `card`, unless a room above has registered more for its class."""


class Shown:
    """A record that a notebook shows by `as_html`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_html(self)


def table(
    title: str,
    header: Sequence[str],
    lines: Collection[Sequence[str]],
    remark: str = "",
) -> str:
    """A small table as HTML.

    Args:
        title: What stands above it.
        header: Names of the columns, or none.
        lines: Their cells, as plain text; of more than `LINES` it is said how many there are.
        remark: What stands under it.

    >>> table("a < b", (), [("x", "1")])
    '<table><caption>a &lt; b</caption><tbody><tr><td>x</td><td>1</td></tr></tbody></table>'
    """
    head = f"<thead>{_line(header, 'th')}</thead>" if header else ""
    body = "".join(_line(cells, "td") for cells in list(lines)[:LINES])
    caption = f"<caption>{_safe(title)}</caption>" if title else ""
    more = len(lines) - LINES
    said = [f"… and {more} more line{'s' * (more > 1)}."] if more > 0 else []
    said += remark.splitlines()
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>" + paragraphs(said)


def paragraphs(sentences: Iterable[str]) -> str:
    """Each of them as a paragraph of HTML."""
    return "".join(f"<p>{_safe(one)}</p>" for one in sentences)


def picture(svg: str, alt: str) -> str:
    """A drawing that no style or script of the notebook reaches, and that fetches nothing."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{_safe(alt)}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'


def _line(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_safe(cell)}</{tag}>' for cell in cells)}</tr>"


def _safe(text: str) -> str:
    # Half a character, which no file takes, as a question mark.
    return html.escape(text.encode(errors="replace").decode()).replace("\n", "<br>")


def _said(value: Any) -> str:
    """A value in few words: numbers in four digits, what is large by its size."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "shape"):
        return f"{' × '.join(map(str, value.shape)) or 'one'} numbers, {value.dtype}"
    if isinstance(value, list | tuple):
        return ", ".join(_counted(value))
    text = str(value)
    return text if len(text) <= _WORD else text[: _WORD - 1] + "…"


def _counted(values: Sequence[Any]) -> Iterator[str]:
    kinds = [type(value).__name__ for value in values]
    yield from (f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
