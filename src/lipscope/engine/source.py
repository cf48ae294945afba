"""A specification as it was written: values, and the line on which each of them stands."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lipscope.errors import InputError

# The scalars of YAML 1.2. PyYAML knows those of 1.1, where `2:50:4` is a number in base 60,
# `1e-3` is a word and `no` is false.
_SCALARS = {
    "null": r"^(~|null|Null|NULL|)$",
    "bool": r"^(true|True|TRUE|false|False|FALSE)$",
    "int": r"^[-+]?[0-9]+$",
    "float": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$",
}


_MOST = 100_000  # characters, and values, of a specification


@dataclass(frozen=True)
class Source:
    """Entries of a specification.

    Attributes:
        name: The file, or "" for values given from Python.
        values: Entries by key.
        lines: Line of each key, and of each item of a list, where known.
    """

    name: str
    values: Mapping[str, Any]
    lines: Mapping[tuple[str | int, ...], int] = field(default_factory=dict)

    def fail(self, message: str, *where: str | int) -> NoReturn:
        """Raise an error of one line that says where.

        Args:
            message: What should be, and what was found.
            *where: Key, and index in its list.
        """
        line = self.lines.get(where) or self.lines.get(where[:1])
        place = ", ".join([f"`{self.name}`"] * bool(self.name) + [f"line {line}"] * bool(line))
        raise InputError(f"{place}: {message}" if place else message)

    def check_keys(self, known: Sequence[str]) -> None:
        """Refuse a key that is not known, with the nearest one."""
        for key in self.values:
            if key not in known:
                hint = nearest(str(key), known) or f" Known are {', '.join(known)}."
                self.fail(f"`{key}` is not an entry of a sweep.{hint}", key)


def nearest(word: str, choices: Sequence[str]) -> str:
    """A suggestion for a misspelt word, or nothing.

    >>> nearest("lenghts", ["layers", "lengths"])
    ' Did you mean `lengths`?'
    """
    close = difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def read_source(spec: str | Path | Mapping[str, Any]) -> Source:
    """Read a YAML file, or take values that are given.

    Args:
        spec: Path of the file, or entries by key.

    Returns:
        Its entries.

    Raises:
        InputError: If it is no file of entries by key.
    """
    if isinstance(spec, Mapping):
        return Source("", dict(spec))
    if not isinstance(spec, str | Path):
        raise InputError(
            "The specification should be the path of a YAML file, or a mapping of entries. Found "
            f"`{type(spec).__name__}`."
        )
    import yaml

    from lipscope.models import read_text

    path = Path(spec)
    text = read_text(path, "The specification", "a readable YAML file")
    try:
        node = yaml.compose(text, Loader=_loader()) if len(text) <= _MOST else None
        if not isinstance(node, yaml.MappingNode) or _size(node, {}) > _MOST:
            raise InputError(
                f"`{path}` should hold entries such as `models: [minilm]`, and at most {_MOST:,} "
                "characters and values. Found none, or more."
            )
        return _source(str(path), node)
    # Whatever makes a date of "x" raises what it likes.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"`{path}` should be YAML. Found {_in_one_line(problem)}.") from None


def _size(node: Any, known: dict[Any, float]) -> float:
    """How many values a node stands for: aliases of aliases multiply, and may hold themselves."""
    if node not in known:
        known[node] = math.inf
        parts = node.value if isinstance(node.value, list) else []
        known[node] = 1.0 + sum(
            _size(one, known) for part in parts for one in (part if type(part) is tuple else [part])
        )
    return known[node]


def _source(name: str, node: Any) -> Source:
    loader = _loader()("")
    values: dict[str, Any] = {}
    lines: dict[tuple[str | int, ...], int] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in values:
            raise InputError(
                f"`{name}`, line {line}: `{key}` should appear once. Found it on "
                f"line {lines[key,]} too."
            )
        lines[key,] = line
        values[key] = loader.construct_object(value_node, deep=True)
        if value_node.id == "sequence":
            for i, item in enumerate(value_node.value):
                lines[key, i] = item.start_mark.line + 1
    return Source(name, values, lines)


def _loader() -> Any:
    """A safe loader that reads scalars as YAML 1.2 does."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern in _SCALARS.items():
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), None)
    return loader


def _in_one_line(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "lists in lists in lists, too deep to be read"
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or " ".join(str(problem).split())
    return what if mark is None else f"{what} on line {mark.line + 1}"
