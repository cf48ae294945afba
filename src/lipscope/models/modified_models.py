"""Modified models: causal masks, quantised, random or scrambled weights, and restored heads."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import draws_from
from lipscope.models.loading import LoadedModel
from lipscope.models.pretrained import WRAPPER_PREFIXES, quiet
from lipscope.models.tracing.prepare import copied, eval_mode
from lipscope.models.tracing.recorder import Recorder, first_tensor, run
from lipscope.models.tracing.sites import attention_sites, is_linear, linears

Keeps = Literal["entries", "spectrum"]
Rounds = Literal["weights", "inputs"]
Which = Literal["all", "query and key", "value and output"]
# The last words of a module's path, as transformers names the four projections.
_PROJECTIONS: dict[Which, str] = {
    "all": ".",
    "query and key": r"\.(query|key|q_proj|k_proj|q_lin|k_lin|q|k)$",
    "value and output": r"\.(value|v_proj|o_proj|out_proj|v_lin|out_lin|attention\.output\.dense)$",
}

_BLOCK = 32  # weights that share a scale and an offset in the format Q4_1
_STEPS = 15  # four bits
_IDS = 6  # tokens of a trial


def as_decoder(loaded: LoadedModel) -> LoadedModel:
    """A copy with a causal mask in every layer, ``NAME, causal``: token i reads tokens j <= i.

    Holds for encoders of transformers that can also be built as decoders (BERT and its copies).
    """
    if getattr(loaded.config, "is_decoder", None) is not False:
        raise InputError(
            f"`{loaded.name}` should be an encoder that also runs as a decoder, as BERT. Found "
            "none; leave it out of the masked runs."
        )
    return replace(_masked(loaded, "is_decoder", True), name=f"{loaded.name}, causal")


def _masked(loaded: LoadedModel, key: str, causal: bool) -> LoadedModel:
    """A copy whose configuration, under this key, and layers say whether they are causal."""
    model: Any = copied(loaded.in_memory("Another mask").model)
    setattr(model.config, key, causal)
    site: Any
    for site in attention_sites(model).values():
        site.is_causal = causal
    return replace(loaded, model=model)


def with_mask(loaded: LoadedModel, causal: bool | None) -> LoadedModel:
    """The same weights with a causal mask in every layer, or without; unchanged for None.

    Holds for models of transformers that read token ids: encoders that can also be built as
    decoders (`as_decoder`), and decoders with learnt positions. Rotary embeddings and biases of
    positions treat later and earlier tokens differently, and were trained on earlier ones only.
    The ``weights`` of a copy record the change.

    Raises:
        InputError: If the model has no mask that could be added or removed.
    """
    if causal is None or _reads_later(loaded) != causal:
        return loaded
    model = as_decoder(loaded) if causal else _without_mask(loaded)
    if _reads_later(model) == causal:
        raise InputError(
            f"`causal` needs a model that takes its mask from its configuration. Found "
            f"`{type(loaded.model).__name__}`, whose layers mask by themselves; leave it out."
        )
    change = "with a causal mask" if causal else "without a causal mask"
    return replace(model, name=loaded.name, weights=f"{loaded.weights}, {change}")


def _without_mask(loaded: LoadedModel) -> LoadedModel:
    of = loaded.config.to_dict()
    turns = any(of[key] for key in of if key.startswith(("rope_", "rotary_")))
    biased = any("alibi" in name.lower() for one in loaded.model.modules() for name in dir(one))
    if turns or biased or of.get("alibi"):
        found = "a rotary embedding" if turns else "a bias of positions"
        raise InputError(
            "`causal = no` needs positions that were learnt for each token, which say nothing of "
            f"before and after. Found {found} in `{loaded.name}`, trained on earlier tokens alone; "
            "leave `causal` out."
        )
    return _masked(loaded, "is_causal", False)


def _reads_later(loaded: LoadedModel) -> bool:
    """Whether attention at the first token depends on a later one, by the first layer's values."""
    model, size = loaded.model, getattr(loaded.config, "vocab_size", None)
    if not isinstance(size, int) or size < _IDS + 1:
        raise InputError(
            "`causal` needs a model of transformers that reads token ids. Found "
            f"`{type(model).__name__}`; leave it out."
        )
    first = next(iter(attention_sites(model).values()))
    seen: list[Tensor] = []
    ids = torch.arange(_IDS, device=next(model.parameters()).device)[None]
    try:
        with Recorder() as recorder, torch.no_grad(), eval_mode(model):
            recorder.after(first, lambda *a: seen.append(first_tensor(a[2])[0, 0].clone()))
            for last in (_IDS - 1, _IDS):
                run(model, {"input_ids": torch.cat([ids[:, :-1], ids[:, -1:] * 0 + last], 1)})
    except (RuntimeError, ValueError, TypeError, IndexError) as problem:
        raise InputError(
            "`causal` needs a model that reads one sequence of token ids. Found that "
            f"`{type(model).__name__}` raised {type(problem).__name__}: {problem}"
        ) from problem
    return not torch.equal(seen[0], seen[-1])


def quantised(loaded: LoadedModel) -> LoadedModel:
    """A copy, ``NAME, Q4_1``, with linear maps rounded to that format.

    Each 32 weights of a row share a scale and an offset in half precision,
    ``w -> m + round((w - m) / s) s`` with ``m = min w`` and ``s = (max w - min w) / 15``.
    """
    model = copied(loaded.in_memory("A change of all weights").model)
    for _, weight in _rows_of_linears(model):
        weight.copy_(_q4_1(weight.contiguous()))
    return replace(loaded, name=f"{loaded.name}, Q4_1", model=model, weights="rounded to Q4_1")


def rounded(x: Float[Tensor, "*n d"], bits: int) -> Float[Tensor, "*n d"]:
    """Every row rounded to its own symmetric grid: ``s round(x / s)``.

    ``s = max |row| / (2^(bits - 1) - 1)``, so that the largest entry stays as it is; rounding goes
    to the nearest, halves to the even one. Zero rows stay zero. Rows are a weight's output
    channels, or tokens.

    >>> rounded(torch.tensor([[7.0, -3.2, 0.4]]), 4)
    tensor([[ 7., -3.,  0.]])
    """
    if bits < 2:
        raise InputError(f"`bits` should be at least 2. Found `bits = {bits}`.")
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x / step.clamp_min(torch.finfo(x.dtype).tiny)).round() * step


@contextlib.contextmanager
def rounding(module: nn.Module, what: Rounds, bits: int) -> Iterator[None]:
    """Round weights (a step for each output channel) or inputs (for each token) of linear maps."""
    held = _rows_of_linears(module)
    kept = [weight.clone() for _, weight in held] if what == "weights" else []

    def round_first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (rounded(args[0], bits), *args[1:]), kwargs

    try:
        with Recorder() as recorder:
            for linear, weight in held:
                if what == "weights":
                    weight.copy_(rounded(weight, bits))
                else:
                    recorder.before(linear, round_first)
            yield
    finally:
        for (_, weight), before in zip(held, kept, strict=bool(kept)):
            weight.copy_(before)


def rounding_error(module: nn.Module, bits: int) -> float:
    """``‖Q(W) - W‖_F / ‖W‖_F`` over all linear maps of a module together, see `rounded`."""
    pairs = [(weight, rounded(weight, bits)) for _, weight in _rows_of_linears(module)]
    lost = sum(float((after - weight).double().square().sum()) for weight, after in pairs)
    whole = sum(float(weight.double().square().sum()) for weight, _ in pairs)
    return math.sqrt(lost / whole) if whole else 0.0


def _rows_of_linears(module: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Every linear map with its weight, one row for each output channel."""
    return [
        # Rows of inputs: Conv1D keeps its weight transposed.
        (one, weight.T if type(one).__name__ == "Conv1D" else weight)
        for one in linears(module)
        for weight in [one.get_parameter("weight").data]
    ]


def reinitialised(loaded: LoadedModel, seed: int = 0) -> LoadedModel:
    """A new model of the same architecture and tokenizer, named after its random weights."""
    if loaded.config is None:
        raise InputError(f"`{loaded.name}` should be a model of transformers. Found another.")
    with quiet(), draws_from(seed):
        model = type(loaded.model)(loaded.config).eval()
    name, weights = f"{loaded.name}, random weights, seed {seed}", f"random, seed {seed}"
    return replace(loaded, name=name, model=model, weights=weights)


def scrambled(
    loaded: LoadedModel,
    keeps: Keeps,
    which: Which = "all",
    *,
    layer: int | None = None,
    seed: int = 0,
) -> LoadedModel:
    """A copy whose matrices keep their size and lose the structure of training.

    ``entries`` permutes the entries of each matrix: their distribution stays, so that logits are
    about as large as the trained ones. ``spectrum`` keeps the singular values, ``U S Vᵀ`` with
    ``U`` and ``V`` drawn uniformly (Haar measure). Biases, norms and embeddings stay. Of a model of
    transformers whose blocks are numbered; of one ``layer`` only, whose input stays the trained
    one, or of all.

    Raises:
        InputError: If there is no such matrix, as in a model with one matrix for Q, K and V.
    """
    model = copied(loaded.in_memory("A change of all weights").model)
    place = re.compile(r"\.\d+\." if layer is None else rf"\.{layer}\.")
    draw, found = torch.Generator().manual_seed(seed), 0
    for name, module in model.named_modules():
        # Blocks are numbered by the first number of the path.
        numbered = re.search(r"\.\d+\.", f".{name}.")
        inside = numbered is not None and place.fullmatch(numbered[0]) is not None
        if inside and is_linear(module) and re.search(_PROJECTIONS[which], f".{name}"):
            weight = module.get_parameter("weight").data
            weight.copy_(_permuted(weight, draw) if keeps == "entries" else _turned(weight, draw))
            found += 1
    if not found:
        raise InputError(
            f"`{loaded.name}` should have matrices of its own for `{which}`, by the usual names. "
            "Found none; scramble all of them."
        )
    done = f"{keeps} of {which} kept, seed {seed}"
    where = "" if layer is None else f", layer {layer}"
    return replace(loaded, name=f"{loaded.name}, {done}{where}", model=model, weights=done)


def _permuted(weight: Tensor, draw: torch.Generator) -> Tensor:
    order = torch.randperm(weight.numel(), generator=draw)
    return weight.flatten()[order.to(weight.device)].view_as(weight)


def _turned(weight: Tensor, draw: torch.Generator) -> Tensor:
    values = torch.linalg.svdvals(weight.double())
    sides = [_orthogonal(size, len(values), draw).to(values) for size in weight.shape]
    return ((sides[0] * values) @ sides[1].T).to(weight)


def _orthogonal(size: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal columns by Haar measure: the QR of a Gaussian matrix with positive diagonal."""
    q, r = torch.linalg.qr(torch.randn(size, columns, generator=draw, dtype=torch.float64))
    return q * r.diagonal().sign()


def _q4_1(weight: Tensor) -> Tensor:
    """Rows in blocks of 32 to 16 evenly spaced values each; a row's remainder is unchanged."""
    whole = weight.shape[1] - weight.shape[1] % _BLOCK
    blocks = weight[:, :whole].unflatten(1, (-1, _BLOCK)).float()
    low = blocks.amin(-1, keepdim=True).half().float()
    step = ((blocks.amax(-1, keepdim=True) - low) / _STEPS).half().float()
    level = ((blocks - low) / step.clamp_min(1e-12)).round().clamp(0, _STEPS)
    rounded = (low + level * step).flatten(1).to(weight)
    return torch.cat([rounded, weight[:, whole:]], dim=1)


# --- a model with its own scores


def with_own_head(loaded: LoadedModel) -> nn.Module:
    """A model with its own scores: the head of its checkpoint, or tied; itself without either."""
    found = with_head(loaded.source, loaded.model)
    if found is not None:
        return found
    try:
        return with_scores(loaded.model)[0]
    except InputError:
        return loaded.model


def with_scores(model: nn.Module) -> tuple[nn.Module, str]:
    """A decoder with scores of the next token, and the path of the decoder in it.

    A decoder that was loaded without its read-out gets the one of its own class in transformers,
    whose weights must be its own: those of the table of token vectors (tied weights). Scales and
    caps of the scores are those of that class. The path is "" if it is not known.

    Raises:
        InputError: If transformers has no such class, or its read-out has untied weights that
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
    """A model with the head of its checkpoint, in the class that was saved.

    ``model`` is the result of `from_pretrained` on ``source``, in any dtype and on any device. None
    if the checkpoint is of another class than ``kind`` (any if None), or holds its head as a
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
