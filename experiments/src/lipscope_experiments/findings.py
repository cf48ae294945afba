"""What an experiment ends in: one table beside the paper, further tables, and remarks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lipscope.pages import number
from lipscope.records import (
    CONFIDENCE,
    Growth,
    mean_interval,
    off_line,
    percent_off,
    share_interval,
    slope_of,
)

Record = dict[str, Any]
"""What a job computed, with its key."""


@dataclass(frozen=True)
class Claim:
    """One line of the table of claims.

    Attributes:
        about: What is compared.
        said: What the paper (or its code, or a derivation here) says.
        found: What was measured.
    """

    about: str
    said: str
    found: str


@dataclass(frozen=True)
class Table:
    """A further table.

    Attributes:
        title: Heading.
        columns: Names.
        lines: Cells, as many as columns in each line.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Findings:
    """The result of an experiment in words and numbers.

    Attributes:
        claims: Beside the paper.
        tables: Further ones.
        remarks: What a reader must know: what was not run, what does not apply.
    """

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...] = ()
    remarks: tuple[str, ...] = ()


def findings_of(plain: Mapping[str, Any]) -> Findings:
    """Findings from plain values, as `dataclasses.asdict` gives them."""
    tables = [
        Table(one["title"], tuple(one["columns"]), tuple(map(tuple, one["lines"])))
        for one in plain["tables"]
    ]
    claims = [Claim(**one) for one in plain["claims"]]
    return Findings(tuple(claims), tuple(tables), tuple(plain["remarks"]))


def page(
    findings: Findings,
    *,
    title: str,
    cite: str,
    command: str,
    figures: Iterable[tuple[str, str, str]],
    origin: str,
) -> str:
    """The findings in Markdown.

    Args:
        findings: The result.
        title: Of the experiment.
        cite: Key of the bibliography.
        command: What printed it.
        figures: File name, what it shows, and its digest: a page and a figure of two runs are
            told apart by it.
        origin: Versions.

    Returns:
        The page.
    """
    claims = [(c.about, c.said, c.found) for c in findings.claims]
    parts = [
        f"# {title}",
        f"Printed by `{command}` ({origin}). Paper: [{cite}].",
        _markdown(("what", "the paper, or theory", "here"), claims),
        *(f"![{shows}]({name})\n<!-- sha256 {digest} -->" for name, shows, digest in figures),
    ]
    for table in findings.tables:
        parts += [f"## {table.title}", _markdown(table.columns, table.lines)]
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


def chosen(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """The records that have these values.

    >>> chosen([{"n": 1, "d": 2}, {"n": 3, "d": 2}], n=3)
    [{'n': 3, 'd': 2}]
    """
    return [r for r in records if all(r[name] == value for name, value in wanted.items())]


def grouped(records: Sequence[Record], *names: str) -> Iterator[tuple[Any, list[Record]]]:
    """The records of each value, or of each tuple of values of several names, as they come.

    >>> dict(grouped([{"n": 1}, {"n": 2}, {"n": 1}], "n"))
    {1: [{'n': 1}, {'n': 1}], 2: [{'n': 2}]}
    """
    held: dict[Any, list[Record]] = {}
    for r in records:
        key = tuple(r[name] for name in names)
        held.setdefault(key[0] if len(names) == 1 else key, []).append(r)
    yield from held.items()


def counted(words: Iterable[str]) -> str:
    """How often each word occurs, most frequent first.

    >>> counted(["a", "b", "a"])
    '2 a, 1 b'
    """
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def middle(values: Iterable[float], digits: int = 2) -> str:
    """Median with the smallest and the largest value.

    >>> middle([1.0, 3.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    held = sorted(values)
    if not held:
        return "–"
    low, mid, high = held[0], statistics.median(held), held[-1]
    return f"{mid:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def geometric(values: Sequence[float]) -> str:
    """A geometric mean with the 95 % interval of the mean logarithm, where there is one.

    For what is positive and differs by factors; the logarithms should be nearly normal.

    >>> geometric([1.0, 10.0, 100.0])
    '10.0 [0.0328, 3049]'
    """
    mean, *ends = mean_interval([math.log(value) for value in values])
    said = number(math.exp(mean), 3)
    if len(values) < 3:  # an interval of two values says nothing
        return said
    low, high = (number(math.exp(end), 3) for end in ends)
    return f"{said} [{low}, {high}]"


def average(
    values: Sequence[float | int], within: tuple[float, float] = (-math.inf, math.inf)
) -> str:
    """A mean with its 95 % interval, where there is one; cut to what is possible.

    >>> average([1.0, 2.0, 3.0]), average([0.9, 0.95, 1.0], (0.0, 1.0))
    ('2.00 [-0.484, 4.48]', '0.950 [0.826, 1.00]')
    """
    mean, low, high = mean_interval(values)
    if len(values) < 3:  # an interval of two values says nothing
        return number(mean, 3)
    low, high = max(low, within[0]), min(high, within[1])
    return f"{number(mean, 3)} [{number(low, 3)}, {number(high, 3)}]"


def share(hits: int, total: int) -> str:
    """How often something happened, with the 95 % interval of the share.

    >>> share(1, 4)
    '1 of 4 (25 % [1 %, 81 %])'
    """
    low, high = (round(100 * end) for end in share_interval(hits, total))
    return f"{hits} of {total} ({round(100 * hits / total)} % [{low} %, {high} %])"
