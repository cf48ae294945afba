"""Certified radius of a whole network's decision.

Deterministic: exact derivatives at the centre, remainders bounded over the ball, in float64.
Derived here; proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.attention import DotProduct
from lipscope.certificates.forms import OutOfReachError, jacobian
from lipscope.certificates.margin import NetworkBall
from lipscope.certificates.read_out import attention_alone, read_out_radius
from lipscope.display import Shown, rounded_down
from lipscope.errors import InputError, check_finite_numbers, shown
from lipscope.linalg import few_threads
from lipscope.models import Network, Norm
from lipscope.theorems import NotApplicableError

DecisionBall = Literal["joint", "token", "each"]
DecisionBound = Literal["expansion", "moments"]
_ANCHORS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.98)  # fractions of the move found by descent
_FIRST = (7, 2)  # first anchors: 7 or its neighbour is best with little curvature, else 2
_NEAR = (0.25, 0.1)  # relative to the margin: possible gain of another anchor, at first and later
_STARTS, _STEPS = 2, 25  # of the descent to an anchor
_AGAIN = 8  # steps of later descents, started from the move at another radius
_FLIPS, _DOUBLINGS = 6, 6  # of the attack: starts, and number of radius doublings
_SLACK = 1e-9  # float64 rounding of sums of this size, with a margin
_ROUNDING = 1e-12  # of small score differences, relative to the terms of the scores
_CLOSE = 1.02  # largest ratio of the failed to the certified radius at the end
_TRIES = 16
_START = (0.85, 0.5)  # first radius relative to the attack or first order, by curvature
_SHORT = 0.996  # factor applied to the radius expected to fail
_POWER, _POWERS = 4.0, (2.0, 30.0)  # growth exponent of the loss in the radius: initial, range
_CLIFF = 4.0  # losses above this multiple of the margin grow faster than the power law
_STEEP, _EARLY = 12.0, 2  # typical exponent there; number of tries that use it
_SMALL = 512  # coordinates of a stream
_FAR = 1e3  # maximum move, relative to the input
_MOST = 4 * 2**30  # memory limit of a certificate, in bytes
_MATRICES = 16  # number of square matrices over all moving coordinates in memory


@dataclass(frozen=True, kw_only=True, repr=False)
class NetworkCertificate(Shown):
    """A decision and the radius within which it is certified not to change."""

    decision: int  # class with the largest score at the centre
    decision_name: str
    rival: int  # the class that limits the radius
    rival_name: str
    margin: float  # difference of their scores at the centre
    slope: float  # dual norm of the margin's gradient
    # ``joint``: all moving tokens together; ``token``: one of them; ``each``: all by at most
    # the radius
    ball: DecisionBall
    tokens: tuple[int, ...]  # indices of the moving tokens
    # no move within it changes the decision; 0 if nothing is proved, infinite if the scores do not
    # depend on the input
    radius: float
    first_order: float  # ``margin / slope``: the radius of a linear margin, not a bound
    attack: float | None  # norm of the smallest decision-changing move found, or None
    seconds: float
    # kind of proof: ``expansion``, second-order over the ball, or ``moments`` of the rows of a
    # single attention layer
    bound: DecisionBound = "expansion"
    note: str | None = None  # advice, or None
    stopped: bool = False  # interrupted: a larger radius may be provable


class DecisionSearch:
    """A decision at a centre: margins in balls of moves of some tokens, and their bounds."""

    def __init__(
        self,
        net: Network,
        x: Float[Tensor, "n d"],
        ball: DecisionBall,
        tokens: Tensor,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ball: DecisionBall = ball
        self.progress, self.line = progress, ""
        self.net, self.x, self.tokens = net, x, tokens
        pooled = net.pooled(x)
        scores = net.bias + pooled @ net.head.T
        self.label = int(scores.argmax())
        terms = net.bias.abs() + pooled.abs() @ net.head.abs().T
        self.rounding = _ROUNDING * float(terms.max())
        self.margins = scores[self.label] - scores
        self.others = [c for c in range(len(scores)) if c != self.label]
        self.count = int(tokens.sum())
        # a Frobenius ball that contains the product of balls
        self.wide = self.count**0.5 if ball == "each" else 1.0
        apart = self.gradients().norm(dim=-1)
        self.slopes = apart.sum(-1) if ball == "each" else apart.norm(dim=-1)
        quotient = self.margins / self.slopes.clamp_min(1e-300)
        self.others.sort(key=lambda c: float(quotient[c]))
        first = self.others[0]
        self.first_order = float(quotient[first]) if self.slopes[first] > 0 else math.inf
        self.far = _FAR * float(x.norm() + 1)
        norms = (one.norm for one in net.branches)
        self.bends = _blocks(net) > 1 or any(isinstance(n, Norm) and n.scaled for n in norms)
        self.gaps = dict[int, dict[int, float]]()  # by rival: gaps of anchors to the best one

    def tell(self, line: str | None = None) -> None:
        """Report progress: a new line, or the last one again; the callback may stop the search."""
        self.line = self.line if line is None else line
        self.progress(self.line)

    def gradients(self) -> Float[Tensor, "c s d"]:
        """Gradients of all margins in the moving tokens."""
        head, few = self.net.head, len(self.net.head) <= self.net.head.shape[1]
        found = jacobian(self.net if few else self.net.pooled, self.x)[:, self.tokens]
        if few:
            return found[self.label] - found
        return torch.einsum("cd,dse->cse", head[self.label] - head, found)

    @cached_property
    def bounds(self) -> NetworkBall:
        """Bounds over a ball."""
        return NetworkBall(self.net, self.x, self.tokens)

    def by_moments(self) -> tuple[float, int]:
        """Radius and rival from moments of rows, for a single attention layer with all tokens."""
        try:
            return read_out_radius(
                self.net, self.x, "token" if self.ball == "each" else "frobenius"
            )
        except NotApplicableError:
            return 0.0, self.others[0]

    def project(self, e: Float[Tensor, "b s d"], radius: float) -> Tensor:
        """Project moves onto the ball."""
        return e * (radius / self._sizes(e).clamp_min(1e-300)).clamp_max(1)

    def _sizes(self, e: Float[Tensor, "b s d"]) -> Tensor:
        """Norms bounded by the ball: of every token, or of all tokens jointly."""
        size = e.norm(dim=-1, keepdim=True)
        return size if self.ball == "each" else size.norm(dim=1, keepdim=True)

    def descend(
        self,
        rival: int,
        radius: float,
        start: Tensor | None = None,
        starts: int = _STARTS,
        steps: int = _STEPS,
    ) -> tuple[float, Tensor]:
        """The smallest margin found in the ball, with its move, by normalised gradient descent."""
        generator = torch.Generator().manual_seed(rival)
        size = starts, self.count, self.x.shape[1]
        e = torch.randn(size, generator=generator, dtype=self.x.dtype)
        e[0] = 0.0
        if start is not None:
            e[-1] = start.view(size[1:])
        e = self.project(e, radius)
        for k in range(steps):
            self.tell()
            e = e.detach().requires_grad_(True)
            (g,) = torch.autograd.grad(self.margin(e, rival).sum(), e)
            step = radius * 0.5 * 0.02 ** (k / steps)
            e = self.project(e.detach() - step * g / (self._sizes(g) + 1e-300), radius)
        found = self.margin(e, rival)
        found = found.where(found.isfinite(), math.inf)  # an overflow is not a flip
        best = int(found.argmin())
        return float(found[best]), e[best].flatten()

    def margin(self, e: Float[Tensor, "b s d"], rival: int) -> Float[Tensor, " b"]:
        """The margin after each of some moves."""
        index = self.tokens.nonzero()[:, 0]
        scores = self.net(self.x.expand(len(e), -1, -1).index_add(1, index, e))
        return scores[..., self.label] - scores[..., rival]

    def smallest_flip(self, rival: int, above: float) -> float | None:
        """Norm of the smallest move found that lets a rival win; none below ``above``."""
        size, low = 2 * self.first_order, above
        size = max(size if size < _FAR * self.far else self.far, 1.5 * above)
        margin, (value, move) = self.margins[rival].item(), self.descend(rival, size, None, _FLIPS)
        for _ in range(_DOUBLINGS - 1):
            if value <= 0:
                break
            size *= 2
            value, move = self.descend(rival, size, None, _FLIPS)
        if value > 0:
            return None
        found = size
        for k in range(_TRIES):
            if found <= _CLOSE * low or found <= 1e-12:
                break
            # zero of the line from the margin to the smallest one found, or the midpoint
            size = 1.005 * size / max(1 - value / margin, 1e-3)
            if k % 3 == 2:
                size = (low * found) ** 0.5 if low > 0 else found / 2
            size = min(max(size, low * _CLOSE**0.5), found / _CLOSE**0.5)
            value, e = self.descend(rival, size, move, _FLIPS, _AGAIN)
            if value <= 0:
                found, move = size, e
            else:
                low = size
        return found

    def lower(self, rival: int, move: Tensor) -> float:
        """A lower bound of a margin in the current ball: the first positive one, or the best."""
        margin, tried = float(self.margins[rival]), dict[int, float]()
        balls = self.count if self.ball == "each" else None
        gaps = self.gaps.setdefault(rival, {})
        tuned = len(gaps) > len(_FIRST)
        near, best, most = _NEAR[tuned], -1, -math.inf
        ahead = [min(gaps, key=lambda one: gaps[one]) if gaps else _FIRST[0]]
        while ahead:
            self.tell()
            found = -math.inf
            with contextlib.suppress(OutOfReachError):
                found, _ = self.bounds.lower(_ANCHORS[ahead[0]] * move, self.label, rival, balls)
                found -= _SLACK * (abs(found) + margin) + self.rounding
            tried[ahead[0]] = found / margin if math.isfinite(found) else -math.inf
            best = max(tried, key=lambda one: tried[one])
            if (most := tried[best]) > (0 if tuned else near):
                break
            sides = (one for one in (best + 1, best - 1) if 0 <= one < len(_ANCHORS))
            apart = [one for one in _FIRST if abs(one - best) > 1]  # it varies with radii
            ahead = [
                one
                for one in dict.fromkeys((*_FIRST, *sides, *gaps))
                if one not in tried and (one in apart or most - gaps.get(one, 0.0) > -near)
            ]
        if math.isfinite(most):  # untried anchors keep their gap to the best
            shift = gaps.get(best, 0.0)
            shift = shift if math.isfinite(shift) else 0.0
            gaps.update({one: gap - shift for one, gap in gaps.items()})
            gaps.update({one: most - value for one, value in tried.items()})
        return most * margin


def certify_network(
    net: Network,
    x: Float[Tensor, "n d"],
    *,
    ball: DecisionBall = "joint",
    tokens: Bool[Tensor, " n"] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    before: NetworkCertificate | None = None,
) -> NetworkCertificate:
    """The largest radius found within which ``argmax`` of a network's scores provably stays.

    For every rival a quadratic minorant of the margin ``m``, anchored at a point of the ball found
    by descent, ``m(x) >= m(x_1) - gap + <g, f> + <f, B f> / 2``, is minimised exactly over the
    ball. At most 16 radii below that of an attack are tried, until one that fails is within 2 %
    of one that holds, or is expected to be within 1 %. For a single attention layer
    `read_out_radius` is used if larger, or if the expansion would need more than 4 GB.

    Holds for networks of `lipscope.models.Network`; in float64, a relative ``1e-9`` is subtracted
    for rounding. Memory grows like ``n m² + n³ d m``, time like ``(n d)³`` and linearly with depth,
    where ``m`` is the number of moving coordinates.

    Args:
        ball: ``joint``, ``token`` or ``each``.
        tokens: Mask of the moving tokens; None: all.
        progress: Called with a progress line now and then.
        before: The certificate of an interrupted search for the same arguments.

    Returns:
        The certificate; after a keyboard interrupt, with the radius proved so far.

    Raises:
        InputError: If tokens do not fit the ball, there is a single class, scores are not inner
            products of affine maps of tokens, or 4 GB do not suffice.

    Source: derived here.
    """
    began = time.monotonic()
    tokens = torch.ones(len(x), dtype=torch.bool) if tokens is None else tokens
    if ball not in get_args(DecisionBall):
        raise InputError(f"`ball` should be joint, token or each. Found `{ball}`.")
    check_finite_numbers("x", x)
    if not isinstance(tokens, Tensor) or tokens.shape != (len(x),) or not bool(tokens.any()):
        raise InputError(
            f"`tokens` should be True for some of {len(x)} tokens. Found `{shown(tokens)}`."
        )
    if ball == "token" and int(tokens.sum()) != 1:
        raise InputError("`ball` is token: one token should be named.")
    if len(net.head) < 2:
        raise InputError("A decision should be between two classes at least. Found one score.")
    check_memory(net, x.shape, int(tokens.sum()), ball)
    with few_threads(x.numel(), _SMALL):
        asked = DecisionSearch(net, x.double(), ball, tokens, progress)
        found = _Found(asked.others[0])
        if before is not None:
            found = _Found(asked.others[0], before.radius, before.attack, before.bound)
        try:
            _search(asked, found)
        except KeyboardInterrupt:
            found.stopped, found.note = True, "interrupted: a larger radius may be provable"
    return NetworkCertificate(
        decision=asked.label,
        decision_name=net.name(asked.label),
        rival_name=net.name(found.rival),
        margin=float(asked.margins[found.rival]),
        slope=float(asked.slopes[found.rival]),
        ball=ball,
        tokens=tuple(tokens.nonzero()[:, 0].tolist()),
        first_order=asked.first_order,
        seconds=time.monotonic() - began,
        **vars(found),
    )


@dataclass
class _Found:
    """The current results, valid at any time."""

    rival: int  # the class that limits the radius
    radius: float = 0.0
    attack: float | None = None  # the smallest flip
    bound: DecisionBound = "expansion"
    note: str | None = None
    stopped: bool = False

    def flips_at(self, size: float | None) -> None:
        """Record an attack."""
        known = (one for one in (self.attack, size) if one is not None)
        self.attack = min(known, default=None)


def check_memory(net: Network, shape: tuple[int, ...], count: int, ball: DecisionBall) -> None:
    """Refuse networks that need too much memory; a single attention layer always fits."""
    needed, (n, d) = _bytes_needed(net, shape, count), shape
    if needed <= _MOST or attention_alone(net) is not None:
        return
    deep = _blocks(net) > 1
    smaller = "fewer tokens" + ("" if ball == "token" else ', `ball="token"`')
    smaller = "a shorter text, a later layer as `at_layer`" if deep else smaller
    raise InputError(
        f"A certificate should need at most 4 GB. Found about {needed / 2**30:.0f} GB for "
        f"{(n if deep else count) * d} coordinates that move and {len(net.head)} classes; ask for "
        f'{smaller}, or one layer by itself, `map="attention"`.'
    )


def _blocks(net: Network) -> int:
    return sum(isinstance(one.part, DotProduct) for one in net.branches)


def _bytes_needed(net: Network, shape: tuple[int, ...], count: int) -> int:
    """Memory of the expansion: above one layer of attention all coordinates move."""
    n, d = shape
    rows = n if _blocks(net) > 1 else count
    moving = rows * d
    # key pairs, for every row with a moving query
    pairs = 2 * rows * n**2 * d * moving if _blocks(net) else 0
    return 8 * (moving**2 * (_MATRICES + n) + pairs + len(net.head) * n * d)


def _search(asked: DecisionSearch, found: _Found) -> None:
    """Find the radius, the rival that limits it, the smallest flip, and the kind of proof."""
    if not float(min(asked.margins[c] for c in asked.others)) > asked.rounding:
        found.radius, found.attack = 0.0, 0.0
        found.note = "a tie: two classes have the same score, up to rounding"
        return
    by_moments, found.rival = asked.by_moments()
    if math.isinf(by_moments):
        found.radius, found.bound = by_moments, "moments"
        found.note = "the scores do not depend on the input"
        return
    if by_moments > found.radius:
        found.radius, found.bound = by_moments, "moments"
    asked.tell(f"certified {rounded_down(found.radius):.4g}, looking for an attack")
    limit = last = found.rival
    found.flips_at(asked.smallest_flip(limit, found.radius))
    if _bytes_needed(asked.net, tuple(asked.x.shape), asked.count) > _MOST:
        found.note = "by moments of rows alone: an expansion would take more than 4 GB"
        return
    moves: dict[int, Tensor] = {}
    end = high = math.inf if found.attack is None else found.attack
    far = asked.far if end == math.inf else end
    size = max(_START[asked.bends] * min(asked.first_order, far), found.radius * _CLOSE**0.5)
    size = high / _CLOSE**0.5 if high < 2 * found.radius else size
    lost = dict[float, float]()  # relative loss below a line that ends at the attack
    for k in range(_TRIES):
        if not size > found.radius or (found.radius > 0 and high / found.radius < _CLOSE):
            break
        asked.tell(f"certified {rounded_down(found.radius):.4g}, trying {size:.4g}")
        least, rival = _least(asked, found, size, moves)
        lost[size] = max(1 - size / end - least / float(asked.margins[rival]), 1e-6)
        if least > 0:
            found.radius, found.bound = size, "expansion"
        else:
            high = min(high, size)
        found.rival = last = rival if high == end or not least > 0 else last
        if found.radius >= far:  # the decision seems independent of these tokens
            found.note = f"no larger radius than {found.radius:.3g} was tried"
            break
        size = min(_next(found.radius, high, end, lost, k % 4 == 3), far)
    else:
        found.note = f"a larger radius may be provable: {_TRIES} were tried"
    if found.radius == 0:
        found.note = "nothing was proved at any radius that was tried"
    if last != limit:
        found.flips_at(asked.smallest_flip(last, found.radius))


def _next(low: float, high: float, end: float, lost: dict[float, float], even: bool) -> float:
    """A radius between one that holds and one that fails.

    Slightly below the prediction of a power law in the radius through the two losses nearest to
    the whole margin; ``low`` if that is less than 1 % further. The midpoint if ``even`` or without
    a prediction. If no bound came near the margin: first a steep power law, then steps by factors
    of 2, 4, 16, 256 and 65536.
    """
    # smaller radii have other anchors; losses far above the margin grow faster than the power law
    sizes = [size for size, some in lost.items() if low <= size <= high and some < _CLIFF]
    step = 2.0 if sizes else 2.0**2 ** min(max(len(lost) - 2, 0), 4)
    middle = (low * high) ** 0.5 if low > 0 else high / step
    known, cliff = lost.get(high, math.inf) < math.inf, high < end and high not in sizes
    if high < math.inf and ((even and (cliff or not known)) or not sizes):
        steep = known and len(lost) <= _EARLY
        return max(middle, _crossing(high, lost[high], _STEEP, high, end)) if steep else middle
    size, *others = sorted(sizes, key=lambda size: abs(1 - size / end - lost[size]))
    if not others and cliff and known and len(lost) <= _EARLY + 1:
        others = [high]
    power = _POWER
    if others:
        power = math.log(lost[size] / lost[others[0]]) / math.log(size / others[0])
        power = min(max(power, _POWERS[0]), _POWERS[1])
    at = max(low, _crossing(size, lost[size], power, min(high, 10 * size), end))
    if cliff:
        at = min(at, middle)
    elif others and low in sizes and at < low * _CLOSE**0.5:
        return low
    return min(max(at * _SHORT, low * _CLOSE**0.75), high / _CLOSE**0.5)


def _crossing(size: float, lost: float, power: float, most: float, end: float) -> float:
    """Where ``1 - r / end`` of the margin equals a power law in ``r`` through one loss."""
    low = 1e-3 * most
    for _ in range(40):
        some = (low * most) ** 0.5
        holds = 1 - some / end > lost * (some / size) ** power
        low, most = (some, most) if holds else (low, some)
    return low


def _least(
    asked: DecisionSearch, known: _Found, radius: float, moves: dict[int, Tensor]
) -> tuple[float, int]:
    """The smallest lower bound of a margin within a radius, as far as needed, and its rival."""
    rivals, least = asked.others, (math.inf, asked.others[0])

    def descended(rival: int) -> float:
        steps = _AGAIN if rival in moves else _STEPS
        value, moves[rival] = asked.descend(rival, radius, moves.get(rival), steps=steps)
        if value <= 0:
            known.flips_at(radius)
        return value

    ends = {rivals[0]: descended(rivals[0])}
    if ends[rivals[0]] <= 0:
        return ends[rivals[0]], rivals[0]
    if not asked.bounds.grow(radius * asked.wide):
        return -math.inf, rivals[0]
    if len(rivals) > 1:
        w = asked.net.head[asked.label] - asked.net.head
        reach = asked.bounds.reach(w) * (1 + _SLACK)
        rivals = [c for c in rivals if not float(asked.margins[c] - reach[c]) > asked.rounding]
    for rival in rivals:
        found = ends[rival] if rival in ends else descended(rival)
        if found > 0:
            found = asked.lower(rival, moves[rival])
        if not found > 0:
            return found if math.isfinite(found) else -math.inf, rival
        least = min(least, (found, rival))
    return least
