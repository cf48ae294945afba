"""Checkpoints on disk whose weights are read by name.

Transformers knows which keys of a checkpoint become which weights, and how: renamed, split, stacked
(experts), permuted. Its own loader is run here, first on tensors without values, and then on the
keys that are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.pretrained import WRAPPER_PREFIXES, check_checkpoint, explained_loading, quiet
from lipscope.sources import check_stamp, entries_of, stamp_of

# Checkpoints up to so many bytes are told apart by all that is in them, larger ones by the names,
# sizes and times of their files.
HASHED = 2 * 2**30
_PIECE = 2**24  # bytes that are hashed at a time
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"


@dataclass
class StoredWeights:
    """The weights of a checkpoint, and its model without their values."""

    source: str  # folder or hub id
    files: list[Path]
    skeleton: nn.Module  # the model; its weights have a shape and a type, and no values
    _shapes: dict[str, _Shape]  # what the files hold, by key
    _keys_of: dict[str, list[str]]  # by the name of the first weight that is made of them
    _plain: set[str]  # names of weights that are their key's tensor as it is
    _experts: dict[str, list[list[str]]]  # keys of each row, by the name of a stack of experts
    options: dict[str, Any]  # the revision, where one was asked for, and whether pickles are
    _name: dict[str, str]  # the first of a weight's names, by each of them
    _stamp: str  # of the files
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(file.stat().st_size for file in self.files)

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Weights by name, as they are stored; some may have more names in the model."""
        return self._read([key for name in names for key in self._keys_of.get(name, ())])

    def _read(self, keys: Collection[str], **sizes: int) -> dict[str, Tensor]:
        """Weights built from some keys, with stacks of experts of these ``sizes``."""
        with self._lock, self._opened(keys) as slices, quiet():
            before = self.skeleton.state_dict(keep_vars=True)
            try:
                for name, size in sizes.items():
                    like = before[name].new_empty((size, *before[name].shape[1:]))
                    _put(self.skeleton, name, nn.Parameter(like, requires_grad=False))
                _load(self.skeleton, slices, "cpu")
                found = self.skeleton.state_dict(keep_vars=True).items()
                new = {n: t for n, t in found if t is not before[n] and not t.is_meta}
                return {self._name[n]: t.detach() for n, t in new.items()}
            finally:
                for name, tensor in before.items():
                    _put(self.skeleton, name, tensor)

    def rows(self, name: str, index: list[int]) -> Tensor:
        """Some rows of a weight that `has_rows`, in rising order."""
        if name in self._experts:
            keys = [key for i in index for key in self._experts[name][i]]
            return self._read(keys, **{name: len(index)})[name]
        (key,) = self._keys_of[name]
        ends = [k for k in range(1, len(index)) if index[k] != index[k - 1] + 1]
        runs = zip([0, *ends], [*ends, len(index)], strict=True)
        with self._lock, self._opened([key]) as slices:
            kind = self.skeleton.get_parameter(name).dtype
            some = (slices[key][index[a] : index[b - 1] + 1] for a, b in runs)
            return torch.cat([one.to(kind) for one in some])

    def has_rows(self, name: str) -> bool:
        """Whether single rows of a weight can be read."""
        return name in self._plain or name in self._experts

    def ahead(self, names: Collection[str]) -> None:
        """Prefetch weights from the disk into the system's cache, in large pieces."""
        buffer = bytearray(_PIECE)
        for key in (key for name in names for key in self._keys_of.get(name, ())):
            one = self._shapes[key]
            with contextlib.suppress(OSError), one.file.open("rb", buffering=0) as stream:
                stream.seek(one.start)
                left = one.bytes
                while left > 0 and (read := stream.readinto(memoryview(buffer)[:left])):
                    left -= read

    @contextlib.contextmanager
    def _opened(self, keys: Collection[str]) -> Iterator[dict[str, Any]]:
        from safetensors import safe_open

        check_stamp(self.source, self.files, self._stamp)
        with contextlib.ExitStack() as stack:
            files = dict.fromkeys(self._shapes[key].file for key in keys)
            pickles = {f: _pickled(f) for f in files if f.suffix == ".bin"}
            opened: dict[Path, Any] = {
                f: stack.enter_context(safe_open(f, "pt")) for f in files if f not in pickles
            }

            def found(key: str) -> Any:
                file = self._shapes[key].file
                return pickles[file][key] if file in pickles else opened[file].get_slice(key)

            yield {key: found(key) for key in keys}

    def fingerprint(self) -> str:
        """A digest of a folder's configuration and weights: contents, or times if it is large.

        Two checkpoints never share their rows; a copy of a large one is another checkpoint.
        """
        state = hashlib.sha256()
        whole = self.bytes <= HASHED
        for file in (Path(self.source, "config.json"), *self.files):
            stat = file.stat()
            state.update(f"{file.name} {stat.st_size}".encode())
            if not whole:
                state.update(f" {stat.st_mtime_ns}".encode())
                continue
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    state.update(piece)
        return state.hexdigest()[:12]


def stored_weights(
    source: str, *, larger_than: int, allow_pickle: bool = False, **options: Any
) -> StoredWeights | None:
    """The checkpoint of a folder or hub id, or None if it must be loaded as a whole.

    This holds if its weights take at most ``larger_than`` bytes in float32, if it is neither in
    safetensors nor in allowed pickles that can be mapped, or if it is quantised. Keys that a
    layer lacks, and others that `check_checkpoint` refuses, are refused here too: they are in the
    files' headers.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.core_model_loading import rename_source_key

    try:
        with quiet():
            files = _files(source, (_SAFE, _PICKLED) if allow_pickle else (_SAFE,), **options)
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
    keys_of, plain, experts = dict[str, list[str]](), set[str](), dict[str, list[list[str]]]()
    renamings, converters = _mapping(model)
    for key, one in shapes.items():
        how = (model.base_model_prefix, state)
        name, pattern = rename_source_key(key, renamings, converters, *how)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            continue
        keys_of.setdefault(names[name], []).append(key)
        how_made = next((c.operations for c in converters if pattern in c.source_patterns), ())
        if {type(one).__name__ for one in how_made} - _ROW_BY_ROW == set() and how_made:
            experts[names[name]] = []
        if pattern is None and tuple(state[name].shape) == one.shape:
            plain.add(names[name])
    plain -= {name for name, keys in keys_of.items() if len(keys) > 1}
    experts = {name: _by_row(keys_of[name], len(state[name])) for name in experts}
    experts = {name: rows for name, rows in experts.items() if rows}
    options |= {"allow_pickle": True} if allow_pickle else {}
    how_read = (shapes, keys_of, plain, experts, options, names, stamp_of(files))
    return StoredWeights(source, files, model, *how_read)


# What is made of experts one after the other, and no expert of another one.
_ROW_BY_ROW = {"MergeModulelist", "Concatenate", "Transpose"}


def _by_row(keys: list[str], count: int) -> list[list[str]]:
    """The keys of each expert, by its number in them; nothing if they have none."""
    parts = [key.split(".") for key in keys]
    if len({len(one) for one in parts}) != 1:
        return []
    for place in range(len(parts[0])):
        numbers = [one[place] for one in parts]
        if {*numbers} == {*map(str, range(count))} and count > 1:
            rows: list[list[str]] = [[] for _ in range(count)]
            for number, key in zip(numbers, keys, strict=True):
                rows[int(number)].append(key)
            return rows
    return []


@dataclass(frozen=True)
class _Shape:
    """The header entry of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # of its bytes in the file
    bytes: int

    @property
    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _shapes(files: list[Path]) -> dict[str, _Shape]:
    from safetensors import safe_open
    from transformers.modeling_utils import str_to_torch_dtype

    found: dict[str, _Shape] = {}
    for file in files:
        if file.suffix == ".bin":
            held = _pickled(file).items()
            found |= {key: _Shape(file, tuple(t.shape), t.dtype, 0, 0) for key, t in held}
            continue
        with safe_open(file, "pt"), file.open("rb") as stream:  # it refuses one cut short
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for key, one in header.items():
            kind = str_to_torch_dtype.get(one["dtype"])
            if kind is None:
                raise InputError(
                    f"`{file}` should hold numbers. Found `{key}` of type `{one['dtype']}`."
                )
            start, end = one["data_offsets"]
            found[key] = _Shape(file, tuple(one["shape"]), kind, 8 + size + start, end - start)
    return found


def _pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped and not read; nothing but weights is unpickled."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _dtype(config: Any, shapes: dict[str, _Shape]) -> torch.dtype:
    """The dtype of the configuration, or of the first float in the file, as in transformers."""
    declared = getattr(config, "dtype", None)
    if isinstance(declared, torch.dtype):
        return declared
    floats = (one.dtype for one in shapes.values() if one.dtype.is_floating_point)
    return next(floats, torch.float32)


def _files(source: str, names: Collection[str], **options: Any) -> list[Path]:
    """The files of a checkpoint under the first existing name, fetched for a hub id."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    quietly = {"_raise_exceptions_for_missing_entries": False, **options}
    for name in names:
        index = cached_file(source, f"{name}.index.json", **quietly)
        if index is not None:
            if not entries_of(Path(index)).get("weight_map"):
                return []  # its loader says what is wrong
            return [Path(file) for file in get_checkpoint_shard_files(source, index, **options)[0]]
        one = cached_file(source, name, **quietly)
        if one is not None:
            return [Path(one)]
    return []


def _mapping(model: Any) -> tuple[list[Any], list[Any]]:
    """Transformers' renamings and conversions of a model's keys, prefixes of wrappers first."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model, WRAPPER_PREFIXES)
    return [r for r in rules if isinstance(r, WeightRenaming)], [
        r for r in rules if isinstance(r, WeightConverter)
    ]


def _load(model: Any, tensors: dict[str, Any], device: str) -> Any:
    """Load tensors of a checkpoint into a model, as transformers does; its report on keys."""
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
