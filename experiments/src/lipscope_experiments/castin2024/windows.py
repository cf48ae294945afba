"""The windows of the paper's experiments: fresh text at every length, no special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope import Rows
from lipscope.models import LoadedModel
from lipscope_experiments.experiment import Study
from lipscope_experiments.texts import AG_NEWS_TITLE, Text


def first_and_middle(loaded: LoadedModel) -> list[int]:
    """The layers that stand for the paper's 0 and 6 of 12."""
    return [0, int(loaded.config.num_hidden_layers) // 2]


def is_deep(loaded: LoadedModel) -> bool:
    """Deeper than the models of the paper: run on fewer layers and lengths."""
    return int(loaded.config.num_hidden_layers) > 12


def as_in_the_paper(study: Study, loaded: LoadedModel, text: Text) -> dict[str, Any]:
    """How the paper cuts a text: ten windows a length, none of which shares text with another.

    Lengths are the even ones to 100 (Alice), or every tenth to 512 (AG_NEWS). Deeper models
    than the paper's run on every tenth to 100.
    """
    full = range(2, 512, 10) if text.name == AG_NEWS_TITLE else range(2, 101, 2)
    full = range(10, 101, 10) if is_deep(loaded) else full
    return {
        "lengths": study.pick([8, 16, 32, 64], [*full]),
        "samples": study.pick(3, 10),
        "windows": "disjoint",
        "special_tokens": False,
    }


def disjoint(study: Study, loaded: LoadedModel, text: Text, layers: Sequence[int]) -> Rows:
    """Sigma of `attention` on the paper's windows."""
    part = f"disjoint-{loaded.name}-{text.name}"
    options = as_in_the_paper(study, loaded, text)
    return study.measure(part, loaded, text.content, layers=layers, **options)
