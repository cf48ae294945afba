"""Pretrained models from a folder or hub id of transformers, every weight from there."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import logging as stdlib_logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lipscope.errors import InputError
from lipscope.sources import entries_of, uncollected

# What wrappers put before the names of weights: `torch.compile`, and training on several devices.
WRAPPER_PREFIXES = {r"^(?:(?:_orig_mod|module)\.)+": "", r"\._orig_mod\.": "."}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # in words of torch
# Made of the last layer's output, and no part of any map.
_BEHIND = re.compile(r"(^|\.)pooler\.")
# Constants that older versions of transformers kept beside the weights.
_CONSTANTS = re.compile(r"(position_ids|inv_freq|masked_bias|\.attn\.bias|\.attention\.bias)$")


def from_pretrained(
    source: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    allow_pickle: bool = False,
    known: Collection[str] = (),
) -> tuple[nn.Module, Any]:
    """A model of a folder or hub id with all its weights, and its tokenizer or None.

    Prefixes that wrappers leave (``_orig_mod.``, ``module.``) are taken off. ``known`` are names
    that the source could have been meant to be.

    Raises:
        InputError: If there is no such model, its weights cannot be used, or a layer would keep
            weights that are not from the checkpoint.
    """
    from transformers import AutoModel

    options: dict[str, Any] = {}
    if revision is not None:
        options["revision"] = revision
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    weights: dict[str, Any] = {}
    if gguf_file is None:
        weights = {"use_safetensors": None if allow_pickle else True, "weights_only": True}
        weights |= {"key_mapping": WRAPPER_PREFIXES, "ignore_mismatched_sizes": True}
    with quiet(), uncollected():
        try:
            model, found = AutoModel.from_pretrained(
                source, trust_remote_code=False, output_loading_info=True, **options, **weights
            )
        except Exception as problem:  # every library has its own; the user gets one line
            raise explained_loading(source, problem, known) from problem
    check_checkpoint(source, model, found)
    return model, tokenizer_at(source, **options)


def check_checkpoint(source: str, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Refuse weights of another family, or that leave a layer without, as loading ``found``."""
    _check_class(source, model)
    _check_keys(source, model, found)


def _check_class(source: str, model: nn.Module) -> None:
    """Refuse weights of another family: BERT's fit into RoBERTa, whose positions are others."""
    import transformers

    config: Any = model.config
    for name in getattr(config, "architectures", None) or ():
        kind = getattr(getattr(transformers, name, None), "config_class", None)
        parts = getattr(kind, "sub_configs", {}).values()
        if kind is not None and type(config) not in (kind, *parts):
            raise InputError(
                f"The configuration of `{source}` should be that of its weights. Found "
                f"`model_type: {config.model_type}` beside weights of `{name}`, which is of type "
                f"`{kind.model_type}`."
            )


def _check_keys(source: str, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that leaves a layer without its weights, or has more of them."""
    parts = {name for name, _ in model.named_children()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def inside(key: str) -> bool:
        own = key.removeprefix(prefix)
        return own.split(".")[0] in parts and not _CONSTANTS.search(own) and not _BEHIND.search(own)

    missing = sorted(key for key in found["missing_keys"] if not _BEHIND.search(key))
    other = sorted(key for key, *_ in found["mismatched_keys"])
    more = sorted(key for key in found["unexpected_keys"] if inside(key))
    broken = sorted(found.get("conversion_errors", ()))
    for keys, what in (
        (broken, "cannot be read"),
        (other, "have another shape than the configuration says"),
        (missing, "are not in the file and would be random"),
        (more, "are in the file and not in the model"),
    ):
        if keys:
            shown = ", ".join(f"`{key}`" for key in keys[:3])
            rest = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise InputError(
                f"The weights of `{source}` should be those of a `{type(model).__name__}`, as its "
                f"configuration says. Found that {shown}{rest} {what}."
            )


def explained_loading(source: str, problem: Exception, known: Collection[str] = ()) -> InputError:
    """One line for the many ways in which loading fails."""
    text = _COLOURS.sub("", " ".join(str(problem).split()))
    folder = os.path.exists(os.path.expanduser(source))
    if "trust_remote_code" in text or "custom code" in text:
        return InputError(
            f"`{source}` needs code from its repository, which is never run; use a model whose "
            "class is in transformers."
        )
    if "weights_only" in text or "Weights only" in text:  # and then how to load it all the same
        return InputError(
            f"`{source}` should hold weights and nothing else. Found a pickle with other objects, "
            "which can run code and is not loaded; ask for one in safetensors."
        )
    if "safetensors" in text and "does not appear to have" in text:
        return InputError(
            f"`{source}` holds its weights only as a pickle, which can run code; use a revision "
            "with safetensors, or pass `--allow-pickle` (weights-only loading)."
        )
    if folder:
        return InputError(f"`{source}` could not be loaded: {text[:300]}")
    close = difflib.get_close_matches(source, list(known), n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return InputError(
        f"`{source}` is none of {', '.join([*known, 'random:FAMILY'])}, not a local folder, and "
        f"could not be loaded from the hub ({type(problem).__name__}).{hint} Without a network, "
        "pass the path of a local folder in Hugging Face format."
    )


# --- tokenizers: those beside the weights, and plain bytes for random models


class Bytes:
    """The UTF-8 bytes of a text modulo the size of the vocabulary: for models without training.

    >>> Bytes(100)("ab")["input_ids"]
    [97, 98]
    """

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, text: str, **_: Any) -> Mapping[str, list[int]]:
        """The ids of a text."""
        return {"input_ids": [byte % self.vocab_size for byte in text.encode()]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of some ids; what is none in UTF-8 is not read back as these ids."""
        return bytes(i % 256 for i in ids).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Letters, and numbers for what is none."""
        return [chr(i) if 32 <= i < 127 else f"<{i}>" for i in ids]


def tokenizer_at(source: str | None, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, its own or its processor's; None if there is none."""
    from transformers import AutoProcessor, AutoTokenizer

    for kind in (AutoTokenizer, AutoProcessor) if source else ():
        try:
            with quiet():
                found = kind.from_pretrained(source, trust_remote_code=False, **options)
        except Exception:  # whatever is missing or damaged: there is none
            continue
        found = getattr(found, "tokenizer", found)
        # A folder without tokenizer files gives an empty one, which reads every text as unknown.
        if callable(getattr(found, "get_vocab", None)) and _knows_words(found):
            return found
    return None


def _knows_words(tokenizer: Any) -> bool:
    return not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)


def trained_length(config: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that a model's files say it was trained on, or None.

    To be asked before the tokenizer is used, which forgets where it should cut.
    """
    source = getattr(config, "_name_or_path", None)
    if not source:
        return None
    folder = Path(str(source))
    cut = getattr(getattr(tokenizer, "backend_tokenizer", None), "truncation", None)
    if cut is None:  # older transformers takes it off
        cut = entries_of(folder / "tokenizer.json").get("truncation")
    said = [
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        cut.get("max_length") if isinstance(cut, dict) else None,
        entries_of(folder / "sentence_bert_config.json").get("max_seq_length"),
    ]
    return min((n for n in said if isinstance(n, int) and n > 0), default=None)


# --- what transformers prints, and reads three times over

# In a notebook its bars, which are silenced here, would rather be widgets.
warnings.filterwarnings("ignore", message="IProgress not found")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and warnings off the terminal."""
    from transformers import logging

    hub = stdlib_logging.getLogger("huggingface_hub")
    hub_level, level = hub.level, logging.get_verbosity()
    hub.setLevel(stdlib_logging.CRITICAL)  # its retries would be lines of their own
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            if not sys.stderr.isatty():  # dequantisation draws a bar of its own
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


_ASKED = ("GGUFReader", "get_tensor_name_map")


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Parse a GGUF file once, and its table of names once for all modules, not for each."""
    import gguf

    before = {name: getattr(gguf, name) for name in _ASKED}
    try:
        for name, found in before.items():
            setattr(gguf, name, functools.cache(found))
        yield
    finally:
        for name, found in before.items():
            setattr(gguf, name, found)
