"""One check for each kind of entry: what may stand there, as the sweep uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lipscope.engine.ranges import parse_bytes, parse_integers
from lipscope.engine.source import Source, nearest
from lipscope.errors import InputError, shown

Check = Callable[[Source, str, Any], Any]
ALL, NONE = "all", "none"
OF_TEXT = "text"


def argument(check: Check, name: str, value: Any) -> Any:
    """The value of one argument of a verb, checked."""
    return check(Source("", {}), name, value)


def items(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return list(value) if isinstance(value, list | tuple | range) else [value]


def words(choices: Sequence[str]) -> Check:
    """One word or a list of words, each of these."""

    def check(source: Source, key: str, value: Any) -> tuple[str, ...]:
        for i, word in enumerate(items(value)):
            if not isinstance(word, str) or word not in choices:
                source.fail(
                    f"`{key}` should be one of {', '.join(choices)}. Found `{shown(word)}`."
                    f"{nearest(shown(word), choices)}",
                    key,
                    i,
                )
        return _once(source, key, items(value))

    return check


def theorems(source: Source, key: str, value: Any) -> tuple[str, ...]:
    """Names of the catalogue; ``all`` for those that do not take seconds a head; or ``none``."""
    from lipscope.theorems import catalogue  # not above: it brings torch

    wanted = [] if _says(value, NONE) else items(value)
    known = {one.name: one for one in catalogue() if "eps" not in one.needs} if wanted else {}
    found: list[str] = []
    for i, word in enumerate(wanted):
        if not isinstance(word, str) or word not in (ALL, *known):
            hint = nearest(shown(word), list(known)) or " `lipscope theorems` lists them."
            source.fail(
                f"`{key}` should be names of theorems, or all. Found `{shown(word)}`.{hint}",
                key,
                i,
            )
        found += [n for n, one in known.items() if not one.slow] if word == ALL else [word]
    return tuple(dict.fromkeys(found))


def layers(source: Source, key: str, value: Any) -> tuple[int, ...] | None:
    """``all``, indices, or ranges such as ``0:5``."""
    return None if _says(value, ALL) else _integers(source, key, value, least=0, most=100_000)


def lengths(source: Source, key: str, value: Any) -> tuple[int, ...]:
    """Numbers of tokens, or ranges such as ``2:512:10``, in increasing order."""
    return tuple(sorted(_integers(source, key, value, least=1, most=10**7)))


def sides(source: Source, key: str, value: Any) -> tuple[int, ...]:
    """Sides of pictures in pixels, in increasing order."""
    return tuple(sorted(_integers(source, key, value, least=1, most=4096)))


def seeds(source: Source, key: str, value: Any) -> tuple[int, ...]:
    """Whole numbers below 2^63, or ranges such as ``0:9``."""
    return _integers(source, key, value, least=0, most=2**63 - 1)


def _integers(source: Source, key: str, value: Any, *, least: int, most: int) -> tuple[int, ...]:
    found: list[int] = []
    for i, item in enumerate(items(value)):
        if isinstance(item, str):
            try:
                found += parse_integers(item, key)
            except InputError as problem:
                source.fail(str(problem).replace("`--", "`"), key, i)
        elif is_whole(item) and item >= least:
            found.append(int(item))
        else:
            source.fail(
                f"`{key}` should be whole numbers from {least}, or ranges such as 2:512:10. "
                f"Found `{shown(item)}`.",
                key,
                i,
            )
    if found and min(found) < least:
        source.fail(f"`{key}` should be at least {least}. Found `{shown(min(found))}`.", key)
    if found and max(found) > most:
        bound = "below 2^63" if most == 2**63 - 1 else f"at most {most:,}"
        source.fail(f"`{key}` should be {bound}. Found `{shown(max(found))}`.", key)
    return _once(source, key, found)


def radii(source: Source, key: str, value: Any) -> tuple[float | str, ...]:
    """Positive numbers, or ``text`` for the largest token norm of the text."""
    for i, item in enumerate(items(value)):
        fits = item == OF_TEXT if isinstance(item, str) else is_number(item) and float(item) > 0
        if not fits:
            source.fail(
                f"`{key}` should be positive numbers, or text. Found `{shown(item)}`.", key, i
            )
    return _once(source, key, [v if isinstance(v, str) else float(v) for v in items(value)])


def radius(source: Source, key: str, value: Any) -> float | str:
    """A positive number, or a word for how it is found."""
    if isinstance(value, str) and value in ("row", "inputs", "norm"):
        return value
    if not (is_number(value) and float(value) > 0):
        source.fail(
            f"`{key}` should be a positive number, row, inputs or norm. "
            f"Found `{key} = {shown(value)}`.",
            key,
        )
    return float(value)


def path(source: Source, key: str, value: Any) -> str:
    """A path."""
    name = str(value) if isinstance(value, str | Path) else ""
    if not name.strip() or not name.isprintable():
        source.fail(f"`{key}` should be a folder. Found `{shown(value)}`.", key)
    return str(value)


def flag(source: Source, key: str, value: Any) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        source.fail(f"`{key}` should be true or false. Found `{shown(value)}`.", key)
    return value


def number(source: Source, key: str, value: Any) -> float:
    """A number between 0 and 1."""
    if not (is_number(value) and 0 < value < 1):
        source.fail(f"`{key}` should be between 0 and 1. Found `{shown(value)}`.", key)
    return float(value)


def whole(least: int, most: int) -> Check:
    """A whole number between these, both included."""

    def check(source: Source, key: str, value: Any) -> int:
        if not is_whole(value) or not least <= value <= most:
            bound = f"at most {most:,}" if is_whole(value) and value > most else f"at least {least}"
            source.fail(
                f"`{key}` should be a whole number of {bound}. Found `{shown(value)}`.", key
            )
        return int(value)

    return check


def window_length(length: Any) -> Any:
    """The number of tokens of the one window that a verb looks at: 64 if None."""
    if length is None:
        return 64
    return argument(whole(1, 10**6), "length", length) if is_whole(length) else length


def no_several(options: Mapping[str, Any]) -> None:
    """Refuse, in a verb that looks at one layer or window, the options of those that take several.

    >>> no_several({"layers": [3]})
    Traceback (most recent call last):
    lipscope.errors.InputError: This verb has no option `layers`; write `layer=`.
    """
    for name in ("layers", "lengths"):
        if name in options:
            raise InputError(f"This verb has no option `{name}`; write `{name[:-1]}=`.")


def word(source: Source, key: str, value: Any) -> str:
    """A word; an index of a token may be a number."""
    text = shown(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not text.strip() or not text.isprintable():
        source.fail(f"`{key}` should be a word. Found `{shown(value)}`.", key)
    return text


def one_of(*choices: str) -> Check:
    """One of these words."""

    def check(source: Source, key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            source.fail(
                f"`{key}` should be one of {', '.join(choices)}. Found `{shown(value)}`.", key
            )
        return value

    return check


def memory(source: Source, key: str, value: Any) -> str:
    """A size such as ``1GiB``."""
    try:
        parse_bytes(value)
    except InputError as problem:
        source.fail(str(problem), key)
    return str(value)


def is_number(value: Any) -> bool:
    """A finite real number that fits a float.

    >>> is_number(2), is_number(True), is_number(float("inf")), is_number(10**400)
    (True, False, False, False)
    """
    try:
        return isinstance(value, Real) and type(value) is not bool and math.isfinite(value)
    except OverflowError:
        return False


def is_whole(value: Any) -> bool:
    """A whole number, numpy's included; no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _says(value: Any, word: str) -> bool:
    return value is None or (isinstance(value, str) and value == word)


def _once(source: Source, key: str, found: Sequence[Any]) -> tuple[Any, ...]:
    """Each value once: a repeated one would be the same job twice."""
    if not found:
        source.fail(f"`{key}` should name at least one. Found none.", key)
    return tuple(dict.fromkeys(found))
