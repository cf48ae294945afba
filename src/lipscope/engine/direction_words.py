"""Singular directions in words: readings of their tokens, and texts that they point towards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lipscope import models
from lipscope.charts import visible
from lipscope.engine.answer import LeadingMove
from lipscope.errors import InputError, shown
from lipscope.linalg import Leading, difference, start_named
from lipscope.records import Direction
from lipscope.sources import read_text

_TOKENS = 3  # number of tokens read per vector
_LEAST = 0.05  # minimum share of a token, except the first
_ROUNDING = 1e-5  # rank tolerance of a span, relative to its largest singular value
_BEST = 10  # number of readings that span
_SHOWN = 5  # number of words per sign
_NAME = 40  # maximum number of characters of a text's name
_DRAWS = 99  # random directions: another one exceeds all of them with probability 1/100


def describe_directions(
    found: Sequence[LeadingMove],
    built: models.LayerMap,
    row_id: str,
    loaded: models.LoadedModel,
    item: models.Sample,
    record: models.Trace | None,
    memory: int,
    whole: nn.Module | None,
) -> Iterator[Direction]:
    """The parts of directions, largest first: top tokens with their readings, and heads.

    ``record`` is the trace, None for a standalone layer; ``whole`` is the model with the head from
    its checkpoint, if it was loaded without one.
    """
    names = names_of(loaded, item, len(built.x))
    placed = [f"{name} ({i})" for i, name in enumerate(names)]
    named = placed if item.tokens == tuple(names) else names
    reader = models.Reader(built, record, loaded.tokenizer, named, whole)
    for side, at in (("right", reader.right), ("left", reader.left)):
        vectors = [one.of.v if side == "right" else one.of.u for one in found]
        tops = [_top_tokens(vector) for vector in vectors]
        for i in dict.fromkeys(i for some in tops for i, _ in some):
            text = names[i] if i < len(names) else str(i)
            ranks = [rank for rank, some in enumerate(tops) if i in dict(some)]
            own = torch.stack([vectors[rank][i] for rank in ranks])
            columns = read(at(i), own, f"{row_id}|{side}|{i}", memory // 2)
            for rank, one in zip(ranks, columns, strict=True):
                place: Any = (row_id, rank + 1, side, i, text, dict(tops[rank])[i])
                yield _described(place, found[rank].of, one)
    shares = head_shares(found, built, record, memory)
    for rank, (one, parts) in enumerate(zip(found, shares, strict=True), 1):
        for head, share in enumerate(parts):
            yield _described((row_id, rank, "head", head, f"head {head}", share), one.of)


def _described(place: Any, of: Leading, read: Mapping[str, Any] | None = None) -> Direction:
    names = ("id", "rank", "side", "index", "text", "share")
    values = {name: getattr(of, name) for name in ("sigma", "upper", "residual", "sine")}
    return Direction(**dict(zip(names, place, strict=True)), **values, **(read or {}))


def _top_tokens(vector: Tensor) -> list[tuple[int, float]]:
    """The tokens with the largest shares: the first, and others above the minimum share."""
    shares = vector.double().square().sum(1)
    best = shares.topk(min(_TOKENS, len(shares)))
    first, *others = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [first, *((i, share) for i, share in others if share >= _LEAST)]


def read(
    readings: models.Readings, vectors: Float[Tensor, "m d"], name: str, memory: int
) -> list[dict[str, Any]]:
    """The readings of vectors, and those of random directions, as columns of a direction.

    ``name`` seeds the random directions; readings are processed in blocks within the budget.
    """
    size = _DRAWS, vectors.shape[1]
    drawn = torch.randn(size, generator=start_named(name), dtype=torch.float64)
    seen = _BestReadings(readings, torch.cat([vectors, drawn.to(vectors)]), memory)
    cosines, spanned = seen.nearest, seen.spanned
    m = len(vectors)
    chance = {"chance_cosine": max(cosines[m:]), "chance_spanned": max(spanned[m:])}
    return [
        {"space": readings.space, "cosine": cosines[j], "spanned": spanned[j]}
        | {sign: seen.words(sign, j) for sign in ("plus", "minus")}
        | chance
        for j in range(m)
    ]


class _BestReadings:
    """The best readings of each row of ``e`` by sign, and how much of the row they span."""

    def __init__(self, readings: models.Readings, e: Float[Tensor, "m d"], memory: int) -> None:
        self._readings, self._e = readings, e / e.norm(dim=1, keepdim=True)
        m, d = e.shape
        self._values, self._indices = e.new_zeros(2, 0, m), torch.zeros(2, 0, m, dtype=torch.long)
        self._total = torch.zeros(d, dtype=torch.float64, device=e.device)
        each = (readings.copies * d + 8 * m) * e.element_size()
        count, block = readings.size, max(1, memory // each)
        for first in range(0, count, block):
            ids = torch.arange(first, min(first + block, count), device=e.device)
            found = readings.vectors(ids)
            self._total += found.sum(0, dtype=torch.float64)
            self._take(ids, found)
        if len(readings.words) > count:
            self._take(torch.tensor([count], device=e.device), self._mean)
        self.nearest, self.spanned = self._best()

    @property
    def _mean(self) -> Tensor:
        return (self._total / self._readings.size)[None].to(self._e)

    def _units(self, vectors: Tensor) -> Tensor:
        lengths = vectors.norm(dim=1, keepdim=True)
        # A token in its own place is no move, only rounding.
        return torch.where(lengths > self._readings.least, vectors / lengths, 0.0)

    def _take(self, ids: Tensor, vectors: Tensor) -> None:
        """Merge new readings into the ten best of each sign."""
        cosines = self._units(vectors) @ self._e.T
        values = torch.cat([self._values, torch.stack([cosines, -cosines])], 1)
        own = ids[None, :, None].expand(2, -1, values.shape[2])
        indices = torch.cat([self._indices.to(ids), own], 1)
        best = values.topk(min(_BEST, values.shape[1]), dim=1)
        self._values, self._indices = best.values, indices.gather(1, best.indices)

    def _best(self) -> tuple[list[float], list[float]]:
        """Cosine of the nearest reading, and fraction of ``‖e‖^2`` spanned by the ten nearest."""
        m, k = len(self._e), self._values.shape[1]
        if not k:
            return [0.0] * m, [0.0] * m
        best = self._values.flatten(0, 1).topk(k, dim=0)  # one sign per reading
        ids = self._indices.flatten(0, 1).gather(0, best.indices).T  # (m, k)
        nearest = torch.stack([self._at(one) for one in ids]).double()
        _, values, basis = torch.linalg.svd(nearest, full_matrices=False)
        inside = (basis @ self._e.double()[:, :, None])[:, :, 0].square()
        spanned = (inside * (values > _ROUNDING * values[:, :1])).sum(1)
        return best.values[0].tolist(), spanned.clamp_max(1.0).tolist()

    def _at(self, ids: Tensor) -> Tensor:
        """Readings as unit vectors."""
        readings, some = self._readings, self._e.new_zeros(len(ids), self._e.shape[1])
        mean = ids == readings.size
        some[~mean] = readings.vectors(ids[~mean])
        some[mean] = self._mean
        return self._units(some)

    def words(self, sign: str, j: int) -> str:
        """The best readings of vector ``j`` with one sign and their cosines, as JSON."""
        k = ("plus", "minus").index(sign)
        pairs = zip(self._indices[k, :, j].tolist(), self._values[k, :, j].tolist(), strict=True)
        best = [[self._readings.words[i], float(f"{c:.4g}")] for i, c in pairs if c > 0]
        return json.dumps(best[:_SHOWN], ensure_ascii=False)


def head_shares(
    found: Sequence[LeadingMove], built: models.LayerMap, record: models.Trace | None, memory: int
) -> list[list[float]]:
    """``<u, J_h D v> / sigma`` of every head, where ``J`` is the sum of the heads' ``J_h``.

    Without an output projection, ``J_h`` gives the head's slice of the output. Shares sum to 1,
    since ``<u, J D v> = sigma``. Empty if the heads of a map are unknown.
    """
    count = built.num_heads
    if count is None or built.map not in models.PER_HEAD_MAPS:
        return [[] for _ in found]
    if record is not None:
        try:
            models.build_map(record, built.layer, built.map, memory=memory, per_head=True)
        except InputError:  # no known heads
            return [[] for _ in found]
    jacobian = built.linearise(built.x, memory=memory, per_head=True)
    shares = []
    for one in found:
        parts = jacobian.matvec(one.move.expand(count, *one.move.shape)).double()
        u = one.of.u.double()
        if parts.shape[-1] < u.shape[-1]:
            u = u.unflatten(1, (count, -1)).transpose(0, 1)
        each = (parts * u).sum((-2, -1))
        shares.append((each / each.sum()).tolist())
    return shares


def names_of(loaded: models.LoadedModel, item: models.Sample, count: int) -> list[str]:
    """Names of the tokens of an input: texts, patches by row and column, or indices."""
    if item.tokens is not None and len(item.tokens) == count:
        return list(item.tokens)
    pixels = item.arguments.get("pixel_values") if isinstance(item.arguments, Mapping) else None
    size = getattr(loaded.config, "patch_size", None)
    if pixels is None or not isinstance(size, int):
        return [str(i) for i in range(count)]
    rows, columns = (side // size for side in pixels.shape[-2:])
    before = count - rows * columns
    if before < 0 or before > math.isqrt(count):
        return [str(i) for i in range(count)]
    patches = [f"patch {k // columns},{k % columns}" for k in range(rows * columns)]
    return [f"[{i}]" for i in range(before)] + patches


def counted(tokens: Sequence[str], most: int = 8) -> str:
    """The number of tokens, and the first of them."""
    return f"{len(tokens)}: {' '.join(map(visible, tokens[:most]))}" + " …" * (len(tokens) > most)


# --- texts that a direction turns the model's output towards


def given_texts(among: Any) -> list[str]:
    """The given texts, or the lines of a file; none for None."""
    if among is None:
        return []
    if isinstance(among, Path):
        among = [line for line in read_text(str(among), "`among`").splitlines() if line.strip()]
    check_texts(among, "among")
    return list(among)


def check_texts(texts: Sequence[str], option: str = "between") -> None:
    """Require at least two distinct, nonempty texts."""
    several = isinstance(texts, Sequence) and not isinstance(texts, str)
    words = several and all(isinstance(text, str) for text in texts)
    unique = {" ".join(text.split()) for text in texts} if words else set()
    if not words or len(texts) < 2 or "" in unique or len(unique) < len(texts):
        raise InputError(
            f"`{option}` should name at least two classes, each by its own text with words in it. "
            f"Found `{shown(texts)}`."
        )


def beginning_of(text: str) -> str:
    """The beginning of a text, as its name."""
    words = " ".join(text.split())
    return words if len(words) <= _NAME else words[: _NAME - 1].rstrip() + "…"


@dataclass(frozen=True)
class Texts:
    """Texts, represented by a model's mean output over their tokens."""

    names: tuple[str, ...]  # beginnings of the texts
    points: Float[Tensor, "m d"]  # the means, as unit vectors

    def cosines(self, y: Float[Tensor, "n d"]) -> Float[Tensor, " m"]:
        """Cosines of the texts with the mean of an output over its tokens."""
        return self.points.to(y) @ torch.nn.functional.normalize(y.mean(0), dim=0)


def mean_outputs(
    texts: Sequence[str],
    loaded: models.LoadedModel,
    special_tokens: bool,
    output: Callable[[Int[Tensor, "1 n"]], Float[Tensor, "n d"]],
) -> Texts:
    """Mean outputs of a function of token ids for texts, truncated at the model's positions."""
    points = []
    for text in texts:
        ids = models.whole_text(
            text, loaded.reader_of_text(), special_tokens=special_tokens, longest=loaded.max_tokens
        )
        points.append(output(ids).mean(0))
    unit = torch.nn.functional.normalize(torch.stack(points), dim=1)
    return Texts((*map(beginning_of, texts),), unit)


def body_of(model: nn.Module) -> str:
    """Path of a model's body, without its head; "" for the model itself."""
    name = str(getattr(model, "base_model_prefix", ""))
    return name if name and hasattr(model, name) else ""


def texts_for(
    among: Sequence[str],
    loaded: models.LoadedModel,
    record: models.Trace | None,
    special_tokens: bool,
    *,
    reads: bool,
) -> Texts:
    """The texts, represented by the model's own mean outputs, if it reads texts."""
    if record is None or not reads:
        raise InputError(
            "`among` needs a model that reads texts and has an output for every token. Found "
            f"`{loaded.name}`; leave `among` out."
        )
    body, like = record.model.get_submodule(body_of(record.model)), record.calls[0].x

    def output(ids: Tensor) -> Tensor:
        with torch.no_grad(), models.exact_maths(like.dtype, differentiable=False):
            return models.first_tensor(models.run(body, {"input_ids": ids.to(like.device)}))[0]

    return mean_outputs(among, loaded, special_tokens, output)


def slopes_of_texts(
    found: Sequence[LeadingMove],
    built: models.LayerMap,
    row_id: str,
    record: models.Trace,
    texts: Texts,
) -> Iterator[Direction]:
    """Derivatives of cosines with texts along directions, through the model itself."""
    if not found:
        return
    ends, model, inputs = built.ends, record.model, record.inputs
    assert ends is not None  # of a map in a model
    path = body_of(model)

    def cosines(y: Tensor) -> Tensor:
        real = ends.read  # the mean excludes padding
        padded = real is not None and len(y) > int(real.max())
        return texts.cosines(y[real] if padded else y)

    gradients = ends.gradients(model, inputs, path, cosines)
    own = ends.at(path).function(model, inputs)
    _check_slopes(lambda x: cosines(own(x)), built.x, found[0].move, gradients)
    moves = torch.stack([one.move for one in found])
    still = moves.abs().amax((0, 2)) == 0  # tokens held fixed
    flat = gradients.masked_fill(still[:, None], 0.0).flatten(1)
    units = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    start = start_named(f"{row_id}|among")
    drawn = torch.randn((_DRAWS, *built.x.shape), generator=start, dtype=torch.float64)
    drawn = drawn.to(flat).masked_fill(still[:, None], 0.0).flatten(1)
    chance = float((units @ torch.nn.functional.normalize(drawn, dim=1).T).abs().max())
    for rank, (one, move) in enumerate(zip(found, moves, strict=True), 1):
        slopes = flat @ move.flatten()
        nearest = units @ torch.nn.functional.normalize(move.flatten(), dim=0)
        for j, name in enumerate(texts.names):
            read = {"cosine": float(nearest[j].abs()), "chance_cosine": chance}
            yield _described((row_id, rank, "text", j, name, float(slopes[j])), one.of, read)


def _check_slopes(
    f: Callable[[Tensor], Tensor], x: Tensor, move: Tensor, gradients: Tensor
) -> None:
    along = torch.einsum("mnd,nd->m", gradients, move)
    seen = difference(f, x, move, along)
    if seen.status != "agrees":
        raise InputError(
            "The cosines with the texts of `among` should have the derivative of the model itself. "
            f"Found {seen.product:.3g} where a finite difference gives {seen.quotient:.3g}; try "
            "`dtype = float64`, or leave `among` out."
        )
