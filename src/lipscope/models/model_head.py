"""A model with the head that its own class puts on it: a decoder with scores of the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lipscope.errors import InputError
from lipscope.models.loading import LoadedModel
from lipscope.models.pretrained import WRAPPER_PREFIXES, quiet
from lipscope.sources import split_revision


def with_own_head(loaded: LoadedModel) -> nn.Module:
    """A model with its own scores: the head of its checkpoint, or tied; itself without either."""
    name, _ = split_revision(loaded.name)
    found = with_head(name, loaded.model)
    if found is not None:
        return found
    try:
        return with_scores(loaded.model)[0]
    except InputError:
        return loaded.model


def with_scores(model: nn.Module) -> tuple[nn.Module, str]:
    """A decoder that ends in scores of the next token, and where the decoder is in it.

    A decoder that was loaded without its read-out gets the one of its own class in transformers,
    whose weights must be its own: those of the table of token vectors (tied weights). Scales and
    caps of the scores are those of that class. The path is "" if it is not known.

    Raises:
        InputError: If transformers has no such class, or its read-out has weights of its own that
            were not loaded.
    """
    name = str(getattr(model, "base_model_prefix", ""))
    own = getattr(model, "get_output_embeddings", lambda: None)
    if own() is not None:
        return model, name if hasattr(model, name) else ""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = getattr(model, "config", None)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or not name:
        raise InputError(
            "The next token needs a decoder of transformers. Found "
            f"`{type(model).__name__}`, which has no read-out of its own."
        )
    with quiet(), torch.device("meta"):
        whole = kind(config)
    name = whole.base_model_prefix
    if type(getattr(whole, name, None)) is not type(model):
        raise InputError(
            f"The next token needs a decoder that `{kind.__name__}` reads out. Found "
            f"`{type(model).__name__}`."
        )
    setattr(whole, name, model)
    whole.tie_weights()
    held = (*whole.named_parameters(), *whole.named_buffers())
    missing = sorted(path for path, weight in held if weight.is_meta)
    if missing:
        raise InputError(
            f"The next token needs the read-out of `{kind.__name__}`. Found `{missing[0]}` left "
            "behind when the model was loaded; pass a module that ends in scores."
        )
    return whole.eval(), name


def with_words(source: str, model: nn.Module) -> nn.Module | None:
    """An encoder with the head that fills in words, where its checkpoint holds one."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    kind: Any = MODEL_FOR_MASKED_LM_MAPPING.get(type(getattr(model, "config", None)), None)
    return None if kind is None else with_head(source, model, kind)


def with_head(source: str, model: nn.Module, kind: Any = None) -> nn.Module | None:
    """A model with the head that its checkpoint holds: of the class of which it was saved.

    ``model`` is what `from_pretrained` made of ``source``, in any dtype and on any device. None
    where the checkpoint is of another class than ``kind`` (any if None), or holds the head as a
    pickle or not at all.
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
                source, key_mapping=WRAPPER_PREFIXES, output_loading_info=True, **options
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
