"""Inputs that take something away from a text: the order of its words, or the words."""

from __future__ import annotations

import random
import re

import torch
from torch import Tensor

from lipscope.errors import InputError
from lipscope.models.data.windows import special_tokens_of
from lipscope.models.loading import LoadedModel


def shuffled_words(text: str, seed: int = 0) -> str:
    """The words of a text in random order, single spaces between them.

    >>> sorted(shuffled_words("one two  three").split())
    ['one', 'three', 'two']
    """
    words = re.split(r"\s+", text.strip())
    random.Random(seed).shuffle(words)
    return " ".join(words)


def random_tokens(
    loaded: LoadedModel, num_tokens: int, samples: int, seed: int = 0, *, special: bool = True
) -> Tensor:
    """Token ids drawn uniformly from the vocabulary, with the model's special tokens around.

    Args:
        loaded: A model that reads token ids.
        num_tokens: Length of each sample, special tokens included.
        samples: Number of samples.
        seed: Seed; a shorter sample is the beginning of a longer one.
        special: Put the special tokens around.

    Returns:
        ``(samples, num_tokens)``.
    """
    rows = [
        _ordinary(loaded)[torch.randint(len(_ordinary(loaded)), (num_tokens,), generator=gen)]
        for gen in (torch.Generator().manual_seed(seed * 1009 + s) for s in range(samples))
    ]
    return _around(loaded, torch.stack(rows), special)


def repeated_token(
    loaded: LoadedModel, num_tokens: int, samples: int, seed: int = 0, *, special: bool = True
) -> Tensor:
    """One token id again and again; each sample has another one, drawn from the vocabulary.

    Args:
        loaded: A model that reads token ids.
        num_tokens: Length of each sample, special tokens included.
        samples: Number of samples.
        seed: Seed of the choice.
        special: Put the special tokens around.

    Returns:
        ``(samples, num_tokens)``.
    """
    ids = _ordinary(loaded)
    gen = torch.Generator().manual_seed(seed)
    chosen = ids[torch.randperm(len(ids), generator=gen)[:samples]]
    return _around(loaded, chosen[:, None].expand(-1, num_tokens), special)


def _ordinary(loaded: LoadedModel) -> Tensor:
    """The vocabulary without special tokens."""
    size = getattr(loaded.config, "vocab_size", None)
    if size is None:
        raise InputError(f"`{loaded.name}` should read token ids. Found no vocabulary.")
    special = set() if loaded.tokenizer is None else set(loaded.tokenizer.all_special_ids)
    return torch.tensor([i for i in range(size) if i not in special])


def _around(loaded: LoadedModel, ids: Tensor, special: bool) -> Tensor:
    """Special tokens in place of the first and last ones."""
    if loaded.tokenizer is None or not special:
        return ids.clone()
    before, after = special_tokens_of(loaded.tokenizer)
    _, n = ids.shape
    if n <= len(before) + len(after):
        raise InputError(
            f"`num_tokens` should be above {len(before) + len(after)}, the number of special "
            f"tokens. Found `num_tokens = {n}`."
        )
    ids = ids.clone()
    ids[:, : len(before)] = torch.tensor(before, dtype=ids.dtype)
    ids[:, n - len(after) :] = torch.tensor(after, dtype=ids.dtype)
    return ids
