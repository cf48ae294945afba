"""Token ids back to text, and whether a tokenizer reads that text as the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lipscope.errors import InputError
from lipscope.models.data.windows import special_tokens_of


class Written:
    """Windows of token ids as texts.

    Args:
        tokenizer: A Hugging Face tokenizer, or `Bytes`.
        special_tokens: Whether the model's own special tokens stand around each window.

    Raises:
        InputError: If the tokenizer cannot write a text of its ids.
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
        self._special = set(tokenizer.all_special_ids)

    def text(self, ids: Sequence[int]) -> str:
        """The text, without the special tokens around it."""
        own = list(ids[self._around[0] : len(ids) - self._around[1]])
        return self._tokenizer.decode(own, clean_up_tokenization_spaces=False)

    def survives(self, ids: Sequence[int]) -> bool:
        """Whether the text of some ids is read as these ids."""
        own = list(ids[self._around[0] : len(ids) - self._around[1]])
        said = self._tokenizer.decode(own, clean_up_tokenization_spaces=False)
        back = self._tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]
        return list(back) == own

    def editable(self, ids: Sequence[int]) -> list[int]:
        """Positions of tokens that belong to the text."""
        first, last = self._around[0], len(ids) - self._around[1]
        return [i for i in range(first, last) if ids[i] not in self._special]

    def ordinary(self, count: int) -> Bool[Tensor, " v"]:
        """Which of so many ids are no special tokens."""
        found = torch.ones(count, dtype=torch.bool)
        found[[i for i in self._special if i < count]] = False
        return found

    def names(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the tokenizer calls them."""
        return [str(one) for one in self._tokenizer.convert_ids_to_tokens(list(ids))]
