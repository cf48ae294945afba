"""What an experiment ends in: one table beside the paper, further tables, and remarks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lipscope.charts import LineKind, Series
from lipscope.pages import number
from lipscope.records import (
    CONFIDENCE,
    Growth,
    grouped as grouped_by,
    mean_interval,
    off_line,
    percent_off,
    share_interval,
    slope_of,
)

Record = dict[str, Any]
"""What was computed for a key, with the key."""
Value = str | Callable[..., Any]
Columns = Mapping[str, Value] | Sequence[str]
Numbers = Iterable[float | int]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Claim:
    """One line of the table of claims."""

    about: str  # what is compared
    said: str  # what the paper, its code, or a derivation here says
    found: str  # what was measured


@dataclass(frozen=True)
class Table:
    """A further table: a heading, names of columns, and lines of as many cells."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Findings:
    """The result of an experiment: claims beside the paper, further tables, remarks."""

    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    plan: Sequence[str] = ()  # what was said before the runs


def value_of(item: Any, what: Value) -> Any:
    """A value of a record or row by name, or by a function of it.

    Of groups: by a function of key and records, or by a name, for what all of its records share.
    """
    if callable(what):
        return what(*item) if isinstance(item, tuple) else what(item)
    if isinstance(item, tuple):
        return value_of(item[1][0], what)
    return item[what] if isinstance(item, Mapping) else getattr(item, what)


def table_of(title: str, items: Iterable[Any], columns: Columns, digits: int = 4) -> Table:
    """A table with a line for each record: its values by name or function, numbers rounded.

    With names of columns alone an item holds the values themselves.

    >>> table_of("T", [{"n": 1, "x": 0.5}], {"n": "n", "twice": lambda r: 2 * r["x"]}, 2).lines
    (('1', '1.0'),)
    """

    def cell(value: Any) -> str:
        return number(value, digits) if value is None or isinstance(value, float) else str(value)

    if isinstance(columns, Mapping):
        items = ([value_of(item, one) for one in columns.values()] for item in items)
    return Table(title, tuple(columns), tuple(tuple(map(cell, line)) for line in items))


def curve(name: str, items: Iterable[Any], x: Value, y: Value, kind: LineKind = "line") -> Series:
    """A curve through values of records or rows by name or function, where there is a second one.

    >>> curve("c", [{"n": 1, "y": 2.0}, {"n": 3, "y": None}], "n", "y").points
    ((1, 2.0),)
    """
    points = ((value_of(item, x), value_of(item, y)) for item in items)
    return Series(name, tuple(one for one in points if one[1] is not None), kind)


def line(name: str, x: Numbers, y: Numbers, kind: LineKind = "line") -> Series:
    """A curve through numbers side by side."""
    return Series(name, list(zip(x, y, strict=True)), kind)


def level(name: str, y: float, x: Numbers) -> Series:
    """A dashed line across, between these places."""
    return Series(name, [(at, y) for at in x], "dashes")


def page_of(findings: Findings, figures: Iterable[tuple[str, str, str]], **of: str) -> str:
    """The findings in Markdown, ``of`` an experiment's title, cite, command and origin.

    Figures are file name, what is shown, and a digest, which tells a page of another run apart.
    """
    claims = [(c.about, c.said, c.found) for c in findings.claims]
    parts = [
        "# {title}\n\nPrinted by `{command}` ({origin}). Paper: [{cite}].".format_map(of),
        _markdown(("what", "the paper, or theory", "here"), claims),
        *(f"![{shows}]({name})\n<!-- sha256 {digest} -->" for name, shows, digest in figures),
    ]
    for table in findings.tables:
        parts += [f"## {table.title}", _markdown(table.columns, table.lines)]
    if findings.plan:
        planned = "\n".join(f"- {one}" for one in findings.plan)
        parts += ["## Plan, written before the run", planned]
    if findings.remarks:
        parts += ["## Remarks", "\n".join(f"- {remark}" for remark in findings.remarks)]
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([row(columns), "|" + " --- |" * len(columns), *map(row, lines)])


def exponent(fit: Growth | None) -> str:
    """An exponent with its interval, and how far the means leave the line.

    ``✗``: further than a power law allows. An interval at another level than 95 % names it. The
    interval speaks of the sampling of text, see `lipscope.records.power_law.growth`.
    """
    if fit is None:
        return "–"
    ends = "" if fit.level is None else f" [{fit.low:.2f}, {fit.high:.2f}]"
    few = "" if fit.level in (None, CONFIDENCE) else f" ({100 * fit.level:.0f} %)"
    found = f"{fit.slope:.2f}{ends}{few}, {fit.deviation}" + " ✗" * (fit.fits is False)
    if fit.beyond is None:
        return found
    return f"{found}; from n = {fit.beyond.lengths[0]} on {exponent(fit.beyond)}"


def law(fit: Growth | None) -> str:
    """A fitted exponent as a title says it, or that there is none."""
    if fit is None:
        return "at too few lengths"
    return "follows no power law" if fit.fits is False else f"~ n^{fit.slope:.2f}"


def plain_exponent(points: Sequence[tuple[float | int, float]]) -> str:
    """A slope without samples, and how far the points leave its line.

    >>> plain_exponent([(1, 1.0), (2, 2.2), (4, 4.0)])
    '1.00, off by 6.6 %'
    """
    return f"{slope_of(points):.2f}, off by {percent_off(off_line(points))} %"


def chosen(records: Iterable[Item], **wanted: Any) -> list[Item]:
    """The records, or rows, that have these values.

    >>> chosen([{"n": 1, "d": 2}, {"n": 3, "d": 2}], n=3)
    [{'n': 3, 'd': 2}]
    """
    return [r for r in records if all(value_of(r, name) == v for name, v in wanted.items())]


def grouped(items: Iterable[Item], *by: Value) -> Iterator[tuple[Any, list[Item]]]:
    """The records, or rows, of each value by name or function, or tuple of values, as they come.

    >>> dict(grouped([{"n": 1}, {"n": 2}, {"n": 1}], "n"))
    {1: [{'n': 1}, {'n': 1}], 2: [{'n': 2}]}
    """

    def key(item: Item) -> Any:
        found = tuple(value_of(item, one) for one in by)
        return found if len(by) > 1 else found[0]

    yield from grouped_by(items, key).items()


def ratios(records: Iterable[Record], above: str, below: str) -> list[float]:
    """One value over another, where both were found.

    >>> ratios([{"a": 1.0, "b": 2.0}, {"a": 1.0}], "a", "b")
    [0.5]
    """
    return [r[above] / r[below] for r in records if r.get(above) is not None and r.get(below)]


def counted(words: Iterable[str]) -> str:
    """How often each word occurs, most frequent first.

    >>> counted(["a", "b", "a"])
    '2 a, 1 b'
    """
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def middle(values: Iterable[float], digits: int = 2) -> str:
    """Median, with the smallest and the largest value where there are several.

    >>> middle([1.0, 3.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    held = sorted(values)
    if not held:
        return "–"
    low, mid, high = held[0], statistics.median(held), held[-1]
    ends = f" ({low:.{digits}f} to {high:.{digits}f})" if len(held) > 1 else ""
    return f"{mid:.{digits}f}{ends}"


def geometric(values: Sequence[float]) -> str:
    """A geometric mean with the 95 % interval of the mean logarithm, where there is one.

    For what is positive and differs by factors; the logarithms should be nearly normal.

    >>> geometric([1.0, 10.0, 100.0])
    '10.0 [0.0328, 3049]'
    """
    mean, low, high = (math.exp(v) for v in mean_interval([math.log(value) for value in values]))
    return number(mean, 3) + _ends(low, high, 3) * (len(values) > 2)


def average(
    values: Sequence[float | int],
    within: tuple[float, float] = (-math.inf, math.inf),
    digits: int | str = 3,
    least: int = 3,
) -> str:
    """A mean with its 95 % interval, where there are enough values; cut to what is possible.

    To some significant digits, or in a format.

    >>> average([1.0, 2.0, 3.0]), average([0.9, 0.95, 1.0], (0.0, 1.0)), average([])
    ('2.00 [-0.484, 4.48]', '0.950 [0.826, 1.00]', '–')
    >>> average([1.0, 2.0], digits=".1f")
    '1.5'
    """
    if not values:
        return "–"
    mean, low, high = mean_interval([float(one) for one in values])
    ends = _ends(max(low, within[0]), min(high, within[1]), digits)
    return _written(mean, digits) + ends * (len(values) >= least)


def column_mean(what: Value, mean: Callable[[list[float]], str] = average) -> Callable[..., str]:
    """The mean of a value over the records of a group that have it, as a column of a table.

    >>> column_mean("x")("key", [{"x": 1.0}, {"x": 3.0}, {"x": None}])
    '2.00'
    """
    return lambda _, records: mean([v for r in records if (v := value_of(r, what)) is not None])


def _ends(low: float, high: float, digits: int | str) -> str:
    return f" [{_written(low, digits)}, {_written(high, digits)}]"


def _written(value: float, digits: int | str) -> str:
    return number(value, digits) if isinstance(digits, int) else format(value, digits)


def share(hits: int, total: int) -> str:
    """How often something happened, with the 95 % interval of the share.

    >>> share(1, 4)
    '1 of 4 (25 % [1 %, 81 %])'
    """
    low, high = (round(100 * end) for end in share_interval(hits, total))
    return f"{hits} of {total} ({round(100 * hits / total)} % [{low} %, {high} %])"


def percentage(hits: int, total: int, form: str = ".1%") -> str:
    """A share with its 95 % interval.

    >>> percentage(1, 4)
    '25.0% [0.6%, 80.6%]'
    """
    low, high = share_interval(hits, total)
    return f"{hits / total:{form}} [{low:{form}}, {high:{form}}]"
