"""The surroundings of attention in a residual map: the stream beside it, norms after it.

The map is ``x -> N_o(x + N_s(f(x)))``, either norm may be missing, and ``f`` may have a norm in
front. Block ij of its Jacobian is ``L_i J_ij + δ_ij D_i`` with ``D_i`` the derivative of ``N_o`` at
token i, the identity without it, and ``L_i`` that times the derivative of ``N_s``. Proofs:
``docs/theory/local-certificates.md``, on the map ``residual``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.theorems.head import UNIT


@dataclass(frozen=True)
class Behind:
    """The derivative of a norm after attention: ``s_i D_g (I - u_i u_i^T) Π`` in row i.

    Attributes:
        gain: ``√d g``, ``(d,)``.
        centred: Whether ``Π`` takes the mean away (LayerNorm) or does nothing (RMSNorm).
        slope: ``s_i`` from above, ``(n,)``; the largest one, ``(1,)``, for all inputs.
        u: Where tokens end up in the unit ball, ``(n, d)``; None for all inputs.
        error: ``>= `` what rounding of the norm's input changes in the derivative, ``(n,)``.
    """

    gain: Float[Tensor, " d"]
    centred: bool
    slope: Float[Tensor, " n"]
    u: Float[Tensor, "n d"] | None = None
    error: Float[Tensor, " n"] | None = None

    @property
    def sizes(self) -> Float[Tensor, " n"]:
        """Bounds of the norms of the rows' derivatives."""
        return self.gain.abs().max() * self.slope * (1 + UNIT)

    def at(self, rows: slice) -> Float[Tensor, "r d d"]:
        """The derivative at some tokens."""
        assert self.u is not None
        u = self.u[rows]
        m = torch.eye(u.shape[1], dtype=u.dtype) - u[:, :, None] * u[:, None]
        m = m - m.mean(-1, keepdim=True) if self.centred else m
        return self.slope[rows, None, None] * self.gain[:, None] * m


@dataclass(frozen=True)
class Around:
    """What stands around attention, at an input or at all of them.

    Attributes:
        tokens: Their number; 1 for all inputs.
        width: Of a token.
        second: ``N_s``, which takes the attention's own output, or None.
        outer: ``N_o``, which takes the sum, or None.
        here: Whether it speaks of one input, so that the identity can go inside a certificate.
    """

    tokens: int
    width: int
    second: Behind | None = None
    outer: Behind | None = None
    here: bool = True

    @cached_property
    def beside(self) -> Float[Tensor, " n"]:
        """``>= ‖D_i‖``."""
        return self._sizes(self.outer)

    @cached_property
    def lefts(self) -> Float[Tensor, " n"]:
        """``>= ‖L_i‖``."""
        return self.beside * self._sizes(self.second)

    @property
    def plain(self) -> bool:
        """Whether ``D_i`` and ``L_i`` are identities: no norm after attention."""
        return self.second is None and self.outer is None

    def own(self, rows: slice) -> Float[Tensor, "r d d"]:
        """``D_i`` of some tokens; of all alike ``(1, d, d)``."""
        if self.outer is None:
            return torch.eye(self.width, dtype=torch.float64)[None]
        return self.outer.at(rows)

    def through(self, rows: slice, blocks: Float[Tensor, "r d m"]) -> Float[Tensor, "r d m"]:
        """``L_i B_i``."""
        blocks = blocks if self.second is None else self.second.at(rows) @ blocks
        return blocks if self.outer is None else self.outer.at(rows) @ blocks

    def back(self, rows: slice, blocks: Float[Tensor, "r d m"]) -> Float[Tensor, "r d m"]:
        """``L_i^T B_i``."""
        blocks = blocks if self.outer is None else self.outer.at(rows).mT @ blocks
        return blocks if self.second is None else self.second.at(rows).mT @ blocks

    def of(self, value: float) -> float:
        """``max ‖D_i‖ (1 + max ‖S_i‖ value)``, ``S_i`` the derivative of ``N_s``."""
        outer, second = (float(self._sizes(one).max()) for one in (self.outer, self.second))
        return outer * (1 + second * value)

    def slack(self, hidden: float) -> float:
        """What rounding may hide from a bound with the identity inside.

        Args:
            hidden: The same for attention alone, so that ``hidden / u`` bounds its norm.
        """
        norm = hidden / UNIT
        second = float(self._sizes(self.second).max())
        off = [0.0 if one is None else float(one.max()) for one in self._errors]
        total = float(self.lefts.max()) * hidden + UNIT * self.width * float(self.beside.max())
        return total + off[1] * (1 + second * norm) + float(self.beside.max()) * off[0] * norm

    @property
    def _errors(self) -> list[Tensor | None]:
        return [None if one is None else one.error for one in (self.second, self.outer)]

    def _sizes(self, norm: Behind | None) -> Tensor:
        return torch.ones(self.tokens, dtype=torch.float64) if norm is None else norm.sizes
