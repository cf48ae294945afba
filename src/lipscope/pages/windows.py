"""Windows of text that a page carries: their words, and each token's share of a direction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lipscope.charts import kind_of, spaced
from lipscope.pages.points import REAL, Item, label, short, windows_of
from lipscope.records import Measurement, Run, TokenShare, records_of

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
    tops: dict[str, str]  # by row: the text of its top token, where it is known
    remark: str | None  # what was left out, or None


def windows_for(
    runs: Sequence[Run], items: Sequence[Item], tops: Mapping[str, TokenShare]
) -> Windows:
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
    return Windows(
        [list(words) for words in texts],
        windows,
        excerpts,
        begins,
        {row_id: spaced([token])[0] for row_id, token in tops.items()},
        remark,
    )


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
    order = sorted(range(len(moved)), key=lambda k: -moved[k])
    return {
        "most": order[:_MOST],
        "others": short(math.fsum(moved[k] for k in order[_MOST:])),
        "in": [_scaled_share(token.share_in) for token in tokens],
        "out": [_scaled_share(token.share_out) for token in tokens],
        "norm": [None if t.norm is None else float(f"{t.norm:.4g}") for t in tokens],
    }


def _scaled_share(share: float | None) -> int | None:
    value = short(share)
    return None if value is None else round(SCALE * value)


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

    held = [(row.id, row.top_token) for row in rows if row.top_token is not None]
    wanted = pl.LazyFrame(held, schema={"id": pl.String, "index": pl.Int64}, orient="row")
    found: dict[str, TokenShare] = {}
    for run in runs:
        some = run.tokens.lazy().join(wanted, on=["id", "index"], how="semi").collect()
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
            key = (item.setting, item.source, label(row.layer), row.head, row.num_tokens)
            found.setdefault(key, Counter())[kind_of(tops[row.id].text)] += 1
    return {
        key: (kind, f"{count} of {some.total()} windows")
        for key, some in found.items()
        for kind, count in some.most_common(1)
    }
