"""The texts of an experiment: the default one always, and those that the user names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lipscope import InputError
from lipscope.errors import install
from lipscope.sources import default_text, read_texts

AG_NEWS = "ag_news"
AG_NEWS_TITLE = "AG_NEWS"


@dataclass(frozen=True)
class Text:
    """A text with the name that tables give it: that of its file or data set."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Digest of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def texts_named(names: Sequence[str]) -> tuple[Text, ...]:
    """The default text, then those that were named, each once.

    Files in UTF-8, folders of ``.txt`` files, or ``ag_news``: its test split, which needs the
    package ``datasets`` and a network or its cache.
    """
    found = [Text("Python manual", default_text())]
    for name in dict.fromkeys(names):
        found.append(_ag_news() if name == AG_NEWS else _file(name))
    said = [text.name for text in found]
    for name in said:
        if said.count(name) > 1:  # tables and figures know a text by its name
            raise InputError(f"`--text` should name each text once. Found two called `{name}`.")
    return tuple(found)


def _file(name: str) -> Text:
    content = read_texts(name, "`--text`")
    if not content.strip():
        raise InputError(f"`--text` should hold words. Found none in `{name}`.")
    return Text(Path(os.path.abspath(name)).name, content)


def _ag_news() -> Text:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            f"The text `{AG_NEWS}` needs the package `datasets`; run "
            f"`{install('news')}` in the folder of lipscope."
        ) from None
    try:
        lines = load_dataset("fancyzhx/ag_news", split="test")["text"]
    except Exception as problem:  # every transport has errors of its own
        said = " ".join(str(problem).split())[:200]
        raise InputError(
            f"The text `{AG_NEWS}` should come from the hub or its cache. Found "
            f"{type(problem).__name__}: {said}; leave it out, or pass a file."
        ) from None
    return Text(AG_NEWS_TITLE, " ".join(lines))
