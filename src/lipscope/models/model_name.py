"""Names of models, read before anything is loaded or built."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipscope.errors import InputError, shown

_COUNTED = re.compile("layer|expert|depth")
_MOST = 10_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDICES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}


def parted(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """A model's name without its revision, and that.

    Args:
        name: As for `load_model`.
        revision: Revision, if not in the name.

    Returns:
        Both.

    Raises:
        InputError: If it is no name.

    >>> parted("org/model@main"), parted("minilm")
    (('org/model', 'main'), ('minilm', None))
    """
    for what, value in (("model", name), ("revision", revision)):
        if isinstance(value, str) and value.strip() and value.isprintable():
            continue
        if value is not None or what == "model":
            raise InputError(
                f"`{what}` should be a name made of printable characters. Found `{shown(value)}`."
            )
    # os.path: names too long for a path and people without a home are no files, and raise nothing.
    is_file = os.path.exists(os.path.expanduser(name))
    plain, _, at = (name, "", "") if is_file else name.partition("@")
    return plain, revision or at or None


def entries_of(config: Path) -> Mapping[str, Any]:
    """The entries of a configuration; none where it is no such thing, which its loader says."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(config.read_text(encoding="utf-8"))
        return found if isinstance(found, Mapping) else {}
    return {}


def entries_in(name: str, text: str) -> dict[str, Any]:
    """The entries ``key=value``, with commas between them, that follow a name.

    Raises:
        InputError: If one is of another form.

    >>> entries_in("random:bert", "a=2,b=0.5,c=true,d=gelu")
    {'a': 2, 'b': 0.5, 'c': True, 'd': 'gelu'}
    """
    entries: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"The entries of `{name}` should be of the form key=value. Found `{part}`."
            )
        entries[key] = _value(value)
    return entries


def _value(text: str) -> int | float | bool | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def check_counts(name: str, entries: Mapping[str, Any]) -> None:
    """Refuse what would take hours to build, even without weights."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            check_counts(name, value)
        elif _COUNTED.search(key) and isinstance(value, int) and value > _MOST:
            raise InputError(
                f"`{name}` should have at most {_MOST:,} of each of its parts. Found "
                f"`{key} = {shown(value)}`."
            )


def check_files(name: str, folder: Path, allow_pickle: bool) -> None:
    """Refuse a folder whose weights are no files of its own, or pickles that were not allowed.

    Transformers opens whatever an index of shards names: a pickle although safetensors were asked
    for, a path that leads out of the folder, a device that never ends.
    """
    kinds = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    for index, ending in _INDICES.items():
        shards = entries_of(folder / index).get("weight_map") if ending in kinds else None
        for one in shards.values() if isinstance(shards, Mapping) else ():
            if not (isinstance(one, str) and Path(one).name == one and one.endswith(ending)):
                raise InputError(
                    f"`{index}` of `{name}` should name `*{ending}` files beside it. Found "
                    f"`{shown(one)}`."
                )
    for file in (one for kind in kinds for one in folder.glob(f"*{kind}")):
        if file.exists() and not file.is_file():
            raise InputError(f"`{file}` should be a regular file. Found a pipe, device or folder.")
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("pytorch_model*.bin")):  # what transformers looks for
        if not allow_pickle:
            raise InputError(
                f"`{name}` holds its weights only as a pickle, which can run code; convert them to "
                "safetensors, or pass `--allow-pickle` (weights-only loading)."
            )
        return
    others = sorted(one.name for end in _PICKLES for one in folder.glob(f"*{end}"))
    found = f"`{others[0]}`; save the model with `save_pretrained`." if others else "none."
    raise InputError(f"`{name}` should hold weights in `*.safetensors`. Found {found}")
