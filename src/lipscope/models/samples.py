"""Samples of a model: text windows, entries of a batch, or pictures, one at a time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError, check_finite_numbers
from lipscope.models.images import image_samples
from lipscope.models.loading import LoadedModel, digest
from lipscope.models.pretrained import Bytes
from lipscope.models.tracing.prepare import eval_mode
from lipscope.models.tracing.recorder import (
    Recorder,
    as_called,
    is_tokens,
    named_arguments,
    signature_of,
    to_device,
    token_arguments,
)
from lipscope.models.windows import Sample, WindowKind, windows_of_text
from lipscope.sources import default_text, read_texts


def checked_data(data: Any) -> Any:
    """The user's data, checked as far as possible without a model; a path is read as text."""
    if isinstance(data, Path):
        return read_texts(data, "`data`")
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
        for name, value in data.items():
            _check_tensor(value, name)
    elif isinstance(data, Tensor):
        _check_tensor(data)
    elif data is not None and not (
        isinstance(data, list) and data and all(isinstance(one, Sample) for one in data)
    ):
        raise InputError(
            "`data` should be text, a `Path`, a tensor or a mapping of tensors. "
            f"Found `{type(data).__name__}`."
        )
    return data


def _check_tensor(value: Any, name: str = "data") -> None:
    if not isinstance(value, Tensor):
        return
    if (
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
    if not value.is_floating_point():
        return
    # -inf hides a token
    of_mask = "mask" in name or "bias" in name
    check_finite_numbers(name, value.masked_fill(value.isneginf(), 0) if of_mask else value)


def _text_samples(
    loaded: LoadedModel,
    text: str,
    lengths: Sequence[int],
    samples: int,
    windows: WindowKind,
    special_tokens: bool,
) -> list[Sample]:
    if not text.strip():
        raise InputError("The text should not be empty. Found no words in it.")
    limit = loaded.max_tokens
    if limit is not None and max(lengths) > limit:
        raise InputError(
            f"`lengths` should be at most {limit}, the positions of `{loaded.name}`. "
            f"Found {max(lengths)}."
        )
    cut = windows_of_text(
        text,
        loaded.reader_of_text(),
        lengths=sorted(set(lengths)),
        samples=samples,
        kind=windows,
        special_tokens=special_tokens,
    )
    return [_window_input(w, loaded.model, loaded.config) for w in cut]


# What the input of a decoder starts with: the first that its configuration says.
_STARTS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")


def _window_input(w: Sample, model: nn.Module, config: Any) -> Sample:
    """A window; an encoder-decoder reads it twice, its decoder one token later."""
    arguments: Any = inputs_of_ids(model, w.ids)
    if "decoder_input_ids" in signature_of(model).parameters:
        starts = (getattr(config, name, None) for name in _STARTS)
        start = next((one for one in starts if isinstance(one, int)), 0)
        first = torch.full_like(w.ids[:, :1], start)
        arguments["decoder_input_ids"] = torch.cat([first, w.ids[:, :-1]], dim=1)
    return replace(w, arguments=arguments)


def inputs_of_ids(model: nn.Module, ids: Tensor) -> dict[str, Tensor] | tuple[Tensor]:
    """Token ids by their usual name or, for a model without it, as its first argument."""
    return {"input_ids": ids} if "input_ids" in signature_of(model).parameters else (ids,)


def _batch_samples(loaded: LoadedModel, data: Any) -> list[Sample]:
    if isinstance(data, Mapping):
        arguments: dict[str, Any] = dict(data)
    else:
        arguments = {_argument_name(data, signature_of(loaded.model).parameters): data}
    tensors = [v for v in arguments.values() if isinstance(v, Tensor) and v.ndim > 1]
    if not tensors or not tensors[0].numel():
        raise InputError(
            "`data` should hold at least one tensor with a batch axis. Found none; add the axis to "
            "a single input, as with `data[None]`."
        )
    _check_masks(arguments)
    axis = _batch_axis(loaded.model, arguments)
    count = next((v for v in tensors if is_tokens(v)), tensors[0]).shape[axis]
    count = count if "input_ids" in arguments else _count_packed(arguments) or count
    inputs = []
    for s in range(count):
        one = {k: _entry(k, v, axis, count, s) for k, v in arguments.items()}
        sha = _digest_of(one)
        call = (one[""],) if "" in one else one
        words = _token_names(loaded.tokenizer, one)
        inputs.append(Sample("batch", call, s, None, None, sha, words))
    return inputs


def _token_names(tokenizer: Any, arguments: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The tokenizer's names of the ids of one entry, if there is one, without padding."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or "decoder_input_ids" in arguments:
        return None
    real = ids[0] if mask is None or mask.shape != ids.shape else ids[0][mask[0] != 0]
    numbers = real.tolist()
    if not all(0 <= one < 2**31 for one in numbers):
        return None  # the model will say what is wrong with them
    names = tokenizer.convert_ids_to_tokens(numbers) if tokenizer is not None else numbers
    return tuple(
        str(one if name is None else name) for one, name in zip(numbers, names, strict=True)
    )


def _count_packed(arguments: Mapping[str, Any]) -> int | None:
    """1 for a picture whose patches are the rows of one tensor, according to its grid."""
    name = next((k for k in arguments if k.endswith("grid_thw")), None)
    if name is None:
        return None
    if (pictures := len(arguments[name])) != 1:
        raise InputError(
            f"`{name}` should be of one picture: patches of several are packed into one tensor. "
            f"Found {pictures}; pass them one by one."
        )
    return 1


def _entry(name: str, value: Any, axis: int, count: int, sample: int) -> Any:
    """The argument of one sample of a batch: its own entry, or the shared value."""
    at = axis if axis and is_tokens(value) else 0
    if not isinstance(value, Tensor) or value.ndim <= at or value.shape[at] != count:
        return value
    if name in _PAIRS and value.ndim == 2 and value.shape[0] == value.shape[1] and count > 1:
        raise InputError(
            f"`{name}` should have different numbers of samples and tokens, to tell them apart. "
            f"Found {count} of each; pass the samples one by one."
        )
    return value if name in _PAIRS and value.ndim == 2 else value.narrow(at, sample, 1)


# Masks of pairs of tokens, the same for all samples (torch's names).
_PAIRS = ("attn_mask", "mask", "memory_mask", "src_mask", "tgt_mask")


def _check_masks(arguments: Mapping[str, Any]) -> None:
    """Refuse a mask of tokens that does not fit the tokens beside it."""
    for mask, tokens in _MASKED.items():
        given = next((arguments[k] for k in tokens if isinstance(arguments.get(k), Tensor)), None)
        flags = arguments.get(mask)
        if given is None or flags is None or (isinstance(flags, Tensor) and flags.ndim == 4):
            continue
        if not isinstance(flags, Tensor):
            raise InputError(f"`{mask}` should be a tensor. Found `{type(flags).__name__}`.")
        if flags.shape != given.shape[:2]:
            raise InputError(
                f"`{mask}` should have one entry per token, {tuple(given.shape[:2])}. Found "
                f"{tuple(flags.shape)}."
            )
        if not bool(((flags == 0) | (flags == 1)).all()):
            raise InputError(f"`{mask}` should be 0 or 1 for every token. Found other values.")


_MASKED = {
    "attention_mask": ("input_ids", "inputs_embeds"),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds"),
    "encoder_attention_mask": ("encoder_hidden_states",),
}


def _batch_axis(model: nn.Module, arguments: Mapping[str, Any]) -> int:
    """The batch axis of the tokens, as torch's own attention inside is called."""
    sites = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    sites = [m for m in sites if not m.batch_first]
    streams = [*token_arguments(arguments).values()]
    if not sites or not streams:
        return 0
    first, second = streams[0].shape[:2]
    if first != second:
        return 0 if _batch_inside(model, arguments, sites) == first else 1
    one = {k: v.narrow(0, 0, 1) if is_tokens(v) else v for k, v in arguments.items()}
    return 0 if _batch_inside(model, one, sites) == 1 else 1


def _batch_inside(
    model: nn.Module, arguments: Mapping[str, Any], sites: Sequence[nn.Module]
) -> int | None:
    """Number of samples that the attention sees; None if the model does not run."""
    seen: list[int] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["query"]).shape[1])

    first = next(model.parameters())
    given = to_device(arguments, first.device, first.dtype)
    try:
        with Recorder() as recorder, torch.no_grad(), eval_mode(model):
            for site in sites:
                recorder.before(site, look)
            model(given[""]) if "" in given else model(**given)
    except Exception:  # the forward pass that counts will say what is wrong
        return None
    return seen[0] if seen else None


def _digest_of(arguments: Mapping[str, Any]) -> str:
    """Digest of a call: of the tensor where there is only one, else of all named values."""
    if len(arguments) == 1:
        (only,) = arguments.values()
        return digest(only)
    parts = {k: digest(v) if isinstance(v, Tensor) else repr(v) for k, v in arguments.items()}
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def _argument_name(data: Tensor, takes: Collection[str]) -> str:
    """The name of a model's argument for a tensor; "" for its first argument."""
    if not data.is_floating_point():
        return "input_ids" if "input_ids" in takes else ""
    name = {3: "inputs_embeds", 4: "pixel_values"}.get(data.ndim, "")
    if not name and "input_ids" in takes:
        raise InputError(
            "`data` should be input ids (integers), embeddings (batch, tokens, width) or pixels "
            f"(batch, channels, height, width). Found floats of shape {tuple(data.shape)}."
        )
    return name if name in takes else ""


# --- positions that start elsewhere than at 0


def _offset_positions(loaded: LoadedModel, items: Sequence[Sample], offset: int) -> list[Sample]:
    """The same samples with position ids ``first + offset, first + offset + 1, …``.

    ``first`` is where the model itself starts: 0, or after the padding id (RoBERTa). Samples of a
    model that makes its positions itself are left as they are (`later_positions`).
    """
    if offset == 0:
        return list(items)
    if not _takes_ids(loaded.model) and not _position_tables(loaded.model):
        raise InputError(
            "`position_offset` needs a model that takes `position_ids` (learnt or rotary "
            "positions), or tables of positions whose start can be moved. Found "
            f"`{type(loaded.model).__name__}`, which has neither; leave it out."
        )
    given = [(item, *_checked_tokens(loaded, item, offset)) for item in items]
    if not _takes_ids(loaded.model):
        return list(items)
    first = loaded.first_position + offset
    return [
        replace(item, arguments={**own, "position_ids": torch.arange(first, first + n)[None]})
        for item, own, n in given
    ]


@contextlib.contextmanager
def later_positions(model: nn.Module, offset: int) -> Iterator[None]:
    """Move the start of every table of positions, where a model makes its positions itself.

    BART and similar models take no position ids; their tables get the number of earlier tokens.
    """
    with Recorder() as recorder:
        for table in _position_tables(model) if offset and not _takes_ids(model) else ():
            recorder.before(table, functools.partial(_later, offset))
        yield


# How many tokens came before, as tables of transformers call it from 5.24 on, and did before.
_BEFORE = ("cache_length", "past_key_values_length")


def _takes_ids(model: nn.Module) -> bool:
    return "position_ids" in signature_of(model).parameters


def _position_tables(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if "PositionalEmbedding" in type(module).__name__
        and not signature_of(module).parameters.keys().isdisjoint(_BEFORE)
    ]


def _later(offset: int, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a table for tokens at later positions."""
    given, name = named_arguments(table, args, kwargs), "position_ids"
    if given.get(name) is None:  # a table that is told the positions does not count
        name = next(one for one in _BEFORE if one in signature_of(table).parameters)
    given[name] = given.get(name, 0) + offset
    return as_called(table, given, len(args))


def _checked_tokens(
    loaded: LoadedModel, item: Sample, offset: int
) -> tuple[Mapping[str, Any], int]:
    """The arguments and the number of tokens of a sample, checked for this offset."""
    given = item.arguments if isinstance(item.arguments, Mapping) else {}
    tokens = next((given[k] for k in ("input_ids", "inputs_embeds") if k in given), None)
    if not isinstance(tokens, Tensor) or "position_ids" in given:
        raise InputError(
            "`position_offset` needs input ids or embeddings without position ids of their own. "
            f"Found {', '.join(given) or 'a plain tensor'}."
        )
    n, limit = tokens.shape[1], loaded.max_tokens
    if limit is not None and offset + n > limit:
        raise InputError(
            f"`position_offset` should be at most {limit - n} for {n} tokens, as "
            f"`{loaded.name}` has {limit} positions. Found `position_offset = {offset}`."
        )
    return given, n


# --- what is measured: windows of a text, a batch, or pictures

_BYTES = "random weights: the text's UTF-8 bytes modulo the vocabulary size are the tokens"
_TWICE = "encoder and decoder read the same window, the decoder one token later"


def remarks_on(loaded: LoadedModel, item: Sample) -> list[str]:
    """Remarks for a row on the conversion of a text to an input."""
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
    windows: WindowKind,
    special_tokens: bool,
    images: str | Path | None = None,
    resolutions: Sequence[int] | None = None,
    position_offset: int = 0,
) -> list[Sample]:
    """The samples of a text, of ``lengths`` and ``samples``, a batch or pictures; see `measure`."""
    if images is not None:
        found = image_samples(loaded, images, resolutions=resolutions, samples=samples)
    elif data is None or isinstance(data, str):
        assert lengths is not None and samples is not None
        text = default_text() if data is None else data
        found = _text_samples(loaded, text, lengths, samples, windows, special_tokens)
    elif lengths is not None or samples is not None:
        raise InputError(
            "`lengths` and `samples` cut a text into windows. Found them with a batch, whose "
            "entries are the samples; leave them out."
        )
    else:
        found = _batch_samples(loaded, data)
    return _offset_positions(loaded, found, position_offset)
