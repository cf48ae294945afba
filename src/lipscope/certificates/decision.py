"""A decision of a linear read-out: the radius within which it cannot change.

Deterministic up to float64 rounding. Proofs: ``docs/theory/ball-certificate.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.certificates.balls import in_double, tokens_of
from lipscope.certificates.read_out import Pool, ReadOut, check_ball
from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.theorems import UNIT, BallName, HeadAt, NotApplicableError, heads_of

_FAR = 0.1  # of the nearest distance, below which a radius says so
_DENSE = 1024  # entries of X up to which the Hessian of a margin is formed


@dataclass(frozen=True, repr=False)
class CertifiedRadius(Shown):
    """The radius within which a decision cannot change.

    Attributes:
        radius: No X' in the open ball of this radius changes the decision.
        ball: Which ball.
        decision: Class at X.
        rival: The class that limits the radius.
        margin: Difference of their scores at X.
        nearest: Distance from a token to the nearest other token's vector.
        fraction: ``radius / nearest``: well below 1, no word can be replaced within it.
        note: What to know, or None.
    """

    radius: float
    ball: BallName
    decision: int
    rival: int
    margin: float
    nearest: float
    fraction: float
    note: str | None = None


def certified_radius(
    layer: Attention,
    x: Float[Tensor, "n d"],
    weight: Float[Tensor, "c d_out"],
    *,
    bias: Float[Tensor, " c"] | None = None,
    pool: Pool = "mean",
    ball: BallName = "token",
    table: Float[Tensor, "vocab d"] | None = None,
    steps: int = 8,
) -> CertifiedRadius:
    """The largest radius found within which ``argmax(W pool(f(X)) + b)`` cannot change.

    With ``g_l = <W_k - W_l, pool(f(X))> + b_k - b_l`` for decision ``k`` and rival ``l``: the
    exact ``∇g_l(X)``, all heads and rows together, and bounds ``M_l(s)`` and ``T_l(s)`` of the
    second and third derivative over the ball of radius ``s``. The radius is the largest with
    ``eps ‖∇g_l‖* + int_0^eps (eps - s) B_l(s) ds < g_l`` for all rivals; ``‖·‖*`` is the sum of
    the tokens' norms (``token``) or the Frobenius norm. ``B_l(s)`` is the lesser of ``M_l(s)`` and,
    where X has at most 1,024 entries, ``H_l + int_0^s T_l`` with ``H_l`` from the Hessian at X.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary embedding;
    exact where f is linear in X. It speaks of moves of the map's input, not of replaced
    words: read ``fraction`` first.

    Args:
        layer: The layer; the map is ``attention``.
        x: Its input.
        weight: Read-out on the pooled output.
        bias: Of the read-out.
        pool: ``mean`` over tokens, or the ``first`` token.
        ball: ``token``: every token moves by at most the radius; ``frobenius``: all together.
        table: Vectors of other tokens, for the nearest distance; the rows of ``x`` if None.
        steps: Pieces of the integral.

    Returns:
        The radius; 0 where two classes tie.

    Raises:
        InputError: If shapes do not fit or there is no certificate.

    Without attention between tokens (n = 1) the map is linear and the radius exact:

    >>> from lipscope import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> found = certified_radius(layer, torch.tensor([[3.0, 1.0]]), torch.eye(2))
    >>> round(found.radius * 2**0.5, 6)  # the margin is 2, the read-out's norm sqrt(2)
    2.0
    """
    if steps < 1:
        raise InputError(f"`steps` should be at least 1. Found `steps = {steps}`.")
    check_ball(ball)
    at = Decision(layer, x, weight, bias, pool)
    if at.margins[at.rivals].min() <= 0:
        limit, radius = int(at.rivals[0]), 0.0
    else:
        try:
            radii = _radii(at, ball, steps)
        except NotApplicableError as error:
            raise InputError(f"No certificate: {error}.") from error
        limit, radius = int(at.rivals[radii.argmin()]), float(radii.min())
    nearest = _nearest(at.x, table)
    fraction = radius / nearest if nearest > 0 else math.inf
    return CertifiedRadius(
        radius=radius,
        ball=ball,
        decision=at.decision,
        rival=limit,
        margin=float(at.margins[limit]),
        nearest=nearest,
        fraction=fraction,
        note=_note(radius, fraction),
    )


def _radii(at: Decision, ball: BallName, steps: int) -> Tensor:
    """Radii of all rivals, the least of them from the Hessian at X if that is small enough."""
    margins = at.margins[at.rivals] - at.rounding
    radii = ReadOut(at.layer, at.x, at.differences, at.pool, ball).radii(margins, steps)
    sharp: set[int] = set()
    while at.x.numel() <= _DENSE and (least := int(radii.argmin())) not in sharp:
        if not 0 < float(radii[least]) < math.inf:
            break
        sharp.add(least)
        alone = ReadOut(at.layer, at.x, at.differences[[least]], at.pool, ball)
        again = alone.radii(margins[[least]], steps, exact=True)
        radii[least] = torch.maximum(radii[least], again[0])
    return radii


def _note(radius: float, fraction: float) -> str | None:
    if radius == 0.0:
        return "no radius: two classes tie, up to rounding"
    if math.isinf(radius):
        return "infinite: the scores do not depend on the input"
    if fraction < _FAR:
        return "far from any other token's vector: no replacement of words is covered"
    return None


class Decision:
    """Scores and margins of a read-out, checked, in float64."""

    def __init__(
        self, layer: Attention, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Pool
    ) -> None:
        self.layer = in_double(layer, None)
        self.pool: Pool = pool
        self.x = tokens_of(self.layer, x)
        self.weight = weight.detach().to("cpu", torch.float64)
        if pool not in ("mean", "first"):
            raise InputError(f"`pool` should be mean or first. Found `{pool}`.")
        try:
            _ = HeadAt(heads_of(self.layer)[0], self.x).p  # mask and positions fit the tokens
        except NotApplicableError as error:
            raise InputError(f"No certificate: {error}.") from error
        with torch.no_grad():
            width = self.layer(self.x).shape[1]
        if weight.ndim != 2 or len(weight) < 2 or weight.shape[1] != width:
            raise InputError(
                f"`weight` should have shape (classes, {width}), at least two classes. "
                f"Found {tuple(weight.shape)}."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InputError(
                f"`bias` should have shape ({len(weight)},), one number per class. "
                f"Found {tuple(bias.shape)}."
            )
        self.bias = None if bias is None else bias.detach().to("cpu", torch.float64)
        with torch.no_grad():
            scores = self.scores(self.x)
        if not bool(torch.isfinite(scores).all()):
            raise InputError("The read-out should give finite scores. Found NaN or infinite ones.")
        self.decision = int(scores.argmax())
        self.margins = scores[self.decision] - scores
        others = torch.arange(len(scores)) != self.decision
        order = self.margins.argsort()
        self.rivals = order[others[order]]
        self.differences = self.weight[self.decision] - self.weight[self.rivals]

    @property
    def rounding(self) -> float:
        """Of a difference of scores, where biases are added that may cancel."""
        layer, sizes = self.layer, self.weight.norm(dim=1).max()
        outer = 1.0 if layer.output is None else layer.output.norm()
        given = [(layer.value_bias, sizes * outer), (layer.output_bias, sizes), (self.bias, 1.0)]
        return UNIT * sum(float(b.norm() * factor) for b, factor in given if b is not None)

    def scores(self, x: Tensor) -> Tensor:
        """``W pool(f(X)) + b``."""
        y = self.layer(x)
        found = self.weight @ (y.mean(0) if self.pool == "mean" else y[0])
        return found if self.bias is None else found + self.bias


def _nearest(x: Tensor, table: Tensor | None) -> float:
    """Smallest distance between a token and another vector; equal vectors do not count."""
    others = x if table is None else table.detach().to("cpu", torch.float64)
    if others.ndim != 2 or others.shape[1] != x.shape[1]:
        raise InputError(
            f"`table` should have shape (vocab, {x.shape[1]}). Found {tuple(others.shape)}."
        )
    apart = torch.cdist(x, others, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart[apart > 1e-9 * x.norm(dim=-1).max()]
    return float(apart.min()) if apart.numel() else math.inf
