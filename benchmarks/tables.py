"""Tables, targets and the description of the machine: everything that is printed."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"  # targets and ratios
TABLES = ROOT / "docs" / "benchmarks-tables.md"  # what they are computed from
STORE = ROOT / "benchmarks" / "results.json"  # what was last measured

# What was measured: plain JSON, every single timing or count. Sections are rendered from it alone.
Raw = list[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A goal with what was measured.

    Attributes:
        name: What is wanted, in words.
        measured: What was found, in words.
        reached: Whether it was reached; None if it could not be measured.
    """

    name: str
    measured: str
    reached: bool | None

    @property
    def verdict(self) -> str:
        """The word for the table."""
        return {True: "reached", False: "**missed**", None: "not measured"}[self.reached]


@dataclass
class Section:
    """One section of the page: paragraphs, tables and targets in order.

    Attributes:
        title: Its heading.
        parts: Paragraphs and tables.
        targets: Goals with what was measured.
    """

    title: str
    parts: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Append a paragraph or table."""
        self.parts.append(text.strip("\n"))

    def text(self) -> str:
        """The section as Markdown."""
        parts = [f"## {self.title}", *self.parts]
        if self.targets:
            parts.append(target_table(self.targets))
        return "\n\n".join(parts) + "\n"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns: the first one left, the others right.

    >>> print(table(["a", "b"], [["x", 1], ["long", 22]]))
    | a    |  b |
    |:-----|---:|
    | x    |  1 |
    | long | 22 |
    """
    cells = [[str(c) for c in row] for row in [headers, *rows]]
    widths = [max(2, *(len(row[i]) for row in cells)) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [":" + "-" * (w + 1) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), "|" + "|".join(rule) + "|", *map(line, cells[1:])])


def target_table(targets: Sequence[Target]) -> str:
    """Targets with what was measured."""
    return table(["target", "measured", ""], [[t.name, t.measured, t.verdict] for t in targets])


def milliseconds(seconds: float) -> str:
    """Three significant digits of a time in milliseconds.

    >>> milliseconds(0.0123456), milliseconds(1.23456)
    ('12.3', '1235')
    """
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def finite(value: float) -> float | None:
    """A number as JSON can hold it: None for infinity and NaN."""
    return value if math.isfinite(value) else None


def quantiles(values: Sequence[float | None]) -> list[float]:
    """Median, 90 % and most; None stands for infinity.

    Each is one of the values, the next one above: infinity has no mean.

    >>> quantiles([1.0, 2.0, 4.0, None])
    [4.0, inf, inf]
    """
    found = [math.inf if v is None else v for v in values]
    return [float(q) for q in np.quantile(found, [0.5, 0.9, 1.0], method="higher")]


def at_most(values: Sequence[float], goal: float) -> bool | None:
    """Whether the median of repeated values is at most a goal; None where noise decides that.

    Noise decides where the values lie on both sides of the goal and further apart than the median
    is from zero: a difference of two times that is lost in their noise.

    >>> at_most([1.9, 2.1, 2.0], 5), at_most([-4.0, 2.0, 6.0], 5), at_most([5.5, 6.0], 5)
    (True, None, False)
    """
    middle, low, high = median(values), min(values), max(values)
    if low <= goal < high and high - low > abs(middle):
        return None
    return middle <= goal


def at_least(values: Sequence[float], goal: float) -> bool | None:
    """Whether the median is at least a goal; None where noise decides that.

    >>> at_least([0.2, -0.1, 0.3], 0), at_least([1.2, 1.1], 1)
    (None, True)
    """
    return at_most([-v for v in values], -goal)


def say(text: str) -> None:
    """A line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def machine(command: str) -> str:
    """What the figures were measured on, as a Markdown list."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("lipscope", "torch", "scipy", "numpy", "transformers")
    )
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "?"
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return "\n".join(
        [
            f"- Command: `{command}`, {date}",
            f"- Processor: {_processor()}, {os.cpu_count()} cores; {_memory()}",
            f"- System: {platform.system()} {platform.machine()}, Python "
            f"{platform.python_version()}; load average before the run: {load}",
            f"- Versions: {versions} ({blas})",
        ]
    )


def commit() -> str | None:
    """The commit of this tree; None if a file differs from it, or if there is none.

    The pages and the numbers behind them do not count: a run of several sections writes them.
    """
    own = [f":(exclude){path.relative_to(ROOT)}" for path in (PAGE, TABLES, STORE)]
    words = ["status", "--porcelain", "-uno", "--", ".", *own]
    changed, at = _git(*words), _git("rev-parse", "--short=12", "HEAD")
    return at if changed == "" else None


def _git(*words: str) -> str | None:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if run.returncode else run.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "memory unknown"
    return f"{size / 2**30:.0f} GiB of memory"
