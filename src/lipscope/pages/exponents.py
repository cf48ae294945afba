"""Exponents of two runs over the same lengths, and whether their difference is sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lipscope.errors import InputError
from lipscope.pages.points import label, short
from lipscope.records import (
    CONFIDENCE,
    Growth,
    Measurement,
    growth,
    holm,
    paired_shift,
    share_text,
    welch_shift,
)

Cell = tuple[int | None, int | None, int]  # layer, head, number of tokens
Log = Callable[[Measurement], tuple[float, float] | None]
PAIRED, APART = "the same windows", "two samples"
_SIDES = ("first", "second")


class _Side(NamedTuple):
    """One folder's windows of a layer or head, those that have every length.

    Attributes:
        passages: By what their windows are, rows in order of length.
        fit: The fitted growth; None where there is none.
        why: Why nothing is compared, or "".
    """

    passages: dict[tuple[str, ...], list[Measurement]]
    fit: Growth | None
    why: str


def exponent_rows(
    cells: Sequence[Cell],
    mine: Mapping[Cell, Sequence[Measurement]],
    other: Mapping[Cell, Sequence[Measurement]],
    log: Log,
    spread: Sequence[bool],
) -> list[dict[str, Any]]:
    """Differences of the exponents of two folders, layer by layer.

    Every passage has an exponent of its own, the least-squares slope of its logarithms over the
    lengths that both folders have; longer ones than a model was trained on are left out. Passages
    that are the same in both at every length are compared in pairs, others as two samples. Holds
    for nearly normal slopes of passages that share no text. What the solver leaves open is inside
    the interval. Where no power law fits, nothing is compared.

    Args:
        cells: What both folders have.
        mine: Rows of the first one.
        other: Rows of the second one.
        log: Ends of the logarithm of what grows.
        spread: Of each folder, whether a sample is the same passage at every length.

    Returns:
        A record for each layer or head with three such lengths.
    """
    found = []
    for layer, head in dict.fromkeys((cell[0], cell[1]) for cell in cells):
        sides = [
            [r for c in cells if c[:2] == (layer, head) for r in some[c]] for some in (mine, other)
        ]
        trained = [r.trained_length for rows in sides for r in rows if r.trained_length]
        lengths = sorted({c[2] for c in cells if c[:2] == (layer, head)})
        lengths = [n for n in lengths if n <= min(trained, default=n)]
        if len(lengths) >= 3:
            both = [_side(rows, lengths, log, one) for rows, one in zip(sides, spread, strict=True)]
            about = {"layer": label(layer), "head": head, "n": f"{lengths[0]} to {lengths[-1]}"}
            found.append(about | _row(both, lengths, log))
    tested = [row for row in found if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row |= {"holm": short(p), "changed": p <= 1 - CONFIDENCE, "p": short(row["p"])}
    return found


def _side(rows: Sequence[Measurement], lengths: Sequence[int], log: Log, spread: bool) -> _Side:
    """The windows of one folder, and how they grow."""
    held: dict[int, dict[int, Measurement]] = {}
    for row in rows:
        if row.num_tokens in lengths and log(row) is not None:
            held.setdefault(row.sample, {})[row.num_tokens] = row
    whole = {k: [one[n] for n in lengths] for k, one in held.items() if len(one) == len(lengths)}
    used = [row for some in whole.values() for row in some]
    passages = {tuple(r.tokens_sha256 or str(k) for r in some): some for k, some in whole.items()}
    try:
        fit = growth([replace(row, sigma=_value(log, row)) for row in used], paired=spread)
    except InputError:
        return _Side(passages, None, "rows of several models, texts or seeds")
    if fit is None:
        return _Side(passages, None, "no window has every length")
    if share_text(used, paired=spread):
        return _Side(passages, fit, "windows share text, so they are not independent")
    return _Side(passages, fit, "no power law" if fit.fits is False else "")


def _value(log: Log, row: Measurement) -> float:
    ends = log(row)
    assert ends is not None
    return float(np.exp(ends[0]))


def _row(sides: Sequence[_Side], lengths: Sequence[int], log: Log) -> dict[str, Any]:
    a, b = sides
    shared = [key for key in a.passages if key in b.passages and all(key)]
    keys = (shared, shared) if shared else (list(a.passages), list(b.passages))
    slopes = [
        [_slope(side.passages[k], lengths, log) for k in some]
        for side, some in zip(sides, keys, strict=True)
    ]
    why = next(
        (f"{s.why} in the {n} folder" for s, n in zip(sides, _SIDES, strict=True) if s.why), ""
    )
    if not why and min(map(len, slopes)) < 2:
        why = "too few windows: an interval takes two" + " of each" * (not shared)
    shift = None if why else (paired_shift if shared else welch_shift)(*slopes)
    count = f"{len(shared)}" if shared else " and ".join(str(len(some)) for some in slopes)
    fits = {name: s.fit and short(s.fit.slope) for name, s in zip("ab", sides, strict=True)}
    values = (None, None, None, None) if shift is None else shift
    named = zip(("difference", "low", "high", "p"), values, strict=True)
    return {
        **fits,
        **{name: value if value is None or name == "p" else short(value) for name, value in named},
        "holm": None,
        "changed": False,
        "how": PAIRED if shared else APART,
        "count": count,
        "why": why,
    }


def _slope(rows: Sequence[Measurement], lengths: Sequence[int], log: Log) -> tuple[float, float]:
    """Ends of the exponent of one passage."""
    x = np.log(lengths) - np.log(lengths).mean()
    weights = x / (x @ x)
    low, high = np.array([log(row) for row in rows], dtype=float).T
    up = weights > 0
    return float(weights @ np.where(up, low, high)), float(weights @ np.where(up, high, low))


def exponents_said(rows: Sequence[Mapping[str, Any]]) -> str:
    """What changed, in a few sentences, and what the intervals rest on; "" without rows."""
    tested = [row for row in rows if row["p"] is not None]
    if not rows:
        return ""
    if not tested:
        return f"No exponents are compared: {rows[0]['why']}."
    changed = [row for row in tested if row["changed"]]
    up = sum(row["difference"] > 0 for row in changed)
    said = f"Of {len(tested)} exponents with an interval, over {tested[0]['n']} tokens, "
    said += (
        f"{len(changed)} changed beyond the sampling of text: {up} larger in the second folder, "
        f"{len(changed) - up} smaller."
        if changed
        else "none changed beyond the sampling of text."
    )
    if changed:
        most = max(changed, key=lambda row: abs(row["difference"]))
        head = "" if most["head"] is None else f", head {most['head']}"
        ends = ", ".join(f"{most[name]:+.2g}" for name in ("low", "high"))
        said += f" Most at layer {most['layer']}{head}: {most['difference']:+.2g} in [{ends}]."
    left = len(rows) - len(tested)
    return (
        said
        + (f" {left} more have none; the table says why." if left else "")
        + (" Every passage has its own exponent; intervals as above, for nearly normal exponents.")
    )
