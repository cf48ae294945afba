"""Certificates over a ball around X: how far outputs can move.

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

from lipscope.attention import Attention, DotProduct, Map
from lipscope.certificates.expansion import ENDS, Channel, HeadPath, rest
from lipscope.display import Shown
from lipscope.errors import InputError
from lipscope.linalg import TopSingular, linearise, start_named, top_singular
from lipscope.theorems import (
    AskedLayer,
    Ball,
    BallName,
    HeadAt,
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
        self.layer = AskedLayer(layer, map, x=x)
        self.sharp = sharp
        self.centres = [HeadAt(head, x) for head in self.layer.heads]
        self.weighted = [weighted_heads(c) if sharp else None for c in self.centres]
        self.local = [
            min(Ball(centre, 0.0).cheap, math.inf if weighted is None else weighted.value)
            for centre, weighted in zip(self.centres, self.weighted, strict=True)
        ]
        self.several, self.projected = len(self.centres) > 1, self.layer.projected
        self.joint = row_gram_joint(self.layer.together) if sharp and self.several else math.inf
        self.resting: dict[int, float] = {}  # bounds of bare heads at X, once they are known

    @cached_property
    def slack(self) -> float:
        """What rounding may hide from a bound of all heads together at the centre."""
        return self.layer.together.slack

    @cached_property
    def bare(self) -> list[HeadAt]:
        """The heads before the output projection, if there is one."""
        assert self.layer.x is not None
        return [HeadAt(head, self.layer.x) for head in self.layer.bare]

    def over(
        self, radii: Tensor, ball: BallName, shares: Sequence[float] = (1.0,), *, apart: bool = True
    ) -> tuple[list[BallValue], float, list[float]]:
        """Bounds of sigma over the balls of shares of these radii; and around X itself.

        That is ``>= ‖f(X') - f(X)‖ / ‖X' - X‖``, sigma at X plus the rest: of the layer, infinite
        without ``sharp``, and ``apart`` of each head.
        """
        expands = self.sharp or apart or not self.several
        # balls of one head are let go before the next
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
        """One head over these balls; and its path, which meets some of them."""
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
        """All heads together, over one ball."""
        each = [(one.value, one.form) for one in heads]
        if not self.several:
            return BallValue(heads[0].value, "one head", each)
        values = torch.tensor([one.value for one in heads], dtype=torch.float64)
        change = torch.tensor([one.change for one in heads], dtype=torch.float64)
        apart = not self.projected or self.layer.norm_output == 0.0  # outputs side by side
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
    """One head over a ball: the best bound and its form, its change; and before the projection."""

    value: float
    form: str
    change: float
    alone: float


def sigma_of(
    f: Callable[[Tensor], Tensor], x: Tensor, map: Map | None = "attention", seed: int = 0
) -> TopSingular:
    """Sigma of a layer's map at ``x``, or of any function (None), from a start of its own."""
    start = start_named(f"sigma|{map}|{seed}", x)
    op = linearise(f, x) if map is None else linearise(f, x, map=map)
    return top_singular(op, tol=1e-4, generator=start)


def check_ball(ball: str) -> None:
    """Refuse other names than those of the two balls."""
    if ball not in ("token", "frobenius"):
        raise InputError(f"`ball` should be token or frobenius. Found `{ball}`.")


def in_double(layer: Attention, head: int | None) -> DotProduct:
    """The layer, or one head of it, in float64 on the CPU."""
    if not isinstance(layer, DotProduct):
        raise InputError(
            f"No certificate: the proof is for dot-product attention. Found "
            f"`{type(layer).__name__}`."
        )
    try:
        check_scores(layer)
    except NotApplicableError as why:
        raise InputError(f"No certificate: the proof does not cover this layer, {why}.") from None
    return (layer if head is None else layer.head(head)).in_double()


_OVERFLOW = "No certificate: every form overflows; choose a smaller `eps`."
_WIDE = 100.0  # times sigma at X, from which on a certificate says so


@dataclass(frozen=True)
class HeadCertificate(Shown):
    """One head's part."""

    head: int  # query head
    value: float  # its certificate, as in `BallCertificate`
    # ``expansion``, or the form of the mean over radii that is the smallest at the full radius
    form: str


@dataclass(frozen=True, repr=False)
class BallCertificate(Shown):
    """A bound on how far a layer's output moves while its input stays in a ball."""

    value: float  # ``L`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in the ball
    # ``>= sigma(X')`` for every X' in the ball, of moves of the tokens whose radius is not 0; hence
    # also a bound of ``‖f(X') - f(X'')‖ / ‖X' - X''‖`` for any two of its points
    sigma_bound: float
    eps: float  # radius (the largest one if per token)
    ball: BallName  # ``token`` or ``frobenius``
    relative_eps: float  # ``eps / max_i |x_i|``
    heads: tuple[HeadCertificate, ...]  # per head
    # where the value comes from. Means over radii: ``one head``, or how heads were put together,
    # ``sum``, ``projection`` or ``joint``. ``expansion``: sigma at X plus a bound of the second
    # order, all heads in one matrix. ``slopes``: of parts after each other, and what is left
    form: str
    sigma: float  # sigma at X, from below; ``upper``: from above, with probability ``1 - delta``
    upper: float
    ratio: float  # ``value / sigma``
    note: str | None = None  # what to know, or None


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

    The lesser of ``(1/m) sum_s B(s eps / m)``, where ``B(r)`` bounds sigma over the ball of
    radius ``r`` (per head the least of four forms; heads together by their sum, by the norm of
    the projection, or as a bound of the whole layer at X plus every head's change), and of a
    bound of sigma at X plus one of ``‖f(X') - f(X) - J(X)(X' - X)‖ / ‖X' - X‖``.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary
    embedding; up to float64 rounding.

    Args:
        eps: Radius; one per token if wanted (ball ``token``).
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        map: ``attention``, or ``heads`` for the map before the output projection.
        steps: Radii ``m`` of the mean; the cost grows with it.
        sharp: Also use the row-Gram certificate at X; all heads together take long.
        sigma: Sigma at X, from below and from above, if it was measured; measured here if None.

    Raises:
        InputError: For an ``eps``, ``x`` or layer out of range; if there is no certificate,
            because every form overflows, or because the value exceeds 100 times sigma at X and
            would let the output move further than a mean of values can.

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
    except OverflowError:  # of a power of plain numbers; tensors become infinite
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
    """What was proved, beside the input and sigma there."""
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
    """``C(eps) >= ‖f(X') - f(X)‖`` for every X' in the Frobenius ball, at sizes that rise.

    The least of ``sum_(j <= k) (eps_j - eps_(j-1)) B(eps_j)``, which is no less than the integral
    of sigma's bound ``B`` along the way; of the expansion at X times ``eps``; and of how far means
    of values reach. All three are those of `certify_ball`, for one curve instead of one radius.

    Holds for what `certify_ball` holds for, up to float64 rounding; None where that leaves nothing.

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
        if along < reach:  # else it stays above: B grows, and the reach is a line
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
    """Why there is no certificate."""
    return InputError(f"No certificate: {str(error).removeprefix('no certificate: ')}.")


def _output_reach(bound: BallLayer, radii: Tensor) -> float:
    """How far the output can move at all, by what its values are.

    Row i of a head is a mean of values: ``|o'_i - o_i| <= max_j |v_j - o_i| + ‖V‖ max_j eps_j``.
    """
    wide = float(radii.max())
    rows = [c.nu.masked_fill(~c.allowed, 0.0).amax(-1) for c in bound.centres]
    pairs = zip(rows, bound.centres, strict=True)
    return sum(float((r + c.head.norm_v * wide).norm()) for r, c in pairs)


def _refuse_if_vacuous(bound: BallLayer, radii: Tensor, ball: BallName, value: float) -> None:
    """Raise where the bound lets outputs move further than their values let them."""
    moved = value * float(radii.max() if ball == "frobenius" else radii.norm())
    reach, wide = _output_reach(bound, radii), float(radii.max())
    if moved > reach:
        raise InputError(
            f"No certificate: within `eps = {wide:.4g}` the output could move by {moved:.3g}, "
            f"more than the {reach:.3g} that values allow at all; choose a smaller `eps`."
        )
