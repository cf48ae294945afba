"""Linear read-outs of a layer's pooled output, from a file or from class texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.display import Shown
from lipscope.engine.direction_words import Texts, beginning_of, check_texts
from lipscope.engine.ready_model import ReadyModel
from lipscope.engine.runs import maps_at
from lipscope.errors import InputError, check_finite_numbers
from lipscope.models import digest, whole_text

Pool = Literal["mean", "first"]
BY_ANGLE = "which of these texts has a mean output at the smallest angle"


class DecisionOptions(TypedDict, total=False):
    """Options of verbs that track a decision: its texts or read-out, and the pooling."""

    between: Sequence[str] | None
    read_out: str | Path | Classifier | None
    pool: Pool


@dataclass(frozen=True, repr=False)
class Classifier(Shown):
    """``argmax(W pool(f(X)) + b)``."""

    weight: Float[Tensor, "c d_out"]  # ``W``, ``(classes, d_out)``
    bias: Float[Tensor, " c"] | None  # ``b``, ``(classes,)``, or None
    names: tuple[str, ...]  # names of the classes
    by: str = "the read-out given, on this layer's pooled output"  # description of the decision

    def __post_init__(self) -> None:
        for one in (self.weight, self.bias):
            if one is not None:
                check_finite_numbers("read_out", one)

    def scores(self, y: Float[Tensor, "*b d_out"]) -> Float[Tensor, "*b c"]:
        """``W y + b`` of pooled outputs, in their precision; another width is refused."""
        width, shape = y.shape[-1], tuple(self.weight.shape)
        if shape[1] != width:
            raise InputError(f"`read_out` should have shape (classes, {width}). Found {shape}.")
        return y @ self.weight.to(y).T + (0.0 if self.bias is None else self.bias.to(y))

    @property
    def digests(self) -> list[str]:
        """Digests of the weight and the bias."""
        return [digest(one) for one in (self.weight, self.bias) if one is not None]


By = Classifier | Sequence[str] | None
"""How a decision is made: by a read-out, the nearest of some texts, or the model itself."""


def classifier_of_texts(
    model: ReadyModel, texts: Sequence[str], *, layer: int, pool: Pool, special_tokens: bool
) -> Classifier:
    """Nearest-centroid classifier: each text names a class, its pooled output is the centroid.

    The scores of a pooled output y are ``<c_k, y> - |c_k|^2 / 2``, c_k the centroid of class k.
    Holds for layers whose weights are read in closed form. A text longer than the model's
    positions is truncated.
    """
    reader, longest, each = model.loaded.reader_of_text(), model.loaded.max_tokens, []
    for text in texts:
        ids = whole_text(text, reader, special_tokens=special_tokens, longest=longest)
        (at,) = maps_at(model, ids, layers=[layer], dtype="float64", device="cpu")
        with torch.no_grad():
            y = at.attention(at.x)
        each.append(y.mean(0) if pool == "mean" else y[0])
    points = torch.stack(each)
    if len(torch.unique(points, dim=0)) < len(points):  # e.g. the first token under a causal mask
        raise InputError(
            "`between` should name texts that this layer distinguishes. Found two with the same "
            "pooled output; choose another layer or `pool`."
        )
    # Score differences are half the differences of the squared distances, negated.
    bias, names = -points.square().sum(1) / 2, tuple(map(beginning_of, texts))
    by = "which of these texts has the nearest pooled output at this layer"
    return Classifier(points, bias, names, by)


def nearest_by_angle(texts: Texts, pool: str = "mean") -> Classifier:
    """Classifier by the text whose pooled output has the smallest angle to that of the input.

    Its rows have unit norm, so its scores are cosines times a norm.
    """
    by = BY_ANGLE.replace("a mean output", f"an output of its {pool} token")
    return Classifier(texts.points, None, texts.names, BY_ANGLE if pool == "mean" else by)


def read_out_of(
    between: Sequence[str] | None, read_out: str | Path | Classifier | None
) -> Classifier | Sequence[str]:
    """The given read-out, or the checked class texts.

    Raises:
        InputError: If both or neither are given, or the read-out cannot be read.
    """
    if between is not None and read_out is not None:
        raise InputError("`between` and `read_out` exclude each other. Found both.")
    if not isinstance(read_out, str | Path | Classifier | None):
        raise InputError(
            f"`read_out` should be a file or a `Classifier`. Found `{type(read_out).__name__}`."
        )
    if read_out is None:
        texts = [] if between is None else between
        check_texts(texts)
        return texts
    return read_out if isinstance(read_out, Classifier) else classifier_of_file(read_out)


def decides_by(between: Sequence[str] | None, read_out: str | Path | Classifier | None) -> By:
    """The given read-out or class texts; None for the model's own decision."""
    return None if between is None and read_out is None else read_out_of(between, read_out)


def classifier_of_file(path: str | Path) -> Classifier:
    """Load a read-out from a ``.npy`` (its weight) or ``.safetensors`` file.

    Args:
        path: A matrix ``(classes, d_out)``; in a safetensors file ``weight`` and an optional
            ``bias``, or a single matrix of any name.

    Raises:
        InputError: If the file cannot be read or holds something else. Pickles are refused.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".npy", ".safetensors"):
        raise InputError(f"`read_out` should be a .npy or .safetensors file. Found `{path}`.")
    try:
        if kind == ".npy":
            weight, bias = torch.from_numpy(np.load(path, allow_pickle=False)), None
        else:
            weight, bias = _safetensors(path)
    except OSError as problem:
        why = problem.strerror or "no such file"
        raise InputError(f"`read_out` should be a readable file. Found `{path}`: {why}.") from None
    except InputError:
        raise
    except Exception as problem:  # each format raises its own errors; the user gets one line
        words = " ".join(str(problem).split())[:200]
        if "pickle" in words:  # replaces numpy's advice to load it anyway
            words = "it holds a pickle, or something else"
        raise InputError(f"`read_out` cannot be read as `{path.suffix}`: {words}") from None
    if weight.ndim != 2 or not weight.is_floating_point() or len(weight) < 2:
        raise InputError(
            "`read_out` should hold a matrix (classes, width) of floats, at least two classes. "
            f"Found {str(weight.dtype)[6:]} of shape {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"The `bias` of `read_out` should have shape ({len(weight)},). "
            f"Found {tuple(bias.shape)}."
        )
    names = tuple(map(str, range(len(weight))))
    return Classifier(weight.double(), None if bias is None else bias.double(), names)


def _safetensors(path: Path) -> tuple[Tensor, Tensor | None]:
    from safetensors.torch import load_file

    held = load_file(path)
    matrices = [w for w in held.values() if w.ndim == 2]
    if "weight" not in held and len(matrices) != 1:
        raise InputError(
            "`read_out` should hold `weight` (and `bias`), or one matrix only. Found "
            f"{', '.join(sorted(held)) or 'nothing'}."
        )
    return held["weight"] if "weight" in held else matrices[0], held.get("bias")
