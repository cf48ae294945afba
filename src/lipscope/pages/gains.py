"""Gains of splitting as a page shows them: window by window, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lipscope.charts import positive, readable, tick_values
from lipscope.pages.points import short
from lipscope.records import GAINS, Run, TokenGain

MAX_TOKENS = 20_000
"""Tokens with gains that a page carries."""

_FIELDS = {field.name for field in dataclasses.fields(TokenGain)}


def gains_of(runs: Sequence[Run], settings: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """One record for each window and layer whose tokens were taken apart.

    Args:
        runs: The folders.
        settings: By row, the index of its setting and its layer.

    Returns:
        Records with ``tokens``: place, text, both gains with their upper ends, and whether
        taking it apart is known to gain more.
    """
    found: dict[str, dict[int, TokenGain]] = {}
    for run in runs:
        for content in run.contents(GAINS).values():
            if content.keys() == _FIELDS and content["id"] in settings:
                one = TokenGain(**content)
                found.setdefault(one.id, {})[one.index] = one
    records, room = [], MAX_TOKENS
    for row_id, tokens in found.items():
        room -= len(tokens)
        if room >= 0:
            s, layer = settings[row_id]
            some = [tokens[index] for index in sorted(tokens)]
            about = {"s": s, "layer": layer, "sample": some[0].sample, "n": len(some)}
            axis = _axis(
                [v for t in some for v in (t.split, t.split_upper, t.moved, t.moved_upper)]
            )
            records.append(about | {"tokens": [_token(one) for one in some], "axes": axis})
    return records


def _axis(values: Sequence[float]) -> dict[str, Any] | None:
    """The axis of both gains; None where all are 0."""
    drawn = [value for value in values if positive(value)]
    if not drawn:
        return None
    y = [min(drawn) / 1.1, max(drawn) * 1.1]
    return {"y": [short(v) for v in y], "yticks": tick_values(*y)}


def _token(one: TokenGain) -> dict[str, Any]:
    ends = ("split", "split_upper", "moved", "moved_upper")
    return {
        "index": one.index,
        "text": readable(one.text).strip(" "),
        "better": one.better_split,
        **{name: short(getattr(one, name)) for name in ends},
    }
