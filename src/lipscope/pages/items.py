"""Every measurement of a report once, with the setting and the kind of input it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

from lipscope.records.comparison import given
from lipscope.records.rows import Measurement
from lipscope.records.run import Run

REAL = "real"


@dataclass(frozen=True)
class Item:
    """A measurement with the setting and the kind of input that it belongs to.

    Attributes:
        row: The measurement.
        setting: Model (with what tells it from others of its name), map, metric, move, read.
        kind: `REAL`, or the name of an adversarial input.
        run: The folder that holds it.
    """

    row: Measurement
    setting: tuple[str, ...]
    kind: str
    run: Run

    @property
    def curve(self) -> tuple[Any, ...]:
        """What the items of one growth curve have in common."""
        return self.setting, self.kind, self.row.layer, self.row.head


def items_of(runs: Sequence[Run]) -> list[Item]:
    """Every row once.

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
    return [_item(run, row, names) for run, row in found.values()]


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


_version = attrgetter("model", "step", "revision", "weights", "text", "side", "dtype", "seed")


def _words(
    step: int | None,
    revision: str | None,
    weights: str,
    text: str | None,
    side: str,
    dtype: str,
    seed: int,
) -> list[str]:
    return [
        "" if step is None else f"step {step}",
        revision or "",
        weights,
        text or "",
        "" if side == "self" else f"side {side}",
        dtype,
        f"seed {seed}",
    ]


def _item(run: Run, row: Measurement, names: Mapping[tuple[Any, ...], str]) -> Item:
    model = names.get(_version(row), row.model)
    kind = REAL if given(row) else row.input
    return Item(row, (model, row.map, row.metric, row.move, row.read), kind, run)
