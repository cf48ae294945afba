"""Texts to compare with: checked, named, and as the model's own mean outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lipscope.errors import InputError, shown
from lipscope.models import LoadedModel, exact_maths, first_tensor, read_text, run, whole_text

_SHOWN = 40  # characters of a text that name it


def texts_of(among: Any) -> list[str]:
    """The texts that were given, or those of a file, one on each line; none for None."""
    if among is None:
        return []
    if isinstance(among, Path):
        among = [line for line in read_text(str(among), "`among`").splitlines() if line.strip()]
    check_texts(among, "among")
    return list(among)


def check_texts(texts: Sequence[str], option: str = "between") -> None:
    """Refuse texts that name no classes: fewer than two, empty or equal ones."""
    words = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    said = {" ".join(text.split()) for text in texts} if words else set()
    if not words or len(texts) < 2 or "" in said or len(said) < len(texts):
        raise InputError(
            f"`{option}` should name at least two classes, each by its own text with words in it. "
            f"Found `{shown(texts)}`."
        )


def short(text: str) -> str:
    """The beginning of a text, as its name."""
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else words[: _SHOWN - 1].rstrip() + "…"


def mean_outputs(
    texts: Sequence[str],
    loaded: LoadedModel,
    special_tokens: bool,
    output: Callable[[Int[Tensor, "1 n"]], Float[Tensor, "n d"]],
) -> Float[Tensor, "c d"]:
    """Means over tokens of what a model makes of some texts, as unit vectors.

    Args:
        texts: The texts; one that is longer than the model's positions is cut.
        loaded: Whose tokenizer reads them.
        special_tokens: Put the model's own special tokens around every text.
        output: What a model makes of token ids.
    """
    points = []
    for text in texts:
        ids = whole_text(
            text, loaded.reader_of_text(), special_tokens=special_tokens, longest=loaded.max_tokens
        )
        points.append(output(ids).mean(0))
    return torch.nn.functional.normalize(torch.stack(points), dim=1)


def own_output(model: nn.Module, like: Tensor) -> Callable[[Tensor], Tensor]:
    """What a prepared model makes of token ids, ``(n, d)``, on the device and in the dtype of x."""

    def output(ids: Tensor) -> Tensor:
        with torch.no_grad(), exact_maths(like.dtype, differentiable=False):
            return first_tensor(run(model, {"input_ids": ids.to(like.device)}))[0]

    return output
