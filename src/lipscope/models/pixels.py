"""From pictures to pixels; each model of timm says itself how."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError, install
from lipscope.models.library_messages import quiet


@dataclass(frozen=True)
class Pixels:
    """How pictures become pixels.

    Attributes:
        side: Their side.
        mean: Mean of each channel.
        deviation: Deviation of each channel.
        read: From a picture and a side to ``(3, side, side)``, where the model's library has a
            way of its own; None for the middle square, scaled.
    """

    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    read: Callable[[Any, int], Tensor] | None = None


def from_timm(
    name: str, entries: Mapping[str, Any], *, pretrained: bool, seed: int = 0
) -> tuple[nn.Module, Pixels]:
    """A model of timm without its head and its pooling, and how it takes pictures.

    Its output is that of all tokens, so that the map ``model`` is one of it, too.

    Args:
        name: As timm has it, with or without a tag of its weights.
        entries: Further arguments of its constructor.
        pretrained: With weights from the hub; otherwise they are random.
        seed: Of random weights.

    Returns:
        Both.

    Raises:
        InputError: If timm is not there, has no such model, or cannot build or load it.
    """
    try:
        timm, data = (importlib.import_module(name) for name in ("timm", "timm.data"))
    except ImportError as problem:
        raise InputError(
            f"Models of timm need timm and torchvision. Found: {problem}; run `{install('timm')}`."
        ) from None
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(pretrained=pretrained), n=3)
        raise InputError(
            f"`timm:{name}` should name a model of timm. Found none"
            + (f"; the nearest are {', '.join(close)}." if close else ".")
        )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: Any = timm.create_model(name, pretrained=pretrained, **entries)
            model.reset_classifier(0, "")
        except Exception as problem:  # every library has its own; the user gets one line
            text = " ".join(str(problem).split())[:300]
            raise InputError(f"`timm:{name}` could not be built: {text}") from problem
    own = data.resolve_model_data_config(model, args={"img_size": entries.get("img_size")})

    def read(picture: Any, side: int) -> Tensor:
        transform = data.create_transform(**{**own, "input_size": (3, side, side)})
        return transform(picture)

    return model.eval(), Pixels(own["input_size"][-1], own["mean"], own["std"], read)
