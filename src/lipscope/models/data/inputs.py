"""Inputs to measure: windows of a text, a batch, or pictures, at the positions asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lipscope.errors import InputError
from lipscope.models.data.images import image_samples
from lipscope.models.data.positions import offset_positions
from lipscope.models.data.samples import Sample, samples_of
from lipscope.models.loading import LoadedModel
from lipscope.models.tokens import Bytes

_BYTES = "random weights: the text's UTF-8 bytes modulo the vocabulary size are the tokens"
_TWICE = "encoder and decoder read the same window, the decoder one token later"


def remarks_on(loaded: LoadedModel, item: Sample) -> list[str]:
    """What a row should say about how a text became an input."""
    if item.kind != "text":
        return []
    notes = [_BYTES] if isinstance(loaded.tokenizer, Bytes) else []
    return notes + ([_TWICE] if "decoder_input_ids" in item.arguments else [])


def inputs_of(
    loaded: LoadedModel,
    data: Any,
    *,
    lengths: Sequence[int] | None,
    samples: int | None,
    windows: str,
    special_tokens: bool,
    images: str | Path | None = None,
    resolutions: Sequence[int] | None = None,
    position_offset: int = 0,
) -> list[Sample]:
    """The samples of a text, a batch or pictures; see `measure` for the arguments.

    Returns:
        One sample per window, batch entry or picture.

    Raises:
        InputError: If they cannot be measured as asked, or exclude each other.
    """
    if images is None:
        if resolutions is not None:
            raise InputError("`resolutions` go with `images`. Found no `images`.")
        found = samples_of(loaded, data, lengths, samples, windows, special_tokens)
    else:
        if data is not None or lengths is not None:
            raise InputError("`images` take the place of a text. Found both; leave one out.")
        found = image_samples(loaded, images, resolutions=resolutions, samples=samples)
    return offset_positions(loaded, found, position_offset)
