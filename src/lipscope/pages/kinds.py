"""The kind of token that carries the sigma of a layer or head in most windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lipscope.charts import kind_of
from lipscope.pages.items import REAL, Item
from lipscope.pages.points import label
from lipscope.records import Run, TokenShare

_ENOUGH = 1_000  # tokens of a folder that tell whether its model has a tokenizer


def kinds_of(
    items: Iterable[Item], tops: Mapping[str, TokenShare]
) -> dict[tuple[Any, ...], tuple[str, str]]:
    """For each curve on a text and each length, the most frequent kind of the top token.

    Args:
        items: All items.
        tops: The top token by row.

    Returns:
        By setting, folder, layer, head and length, the kind and how many windows have it. Nothing
        for folders whose tokens are plain ids, and for pictures.
    """
    found: dict[tuple[Any, ...], Counter[str]] = {}
    named: dict[str, bool] = {}
    for item in items:
        row = item.row
        if item.kind != REAL or row.input != "text" or row.id not in tops:
            continue
        if (place := str(item.run.path)) not in named:
            named[place] = _named(item.run)
        if named[place]:
            key = (item.setting, item.source, label(row.layer), row.head, row.num_tokens)
            found.setdefault(key, Counter())[kind_of(tops[row.id].text)] += 1
    return {
        key: (kind, f"{count} of {some.total()} windows")
        for key, some in found.items()
        for kind, count in some.most_common(1)
    }


def _named(run: Run) -> bool:
    """Whether tokens are texts; without a tokenizer they are numbers, every one of them."""
    return not all(text.isdigit() for text in run.tokens["text"].head(_ENOUGH))
