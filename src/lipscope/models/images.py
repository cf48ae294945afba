"""Input pictures of a vision model, from a folder or random, and their patches."""

from __future__ import annotations

import base64
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.errors import InputError, install
from lipscope.models.loading import LoadedModel, digest
from lipscope.models.pretrained import quiet
from lipscope.models.tracing.map_endpoints import MapEndpoints
from lipscope.models.tracing.recorder import Inputs, Recorder, each_tensor
from lipscope.models.windows import Sample

RANDOM = "random"
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_DEFAULT_SAMPLES = 10


def image_samples(
    loaded: LoadedModel,
    images: str | Path,
    *,
    resolutions: Sequence[int] | None = None,
    samples: int | None = None,
) -> list[Sample]:
    """One sample per picture (of a folder, by name) and resolution: tokens go with its square.

    Pictures are scaled until their shorter side fits, cropped to the middle square and normalised
    as the model's folder or package specifies (by default to mean 0.5 and deviation 0.5); a
    model of timm uses its own transform. ``random`` pixels are standard normal, drawn
    by the index of the sample. Without numbers: the model's own side, and up to 10 pictures.
    """
    parameters = inspect.signature(loaded.model.forward).parameters
    named, given = "pixel_values" in parameters, loaded.pixels
    if not named and given is None:
        raise InputError(
            f"`images` needs a model that reads pixels. Found `{type(loaded.model).__name__}`."
        )
    own = _own_side(loaded.config) if named or given is None else given.side
    usual = own if given is None else given.side
    sides = [usual] if resolutions is None else sorted(set(resolutions))
    _check_sides(loaded, sides)
    found = []
    for side in sides:
        options = {}
        if side != own and "interpolate_pos_encoding" in parameters:
            options["interpolate_pos_encoding"] = True
        for s, pixels in enumerate(_pictures(loaded, images, side, samples)):
            arguments: Any = {"pixel_values": pixels, **options} if named else (pixels,)
            found.append(Sample("image", arguments, s, None, None, digest(pixels), None))
    return found


def _own_side(config: Any) -> int:
    size = getattr(config, "image_size", None)
    size = size[0] if isinstance(size, list | tuple) and size else size
    if not isinstance(size, int):
        raise InputError(
            "`images` needs a configuration with an `image_size`. Found none; pass a batch of "
            "pixel values instead."
        )
    return size


def _check_sides(loaded: LoadedModel, sides: Sequence[int]) -> None:
    patch = getattr(loaded.config, "patch_size", 1)
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    wrong = [side for side in sides if side < patch or side % patch]
    if wrong:
        raise InputError(
            f"`resolutions` should be multiples of {patch}, the patch of `{loaded.name}`. "
            f"Found {wrong[0]}."
        )


def _pictures(
    loaded: LoadedModel, images: str | Path, side: int, samples: int | None
) -> list[Tensor]:
    """Pixels ``(1, channels, side, side)``."""
    if str(images) == RANDOM:
        channels = getattr(loaded.config, "num_channels", 3)
        return [
            torch.randn(1, channels, side, side, generator=torch.Generator().manual_seed(s))
            for s in range(samples or _DEFAULT_SAMPLES)
        ]
    files = _picture_files(Path(os.path.expanduser(images)))
    if samples is not None and samples > len(files):
        raise InputError(
            f"`samples` should be at most {len(files)}, the pictures in `{images}`. "
            f"Found {samples}."
        )
    mean, deviation = normalisation(loaded)

    def square(picture: Any) -> Tensor:
        """The middle square, normalised."""
        import numpy as np
        from PIL import Image, ImageOps

        fitted = ImageOps.fit(picture, (side, side), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(fitted)).permute(2, 0, 1)[None].float() / 255
        return (pixels - mean) / deviation

    own = None if loaded.pixels is None else loaded.pixels.read
    read = square if own is None else lambda picture: own(picture, side)[None]
    return [_opened(file, read) for file in files[: samples or _DEFAULT_SAMPLES]]


def _picture_files(folder: Path) -> list[Path]:
    if not os.path.isdir(folder):
        raise InputError(f"`images` should be a folder of pictures, or random. Found `{folder}`.")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in _SUFFIXES)
    if not files:
        raise InputError(
            f"`{folder}` should hold pictures ({', '.join(s[1:] for s in _SUFFIXES)}). Found none."
        )
    return files


def _opened(file: Path, read: Callable[[Any], Tensor]) -> Tensor:
    """A picture as read in red, green and blue."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"Pictures are read with Pillow, which is not installed; run `{install('images')}` in "
            "the folder of lipscope, or use random pixels."
        ) from None
    try:
        with Image.open(file) as picture:
            if picture.mode[0] in "IF":  # would be cut to 255
                raise ValueError("it has more than eight bits a channel")
            return read(picture.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as problem:
        raise InputError(
            f"`{file}` should be a picture. Found that it cannot be read: {str(problem)[:200]}"
        ) from None


def normalisation(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the model's channels, ``(1, 3, 1, 1)`` each."""
    named = _processor(getattr(loaded.config, "_name_or_path", None))
    mean, deviation = (named.get(key) or (0.5,) * 3 for key in ("image_mean", "image_std"))
    if loaded.pixels is not None:
        named, mean, deviation = {}, loaded.pixels.mean, loaded.pixels.deviation
    elif named.get("do_normalize") is False:
        mean, deviation = (0.0,), (1.0,)
    # Its own scale of bytes, where ours is 1 / 255.
    scale = 255 * named.get("rescale_factor", 1 / 255) if named.get("do_rescale", True) else 255
    mean, deviation = (torch.tensor(x).view(1, -1, 1, 1) / scale for x in (mean, deviation))
    return mean, deviation


def _processor(source: str | None) -> Mapping[str, Any]:
    """The picture settings beside the weights; empty for a model without a folder."""
    from transformers import BaseImageProcessor

    if not source:
        return {}
    with quiet():
        try:
            return BaseImageProcessor.get_image_processor_dict(source)[0]
        except (OSError, ValueError):
            return {}


# --- patches: tokens of a picture, and the pixels that would move them

_EXACT = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the move: rounding of the model


@dataclass(frozen=True)
class Patches:
    """A picture that a model cuts into patches, each a linear function of its pixels."""

    picture: Tensor  # the picture, ``(1, c, height, width)``
    weight: Tensor  # from the pixels of a patch to its vector, ``(d, c p p)``
    side: int  # ``p``
    grid: tuple[int, int]  # numbers of patches down and across

    def first(self, num_tokens: int) -> int:
        """Number of tokens before those of the patches."""
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


def patches_of(model: nn.Module, inputs: Inputs) -> Patches | None:
    """The patches of a model's picture; None without pictures, or for another embedding."""
    picture, found = _picture_in(inputs), []
    if picture is None:
        return None

    def look(module: nn.Conv2d, args: tuple[Any, ...], out: Tensor) -> None:
        whole = module.kernel_size == module.stride and module.kernel_size[0] == module.stride[1]
        plain = module.padding in ((0, 0), 0, "valid") and module.groups == 1
        if whole and plain and args[0].shape == picture.shape:
            down, across = out.shape[2:]
            side = module.kernel_size[0]
            found.append(Patches(picture, module.weight.flatten(1), side, (down, across)))

    with Recorder() as recorder, torch.no_grad():
        for one in model.modules():
            if isinstance(one, nn.Conv2d):
                recorder.after(one, look)
        recorder.run(model, inputs, picture.dtype, differentiable=False)
    return found[0] if found else None


def picture_move(
    patches: Patches, ends: MapEndpoints, model: nn.Module, inputs: Inputs, e: Float[Tensor, "n d"]
) -> Tensor | None:
    """The least change of the picture that moves the map's input along ``e``, or None.

    It is checked: from the changed picture, the model must compute exactly this input of the map.
    """
    first, size = patches.first(len(e)), patches.picture.shape[2:]
    if first < 0 or bool(e[:first].any()):  # other tokens move too
        return None
    rows = e[first:] @ torch.linalg.pinv(patches.weight).T
    move = nn.functional.fold(rows.T[None], size, patches.side, stride=patches.side)
    changed = patches.picture + move
    pushed = each_tensor(inputs, lambda x: changed if x.ndim == 4 else x)
    here, there = (ends.entering(model, given) for given in (inputs, pushed))
    if here.shape != e.shape:
        return None
    off = float((there - here - e).norm())
    return move if off <= _EXACT[e.dtype] * max(float(e.norm()), float(here.norm())) else None


def encode_picture(picture: Float[Tensor, "1 c h w"], *, signed: bool = False) -> dict[str, Any]:
    """Height, width and base64 of ``round(255 x)``, or, ``signed``, of ``128 + round(127 x)``."""
    rows = picture[0].permute(1, 2, 0)
    bytes_ = 128 + (127 * rows).round() if signed else (255 * rows).round()
    numbers = bytes_.clamp(0, 255).to(torch.uint8).cpu().contiguous().numpy().tobytes()
    size = {"height": rows.shape[0], "width": rows.shape[1]}
    return size | {"bytes": base64.b64encode(numbers).decode()}


def _picture_in(inputs: Inputs) -> Tensor | None:
    """The one input that is a picture."""
    held = inputs.values() if isinstance(inputs, Mapping) else inputs
    found = [one for one in held if isinstance(one, Tensor) and one.ndim == 4]
    return found[0] if len(found) == 1 and found[0].is_floating_point() else None
