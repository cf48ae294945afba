"""Singular directions in words: what their tokens read as, against what chance reads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.engine.question import Found
from lipscope.errors import InputError
from lipscope.linalg.leading import Leading
from lipscope.linalg.starts import start_named
from lipscope.models import LayerMap, LoadedModel, Reader, Readings, Sample, Trace, build_map
from lipscope.models.tracing.maps import PER_HEAD_MAPS
from lipscope.records.rows import Direction

_TOKENS = 3  # of each vector that are read
_LEAST = 0.05  # of a token's share, but for the first
_ROUNDING = 1e-5  # of the longest
_BEST = 10  # readings that span
_SHOWN = 5  # words of each sign
_DRAWS = 99  # random directions: one more exceeds all of them once in a hundred times


def worded(
    found: Sequence[Found],
    built: LayerMap,
    row_id: str,
    loaded: LoadedModel,
    item: Sample,
    record: Trace | None,
    memory: int,
) -> Iterator[Direction]:
    """Every part of some directions: their tokens with what they read as, and the heads.

    Args:
        found: The directions, largest first.
        built: Their map.
        row_id: Row that they belong to.
        loaded: The model.
        item: The input.
        record: Its trace; None for a layer by itself.
        memory: Budget in bytes.

    Yields:
        The parts, by token or head.
    """
    names = names_of(loaded, item, len(built.x))
    placed = [f"{name} ({i})" for i, name in enumerate(names)]
    named = placed if item.tokens == tuple(names) else names
    reader = Reader(built, record, loaded.tokenizer, named)
    for side, at in (("right", reader.right), ("left", reader.left)):
        vectors = [one.of.v if side == "right" else one.of.u for one in found]
        tops = [_tops(vector) for vector in vectors]
        for i in dict.fromkeys(i for some in tops for i, _ in some):
            readings = Units(at(i), f"{row_id}|{side}|{i}")
            for rank, (vector, some) in enumerate(zip(vectors, tops, strict=True), 1):
                if i in dict(some):
                    text = names[i] if i < len(names) else str(i)
                    place: Any = (row_id, rank, side, i, text, dict(some)[i])
                    yield _part(place, found[rank - 1].of, readings.read(vector[i]))
    shares = head_shares(found, built, record, memory)
    for rank, (one, parts) in enumerate(zip(found, shares, strict=True), 1):
        for head, share in enumerate(parts):
            yield _part((row_id, rank, "head", head, f"head {head}", share), one.of)


def _part(place: Any, of: Leading, read: Mapping[str, Any] | None = None) -> Direction:
    names = ("id", "rank", "side", "index", "text", "share")
    values = {name: getattr(of, name) for name in ("sigma", "upper", "residual", "sine")}
    return Direction(**dict(zip(names, place, strict=True)), **values, **(read or {}))


def _tops(vector: Tensor) -> list[tuple[int, float]]:
    """The tokens with the largest shares, the first and what is worth reading beside it."""
    shares = vector.double().square().sum(1)
    best = shares.topk(min(_TOKENS, len(shares)))
    first, *others = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [first, *((i, share) for i, share in others if share >= _LEAST)]


class Units:
    """Readings as unit vectors, and what chance reads in them.

    Args:
        readings: The readings.
        name: Names the random directions.
    """

    def __init__(self, readings: Readings, name: str) -> None:
        self.space, self.words = readings.space, readings.words
        lengths = readings.vectors.norm(dim=1, keepdim=True)
        # The token itself in its own place is no move but rounding.
        some = lengths > _ROUNDING * lengths.max() if len(lengths) else lengths > 0
        self.units = torch.where(some, readings.vectors / lengths, 0.0)
        size = _DRAWS, self.units.shape[1]
        drawn = torch.randn(size, generator=start_named(name), dtype=torch.float64)
        cosines, spanned = self._best(drawn.to(self.units))
        self.chance = {"chance_cosine": max(cosines), "chance_spanned": max(spanned)}

    def _best(self, e: Float[Tensor, "m d"]) -> tuple[list[float], list[float]]:
        """The nearest reading of each, and how much of ``‖e‖^2`` the ten nearest span."""
        if not len(self.units):
            return [0.0] * len(e), [0.0] * len(e)
        e = e / e.norm(dim=1, keepdim=True)
        best = (self.units @ e.T).abs().topk(min(_BEST, len(self.units)), dim=0)
        nearest = self.units[best.indices.T].double()
        _, values, basis = torch.linalg.svd(nearest, full_matrices=False)
        inside = (basis @ e.double()[:, :, None])[:, :, 0].square()
        spanned = (inside * (values > _ROUNDING * values[:, :1])).sum(1)
        return best.values[0].tolist(), spanned.clamp_max(1.0).tolist()

    def read(self, e: Float[Tensor, " d"]) -> dict[str, Any]:
        """The columns of a part of a direction that say what it reads as."""
        (cosine,), (spanned,) = self._best(e[None])
        cosines = self.units @ (e / e.norm())
        said = {"plus": self._nearest(cosines), "minus": self._nearest(-cosines)}
        return {"space": self.space, "cosine": cosine, "spanned": spanned} | said | self.chance

    def _nearest(self, cosines: Tensor) -> str:
        best = cosines.topk(min(_SHOWN, len(cosines)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        said = [[self.words[i], float(f"{c:.4g}")] for i, c in pairs if c > 0]
        return json.dumps(said, ensure_ascii=False)


def head_shares(
    found: Sequence[Found], built: LayerMap, record: Trace | None, memory: int
) -> list[list[float]]:
    """``<u, J_h D v> / sigma`` of every head, where ``J`` is the sum of the heads' ``J_h``.

    Of the map ``heads``, ``J_h`` has the head's own slice of the output. They sum to 1, as
    ``<u, J D v> = sigma``.

    Args:
        found: The directions.
        built: Their map.
        record: Its trace; None for a layer by itself.
        memory: Budget in bytes.

    Returns:
        For each direction the shares; nothing where a map has no heads that are known.
    """
    count = built.num_heads
    if count is None or built.map not in PER_HEAD_MAPS:
        return [[] for _ in found]
    if record is not None:
        try:
            build_map(record, built.layer, built.map, memory=memory, per_head=True)
        except InputError:  # it has none
            return [[] for _ in found]
    jacobian = built.linearise(built.x, memory=memory, per_head=True)
    shares = []
    for one in found:
        parts = jacobian.matvec(one.move.expand(count, *one.move.shape)).double()
        u = one.of.u.double()
        if built.map == "heads":
            u = u.unflatten(1, (count, -1)).transpose(0, 1)
        each = (parts * u).sum((-2, -1))
        shares.append((each / each.sum()).tolist())
    return shares


def names_of(loaded: LoadedModel, item: Sample, count: int) -> list[str]:
    """Names of the tokens of an input: texts, places of patches by row and column, or numbers."""
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
