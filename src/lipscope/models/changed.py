"""A model changed in one respect, so that two measurements differ in nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope.errors import InputError
from lipscope.models.loading import LoadedModel
from lipscope.models.quiet import quiet
from lipscope.models.tracing.sites import attention_sites, is_linear

_BLOCK = 32  # weights that share a scale and an offset in the format Q4_1
_STEPS = 15  # four bits


def as_decoder(loaded: LoadedModel) -> LoadedModel:
    """The same weights with a causal mask in every layer: token i reads tokens j <= i.

    Holds for encoders of transformers that can also be built as decoders (BERT and its
    copies): their forward pass then makes the mask, so that all layers see it.

    Args:
        loaded: An encoder.

    Returns:
        A copy, named ``NAME, causal``.

    Raises:
        InputError: If the family knows no decoder.
    """
    if getattr(loaded.config, "is_decoder", None) is not False:
        raise InputError(
            f"`{loaded.name}` should be an encoder that also runs as a decoder, as BERT. Found "
            "none; leave it out of the masked runs."
        )
    model: Any = copy.deepcopy(loaded.model)
    model.config.is_decoder = True
    site: Any
    for site in attention_sites(model).values():
        site.is_causal = True
    return replace(loaded, name=f"{loaded.name}, causal", model=model)


def quantised(loaded: LoadedModel) -> LoadedModel:
    """The same model with the weights of its linear maps rounded as the format Q4_1 does.

    Each 32 weights of a row share a scale and an offset in half precision,
    ``w -> m + round((w - m) / s) s`` with ``m = min w`` and ``s = (max w - min w) / 15``.

    Args:
        loaded: Any model.

    Returns:
        A copy, named ``NAME, Q4_1``.
    """
    model = copy.deepcopy(loaded.model)
    for module in model.modules():
        if is_linear(module):
            weight = module.get_parameter("weight").data
            # Rows of inputs: Conv1D keeps its weight transposed.
            turned = type(module).__name__ == "Conv1D"
            rounded = _q4_1(weight.T.contiguous() if turned else weight)
            weight.copy_(rounded.T if turned else rounded)
    return replace(loaded, name=f"{loaded.name}, Q4_1", model=model, weights="rounded to Q4_1")


def reinitialised(loaded: LoadedModel, seed: int = 0) -> LoadedModel:
    """The same architecture and tokenizer with the random weights of a new model.

    Args:
        loaded: A model of transformers.
        seed: Seed of the weights.

    Returns:
        A new model, named ``NAME, random weights``.

    Raises:
        InputError: If it is no model of transformers.
    """
    if loaded.config is None:
        raise InputError(f"`{loaded.name}` should be a model of transformers. Found another.")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = type(loaded.model)(loaded.config).eval()
    name, weights = f"{loaded.name}, random weights", f"random, seed {seed}"
    return replace(loaded, name=name, model=model, weights=weights)


def _q4_1(weight: Tensor) -> Tensor:
    """Rows in blocks of 32 to 16 evenly spaced values each; a rest of a row stays as it is."""
    whole = weight.shape[1] - weight.shape[1] % _BLOCK
    blocks = weight[:, :whole].unflatten(1, (-1, _BLOCK)).float()
    low = blocks.amin(-1, keepdim=True).half().float()
    step = ((blocks.amax(-1, keepdim=True) - low) / _STEPS).half().float()
    level = ((blocks - low) / step.clamp_min(1e-12)).round().clamp(0, _STEPS)
    rounded = (low + level * step).flatten(1).to(weight)
    return torch.cat([rounded, weight[:, whole:]], dim=1)
