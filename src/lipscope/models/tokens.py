"""Tokenizers: those that stand beside a model's weights, and plain bytes for random models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lipscope.models.library_messages import quiet


class Bytes:
    """The UTF-8 bytes of a text modulo the size of the vocabulary: for models without training.

    To a trained model these ids say nothing; only ``random:`` models have them by themselves.

    >>> Bytes(100)("ab")["input_ids"]
    [97, 98]
    """

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, text: str, **_: Any) -> Mapping[str, list[int]]:
        """The ids of a text."""
        return {"input_ids": [byte % self.vocab_size for byte in text.encode()]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of some ids; what is none in UTF-8 is not read back as these ids."""
        return bytes(i % 256 for i in ids).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Letters, and numbers for what is none."""
        return [chr(i) if 32 <= i < 127 else f"<{i}>" for i in ids]


def tokenizer_at(source: str | None, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, its own or its processor's; None if there is none.

    Args:
        source: Where the weights are from; nothing is found for an empty name.
        **options: For the loaders of transformers.
    """
    from transformers import AutoProcessor, AutoTokenizer

    for kind in (AutoTokenizer, AutoProcessor) if source else ():
        try:
            with quiet():
                found = kind.from_pretrained(source, trust_remote_code=False, **options)
        except Exception:  # whatever is missing or damaged: there is none
            continue
        found = getattr(found, "tokenizer", found)
        # A folder without tokenizer files gives an empty one, which reads every text as unknown.
        if callable(getattr(found, "get_vocab", None)) and _knows_words(found):
            return found
    return None


def _knows_words(tokenizer: Any) -> bool:
    return not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
