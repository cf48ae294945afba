"""The patches of a picture: their tokens, and the pixels that would move these as asked."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.models.tracing.calls import Inputs
from lipscope.models.tracing.flow import each_tensor
from lipscope.models.tracing.map_endpoints import Ends
from lipscope.models.tracing.prepare import exact_maths
from lipscope.models.tracing.trace import run

_EXACT = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the move: rounding of the model


@dataclass(frozen=True)
class Patches:
    """A picture that a model cuts into patches, each a linear function of its pixels.

    Attributes:
        picture: The picture, ``(1, c, height, width)``.
        weight: From the pixels of a patch to its vector, ``(d, c p p)``.
        side: ``p``.
        grid: Numbers of patches down and across.
    """

    picture: Tensor
    weight: Tensor
    side: int
    grid: tuple[int, int]

    def first(self, num_tokens: int) -> int:
        """How many tokens come before those of the patches."""
        return num_tokens - self.grid[0] * self.grid[1]

    def name(self, token: int, num_tokens: int) -> str:
        """A token in words: the row and the column of its patch, from 0."""
        k = token - self.first(num_tokens)
        return f"token {token}" if k < 0 else f"patch {k // self.grid[1]}, {k % self.grid[1]}"

    def corner(self, token: int, num_tokens: int) -> tuple[int, int]:
        """Row and column of the first pixel of one token's patch."""
        row, column = divmod(token - self.first(num_tokens), self.grid[1])
        return row * self.side, column * self.side

    def pixels(self, token: int, num_tokens: int, picture: Tensor) -> Float[Tensor, "c p p"]:
        """The pixels of one token's patch in a picture."""
        down, across = self.corner(token, num_tokens)
        return picture[0, :, down : down + self.side, across : across + self.side]

    def move_for(self, e: Float[Tensor, "n d"]) -> Tensor | None:
        """The least change of the picture whose patches move so; None if other tokens move too."""
        first = self.first(len(e))
        if first < 0 or bool(e[:first].any()):
            return None
        rows = e[first:] @ torch.linalg.pinv(self.weight).T
        size = self.picture.shape[2:]
        return torch.nn.functional.fold(rows.T[None], size, self.side, stride=self.side)


def patches_of(model: nn.Module, inputs: Inputs) -> Patches | None:
    """How a model cuts a picture into patches; None if it reads none, or in another way.

    Args:
        model: The model, ready to be run.
        inputs: Its inputs.
    """
    picture, found = _picture(inputs), []
    if picture is None:
        return None

    def look(module: nn.Conv2d, args: tuple[Any, ...], out: Tensor) -> None:
        whole = module.kernel_size == module.stride and module.kernel_size[0] == module.stride[1]
        plain = module.padding in ((0, 0), 0, "valid") and module.groups == 1
        if whole and plain and args[0].shape == picture.shape:
            down, across = out.shape[2:]
            side = module.kernel_size[0]
            found.append(Patches(picture, module.weight.flatten(1), side, (down, across)))

    handles = [
        one.register_forward_hook(look) for one in model.modules() if isinstance(one, nn.Conv2d)
    ]
    try:
        with torch.no_grad(), exact_maths(picture.dtype, differentiable=False):
            run(model, each_tensor(inputs, torch.clone))
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def picture_move(
    patches: Patches, ends: Ends, model: nn.Module, inputs: Inputs, e: Float[Tensor, "n d"]
) -> Tensor | None:
    """The change of the picture by which the map's input moves along ``e``, if there is one.

    It is checked: the model, given the picture so changed, must make just this input of the map.

    Args:
        patches: How the picture is cut.
        ends: Those of the map.
        model: The model.
        inputs: Its inputs.
        e: The move, ``(n, d)``.

    Returns:
        The change, as the picture; None where no pixels move the tokens so, as for a class token
        or after a norm.
    """
    move = patches.move_for(e)
    if move is None:
        return None
    pushed = _replaced(inputs, patches.picture + move)
    here, there = (ends.entering(model, given) for given in (inputs, pushed))
    if here.shape != e.shape:
        return None
    off = float((there - here - e).norm())
    return move if off <= _EXACT[e.dtype] * max(float(e.norm()), float(here.norm())) else None


def coded(picture: Float[Tensor, "1 c h w"], *, signed: bool = False) -> dict[str, Any]:
    """A picture as one byte for each number.

    Args:
        picture: From 0 to 1, or from -1 to 1.
        signed: Whether it is the latter.

    Returns:
        Height, width, and base64 of rows of pixels: of ``round(255 x)``, or ``128 + round(127 x)``.
    """
    rows = picture[0].permute(1, 2, 0)
    bytes_ = 128 + (127 * rows).round() if signed else (255 * rows).round()
    numbers = bytes_.clamp(0, 255).to(torch.uint8).cpu().contiguous().numpy().tobytes()
    size = {"height": rows.shape[0], "width": rows.shape[1]}
    return size | {"bytes": base64.b64encode(numbers).decode()}


def _picture(inputs: Inputs) -> Tensor | None:
    """The one input that is a picture."""
    held = inputs.values() if isinstance(inputs, Mapping) else inputs
    found = [one for one in held if isinstance(one, Tensor) and one.ndim == 4]
    return found[0] if len(found) == 1 and found[0].is_floating_point() else None


def _replaced(inputs: Inputs, picture: Tensor) -> Inputs:
    def one(value: Any) -> Any:
        return picture if isinstance(value, Tensor) and value.ndim == 4 else value

    if isinstance(inputs, Mapping):
        return {name: one(value) for name, value in inputs.items()}
    return tuple(map(one, inputs))
