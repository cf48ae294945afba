"""The file of a sweep: its entries with their lines, its models, checkpoints and texts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lipscope.engine.checks import Entries, items
from lipscope.engine.spec import (
    CHECKS,
    LENGTHS,
    SAMPLES,
    Model,
    Request,
    Spec,
    check_together,
    digests,
)
from lipscope.errors import InputError
from lipscope.sources import default_text, read_text, read_texts

DEFAULT, IMAGES = "default", "images"
# The scalars of YAML 1.2. PyYAML knows those of 1.1, where `2:50:4` is a number in base 60,
# `1e-3` is a word and `no` is false.
_SCALARS = {
    "null": r"^(~|null|Null|NULL|)$",
    "bool": r"^(true|True|TRUE|false|False|FALSE)$",
    "int": r"^[-+]?[0-9]+$",
    "float": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$",
}
_MOST = 100_000  # characters, and values, of a specification


def read_spec(spec: str | Path | Mapping[str, Any]) -> Request:
    """Read and check a specification, of a YAML file or given by key, with its texts.

    Raises:
        InputError: For every entry that cannot be, with its key and line.

    >>> made = read_spec({"models": "minilm", "lengths": "16:64:16", "layers": [0, 1]}).spec
    >>> made.lengths, made.layers, made.models[0].name
    ((16, 32, 48, 64), (0, 1), 'minilm')
    """
    source = _read_entries(spec)
    source.check_keys(["models", "texts", *CHECKS])
    values = {
        key: CHECKS[key](source, key, value)
        for key, value in source.values.items()
        if key not in ("models", "texts")
    }
    if "images" in values:
        if "texts" in source.values:
            source.fail("`images` take the place of texts. Found both; leave one out.", "images")
        sources = {IMAGES: values["images"]}
    else:
        sources = _text_contents(source)
        values = {"lengths": LENGTHS, "samples": SAMPLES} | values
    made = Spec(models=tuple(_models_of(source)), texts=digests(sources), **values)
    check_together(source, made)
    return Request(made, sources, Path(source.name).stem)


def _text_contents(source: Entries) -> dict[str, str]:
    """The content of every text by its name: that of its file without folder and ending."""
    texts: dict[str, str] = {}
    for i, entry in enumerate(items(source.values.get("texts", DEFAULT))):
        if not isinstance(entry, str | Path):
            source.refuse("names of files", entry, "texts", i)
        name = DEFAULT if entry == DEFAULT else Path(entry).stem
        if name in texts:
            source.fail(
                f"`texts` should have names of their own. Found `{name}` twice.", "texts", i
            )
        try:
            texts[name] = (
                default_text()
                if entry == DEFAULT
                else read_texts(entry, "`texts`", "readable text files")
            )
        except InputError as problem:
            source.fail(str(problem), "texts", i)
        if not texts[name].strip():
            source.fail(f"`texts` should not be empty. Found no words in `{entry}`.", "texts", i)
    return texts


def _models_of(source: Entries) -> Iterator[Model]:
    """Every model, and every checkpoint as one."""
    entries = items(source.values.get("models", []))
    if not entries:
        source.fail("`models` should name at least one model, such as `models: [minilm]`.")
    seen: set[str] = set()
    for i, entry in enumerate(entries):
        for name, step in _checkpoints_of(source, entry, i):
            if name in seen:
                source.fail(
                    f"`models` should name each model once. Found `{name}` twice.", "models", i
                )
            seen.add(name)
            yield Model(name, step, i)


def _checkpoints_of(source: Entries, entry: Any, i: int) -> Iterator[tuple[str, int | None]]:
    if isinstance(entry, str) and entry:
        yield entry, None
        return
    if not isinstance(entry, dict) or set(entry) != {"name", "checkpoints"}:
        source.refuse("names, or `name` with `checkpoints`", entry, "models", i)
    root, folder = str(entry["name"]), Path(os.path.expanduser(str(entry["name"])))
    found = [str(one) for one in items(entry["checkpoints"])]
    if os.path.isdir(folder):
        matches = [sorted(folder.glob(one), key=lambda p: _step(p.name) or 0) for one in found]
        for pattern, paths in zip(found, matches, strict=True):
            if not paths:
                source.fail(
                    f"`checkpoints` should be folders in `{root}`. Found none named `{pattern}`.",
                    "models",
                    i,
                )
        yield from (
            (f"{root}/{p.relative_to(folder)}", _step(p.name)) for ps in matches for p in ps
        )
    else:
        yield from ((f"{root}@{one}", _step(one)) for one in found)


def _step(name: str) -> int | None:
    """The training step in the name of a checkpoint: its last number.

    >>> _step("checkpoint-1000"), _step("main")
    (1000, None)
    """
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


# --- YAML


def _read_entries(spec: str | Path | Mapping[str, Any]) -> Entries:
    """The entries of a YAML file, or values that are given."""
    if isinstance(spec, Mapping):
        return Entries("", dict(spec))
    if not isinstance(spec, str | Path):
        raise InputError(
            "The specification should be the path of a YAML file, or a mapping of entries. Found "
            f"`{type(spec).__name__}`."
        )
    import yaml

    path = Path(spec)
    text = read_text(path, "The specification", "a readable YAML file")
    try:
        node = yaml.compose(text, Loader=_loader()) if len(text) <= _MOST else None
        if not isinstance(node, yaml.MappingNode) or _count_values(node, {}) > _MOST:
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


def _count_values(node: Any, known: dict[Any, float]) -> float:
    """How many values a node stands for: aliases of aliases multiply, and may hold themselves."""
    if node not in known:
        known[node] = math.inf
        parts = node.value if isinstance(node.value, list) else []
        known[node] = 1.0 + sum(
            _count_values(one, known)
            for part in parts
            for one in (part if type(part) is tuple else [part])
        )
    return known[node]


def _source(name: str, node: Any) -> Entries:
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
    return Entries(name, values, lines)


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
