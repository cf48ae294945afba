"""Texts that users name, as files, folders or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from lipscope.errors import InputError


def read_text(path: str | Path, option: str, kind: str = "a readable file") -> str:
    """The text of a file in UTF-8, without a byte order mark; ``option`` is what named it."""
    file = Path(path)
    try:
        # A pipe or a device might never end.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError(0, "it is no regular file")
        content = file.read_bytes()
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or "it is no path"
        raise InputError(f"{option} should be {kind}. Found `{path}`: {why}.") from None
    return decode_text(content, option, f"`{path}`")


def read_texts(path: str | Path, option: str, kind: str = "a readable file") -> str:
    """`read_text`; of a folder, of its ``.txt`` files by their names, a blank line apart."""
    if not os.path.isdir(path):
        return read_text(path, option, kind)
    files = sorted(Path(path).glob("*.txt"))
    if not files:
        raise InputError(f"{option} should be {kind}. Found `{path}`, a folder without .txt files.")
    return "\n\n".join(read_text(file, option) for file in files)


def decode_text(content: bytes, option: str, where: str) -> str:
    """Bytes as text, which must be UTF-8 and hold no zero bytes."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{option} should be UTF-8 text. Found {where}, which is not.")
    return text


def default_text() -> str:
    """The topics of Python's manual, a marked-up English text that comes with every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
