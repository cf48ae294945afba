"""Every measurement of a report once, with the setting and the kind of input it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from typing import Any

from lipscope.pages import table
from lipscope.pages.runs import folder_names, labels, text_of
from lipscope.records import Measurement, Run, given

REAL = "real"
SETTING = (*table.SETTING, "text")


@dataclass(frozen=True)
class Item:
    """A measurement with the setting and the kind of input that it belongs to.

    Attributes:
        row: The measurement.
        setting: Model (with what tells it from others of its name), map, metric, move, read, text.
        kind: `REAL`, or what built the input.
        run: The folder that holds it.
        source: Name of the folder, where several have rows of one curve; else None.
    """

    row: Measurement
    setting: tuple[str, ...]
    kind: str
    run: Run
    source: str | None = None

    @property
    def curve(self) -> tuple[Any, ...]:
        """What the items of one growth curve have in common."""
        return self.setting, self.kind, self.source, self.row.layer, self.row.head


def items_of(runs: Sequence[Run]) -> list[Item]:
    """Every row once. Models, texts, inputs and folders are told apart: no curve has rows of two.

    Args:
        runs: The folders.

    Returns:
        Items; those of a row that stands in several folders once.
    """
    found: dict[str, tuple[Run, Measurement]] = {}
    for run in runs:
        for row in run.measurements():
            found.setdefault(row.id, (run, row))
    names = _names(row for _, row in found.values())
    texts = labels((str(run.path), text_of(run, row.text)) for run, row in found.values())
    items = [
        Item(
            row,
            (
                names[_version(row)],
                *(row.map, row.metric, row.move, row.read),
                texts[str(run.path), text_of(run, row.text)],
            ),
            REAL if given(row) else row.input,
            run,
        )
        for run, row in found.values()
    ]
    return _by_folder(_by_radius(items))


def _by_radius(items: Sequence[Item]) -> list[Item]:
    """Built inputs with the radius in their name, where one was built at several."""
    seen = Counter((i.curve, str(i.run.path), i.row.num_tokens, i.row.sample) for i in items)
    several = {(key[0][:2], key[1]) for key, count in seen.items() if count > 1}
    return [
        replace(i, kind=f"{i.kind}, radius {i.row.radius_max:.3g}")
        if i.kind != REAL and i.row.radius_max and (i.curve[:2], str(i.run.path)) in several
        else i
        for i in items
    ]


def _by_folder(items: Sequence[Item]) -> list[Item]:
    """Items with the name of their folder, where several folders have rows of one curve."""
    folders: dict[tuple[Any, ...], set[str]] = {}
    for item in items:
        folders.setdefault(item.curve, set()).add(str(item.run.path))
    mixed = {(*c[:2], c[-1] is None) for c, some in folders.items() if len(some) > 1}
    names = folder_names(item.run for item in items)
    return [
        replace(i, source=names[str(i.run.path)])
        if (*i.curve[:2], i.row.head is None) in mixed
        else i
        for i in items
    ]


def by_setting(items: Iterable[Item]) -> dict[tuple[str, ...], list[Item]]:
    """Items of one setting together, settings in their order of appearance."""
    found: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        found.setdefault(item.setting, []).append(item)
    return found


def _names(rows: Iterable[Measurement]) -> dict[tuple[Any, ...], str]:
    """Names of models, with what tells apart those that share one."""
    versions: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for key in dict.fromkeys(map(_version, rows)):
        versions.setdefault(key[0], {})[key] = _words(*key[1:])
    names: dict[tuple[Any, ...], str] = {}
    for model, ways in versions.items():
        varied = [len(set(words)) > 1 for words in zip(*ways.values(), strict=True)]
        for key, words in ways.items():
            names[key] = " · ".join([model, *filter(None, compress(words, varied))])
    return names


_version = attrgetter(
    "model", "step", "revision", "weights", "side", "position_offset", "dtype", "seed"
)


def _words(
    step: int | None,
    revision: str | None,
    weights: str,
    side: str,
    position_offset: int,
    dtype: str,
    seed: int,
) -> list[str]:
    return [
        "" if step is None else f"step {step}",
        revision or "",
        weights,
        "" if side == "self" else f"side {side}",
        f"positions from {position_offset}" if position_offset else "",
        dtype,
        f"seed {seed}",
    ]
