"""What taking tokens apart gains, as a page shows it: window by window, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lipscope.charts.pieces import readable
from lipscope.pages.points import short
from lipscope.records.gains import GAINS, TokenGain
from lipscope.records.run import Run

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
            records.append(about | {"tokens": [_token(one) for one in some]})
    return records


def _token(one: TokenGain) -> dict[str, Any]:
    ends = ("split", "split_upper", "moved", "moved_upper")
    return {
        "index": one.index,
        "text": readable(one.text).strip(" "),
        "better": one.better_split,
        **{name: short(getattr(one, name)) for name in ends},
    }
