"""Pushes of a layer's input: what run folders hold of them, in words, curves and numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lipscope import records
from lipscope.charts import CERTIFIED, PROMISE
from lipscope.pages.points import folder_names
from lipscope.pages.table import number

Records = list[dict[str, Any]]
_OF = {"+v": "+v", "-v": "−v", "+top": "+top token", "-top": "−top token"}
_SPOKEN = _OF | {"+patches": "+v, patches alone", "-patches": "−v, patches alone"}
# Each curve of the chart: along which direction, and which value of its steps.
_CURVES = {
    PROMISE: ("+v", "promise"),
    CERTIFIED: ("+v", "certificate"),
    "block, along +v": ("+v", "block"),
    "model, along +v": ("+v", "model"),
    **{f"map, along {of}": (direction, "layer") for direction, of in _OF.items()},
}
_LONGEST = 60  # letters of a name of a text or a class


@dataclass(frozen=True)
class Push:
    """One push: a row's map, its directions and their sizes."""

    row: records.Measurement  # sigma of the map
    place: records.PushPlace  # what there was before
    directions: Sequence[records.PushDirection]  # every direction
    steps: Sequence[records.PushStep]  # every size of every direction
    folder: str = ""  # name of its folder, where there are several

    @property
    def name(self) -> str:
        """What tells it from others."""
        row = self.row
        layer = "" if row.layer is None else f", layer {row.layer}"
        where = f", folder {self.folder}" if self.folder else ""
        about = f"{row.num_tokens} tokens, window {row.sample}{where}"
        return f"{row.model}{layer}, map {row.map}, {about}"

    def along(self, direction: str) -> list[records.PushStep]:
        """The steps of one direction."""
        return [one for one in self.steps if one.direction == direction]

    @property
    def curves(self) -> Records:
        """What the chart draws: each curve's points."""
        promise = {one.eps: one.promise for one in self.along("+v")}
        found: Records = [
            {"curve": curve, "eps": one.eps, "value": getattr(one, value)}
            for curve, (direction, value) in _CURVES.items()
            for one in self.along(direction)
        ]
        for eps, drawn in self.random.items():
            ends = {"low": min(drawn), "high": max(drawn)}
            curve = "map, random (mean, range)"
            found.append({"curve": curve, "eps": eps, "value": fmean(drawn)} | ends)
        by = {"value", "low", "high"}
        return [
            one
            | {"change": one["value"]}
            | {name: one[name] / promise[one["eps"]] for name in by & one.keys()}
            for one in found
            if one["value"] is not None and promise[one["eps"]]
        ]

    @property
    def random(self) -> dict[float, list[float]]:
        """By size, the change of the layer along every random direction."""
        found: dict[float, list[float]] = {}
        for one in self.steps:
            if one.direction not in _SPOKEN and one.layer is not None:
                found.setdefault(one.eps, []).append(one.layer)
        return found

    @property
    def sizes(self) -> Records:
        """Sizes that the chart marks: where the promise ends, where something flips."""
        marks = {
            "1 % off sigma · size": self._first("leaves_1"),
            "10 % off": self._first("leaves_10"),
            f"{self.place.reading} flips": self._first("flip"),
            "decision changes": self._first("decision_flip"),
            "decision certified": self.place.radius,
        }
        return [{"eps": eps, "name": name} for name, eps in marks.items() if eps]

    def _first(self, what: str) -> float | None:
        """The smaller size of the two signs of v."""
        some = [getattr(d, what) for d in self.directions if d.direction in ("+v", "-v")]
        return min((one for one in some if one is not None), default=None)

    # --- in words

    @property
    def said(self) -> list[str]:
        """What the push shows, a sentence each."""
        said = [*self._promise(), *self._flips(), *self._decision()]
        return said + ([f"Note: {self.place.note}."] if self.place.note else [])

    def size(self, eps: float) -> str:
        """A size, absolute and by the mean norm of a token."""
        return f"{number(eps, 3)} ({number(eps / self.place.mean_norm, 3)} mean token norms)"

    def _promise(self) -> Iterator[str]:
        first, tenth = (self._first(name) for name in ("leaves_1", "leaves_10"))
        steps = self.along("+v")
        last = f"the largest size, {self.size(steps[-1].eps)}"
        one, ten = (f"up to {self.size(e) if e else last}" for e in (first, tenth))
        yield (
            f"Along ±v the map's output changes by sigma · size to 1 % {one}, and to 10 % {ten}."
            if first != tenth
            else f"Along ±v the map's output changes by sigma · size to 1 % {one}."
        )
        sure = [s for s in steps if s.certificate is not None]
        if sure and sure[0].promise:
            ends = [(s.certificate or 0.0) / s.promise for s in (sure[0], sure[-1])]
            yield (
                "Certified for every move: at most "
                f"{number(ends[0], 3)} times sigma · size at the smallest size, "
                f"{number(ends[1], 3)} times at the largest."
            )
        if drawn := self.random:
            eps = min(drawn)
            share = fmean(drawn[eps]) / (eps * (self.row.sigma or 1.0))
            yield (
                f"A random direction of the smallest size changes it {number(share, 2)} "
                f"times as much as v ({len(drawn[eps])} draw{'s' * (len(drawn[eps]) > 1)})."
            )

    def _flips(self) -> Iterator[str]:
        place = self.place
        reads = json.loads(place.reads)
        if not place.reading or not reads:
            return
        (name, value), kind = reads[0], "probability" if place.reading == records.NEXT else "cosine"
        yield f"At X the {place.reading} is {quoted(name)} ({kind} {number(value, 3)})."
        stays = []
        for one in self.directions:
            if one.flip is None:
                stays.append(spoken(one.direction))
                continue
            back = f", and is back at {number(one.flips_back, 3)}" if one.flips_back else ""
            yield (
                f"{spoken(one.direction).capitalize()} it becomes {quoted(one.flip_to or '')} at "
                f"size {self.size(one.flip)}{back}."
            )
        if stays:
            most = self.size(self.directions[0].most)
            yield f"No flip up to {most}: {', '.join(stays)}."

    def _decision(self) -> Iterator[str]:
        place = self.place
        if place.decision is None:
            return
        flips = [d.decision_flip for d in self.directions if d.decision_flip is not None]
        sure = (
            "no radius is proved"
            if place.radius is None
            else f"certified up to {self.size(place.radius)} for every move"
        )
        change = (
            f"the first of these directions changes it at {self.size(min(flips))}"
            if flips
            else "none of these directions changes it"
        )
        what = f"{quoted(place.decision)} ({place.decided_by})"
        yield f"The layer's decision, {what}: {sure}; {change}."

    def as_plain(self) -> dict[str, Any]:
        """The push as the scripts of the page read it."""
        return {
            "name": self.name,
            "reading": self.place.reading,
            "mean": self.place.mean_norm,
            "reads": json.loads(self.place.reads),
            "decision": self.place.decision,
            "said": self.said,
            "curves": self.curves,
            "sizes": self.sizes,
            "directions": [
                {
                    "name": spoken(one.direction),
                    "pixels": one.pixels and json.loads(one.pixels),
                    "steps": [
                        {name: getattr(step, name) for name in _SHOWN}
                        | {"reads": json.loads(step.reads)}
                        for step in self.along(one.direction)
                    ],
                }
                for one in self.directions
            ],
        }


_SHOWN = ("eps", "relative", "promise", "certificate", "layer", "block", "model", "decision")


def spoken(direction: str) -> str:
    """A direction in words."""
    return f"along {_SPOKEN.get(direction, direction)}"


def quoted(text: str) -> str:
    """A name in quotes, cut."""
    return f"“{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}”"


def pushes_of(runs: Sequence[records.Run]) -> list[Push]:
    """The pushes that run folders hold; what is not whole yet is left out."""
    names = folder_names(runs) if len(runs) > 1 else {}
    return [push for run in runs for push in _of_run(run, names.get(str(run.path), ""))]


def _of_run(run: records.Run, folder: str) -> list[Push]:
    places = [records.PushPlace(**one) for one in run.contents(records.PLACES).values()]
    if not places:
        return []
    directions = [records.PushDirection(**one) for one in run.contents(records.DIRECTIONS).values()]
    steps = [records.PushStep(**one) for one in run.contents(records.STEPS).values()]
    return pushes_in(run.measurements(), places, directions, steps, folder)


def pushes_in(
    rows: Iterable[records.Measurement],
    places: Sequence[records.PushPlace],
    directions: Sequence[records.PushDirection],
    steps: Sequence[records.PushStep],
    folder: str = "",
) -> list[Push]:
    """Records as pushes; directions that are not whole yet are left out."""
    held, found = {row.id: row for row in rows}, []
    for place in places:
        mine = [one for one in directions if one.push == place.push]
        whole = {one.direction for one in mine}
        taken = [one for one in steps if one.push == place.push and one.direction in whole]
        if place.id in held and "+v" in whole:
            found.append(Push(held[place.id], place, mine, taken, folder))
    return found
