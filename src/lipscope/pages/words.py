"""Words of a page: how it was measured, where it comes from."""

from __future__ import annotations

import importlib.resources
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipscope.pages.bounded import cited
from lipscope.pages.items import REAL, Item, by_setting
from lipscope.pages.runs import text_of
from lipscope.pages.sentences import intervals_of
from lipscope.records import Bound, Direction, Run

METRICS = {
    "frobenius": "the Frobenius norm",
    "token-relative": "the token-relative norm (each token's move in proportion to its norm)",
    "max-token": "the largest token norm",
    "infinity": "the largest absolute entry",
}
KINDS = {"text": ("window", "text"), "image": ("picture", ""), "batch": ("input", "")}
_LISTED = 12  # lengths, and settings, that are named one by one
ALWAYS = "castin2024"  # where the local Lipschitz constant of attention is defined


def methods(items: Sequence[Item]) -> list[str]:
    """One sentence for a methods section for each setting, and how many more there are.

    Args:
        items: All measurements.

    Returns:
        The sentences.
    """
    settings = by_setting(item for item in items if item.kind == REAL)
    said = [_method(setting, some) for setting, some in list(settings.items())[:_LISTED]]
    if (more := len(settings) - len(said)) > 0:
        said.append(f"Measured likewise: {more} more (model, map, metric, tokens, text).")
    return said


def _method(setting: tuple[str, ...], items: Sequence[Item]) -> str:
    model, map_name, metric, move, read, _ = setting
    rows = [item.row for item in items]
    lengths = sorted({row.num_tokens for row in rows})
    samples = len({row.sample for row in rows})
    tokens = f"{_listed([str(n) for n in lengths])} tokens"
    if len(lengths) > _LISTED:
        tokens = f"{lengths[0]} to {lengths[-1]} tokens ({len(lengths)} lengths)"
    layers = len({row.layer for row in rows})
    noun, source = KINDS.get(rows[0].input, ("input", ""))
    source = _listed(_texts(items)) or source
    inputs = f"{noun}{'s' * (samples > 1)}{f' of {source}' * bool(source)}"
    what = "whole model" if rows[0].layer is None else f"{layers} layer{'s' * (layers > 1)}"
    single = {row.head is not None for row in rows}
    heads = "" if single == {False} else ", single heads" if single == {True} else ", also by head"
    which = "" if (move, read) == ("all", "all") else f", tokens moved: {move}, read: {read}"
    deltas = " or ".join(f"{d:g}" for d in sorted({row.delta for row in rows}))
    versions = _listed(sorted({row.version for row in rows if row.version})) or "of these rows"
    dtypes = _listed(sorted({row.dtype for row in rows if row.dtype}))
    seeds = _listed([str(s) for s in sorted({row.seed for row in rows})[:8]])
    how = f" ({dtypes}, seed {seeds})" * bool(dtypes)
    return (
        f"The local Lipschitz constant of the map “{map_name}” of {model} ({what}{heads}{which}), "
        f"the top singular value of its Jacobian in {METRICS.get(metric, metric)} "
        f"[{ALWAYS}], was measured on {samples} {inputs} per length of {tokens}{how} with lipscope "
        f"{versions} by Golub–Kahan bidiagonalisation; each interval holds with probability at "
        f"least 1 − δ over its random start, δ = {deltas}."
    )


def _texts(items: Sequence[Item]) -> list[str]:
    """The texts of these measurements, in words."""
    sources = {(id(item.run), item.row.text): item for item in items}.values()
    return list(dict.fromkeys(filter(None, (text_of(i.run, i.row.text) for i in sources))))


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def failures(items: Sequence[Item], directions: Iterable[Direction]) -> dict[str, Any]:
    """What a reader must know about rows without a value, and about all intervals together.

    Args:
        items: All measurements.
        directions: Their leading directions.

    Returns:
        Counts by status, errors with their counts, and all intervals together.
    """
    rows = [item.row for item in items]
    errors = Counter(row.error for row in rows if row.error)
    return {
        "rows": len(rows),
        "status": dict(Counter(row.status for row in rows).most_common()),
        "errors": errors.most_common(10),
        "intervals": intervals_of(rows, directions),
    }


def provenance(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each folder, what it was asked and where it was made.

    Args:
        runs: The folders.

    Returns:
        One record a folder: name, counts, specification and provenance as flat words.
    """
    return [
        {
            "folder": str(run.path),
            "rows": len(run.rows),
            "bounds": len(run.bounds),
            "parts": {
                part: {name: _word(value) for name, value in values.items() if value is not None}
                for part, values in run.manifest.items()
                if isinstance(values, Mapping)
            },
        }
        for run in runs
    ]


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {one}" for name, one in value.items() if one is not None]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 400 else text[:397] + "…"


# --- bibliography ---------------------------------------------------------------------------


def references(bounds: Sequence[Bound]) -> list[dict[str, Any]]:
    """The sources of what is shown, with their BibTeX.

    Args:
        bounds: All bounds.

    Returns:
        One record a source: key, BibTeX (None for what is derived here), statements.
    """
    entries = bibliography()
    used = {ALWAYS: ["Local Lipschitz constant (Section 3)"]}
    for cite, statements in cited(bounds).items():
        used.setdefault(cite, []).extend(statements)
    return [
        {"cite": cite, "bibtex": entries.get(cite), "statements": statements}
        for cite, statements in used.items()
    ]


def bibliography() -> dict[str, str]:
    """Every entry of ``references.bib`` by its key.

    >>> bibliography()["castin2024"].splitlines()[0]
    '@inproceedings{castin2024,'
    """
    installed = importlib.resources.files("lipscope") / "references.bib"
    text = (
        installed if installed.is_file() else Path(__file__).parents[3] / "docs" / "references.bib"
    ).read_text(encoding="utf-8")
    found = re.findall(r"^(@\w+\{(\w+),.*?^\})", text, flags=re.MULTILINE | re.DOTALL)
    return {key: entry for entry, key in found}
