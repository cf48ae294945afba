"""Ball certificates of whole blocks: attention composed with token-wise branches.

``f(X + E) - f(X) = (M + R) E``: ``M`` is exact up to intervals of activation slopes, the norm of
``R`` is bounded. Derived here; proof: ``docs/theory/ball-certificate.md``, section 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.attention_at import AttentionAt
from lipscope.certificates.attention_ball import PIECES, AttentionBall
from lipscope.certificates.balls import (
    BallCertificate,
    certificate_of,
    check_ball,
    in_double,
    refusal,
    sigma_of,
)
from lipscope.certificates.expansion import HeadPath, rest
from lipscope.certificates.forms import OutOfReachError, ellipsoid, norm_above, top_value, young
from lipscope.certificates.segment import Point, Reads, TokenBranch
from lipscope.errors import InputError
from lipscope.models import Branch, Chain
from lipscope.theorems import (
    Ball,
    BallName,
    HeadAt,
    LayerSubject,
    NotApplicableError,
    per_token,
    tokens_in_double,
)

_MOST = 4 * 2**30  # memory limit of a certificate, in bytes
_MATRICES = 6  # number of square matrices over all coordinates in memory
_ROUNDING = 1e-12  # of matrix products, relative to the product of their norms
_SLACK = 1e-9  # rounding of the sum, with a margin
_DENSE = 512  # maximum number of coordinates for explicit second derivatives of attention
_THIN = 1e-9  # smallest axis of an ellipsoid
_COLUMNS = 256  # columns of a layer's Jacobian computed at a time
_TOO_FAR = (
    "No certificate: within `eps` the input of a norm could vanish, or a bound overflows; choose a "
    "smaller `eps`."
)
_SPECTRUM = 3072  # largest matrix for eigenvalues; larger ones use a Cholesky factor


class BallReads(Reads):
    """Bounds of the moves of read-outs of a point, in a token ball or a Frobenius ball."""

    def __init__(self, radii: Float[Tensor, " m"], ball: BallName) -> None:
        self.ball_name: BallName = ball
        self.radii = radii
        size = radii.amax() if ball == "frobenius" else radii.norm()
        super().__init__(None, float(size))

    def of(
        self, at: Point, reads: Float[Tensor, "n k d"], enough: Float[Tensor, "n k"] | float = 0.0
    ) -> Float[Tensor, "n k"]:
        """``>= |<p_ik, v_i - v_0i>|``, always as sharp as possible."""
        found = torch.stack([
            self._sizes(one @ j) for one, j in zip(reads, at.jacobian, strict=True)
        ])  # fmt: skip
        return found + reads.norm(dim=-1) * at.rest[:, None]

    def _sizes(self, rows: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        if self.ball_name == "frobenius":
            return rows.norm(dim=-1) * self.r
        return rows.unflatten(1, (len(self.radii), -1)).norm(dim=-1) @ self.radii

    def radius(self, at: Point, m: Float[Tensor, "n k d"] | None = None) -> Float[Tensor, " n"]:
        """``>= |M_i (v_i - v_0i)|``; None: for the identity."""
        j = at.jacobian if m is None else m @ at.jacobian
        moved = norm_above(j) * self.r
        if self.ball_name == "token":
            blocks = (one.unflatten(1, (len(self.radii), -1)).movedim(1, 0) for one in j)
            each = torch.stack([norm_above(one) @ self.radii for one in blocks])
            moved = torch.minimum(moved, each)
        return moved + (at.rest if m is None else norm_above(m) * at.rest)


@dataclass(frozen=True, eq=False)
class MapReach:
    """An intermediate point of a map: its linear part ``M``, and a bound of the remainder."""

    point: Point  # value at the centre, ``M``, and each token's remainder
    size: Tensor  # ``>= ‖M‖``
    # ``>= |v' - v_0 - M E| / |E|`` for every ``E`` of the ball; ``>= ‖dv / dE - M‖`` over the ball
    left: tuple[Tensor, Tensor]

    def bent(self, errors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The remainders of token-wise maps within ``errors`` of their slopes, ``(n,)`` each."""
        own = norm_above(self.point.jacobian)
        near, anywhere = (
            torch.minimum((error * own).norm(), error.max() * self.size) + error.max() * left
            for error, left in zip(errors, self.left, strict=True)
        )
        return near, anywhere


def _tokenwise(branch: Branch, at: MapReach, reads: BallReads) -> MapReach:
    """The point after a norm, a token-wise network, or both."""
    one = TokenBranch(branch, at.point, reads)
    errors, hidden = _norm_errors(one), norm_above(one.slope)
    if one.units is not None:
        mid, m = one.mid, one.units.through(one.mid)
        into = one.units.into.expand(len(mid), -1, -1)
        # tangents have a wider slope range than secants from the centre
        least, most = one.units.tangents(one.low, one.high)
        halves = one.half, torch.maximum(most - mid, mid - least)
        errors = [
            one.units.apart(wider, into @ one.slope)
            + (norm_above(m) + one.units.apart(wider, into)) * bent
            for wider, bent in zip(halves, errors, strict=True)
        ]
        hidden = hidden * norm_above(one.units.out) * norm_above(one.units.into)
        hidden = hidden * mid.abs().amax(-1)
    rounding = _ROUNDING * (1 + hidden.max()) * at.size
    kept, lost = norm_above(one.wide), at.bent(errors)
    near, anywhere = (
        kept.max() * left + new + rounding for left, new in zip(at.left, lost, strict=True)
    )
    beyond = kept * at.point.rest + errors[0] * one.radius
    point = replace(one.point, rest=torch.minimum(one.point.rest, beyond))
    return MapReach(point, norm_above(point.jacobian.flatten(0, 1)), (near, anywhere))


def _norm_errors(one: TokenBranch) -> list[Tensor]:
    """``>= ‖S_i - D_i‖`` for secants of the norm from the centre, and for its slopes anywhere."""
    change = one.norm.slope_change(one.at.value, one.radius)
    return [change, one.norm.largest_slope_change(one.radius)]


def _mixed(branch: Branch, at: MapReach, reads: BallReads) -> MapReach:
    """The point after attention, with an optional norm in front and residual sum."""
    part = branch.part
    assert isinstance(part, DotProduct)
    layer, v = in_double(part, None), at.point.value
    n, d = v.shape
    y, inner, size, left = v, at.point, at.size, at.left
    bent, front = (torch.zeros_like(size), torch.zeros_like(size)), None
    if branch.norm is not None:
        one = TokenBranch(Branch(None, branch.norm, skip=False), at.point, reads)
        y, inner = one.point.value, one.point
        size, bent = norm_above(inner.jacobian.flatten(0, 1)), at.bent(_norm_errors(one))
        front, most = one.slope, norm_above(one.slope).max()
        left = most * at.left[0] + bent[0], most * at.left[1] + bent[1]
    slope = _dense(layer, y)
    through, whole = slope, norm_above(slope)
    if front is not None:
        blocks = slope.unflatten(1, (n, d)).movedim(1, 0) @ front
        through = blocks.movedim(0, 1).flatten(1)
    if branch.skip:
        through = through + torch.eye(len(through), dtype=v.dtype)
    radii = reads.radius(inner)
    if reads.ball_name == "frobenius":
        radii = torch.full_like(radii, float((size + left[0]) * reads.r))
    kept, rounding = norm_above(through), _ROUNDING * (1 + whole) * (size + at.size)
    moved = [
        change * (size + now)
        for change, now in zip(_changes(layer, y, radii, reads.ball_name), left, strict=True)
    ]
    if y.numel() <= _DENSE:
        sharper = _changes_along(layer, y, inner.jacobian, max(left), reads.r)
        moved = [torch.minimum(*pair) for pair in zip(moved, sharper, strict=True)]
    # the remainder of the norm passes through attention only
    near, anywhere = (
        kept * before + whole * own + change + rounding
        for before, own, change in zip(at.left, bent, moved, strict=True)
    )
    jacobian = (through @ at.point.jacobian.flatten(0, 1)).unflatten(0, (n, -1))
    value = layer(y) + (v if branch.skip else 0.0)
    lin = value.new_zeros(n, value.shape[1], 0)
    point = Point(value, jacobian, lin, (near * reads.r).expand(n))
    return MapReach(point, norm_above(jacobian.flatten(0, 1)), (near, anywhere))


def _dense(layer: DotProduct, y: Float[Tensor, "n d"]) -> Float[Tensor, "nd nd"]:
    """The dense Jacobian of a layer."""
    operator, eye = layer.linearise(y), torch.eye(y.numel(), dtype=y.dtype)
    columns = [operator.matvec(some.view(-1, *y.shape)).flatten(1) for some in eye.split(_COLUMNS)]
    return torch.cat(columns).T


def _changes(
    layer: DotProduct, y: Float[Tensor, "n d"], radii: Float[Tensor, " n"], ball: BallName
) -> tuple[float, float]:
    """``>= |f(y') - f(y) - J (y' - y)| / |y' - y|`` in a ball, and ``>= ‖J(y') - J‖``."""
    asked = LayerSubject(layer, "attention", x=y)
    hidden = asked.together.slack
    bare = [HeadAt(head, y) for head in asked.bare]
    paths = [(c, HeadPath(c, radii, ball, {}).whole()) for c in bare]
    near, _ = rest(paths, layer.output, apart=False)
    eps = float(radii[0]) if ball == "frobenius" else radii
    each = torch.tensor([Ball(HeadAt(head, y), eps, ball).change for head in asked.heads]).double()
    whole = each.sum() if asked.projected else each.norm()
    return near + hidden, float(whole) + hidden


def _changes_along(
    layer: DotProduct, y: Float[Tensor, "n d"], m: Float[Tensor, "n d p"], left: Tensor, r: float
) -> tuple[Tensor, Tensor]:
    """The same for ``y' - y = (M + R) E`` with ``|R| <= left``, relative to ``|E|``."""
    flat = m.flatten(0, 1)
    w = young(float(norm_above(flat)), float(left) + _THIN)
    share = (left + _THIN).square() / w[1] * torch.eye(len(flat), dtype=y.dtype)
    t = ellipsoid(flat @ flat.T / w[0] + share).unflatten(0, y.shape)
    reads = Reads(AttentionBall(AttentionAt(layer, y, t, torch.arange(len(y))), r), r)
    last = torch.nn.functional.one_hot(torch.tensor(PIECES - 1)).to(y.dtype)
    average, farthest = (
        top_value(reads.whole(shares)).sqrt() for shares in (torch.ones_like(last) / PIECES, last)
    )
    return average, farthest


def certify_map(
    chain: Chain,
    x: Float[Tensor, "n d"],
    *,
    eps: float | Tensor,
    ball: BallName = "token",
    sigma: tuple[float, float] | None = None,
) -> BallCertificate:
    """``L(eps)`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` in the ball, for composed branches.

    ``L = ‖M‖ + sup ‖R‖``: ``M`` is the product of the parts' slopes at the centre (for
    activations, the midpoint of their slope interval), ``R`` the remainder: of attention as in
    `certify_ball`, of norms by their angle, of activations by the range of their arguments.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary embedding, for
    LayerNorm, RMSNorm and token-wise networks with ReLU, GELU, SiLU or tanh; up to float64
    rounding. Tends to sigma as ``eps`` tends to 0, unless an argument of a ReLU is 0. Memory
    grows like ``(n d)²``, time like ``(n d)³``, both linearly in depth.

    Args:
        chain: The parts, as returned by `read_map`.
        eps: Radius, or one per token (ball ``token``); tokens with radius 0 are fixed.
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        sigma: Lower and upper bound of sigma at X; None: measured here.

    Raises:
        InputError: If the arguments do not fit, 4 GB do not suffice, or nothing is proved.

    Source: derived here; ``docs/theory/ball-certificate.md``, section 9.

    >>> from lipscope import DotProduct
    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> mean_added = Chain((Branch(DotProduct(eye, eye, eye)),))
    >>> found = certify_map(mean_added, torch.zeros(3, 2), eps=1e-9)
    >>> round(found.value, 6), round(found.sigma_bound, 6)
    (2.0, 2.0)
    """
    check_ball(ball)
    x = tokens_in_double(x, x.shape[-1])
    radii = per_token(eps, len(x), ball)
    needed = 8 * _MATRICES * x.numel() ** 2
    if needed > _MOST:
        raise InputError(
            f"A certificate of whole blocks should need at most 4 GB. Found about "
            f"{needed / 2**30:.0f} GB for {x.numel()} coordinates; choose a shorter text, or "
            "certify the map `attention`."
        )
    moves = radii > 0
    reads = BallReads(radii[moves], ball)
    eye = torch.eye(x.numel(), dtype=x.dtype)[:, moves.repeat_interleave(x.shape[1])]
    start = Point(x, eye.unflatten(0, x.shape), x.new_zeros(*x.shape, 0), x.new_zeros(len(x)))
    at = MapReach(start, x.new_ones(()), (x.new_zeros(()), x.new_zeros(())))
    try:
        for branch in chain.branches:
            step = _mixed if isinstance(branch.part, DotProduct) else _tokenwise
            at = step(branch, at, reads)
    except NotApplicableError as error:
        raise refusal(error) from error
    except (OutOfReachError, OverflowError):
        raise InputError(_TOO_FAR) from None
    size = at.size
    if min(at.point.jacobian.flatten(0, 1).shape) <= _SPECTRUM:
        size = norm_above(at.point.jacobian.flatten(0, 1)[None])[0]
    near, anywhere = (float(size + left) * (1 + _SLACK) for left in at.left)
    value = min(near, anywhere)  # `anywhere` bounds a mean of slopes
    if not math.isfinite(value + anywhere):
        raise InputError(_TOO_FAR)
    if sigma is None:
        top = sigma_of(chain, x, None)
        sigma = top.sigma, top.upper
    return certificate_of(x, radii, ball, value, anywhere, "slopes", sigma)
