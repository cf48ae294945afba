"""The text towards which a direction turns the model's output, beside what chance does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.engine.result import Found
from lipscope.engine.text_anchors import mean_outputs, own_output, short
from lipscope.errors import InputError
from lipscope.linalg import difference, start_named
from lipscope.models import LayerMap, LoadedModel, Trace
from lipscope.records import Direction

_DRAWS = 99  # as of the other readings


@dataclass(frozen=True)
class Texts:
    """Texts, and cosines of the mean output of a model with theirs.

    Args:
        names: Beginnings of the texts.
        points: Their mean outputs, as unit vectors.
    """

    names: Sequence[str]
    points: Float[Tensor, "m d"]

    def cosines(self, y: Float[Tensor, "n d"]) -> Float[Tensor, " m"]:
        """Of the mean of an output over its tokens."""
        return self.points @ torch.nn.functional.normalize(y.mean(0), dim=0)


def body_of(model: nn.Module) -> str:
    """Path of what a model has in front of its head, "" for itself."""
    name = str(getattr(model, "base_model_prefix", ""))
    return name if name and hasattr(model, name) else ""


def texts_for(
    among: Sequence[str], loaded: LoadedModel, record: Trace | None, special_tokens: bool
) -> Texts:
    """The texts, by the mean outputs that the model itself has for them.

    Raises:
        InputError: If the model reads no text, or has no output for every token.
    """
    one = record.inputs if record is not None else None
    words = isinstance(one, Mapping) and "input_ids" in one
    if record is None or not words or record.output is None or record.output.ndim != 3:
        raise InputError(
            "`among` needs a model that reads texts and has an output for every token. Found "
            f"`{loaded.name}`; leave `among` out."
        )
    like = record.calls[0].x
    body, model = body_of(record.model), record.model
    output = own_output(model.get_submodule(body), like)
    return Texts([*map(short, among)], mean_outputs(among, loaded, special_tokens, output))


def turned(
    found: Sequence[Found], built: LayerMap, row_id: str, record: Trace, texts: Texts
) -> Iterator[Direction]:
    """Derivatives of the cosines with some texts along some directions, through the model itself.

    Args:
        found: The directions.
        built: Their map.
        row_id: Row that they belong to.
        record: Its trace.
        texts: The texts.

    Yields:
        A part for each direction and text.

    Raises:
        InputError: If the derivative is not that of the model, by a finite difference of it.
    """
    if not found:
        return
    ends, model, inputs = built.ends, record.model, record.inputs
    assert ends is not None  # of a map in a model
    path = body_of(model)

    def cosines(y: Tensor) -> Tensor:
        real = ends.read  # padding is no part of the mean
        padded = real is not None and len(y) > int(real.max())
        return texts.cosines(y[real] if padded else y)

    gradients = ends.gradients(model, inputs, path, cosines)
    own = ends.at(path).function(model, inputs)
    _check(lambda x: cosines(own(x)), built.x, found[0].move, gradients)
    moves = torch.stack([one.move for one in found])
    still = moves.abs().amax((0, 2)) == 0  # tokens that the question holds fixed
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
            yield Direction(
                id=row_id,
                rank=rank,
                side="text",
                index=j,
                text=name,
                share=float(slopes[j]),
                sigma=one.of.sigma,
                upper=one.of.upper,
                residual=one.of.residual,
                sine=one.of.sine,
                cosine=float(nearest[j].abs()),
                chance_cosine=chance,
            )


def _check(f: Callable[[Tensor], Tensor], x: Tensor, move: Tensor, gradients: Tensor) -> None:
    along = torch.einsum("mnd,nd->m", gradients, move)
    seen = difference(f, x, move, along)
    if seen.status != "agrees":
        raise InputError(
            "The cosines with the texts of `among` should have the derivative of the model itself. "
            f"Found {seen.product:.3g} where a finite difference gives {seen.quotient:.3g}; try "
            "`dtype = float64`, or leave `among` out."
        )
