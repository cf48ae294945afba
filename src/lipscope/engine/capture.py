"""Attention layers of a model as objects of their own, with the inputs that they saw."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.display import Shown
from lipscope.engine.checks import argument, whole, window_length
from lipscope.engine.layer import radius_of_the_norm
from lipscope.engine.plan import Job
from lipscope.engine.runs import AnyData, AnyModel, LocalRun, is_text
from lipscope.engine.spec import SOLVER, Options
from lipscope.errors import InputError, shown
from lipscope.models import LayerMap, LoadedModel, Sample
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.theorems import Normed

# What only a measurement needs.
ANSWERS = ("per_head", "metric", "move", "read", "inputs", "ascent_steps", "theorems", "sharp")
ANSWERS += ("radius", "rest", "average", *SOLVER)


@dataclass(frozen=True)
class Captured(Shown):
    """A layer and its input on one window of text or one entry of a batch.

    Attributes:
        model: Name of the model.
        layer: Index of the layer from 0.
        sample: Index of the window or entry.
        attention: The layer, with weights of its own.
        x: The input of the layer, or, if the map ``normed`` was asked for, that of the norm
            that feeds it, ``(n, d)``.
        norm: The normalisation that feeds it, or None.
        normed: The layer with that norm in front, if the map ``normed`` was asked for.
    """

    model: str
    layer: int
    sample: int
    attention: Attention
    x: Float[Tensor, "n d"]
    norm: nn.Module | None
    normed: Normed | None = None

    @property
    def radius(self) -> float:
        """Largest token norm of the input."""
        return float(torch.linalg.vector_norm(self.x, dim=-1).max())

    def radius_of_norm(self) -> float:
        """Largest norm that a token can have after the norm that feeds the layer.

        Raises:
            InputError: If there is no such norm, or it is neither RMSNorm nor LayerNorm.
        """
        return radius_of_the_norm(self.norm, self.x.shape[1], self.layer)


def capture(
    model: str | Path | nn.Module | LoadedModel = "minilm",
    data: str | Path | Tensor | Mapping[str, Any] | None = None,
    *,
    layer: int,
    length: int | None = None,
    sample: int = 0,
    samples: int | None = None,
    **options: Unpack[Options],
) -> tuple[Attention | Normed, Float[Tensor, "n d"]]:
    """One attention layer of a model and its input, for bounds, attacks and certificates.

    The layer is rebuilt from the model's weights and agrees with the model's own output;
    it has weights of its own.

    Holds for families whose weights are read in closed form (BERT, GPT-2, Llama, ViT, …).

    Args:
        model: As for `measure`.
        data: Text or a batch, as for `measure`; the default text if None.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window; 64 if None.
        sample: Index of the window, or of the entry of a batch.
        samples: Number of windows that the text is cut into; 10 if None, as for `measure`.
        **options: Those of `measure` that say what is captured: ``map`` is ``attention``, or
            ``normed`` for the layer with the norm that feeds it and that norm's input; ``dtype`` is
            float64 and ``device`` the CPU unless another is asked for.

    Returns:
        The layer and its input ``(n, d)``.

    Raises:
        InputError: If the layer or the map does not exist, or its weights are not read in
            closed form.
    """
    sample = argument(whole(0, 100_000), "sample", sample)
    from_text = is_text(data, options)
    if not from_text and (length is not None or samples is not None):
        raise InputError(
            "`length` and `samples` cut a text into windows. Found them with a batch; leave them "
            "out."
        )
    found = captures(
        model,
        data,
        layers=[layer],
        lengths=[window_length(length)] if from_text else None,
        samples=max(10, sample + 1) if samples is None and from_text else samples,
        chosen=[sample],
        **options,
    )
    with contextlib.closing(found):
        one = next(found)
    return one.normed or one.attention, one.x


def captures(
    model: AnyModel,
    data: AnyData = None,
    *,
    layers: Sequence[int] | Literal["all"] = "all",
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    chosen: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> Generator[Captured]:
    """Layers of a model and their inputs: for every length and sample, layer by layer.

    Args:
        model: As for `measure`.
        data: Text or a batch; the default text if None.
        layers: Indices from 0, or "all".
        lengths: Numbers of tokens of text windows.
        samples: Windows per length; 1 if None, for text.
        chosen: Only these samples; all if None.
        **options: As for `capture`.

    Yields:
        One `Captured` per length, sample and layer.

    Raises:
        InputError: As `capture` does.
    """
    map = options.get("map", "attention")
    if not isinstance(map, str) or map not in ("attention", "normed"):
        raise InputError(f"`map` should be attention or normed. Found `{shown(map)}`.")
    asked = {"layers": layers, "lengths": lengths, "samples": samples, **options}
    for run, job in _places(model, data, asked, chosen, dtype="float64"):
        layer, norm = run.session.layer(job)
        attention = layer if isinstance(layer, Attention) else layer.attention
        # Copies: the model is put back as it was, and may be changed or freed by its owner.
        own = copy.deepcopy(attention).requires_grad_(False)
        x = run.session.place(job)[0].x.detach().clone()
        normed = None
        if isinstance(layer, Normed) and norm is not None:
            normed = Normed(own, ExactNorm(copy.deepcopy(norm).requires_grad_(False)))
        yield Captured(run.loaded.name, job.layer or 0, job.sample, own, x, norm, normed)


def layer_maps(
    model: AnyModel,
    data: AnyData = None,
    *,
    layers: Sequence[int] | Literal["all"] = "all",
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    **options: Unpack[Options],
) -> Iterator[tuple[Sample, LayerMap]]:
    """Any map of a model's layers at its inputs: for every length and sample, layer by layer.

    Args:
        model: As for `measure`.
        data: Text or a batch; the default text if None.
        layers: Indices from 0, or "all".
        lengths: Numbers of tokens of text windows.
        samples: Windows per length; 1 if None, for text.
        **options: As for `capture`; any ``map``, float32 unless another dtype is asked for.

    Yields:
        The sample, and the map at its input; it lives as long as the iteration.

    Raises:
        InputError: If the layer or the map does not exist.
    """
    asked = {"layers": layers, "lengths": lengths, "samples": samples, **options}
    for run, job in _places(model, data, asked, None, dtype="float32"):
        built, item, _ = run.session.place(job)
        yield item, built


def _places(
    model: AnyModel,
    data: AnyData,
    options: Mapping[str, Any],
    chosen: Sequence[int] | None,
    dtype: str,
) -> Iterator[tuple[LocalRun, Job]]:
    """Every layer at every input that is meant, on the CPU unless another device is named."""
    usual = {"samples": 1 if is_text(data, options) else None, "device": "cpu"}
    given = {name: value for name, value in options.items() if value is not None}
    with LocalRun(
        model, data, usual | given, verb="capture", without=ANSWERS, dtype=dtype, norms=True
    ) as run:
        count = 1 + max(job.sample for job in run.jobs)
        for index in chosen or ():
            if not 0 <= index < count:
                raise InputError(
                    f"`sample` should be between 0 and {count - 1}. Found `sample = {index}`."
                )
        for job in run.jobs:
            if chosen is None or job.sample in chosen:
                yield run, job
