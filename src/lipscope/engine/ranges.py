"""Ranges as users write them: numbers of tokens, layers, tokens, bytes.

All ranges include their stop.
"""

from __future__ import annotations

import re

from lipscope.errors import InputError, shown

# A move of the copies of every token against each other, instead of tokens: mass splitting.
COPIES = "copies"
# What a request may hold: a list that is longer, or a number of more digits, is a slip of the hand.
_MOST = 100_000
_DIGITS = r"(\d{1,18})"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_integers(text: str, option: str) -> list[int]:
    """Read ``3,5`` or ``start:stop[:step]``, or a comma-separated mixture.

    >>> parse_integers("2:10:4,64", "lengths")
    [2, 6, 10, 64]
    """
    values: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(rf"\s*{_DIGITS}(?::{_DIGITS}(?::{_DIGITS})?)?\s*", part)
        if match is None or (match[3] and not int(match[3])):
            raise InputError(
                f"`--{option}` should be whole numbers such as 16,64 or 2:512:10. Found `{text}`."
            )
        start, stop, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        _check_upwards(start, stop, text, option)
        if len(values) + (stop - start) // step >= _MOST:
            raise InputError(
                f"`--{option}` should name at most {_MOST:,} numbers. Found more: `{text}`."
            )
        values.extend(range(start, stop + 1, step))
    return list(dict.fromkeys(values))


def parse_tokens(text: str, num_tokens: int, option: str) -> list[int] | None:
    """Token indices of ``all`` (None), ``first``, ``last``, ``not-first``, ``a:b`` or ``a%:b%``.

    A range of shares holds every token of which a part lies in it: its size goes with the number of
    tokens. Of tokens that move also ``copies``, which is all of them.

    >>> parse_tokens("1:3", 8, "move"), parse_tokens("90%:100%", 32, "move")
    ([1, 2, 3], [28, 29, 30, 31])
    """
    named = {
        "all": None,
        "first": [0],
        "last": [num_tokens - 1],
        "not-first": list(range(1, num_tokens)),
    }
    if option == "move":
        named[COPIES] = None
    if text in named:
        chosen = named[text]
    else:
        match = re.fullmatch(rf"{_DIGITS}(?::{_DIGITS})?|{_DIGITS}%:{_DIGITS}%", text)
        if match is None:
            raise InputError(
                f"`--{option}` should be {', '.join(named)}, a:b or a%:b%. Found `{text}`."
            )
        if match[4] is None:
            start, stop = int(match[1]), int(match[2] or match[1])
            _check_upwards(start, stop, text, option)
        else:
            start, stop = _part(int(match[3]), int(match[4]), num_tokens, text, option)
        # Not all of them where the last one is beyond: it may be any number.
        chosen = list(range(start, stop + 1)) if stop < num_tokens else [stop]
    if chosen is not None and (not chosen or chosen[-1] >= num_tokens):
        raise InputError(
            f"`--{option} {text}` should name tokens between 0 and {num_tokens - 1} at every "
            f"length. Found none, or one beyond, at {num_tokens} tokens."
        )
    return chosen


def _part(low: int, high: int, num_tokens: int, text: str, option: str) -> tuple[int, int]:
    """The first and the last token of which a part lies between two hundredths."""
    if not low < high <= 100:
        raise InputError(
            f"`--{option}` should go from one share to a larger one, such as 90%:100%. "
            f"Found `{text}`."
        )
    return low * num_tokens // 100, -(-high * num_tokens // 100) - 1


def _check_upwards(start: int, stop: int, text: str, option: str) -> None:
    if stop < start:
        raise InputError(
            f"`--{option}` should count upwards, such as {stop}:{start}. Found `{text}`."
        )


def parse_bytes(text: str | int) -> int:
    """Read a memory size such as ``1GiB`` or ``500MB``.

    >>> parse_bytes("1GiB")
    1073741824
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", shown(text))
    size = 0
    if match is not None and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 2**20:
        raise InputError(
            f"`memory` should be a size of at least 1MiB, such as 1GiB. Found `{shown(text)}`."
        )
    return size
