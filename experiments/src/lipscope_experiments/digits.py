"""The digits of scikit-learn, which ships them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope import InputError
from lipscope.errors import install

_TRAIN = 1347  # of 1,797 images; the others are by other writers


@dataclass(frozen=True)
class Digits:
    """Images ``(b, 1, 8, 8)`` with entries from 0 to 1, and what they show."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits() -> Digits:
    """The digits of scikit-learn, the last quarter for tests."""
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
