"""Pretrained models of transformers, from a folder, a hub id or an ONNX graph, fully checked."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import io
import logging as stdlib_logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import draws_from
from lipscope.sources import BUNDLED, entries_of, uncollected

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
) -> tuple[nn.Module, Any]:
    """A model of a folder or hub id with all its weights, and its tokenizer or None.

    Prefixes of wrappers (``_orig_mod.``, ``module.``) are removed.

    Raises:
        InputError: If there is no such model, its weights cannot be used, or a layer would keep
            weights that are not from the checkpoint.
    """
    from transformers import AutoModel

    given = {"revision": revision, "gguf_file": gguf_file}
    options: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
    weights: dict[str, Any] = {}
    if gguf_file is None:
        weights = {"use_safetensors": None if allow_pickle else True, "weights_only": True}
        weights |= {"key_mapping": WRAPPER_PREFIXES, "ignore_mismatched_sizes": True}
    with quiet(), uncollected(), draws_from(0):  # a pooler that is not in the file is drawn
        try:
            model, found = AutoModel.from_pretrained(
                source, trust_remote_code=False, output_loading_info=True, **options, **weights
            )
        except Exception as problem:  # every library has its own; the user gets one line
            raise explained_loading(source, problem) from problem
    check_checkpoint(source, model, found)
    return model, tokenizer_at(source, **options)


def check_checkpoint(source: str, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Refuse another family, and missing, extra or misfit weights ``found`` in loading."""
    _check_class(source, model)
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


def _check_class(source: str, model: nn.Module) -> None:
    """Refuse weights of another family: BERT's fit RoBERTa, which has other positions."""
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


def explained_loading(source: str, problem: Exception) -> InputError:
    """One line for any failure of loading."""
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
            "with safetensors, or pass `allow_pickle=True` (weights-only loading)."
        )
    if folder:
        return InputError(f"`{source}` could not be loaded: {text[:300]}")
    close = difflib.get_close_matches(source, list(BUNDLED), n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return InputError(
        f"`{source}` is none of {', '.join([*BUNDLED, 'random:FAMILY'])}, not a local folder, and "
        f"could not be loaded from the hub ({type(problem).__name__}).{hint} Without a network, "
        "pass the path of a local folder in Hugging Face format."
    )


# --- DINOv2, from the weights of an exported graph

_PREFIX = "backbone."
_HEAD_WIDTH = 64  # of every DINOv2
# What transformers called its modules when the graph was exported, and calls them now.
_RENAMED = (
    (r"attention\.attention\.(query|key|value)\.", lambda m: f"attention.{m[1][0]}_proj."),
    (r"attention\.output\.dense\.", lambda m: "attention.o_proj."),
)


def dinov2_from_onnx(file: Path) -> nn.Module:
    """A ``Dinov2Model`` in float32 from an exported graph, without layers after the backbone.

    An export drops the names of all matrices that are multiplied from the right: each takes
    the name of the bias that is added next. Holds for DINOv2 of any size without registers whose
    weights are named ``backbone.…``.
    """
    from transformers import Dinov2Config, Dinov2Model

    state = _renamed(_graph_in(file))
    try:
        patches = state["embeddings.patch_embeddings.projection.weight"]
        positions = state["embeddings.position_embeddings"]
        width, channels, patch, _ = patches.shape
        config = Dinov2Config(
            hidden_size=width,
            num_attention_heads=width // _HEAD_WIDTH,
            num_hidden_layers=1 + max(int(m[1]) for m in map(_LAYER.match, state) if m),
            mlp_ratio=state["encoder.layer.0.mlp.fc1.bias"].shape[0] // width,
            image_size=patch * round((positions.shape[1] - 1) ** 0.5),
            patch_size=patch,
            num_channels=channels,
            use_mask_token=False,
        )
        model = Dinov2Model(config)
        model.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as problem:
        raise InputError(f"`{file}` should hold a DINOv2. Found: {str(problem)[:200]}") from problem
    return model.eval()


_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


def _graph_in(file: Path) -> Any:
    """The graph of a file; weights kept in other files are not read."""
    try:
        graph = importlib.import_module("onnx").load(file, load_external_data=False).graph
    except Exception as problem:  # protobuf's own errors have no class in common
        raise InputError(
            f"`{file}` should be an ONNX file. Found: {str(problem)[:200]}"
        ) from problem
    if not graph.node:
        raise InputError(f"`{file}` should be an ONNX file. Found no graph in it.")
    return graph


def _renamed(graph: Any) -> dict[str, Tensor]:
    """The weights under the names of today's transformers."""
    onnx, state = importlib.import_module("onnx"), dict[str, Tensor]()
    weights = {
        one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy())
        for one in graph.initializer
        if one.data_type == onnx.TensorProto.FLOAT
    }
    for name, tensor in _weights_by_name(graph, weights).items():
        if not name.startswith(_PREFIX):
            continue
        plain = name.removeprefix(_PREFIX)
        for pattern, today in _RENAMED:
            plain = re.sub(pattern, today, plain)
        state[plain] = tensor
    # Position embeddings of the class token and of the patches: what is left with three axes.
    tables = [t for name, t in weights.items() if t.ndim == 3 and _PREFIX not in name]
    if tables:
        tables.sort(key=lambda t: t.shape[1])
        state["embeddings.position_embeddings"] = torch.cat(tables, dim=1)
    return state


def _weights_by_name(graph: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights, every matrix transposed, under the name that its bias implies."""
    named = dict(weights)
    products = {
        node.output[0]: weights[node.input[1]]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in weights
    }
    for node in graph.node:
        bias = next((name for name in node.input if name.endswith(".bias")), None)
        product = next((name for name in node.input if name in products), None)
        if node.op_type == "Add" and bias is not None and product is not None:
            named[bias.removesuffix("bias") + "weight"] = products[product].T.contiguous()
    return named


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
        """The text of some ids; invalid UTF-8 does not encode to the same ids again."""
        return bytes(i % 256 for i in ids).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Letters, and numbers for other bytes."""
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
        words = getattr(found, "get_vocab", dict)()
        if not set(words) <= set(getattr(found, "all_special_tokens", ())):
            return found
    return None


def trained_length(config: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that a model's files say it was trained on, or None.

    Call it before using the tokenizer, which then loses its maximum length.
    """
    source = getattr(config, "_name_or_path", None)
    if not source:
        return None
    cut = getattr(getattr(tokenizer, "backend_tokenizer", None), "truncation", None)
    limits = [
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        cut.get("max_length") if isinstance(cut, dict) else None,
        entries_of(Path(str(source)) / "sentence_bert_config.json").get("max_seq_length"),
    ]
    return min((n for n in limits if isinstance(n, int) and n > 0), default=None)


# --- what transformers prints, and reads three times over

# In a notebook its bars, which are silenced here, would rather be widgets.
warnings.filterwarnings("ignore", message="IProgress not found")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and warnings off the terminal."""
    from transformers import logging

    hub = stdlib_logging.getLogger("huggingface_hub")
    with contextlib.ExitStack() as stack:
        stack.callback(hub.setLevel, hub.level)
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        hub.setLevel(stdlib_logging.CRITICAL)  # its retries would be lines of their own
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if not sys.stderr.isatty():  # dequantisation draws a bar of its own
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


_ASKED = ("GGUFReader", "get_tensor_name_map")


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Parse a GGUF file once, and its table of names once for all modules, not for each."""
    import gguf

    with contextlib.ExitStack() as stack:
        for name in _ASKED:
            own = getattr(gguf, name)
            stack.callback(setattr, gguf, name, own)
            setattr(gguf, name, functools.cache(own))
        yield
