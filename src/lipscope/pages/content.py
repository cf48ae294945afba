"""Runs to the content of a page: everything that its charts, tables and words are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lipscope.errors import InputError
from lipscope.pages.bounded import bounded
from lipscope.pages.cards import Card, cards_of
from lipscope.pages.directions import as_plain, by_rank
from lipscope.pages.items import Item, by_setting, items_of
from lipscope.pages.points import Points, as_columns, points_of
from lipscope.pages.pushed import Push, pushes_of
from lipscope.pages.runs import folder_names
from lipscope.pages.training import Training, training_of
from lipscope.pages.windows import SCALE, Windows, windows_for
from lipscope.records.comparison import comparisons
from lipscope.records.rows import Bound, Direction, Measurement
from lipscope.records.run import Run


@dataclass(frozen=True)
class Content:
    """What a report is about.

    Args:
        runs: The folders.

    Raises:
        InputError: If they hold no row with a finite, positive sigma.
    """

    runs: Sequence[Run]

    def __post_init__(self) -> None:
        if not any(item.row.sigma for item in self.items):
            places = ", ".join(str(run.path) for run in self.runs)
            raise InputError(
                "`DIR` should hold a row with a finite, positive sigma. Found "
                f"{len(self.items)} rows without one in {places}; their `status` says why."
            )

    @cached_property
    def items(self) -> list[Item]:
        """All measurements, each once."""
        return items_of(self.runs)

    @cached_property
    def bounds(self) -> list[Bound]:
        """All bounds, those of a row that stands in several folders once."""
        every = (bound for run in self.runs for bound in run.bound_values())
        return list({(one.id, one.theorem, one.eps): one for one in every}.values())

    @cached_property
    def points(self) -> Points:
        """What the charts draw."""
        return points_of(self.items)

    @cached_property
    def windows(self) -> Windows:
        """Texts that are shown."""
        rows = [item.row for item in self.points.items]
        rows += [line.row for _, line in self.points.lines if line.row is not None]
        return windows_for(self.runs, self.points.items, rows)

    @cached_property
    def directions(self) -> dict[int, list[dict[str, Any]]]:
        """The leading directions of the measurements that are carried one by one, by place."""
        ids = [item.row.id for item in self.points.items]
        parts: dict[str, dict[int, list[Direction]]] = {}
        for run in self.runs:
            parts = by_rank(run.direction_parts(ids)) | parts
        return {k: as_plain(parts[id]) for k, id in enumerate(ids) if id in parts}

    @cached_property
    def cards(self) -> list[Card]:
        """What is said of every curve on real inputs."""
        return cards_of(self.points, self.windows.tops)

    @cached_property
    def bounded(self) -> list[dict[str, Any]]:
        """Bounds by setting, folder, layer and metric."""
        settings = {item.row.id: item.setting for item in self.items}
        index = {setting: s for s, setting in enumerate(by_setting(self.items))}
        names, found = folder_names(self.runs), []
        for run in {str(run.path): run for run in self.runs}.values():
            bounds = list(run.bound_values())
            parts: dict[tuple[str, ...], list[Measurement]] = {}
            for row in run.measurements() if bounds else ():
                parts.setdefault(settings[row.id], []).append(row)
            place = names[str(run.path)]
            found += [
                {"s": index[setting], "folder": place} | record
                for setting, rows in parts.items()
                for record in bounded(comparisons(rows, bounds))
            ]
        return found

    @cached_property
    def pushes(self) -> list[Push]:
        """Pushes of layers' inputs."""
        return pushes_of(self.runs)

    @cached_property
    def training(self) -> Training:
        """Checkpoints of one model."""
        return training_of(self.items, self.points.settings)

    @cached_property
    def layers(self) -> list[str]:
        """All layers of all models, in their order."""
        labels = {label for setting in self.points.settings for label in setting["layers"]}
        numbers = sorted((x for x in labels if x != "model"), key=int)
        return [*numbers, *(["model"] if "model" in labels else [])]

    @property
    def title(self) -> str:
        """The models, as far as a title has room."""
        models = list(dict.fromkeys(item.row.model for item in self.items))
        shown = ", ".join(models[:3])
        return f"{shown} and {len(models) - 3} more" if len(models) > 3 else shown

    def as_plain(self) -> dict[str, Any]:
        """The content as the scripts of the page read it."""
        points, windows = self.points, self.windows
        training = self.training
        remarks = [*points.remarks, *filter(None, [windows.remark, training.remark])]
        groups = {s: training.group_of(s) for s in range(len(points.settings))}
        return {
            "settings": [one | {"group": groups[s]} for s, one in enumerate(points.settings)],
            "groups": training.groups,
            "steps": as_columns(training.means),
            "layers": self.layers,
            "points": as_columns(points.points),
            "means": as_columns(points.means),
            "fits": points.fits,
            "texts": windows.texts,
            "windows": windows.windows,
            "excerpts": windows.excerpts,
            "begins": windows.begins,
            "directions": self.directions,
            "tops": [windows.tops.get(item.row.id) for item in points.items],
            "cards": [one.as_plain() for one in self.cards],
            "scale": SCALE,
            "bounds": self.bounded,
            "pushes": [one.as_plain() for one in self.pushes],
            "remarks": remarks,
        }
