"""Chart data without a drawing library: records, colours, ticks and labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len

from lipscope.display import printable
from lipscope.records import GIVEN, Measurement, TokenShare

OPENING, CLOSING = set("([{"), set(".,;:!?)]}%'")


class Placed(NamedTuple):
    """A token placed on a character grid."""

    token: TokenShare  # the token
    text: str  # its text as shown
    line: int  # line, from 0
    column: int  # first cell in the line, from 0
    width: int  # number of cells


def readable(text: str) -> str:
    """A token's text without tokenizer marks, with a leading space at word starts.

    Byte-level pieces are decoded if they are complete characters.

    >>> [readable(t) for t in ("##ing", "▁the", "Ġthe", "âĢĻ", "[CLS]")]
    ['ing', ' the', ' the', '’', '[CLS]']
    """
    if text.startswith("##") and len(text) > 2:
        return text[2:]
    if not text.isascii() and all(letter in BYTES for letter in text):
        try:
            return bytes(BYTES[letter] for letter in text).decode()
        except UnicodeDecodeError:
            return text.replace("Ġ", " ")
    return text.replace("▁", " ")


def visible(text: str) -> str:
    """A token's readable text, trimmed and never blank: signs stand for spaces and line ends.

    >>> [visible(t) for t in ("##ing", "Ġthe", "Ġ", "čĊĠĠ")]
    ['ing', 'the', '␣', '␍↵␣␣']
    """
    return _in_a_line(readable(text))


def _in_a_line(text: str, columns: int = 80) -> str:
    """Readable text, cut after ``columns`` characters."""
    text = printable(text)
    text = (text.strip(" ") if text.strip() else text.replace(" ", "␣")).translate(_SIGNS) or "␣"
    return text if len(text) <= columns else text[: columns - 1] + "…"


_SIGNS = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥"})


def _byte_letters() -> dict[str, int]:
    """The letters that represent bytes in byte-level tokenizers (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + k): b for k, b in enumerate(other)}


BYTES = _byte_letters()


def lay_out(
    tokens: Sequence[TokenShare], *, columns: int = 84, max_lines: int = 24
) -> list[Placed]:
    """Lay out tokens in lines, keeping words together if they fit."""
    placed: list[Placed] = []
    line = column = 0
    for word in _joined_words(tokens):
        texts = [_in_a_line(text, columns) for _, text in word]
        if column and column + 1 + sum(map(cell_len, texts)) > columns:
            line, column = line + 1, 0
        column += 1 if column else 0
        for (token, _), text in zip(word, texts, strict=True):
            width = cell_len(text)
            if column and column + width > columns:
                line, column = line + 1, 0
            if line >= max_lines:
                return placed
            placed.append(Placed(token, text, line, column, width))
            column += width
            if "↵" in text:
                line, column = line + 1, 0
    return placed


def spaced(tokens: Sequence[TokenShare]) -> list[str]:
    """The displayed text of every token, with a space before each word."""
    texts = []
    for word in _joined_words(tokens):
        for k, (_, text) in enumerate(word):
            texts.append(" " * (bool(texts) and not k) + _in_a_line(text))
    return texts


def _joined_words(tokens: Sequence[TokenShare]) -> list[list[tuple[TokenShare, str]]]:
    """Tokens with their readable text, grouped into unbreakable words."""
    # Tokenizers that mark word starts determine the spaces. The others (WordPiece, plain ids)
    # imply a space before every token that does not continue a word.
    marked = any(readable(t.text).startswith(" ") for t in tokens)
    words: list[list[tuple[TokenShare, str]]] = []
    before = ""
    for token in tokens:
        text = readable(token.text)
        if marked:
            joined = not text.startswith(" ")
        else:
            joined = token.text.startswith("##") or text in CLOSING or before in OPENING
        if joined and words and not _special(before) and not _special(text):
            words[-1].append((token, text))
        else:
            words.append([(token, text)])
        before = text
    return words


def _special(text: str) -> bool:
    """Whether a token is a special one without text, like ``[CLS]`` and ``<s>``."""
    return len(text) > 2 and (text[0] + text[-1]) in ("[]", "<>")


KINDS = ("special", "word", "number", "punctuation", "whitespace")
"""Kinds of tokens, see `kind_of`."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def kind_of(text: str) -> str:
    """The kind of a token, from its characters: one of `KINDS`.

    Special tokens are recognised by their brackets; a piece of a word is a word.

    >>> [kind_of(t) for t in ("[CLS]", "##ing", "Ġ12", "▁,", "Ċ")]
    ['special', 'word', 'number', 'punctuation', 'whitespace']
    """
    byte = _BYTE.fullmatch(text)
    shown = chr(int(byte[1], 16)) if byte else readable(text)
    if _special(shown):
        return "special"
    if not shown.strip():
        return "whitespace"
    if not any(letter.isalnum() for letter in shown):
        return "punctuation"
    return "number" if all(c.isnumeric() for c in shown.strip()) else "word"


# --- colours, ticks and records --------------------------------------------------------------

# The dark part of matplotlib's plasma: even steps for every kind of colour vision, and
# readable on white, unlike its yellow end.
PLASMA = ["#0d0887", "#4c02a1", "#7e03a8", "#a92395", "#cc4778", "#e56b5d", "#f0884a", "#f59a3e"]
INK = "#222222"
ALL, REST = "all tokens move", "top token fixed"  # series of sigma
PROMISE, CERTIFIED = "sigma · size", "certificate, any move"  # curves of a push

CELL, LINE = 8.4, 22
"""Pixels per character, and per line, of shaded text at 14 pixels."""

HINT = "The menu selects a layer; hover over a point to see its row."


def layer_labels(rows: Iterable[Measurement]) -> list[str]:
    """Layers as labelled in the legend, in order; "model" for the whole model."""
    layers = {row.layer for row in rows}
    whole = ["model"] if None in layers else []
    return [str(layer) for layer in sorted(x for x in layers if x is not None)] + whole


def palette(count: int, along: Sequence[str] = PLASMA) -> list[str]:
    """``count`` colours in even steps along a palette."""
    stops = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in along]
    colours = []
    for k in range(count):
        at = (len(stops) - 1) * k / max(count - 1, 1)
        i = min(int(at), len(stops) - 2)
        mix = [a + (at - i) * (b - a) for a, b in zip(stops[i], stops[i + 1], strict=True)]
        colours.append("#" + "".join(f"{round(v):02x}" for v in mix))
    return colours


def training_end(rows: Iterable[Measurement]) -> int | None:
    """The model's trained length.

    None if it is unknown, no row is longer, or the weights are random.
    """
    rows = [row for row in rows if not row.weights.startswith("random")]
    trained = {row.trained_length for row in rows if row.input in GIVEN}
    if len(trained) != 1 or (most := trained.pop()) is None:
        return None
    return most if any(row.num_tokens > most for row in rows) else None


def tick_values(low: float, high: float, *, most: int = 25) -> list[float]:
    """Labels of a logarithmic axis: 1, 2, 5 in every decade, fewer or more as needed.

    >>> tick_values(0.9, 30.0), tick_values(8.0, 10.0), tick_values(1.0, 1e8, most=5)
    ([1.0, 2.0, 5.0, 10.0, 20.0], [8.0, 9.0, 10.0], [1.0, 100.0, 10000.0, 1000000.0, 100000000.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inner = [(1, 2, 5), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)]
    values: list[float] = []
    for steps in inner if len(decades) <= 6 else [(1,)]:
        values = _inside(steps, decades, low, high)
        if len(values) >= 3:
            break
    else:
        values = _even(low, high)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 3), (1,)):
        coarser = _inside(steps, decades, low, high)
        if len(values) > most and len(coarser) >= 3:
            values = coarser
    return values[:: math.ceil(len(values) / most)]


def _inside(
    steps: Sequence[int | float], decades: Iterable[int], low: float, high: float
) -> list[float]:
    found = [float(f"{step}e{k}") for k in decades for step in steps]
    return [value for value in found if low <= value <= high]


def _even(low: float, high: float) -> list[float]:
    """About three values in even steps of 1, 2 or 5 times a power of ten."""
    decade = math.floor(math.log10(high - low))
    steps = (float(f"{step}e{k}") for k in (decade, decade - 1) for step in (5, 2, 1))
    counts = ((step, range(math.ceil(low / step), math.floor(high / step) + 1)) for step in steps)
    step, found = next((step, found) for step, found in counts if len(found) >= 3)
    return [float(f"{i * step:.12g}") for i in found]


def share_of(token: TokenShare) -> float:
    """Share of the most sensitive direction; zero if unknown."""
    share = token.share_in
    return share if share is not None and math.isfinite(share) else 0.0


def cell_of(placed: Placed, top: float) -> dict[str, Any]:
    """A placed token as a chart record: pixels for marks, text for the tooltip."""
    token, share = placed.token, share_of(placed.token)
    x, y = 4 + CELL * placed.column, LINE * placed.line
    return {
        "text": placed.text,
        "ink": "#ffffff" if share > 0.3 * top else INK,
        "share": share,
        "token": visible(token.text),
        "index": token.index,
        "share in": _shown(token.share_in, ".2%"),
        "share out": _shown(token.share_out, ".2%"),
        "norm": _shown(token.norm, ".4g"),
        "x": round(x - 1, 1),
        "x2": round(x + CELL * placed.width + 1, 1),
        "y": y + 1,
        "y2": y + LINE - 1,
        "left": round(x, 1),
        "middle": y + LINE / 2 + 0.5,
    }


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Label positions near these values, at least ``gap`` (a ratio) apart, in order.

    >>> [round(v, 2) for v in spread([1.0, 1.1, 8.0], 2.0)]
    [0.74, 1.48, 8.0]
    """
    from scipy.optimize import isotonic_regression  # a tenth of a second

    if not len(values):
        return []
    order = np.argsort(values, kind="stable")
    apart = math.log(gap) * np.arange(len(values))
    places = np.empty(len(values))
    # Without the gaps: the nearest ordered positions in the mean square.
    places[order] = isotonic_regression(np.log(values)[order] - apart).x + apart
    return np.exp(places).tolist()
