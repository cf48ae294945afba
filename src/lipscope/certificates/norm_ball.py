"""LayerNorm, RMSNorm and norms without variance between what their inputs can be."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.certificates.forms import positive_part
from lipscope.models import Norm

# sup of the second and third derivative of the angle's projection, times |c^|^k
_SECOND, _THIRD = 2 / 3**0.5, 3.0
_CELLS = 32  # of the integrals along a way, each taken at its larger end


class NormBall:
    """A norm around one centre; ``|D^k <w, N>| <= C_k sqrt(d) |C w gamma| / |c^|^k``.

    ``c^ = (c, sqrt(d eps))`` with ``c = C v``: a scaled norm is ``c^ / |c^|`` on an affine
    subspace, and along a line its angle obeys ``theta' = b, theta'' = -2 a b, theta''' = -2 b +
    8 b a^2`` with ``a^2 + b^2 = 1``: ``C_2 = 2 / sqrt(3)``, ``C_3 = 3``.
    """

    def __init__(self, norm: Norm, v: Float[Tensor, "n d"]) -> None:
        self.norm, self.v, self.width = norm, v, v.shape[-1]
        self.projection = torch.eye(self.width, dtype=v.dtype)
        if norm.centred:
            self.projection = self.projection - 1 / self.width
        self.size = self._size(v)
        # only what moves along c^ makes it shorter
        self.radial = (v @ self.projection) / self.size[:, None]
        self.value, self.slope = norm(v), self.jacobian(v)
        self.inward = torch.zeros_like(self.size)

    def _size(self, v: Tensor) -> Tensor:
        if not self.norm.scaled:
            return v.new_ones(v.shape[:-1])
        return ((v @ self.projection).square().sum(-1) + self.width * self.norm.eps).sqrt()

    def within(self, radial: Float[Tensor, " n"]) -> bool:
        """Note how far inputs move along ``c^``; False where one could reach 0."""
        if not self.norm.scaled:
            return True
        self.inward = radial
        return bool((self.size - radial > 1e-9 * self.size).all())

    def jacobian(self, v: Float[Tensor, "n d"]) -> Float[Tensor, "n d d"]:
        """Derivative at other inputs."""
        c, gamma = self.projection, self.norm.weight
        if not self.norm.scaled:
            return (gamma[:, None] * c).expand(len(v), -1, -1)
        size, at = self._size(v)[:, None, None], v @ c
        outer = at[:, :, None] * at[:, None, :]
        return self.width**0.5 * gamma[:, None] * (c / size - outer / size**3)

    def read(self, w: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """``sqrt(d) |C (gamma w)|``, 0 for a linear norm."""
        size = ((w * self.norm.weight) @ self.projection).norm(dim=-1)
        return size * (self.width**0.5 if self.norm.scaled else 0.0)

    @property
    def most(self) -> Tensor:
        """``sqrt(d) max |gamma|``, 0 for a linear norm."""
        return self.width**0.5 * self.norm.weight.abs().max() * float(self.norm.scaled)

    def remainder(self, reach: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """``>= |<w, N(v') - N(v) - D(v' - v)>| / read(w)`` within a reach, for every ``w``.

        ``C_2 reach^2 int_0^1 (1 - s) / (|c^| - s inward)^2 ds``.
        """
        edges = torch.linspace(0, 1, _CELLS + 1, dtype=reach.dtype)
        weight = ((1 - edges[:-1]).square() - (1 - edges[1:]).square()) / 2
        at = self.size[:, None] - edges[1:] * self.inward[:, None]
        return _SECOND * reach.square() * (weight / at.square()).sum(1)

    def _way(
        self, anchor: Float[Tensor, "n d"], reach: Float[Tensor, " n"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cells of ``t``, and how far ``(1 - t) v_1 + t v'`` can be from the centre and inward."""
        edges = torch.linspace(0, 1, _CELLS + 1, dtype=reach.dtype)
        moved = anchor - self.v
        start = -(moved * self.radial).sum(-1).clamp_max(0)
        apart = (1 - edges) * moved.norm(dim=-1)[:, None] + edges * reach[:, None]
        inward = (1 - edges) * start[:, None] + edges * self.inward[:, None]
        inward = torch.minimum(inward, self.inward[:, None])
        apart, inward = (torch.maximum(m[:, :-1], m[:, 1:]) for m in (apart, inward))
        return edges, apart, inward

    def slope_change(
        self, anchor: Float[Tensor, "n d"], reach: Float[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """``>= ‖S - D‖`` of secants ``N(v') - N(v_1) = S (v' - v_1)`` within a reach.

        At distance ``a``, ``‖D(v') - D(v)‖ <= C_2 sqrt(d) max |gamma| a / (|c^| (|c^| - inward))``.
        """
        _, apart, inward = self._way(anchor, reach)
        size = self.size[:, None]
        return _SECOND * self.most * (apart / (size * (size - inward))).mean(1)

    def largest_slope_change(self, reach: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """``>= ‖D(v') - D‖`` within a reach."""
        return _SECOND * self.most * reach / (self.size * (self.size - self.inward))

    def curvature(
        self, w: Float[Tensor, "n d"], anchor: Float[Tensor, "n d"], reach: Float[Tensor, " n"]
    ) -> Float[Tensor, "n d d"]:
        """``K >= 0`` with ``<w, N(v')> >= <w, N(v_1)> + <D^T w, f> - <f, K f> / 2``.

        For the anchor ``v_1`` and every ``v' = v_1 + f`` within ``reach`` of the centre.
        """
        n, d = self.v.shape
        if not self.norm.scaled:
            return w.new_zeros(n, d, d)
        c, size = self.v @ self.projection, self.size[:, None, None]
        u = (w * self.norm.weight) @ self.projection
        along = (u * c).sum(-1)[:, None, None]
        cross = u[:, :, None] * c[:, None, :]
        h = -(cross + cross.mT + along * self.projection) / size**3
        h = h + 3 * along * c[:, :, None] * c[:, None, :] / size**5
        edges, apart, inward = self._way(anchor, reach)
        size = self.size[:, None]
        # int_0^1 ds / (|c^| - s inward)^3, along the way from the centre
        third = (2 * size - inward) / (2 * size.square() * (size - inward).square()) * apart
        weight = (1 - edges[:-1]).square() - (1 - edges[1:]).square()
        third = _THIRD * self.read(w) * (third * weight).sum(1)
        return positive_part(third[:, None, None] * self.projection - d**0.5 * h)
