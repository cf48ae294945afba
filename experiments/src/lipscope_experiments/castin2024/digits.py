"""A small vision Transformer on handwritten digits whose Lipschitz constant is known."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lipscope import Attention, InputError, MultiheadAttention
from lipscope.attention import Clip
from lipscope.errors import install
from lipscope.theorems import NotApplicableError, catalogue, evaluate

PATCHES, WIDTH, HEADS, BLOCKS = 16, 32, 2, 2
RADIUS = 4.0  # of the ball that tokens are brought into before attention
_TRAIN = 1347  # of 1,797 images; the others are by other writers
_BATCH, _RATE = 64, 1e-2
_ASCENTS = 10


@dataclass(frozen=True)
class Digits:
    """Images ``(b, 1, 8, 8)`` with entries from 0 to 1, and what they show."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits() -> Digits:
    """The digits of scikit-learn, the last quarter for tests.

    Raises:
        InputError: If it is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            f"The digits need the package `scikit-learn`; run `{install('digits')}`."
        ) from None
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    return Digits(images[:_TRAIN], labels[:_TRAIN], images[_TRAIN:], labels[_TRAIN:])


class Block(nn.Module):
    """``X + F(N(X))`` with ``N`` the nearest point of a ball, then two linear maps likewise.

    All weights behind the attention have spectral norm 1, so that the block's constant is decided
    by ``F``.
    """

    def __init__(self, attention: MultiheadAttention | None) -> None:
        super().__init__()
        self.enter = Clip(RADIUS)
        self.attention = attention
        if attention is not None:
            spectral_norm(attention.attention, "output")
        inner = 2 * WIDTH
        self.up, self.down = (
            spectral_norm(nn.Linear(a, b)) for a, b in ((WIDTH, inner), (inner, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        """The tokens after the block."""
        if self.attention is not None:
            near = self.enter(x)
            x = x + self.attention(near, near, near, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class Classifier(nn.Module):
    """Patches of 2 x 2, two blocks, the sum of tokens over √n, a linear map to ten scores."""

    def __init__(self, attention: Callable[[], MultiheadAttention | None]) -> None:
        super().__init__()
        self.patches = nn.Linear(4, WIDTH)
        self.positions = nn.Parameter(0.3 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention()) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Ten scores."""
        patches = nn.functional.unfold(pixel_values, 2, stride=2).mT
        x = self.blocks(self.patches(patches) + self.positions)
        return self.head(x.sum(-2) * PATCHES**-0.5)

    @torch.no_grad()
    def slope(self) -> float:
        """``L``: a bound of the map from pixels to what the last linear map takes.

        ``‖E‖ Π (1 + L_F) (1 + ‖W_1‖ ‖W_2‖)``, ``L_F`` the least bound of the catalogue
        for the ball; holds at all images.
        """
        found = _norm(self.patches.weight)
        for block, layer in zip(self.blocks, self.constants(), strict=True):
            assert isinstance(block, Block)
            up, down = block.up.weight, block.down.weight
            assert isinstance(up, Tensor) and isinstance(down, Tensor)
            found *= (1 + layer) * (1 + _norm(up) * _norm(down))
        return found

    def constants(self) -> list[float]:
        """A bound of every attention layer on the ball: the least of the catalogue."""
        layers = (block.attention for block in self.blocks if isinstance(block, Block))
        return [0.0 if one is None else constant(one.attention) for one in layers]

    @torch.no_grad()
    def certified(self, images: Tensor, labels: Tensor) -> Tensor:
        """The radius within which no image changes the answer; 0 where it is wrong.

        ``min_c (z_y - z_c) / (L |w_y - w_c|)`` over the other classes ``c``.
        """
        return _radii(self(images), self.head.weight, labels) / self.slope()


class Linear(nn.Module):
    """The pixels and one linear map to ten scores: what is reached without a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Ten scores."""
        return self.head(pixel_values.flatten(1))

    def slope(self) -> float:
        """1: the linear map takes the pixels themselves."""
        return 1.0

    @torch.no_grad()
    def certified(self, images: Tensor, labels: Tensor) -> Tensor:
        """The distance to the nearest image with another answer, exactly; 0 where it is wrong."""
        return _radii(self(images), self.head.weight, labels)


Net = TypeVar("Net", bound=Classifier | Linear)


def _radii(scores: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """``min_c (z_y - z_c) / |w_y - w_c|`` over the classes ``c`` other than ``y``; 0 at least."""
    w, scores = weight.double(), scores.double()
    apart = torch.cdist(w[None], w[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
    own = scores.gather(1, labels[:, None])
    each = (own - scores) / apart[labels].clamp_min(1e-30)
    others = torch.nn.functional.one_hot(labels, 10).bool()
    return each.masked_fill(others, math.inf).amin(1).clamp_min(0.0)


def constant(layer: Attention) -> float:
    """The least bound of the catalogue for all inputs on the ball."""
    exact, found = layer.in_double(), []
    for one in catalogue():
        if one.kind == "upper" and one.sound and one.metric == "frobenius" and "x" not in one.needs:
            with contextlib.suppress(NotApplicableError):
                found.append(evaluate(one, exact, num_tokens=PATCHES, radius=RADIUS))
    return min(found)


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.double(), 2))


def trained(net: Net, data: Digits, epochs: int, seed: int) -> Net:
    """The classifier, trained with Adam."""
    gen = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), lr=_RATE)
    for _ in range(epochs):
        for some in torch.randperm(len(data.labels), generator=gen).split(_BATCH):
            loss = nn.functional.cross_entropy(net(data.images[some]), data.labels[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net.eval().requires_grad_(False)


def attacked(net: Classifier | Linear, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Whether each image is still answered rightly after projected gradient ascent of its loss.

    On the ball ``‖E‖ ≤ eps``, pixels not kept between 0 and 1: an upper end of what is robust.
    """
    move = torch.zeros_like(images)
    safe = net(images).argmax(1) == labels
    for _ in range(_ASCENTS):
        x = (images + move).requires_grad_()
        (slope,) = torch.autograd.grad(
            nn.functional.cross_entropy(net(x), labels, reduction="sum"), x
        )
        move = move + 2.5 * eps / _ASCENTS * slope / _size(slope).clamp_min(1e-30)
        move = move * (eps / _size(move).clamp_min(1e-30)).clamp_max(1.0)
        safe &= net(images + move).argmax(1) == labels
    return safe


def _size(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)[:, None, None, None]
