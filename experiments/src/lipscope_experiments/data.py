"""What experiments read: texts, the default one always, sentences with labels, and digits."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import InputError
from lipscope.errors import install
from lipscope.sources import default_text, read_texts

AG_NEWS = "ag_news"
AG_NEWS_TITLE = "AG_NEWS"
_SHARE = 10  # one character of so many is held out, the last ones
_HELD = 64  # windows of the held-out part
_FOLDER = "LIPSCOPE_DEEPT"  # the environment variable that names what is not shipped
WORDS = 16
"""How many words of a sentence are read, the first ones."""
LICENCES = tuple(Path("/usr/share/common-licenses", name) for name in ("GPL-3", "MPL-2.0"))
_SEGMENT, _STRIDE, _MOST = 200, 3, 12_000  # words: of a segment, between windows, of a text
_DIGITS = 1347  # to train on, of 1,797; the others are by other writers


@dataclass(frozen=True)
class Text:
    """A text with the name that tables give it: that of its file or data set."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Digest of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: what is trained on, the rest, and windows of that, ``(w, length + 1)``.

    The last of the characters stands for those that training never saw.
    """

    text: Text
    train: Tensor
    rest: Tensor
    held: Tensor
    characters: int

    def draw(self, count: int, length: int, gen: torch.Generator) -> Tensor:
        """Windows ``(count, length + 1)`` of what is trained on."""
        starts = torch.randint(0, len(self.train) - length, (count,), generator=gen)
        return self.train[starts[:, None] + torch.arange(length + 1)]

    @property
    def chance(self) -> float:
        """Bits per held-out character of what knows how often each occurs, and nothing else."""
        counts = torch.bincount(self.train, minlength=self.characters).double() + 1
        return float(-(counts / counts.sum()).log2()[self.held[:, 1:]].mean())

    @property
    def by_pairs(self) -> tuple[float, float]:
        """Accuracy, and bits per character, on the rest, of what knows how often pairs occur."""
        counts = torch.zeros(self.characters, self.characters, dtype=torch.float64)
        pairs = self.train[:-1], self.train[1:]
        counts = 1 + counts.index_put(pairs, counts.new_ones(len(pairs[0])), accumulate=True)
        before, after = self.rest[:-1], self.rest[1:]
        hits = (counts.argmax(1)[before] == after).double().mean()
        bits = (counts / counts.sum(1, keepdim=True))[before, after].log2()
        return float(hits), -float(bits.mean())

    @torch.no_grad()
    def predicted(
        self, scores: Callable[[Tensor], Tensor], length: int, blocks: int
    ) -> tuple[list[float], list[float]]:
        """Accuracy, and bits per character, on the rest, in windows side by side, by block."""
        windows = self.rest[: len(self.rest) // length * length].view(-1, length)
        hits, bits = [], []
        for block in windows.tensor_split(blocks):
            found = scores(block[:, :-1])
            bits.append(float(nats(found, block)) / math.log(2))
            hits.append(float((found.argmax(-1) == block[:, 1:]).double().mean()))
        return hits, bits


def nats(scores: Tensor, windows: Tensor) -> Tensor:
    """The mean cross-entropy of the next characters of windows ``(w, length + 1)``."""
    return nn.functional.cross_entropy(scores.mT, windows[:, 1:])


@dataclass(frozen=True)
class Task:
    """Inputs with their classes, to train on and to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    vocabulary: int = 0  # of inputs that are ids


def corpus(text: Text, length: int) -> Corpus:
    """Cut a text into what is trained on and what is held out, its last tenth."""
    least = _SHARE * _HELD * (length + 1)
    if len(text.content) < least:
        raise InputError(
            f"`texts` should have at least {least:,} characters, a tenth of them for {_HELD} "
            f"windows of {length}. Found {len(text.content):,} in `{text.name}`."
        )
    cut = len(text.content) * (_SHARE - 1) // _SHARE
    known = {c: i for i, c in enumerate(sorted(set(text.content[:cut])))}
    ids = torch.tensor([known.get(c, len(known)) for c in text.content])
    starts = torch.linspace(cut, len(ids) - length - 1, _HELD).long()
    held = torch.stack([ids[i : i + length + 1] for i in starts.tolist()])
    return Corpus(text, ids[:cut], ids[cut:], held, len(known) + 1)


def texts_named(names: Sequence[str]) -> tuple[Text, ...]:
    """The default text, then those that were named, each once.

    Files in UTF-8, folders of ``.txt`` files, or ``ag_news``: its test split, which needs the
    package ``datasets`` and a network or its cache.
    """
    more = (_ag_news() if name == AG_NEWS else _file(name) for name in dict.fromkeys(names))
    found = (Text("Python manual", default_text()), *more)
    for name, times in Counter(text.name for text in found).items():
        if times > 1:  # tables and figures know a text by its name
            raise InputError(f"`texts` should name each text once. Found two called `{name}`.")
    return found


def _file(name: str) -> Text:
    content = read_texts(name, "`texts`")
    if not content.strip():
        raise InputError(f"`texts` should hold words. Found none in `{name}`.")
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


def folder_for(name: str) -> Path:
    """The folder that the environment names, for a data set or network."""
    if not os.environ.get(_FOLDER):
        raise InputError(f"{name} was left out: {_FOLDER} names no folder.")
    return Path(os.environ[_FOLDER])


def sentences(folder: Path, part: str) -> list[tuple[list[str], int]]:
    """The words of sentences of SST, with their labels."""
    found: list[dict[str, Any]] = json.loads((folder / f"{part}.json").read_text("utf-8"))
    return [(one["sentence"].lower().split(), one["label"]) for one in found]


def first_words(folder: Path) -> Task:
    """Sentences of SST as the ids of their first words, frequent ones; 1 is another, 0 is none."""
    parts = [sentences(folder, part) for part in ("train", "test")]
    counts = Counter(w for words, _ in parts[0] for w in words)
    index = {w: i + 2 for i, w in enumerate(sorted(w for w, k in counts.items() if k > 9))}

    def as_ids(words: list[str]) -> list[int]:
        ids = [index.get(w, 1) for w in words[:WORDS]]
        return ids + [0] * (WORDS - len(ids))

    pairs = ([(as_ids(words), label) for words, label in part] for part in parts)
    (x, y), (tested, labels) = (map(torch.tensor, zip(*some, strict=True)) for some in pairs)
    return Task((x, y), (tested, labels), len(index) + 2)


def windows_of_words(texts: Sequence[str], n: int) -> Task:
    """Windows of n words with the text that they are of; every fifth segment is held out."""
    found = [re.findall(r"[a-z]+|[^\sa-z]", text.lower())[:_MOST] for text in texts]
    counts = Counter(itertools.chain(*found))
    index = {word: i + 1 for i, (word, k) in enumerate(counts.most_common()) if k >= 3}
    parts: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    for label, words in enumerate(found):
        ids = torch.tensor([index.get(word, 0) for word in words])
        segments = ids.unfold(0, _SEGMENT, _SEGMENT)[:, :-1].unfold(1, n, _STRIDE)
        held = torch.arange(len(segments)) % 5 == 4
        for part, some in zip(parts, (~held, held), strict=True):
            windows = segments[some].flatten(0, 1)
            part.append((windows, torch.full((len(windows),), label)))
    (x, y), (tested, labels) = (map(torch.cat, zip(*part, strict=True)) for part in parts)
    return Task((x, y), (tested, labels), len(index) + 1)


def digits() -> Task:
    """The digits of scikit-learn, ``(b, 8, 8)`` from 0 to 1, the last quarter for tests."""
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            f"The digits need the package `scikit-learn`; run `{install('digits')}`."
        ) from None
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    return Task((images[:_DIGITS], labels[:_DIGITS]), (images[_DIGITS:], labels[_DIGITS:]))
