"""Token-wise norms and hidden units over ranges of inputs: secants, minorants, derivatives.

A unit reads the token-wise affine maps ``z = W y + b`` and, with a gate, ``u = W_g y + b_g``;
both are stacked as *arguments*, ``(n, a)`` with ``a = f`` or ``2 f``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.certificates.forms import norm_above, positive_part
from lipscope.models import ACTIVATIONS, ActivationName, Feed, Norm

_FAR = 15.0  # no derivative of an activation has an extremum beyond it
_GRID = 6001
_TURNS = 60  # bisections of a root
# sup of the second and third derivative of the angle's projection, times |c^|^k
_SECOND, _THIRD = 2 / 3**0.5, 3.0
_CELLS = 32  # of integrals along a segment, each bounded by its larger end

Function = Callable[[Tensor], Tensor]


def _derivative(f: Function) -> Function:
    def slope(z: Tensor) -> Tensor:
        with torch.enable_grad():
            own = z if z.requires_grad else z.detach().requires_grad_(True)
            value = f(own).sum()
            if not value.requires_grad:  # a constant slope
                return torch.zeros_like(z)
            (found,) = torch.autograd.grad(value, own, create_graph=True)
        return found if z.requires_grad else found.detach()

    return slope


@cache
def _smooth(name: ActivationName) -> tuple[tuple[Function, Tensor], ...]:
    """An activation and its first two derivatives, each with its extremal points."""
    f = ACTIVATIONS[name]
    functions = [f]
    for _ in range(3):
        functions.append(_derivative(functions[-1]))
    return tuple((g, _roots(slope)) for g, slope in pairwise(functions))


def _roots(f: Function) -> Tensor:
    grid = torch.linspace(-_FAR, _FAR, _GRID, dtype=torch.float64) + 1e-4  # no root on the grid
    at = f(grid)
    # the sign of a tail that vanishes in float64 is rounding
    changes = (at[:-1] * at[1:] < 0) & (at[:-1].abs() > 1e-12)
    low, high = grid[:-1][changes], grid[1:][changes]
    below = at[:-1][changes] < 0
    for _ in range(_TURNS):
        mid = (low + high) / 2
        same = (f(mid) < 0) == below
        low, high = torch.where(same, mid, low), torch.where(same, high, mid)
    return (low + high) / 2


def _range(which: tuple[Function, Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum between ``low`` and ``high``: at the ends or at extremal points."""
    f, turns = which
    ends = f(low), f(high)
    least, most = torch.minimum(*ends), torch.maximum(*ends)
    for turn in turns:
        inside, value = (low < turn) & (turn < high), f(turn)
        least = torch.where(inside, torch.minimum(least, value), least)
        most = torch.where(inside, torch.maximum(most, value), most)
    return least, most


def _slopes(name: ActivationName, z: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Range of the secant slopes from ``z`` to points between ``low`` and ``high``."""
    if name != "relu":
        return _range(_smooth(name)[1], low, high)
    down, up = (_secant(z, end) for end in (low, high))  # convex: secant slopes increase
    return down, up


def _secant(z: Tensor, end: Tensor) -> Tensor:
    apart = end - z
    slope = (end.relu() - z.relu()) / torch.where(apart == 0, 1.0, apart)
    return torch.where(apart == 0, (z > 0).to(z.dtype), slope)


def _parabola(z: Tensor, low: Tensor, high: Tensor, spread: Tensor) -> tuple[Tensor, ...]:
    """``relu(t) <= value + slope (t - z) + bend (t - z)^2 / 2`` for ``t`` between the ends.

    ``(t + tau)^2 / (4 tau)`` for ``tau = (z^2 + spread)^(1/2)``; if the range ends within ``|z|``
    beyond the kink, the parabola through its end that touches at ``z``; or the chord: whichever
    is smallest at a distance of ``spread^(1/2)``. A unit that keeps its sign is linear.
    """
    size, tau = z.abs(), (z.square() + spread).sqrt().clamp_min(1e-12)
    value, slope, bend = (z + tau).square() / (4 * tau), (z + tau) / (2 * tau), 1 / (2 * tau)
    cost = value + bend * spread / 2
    beyond = torch.where(z <= 0, high, -low)
    own = (z > 0).to(z.dtype)
    touching = 2 * beyond / (beyond + size).clamp_min(1e-300).square()
    better = (beyond < size) & (z.relu() + touching * spread / 2 <= cost)
    value, slope = torch.where(better, z.relu(), value), torch.where(better, own, slope)
    bend = torch.where(better, touching, bend)
    cost = torch.where(better, z.relu() + touching * spread / 2, cost)
    wide = (high - low).clamp_min(1e-300)
    chord = (low < 0) & (high > 0) & (high * (z - low) / wide < cost)
    value = torch.where(chord, high * (z - low) / wide, value)
    slope, bend = torch.where(chord, high / wide, slope), torch.where(chord, 0.0, bend)
    stable = beyond <= 0
    value, slope = torch.where(stable, z.relu(), value), torch.where(stable, own, slope)
    return value, slope, torch.where(stable, 0.0, bend)


def _of_relu(
    c: Tensor, z: Tensor, low: Tensor, high: Tensor, spread: Tensor
) -> tuple[float, Tensor, Tensor]:
    """`Units.minorant` of ReLU."""
    value, slope, bend = _parabola(z, low, high, spread)
    above = c >= 0  # a convex function lies above its tangents
    slope = torch.where(above, (z > 0).to(z.dtype), slope)
    gap = torch.where(above, 0.0, -c * (value - z.relu())).sum()
    return float(gap), c * slope, torch.where(above, 0.0, -c * bend)


class Units:
    """The hidden units of a token-wise network."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.gated = feed, feed.gate is not None
        self.width = len(feed.inner)
        self.activation = ACTIVATIONS[feed.activation]

    @cached_property
    def into(self) -> Float[Tensor, "a d"]:
        """Weights of the arguments."""
        gate = self.feed.gate
        return self.feed.inner if gate is None else torch.cat([self.feed.inner, gate])

    @cached_property
    def out(self) -> Float[Tensor, "d_out a"]:
        """Output weights of the secants in each argument."""
        return torch.cat([self.feed.outer] * (2 if self.gated else 1), 1)

    def arguments(self, y: Float[Tensor, "n d"]) -> Float[Tensor, "n a"]:
        """Arguments at tokens."""
        bias = self.feed.inner_bias
        if self.gated:
            gate = self.feed.gate_bias
            bias = torch.cat([bias, torch.zeros_like(bias) if gate is None else gate])
        return y @ self.into.T + bias

    def close(self, z: Float[Tensor, "n a"], last: bool) -> Float[Tensor, "n a"]:
        """Moves of arguments below which sharper bounds gain nothing.

        ReLU is linear on either side; if it is the ``last`` nonlinearity, a margin depends only on
        its parabola, which is insensitive to its ends.
        """
        if self.feed.activation != "relu" or self.gated:
            return torch.zeros_like(z)
        return torch.full_like(z, torch.inf) if last else z.abs()

    def secants(self, z: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Middle and half width of ``s`` in ``hidden(z') - hidden(z) = sum_a s_a (z'_a - z_a)``."""
        low, high = torch.minimum(low, z), torch.maximum(high, z)
        w = self.width
        slopes = _slopes(self.feed.activation, z[:, :w], low[:, :w], high[:, :w])
        # act(z') u' - act(z) u = u slope (z' - z) + act(z') (u' - u)
        least, most = self._with_gate(slopes, (z,), low, high)
        return (least + most) / 2, (most - least) / 2

    def tangents(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Range of ``s`` in ``d hidden = sum_a s_a dz_a`` for arguments between the ends."""
        z, end = low[:, : self.width], high[:, : self.width]
        if self.feed.activation == "relu":
            slopes = (z > 0).to(z.dtype), (end > 0).to(z.dtype)
        else:
            slopes = _range(_smooth(self.feed.activation)[1], z, end)
        return self._with_gate(slopes, (low, high), low, high)

    def _with_gate(
        self, slopes: tuple[Tensor, Tensor], at: tuple[Tensor, ...], low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Slope ranges of the units; with a gate, of both arguments."""
        if not self.gated:
            return slopes
        w = self.width
        ends = torch.stack([slope * one[:, w:] for one in at for slope in slopes])
        rest = _range(_smooth(self.feed.activation)[0], low[:, :w], high[:, :w])
        return torch.cat([ends.amin(0), rest[0]], 1), torch.cat([ends.amax(0), rest[1]], 1)

    def through(self, s: Float[Tensor, "n a"]) -> Float[Tensor, "n d_out d"]:
        """``W_2 diag(s) W_1``."""
        return (self.out * s[:, None, :]) @ self.into

    def apart(self, half: Float[Tensor, "n a"], into: Tensor) -> Float[Tensor, " n"]:
        """``>= ‖W_2 diag(s) W_1 - middle‖`` for slopes within ``half`` of their midpoint."""
        side = half.sqrt()
        return norm_above(self.out * side[:, None, :]) * norm_above(side[:, :, None] * into)

    def minorant(
        self, c: Float[Tensor, "n f"], z: Tensor, low: Tensor, high: Tensor, spread: Tensor
    ) -> tuple[float, Tensor, Tensor]:
        """``sum c hidden(z') >= sum c hidden(z) - gap + <slope, dz> - sum bend dz^2 / 2``.

        ``spread``: squares of typical moves of the arguments; any positive values are valid.
        """
        low, high = torch.minimum(low, z), torch.maximum(high, z)
        name, w = self.feed.activation, self.width
        if name == "relu" and not self.gated:
            return _of_relu(c, z, low, high, spread)
        if name == "relu":
            # c relu(z') u' = c u relu(z') + c relu(z) du + c (relu(z') - relu(z)) du
            own = (one[:, :w] for one in (z, low, high, spread))
            gap, slope, bend = _of_relu(c * z[:, w:], *own)
            cross = c.abs() * (high[:, :w] > 0)
            return self._gate(gap, slope, bend, cross, c * z[:, :w].relu(), spread)
        _, (first, _), second = _smooth(name)
        least, most = _range(second, low[:, :w], high[:, :w])
        slope = first(z[:, :w])
        if not self.gated:
            return 0.0, c * slope, torch.where(c > 0, -c * least, -c * most).clamp_min(0)
        u, value = z[:, w:], self.activation(z[:, :w])
        # second-order terms of act(z') u': dz^2 act'' u' / 2 + act'(z) dz du
        ends = torch.stack([a * b for a in (least, most) for b in (low[:, w:], high[:, w:])])
        own = (-(c * ends).amin(0)).clamp_min(0)
        return self._gate(0.0, c * slope * u, own, (c * slope).abs(), c * value, spread)

    def _gate(
        self, gap: float, slope: Tensor, own: Tensor, cross: Tensor, gate: Tensor, spread: Tensor
    ) -> tuple[float, Tensor, Tensor]:
        """Products ``cross |dz du|``, split between both arguments."""
        w = self.width
        balance = ((spread[:, w:] + 1e-300) / (spread[:, :w] + 1e-300)).sqrt()
        bend = torch.cat([own + cross * balance, cross / balance], 1)
        return gap, torch.cat([slope, gate], 1), bend


# --- norms


class NormBall:
    """A norm around a centre; ``|D^k <w, N>| <= C_k sqrt(d) |C w gamma| / |c^|^k``.

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
        # only moves along c^ shorten it
        self.radial = (v @ self.projection) / self.size[:, None]
        self.value, self.slope = norm(v), self.jacobian(v)
        self.inward = torch.zeros_like(self.size)

    def _size(self, v: Tensor) -> Tensor:
        if not self.norm.scaled:
            return v.new_ones(v.shape[:-1])
        return ((v @ self.projection).square().sum(-1) + self.width * self.norm.eps).sqrt()

    def within(self, radial: Float[Tensor, " n"]) -> bool:
        """Set the range of input moves along ``c^``; False if an input may reach 0."""
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
        """Cells of ``t``, and the largest distances of ``(1 - t) v_1 + t v'``, total and inward."""
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
        """``>= ‖S - D‖`` for secants ``N(v') - N(v_1) = S (v' - v_1)`` within a reach.

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
        # int_0^1 ds / (|c^| - s inward)^3, along the segment from the centre
        third = (2 * size - inward) / (2 * size.square() * (size - inward).square()) * apart
        weight = (1 - edges[:-1]).square() - (1 - edges[1:]).square()
        third = _THIRD * self.read(w) * (third * weight).sum(1)
        return positive_part(third[:, None, None] * self.projection - d**0.5 * h)
