"""Tokens as a reader sees them: pieces joined to words, words set in lines.

Tokenizers write a word's beginning or continuation with marks of their own; here they
become spaces again, so that a window of text can be read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from lipscope.display import printable
from lipscope.records import TokenShare

OPENING, CLOSING = set("([{"), set(".,;:!?)]}%'")


class Placed(NamedTuple):
    """A token on a grid of characters.

    Attributes:
        token: The token.
        text: Its text as shown.
        line: Line, from 0.
        column: First character cell in the line, from 0.
        width: Number of cells that it takes.
    """

    token: TokenShare
    text: str
    line: int
    column: int
    width: int


def readable(text: str) -> str:
    """A token's text without the marks of its tokenizer, a leading space where it has one.

    Byte-level pieces are decoded where they are whole characters.

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


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + k): b for k, b in enumerate(other)}


BYTES = _byte_letters()


def lay_out(
    tokens: Sequence[TokenShare], *, columns: int = 84, max_lines: int = 24
) -> list[Placed]:
    """Set tokens in lines, words kept whole where they fit.

    Args:
        tokens: The tokens of one window, in their order.
        columns: Character cells in a line.
        max_lines: Lines after which the text is cut.

    Returns:
        The tokens that found room, each with its place.
    """
    placed: list[Placed] = []
    line = column = 0
    for word in _words(tokens):
        texts = [_visible(text, columns) for _, text in word]
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
            if text.endswith("↵"):
                line, column = line + 1, 0
    return placed


def spaced(tokens: Sequence[TokenShare]) -> list[str]:
    """Every token as shown, with a space in front where a word begins.

    Args:
        tokens: The tokens of one window, in their order.

    Returns:
        One text for each token; put together they are the window.
    """
    texts = []
    for word in _words(tokens):
        for k, (_, text) in enumerate(word):
            texts.append(" " * (bool(texts) and not k) + _visible(text, 80))
    return texts


def _words(tokens: Sequence[TokenShare]) -> list[list[tuple[TokenShare, str]]]:
    """Tokens with their readable text, grouped into words that should not be broken."""
    # Tokenizers that mark the start of a word say where spaces are. The others (WordPiece,
    # plain ids) leave them out before every token that does not continue a word.
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
    """Whether a token stands for no text, like ``[CLS]`` and ``<s>``."""
    return len(text) > 2 and (text[0] + text[-1]) in ("[]", "<>")


KINDS = ("special", "word", "number", "punctuation", "whitespace")
"""What a token can be, see `kind_of`."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def kind_of(text: str) -> str:
    """What a token of a text is, by its letters: one of `KINDS`.

    Special tokens are told by their brackets; a piece of a word is a word.

    Args:
        text: The token as its tokenizer writes it.

    Returns:
        The kind.

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


def _visible(text: str, columns: int) -> str:
    """One line of at most ``columns`` characters, line ends as signs, never empty."""
    text = printable(text).strip(" ").replace("\r", "").replace("\n", "↵").replace("\t", "→") or "␣"
    return text if len(text) <= columns else text[: columns - 1] + "…"
