"""The fingerprint of what a model's name stands for at this moment, without loading it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

from lipscope.models.loading import PACKAGES
from lipscope.models.model_name import parted


def stamp(name: str, revision: str | None = None) -> str | None:
    """A value that changes when the model behind a name does; None if that takes loading it.

    The version of a package, the files of a folder with their sizes and times, or the commit of
    a hub id that is in the cache.

    Args:
        name: As for `load_model`.
        revision: Likewise.
    """
    plain, at = parted(name, revision)
    folder = Path(os.path.expanduser(plain))
    try:
        if plain.startswith("random:"):
            return f"transformers {importlib.metadata.version('transformers')}"
        if plain in PACKAGES:
            return importlib.metadata.version(PACKAGES[plain].distribution)
        if os.path.exists(folder):
            return stamp_of_folder(folder)
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(plain, "config.json", revision=at)
        return Path(found).parent.name if isinstance(found, str) else None
    except (OSError, ValueError, importlib.metadata.PackageNotFoundError):
        return None


def stamp_of_folder(folder: Path, which: str = "*") -> str:
    """Names, sizes and times of the files in a folder that match a pattern."""

    def each() -> Iterator[str]:
        for file in sorted(folder.glob(which)):
            about = file.stat()
            yield f"{file.relative_to(folder)} {about.st_size} {about.st_mtime_ns}"

    return "; ".join(each())
