"""The sequence length that a model was trained with, as far as its files say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def trained_length(config: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that a model is said to have been trained on.

    The least of what its positions allow, of what its tokenizer cuts texts to, and of the
    ``max_seq_length`` that Sentence Transformers keeps beside the weights. To be asked before the
    tokenizer is used, which forgets where it should cut.

    Args:
        config: The configuration.
        tokenizer: The tokenizer, or None.

    Returns:
        The number; None where no file says one, as of a model that was not loaded from files.
    """
    source = getattr(config, "_name_or_path", None)
    if not source:
        return None
    folder = Path(str(source))
    cut = getattr(getattr(tokenizer, "backend_tokenizer", None), "truncation", None)
    if cut is None:  # older transformers takes it off
        cut = _entries(folder / "tokenizer.json").get("truncation")
    said = [
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        cut.get("max_length") if isinstance(cut, dict) else None,
        _entries(folder / "sentence_bert_config.json").get("max_seq_length"),
    ]
    return min((n for n in said if isinstance(n, int) and n > 0), default=None)


def _entries(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # it is for a remark: a file that cannot be read says nothing
    return found if isinstance(found, dict) else {}
