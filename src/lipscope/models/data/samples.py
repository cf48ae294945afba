"""Text windows or the entries of a batch, as a model takes them: one sample at a time."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.data.windows import (
    Window,
    WindowKind,
    default_text,
    digest,
    read_text,
    windows_of_text,
)
from lipscope.models.loading import LoadedModel

_WINDOWS = ("spread", "consecutive")
_DEFAULT_LENGTHS = (16, 64, 256)
_DEFAULT_SAMPLES = 10


@dataclass(frozen=True)
class Sample:
    """One sample as the model takes it, with what its rows say about it."""

    kind: str
    arguments: Mapping[str, Any] | tuple[Any, ...]
    sample: int
    start: int | None
    num_tokens: int | None
    sha256: str
    tokens: tuple[str, ...] | None


def given(data: Any) -> Any:
    """What was given to be read, checked as far as no model is needed; a path is read as text.

    Args:
        data: Text, the path of a text file, a tensor, a mapping of arguments, or None.

    Returns:
        The same, a text in place of a path.

    Raises:
        InputError: If it is nothing of the kind, or the name of a file where a text should be.
    """
    if isinstance(data, Path):
        return read_text(data, "`data`")
    if isinstance(data, str):
        if len(data) < 1000 and os.path.isfile(data):
            raise InputError(
                f"`data` should be the text itself. Found `{data}`, the path of a file; did you "
                f'mean the file? Pass `Path("{data}")`.'
            )
        return data
    if isinstance(data, Mapping):
        if not all(isinstance(key, str) for key in data):
            raise InputError("`data` should have names of arguments as keys. Found another key.")
        for value in data.values():
            _check_tensor(value)
    elif isinstance(data, Tensor):
        _check_tensor(data)
    elif not (data is None or _are_samples(data)):
        raise InputError(
            "`data` should be text, a `Path`, a tensor or a mapping of tensors. "
            f"Found `{type(data).__name__}`."
        )
    return data


def _are_samples(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(one, Sample) for one in data)


def _check_tensor(value: Any) -> None:
    if isinstance(value, Tensor) and (
        not value.ndim
        or value.is_complex()
        or value.is_meta
        or value.layout != torch.strided
        or value.is_quantized
    ):
        raise InputError(
            "`data` should hold real, dense tensors with axes. Found "
            f"{str(value.dtype)[6:]} of shape {tuple(value.shape)} on `{value.device}`, "
            f"{str(value.layout)[6:]}."
        )


def _check_mask(name: str, mask: Any, first: Tensor) -> None:
    """A mask of tokens says of every token of every entry whether it is real."""
    if mask is None:
        return
    fits = isinstance(mask, Tensor) and mask.ndim in (2, 4) and mask.shape[0] == first.shape[0]
    if fits and mask.ndim == 2:
        fits = bool(((mask == 0) | (mask == 1)).all())
        fits &= name != "attention_mask" or first.ndim > 3 or mask.shape[1] == first.shape[1]
    if not fits:
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"`{name}` should hold a 1 for every token that is read and a 0 for every other, in "
            f"the shape {tuple(first.shape[:2])}. Found {found}"
            + ("." if found[:5] != "shape" else f" with values from {mask.min()} to {mask.max()}.")
        )


def samples_of(
    loaded: LoadedModel,
    data: Any,
    lengths: Sequence[int] | None,
    samples: int | None,
    windows: str,
    special_tokens: bool,
) -> list[Sample]:
    """The samples of a text or a batch; see `measure` for the arguments.

    Args:
        loaded: The model.
        data: Text, None for the default text, a tensor, or a mapping of tensors.
        lengths: Numbers of tokens of the windows of a text.
        samples: Windows per length.
        windows: ``spread`` or ``consecutive``.
        special_tokens: Add the model's own special tokens.

    Returns:
        One sample per window or batch entry.

    Raises:
        InputError: If the text or the batch cannot be measured as asked.
    """
    if data is None or isinstance(data, str):
        text = default_text() if data is None else data
        return _text_inputs(loaded, text, lengths, samples, windows, special_tokens)
    if lengths is not None or samples is not None:
        raise InputError(
            "`lengths` and `samples` cut a text into windows. Found them with a batch, whose "
            "entries are the samples; leave them out."
        )
    return _batch_inputs(loaded, data)


def _text_inputs(
    loaded: LoadedModel,
    text: str,
    lengths: Sequence[int] | None,
    samples: int | None,
    windows: str,
    special_tokens: bool,
) -> list[Sample]:
    lengths = _DEFAULT_LENGTHS if lengths is None else lengths
    samples = _DEFAULT_SAMPLES if samples is None else samples
    _check_windows(loaded, text, lengths, samples, windows)
    cut = windows_of_text(
        text,
        loaded.reader_of_text(),
        lengths=sorted(set(lengths)),
        samples=samples,
        kind=cast("WindowKind", windows),
        special_tokens=special_tokens,
    )
    start = _decoder_start(loaded)
    return [_window_input(w, start) for w in cut]


def _window_input(w: Window, decoder_start: int | None) -> Sample:
    """A window; an encoder-decoder reads it twice, its decoder one token later."""
    arguments = {"input_ids": w.ids}
    if decoder_start is not None:
        first = torch.full_like(w.ids[:, :1], decoder_start)
        arguments["decoder_input_ids"] = torch.cat([first, w.ids[:, :-1]], dim=1)
    return Sample("text", arguments, w.sample, w.start, w.num_tokens, w.sha256, w.tokens)


def _decoder_start(loaded: LoadedModel) -> int | None:
    """What a decoder's input starts with; None where there is no decoder to feed."""
    if "decoder_input_ids" not in inspect.signature(loaded.model.forward).parameters:
        return None
    config = loaded.config
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return 0


def _check_windows(
    loaded: LoadedModel, text: str, lengths: Sequence[int], samples: int, windows: str
) -> None:
    if not text.strip():
        raise InputError("The text should not be empty. Found no words in it.")
    if windows not in _WINDOWS:
        raise InputError(f"`windows` should be one of {', '.join(_WINDOWS)}. Found `{windows}`.")
    if not lengths or min(lengths) < 1:
        raise InputError(f"`lengths` should be positive. Found {list(lengths)}.")
    if samples < 1:
        raise InputError(f"`samples` should be at least 1. Found {samples}.")
    limit = loaded.max_tokens
    if limit is not None and max(lengths) > limit:
        raise InputError(
            f"`lengths` should be at most {limit}, the positions of `{loaded.name}`. "
            f"Found {max(lengths)}."
        )


def _batch_inputs(loaded: LoadedModel, data: Any) -> list[Sample]:
    if isinstance(data, Tensor):
        name = _argument_name(data)
        named = loaded.config is not None or isinstance(loaded.model, _hugging_face_base())
        arguments: dict[str, Any] = {name: data} if named else {"": data}
    elif isinstance(data, Mapping):
        arguments = dict(data)
    else:
        raise InputError(
            "`data` should be text, a tensor or a mapping of tensors. "
            f"Found `{type(data).__name__}`."
        )
    tensors = [v for v in arguments.values() if isinstance(v, Tensor) and v.ndim > 1]
    if not tensors or not tensors[0].numel():
        raise InputError("`data` should hold at least one tensor with a batch axis. Found none.")
    tokens = (arguments[name] for name in ("input_ids", "inputs_embeds") if name in arguments)
    for name, value in arguments.items():
        if name.endswith("attention_mask"):
            _check_mask(name, value, next(tokens, tensors[0]))
    axis = 1 if _tokens_first(loaded.model) and "" in arguments and tensors[0].ndim == 3 else 0
    count = tensors[0].shape[axis]
    inputs = []
    for s in range(count):
        one = {
            k: v.narrow(axis, s, 1) if isinstance(v, Tensor) and _is_batch(v, axis, count) else v
            for k, v in arguments.items()
        }
        sha = _digest_of(one)
        call = (one[""],) if "" in one else one
        inputs.append(Sample("batch", call, s, None, None, sha, None))
    return inputs


def _is_batch(value: Tensor, axis: int, count: int) -> bool:
    return value.ndim > axis and value.shape[axis] == count


def _digest_of(arguments: Mapping[str, Any]) -> str:
    """Digest of a call: of the tensor where there is only one, else of all named values."""
    if len(arguments) == 1:
        (only,) = arguments.values()
        return digest(only)
    parts = {k: digest(v) if isinstance(v, Tensor) else repr(v) for k, v in arguments.items()}
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def _argument_name(data: Tensor) -> str:
    if not data.is_floating_point():
        return "input_ids"
    names = {3: "inputs_embeds", 4: "pixel_values"}
    if data.ndim not in names:
        raise InputError(
            "`data` should be input ids (integers), embeddings (batch, tokens, width) or pixels "
            f"(batch, channels, height, width). Found floats of shape {tuple(data.shape)}."
        )
    return names[data.ndim]


def _hugging_face_base() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


def _tokens_first(model: nn.Module) -> bool:
    """Whether torch's own attention inside puts tokens before the batch."""
    return any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules())


def moved(
    arguments: Mapping[str, Any] | tuple[Any, ...], device: torch.device, dtype: torch.dtype
) -> Mapping[str, Any] | tuple[Any, ...]:
    """The arguments on a device, floating ones in a dtype."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    if isinstance(arguments, tuple):
        return tuple(move(v) for v in arguments)
    return {k: move(v) for k, v in arguments.items()}
