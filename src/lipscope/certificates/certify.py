"""Certificates over a ball around X: how far outputs can move.

Deterministic up to float64 rounding, unlike the interval of a measurement. Proofs:
``docs/theory/ball-certificate.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.attention import Map as Part
from lipscope.certificates.balls import BallLayer, in_double, tokens_of
from lipscope.certificates.read_out import check_ball
from lipscope.certificates.search import Search, sigma_of
from lipscope.errors import InputError
from lipscope.theorems.derived.ball import per_token
from lipscope.theorems.derived.centre import BallName
from lipscope.theorems.register import NotApplicableError

_OVERFLOW = "No certificate: every form overflows; choose a smaller `eps`."
_WIDE = 100.0  # times sigma at X, from which on a certificate says so


@dataclass(frozen=True)
class HeadCertificate:
    """One head's part.

    Attributes:
        head: Query head.
        value: Its certificate, as in `BallCertificate`.
        form: ``expansion``, or the form of the mean over radii that is the smallest at the full
            radius.
    """

    head: int
    value: float
    form: str


@dataclass(frozen=True)
class BallCertificate:
    """How far a layer's output can move while its input stays in a ball.

    Attributes:
        value: ``L`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in the ball.
        sigma_bound: ``>= sigma(X')`` for every X' in the ball; hence also a bound of
            ``‖f(X') - f(X'')‖ / ‖X' - X''‖`` for any two of its points.
        eps: Radius (the largest one if per token).
        ball: ``token`` or ``frobenius``.
        relative_eps: ``eps / max_i |x_i|``.
        heads: Per head.
        form: Where the value comes from. Means over radii: ``one head``, or how heads were put
            together, ``sum``, ``projection`` or ``joint``. ``expansion``: sigma at X plus a
            bound of the second order, all heads in one matrix.
        sigma: Sigma at X, from below; ``upper``: from above, with probability 1 - 1e-6.
        ratio: ``value / sigma``.
        note: What to know, or None.
    """

    value: float
    sigma_bound: float
    eps: float
    ball: BallName
    relative_eps: float
    heads: tuple[HeadCertificate, ...]
    form: str
    sigma: float
    upper: float
    ratio: float
    note: str | None = None


def certify(
    layer: Attention,
    x: Float[Tensor, "n d"],
    *,
    eps: float | Tensor,
    ball: BallName = "token",
    head: int | None = None,
    part: Part = "attention",
    steps: int = 4,
    sharp: bool = True,
    seed: int = 0,
) -> BallCertificate:
    """``L(eps)`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in the ball.

    The lesser of ``(1/m) sum_s B(s eps / m)``, where ``B(r)`` bounds sigma over the ball of
    radius ``r`` (per head the least of four forms; heads together by their sum, by the norm of
    the projection, or as a bound of the whole layer at X plus every head's change), and of a
    bound of sigma at X plus one of ``‖f(X') - f(X) - J(X)(X' - X)‖ / ‖X' - X‖``.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary
    embedding; up to float64 rounding.

    Args:
        layer: The layer.
        x: Centre of the ball.
        eps: Radius; one per token if wanted (ball ``token``).
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        head: One query head alone, or None for all.
        part: ``attention``, or ``heads`` for the map before the output projection.
        steps: Radii ``m`` of the mean; the cost grows with it.
        sharp: Also use the row-Gram certificate at X; all heads together take long.
        seed: Of the measurement of sigma.

    Returns:
        The certificate.

    Raises:
        InputError: For an ``eps``, ``x`` or layer out of range; if there is no certificate,
            because every form overflows, or because the value exceeds 100 times sigma at X and
            would let the output move further than a mean of values can.

    Tokens at the origin with ``Q = K = V = I`` average, so sigma is 1 there:

    >>> import torch
    >>> from lipscope import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> round(certify(layer, torch.zeros(3, 2), eps=0.0).value, 6)
    1.0
    """
    if steps < 1:
        raise InputError(f"`steps` should be at least 1. Found `steps = {steps}`.")
    check_ball(ball)
    own = in_double(layer, head)
    x = tokens_of(own, x)
    radii = per_token(eps, len(x), ball)
    try:
        bound = BallLayer(own, x, part, sharp)
        found = [bound.at(radii * (s / steps), ball) for s in range(1, steps + 1)]
        around, alone = bound.around(radii, ball)
    except NotApplicableError as error:
        words = str(error).removeprefix("no certificate: ")
        raise InputError(f"No certificate: {words}.") from error
    except OverflowError:  # of a power of plain numbers; tensors become infinite
        raise InputError(_OVERFLOW) from None
    value, last = sum(each.total for each in found) / steps, found[-1]
    if not math.isfinite(value):
        raise InputError(_OVERFLOW)
    value, form = min((value, last.form), (around, "expansion"))
    top = sigma_of(own, x, part, seed)
    norm, largest = float(x.norm(dim=-1).max()), float(radii.max())
    ratio = value / top.sigma if top.sigma > 0 else (1.0 if value == 0 else math.inf)
    note = None
    if ratio > _WIDE:
        _refuse_if_vacuous(bound, radii, ball, value)
        note = f"valid, but {ratio:.3g} times sigma at X: choose a smaller `eps`"
    return BallCertificate(
        value=value,
        sigma_bound=last.total,
        eps=largest,
        ball=ball,
        relative_eps=largest / norm if norm > 0 else math.inf,
        heads=tuple(
            HeadCertificate(
                h if head is None else head,
                *min(
                    (sum(each.heads[h][0] for each in found) / steps, last.heads[h][1]),
                    (alone[h], "expansion"),
                ),
            )
            for h in range(own.num_heads)
        ),
        form=form,
        sigma=top.sigma,
        upper=top.upper,
        ratio=ratio,
        note=note,
    )


def _refuse_if_vacuous(bound: BallLayer, radii: Tensor, ball: BallName, value: float) -> None:
    """Raise where the bound lets outputs move further than their values let them.

    Row i of a head is a mean of values: ``|o'_i - o_i| <= max_j |v_j - o_i| + ‖V‖ max_j eps_j``.
    """
    moved = value * float(radii.max() if ball == "frobenius" else radii.norm())
    rows = [c.nu.masked_fill(~c.allowed, 0.0).amax(-1) for c in bound.centres]
    wide = float(radii.max())
    sizes = [float((r + c.norm_v * wide).norm()) for r, c in zip(rows, bound.centres, strict=True)]
    if moved >= sum(sizes):
        raise InputError(
            f"No certificate: within `eps = {wide:.4g}` the output could move by {moved:.3g}, "
            f"more than the {sum(sizes):.3g} that values allow at all; choose a smaller `eps`."
        )


@dataclass(frozen=True)
class Attack:
    """The worst that was found inside a ball; what a certificate must exceed.

    Attributes:
        ratio: Largest ``‖f(X') - f(X)‖ / ‖X' - X‖`` found.
        sigma: Largest sigma found inside the ball.
        worst: The X' of ``ratio``.
        attempts: Random points and ascents tried.
    """

    ratio: float
    sigma: float
    worst: Tensor
    attempts: int


def attack_in_ball(
    layer: Attention,
    x: Float[Tensor, "n d"],
    eps: float | Tensor,
    *,
    ball: BallName = "token",
    head: int | None = None,
    part: Part = "attention",
    random: int = 20,
    ascents: int = 4,
    steps: int = 30,
    seed: int = 0,
) -> Attack:
    """Random and gradient-ascent attempts to exceed a certificate inside its ball.

    Ascents maximise ``‖f(X') - f(X)‖ / ‖X' - X‖`` and ``<u, J(X') v>``, with ``u, v`` the top
    singular vectors at the current point; every iterate is put back into the ball.

    Holds for any layer; its values are lower ones, found and not proved largest.

    Args:
        layer: The layer.
        x: Centre.
        eps: Radius, as in `certify`.
        ball: ``token`` or ``frobenius``.
        head: One head alone, or None.
        part: ``attention`` or ``heads``.
        random: Random points.
        ascents: Ascents of each kind; the first start along the top singular vector,
            towards both sides.
        steps: Steps of each.
        seed: Of the random points.

    Returns:
        The largest values found.

    Raises:
        InputError: As `certify` does.
    """
    check_ball(ball)
    own = in_double(layer, head)
    x = tokens_of(own, x)
    radii = per_token(eps, len(x), ball)
    search = Search(own, x, radii, ball, part, seed)
    top = sigma_of(own, x, part, seed)
    search.sigma = top.sigma
    if not bool((radii > 0).any()):
        return Attack(top.sigma, top.sigma, x, 0)
    search.see(search.inside(top.v * radii.max() * 1e-3))  # sigma itself, nearly
    for start in (top.v, -top.v):
        search.see(search.to_edge(start))
    for _ in range(random):
        search.see(search.to_edge(search.draw()))
    for i in range(ascents):
        search.climb_ratio([top.v, -top.v][i] if i < 2 else search.draw(), steps)
        search.climb_sigma(top.v if i == 0 else search.draw(), steps)
    return Attack(search.ratio, search.sigma, search.worst, random + 2 * ascents + 3)
