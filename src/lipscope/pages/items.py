"""Every measurement of a report once, with the setting and the kind of input it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any

from lipscope.pages import table
from lipscope.records import Measurement, Run, TokenShare, given, grouped, records_of

_NAMED = 40  # letters of a text that stand for it in a control


def paired(run: Run) -> bool:
    """Whether a sample is the same passage at every length."""
    return run.manifest["spec"].get("windows", "spread") == "spread"


def text_of(run: Run, name: str | None) -> str:
    """What a row was measured on, in words; "" where the folder does not say."""
    made = run.manifest["provenance"]
    if images := made.get("images"):
        return "random pixels" if images == "random" else f"the folder “{images}”"
    named = run.manifest["spec"].get("texts", {})
    begins, sha256 = made.get("text"), made.get("text_sha256")
    if name in named:
        begins, sha256 = name, named[name]
    if not begins or not sha256:
        return ""
    said = "Python's language manual" if begins == "default" else f"the text “{begins}”"
    return f"{said} (SHA-256 {sha256[:12]})"


def labels(texts: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Short names of texts, none for two of them."""
    names: dict[tuple[str, str], str] = {}
    by_name: dict[str, set[str]] = {}
    for pair in texts:
        said, _, digest = pair[1].partition(" (SHA-256 ")
        said = said.removeprefix("the text ").strip("“”")
        names[pair] = said if len(said) <= _NAMED else f"{said[: _NAMED - 1]}…"
        by_name.setdefault(names[pair], set()).add(digest)
    return {
        pair: f"{name} ({pair[1][-13:-1]})" if len(by_name[name]) > 1 else name
        for pair, name in names.items()
    }


def folder_names(runs: Iterable[Run]) -> dict[str, str]:
    """The last part of each folder's path that tells it from the others, by path."""
    paths = list(dict.fromkeys(str(run.path) for run in runs))
    parts = {path: Path(path).parts for path in paths}
    for count in range(1, max((len(p) for p in parts.values()), default=0) + 1):
        names = {path: "/".join(part[-count:]) for path, part in parts.items()}
        if len(set(names.values())) == len(paths):
            return names
    return {path: path for path in paths}


def windows_of(
    runs: Iterable[Run], ids: Iterable[str], *, most: int | None = None
) -> dict[str, list[TokenShare]]:
    """The tokens of these rows, in their order."""
    import polars as pl

    wanted = set(ids)
    found: dict[str, list[TokenShare]] = {}
    for run in runs:
        if not wanted:
            break
        some = run.tokens.lazy().filter(pl.col("id").is_in(sorted(wanted)))
        frame = (some if most is None else some.filter(pl.col("index") < most)).collect()
        for one in records_of(TokenShare, frame.sort("id", "index")):
            found.setdefault(one.id, []).append(one)
        wanted -= found.keys()
    return found


REAL = "real"
SETTING = (*table.SETTING, "text")


@dataclass(frozen=True)
class Item:
    """A measurement with the setting and the kind of input that it belongs to."""

    row: Measurement  # the measurement
    # Model (with what tells it from others of its name), map, metric, move, read, text
    setting: tuple[str, ...]
    kind: str  # `REAL`, or what built the input
    run: Run  # the folder that holds it
    source: str | None = None  # name of the folder, where several have rows of one curve; else None

    @property
    def curve(self) -> tuple[Any, ...]:
        """What the items of one growth curve have in common."""
        return self.setting, self.kind, self.source, self.row.layer, self.row.head


def items_of(runs: Sequence[Run]) -> list[Item]:
    """Every row once; no curve has rows of two models, texts, inputs or folders."""
    found: dict[str, tuple[Run, Measurement]] = {}
    for run in runs:
        for row in run.measurements():
            found.setdefault(row.id, (run, row))
    names = _model_names(row for _, row in found.values())
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
    several = (
        curve
        for curve, some in grouped(items, lambda item: item.curve).items()
        if len({str(item.run.path) for item in some}) > 1
    )
    mixed = {(*curve[:2], curve[-1] is None) for curve in several}
    names = folder_names(item.run for item in items)
    return [
        replace(i, source=names[str(i.run.path)])
        if (*i.curve[:2], i.row.head is None) in mixed
        else i
        for i in items
    ]


def items_by_setting(items: Iterable[Item]) -> dict[tuple[str, ...], list[Item]]:
    """Items of one setting together, settings in their order of appearance."""
    return grouped(items, lambda item: item.setting)


def _model_names(rows: Iterable[Measurement]) -> dict[tuple[Any, ...], str]:
    """Names of models, with what tells apart those that share one."""
    versions: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for key, row in {_version(row): row for row in rows}.items():
        versions.setdefault(row.model, {})[key] = _version_words(row)
    names: dict[tuple[Any, ...], str] = {}
    for model, ways in versions.items():
        varied = [len(set(words)) > 1 for words in zip(*ways.values(), strict=True)]
        for key, words in ways.items():
            names[key] = " · ".join([model, *filter(None, compress(words, varied))])
    return names


_version = attrgetter(
    "model", "step", "revision", "weights", "side", "position_offset", "dtype", "seed"
)


def _version_words(row: Measurement) -> list[str]:
    return [
        "" if row.step is None else f"step {row.step}",
        row.revision or "",
        row.weights,
        "" if row.side == "self" else f"side {row.side}",
        f"positions from {row.position_offset}" if row.position_offset else "",
        row.dtype,
        f"seed {row.seed}",
    ]
