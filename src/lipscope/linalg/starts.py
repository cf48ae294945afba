"""Random starts that depend on a name only, and so on no input that a seed could share."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def start_named(name: str, *at: Tensor) -> torch.Generator:
    """A generator whose seed is a digest of a name, and of tensors if there are some.

    An input that a user drew with ``manual_seed(0)`` shares its numbers with every other draw
    from that seed, and a start must not depend on the Jacobian.

    >>> torch.randn(1, generator=start_named("a")).equal(torch.randn(1, generator=start_named("b")))
    False
    """
    digest = hashlib.sha256(name.encode())
    for tensor in at:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return torch.Generator().manual_seed(int.from_bytes(digest.digest()[:8], "big") >> 1)
