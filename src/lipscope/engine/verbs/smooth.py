"""Smoothing of a pretrained model: layers rescaled to a maximum sigma on a text, and the cost."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lipscope.attacks import ascent_move
from lipscope.attention import Attention
from lipscope.control import Restraint, restrain
from lipscope.display import Piece, Shown, pieces, rounded_down, rounded_up
from lipscope.engine.checks import argument, flag, is_number, path, whole_number
from lipscope.engine.ready_model import ReadyModel, loaded_model
from lipscope.engine.verbs.measure import measure
from lipscope.errors import InputError, memory_for, shown
from lipscope.models import LoadedModel, checked_data, fingerprint, inputs_of, quiet
from lipscope.pages import Rows, empty_table, number

_RATE = 1e-4  # learning rate of the fine-tuning
_LARGEST = 1e30  # upper limit of the target
_EVERY = 10  # training steps between enforcements of the cap
MOVE = 0.01  # size of an attack's move, relative to the norm of the embeddings
_ASCENTS = 10  # number of its gradient steps
Progress = Callable[[str], None]


@dataclass(frozen=True, repr=False)
class Smoothed(Shown):
    """The result of smoothing a model.

    Attributes:
        before: Rows of the layers of the original model on the text.
        after: The same rows for the saved model.
        quality: ``perplexity`` of a decoder with a language head, else ``agreement``: the mean
            cosine between pooled outputs before and after.
        quality_before: Quality before, on the same windows of the text; 1 for the agreement.
        quality_after: Quality after.
        change_before: Relative change of the last hidden states, ``‖ΔH‖ / ‖H‖``, under a move of
            the embeddings by 1 % of their norm: the largest found by gradient ascent, a lower
            bound; mean over windows.
        change_after: The same after smoothing.
        path: Folder of the saved model.
    """

    before: Rows
    after: Rows
    quality: Literal["perplexity", "agreement"]
    quality_before: float
    quality_after: float
    change_before: float
    change_after: float
    path: Path


def smooth(
    model: str | Path | LoadedModel | ReadyModel = "minilm",
    data: str | Path | None = None,
    *,
    target: float,
    out: str | Path,
    layers: Sequence[int] | int | str | Literal["all"] = "all",
    length: int = 64,
    samples: int = 4,
    steps: int = 0,
    force: bool = False,
    seed: int = 0,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Smoothed:
    """Rescale a model's attention layers to a maximum sigma on a text, and save it.

    The output projection of each layer is scaled so that its sigma, map ``attention``, is at most
    the target at all windows of the text (``sigma-cap`` of `lipscope.restrain`); layers below it
    are unchanged. With ``steps`` the chosen layers are then trained to reproduce the original
    model's last hidden states, under the same cap.

    Holds for layers whose weights are read in closed form, and at the given windows: no bound
    on other texts. It limits sigma of the layers, not of the model, whose residual stream is
    unchanged.

    Args:
        model: A name for `load_model`, or a loaded model, which is left unchanged.
        data: Text, or the ``Path`` of a text file; the default text if None.
        target: Maximum sigma, positive.
        out: Folder for the model in Hugging Face format; with the language head, if the model is
            a decoder that has one.
        layers: Indices from 0, or "all".
        length: Number of tokens per window.
        samples: Number of windows.
        steps: Number of training steps.
        force: Write into a folder that is not empty.
        seed: Seed of random starts, and of the weights of a random model.
        allow_pickle: As for `measure`.
        progress: Called with a description of the current step.

    Raises:
        InputError: If the target cannot be reached, the folder is not empty, or the model cannot
            be measured on text.
    """
    if progress is not None and not callable(progress):
        raise InputError(f"`progress` should be a function. Found `{type(progress).__name__}`.")
    tell = progress or (lambda _: None)
    steps = argument(whole_number(0, 1_000_000), "steps", steps)
    force = argument(flag, "force", force)
    length = argument(whole_number(1, 10**6), "length", length)
    samples = argument(whole_number(1, 100_000), "samples", samples)
    if not is_number(target) or not 0 < target < _LARGEST:
        raise InputError(f"`target` should be positive and finite. Found `{shown(target)}`.")
    folder = _new_folder(Path(argument(path, "out", out)), force)
    tell("loading")
    loaded = _loaded(model, seed, allow_pickle)
    head = _language_model(loaded, allow_pickle)
    text = checked_data(data)
    asked = {"lengths": [length], "samples": samples, "seed": seed, "tol": 1e-3}
    tell("measuring")
    before = measure(loaded, text, layers=layers, **asked)
    ids = _window_ids(loaded, text, length, samples)
    chosen = sorted({row.layer for row in before if row.layer is not None})
    held = restrain(loaded.model, ids, "sigma-cap", layers=chosen, cap=float(target), seed=seed)
    original = _outputs(loaded.model, ids)
    start = None if head is None else _perplexity(head, ids)
    tell("attacking")
    changes = [_change_under_attack(loaded.model, ids, original, seed)]
    tell("rescaling")
    held.step()
    if steps:
        tell("training")
        _tune(loaded.model, held, ids, original, steps)
    revised = replace(loaded, revision=f"sha256:{fingerprint(loaded.model)}")
    try:
        after = measure(revised, text, layers=layers, **asked)
    except InputError as problem:  # the rescaled layer is lost in rounding
        raise InputError(
            "`target` should be one at which the model can be measured. "
            f"Found `{shown(target)}`: {problem}"
        ) from None
    now = _outputs(loaded.model, ids)
    tell("attacking")
    changes.append(_change_under_attack(loaded.model, ids, now, seed))
    _save(loaded, head, folder)
    if head is not None and start is not None:
        end = _perplexity(head, ids)
        return Smoothed(before, after, "perplexity", start, end, *changes, path=folder)
    pooled = [torch.cat([one.mean(1) for one in some]) for some in (original, now)]
    agreement = float(torch.cosine_similarity(*pooled, dim=-1).mean())
    return Smoothed(before, after, "agreement", 1.0, agreement, *changes, path=folder)


def _new_folder(folder: Path, force: bool) -> Path:
    folder = Path(os.path.expanduser(folder))
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as problem:
        raise InputError(
            f"`out` should be a folder. Found `{folder}`: {problem.strerror}."
        ) from None
    if taken and not (force and folder.is_dir()):
        raise InputError(
            f"`{folder}` should be a new folder. Found a file or a nonempty folder; "
            "choose another `out`, or give `force=True`."
        )
    return folder


def _loaded(model: Any, seed: int, allow_pickle: bool) -> LoadedModel:
    """The model with its own copy of the weights, at least in float32."""
    name = str(model) if isinstance(model, Path) else model
    loaded = loaded_model(name, seed=seed, allow_pickle=allow_pickle).in_memory("`smooth`")
    if not hasattr(loaded.model, "save_pretrained") or isinstance(loaded.model, Attention):
        raise InputError(
            "`model` should be one of transformers, which can be saved in its format. Found "
            f"`{type(loaded.model).__name__}`."
        )
    own = loaded.model if isinstance(model, str | Path) else copy.deepcopy(loaded.model)
    narrow = any(p.dtype.itemsize < 4 for p in own.parameters() if p.is_floating_point())
    return replace(loaded, model=(own.float() if narrow else own).eval())


def _language_model(loaded: LoadedModel, allow_pickle: bool) -> Any:
    """The decoder with its language head around the given model, or None."""
    from transformers import AutoModelForCausalLM

    names = getattr(loaded.config, "architectures", None)
    if names is None:  # missing in a GGUF file; random weights predict nothing
        with_head = not loaded.weights.startswith("random")
    else:
        with_head = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    if not with_head or type(loaded.config) not in AutoModelForCausalLM._model_mapping:
        return None
    with quiet():
        if getattr(loaded.config, "tie_word_embeddings", False):
            with torch.device("meta"):  # the head has no weights besides the embedding
                found: Any = AutoModelForCausalLM.from_config(loaded.config)
        elif os.path.isdir(loaded.name):
            kinds = {"use_safetensors": None if allow_pickle else True, "weights_only": True}
            found = AutoModelForCausalLM.from_pretrained(loaded.name, **kinds)
        else:
            return None
    setattr(found, found.base_model_prefix, loaded.model)
    found.tie_weights()
    return None if any(p.is_meta for p in found.parameters()) else found.eval()


def _window_ids(loaded: LoadedModel, text: Any, length: int, samples: int) -> Tensor:
    """Token ids of the windows, one per row."""
    found = inputs_of(
        loaded, text, lengths=[length], samples=samples, windows="spread", special_tokens=True
    )
    several = [
        one.arguments.get("input_ids") if isinstance(one.arguments, dict) else None for one in found
    ]
    if any(one is None for one in several) or any(len(one.arguments) > 1 for one in found):
        raise InputError(
            "`model` should read one sequence of token ids. Found "
            f"`{type(loaded.model).__name__}`, which reads something else."
        )
    return torch.cat([one for one in several if one is not None])


@memory_for("The model's own forward pass")
def _outputs(model: nn.Module, ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=one[None]).last_hidden_state for one in ids]


def _perplexity(head: Any, ids: Tensor) -> float:
    """``exp`` of the mean next-token loss over all windows."""
    with torch.no_grad():
        logits = [head(input_ids=one[None]).logits[0, :-1] for one in ids]
    if len(ids[0]) < 2:
        raise InputError("`length` should be at least 2 for a perplexity. Found 1.")
    return math.exp(nn.functional.cross_entropy(torch.cat(logits), ids[:, 1:].flatten()).item())


@memory_for("The attack on the embeddings")
def _change_under_attack(model: Any, ids: Tensor, outputs: Sequence[Tensor], seed: int) -> float:
    """``‖ΔH‖ / ‖H‖`` for the worst move of the embeddings found, mean over windows."""
    table, found = model.get_input_embeddings(), []
    for one, here in zip(ids, outputs, strict=True):
        with torch.no_grad():
            x = table(one)

        def moved(z: Tensor, one: Tensor = one) -> Tensor:
            handle = table.register_forward_hook(lambda *_: z[None])
            try:
                return model(input_ids=one[None]).last_hidden_state[0]
            finally:
                handle.remove()

        move = ascent_move(moved, x, MOVE * float(x.norm()), seed, steps=_ASCENTS)
        with torch.no_grad():
            found.append(float((moved(x + move) - here[0]).norm() / here.norm()))
    return sum(found) / len(found)


def _tune(
    model: nn.Module, held: Restraint, ids: Tensor, original: Sequence[Tensor], steps: int
) -> None:
    """Train the chosen layers towards the outputs of the original model, under the cap."""
    own = {id(p): p for i in held.probe.indices for p in held.probe.module(i).parameters()}
    own |= {
        id(p): p
        for i in held.probe.indices
        for h, _ in held.probe.weights(i)
        for p in h.parameters()
    }
    rest = {p: p.requires_grad for p in model.parameters() if id(p) not in own}
    for p in rest:
        p.requires_grad_(False)
    optimiser = torch.optim.AdamW(own.values(), lr=_RATE, weight_decay=0.0)
    scale = float(torch.stack([one.square().mean() for one in original]).mean())
    for step in range(1, steps + 1):
        at = step % len(ids)
        output: Any = model(input_ids=ids[at : at + 1])
        loss = (output.last_hidden_state - original[at]).square().mean() / scale
        if not bool(loss.isfinite()):
            raise InputError(f"Training should have a finite loss. Found {loss.item()} at {step}.")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % _EVERY == 0 or step == steps:
            held.step()
    for p, needs in rest.items():
        p.requires_grad_(needs)


def _save(loaded: LoadedModel, head: Any, folder: Path) -> None:
    whole: Any = loaded.model if head is None else head
    # A model from a quantised file has plain weights now, and is saved as such.
    part: Any
    for part in (whole, loaded.model):
        if getattr(part, "hf_quantizer", None) is not None:
            part.hf_quantizer = None
        if hasattr(part.config, "quantization_config"):
            del part.config.quantization_config
    try:
        with quiet():
            whole.save_pretrained(folder)
            if hasattr(loaded.tokenizer, "save_pretrained"):
                loaded.tokenizer.save_pretrained(folder)
    except OSError as problem:
        raise InputError(f"`{folder}` cannot be written ({problem.strerror}).") from problem


# --- display


@pieces.register
def _smoothed(found: Smoothed) -> Iterator[Piece]:
    """Sigma of every layer, and the cost."""
    made = empty_table("", (), ("layer", "sigma before", "after", "at most"))
    for layer in dict.fromkeys(row.layer for row in found.after):
        before, after = (
            [row for row in rows if row.layer == layer] for rows in (found.before, found.after)
        )
        cells = (
            number(max(row.sigma or 0.0 for row in before), 4, rounded_down),
            number(max(row.sigma or 0.0 for row in after), 4, rounded_down),
            number(max(row.upper or 0.0 for row in after), 4, rounded_up),
        )
        made.add_row(str(layer), *cells)
    yield made
    name = "Agreement of embeddings" if found.quality == "agreement" else "Perplexity"
    yield f"{name}: {found.quality_before:.4g} before, {found.quality_after:.4g} after."
    yield (
        f"Largest change found of the last hidden states when embeddings move by {MOVE:.0%}: "
        f"{found.change_before:.3%} before, {found.change_after:.3%} after."
    )
