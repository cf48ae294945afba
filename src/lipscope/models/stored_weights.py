"""A checkpoint whose weights stay on the disk until they are asked for by name.

Transformers knows which keys of a checkpoint become which weights, and how: renamed, split, stacked
(experts), permuted. Its own loader is run here, first on tensors without values, and then on the
keys that are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.pretrained import (
    WRAPPER_PREFIXES,
    check_checkpoint,
    explained_loading,
    quiet,
)
from lipscope.sources import entries_of

# Checkpoints up to so many bytes are told apart by all that is in them, larger ones by the names,
# sizes and times of their files.
HASHED = 2 * 2**30
_PIECE = 2**24  # bytes that are hashed at a time
_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"


@dataclass
class StoredWeights:
    """The weights of a checkpoint in safetensors, and its model without their values."""

    source: str  # folder or hub id
    files: list[Path]
    skeleton: nn.Module  # the model; its weights have a shape and a type, and no values
    _file_of: dict[str, Path]  # by key
    _keys_of: dict[str, list[str]]  # by the name of the first weight that is made of them
    _plain: set[str]  # names of weights that are their key's tensor as it is
    options: dict[str, Any]  # the revision, where one was asked for
    _name: dict[str, str]  # the first of a weight's names, by each of them
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(file.stat().st_size for file in self.files)

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Weights by name, as they are stored; some may have more names in the model."""
        keys = [key for name in names for key in self._keys_of.get(name, ())]
        with self._lock, self._opened(keys) as slices, quiet():
            before = self.skeleton.state_dict(keep_vars=True)
            try:
                _load(self.skeleton, slices, "cpu")
                found = self.skeleton.state_dict(keep_vars=True).items()
                return {self._name[n]: t.detach() for n, t in found if t is not before[n]}
            finally:
                for name, tensor in before.items():
                    _put(self.skeleton, name, tensor)

    def rows(self, name: str, index: list[int]) -> Tensor:
        """Some rows of a weight that `has_rows`."""
        (key,) = self._keys_of[name]
        with self._lock, self._opened([key]) as slices:
            kind = self.skeleton.get_parameter(name).dtype
            return torch.cat([slices[key][i : i + 1] for i in index]).to(kind)

    def has_rows(self, name: str) -> bool:
        """Whether single rows of a weight can be read."""
        return name in self._plain

    @contextlib.contextmanager
    def _opened(self, keys: Collection[str]) -> Iterator[dict[str, Any]]:
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            files = dict.fromkeys(dict.fromkeys(self._file_of[key] for key in keys))
            opened: dict[Path, Any] = {f: stack.enter_context(safe_open(f, "pt")) for f in files}
            yield {key: opened[self._file_of[key]].get_slice(key) for key in keys}

    def fingerprint(self) -> str:
        """A digest of the files' contents, or of their names, sizes and times where they are large.

        Two checkpoints never share their rows; a copy of a large one is another checkpoint.
        """
        state = hashlib.sha256()
        whole = self.bytes <= HASHED
        for file in self.files:
            stat = file.stat()
            state.update(f"{file.name} {stat.st_size}".encode())
            if not whole:
                state.update(f" {stat.st_mtime_ns}".encode())
                continue
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    state.update(piece)
        return state.hexdigest()[:12]


def stored_weights(source: str, *, larger_than: int, **options: Any) -> StoredWeights | None:
    """The checkpoint of a folder or hub id, or None where it is to be loaded as a whole.

    That is one whose weights take at most ``larger_than`` bytes in float32, one that is not in
    safetensors, or a quantised one. Keys that a layer lacks, and others that
    `check_checkpoint` refuses, are refused here too: they are in the files' headers.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.core_model_loading import rename_source_key

    try:
        with quiet():
            files = _files(source, **options)
            if 4 * sum(file.stat().st_size for file in files) <= larger_than:
                return None
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
            if getattr(config, "quantization_config", None) is not None:
                return None
            shapes = _shapes(files)
            if 4 * sum(math.prod(one.shape) for one in shapes.values()) <= larger_than:
                return None
            with torch.device("meta"):
                model = AutoModel.from_config(config, dtype=_dtype(config, shapes))
            found = _load(model, {key: one.empty for key, one in shapes.items()}, "meta")
            found = _finished(model, found)
    except InputError:
        raise
    except Exception as problem:  # every library has its own; the user gets one line
        raise explained_loading(source, problem) from problem
    check_checkpoint(source, model, found)
    model.eval()
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(t), name) for name, t in state.items()}
    keys_of, plain = dict[str, list[str]](), set[str]()
    renamings, converters = _mapping(model)
    for key, one in shapes.items():
        how = (model.base_model_prefix, state)
        name, pattern = rename_source_key(key, renamings, converters, *how)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            continue
        keys_of.setdefault(names[name], []).append(key)
        if pattern is None and tuple(state[name].shape) == one.shape:
            plain.add(names[name])
    plain -= {name for name, keys in keys_of.items() if len(keys) > 1}
    files_of = {key: one.file for key, one in shapes.items()}
    return StoredWeights(source, files, model, files_of, keys_of, plain, options, names)


@dataclass(frozen=True)
class _Shape:
    """What the header of a file says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _shapes(files: list[Path]) -> dict[str, _Shape]:
    from safetensors import safe_open

    found: dict[str, _Shape] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no mapping
                one = opened.get_slice(key)
                kind = _KINDS.get(one.get_dtype())
                if kind is None:
                    raise InputError(
                        f"`{file}` should hold numbers. Found `{key}` of type `{one.get_dtype()}`."
                    )
                found[key] = _Shape(file, tuple(one.get_shape()), kind)
    return found


_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _dtype(config: Any, shapes: dict[str, _Shape]) -> torch.dtype:
    """What the configuration says, or the first float of the file, as transformers takes it."""
    said = getattr(config, "dtype", None)
    if isinstance(said, torch.dtype):
        return said
    floats = (one.dtype for one in shapes.values() if one.dtype.is_floating_point)
    return next(floats, torch.float32)


def _files(source: str, **options: Any) -> list[Path]:
    """The safetensors files of a checkpoint, fetched where the source is no folder."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    quietly = {"_raise_exceptions_for_missing_entries": False, **options}
    index = cached_file(source, _INDEX, **quietly)
    if index is None:
        one = cached_file(source, _ONE, **quietly)
        return [] if one is None else [Path(one)]
    if not entries_of(Path(index)).get("weight_map"):
        return []  # its loader says what is wrong
    return [Path(file) for file in get_checkpoint_shard_files(source, index, **options)[0]]


def _mapping(model: Any) -> tuple[list[Any], list[Any]]:
    """How transformers renames and converts keys for a model, those of wrappers first."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model, WRAPPER_PREFIXES)
    return [r for r in rules if isinstance(r, WeightRenaming)], [
        r for r in rules if isinstance(r, WeightConverter)
    ]


def _load(model: Any, tensors: dict[str, Any], device: str) -> Any:
    """Put tensors of a checkpoint into a model, as transformers does; what it says of keys."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    renamings, converters = _mapping(model)
    how = LoadStateDictConfig(
        device_map={"": device},
        dtype=next((p.dtype for p in model.parameters()), torch.float32),
        weight_mapping=[*renamings, *converters],
        ignore_mismatched_sizes=True,
    )
    return convert_and_load_state_dict_in_model(model, tensors, how)[0]


def _finished(model: Any, found: Any) -> dict[str, Any]:
    """Tie weights and compute constants, as transformers does at the end of loading."""
    from transformers.modeling_utils import LoadStateDictConfig

    broken = getattr(found, "conversion_errors", {})
    how = LoadStateDictConfig(device_map={"": "cpu"}, ignore_mismatched_sizes=True)
    said = model._finalize_model_loading(model, how, found).to_dict()
    return {**said, "conversion_errors": broken}


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    kept = owner._parameters if last in owner._parameters else owner._buffers
    kept[last] = tensor  # pyright: ignore[reportArgumentType]
