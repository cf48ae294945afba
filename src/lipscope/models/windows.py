"""Windows of token ids from a text."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from lipscope.errors import InputError
from lipscope.models.loading import LoadedModel, digest

WindowKind = Literal["spread", "disjoint"]
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Sample:
    """One input sample of a model, with the fields that its rows record."""

    kind: str
    arguments: Mapping[str, Any] | tuple[Any, ...]
    sample: int
    start: int | None
    num_tokens: int | None
    sha256: str
    tokens: tuple[str, ...] | None
    count: int = 1  # how many there are, where one was chosen

    @property
    def place(self) -> str:
        """The index of the sample in words; empty if it is the only one."""
        more = f"{self.sample + 1} of {self.count} (`sample={self.sample}`)"
        return more if self.count > 1 else ""

    @property
    def ids(self) -> Tensor:
        """The token ids ``(1, n)`` of a window of a text, special ones included."""
        assert isinstance(self.arguments, Mapping)
        return self.arguments["input_ids"]


def whole_text(
    text: str, tokenizer: Any, *, special_tokens: bool = True, longest: int | None = None
) -> Tensor:
    """The ids ``(1, n)`` of a whole text, cut where it is longer than ``longest`` tokens."""
    before, ids, after = _token_ids(text, tokenizer, special_tokens)
    if longest is not None:
        ids = ids[: max(longest - len(before) - len(after), 0)]
    return torch.tensor([[*before, *ids, *after]])


def windows_of_text(
    text: str,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    samples: int,
    kind: WindowKind = "spread",
    special_tokens: bool = True,
) -> list[Sample]:
    """Cut a text into windows by length, shortest first, then sample.

    ``spread``: sample s starts at token ``floor(s (T - n_max) / max(samples - 1, 1))`` for
    every length, so that lengths are compared on the same passages; at 0 where special tokens fill
    the length. ``disjoint``: sample s is a
    stretch of ``N`` = the sum of all lengths, from token ``floor(s (T - N) / max(samples - 1, 1))``
    on, with one window of each length after the other, so that no two windows share text.
    Special tokens are added around each window and counted in its length. Windows are distinct:
    of equal ones the first is used, so that a short or repetitive text gives fewer than requested.

    Raises:
        InputError: If the text is too short, or a length leaves no room for text.
    """
    before, ids, after = _token_ids(text, tokenizer, special_tokens)
    extra = len(before) + len(after)
    if min(lengths) <= extra:
        raise InputError(
            f"Every length should be above {extra}, the number of special tokens around a window. "
            f"Found {min(lengths)}; use longer lengths or `special_tokens=False`."
        )
    total, stretch = len(ids), sum(lengths) if kind == "disjoint" else max(lengths)
    needed = samples * stretch if kind == "disjoint" else stretch - extra
    if total < needed:
        several = "a window" if samples == 1 else f"{samples} {kind} windows"
        shorter = "shorter lengths or fewer samples"
        if kind == "spread" and total:
            shorter = f"lengths of at most {total + extra}"
        raise InputError(
            f"The text should have at least {needed} tokens for {several} of up to {max(lengths)}, "
            f"{extra} of them special. Found {total}; use a longer text or {shorter}."
        )
    # A short text has fewer places than samples: the same one twice would be one sample.
    room = max(total - stretch, 0)
    samples = min(samples, room + 1)
    places = [s * room // max(samples - 1, 1) for s in range(samples)]
    passed = 0  # tokens of a sample's stretch that shorter windows have taken
    windows: dict[tuple[int, ...], Sample] = {}
    for n in lengths:
        for s, place in enumerate(places):
            start = place + passed
            row = [*before, *ids[start : start + n - extra], *after]
            if tuple(row) not in windows:
                words = tuple(str(t) for t in tokenizer.convert_ids_to_tokens(row))
                held = torch.tensor([row])
                given = {"input_ids": held}
                windows[tuple(row)] = Sample("text", given, s, start, n, digest(held), words)
        passed += n if kind == "disjoint" else 0
    return [*windows.values()]


def _token_ids(
    text: str, tokenizer: Any, special_tokens: bool
) -> tuple[list[int], list[int], list[int]]:
    """The ids of a text, and the special ones before and after it."""
    if _UNWRITABLE.search(text):
        raise InputError(
            "The text should be one that UTF-8 can write. Found a zero byte or half a character "
            "(a lone surrogate) in it."
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    before, after = special_tokens_of(tokenizer, text[:99]) if special_tokens else ([], [])
    return before, ids, after


def special_tokens_of(tokenizer: Any, text: str = "1") -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text; refused if it does not tell."""
    for probe in ("a", "A", text):
        bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        full = list(tokenizer(probe)["input_ids"])
        starts = range(len(full) - len(bare) + 1)
        places = [i for i in starts if full[i : i + len(bare)] == bare]
        if len(places) == 1:
            return full[: places[0]], full[places[0] + len(bare) :]
    raise InputError(
        f"The tokenizer should put special tokens around a text. Found {full} for {bare}, which "
        "does not tell where; use `special_tokens=False`."
    )


# --- token ids back to text


class WindowDecoder:
    """Windows of token ids as texts, by a tokenizer that decodes.

    ``special_tokens``: whether each window has the model's special tokens around it.
    """

    def __init__(self, tokenizer: Any, *, special_tokens: bool = True) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise InputError(
                "Token edits need a tokenizer that decodes. Found "
                f"`{type(tokenizer).__name__}`, which has no `decode`."
            )
        self._tokenizer = tokenizer
        before, after = special_tokens_of(tokenizer) if special_tokens else ([], [])
        self._around = len(before), len(after)
        self._special = set(getattr(tokenizer, "all_special_ids", ()))

    def text(self, ids: Sequence[int]) -> str:
        """The text, without the special tokens around it."""
        own = list(ids[self._around[0] : len(ids) - self._around[1]])
        return self._tokenizer.decode(own, clean_up_tokenization_spaces=False)

    def survives(self, ids: Sequence[int]) -> bool:
        """Whether the text of some ids tokenises to the same ids."""
        text = self.text(ids)
        back = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(back) == list(ids[self._around[0] : len(ids) - self._around[1]])

    def editable(self, ids: Sequence[int]) -> list[int]:
        """Positions of tokens that belong to the text."""
        first, last = self._around[0], len(ids) - self._around[1]
        return [i for i in range(first, last) if ids[i] not in self._special]

    def ordinary(self, count: int) -> Bool[Tensor, " v"]:
        """Which of so many ids are not special tokens."""
        found = torch.ones(count, dtype=torch.bool)
        found[[i for i in self._special if i < count]] = False
        return found

    def names(self, ids: Sequence[int]) -> list[str]:
        """The tokenizer's names of the tokens."""
        return [str(one) for one in self._tokenizer.convert_ids_to_tokens(list(ids))]


# --- controls: without the order of the words, or without the words


def shuffled_words(text: str, seed: int = 0) -> str:
    """The words of a text in random order, single spaces between them.

    >>> sorted(shuffled_words("one two  three").split())
    ['one', 'three', 'two']
    """
    words = re.split(r"\s+", text.strip())
    random.Random(seed).shuffle(words)
    return " ".join(words)


def random_tokens(loaded: LoadedModel, num_tokens: int, samples: int, seed: int = 0) -> Tensor:
    """Ids drawn from the vocabulary; a shorter sample is the beginning of a longer one."""
    ids = _ordinary(loaded)
    draws = (torch.Generator().manual_seed(seed * 1009 + s) for s in range(samples))
    drawn = [ids[torch.randint(len(ids), (num_tokens,), generator=draw)] for draw in draws]
    rows = torch.stack(drawn)
    if loaded.tokenizer is None:
        return rows
    before, after = special_tokens_of(loaded.tokenizer)
    if num_tokens <= (fewest := len(before) + len(after)):
        raise InputError(
            f"`num_tokens` should be above {fewest}, the number of special tokens. "
            f"Found `num_tokens = {num_tokens}`."
        )
    rows[:, : len(before)] = torch.tensor(before, dtype=rows.dtype)
    rows[:, num_tokens - len(after) :] = torch.tensor(after, dtype=rows.dtype)
    return rows


def repeated_token(loaded: LoadedModel, num_tokens: int, samples: int) -> Tensor:
    """One token id repeated; each sample has another one."""
    ids = _ordinary(loaded)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order[:samples], None].repeat(1, num_tokens)


def _ordinary(loaded: LoadedModel) -> Tensor:
    size = getattr(loaded.config, "vocab_size", None)
    if size is None:
        raise InputError(f"`{loaded.name}` should read token ids. Found no vocabulary.")
    special = set(getattr(loaded.tokenizer, "all_special_ids", ()))
    return torch.tensor([i for i in range(size) if i not in special])
