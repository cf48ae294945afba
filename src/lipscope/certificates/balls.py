"""Certificates over a ball around X: upper bounds of how far outputs can move.

Deterministic up to float64 rounding, unlike the interval of a measurement. Derived here; proofs:
``docs/theory/ball-certificate.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Map, check_layer
from lipscope.certificates.expansion import ENDS, Channel, HeadPath, rest
from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.linalg import TopSingular, linearise, start_named, top_singular
from lipscope.theorems import (
    Ball,
    BallName,
    HeadAt,
    LayerSubject,
    NotApplicableError,
    check_scores,
    least,
    per_token,
    row_gram_joint,
    tokens_in_double,
    weighted_heads,
)


@dataclass(frozen=True)
class BallValue:
    """A bound of sigma over a ball."""

    total: float
    form: str
    heads: list[tuple[float, str]]


class BallLayer:
    """All heads of a layer at one centre; ``sharp`` uses the row-Gram certificate there."""

    def __init__(self, layer: DotProduct, x: Tensor, map: Map, sharp: bool) -> None:
        self.layer = LayerSubject(layer, map, x=x)
        self.sharp = sharp
        self.centres = [HeadAt(head, x) for head in self.layer.heads]
        self.weighted = [weighted_heads(c) if sharp else None for c in self.centres]
        self.local = [
            min(Ball(centre, 0.0).cheap, math.inf if weighted is None else weighted.value)
            for centre, weighted in zip(self.centres, self.weighted, strict=True)
        ]
        self.several, self.projected = len(self.centres) > 1, self.layer.projected
        self.joint = row_gram_joint(self.layer.together) if sharp and self.several else math.inf
        self.resting: dict[int, float] = {}  # cached bounds of bare heads at X

    @cached_property
    def slack(self) -> float:
        """Rounding error of a bound of all heads jointly at the centre."""
        return self.layer.together.slack

    @cached_property
    def bare(self) -> list[HeadAt]:
        """The heads before the output projection, if there is one."""
        assert self.layer.x is not None
        return [HeadAt(head, self.layer.x) for head in self.layer.bare]

    def over(
        self, radii: Tensor, ball: BallName, shares: Sequence[float] = (1.0,), *, apart: bool = True
    ) -> tuple[list[BallValue], float, list[float]]:
        """Bounds of sigma over balls of these radii, and from X to any point of the ball.

        These bound ``‖f(X') - f(X)‖ / ‖X' - X‖`` by sigma at X plus a remainder, for the layer
        (infinite without ``sharp``) and, as ``apart``, for each head.
        """
        expands = self.sharp or apart or not self.several
        # free the balls of one head before the next
        of_heads = (
            self._of_head(h, radii, ball, shares, expands) for h in range(len(self.centres))
        )
        inside, channels = zip(*of_heads, strict=True)
        values = [self._total(each) for each in zip(*inside, strict=True)]
        if not expands:
            return values, math.inf, []
        output = self.layer.attention.output if self.projected else None
        paths = [pair for pair in zip(self.bare, channels, strict=True) if pair[1] is not None]
        together, each = rest(paths, output, together=self.sharp, apart=apart)
        heads = []
        if each:
            alone = zip(self.local, each, self.centres, strict=True)
            heads = [local + one + centre.slack for local, one, centre in alone]
        return values, self.joint + together + self.slack if self.several else heads[0], heads

    def _of_head(
        self, index: int, radii: Tensor, ball: BallName, shares: Sequence[float], expands: bool
    ) -> tuple[list[_HeadValue], Channel | None]:
        """Bounds of one head over these balls, and its path through some of them."""
        centre, bare, local = self.centres[index], self.bare[index], self.local[index]
        still = Ball(bare, 0.0)
        found, met = list[_HeadValue](), {0.0: still}
        for share in shares:
            # a Frobenius ball has one radius by definition
            eps = float(radii[0]) * share if ball == "frobenius" else radii * share
            one = Ball(centre, eps, ball, self.weighted[index])
            own = Ball(bare, eps, ball, scored=one)
            forms = one.forms(local)
            value, alone = least(forms) + centre.slack, math.inf
            if self.several and self.projected:
                if index not in self.resting:
                    self.resting[index] = still.cheap
                alone = least(own.forms(self.resting[index])) + bare.slack
            name = min(forms, key=lambda name: forms[name])
            found.append(_HeadValue(value, name, one.change, alone))
            if share in ENDS:
                met[share] = own
        return found, HeadPath(bare, radii, ball, met).whole() if expands else None

    def _total(self, heads: Sequence[_HeadValue]) -> BallValue:
        """Combine all heads over one ball."""
        each = [(one.value, one.form) for one in heads]
        if not self.several:
            return BallValue(heads[0].value, "one head", each)
        values = torch.tensor([one.value for one in heads], dtype=torch.float64)
        change = torch.tensor([one.change for one in heads], dtype=torch.float64)
        apart = not self.projected or self.layer.norm_output == 0.0  # outputs are concatenated
        together = {
            "sum": float(values.norm() if apart else values.sum()),
            "joint": self.joint + float(change.norm() if apart else change.sum()) + self.slack,
        }
        if self.projected:
            alone = math.hypot(*(one.alone for one in heads))
            together["projection"] = self.layer.norm_output * alone
        form = min(together, key=lambda name: together[name])
        return BallValue(together[form], form, each)


@dataclass(frozen=True)
class _HeadValue:
    """One head over a ball: best bound, form and change; also before the projection."""

    value: float
    form: str
    change: float
    alone: float


def sigma_of(
    f: Callable[[Tensor], Tensor], x: Tensor, map: Map | None = "attention", seed: int = 0
) -> TopSingular:
    """Sigma of a layer's map, or of any function (None), at ``x``, from a fixed start."""
    start = start_named(f"sigma|{map}|{seed}", x)
    op = linearise(f, x) if map is None else linearise(f, x, map=map)
    return top_singular(op, tol=1e-4, generator=start)


def check_ball(ball: str) -> None:
    """Require one of the two ball names."""
    if ball not in ("token", "frobenius"):
        raise InputError(f"`ball` should be token or frobenius. Found `{ball}`.")


def in_double(layer: Attention, head: int | None) -> DotProduct:
    """The layer, or one of its heads, in float64 on the CPU."""
    if not isinstance(layer, DotProduct):
        raise InputError(
            f"No certificate: the proof is for dot-product attention. Found "
            f"`{type(layer).__name__}`."
        )
    check_layer(layer)
    try:
        check_scores(layer)
    except NotApplicableError as why:
        raise InputError(f"No certificate: the proof does not cover this layer, {why}.") from None
    return (layer if head is None else layer.head(head)).in_double()


_OVERFLOW = "No certificate: every form overflows; choose a smaller `eps`."
_WIDE = 100.0  # multiple of sigma at X above which a note is added


@dataclass(frozen=True)
class HeadCertificate(Shown):
    """The certificate of a single head."""

    head: int  # query head
    value: float  # its certificate, as in `BallCertificate`
    # ``expansion``, or the smallest form of the mean over radii at the full radius
    form: str


@dataclass(frozen=True, repr=False)
class BallCertificate(Shown):
    """A bound on how far a layer's output moves while its input stays in a ball."""

    value: float  # ``L`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in the ball
    # ``>= sigma(X')`` for every X' in the ball, for moves of the tokens with nonzero radius; hence
    # also a bound of ``‖f(X') - f(X'')‖ / ‖X' - X''‖`` for any two points of the ball
    sigma_bound: float
    eps: float  # radius (the largest one if given per token)
    ball: BallName  # ``token`` or ``frobenius``
    relative_eps: float  # ``eps / max_i |x_i|``
    heads: tuple[HeadCertificate, ...]  # per head
    # origin of the value. Means over radii: ``one head``, or how heads were combined, ``sum``,
    # ``projection`` or ``joint``. ``expansion``: sigma at X plus a second-order bound, all heads
    # in one matrix. ``slopes``: slopes of composed parts, plus a remainder
    form: str
    sigma: float  # lower bound of sigma at X; ``upper``: with probability ``1 - delta``
    upper: float
    ratio: float  # ``value / sigma``
    note: str | None = None  # advice, or None


def certify_ball(
    layer: Attention,
    x: Float[Tensor, "n d"],
    *,
    eps: float | Tensor,
    ball: BallName = "token",
    head: int | None = None,
    map: Map = "attention",
    steps: int = 4,
    sharp: bool = True,
    sigma: tuple[float, float] | None = None,
) -> BallCertificate:
    """``L(eps)`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in the ball.

    The smaller one of ``(1/m) sum_s B(s eps / m)``, where ``B(r)`` bounds sigma over the ball of
    radius ``r`` (per head the smallest of four forms; heads combined by their sum, by the norm of
    the projection, or as a bound of the whole layer at X plus every head's change), and of a bound
    of sigma at X plus a bound of ``‖f(X') - f(X) - J(X)(X' - X)‖ / ‖X' - X‖``.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary
    embedding; up to float64 rounding.

    Args:
        eps: Radius, or one per token (ball ``token``).
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        map: ``attention``, or ``heads`` for the map before the output projection.
        steps: Number ``m`` of radii in the mean; the cost is proportional.
        sharp: Also use the row-Gram certificate at X; slow for all heads jointly.
        sigma: Lower and upper bound of sigma at X; None: measured here.

    Raises:
        InputError: If ``eps``, ``x`` or the layer is invalid, or there is no certificate: every
            form overflows, or the value exceeds 100 times sigma at X and lets the output move
            further than a mean of values can.

    Tokens at the origin with ``Q = K = V = I`` average, so sigma is 1 there:

    >>> import torch
    >>> from lipscope import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> round(certify_ball(layer, torch.zeros(3, 2), eps=0.0).value, 6)
    1.0
    """
    if steps < 1:
        raise InputError(f"`steps` should be at least 1. Found `steps = {steps}`.")
    check_ball(ball)
    own = in_double(layer, head)
    x = tokens_in_double(x, own.query.shape[1])
    radii = per_token(eps, len(x), ball)
    try:
        bound = BallLayer(own, x, map, sharp)
        shares = [s / steps for s in range(1, steps + 1)]
        found, around, alone = bound.over(radii, ball, shares)
    except NotApplicableError as error:
        raise refusal(error) from error
    except OverflowError:  # in powers of Python floats; tensors become infinite
        raise InputError(_OVERFLOW) from None
    value, last = sum(each.total for each in found) / steps, found[-1]
    if not math.isfinite(value):
        raise InputError(_OVERFLOW)
    value, form = min((value, last.form), (around, "expansion"))
    if sigma is None:
        top = sigma_of(own, x, map)
        sigma = top.sigma, top.upper
    heads = tuple(
        HeadCertificate(
            h if head is None else head,
            *min(
                (sum(each.heads[h][0] for each in found) / steps, last.heads[h][1]),
                (alone[h], "expansion"),
            ),
        )
        for h in range(own.num_heads)
    )
    made = certificate_of(x, radii, ball, value, last.total, form, sigma, heads)
    if made.note is not None:
        _refuse_if_vacuous(bound, radii, ball, value)
    return made


def certificate_of(
    x: Float[Tensor, "n d"],
    radii: Float[Tensor, " n"],
    ball: BallName,
    value: float,
    sigma_bound: float,
    form: str,
    sigma: tuple[float, float],
    heads: tuple[HeadCertificate, ...] = (),
) -> BallCertificate:
    """Combine the proved bound with the input and sigma there."""
    norm, largest = float(x.norm(dim=-1).max()), float(radii.max())
    ratio = value / sigma[0] if sigma[0] > 0 else (1.0 if value == 0 else math.inf)
    wide = f"valid, but {ratio:.3g} times sigma at X: choose a smaller `eps`"
    return BallCertificate(
        value=value,
        sigma_bound=sigma_bound,
        eps=largest,
        ball=ball,
        relative_eps=largest / norm if norm > 0 else math.inf,
        heads=heads,
        form=form,
        sigma=sigma[0],
        upper=sigma[1],
        ratio=ratio,
        note=wide if ratio > _WIDE else None,
    )


def certified_changes(
    layer: Attention,
    x: Float[Tensor, "n d"],
    sizes: Sequence[float],
    *,
    sharp: bool = True,
) -> list[float | None]:
    """``C(eps) >= ‖f(X') - f(X)‖`` for every X' in the Frobenius ball, for increasing radii.

    The smallest of ``sum_(j <= k) (eps_j - eps_(j-1)) B(eps_j)``, which bounds the integral of the
    sigma bound ``B`` along a segment; of the expansion at X times ``eps``; and of the reach of
    means of values. All three are those of `certify_ball`, for a curve instead of one radius.

    Hypotheses as for `certify_ball`, up to float64 rounding; None if there is no bound.

    Source: derived here (``docs/theory/ball-certificate.md``).

    >>> import torch
    >>> from lipscope import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> [round(c, 6) for c in certified_changes(layer, torch.zeros(3, 2), [1e-9])]
    [0.0]
    """
    own = in_double(layer, None)
    x = tokens_in_double(x, own.query.shape[1])
    try:
        bound = BallLayer(own, x, "attention", sharp)
    except NotApplicableError as error:
        raise refusal(error) from error
    found: list[float | None] = []
    along = before = 0.0
    for size in sizes:
        radii = per_token(size, len(x), "frobenius")
        reach = _output_reach(bound, radii)
        if along < reach:  # otherwise it stays above: B increases, and the reach is linear
            try:
                (inside,), around, _ = bound.over(radii, "frobenius", apart=False)
                along += (size - before) * inside.total
                straight = size * around
            except (NotApplicableError, OverflowError):
                along = straight = math.inf
            reach = min(one for one in (along, straight, reach) if not math.isnan(one))
        before = size
        found.append(reach if math.isfinite(reach) else None)
    return found


def refusal(error: NotApplicableError) -> InputError:
    """The error for a missing certificate."""
    return InputError(f"No certificate: {str(error).removeprefix('no certificate: ')}.")


def _output_reach(bound: BallLayer, radii: Tensor) -> float:
    """The largest possible move of the output, given its values.

    Row i of a head is a mean of values: ``|o'_i - o_i| <= max_j |v_j - o_i| + ‖V‖ max_j eps_j``.
    """
    wide = float(radii.max())
    rows = [c.nu.masked_fill(~c.allowed, 0.0).amax(-1) for c in bound.centres]
    pairs = zip(rows, bound.centres, strict=True)
    return sum(float((r + c.head.norm_v * wide).norm()) for r, c in pairs)


def _refuse_if_vacuous(bound: BallLayer, radii: Tensor, ball: BallName, value: float) -> None:
    """Raise if the bound allows larger moves of outputs than their values do."""
    moved = value * float(radii.max() if ball == "frobenius" else radii.norm())
    reach, wide = _output_reach(bound, radii), float(radii.max())
    if moved > reach:
        raise InputError(
            f"No certificate: within `eps = {wide:.4g}` the output could move by {moved:.3g}, "
            f"more than the {reach:.3g} that values allow at all; choose a smaller `eps`."
        )
