"""Maps from attention scores to attention weights, with their derivatives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from lipscope.errors import InputError

At = tuple[Tensor, ...]

# Smaller weights change no digit of a product, but their subnormal multiples slow it down by up
# to a half on real weights.
_SMALLEST_WEIGHT = 1e-30


class Weighting(ABC):
    """Weights ``P`` of a block of scores ``S``, ``(..., rows, keys)``, -inf where hidden.

    `weights`, `jvp` and `vjp` define a weighting. The other methods have defaults; overriding
    them saves time or memory. Rows that may attend to no token arrive unmasked; their outputs
    are set to zero afterwards.

    Attributes:
        all_rows: Whether a weight depends on scores of other rows. Blocks then hold all rows
            of some heads, and no row may be empty.
        normalised: Whether rows of weights add up to 1 and depend only on differences of
            scores. Values may then be taken relative to any fixed vector.
        kept: Number of score-sized tensors in the result of `at`.
    """

    all_rows: bool = False
    normalised: bool = False
    kept: int = 1

    @abstractmethod
    def weights(self, s: Tensor) -> Tensor:
        """The weights, differentiable by autograd; 0 where the score is -inf."""

    @abstractmethod
    def jvp(self, at: At, ds: Tensor) -> Tensor:
        """The change of the weights along ``ds``, which may be overwritten."""

    @abstractmethod
    def vjp(self, at: At, gp: Tensor) -> Tensor:
        """The cotangent of the scores for ``gp``, which may be overwritten."""

    def at(self, s: Tensor) -> At:
        """The state for the derivatives, weights first; it does not alias ``s``."""
        return (self.weights(s),)

    def statistic(self, s: Tensor) -> Tensor | None:
        """One number per row, ``(..., rows, 1)``, that makes `again` cheaper than `at`."""
        return None

    def again(self, s: Tensor, statistic: Tensor | None) -> At:
        """As `at`, for scores seen before; may overwrite ``s``."""
        return self.at(s)

    def open(self, s: Tensor, shift: Tensor) -> Tensor:
        """Rows ``(..., rows)`` in which shifting scores by ``shift`` may change a weight."""
        return torch.ones_like(s[..., 0], dtype=torch.bool)

    def push(self, at: At, ds: Tensor, v: Tensor, dv: Tensor, o: Tensor) -> Tensor:
        """``do = dP v + P dv`` of a block, ``o = P v``."""
        return torch.bmm(self.jvp(at, ds), v).baddbmm_(at[0], dv)

    def pull(self, at: At, gp: Tensor, mean: Tensor) -> Tensor:
        """As `vjp`, given ``mean``, the row sums of ``P gp``."""
        return self.vjp(at, gp)


class Softmax(Weighting):
    """``P_ij = exp(s_ij) / sum_l exp(s_il)``: weights of a row add up to 1.

    ``dP = w - P rowsum(w)`` with ``w = P ds``, so that ``do = w v - rowsum(w) o + P dv``.
    """

    normalised = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse weights that would have the derivatives of softmax."""
        raise InputError(
            f"`{cls.__name__}` should have derivatives of its own. Found a kind of `Softmax`; "
            "derive from `Weighting`."
        )

    def weights(self, s: Tensor) -> Tensor:
        """The softmax of every row."""
        return torch.softmax(s, dim=-1)

    def jvp(self, at: At, ds: Tensor) -> Tensor:
        """``w - P rowsum(w)``."""
        (p,) = at
        w = ds.mul_(p)
        return w.addcmul_(p, w.sum(-1, keepdim=True), value=-1)

    def vjp(self, at: At, gp: Tensor) -> Tensor:
        """``P (gp - rowsum(P gp))``."""
        (p,) = at
        return self.pull(at, gp, (p * gp).sum(-1, keepdim=True))

    def at(self, s: Tensor) -> At:
        """The softmax with tiny weights set to zero."""
        return (torch.threshold_(torch.softmax(s, dim=-1), _SMALLEST_WEIGHT, 0.0),)

    def statistic(self, s: Tensor) -> Tensor:
        """The log-sum-exp of every row."""
        return s.logsumexp(-1, keepdim=True)

    def again(self, s: Tensor, statistic: Tensor | None) -> At:
        """``exp(s - statistic)``, in the memory of ``s``."""
        assert statistic is not None
        return (torch.threshold_(s.sub_(statistic).exp_(), _SMALLEST_WEIGHT, 0.0),)

    def open(self, s: Tensor, shift: Tensor) -> Tensor:
        """Exclude rows in which one token has all the weight for any shift."""
        if s.shape[-1] < 2:
            return torch.zeros_like(s[..., 0], dtype=torch.bool)
        best, second = s.double().topk(2, -1).values.unbind(-1)
        near = best - second < 2 * shift - math.log(torch.finfo(s.dtype).tiny)
        return (second > -torch.inf) & near

    def push(self, at: At, ds: Tensor, v: Tensor, dv: Tensor, o: Tensor) -> Tensor:
        """``w v - rowsum(w) o + P dv``: ``dP`` is not formed."""
        (p,) = at
        w = ds.mul_(p)
        do = torch.bmm(w, v).addcmul_(w.sum(-1, keepdim=True), o, value=-1)
        return do.baddbmm_(p, dv)

    def pull(self, at: At, gp: Tensor, mean: Tensor) -> Tensor:
        """``P (gp - mean)``."""
        (p,) = at
        return gp.sub_(mean).mul_(p)
