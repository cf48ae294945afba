"""Leading directions and pushes of a layer's input, in sentences and as data of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lipscope.charts import CERTIFIED, PROMISE, visible
from lipscope.display import Rounding, Sheet, printable, rounded_down, rounded_up
from lipscope.pages.points import folder_names
from lipscope.pages.table import interval, number, percent
from lipscope.records import (
    DIRECTIONS,
    NEXT,
    PLACES,
    STEPS,
    Direction,
    Measurement,
    PushDirection,
    PushPlace,
    PushStep,
    Run,
)

Records = list[dict[str, Any]]

SPACES = {
    "vocabulary": "tokens that could stand in its place: the move that each would make",
    "read-out": "the model's own logits: the gradient of each word's, less the mean of all",
    "window": "the other tokens or patches of this input: the step towards each",
}
SIDES = {"right": "moves", "left": "answers"}
NOTHING = "reads as nothing"
READING = (
    "Along and against: readings of the largest and the smallest cosine with the vector at this "
    "token; with both signs changed in all tokens, it is the same direction. Nearest: the largest "
    "cosine. Spanned: how much of its squared norm the ten nearest readings span. In brackets, the "
    "largest of 99 random directions; what is no nearer reads as nothing, and a random direction "
    "is nearer once in a hundred times."
)
_WORDS = 4  # of each sign in a table
_HEADS = 3


def by_rank(parts: Iterable[Direction]) -> dict[str, dict[int, list[Direction]]]:
    """Parts by row and rank, the largest shares first."""
    found: dict[str, dict[int, list[Direction]]] = {}
    for one in sorted(parts, key=lambda p: (p.rank, -p.share)):
        found.setdefault(one.id, {}).setdefault(one.rank, []).append(one)
    return found


def direction_heading(part: Direction) -> str:
    """Heading of a direction: its interval, and how well its vector is determined."""
    heading = f"direction {part.rank}: sigma in {interval(part.sigma, part.upper)}; "
    if part.sine is None:
        return heading + "its interval meets a neighbour's: the vector is not determined"
    angle = f"sine of the angle to the singular vector at most {rounded_up(part.sine, 2):.2g}"
    return heading + (f"{angle}" if part.determined else f"the vector is not determined ({angle})")


def directions_shown(rows: Iterable[Measurement], parts: Iterable[Direction]) -> Sheet:
    """Every direction of every row: a line for each token that was read, then the heads."""
    parts, shown = list(parts), []
    found = by_rank(parts)
    for row in rows:
        place = f"{row.model}, " + ("" if row.layer is None else f"layer {row.layer}, ")
        place += f"map {row.map}, {row.num_tokens} tokens, "
        for some in found.get(row.id, {}).values():
            shown += [place + direction_heading(some[0]), _direction_table(some)]
            notes = [_largest_heads([one for one in some if one.side == "head"]), turning(some)]
            shown.append("".join(f"  {one}\n" for one in notes if one))
    if not shown:
        return Sheet("No directions: sigma is zero here, or not finite.")
    read = {one.space for one in parts if one.space}
    spaces = [f"{name}: {about}." for name, about in SPACES.items() if name in read]
    return Sheet(*shown, " ".join([READING, "Read in", *spaces]))


def top_direction(
    rows: Iterable[Measurement], parts: Sequence[Direction]
) -> tuple[Table | str, ...]:
    """The top direction of the row of largest sigma, and a reference to the others."""
    found = by_rank(parts)
    with_directions = [row for row in rows if row.id in found]
    if not with_directions:
        return ()
    row = max(with_directions, key=lambda row: row.sigma or 0.0)
    top = min(found[row.id])
    shown = directions_shown([row], found[row.id][top]).parts[:-1]
    count = sum(map(len, found.values()))
    more = f"`.directions_table()` shows all {count} directions and how to read them."
    return (*shown, more)


def _direction_table(parts: Sequence[Direction]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "token", "share", "along", "against", "nearest", "spanned", "read in"):
        right = name in ("share", "nearest", "spanned")
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=right)
    for side, verb in SIDES.items():
        for one in (part for part in parts if part.side == side):
            name = f"{_unmarked(one.text)} ({one.index})"
            cells = (verb, name, percent(one.share), *_along_against(one))
            near = _with_chance(one.cosine, one.chance_cosine)
            spanned = _with_chance(one.spanned, one.chance_spanned)
            cells = (*cells, near, spanned, one.space or "–")
            table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _unmarked(word: str) -> str:
    """A word without the marks of its tokenizer, its place after it where it has one.

    >>> _unmarked("Ġthe (3)"), _unmarked("  (12)"), _unmarked("(any other)")
    ('the (3)', '␣ (12)', '(any other)')
    """
    place = "".join(re.findall(r" \(\d+\)\Z", word))
    return visible(word.removesuffix(place)) + place


def _along_against(one: Direction) -> tuple[str, str]:
    if one.reads is False:
        return NOTHING, ""
    along, against = (
        " · ".join(_unmarked(word) for word, _ in one.words(sign)[:_WORDS])
        for sign in ("plus", "minus")
    )
    return along or "–", against or "–"


def _with_chance(value: float | None, chance: float | None) -> str:
    return "–" if value is None or chance is None else f"{value:.2f} ({chance:.2f})"


def _largest_heads(parts: Sequence[Direction]) -> str:
    """The heads with the largest parts in the answer."""
    if not parts:
        return ""
    best = sorted(parts, key=lambda one: -abs(one.share))[:_HEADS]
    rest = sum(one.share for one in parts) - sum(one.share for one in best)
    others = f", the others {percent(rest)}" if len(parts) > len(best) else ""
    return ", ".join(f"{one.text} {percent(one.share)}" for one in best) + others + " of the answer"


def turning(parts: Iterable[Direction]) -> str:
    """A sentence on the texts towards which the move turns the output; "" without texts."""
    texts = [one for one in parts if one.side == "text"]
    some = sorted((one for one in texts if one.reads), key=lambda one: -one.share)
    if not texts:
        return ""
    if not some:
        return "along v, the model's output turns towards or away from no text by more than chance"
    phrases = [
        f"{way} {', '.join(f'“{one.text}” ({_with_sign(one.share)})' for one in found[:_WORDS])}"
        for way, found in (
            ("towards", [one for one in some if one.share > 0]),
            ("away from", [one for one in some[::-1] if one.share < 0]),
        )
        if found
    ]
    return f"along v, the model's output turns {', '.join(phrases)}: cosine for each unit of size"


def _with_sign(value: float) -> str:
    return f"{value:+.2g}".replace("-", "−")


def directions_in_words(parts: Iterable[Direction]) -> list[dict[str, Any]]:
    """The directions of one row as the scripts of the page read them."""
    return [
        {
            "rank": rank,
            "said": direction_heading(parts[0]),
            "turns": turning(parts),
            "tokens": [_token_record(one) for one in parts if one.side in SIDES],
            "heads": [
                [one.index, float(f"{one.share:.4g}")] for one in parts if one.side == "head"
            ],
        }
        for ranks in by_rank(parts).values()
        for rank, parts in ranks.items()
    ]


def _token_record(one: Direction) -> dict[str, Any]:
    numbers = ("share", "cosine", "spanned", "chance_cosine", "chance_spanned")
    values = {name: getattr(one, name) for name in numbers}
    words = {
        sign: [[_unmarked(word), cosine] for word, cosine in one.words(sign)]
        for sign in ("plus", "minus")
    }
    return {
        "side": one.side,
        "index": one.index,
        "text": _unmarked(one.text),
        "space": one.space,
        "reads": one.reads,
        **{k: None if v is None else float(f"{v:.4g}") for k, v in values.items()},
        **words,
    }


# --- pushes -----------------------------------------------------------------------------------

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

    row: Measurement  # sigma of the map
    place: PushPlace  # what there was before
    directions: Sequence[PushDirection]  # every direction
    steps: Sequence[PushStep]  # every size of every direction
    folder: str = ""  # name of its folder, where there are several

    @property
    def name(self) -> str:
        """A name that distinguishes it from others."""
        row = self.row
        layer = "" if row.layer is None else f", layer {row.layer}"
        where = f", folder {self.folder}" if self.folder else ""
        about = f"{row.num_tokens} tokens, window {row.sample}{where}"
        return f"{row.model}{layer}, map {row.map}, {about}"

    def along(self, direction: str) -> list[PushStep]:
        """The steps of one direction."""
        return [one for one in self.steps if one.direction == direction]

    @property
    def curves(self) -> Records:
        """The points of each curve of the chart."""
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
        """Sizes that the chart marks: the end of the linear range, and flips."""
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
    def sentences(self) -> list[str]:
        """The results of the push, one sentence each."""
        lines = [*self._promise(), *self._largest(), *self._flips(), *self._decision()]
        return lines + ([f"Note: {self.place.note}."] if self.place.note else [])

    def size(self, eps: float, rounded: Rounding | None = None) -> str:
        """A size, absolute and by the mean norm of a token."""
        share = number(eps / self.place.mean_norm, 3, rounded)
        return f"{number(eps, 3, rounded)} ({share} mean token norms)"

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
                f"{number(ends[0], 3, rounded_up)} times sigma · size at the smallest size, "
                f"{number(ends[1], 3, rounded_up)} times at the largest."
            )
        if drawn := self.random:
            eps = min(drawn)
            share = fmean(drawn[eps]) / (eps * (self.row.sigma or 1.0))
            yield (
                f"A random direction of the smallest size changes it {number(share, 2)} "
                f"times as much as v ({len(drawn[eps])} draw{'s' * (len(drawn[eps]) > 1)})."
            )

    def _largest(self) -> Iterator[str]:
        """Changes along ±v that are largest, by more than 1 %, before the largest size."""
        for what in ("map", "block", "model"):
            value = attrgetter("layer" if what == "map" else what)
            along = [s for sign in ("+v", "-v") for s in self.along(sign) if value(s) is not None]
            top = max(along, key=value, default=None)
            last = 0.0 if top is None else value(self.along(top.direction)[-1]) or 0.0
            if top is not None and value(top) > 1.01 * last:
                yield (
                    f"The {what}'s output changes most, by {number(value(top), 3)}, "
                    f"{phrase(top.direction)} at {self.size(top.eps)}; at the largest size by "
                    f"{number(last, 3)}."
                )

    def _flips(self) -> Iterator[str]:
        place = self.place
        reads = json.loads(place.reads)
        if not place.reading or not reads:
            return
        (name, value), kind = reads[0], "probability" if place.reading == NEXT else "cosine"
        yield f"At X the {place.reading} is {quoted(name)} ({kind} {number(value, 3)})."
        stays = []
        for one in self.directions:
            if one.flip is None:
                stays.append(phrase(one.direction))
                continue
            back = f", and is back at {number(one.flips_back, 3)}" if one.flips_back else ""
            yield (
                f"{phrase(one.direction).capitalize()} it becomes {quoted(one.flip_to or '')} at "
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
            else f"certified up to {self.size(place.radius, rounded_down)} for every move"
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
            "said": self.sentences,
            "curves": self.curves,
            "sizes": self.sizes,
            "directions": [
                {
                    "name": phrase(one.direction),
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


def phrase(direction: str) -> str:
    """A direction in words."""
    return f"along {_SPOKEN.get(direction, direction)}"


def quoted(text: str) -> str:
    """A name in quotes, cut."""
    return f"“{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}”"


def pushes_of(runs: Sequence[Run]) -> list[Push]:
    """The pushes of run folders, without incomplete ones."""
    names = folder_names(runs) if len(runs) > 1 else {}
    return [push for run in runs for push in _of_run(run, names.get(str(run.path), ""))]


def _of_run(run: Run, folder: str) -> list[Push]:
    places = [PushPlace(**one) for one in run.contents(PLACES).values()]
    if not places:
        return []
    directions = [PushDirection(**one) for one in run.contents(DIRECTIONS).values()]
    steps = [PushStep(**one) for one in run.contents(STEPS).values()]
    return pushes_in(run.measurements(), places, directions, steps, folder)


def pushes_in(
    rows: Iterable[Measurement],
    places: Sequence[PushPlace],
    directions: Sequence[PushDirection],
    steps: Sequence[PushStep],
    folder: str = "",
) -> list[Push]:
    """Records as pushes, without incomplete directions."""
    rows_by_id, found = {row.id: row for row in rows}, []
    for place in places:
        own_directions = [one for one in directions if one.push == place.push]
        whole = {one.direction for one in own_directions}
        taken = [one for one in steps if one.push == place.push and one.direction in whole]
        if place.id in rows_by_id and "+v" in whole:
            found.append(Push(rows_by_id[place.id], place, own_directions, taken, folder))
    return found
