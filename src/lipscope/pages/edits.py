"""Edits of a text as a page shows them: what each recipe did, and what stands where now."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lipscope.pages.points import short
from lipscope.records import EDITS, Run, TextEdit, share_interval, summed

MAX_EDITS = 500
"""Windows and recipes whose texts a page carries."""

_FIELDS = {field.name for field in dataclasses.fields(TextEdit)}
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def edits_of(runs: Sequence[Run], settings: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """One record for each setting, layer and target with edits.

    Args:
        runs: The folders.
        settings: By row, the index of its setting and its layer.

    Returns:
        Records with a ``summary`` by recipe and the ``edits``, the largest change first.
    """
    found: dict[tuple[Any, ...], dict[str, TextEdit]] = {}
    for run in runs:
        for key, content in run.contents(EDITS).items():
            if content.keys() == _FIELDS and content["id"] in settings:
                one = TextEdit(**content)
                place = (*settings[one.id], one.target, one.num_tokens, one.decision is not None)
                found.setdefault(place, {})[key] = one
    return [_record(place, list(some.values())) for place, some in found.items()]


def _record(place: tuple[Any, ...], edits: Sequence[TextEdit]) -> dict[str, Any]:
    s, layer, target, num_tokens, decided = place
    recipes = dict.fromkeys(one.recipe for one in edits)
    largest = sorted(edits, key=lambda one: -(_change(one) or -1.0))
    return {
        "s": s,
        "layer": layer,
        "target": target,
        "n": num_tokens,
        "decided": decided,
        "summary": [_summary(r, [e for e in edits if e.recipe == r]) for r in recipes],
        "edits": [_edit(one) for one in largest[:MAX_EDITS]],
        "count": len(edits),
    }


def _change(one: TextEdit) -> float | None:
    return one.change_layer if one.target == "layer" else one.change_model


def _summary(recipe: str, edits: Sequence[TextEdit]) -> dict[str, Any]:
    """Counts and means, and the 95 % interval of the rate of success."""
    found = summed(recipe, edits)
    tried = found.originals - found.skipped
    ends = share_interval(found.succeeded, tried) if tried else (None, None)
    rate = {"rate": found.rate, "low": ends[0], "high": ends[1]}
    return {k: short(v) if isinstance(v, float) else v for k, v in (vars(found) | rate).items()}


def _edit(one: TextEdit) -> dict[str, Any]:
    names = ("sample", "recipe", "status", "edits", "queries", "decision", "decided")
    return {
        **{name: getattr(one, name) for name in names},
        **{
            name: short(getattr(one, name))
            for name in ("change_layer", "change_model", "predicted")
        },
        "pieces": _pieces(one.before, one.after) if one.after else [["", one.before]],
    }


def _pieces(before: str, after: str) -> list[list[str]]:
    """The text in pieces: kept (""), taken out ("-") and put in ("+")."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    pieces: list[list[str]] = []
    for what, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "equal":
            pieces.append(["", "".join(old[a:b])])
        else:
            pieces += [[sign, "".join(some)] for sign, some in (("-", old[a:b]), ("+", new[c:d]))]
    return [piece for piece in pieces if piece[1]]
