"""Validation of user input: ranges of numbers and tokens, sizes, one check per kind of entry."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

from lipscope.errors import InputError, shown

# Moves copies of every token against each other instead of tokens: mass splitting.
COPIES = "copies"
# Limits of a request: longer lists, and numbers with more digits, are typing errors.
_MOST_NUMBERS = 100_000
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
                f"`{option}` should be whole numbers such as 16,64 or 2:512:10. Found `{text}`."
            )
        start, stop, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        _check_upwards(start, stop, text, option)
        if len(values) + (stop - start) // step >= _MOST_NUMBERS:
            raise InputError(
                f"`{option}` should name at most {_MOST_NUMBERS:,} numbers. Found more: `{text}`."
            )
        values.extend(range(start, stop + 1, step))
    return list(dict.fromkeys(values))


def parse_tokens(text: str, num_tokens: int, option: str) -> list[int] | None:
    """Token indices of ``all`` (None), ``first``, ``last``, ``not-first``, ``a:b`` or ``a%:b%``.

    A percentage range holds every token that overlaps it, so its size scales with the number of
    tokens. Several ranges ``a:b`` are separated by commas, in ascending order. The option ``move``
    also takes ``copies``, which selects all tokens.

    >>> parse_tokens("1:3", 8, "move"), parse_tokens("90%:100%", 32, "move")
    ([1, 2, 3], [28, 29, 30, 31])
    >>> parse_tokens("0:2,5", 8, "move")
    [0, 1, 2, 5]
    """
    if "," in text:
        parts = [parse_tokens(part, num_tokens, option) for part in text.split(",")]
        chosen = [index for part in parts for index in part or ()]
        if not all(re.fullmatch(r"[\d:]+", part) for part in text.split(",")) or any(
            b <= a for a, b in pairwise(chosen)
        ):
            raise InputError(
                f"`{option}` should name disjoint ranges a:b in ascending order, such as 0:2,5. "
                f"Found `{text}`."
            )
        return chosen
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
                f"`{option}` should be {', '.join(named)}, a:b or a%:b%. Found `{text}`."
            )
        if match[4] is None:
            start, stop = int(match[1]), int(match[2] or match[1])
            _check_upwards(start, stop, text, option)
        else:
            start, stop = _part(int(match[3]), int(match[4]), num_tokens, text, option)
        # If the end is out of range, the end alone suffices: it may be huge.
        chosen = list(range(start, stop + 1)) if stop < num_tokens else [stop]
    if chosen is not None and (not chosen or chosen[-1] >= num_tokens):
        raise InputError(
            f"`{option} = {text}` should name tokens between 0 and {num_tokens - 1} at every "
            f"length. Found none, or one out of range, at {num_tokens} tokens."
        )
    return chosen


def _part(low: int, high: int, num_tokens: int, text: str, option: str) -> tuple[int, int]:
    """The first and the last token that overlap a percentage range."""
    if not low < high <= 100:
        raise InputError(
            f"`{option}` should go from one percentage to a larger one, such as 90%:100%. "
            f"Found `{text}`."
        )
    return low * num_tokens // 100, -(-high * num_tokens // 100) - 1


def _check_upwards(start: int, stop: int, text: str, option: str) -> None:
    if stop < start:
        raise InputError(f"`{option}` should be ascending, such as {stop}:{start}. Found `{text}`.")


FREE = "free"  # all free memory, or a share of it such as ``free/2``


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
            "`memory` should be a size of at least 1MiB, such as 1GiB, or free. Found "
            f"`{shown(text)}`."
        )
    return size


# --- entries with their line numbers


@dataclass(frozen=True)
class Entries:
    """Entries of a specification."""

    name: str  # the file, or "" for values given from Python
    values: Mapping[str, Any]  # entries by key
    # line of each key, and of each item of a list, where known
    lines: Mapping[tuple[str | int, ...], int] = field(default_factory=dict)

    def fail(self, message: str, *where: str | int) -> NoReturn:
        """Raise a one-line error with its location: a key, or an index in its list."""
        line = self.lines.get(where) or self.lines.get(where[:1])
        place = ", ".join([f"`{self.name}`"] * bool(self.name) + [f"line {line}"] * bool(line))
        raise InputError(f"{place}: {message}" if place else message)

    def place(self, problem: InputError) -> NoReturn:
        """Raise a later error with the line of the key that its message begins with."""
        key = re.match(r"`(\w+)`", str(problem))
        self.fail(str(problem), key[1] if key else "")

    def refuse(self, should: str, found: Any, key: str, *index: int, hint: str = "") -> NoReturn:
        """Raise an error with the expected and the actual value."""
        text = isinstance(found, str) and re.fullmatch(r"[-+\d.e]+", found) is not None
        value = f"`{found!r}`, a str" if text else f"`{shown(found)}`"
        self.fail(f"`{key}` should be {should}. Found {value}.{hint}", key, *index)

    def check_keys(self, known: Sequence[str]) -> None:
        """Refuse an unknown key, suggesting the nearest known one."""
        for key in self.values:
            if key not in known:
                hint = nearest(str(key), known) or f" Known are {', '.join(known)}."
                self.fail(f"`{key}` is not an entry of a sweep.{hint}", key)


def nearest(word: str, choices: Sequence[str]) -> str:
    """A suggestion for a misspelt word, or "".

    >>> nearest("lenghts", ["layers", "lengths"])
    ' Did you mean `lengths`?'
    """
    short = [one for one in choices if len(one) > 2 and word.startswith(one)]
    close = short or difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


# --- checks

Check = Callable[[Entries, str, Any], Any]
ALL, NONE = "all", "none"
OF_TEXT = "text"


def argument(check: Check, name: str, value: Any) -> Any:
    """The checked value of an argument of a verb."""
    return check(Entries("", {}), name, value)


def items(value: Any) -> list[Any]:
    """The items of a list or one-dimensional array; anything else as a list of one."""
    several = isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) == 1
    return list(value) if several else [value]


def words(choices: Sequence[str]) -> Check:
    """One word or a list of words, each one of ``choices``."""

    def check(source: Entries, key: str, value: Any) -> tuple[str, ...]:
        for i, word in enumerate(items(value)):
            if not isinstance(word, str) or word not in choices:
                hint = nearest(shown(word), choices)
                source.refuse(f"one of {', '.join(choices)}", word, key, i, hint=hint)
        return _each_once(source, key, items(value))

    return check


def theorem_names(source: Entries, key: str, value: Any) -> tuple[str, ...]:
    """Names in the catalogue, ``all`` for all that are not slow, or ``none``."""
    from lipscope.theorems import catalogue  # not at the top: it imports torch

    wanted = [] if _says(value, NONE) else items(value)
    known = {one.name: one for one in catalogue() if "eps" not in one.needs} if wanted else {}
    found: list[str] = []
    for i, word in enumerate(wanted):
        if not isinstance(word, str) or word not in (ALL, *known):
            hint = nearest(shown(word), list(known)) or " `lipscope theorems` lists them."
            source.refuse("names of theorems, or all", word, key, i, hint=hint)
        found += [n for n, one in known.items() if not one.slow] if word == ALL else [word]
    return tuple(dict.fromkeys(found))


def layers(source: Entries, key: str, value: Any) -> tuple[int, ...] | None:
    """``all``, indices, or ranges such as ``0:5``."""
    return None if _says(value, ALL) else integers(0, 100_000)(source, key, value)


def integers(least: int, most: int, *, rising: bool = False) -> Check:
    """Whole numbers in ``[least, most]``, or ranges such as ``2:512:10``; ``rising``: sorted."""

    def check(source: Entries, key: str, value: Any) -> tuple[int, ...]:
        found: list[int] = []
        for i, item in enumerate(items(value)):
            if isinstance(item, str):
                try:
                    found += parse_integers(item, key)
                except InputError as problem:
                    source.fail(str(problem), key, i)
            elif is_whole(item) and item >= least:
                found.append(int(item))
            else:
                should = f"whole numbers from {least}, or ranges such as 2:512:10"
                source.refuse(should, item, key, i)
        if found and min(found) < least:
            source.refuse(f"at least {least}", min(found), key)
        if found and max(found) > most:
            bound = "below 2^63" if most == 2**63 - 1 else f"at most {most:,}"
            source.refuse(bound, max(found), key)
        return _each_once(source, key, sorted(found) if rising else found)

    return check


def radii(source: Entries, key: str, value: Any) -> tuple[float | str, ...]:
    """Positive numbers, or ``text`` for the largest token norm of the text."""
    for i, item in enumerate(items(value)):
        fits = item == OF_TEXT if isinstance(item, str) else is_number(item) and float(item) > 0
        if not fits:
            source.refuse("positive numbers, or text", item, key, i)
    return _each_once(source, key, [v if isinstance(v, str) else float(v) for v in items(value)])


def radius(source: Entries, key: str, value: Any) -> float | str:
    """A positive number, or a word for its source."""
    if isinstance(value, str) and value in ("row", "inputs", "norm"):
        return value
    if not (is_number(value) and float(value) > 0):
        source.fail(
            f"`{key}` should be a positive number, row, inputs or norm. "
            f"Found `{key} = {shown(value)}`.",
            key,
        )
    return float(value)


def path(source: Entries, key: str, value: Any) -> str:
    """A path."""
    name = str(value) if isinstance(value, str | Path) else ""
    if not name.strip() or not name.isprintable():
        source.refuse("a folder", value, key)
    return name


def flag(source: Entries, key: str, value: Any) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        source.refuse("true or false", value, key)
    return value


def between_0_and_1(source: Entries, key: str, value: Any) -> float:
    """A number between 0 and 1."""
    if not (is_number(value) and 0 < value < 1):
        source.refuse("between 0 and 1", value, key)
    return float(value)


def whole_number(least: int, most: int) -> Check:
    """A whole number in ``[least, most]``."""

    def check(source: Entries, key: str, value: Any) -> int:
        if not is_whole(value) or not least <= value <= most:
            bound = f"at most {most:,}" if is_whole(value) and value > most else f"at least {least}"
            source.refuse(f"a whole number of {bound}", value, key)
        return int(value)

    return check


def word(source: Entries, key: str, value: Any) -> str:
    """A word; token indices may be numbers."""
    text = shown(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not text.strip() or not text.isprintable():
        source.refuse("a word", value, key)
    return text


def one_of(*choices: str) -> Check:
    """One of ``choices``."""

    def check(source: Entries, key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            source.refuse(f"one of {', '.join(choices)}", value, key)
        return value

    return check


def memory(source: Entries, key: str, value: Any) -> str:
    """A size such as ``1GiB``, or ``free``."""
    try:
        _ = value == FREE or parse_bytes(value)
    except InputError as problem:
        source.fail(str(problem), key)
    return str(value)


def no_several(options: Mapping[str, Any]) -> None:
    """Refuse ``layers`` and ``lengths`` in a verb for a single layer or window.

    >>> no_several({"layers": [3]})
    Traceback (most recent call last):
    lipscope.errors.InputError: This verb has no option `layers`; write `layer=`, of a decision \
`at_layer=`.
    """
    for name, one in (("layers", "`layer=`, of a decision `at_layer=`"), ("lengths", "`length=`")):
        if name in options:
            raise InputError(f"This verb has no option `{name}`; write {one}.")


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number that fits a float.

    >>> is_number(2), is_number(True), is_number(float("inf")), is_number(10**400)
    (True, False, False, False)
    """
    try:
        return isinstance(value, Real) and type(value) is not bool and math.isfinite(value)
    except OverflowError:
        return False


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, including numpy's but not bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _says(value: Any, word: str) -> bool:
    return value is None or (isinstance(value, str) and value == word)


def _each_once(source: Entries, key: str, found: Sequence[Any]) -> tuple[Any, ...]:
    """The unique values: a repeated one would be the same job twice."""
    if not found:
        source.fail(f"`{key}` should name at least one. Found none.", key)
    return tuple(dict.fromkeys(found))
