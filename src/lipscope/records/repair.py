"""A run folder put in order before a run goes on: what cannot be believed is set aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipscope.errors import InputError, remark
from lipscope.records.jsonl import objects
from lipscope.records.stored import BESIDE, Mark, Stored

_SAME = 1 + 1e-6  # two processes round differently


def repaired(folder: Path, tables: Sequence[Stored], marks: Mapping[str, Mark]) -> set[str]:
    """Put the files of a run in order, and say in a line what was wrong.

    Args:
        folder: The run folder, held by this process.
        tables: Its tables.
        marks: How far their copies go.

    Returns:
        Ids of rows whose side tables are not all there.

    Raises:
        InputError: If a file cannot be read or written.
    """
    rows, *sides, _ = tables
    try:
        aside = {one.lines.name: one.repair(marks.get(one.name)) for one in tables}
        if all(one.as_marked(marks.get(one.name)) for one in tables):
            return set()
        aside[rows.lines.name] += _contradictions(rows, [*rows.told()])
        back = _brought_back(tables, marks)
        told = [*rows.told()]
    except OSError as problem:
        raise InputError(
            f"`{folder}` should hold files that can be read and written. Found: {problem}; "
            "choose another `--out`."
        ) from problem
    incomplete = _incomplete(told, sides, marks)
    said = [f"{count} damaged in `{name}`" for name, count in aside.items() if count]
    parts = [f"lines set aside in `.damaged` files: {', '.join(said)}"] * bool(said)
    every, beside = ", ".join(one.name for one in tables), ", ".join(BESIDE)
    parts += [f"brought back from Parquet: {back} of {every}"] * bool(back)
    parts += [f"rows without all of their {beside}: {len(incomplete)}"] * bool(incomplete)
    if parts:
        remark(f"`{folder}`: {'; '.join(parts)}. What is missing is measured again.")
    return incomplete


def _contradictions(rows: Stored, told: Sequence[Mapping[str, Any]]) -> int:
    """Set aside lines that stand twice, and all lines of a row whose intervals exclude each other.

    A row that is measured anew, or with more besides, has a later line of its own.
    """
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for one in told:
        id, sigma, upper = (one.get(name) for name in ("id", "sigma", "upper"))
        if isinstance(id, str) and isinstance(sigma, float) and isinstance(upper, float):
            low[id] = max(low.get(id, sigma), sigma)
            high[id] = min(high.get(id, upper), upper)
    against = {id for id in low if low[id] > high[id] * _SAME}
    lines = Counter(repr(one) for one in told)
    if not against and all(count == 1 for count in lines.values()):
        return 0
    seen: set[bytes] = set()

    def unwanted(line: bytes) -> bool:
        ((_, values),) = objects(line)
        twice = line in seen
        seen.add(line)
        return twice or values.get("id") in against

    return rows.set_aside(unwanted)


def _brought_back(tables: Sequence[Stored], marks: Mapping[str, Mark]) -> int:
    """Write anew the lines of records that only Parquet still has."""
    rows, *sides = tables
    count = sum(one.restore(marks.get(one.name), None) for one in sides)
    beside = _counts(sides[:-1], marks)
    return count if beside is None else count + rows.restore(marks.get("rows"), beside)


def _counts(
    sides: Sequence[Stored], marks: Mapping[str, Mark]
) -> Callable[[Mapping[str, Any]], dict[str, int]] | None:
    """How many lines of each side table belonged to a row, if that is still known."""
    found = []
    for side in sides:
        mark = marks.get(side.name)
        copy = side.copied(mark)
        if mark is None or (mark.bytes and copy is None):
            return None
        found.append({} if copy is None else dict(copy.group_by("id").len().iter_rows()))
    return lambda row: {
        name: counts.get(row["id"], 0) for name, counts in zip(BESIDE, found, strict=True)
    }


def _incomplete(
    told: Sequence[Mapping[str, Any]], sides: Sequence[Stored], marks: Mapping[str, Mark]
) -> set[str]:
    """Ids of rows that once had more beside them than is there."""
    missing: set[str] = set()
    for side in sides:
        wanted = dict(_most(told, side.name))
        if wanted:
            frame = side.read(marks.get(side.name))
            held = dict(frame.group_by("id").len().iter_rows())
            missing |= {id for id, count in wanted.items() if held.get(id, 0) < count}
    return missing


def _most(told: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, int]]:
    most: dict[str, int] = {}
    for one in told:
        id, count = one.get("id"), one.get(name)
        if isinstance(id, str) and type(count) is int and count > most.get(id, 0):
            most[id] = count
    yield from most.items()
