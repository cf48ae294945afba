"""Content of the HTML report: data of its charts, tables and sentences, from run folders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lipscope.charts import kind_of, spaced
from lipscope.errors import InputError
from lipscope.pages import sections
from lipscope.pages.contrast import Contrast, contrast_of
from lipscope.pages.moves import Push, directions_in_words, pushes_of
from lipscope.pages.points import (
    REAL,
    Item,
    Points,
    Training,
    as_columns,
    compared,
    folder_names,
    items_of,
    label,
    points_of,
    row_record,
    short,
    training_of,
    windows_of,
)
from lipscope.pages.sentences import remarkable, sentences
from lipscope.records import (
    Bound,
    Direction,
    Measurement,
    Run,
    TokenShare,
    comparisons,
    grouped,
    records_of,
)

_SAID = 300  # curves whose sentences a page carries: they are long


def _cards_of(points: Points, tops: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each curve on real inputs at its largest length: its median row, and its sentences.

    ``said`` is None where there are too many curves, ``first`` whether it is the most remarkable
    among comparable curves.
    """
    named = [
        (item, replace(line, token=None if line.row is None else tops.get(line.row.id)))
        for item, line in points.lines
    ]
    beside = grouped(named, lambda one: compared(one[0].curve))
    lines = {key: [line for _, line in some] for key, some in beside.items()}
    best = {key: remarkable(some) for key, some in lines.items()}
    cards = []
    for k, (item, line) in enumerate(named):
        key, row = compared(item.curve), line.row
        first, words = best[key] is line, None
        if k < _SAID or first:
            words = _curve_prefix(points.settings, item) + sentences(lines[key], line)
        card = {"s": item.s, "source": item.source, "layer": label(item.row.layer)}
        card |= {"head": item.row.head, "n": line.num_tokens, "word": line.token}
        card |= {} if row is None else row_record(row)
        cards.append(card | {"said": words, "first": first})
    return cards


def _curve_prefix(settings: Sequence[Mapping[str, Any]], item: Item) -> str:
    """The settings and folder that distinguish a curve from others."""
    model, map_name, *_, text = item.setting
    words = [f"{model}, map {map_name}"] if len(settings) > 1 else []
    words += [text] if len({one["text"] for one in settings}) > 1 else []
    words += [f"folder {item.source}"] if item.source is not None else []
    return ", ".join(filter(None, words)) + ": " * bool(words)


def headlines(cards: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences on the most remarkable curves, one of each setting, layers before heads."""
    first = [card for card in cards if card["first"] and card["said"]]
    found: dict[tuple[Any, ...], str] = {}
    for card in sorted(first, key=lambda card: (card["head"] is not None, card["s"])):
        found.setdefault((card["s"], card["source"]), card["said"])
    return list(found.values())[:4]


_CURVE = ("s", "source", "layer", "head", "n")  # of a mean


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Raises:
        InputError: If they hold no row with a finite, positive sigma, or nothing to compare.
    """

    runs: Sequence[Run]
    compare: bool = False

    def __post_init__(self) -> None:
        if self.compare:
            _ = self.contrast
        if not any(item.row.sigma for item in self.items):
            places = ", ".join(str(run.path) for run in self.runs)
            found = f"{len(self.items)} rows without one in {places}; their `status` says why"
            if not self.items:  # an experiment may hold findings instead of rows
                has_findings = any((run.path / "findings.md").exists() for run in self.runs)
                found = f"no rows in {places}{'; read its `findings.md`' * has_findings}"
            raise InputError(
                f"`DIR` should hold a row with a finite, positive sigma. Found {found}."
            )

    @cached_property
    def items(self) -> list[Item]:
        """All measurements, those of one curve in several folders apart."""
        return items_of(self.runs)

    @cached_property
    def rows(self) -> list[Measurement]:
        """All measurements, each once."""
        return list({item.row.id: item.row for item in self.items}.values())

    @cached_property
    def bounds(self) -> list[Bound]:
        """All bounds, without duplicates of rows in several folders."""
        every = (bound for run in self.runs for bound in run.bound_values())
        return list({(one.id, one.theorem, one.eps): one for one in every}.values())

    @cached_property
    def points(self) -> Points:
        """The data of the charts."""
        return points_of(self.items)

    @cached_property
    def windows(self) -> Windows:
        """The displayed texts."""
        return windows_for(self.runs, self.points.items)

    @cached_property
    def tops(self) -> dict[str, TokenShare]:
        """The top token of every row."""
        return top_tokens(self.runs, (item.row for item in self.items))

    @cached_property
    def words(self) -> dict[str, str]:
        """The top token of every row as text."""
        return {id: spaced([token])[0] for id, token in self.tops.items()}

    @cached_property
    def means(self) -> list[dict[str, Any]]:
        """The means of the curves, with the most frequent kind of top token."""
        kinds = kinds_of(self.items, self.tops)
        found = []
        for mean in self.points.means:
            top, often = kinds.get(tuple(mean[k] for k in _CURVE), (None, None))
            found.append(mean | {"top": top, "often": often})
        return found

    @cached_property
    def contrast(self) -> Contrast:
        """The two folders side by side."""
        return contrast_of(self.runs)

    @cached_property
    def depths(self) -> list[dict[str, Any]]:
        """Sigma through depth."""
        return sections.depths_of(self.items)

    @cached_property
    def gains(self) -> list[dict[str, Any]]:
        """Gains of splitting tokens."""
        return sections.gains_of(self.runs, self._places)

    @cached_property
    def _places(self) -> dict[str, tuple[int, str]]:
        """Index of the setting, and layer, of every row."""
        return {i.row.id: (i.s, label(i.row.layer)) for i in self.items}

    @cached_property
    def directions(self) -> dict[int, list[dict[str, Any]]]:
        """The leading directions of the measurements that are carried one by one, by place."""
        ids = [item.row.id for item in self.points.items]
        parts: dict[str, list[Direction]] = {}
        for run in self.runs:
            parts = grouped(run.direction_parts(ids), lambda one: one.id) | parts
        return {k: directions_in_words(parts[id]) for k, id in enumerate(ids) if id in parts}

    @cached_property
    def cards(self) -> list[dict[str, Any]]:
        """Sentences on every curve on real inputs."""
        return _cards_of(self.points, self.words)

    @cached_property
    def bounded(self) -> list[dict[str, Any]]:
        """Bounds by setting, folder, layer and metric."""
        names, found = folder_names(self.runs), []
        for run in self.runs:
            bounds = list(run.bound_values())
            rows = run.measurements() if bounds else ()
            found += [
                {"s": s, "folder": names[str(run.path)]} | sections.bounds_of(one)
                for s, some in grouped(rows, lambda row: self._places[row.id][0]).items()
                for one in comparisons(some, bounds)
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
    def monitored(self) -> list[dict[str, Any]]:
        """Readings of monitors."""
        return sections.monitored_of(self.runs)

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
        if self.monitored:
            models = [f"{one['name']} during training" for one in self.monitored]
        shown = ", ".join(models[:3])
        return f"{shown} and {len(models) - 3} more" if len(models) > 3 else shown

    def as_plain(self) -> dict[str, Any]:
        """The content as the scripts of the page read it."""
        points, windows = self.points, self.windows
        training = self.training
        remarks = [*points.remarks, *filter(None, [windows.remark, training.remark])]
        groups = {s: g for g, one in enumerate(training.groups) for s in one["settings"]}
        return {
            "settings": [one | {"group": groups.get(s)} for s, one in enumerate(points.settings)],
            "groups": training.groups,
            "steps": as_columns(training.means),
            "layers": self.layers,
            "points": as_columns(points.points),
            "means": as_columns(self.means),
            "fits": points.fits,
            "texts": windows.texts,
            "windows": windows.windows,
            "excerpts": windows.excerpts,
            "begins": windows.begins,
            "directions": self.directions,
            "tops": [self.words.get(item.row.id) for item in points.items],
            "cards": self.cards,
            "scale": SCALE,
            "bounds": self.bounded,
            "pushes": [one.as_plain() for one in self.pushes],
            "contrast": self.contrast.as_plain() if self.compare else None,
            "depths": self.depths,
            "decided": sections.decided_of(self.runs, self._places),
            "edits": sections.edits_of(self.runs, self._places),
            "gains": self.gains,
            "monitored": self.monitored,
            "remarks": remarks,
        }


# --- windows of text: their words, and each token's share of a direction ---------------------

MAX_TOKENS = 50_000
"""Tokens with shares that a page carries."""

MAX_EXCERPTS = 1_500
"""Beginnings of windows that a page carries for its tooltips."""

_BEGINNING = 48  # tokens of an excerpt
_MOST = 8  # tokens of largest share that a page lists
SCALE = 100_000  # shares as whole numbers of hundred-thousandths


@dataclass(frozen=True)
class Windows:
    """Windows and excerpts."""

    texts: list[list[str]]  # the tokens of every distinct window, as shown
    # By place among the carried items: text, shares and norms, the tokens of largest share in and
    # what all others have together
    windows: dict[int, dict[str, Any]]
    excerpts: list[str]  # beginnings of windows
    begins: list[int | None]  # by place among the carried items: its excerpt, or None
    remark: str | None  # what was left out, or None


def windows_for(runs: Sequence[Run], items: Sequence[Item]) -> Windows:
    """Windows of the worst rows first, until the page is full."""
    chosen = _worst_windows(items)
    tokens = windows_of(runs, (items[k].row.id for k in chosen))
    texts: dict[tuple[str, ...], int] = {}
    windows: dict[int, dict[str, Any]] = {}
    for k in chosen:
        if some := tokens.get(items[k].row.id):
            words = texts.setdefault(tuple(spaced(some)), len(texts))
            windows[k] = {"text": words} | window_shares(some)
    excerpts, begins = _excerpts(runs, items)
    real = sum(item.kind == REAL for item in items)
    remark = None
    if len(chosen) < real:
        remark = f"Shaded text is kept for {len(chosen):,} of {real:,} windows, the worst first."
    return Windows([list(words) for words in texts], windows, excerpts, begins, remark)


def _worst_windows(items: Sequence[Item]) -> list[int]:
    """Places of the items whose windows are carried: first of every layer the worst."""
    order = sorted(
        (k for k, item in enumerate(items) if item.kind == REAL and item.row.top_share is not None),
        key=lambda k: -(items[k].row.sigma or 0.0),
    )
    first: dict[tuple[Any, ...], int] = {}
    for k in order:
        if items[k].row.head is None:
            first.setdefault((*items[k].curve, items[k].row.num_tokens), k)
    chosen: list[int] = []
    room = MAX_TOKENS
    for k in dict.fromkeys([*first.values(), *order]):
        if items[k].row.num_tokens <= room:
            room -= items[k].row.num_tokens
            chosen.append(k)
    return chosen


def window_shares(tokens: Sequence[TokenShare]) -> dict[str, Any]:
    """What the scripts read of the tokens of a row: the largest shares, all shares, norms."""
    # From the shares themselves: those of long windows are few hundred-thousandths each.
    moved = [token.share_in or 0.0 for token in tokens]

    def scaled(share: float | None) -> int | None:
        return None if (value := short(share)) is None else round(SCALE * value)

    order = sorted(range(len(moved)), key=lambda k: -moved[k])
    return {
        "most": order[:_MOST],
        "others": short(math.fsum(moved[k] for k in order[_MOST:])),
        "in": [scaled(token.share_in) for token in tokens],
        "out": [scaled(token.share_out) for token in tokens],
        "norm": [None if t.norm is None else float(f"{t.norm:.4g}") for t in tokens],
    }


def _excerpts(runs: Sequence[Run], items: Sequence[Item]) -> tuple[list[str], list[int | None]]:
    """Beginnings of the texts, one for each that is distinct."""
    first: dict[str, str] = {}
    for item in items:
        if item.kind == REAL and item.row.tokens_sha256 and len(first) < MAX_EXCERPTS:
            first.setdefault(item.row.tokens_sha256, item.row.id)
    tokens = windows_of(runs, first.values(), most=_BEGINNING)
    texts: dict[str, int] = {}
    by_digest: dict[str, int] = {}
    for digest, row_id in first.items():
        if some := tokens.get(row_id):
            text = "".join(spaced(some))[:180]
            by_digest[digest] = texts.setdefault(text, len(texts))
    return list(texts), [by_digest.get(item.row.tokens_sha256) for item in items]


def top_tokens(runs: Sequence[Run], rows: Iterable[Measurement]) -> dict[str, TokenShare]:
    """The token with the largest share of the direction, by row."""
    import polars as pl

    tops = [(row.id, row.top_token) for row in rows if row.top_token is not None]
    wanted_tokens = pl.LazyFrame(tops, schema={"id": pl.String, "index": pl.Int64}, orient="row")
    found: dict[str, TokenShare] = {}
    for run in runs:
        some = run.tokens.lazy().join(wanted_tokens, on=["id", "index"], how="semi").collect()
        for token in records_of(TokenShare, some):
            found.setdefault(token.id, token)
    return found


_ENOUGH = 1_000  # tokens of a folder that tell whether its model has a tokenizer


def kinds_of(
    items: Iterable[Item], tops: Mapping[str, TokenShare]
) -> dict[tuple[Any, ...], tuple[str, str]]:
    """For each curve on a text and each length, the most frequent kind of the top token."""
    found: dict[tuple[Any, ...], Counter[str]] = {}
    named: dict[str, bool] = {}
    for item in items:
        row = item.row
        if item.kind != REAL or row.input != "text" or row.id not in tops:
            continue
        if (place := str(item.run.path)) not in named:
            # Tokens are texts; without a tokenizer they are numbers, every one of them.
            tokens = item.run.tokens["text"].head(_ENOUGH)
            named[place] = not all(text.isdigit() for text in tokens)
        if named[place]:
            key = (item.s, item.source, label(row.layer), row.head, row.num_tokens)
            found.setdefault(key, Counter())[kind_of(tops[row.id].text)] += 1
    return {
        key: (kind, f"{count} of {some.total()} windows")
        for key, some in found.items()
        for kind, count in some.most_common(1)
    }
