"""One check for each kind of entry: what may stand there, as the sweep uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lipscope.engine.ranges import parse_bytes, parse_integers
from lipscope.engine.source import Source, nearest
from lipscope.errors import InputError

Check = Callable[[Source, str, Any], Any]
ALL, NONE = "all", "none"
OF_TEXT = "text"


def items(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def words(choices: Sequence[str]) -> Check:
    """One word or a list of words, each of these."""

    def check(source: Source, key: str, value: Any) -> tuple[str, ...]:
        for i, word in enumerate(items(value)):
            if word not in choices:
                source.fail(
                    f"`{key}` should be one of {', '.join(choices)}. Found `{word}`."
                    f"{nearest(str(word), choices)}",
                    key,
                    i,
                )
        return _once(source, key, items(value))

    return check


def theorems(names: Sequence[str], quick: Sequence[str]) -> Check:
    """Names of the catalogue; ``all`` for those that do not take seconds a head; or ``none``."""

    def check(source: Source, key: str, value: Any) -> tuple[str, ...]:
        found: list[str] = []
        for i, word in enumerate([] if value in (NONE, None) else items(value)):
            if word != ALL and word not in names:
                hint = nearest(str(word), names) or " `lipscope theorems` lists them."
                source.fail(
                    f"`{key}` should be names of theorems, or all. Found `{word}`.{hint}", key, i
                )
            found += quick if word == ALL else [word]
        return tuple(dict.fromkeys(found))

    return check


def layers(source: Source, key: str, value: Any) -> tuple[int, ...] | None:
    """``all``, indices, or ranges such as ``0:5``."""
    return None if value in (ALL, None) else _integers(source, key, value, least=0)


def lengths(source: Source, key: str, value: Any) -> tuple[int, ...]:
    """Numbers of tokens, or ranges such as ``2:512:10``, in increasing order."""
    return tuple(sorted(_integers(source, key, value, least=1)))


def seeds(source: Source, key: str, value: Any) -> tuple[int, ...]:
    """Whole numbers below 2^63, or ranges such as ``0:9``."""
    found = _integers(source, key, value, least=0)
    if found and max(found) >= 2**63:
        source.fail(f"`{key}` should be below 2^63. Found {max(found):.3g}.", key)
    return found


def _integers(source: Source, key: str, value: Any, *, least: int) -> tuple[int, ...]:
    found: list[int] = []
    for i, item in enumerate(items(value)):
        if isinstance(item, str):
            try:
                found += parse_integers(item, key)
                continue
            except InputError:
                pass
        elif type(item) is int and item >= least:
            found.append(item)
            continue
        source.fail(
            f"`{key}` should be whole numbers from {least}, or ranges such as 2:512:10. "
            f"Found `{item}`.",
            key,
            i,
        )
    if found and min(found) < least:
        source.fail(f"`{key}` should be at least {least}. Found {min(found)}.", key)
    return _once(source, key, found)


def radii(source: Source, key: str, value: Any) -> tuple[float | str, ...]:
    """Positive numbers, or ``text`` for the largest token norm of the text."""
    for i, item in enumerate(items(value)):
        if item != OF_TEXT and not (_is_number(item) and item > 0 and math.isfinite(item)):
            source.fail(f"`{key}` should be positive numbers, or text. Found `{item}`.", key, i)
    return _once(source, key, [v if v == OF_TEXT else float(v) for v in items(value)])


def radius(source: Source, key: str, value: Any) -> float | str:
    """A positive number, or a word for how it is found."""
    if value in ("row", "inputs", "norm"):
        return value
    if not (_is_number(value) and value > 0 and math.isfinite(value)):
        source.fail(
            f"`{key}` should be a positive number, row, inputs or norm. Found `{key} = {value}`.",
            key,
        )
    return float(value)


def path(source: Source, key: str, value: Any) -> str:
    """A path."""
    if not isinstance(value, str | Path) or value == "":
        source.fail(f"`{key}` should be a folder. Found `{value}`.", key)
    return str(value)


def flag(source: Source, key: str, value: Any) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        source.fail(f"`{key}` should be true or false. Found `{value}`.", key)
    return value


def number(source: Source, key: str, value: Any) -> float:
    """A number between 0 and 1."""
    if not (_is_number(value) and 0 < value < 1):
        source.fail(f"`{key}` should be between 0 and 1. Found `{value}`.", key)
    return float(value)


def whole(least: int) -> Check:
    """A whole number, not below the least one."""

    def check(source: Source, key: str, value: Any) -> int:
        if type(value) is not int or value < least:
            source.fail(
                f"`{key}` should be a whole number of at least {least}. Found `{value}`.", key
            )
        return value

    return check


def word(source: Source, key: str, value: Any) -> str:
    """A word; an index of a token may be a number."""
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        source.fail(f"`{key}` should be a word. Found `{value}`.", key)
    return str(value)


def one_of(*choices: str) -> Check:
    """One of these words."""

    def check(source: Source, key: str, value: Any) -> str:
        if value not in choices:
            source.fail(f"`{key}` should be one of {', '.join(choices)}. Found `{value}`.", key)
        return value

    return check


def memory(source: Source, key: str, value: Any) -> str:
    """A size such as ``1GiB``."""
    try:
        parse_bytes(value)
    except InputError as problem:
        source.fail(str(problem), key)
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _once(source: Source, key: str, found: Sequence[Any]) -> tuple[Any, ...]:
    """Each value once: a repeated one would be the same job twice."""
    if not found:
        source.fail(f"`{key}` should name at least one. Found none.", key)
    return tuple(dict.fromkeys(found))
