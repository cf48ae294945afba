"""Pretrained models from a folder or hub id of transformers, every weight from there."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from lipscope.errors import InputError
from lipscope.models.library_messages import quiet
from lipscope.models.tokens import tokenizer_at

# What wrappers put before the names of weights: `torch.compile`, and training on several devices.
_WRAPPED = {r"^(?:(?:_orig_mod|module)\.)+": "", r"\._orig_mod\.": "."}
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
    """A model with all its weights, and its tokenizer or None.

    Prefixes that wrappers leave (``_orig_mod.``, ``module.``) are taken off.

    Args:
        source: Folder or hub id.
        revision: Revision of a hub id.
        gguf_file: Name of a quantised file in the folder.
        allow_pickle: Accept weights that exist only as a pickle.
        known: Names that the source could have been meant to be.

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
        weights |= {"key_mapping": _WRAPPED, "ignore_mismatched_sizes": True}
    with quiet():
        try:
            model, found = AutoModel.from_pretrained(
                source, trust_remote_code=False, output_loading_info=True, **options, **weights
            )
        except Exception as problem:  # every library has its own; the user gets one line
            raise _explained(source, problem, known) from problem
    _check_class(source, model)
    _check_keys(source, model, found)
    return model, tokenizer_at(source, **options)


def with_words(source: str, model: nn.Module) -> nn.Module | None:
    """An encoder with the head that fills in words, where its checkpoint holds one.

    Args:
        source: Folder or hub id.
        model: What `from_pretrained` made of it, in any dtype and on any device.

    Returns:
        The model with its head around it; None where the checkpoint is of another class, or holds
        the head as a pickle or not at all.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    kind: Any = MODEL_FOR_MASKED_LM_MAPPING.get(type(getattr(model, "config", None)), None)
    return None if kind is None else with_head(source, model, kind)


def with_head(source: str, model: nn.Module, kind: Any = None) -> nn.Module | None:
    """A model with the head that its checkpoint holds: of the class of which it was saved.

    Args:
        source: Folder or hub id.
        model: What `from_pretrained` made of it, in any dtype and on any device.
        kind: The class that is wanted; any if None.

    Returns:
        The model with its head around it; None where the checkpoint is of another class, or holds
        the head as a pickle or not at all.
    """
    import transformers

    config: Any = getattr(model, "config", None)
    saved = getattr(config, "architectures", None) or ()
    kind = kind or getattr(transformers, saved[0] if saved else "", None)
    if getattr(kind, "__name__", "") not in saved or getattr(model, "name_or_path", "") != source:
        return None
    if isinstance(model, kind):
        return None
    options = {"revision": getattr(config, "_commit_hash", None) or "main", "use_safetensors": True}
    try:
        with quiet():
            whole, found = kind.from_pretrained(
                source, key_mapping=_WRAPPED, output_loading_info=True, **options
            )
    except Exception:  # each loader has errors of its own: the head is not to be had
        return None
    body = whole.base_model_prefix
    if found["missing_keys"] or found["mismatched_keys"]:
        return None
    if type(getattr(whole, body, None)) is not type(model):
        return None
    setattr(whole, body, model)
    whole.tie_weights()
    return whole.to(next(model.parameters())).requires_grad_(False).eval()


def _check_class(source: str, model: nn.Module) -> None:
    """Refuse weights of a class of another family than the configuration says.

    Families share names of weights: BERT's fit into RoBERTa, whose positions are others.
    """
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


def _explained(source: str, problem: Exception, known: Collection[str]) -> InputError:
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
