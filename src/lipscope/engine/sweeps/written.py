"""A specification that was written down: its models, checkpoints and texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lipscope.engine.checks import items
from lipscope.engine.source import Source, read_source
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
from lipscope.errors import InputError, shown
from lipscope.models import default_text, read_texts

DEFAULT, IMAGES = "default", "images"


def read_spec(spec: str | Path | Mapping[str, Any]) -> Request:
    """Read and check a specification.

    Args:
        spec: Path of a YAML file, or entries by key.

    Returns:
        It, with its texts.

    Raises:
        InputError: For every entry that cannot be, with its key and line.

    >>> made = read_spec({"models": "minilm", "lengths": "16:64:16", "layers": [0, 1]}).spec
    >>> made.lengths, made.layers, made.models[0].name
    ((16, 32, 48, 64), (0, 1), 'minilm')
    """
    source = read_source(spec)
    source.check_keys(["models", "texts", *CHECKS])
    values = {
        key: CHECKS[key](source, key, value)
        for key, value in source.values.items()
        if key not in ("models", "texts")
    }
    sources: dict[str, Any] = _texts(source) if "images" not in values else _images(source, values)
    if "images" not in values:
        values = {"lengths": LENGTHS, "samples": SAMPLES} | values
    made = Spec(models=tuple(_models(source)), texts=digests(sources), **values)
    check_together(source, made)
    return Request(made, sources, Path(source.name).stem)


def _images(source: Source, values: Mapping[str, Any]) -> dict[str, str]:
    """The one source of a run on pictures."""
    if "texts" in source.values:
        source.fail("`images` take the place of texts. Found both; leave one out.", "images")
    return {IMAGES: values["images"]}


def _texts(source: Source) -> dict[str, str]:
    """The content of every text by its name: that of its file without folder and ending."""
    texts: dict[str, str] = {}
    for i, entry in enumerate(items(source.values.get("texts", DEFAULT))):
        if not isinstance(entry, str | Path):
            source.fail(f"`texts` should be names of files. Found `{shown(entry)}`.", "texts", i)
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


def _models(source: Source) -> Iterator[Model]:
    """Every model, and every checkpoint as one."""
    entries = items(source.values.get("models", []))
    if not entries:
        source.fail("`models` should name at least one model, such as `models: [minilm]`.")
    seen: set[str] = set()
    for i, entry in enumerate(entries):
        for name, step in _named(source, entry, i):
            if name in seen:
                source.fail(
                    f"`models` should name each model once. Found `{name}` twice.", "models", i
                )
            seen.add(name)
            yield Model(name, step, i)


def _named(source: Source, entry: Any, i: int) -> Iterator[tuple[str, int | None]]:
    if isinstance(entry, str) and entry:
        yield entry, None
        return
    if not isinstance(entry, dict) or set(entry) != {"name", "checkpoints"}:
        source.fail(
            f"`models` should be names, or `name` with `checkpoints`. Found `{shown(entry)}`.",
            "models",
            i,
        )
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
