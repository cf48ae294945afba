"""Display of results at a prompt and in a notebook: tables, sentences and a figure."""

from __future__ import annotations

import base64
import copy
import dataclasses
import html
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from functools import singledispatch
from pathlib import Path
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.table import Column, Table

LINES = 12
"""Most lines of a table; more are counted."""

WIDTH, HEIGHT = 100, 30
"""Size of a result at a prompt, in letters and lines."""

_WORD = 160  # letters of a value
_FEW = 8  # numbers that are listed one by one
_NARROW, _WIDEST = 16, 40  # letters of a column whose lines may be broken


def rounded_down(value: float, digits: int = 4) -> float:
    """A value to so many significant digits, not above it, as for a certified radius.

    >>> rounded_down(1.7409), rounded_down(0.3), rounded_down(float("inf"))
    (1.74, 0.3, inf)
    """
    return float(Context(digits, ROUND_FLOOR).create_decimal(repr(float(value))))


def rounded_up(value: float, digits: int = 4) -> float:
    """A value to so many significant digits, not below it, as for an upper bound.

    >>> rounded_up(3.73149), rounded_up(3.732), rounded_up(0.0)
    (3.732, 3.732, 0.0)
    """
    return float(Context(digits, ROUND_CEILING).create_decimal(repr(float(value))))


Rounding: TypeAlias = Callable[[float, int], float]
"""`rounded_down` or `rounded_up`: a function of a value and a number of digits."""

ENDS: dict[str, Rounding] = {
    "sigma": rounded_down,
    "upper": rounded_up,
    "sigma_bound": rounded_up,
}
"""Rounding of each field wherever it is displayed, so that printed intervals hold."""


@dataclass(frozen=True)
class Card:
    """A record in few words."""

    name: str  # of its class
    cells: tuple[tuple[str, str], ...]  # its attributes and their values


@dataclass(frozen=True)
class Drawing:
    """A figure, which only a notebook shows."""

    svg: Callable[[], str]  # draws a self-contained SVG; "" where there is none
    alt: str  # its description


Piece: TypeAlias = Table | Card | Drawing | str


def card(result: Any, **ends: Rounding) -> Iterator[Piece]:
    """A record as its attributes, then attributes that are `Shown`; ``ends`` extend `ENDS`.

    A result with ``display_lines`` is shown by these.
    """
    if hasattr(result, "display_lines"):
        yield Card(type(result).__name__, tuple(result.display_lines()))
        return
    ends = ENDS | ends
    pairs = [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]
    cells = [
        (name, text)
        for name, value in pairs
        if value is not None and not isinstance(value, Shown)
        if (text := _value_in_words(value, ends.get(name)))
    ]
    yield Card(type(result).__name__, tuple(cells))
    for _, value in pairs:
        if isinstance(value, Shown):
            yield from pieces(value)


pieces = singledispatch(card)
"""The display of a result: its `card`, unless a room above registers more for its class."""


class Shown:
    """A result that displays its `pieces`: short at a prompt, with figures in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        parts = list(pieces(self))
        texts = (_text(parts, most) for most in (LINES, 8, 5, 3))
        text = next((one for one in texts if one.count("\n") < HEIGHT), None)
        return _within_height(_text(parts, 2) if text is None else text, ".")

    def _repr_html_(self) -> str:
        return "".join(_html(part, LINES) for part in pieces(self))


class Sheet(Shown):
    """Tables and sentences on request: complete when printed, and in a notebook."""

    def __init__(self, *parts: Table | str) -> None:
        self.parts = parts

    def __rich_console__(self, *_: Any) -> Iterator[Any]:
        from rich.text import Text

        yield from (Text(part) if isinstance(part, str) else part for part in self.parts)

    def __repr__(self) -> str:
        return _within_height(str(self), "; `print` shows all.")

    def __str__(self) -> str:
        return _text(self.parts, None)

    def _repr_html_(self) -> str:
        return "".join(_html(part, None) for part in self.parts)


@pieces.register
def _sheet(sheet: Sheet) -> Iterator[Piece]:
    yield from sheet.parts


# --- at a prompt


def _within_height(text: str, end: str) -> str:
    lines = text.split("\n")
    if len(lines) <= HEIGHT:
        return text
    return "\n".join([*lines[: HEIGHT - 1], f"… and {len(lines) - HEIGHT + 1} more lines{end}"])


def _text(parts: Iterable[Piece], most: int | None) -> str:
    texts = [_as_lines(part, most) for part in parts if not isinstance(part, Drawing)]
    lines = "\n".join(texts).split("\n")
    return printable("\n".join(line.rstrip() for line in lines).strip("\n"))


def _as_lines(part: Table | Card | str, most: int | None) -> str:
    from rich.text import Text

    if isinstance(part, Card):
        words = ", ".join(f"{name}={text}" for name, text in part.cells)
        return _printed(Text(f"{part.name}({words})"))
    if isinstance(part, str):
        return _printed(Text(part))
    shown = _printed(part if most is None else _first_lines(part, most), width_of(part))
    return "\n".join(filter(None, [shown, _more(part.row_count, most)]))


def _printed(what: Any, width: int = WIDTH) -> str:
    from rich.console import Console

    # A notebook kernel's console would display the text at once.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(what, crop=False)
    return capture.get().removesuffix("\n")


def width_of(table: Table) -> int:
    """The width of a table with no number cut, in letters, at least `WIDTH`."""
    edges = 0 if table.box is None else 1
    return max(WIDTH, sum(_room(column) + 2 + edges for column in table.columns))


def _room(column: Column) -> int:
    texts = [line for one in (column.header, *column.cells) for line in str(one).split("\n")]
    if column.no_wrap:
        return max(map(cell_len, texts), default=0)
    longest = max((cell_len(word) for text in texts for word in text.split()), default=0)
    return min(_WIDEST, max(longest, min(_NARROW, max(map(cell_len, texts), default=0))))


def _first_lines(table: Table, count: int) -> Table:
    """The first lines of a table."""
    short = copy.copy(table)
    short.columns, short.rows = [column.copy() for column in table.columns], []
    for row, cells in list(zip(table.rows, _lines_of(table), strict=True))[:count]:
        short.add_row(*cells, style=row.style, end_section=row.end_section)
    return short


def _lines_of(table: Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def _more(count: int, most: int | None) -> str:
    more = 0 if most is None else count - most
    return f"… and {more} more line{'s' * (more > 1)}." if more > 0 else ""


def printable(value: Any) -> Any:
    r"""Text without characters invalid in XML, a terminal or UTF-8; also in lists and dictionaries.

    Control characters become their pictures; line ends and tabs stay.

    >>> printable({"a": ["\x1b[31m", "\ud800", "a\n"]})
    {'a': ['␛[31m', '�', 'a\n']}
    """
    if isinstance(value, str):
        return _UNPRINTABLE.sub(_sign, value)
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    return [printable(one) for one in value] if isinstance(value, list | tuple) else value


_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"


# --- in a notebook


def _html(part: Piece, most: int | None) -> str:
    if isinstance(part, str):
        return "".join(f"<p>{_markup(line)}</p>" for line in part.splitlines() if line.strip())
    if isinstance(part, Drawing):
        return picture(svg, part.alt) if (svg := part.svg()) else ""
    if isinstance(part, Card):
        return table(part.name, (), part.cells)
    header = [str(column.header) for column in part.columns]
    lines = [[str(cell) for cell in cells] for cells in _lines_of(part)]
    return table(str(part.title or ""), header if any(header) else (), lines, most)


def table(
    title: str,
    header: Sequence[str],
    lines: Collection[Sequence[str]],
    most: int | None = LINES,
) -> str:
    """A small table of plain text as HTML: its first lines and the number of others.

    >>> table("a < b", (), [("x", "1")])
    '<table><caption>a &lt; b</caption><tbody><tr><td>x</td><td>1</td></tr></tbody></table>'
    """
    head = f"<thead>{_table_row(header, 'th')}</thead>" if header else ""
    body = "".join(_table_row(cells, "td") for cells in list(lines)[:most])
    caption = f"<caption>{_markup(title)}</caption>" if title else ""
    more = _more(len(lines), most)
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>" + f"<p>{more}</p>" * bool(more)


def picture(svg: str, alt: str) -> str:
    """A drawing isolated from styles and scripts of the notebook, which fetches nothing."""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<img alt="{_markup(alt)}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'
    )


def _table_row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_markup(cell)}</{tag}>' for cell in cells)}</tr>"


def _markup(text: str) -> str:
    # Half a character, which no file takes, as a question mark.
    return html.escape(text.encode(errors="replace").decode()).replace("\n", "<br>")


# --- a value in few words


def _value_in_words(value: Any, rounded: Rounding | None = None) -> str:
    """A number in four digits, a large value by its size, any other object by its class."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, float):
        return f"{rounded(value, 4) if rounded else value:.4g}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if value.ndim != 1 or len(value) > _FEW:
            return f"{' × '.join(map(str, value.shape))} numbers, {value.dtype}"
        value = value.tolist()
    if isinstance(value, list | tuple | dict):
        plain = all(isinstance(one, float | int | str) for one in value) and len(value) <= _FEW
        if plain and value:
            return f"({', '.join(_value_in_words(one, rounded) for one in value)})"
        counts = Counter(type(one).__name__ for one in value)
        return ", ".join(f"{count} of {kind}" for kind, count in counts.items())
    text = str(value)
    if isinstance(value, str | Path):
        text = " ".join(text.split())
        return text if len(text) <= _WORD else text[: _WORD - 1] + "…"
    # An address, or the text of a whole model, says nothing.
    name = getattr(value, "__name__", type(value).__name__)
    return name if " at 0x" in text or len(text) > _WORD or "\n" in text else text
