"""The decision of a whole network: how far tokens may move before it can change.

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
from lipscope.display import Shown
from lipscope.errors import InputError, check_finite_numbers, shown
from lipscope.linalg import few_threads
from lipscope.models import Network, Norm
from lipscope.theorems import NotApplicableError

DecisionBall = Literal["joint", "token", "each"]
DecisionBound = Literal["expansion", "moments"]
_ANCHORS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.98)  # of the way to where a descent ends
_FIRST = (7, 2)  # of them: one, or one beside it, is best where little bends, the other elsewhere
_NEAR = (0.25, 0.1)  # of the margin: what an anchor may gain on another, at first and later
_STARTS, _STEPS = 2, 25  # of the descent to an anchor
_AGAIN = 8  # steps of a later one, from where that of another radius ended
_FLIPS, _DOUBLINGS = 6, 6  # of the attack: its starts, and how often it goes further out
_SLACK = 1e-9  # float64 rounding of sums of this size, with room
_ROUNDING = 1e-12  # of scores whose difference is small, relative to the largest
_CLOSE = 1.02  # largest quotient of a radius that failed and one that holds
_TRIES = 16
_START = (0.85, 0.5)  # of what an attack or first order needs, as much bends: the first radius
_SHORT = 0.996  # of where the next radius is expected to fail
_POWER, _POWERS = 4.0, (2.0, 30.0)  # of the radius, that what is lost grows with: first, and others
_CLIFF = 4.0  # of the margin: what is lost beyond it grows faster than a power that holds below
_STEEP, _EARLY = 12.0, 2  # of the radius, that it then grows with as a rule; tries that rely on it
_SMALL = 512  # coordinates of a stream
_FAR = 1e3  # times the input: no larger move is tried
_MOST = 4 * 2**30  # bytes that a certificate may take
_MATRICES = 16  # of all coordinates that move by all that are held at a time


@dataclass(frozen=True, kw_only=True, repr=False)
class NetworkCertificate(Shown):
    """A decision and the radius within which it is certified not to change."""

    decision: int  # class with the largest score at the centre
    decision_name: str
    rival: int  # the class that limits the radius
    rival_name: str
    margin: float  # difference of their scores at the centre
    slope: float  # norm of that margin's gradient, in the norm dual to the ball's
    # ``joint``: all moving tokens together; ``token``: one of them; ``each``: every one of them by
    # at most the radius
    ball: DecisionBall
    tokens: tuple[int, ...]  # indices of those that may move
    # within it no move changes the decision; 0 where nothing is proved, infinite where the scores
    # do not depend on the input
    radius: float
    first_order: float  # ``margin / slope``: where a linear margin would end, not a bound
    attack: float | None  # size of the smallest move found that changes the decision, or None
    seconds: float
    # what proved it: ``expansion``, to second order all over the ball, or ``moments``, of the rows
    # of an attention layer by itself
    bound: DecisionBound = "expansion"
    note: str | None = None  # what to know, or None
    stopped: bool = False  # interrupted: a larger radius may be provable


class _Question:
    """A network at a centre, its decision, and tokens that move."""

    def __init__(
        self,
        net: Network,
        x: Float[Tensor, "n d"],
        ball: DecisionBall,
        tokens: Tensor,
        progress: Callable[[str], None],
    ) -> None:
        self.ball: DecisionBall = ball
        self.progress, self.line = progress, ""
        self.net, self.x, self.tokens = net, x, tokens
        scores = net(x)
        self.label = int(scores.argmax())
        self.rounding = _ROUNDING * float(torch.maximum(scores.abs(), net.bias.abs()).max())
        self.margins = scores[self.label] - scores
        self.others = [c for c in range(len(scores)) if c != self.label]
        self.count = int(tokens.sum())
        # one Frobenius ball holds the product of balls
        self.wide = self.count**0.5 if ball == "each" else 1.0
        apart = self._gradients().norm(dim=-1)
        self.slopes = apart.sum(-1) if ball == "each" else apart.norm(dim=-1)
        quotient = self.margins / self.slopes.clamp_min(1e-300)
        self.others.sort(key=lambda c: float(quotient[c]))
        self.first_order = float(quotient[self.others[0]])
        self.far = _FAR * float(x.norm() + 1)
        norms = (one.norm for one in net.branches)
        self.bends = _blocks(net) > 1 or any(isinstance(n, Norm) and n.scaled for n in norms)
        self.gaps = dict[int, dict[int, float]]()  # by rival: how far anchors were below the best

    def tell(self, line: str | None = None) -> None:
        """Progress: a line, or the last one again, so that whoever is told may stop the search."""
        self.line = self.line if line is None else line
        self.progress(self.line)

    def _gradients(self) -> Float[Tensor, "c s d"]:
        """Of all margins, by tokens that move."""
        head, few = self.net.head, len(self.net.head) <= self.net.head.shape[1]
        found = jacobian(self.net if few else self.net.pooled, self.x)[:, self.tokens]
        if few:
            return found[self.label] - found
        return torch.einsum("cd,dse->cse", head[self.label] - head, found)

    @cached_property
    def bounds(self) -> NetworkBall:
        """What is bounded all over a ball."""
        return NetworkBall(self.net, self.x, self.tokens)

    def by_moments(self) -> tuple[float, int]:
        """Radius and rival by moments of rows, where attention is alone: of all tokens."""
        try:
            return read_out_radius(
                self.net, self.x, "token" if self.ball == "each" else "frobenius"
            )
        except NotApplicableError:
            return 0.0, self.others[0]

    def project(self, e: Float[Tensor, "b s d"], radius: float) -> Tensor:
        """Moves back in the ball."""
        return e * (radius / self._sizes(e).clamp_min(1e-300)).clamp_max(1)

    def _sizes(self, e: Float[Tensor, "b s d"]) -> Tensor:
        """Norms that the ball bounds: of every token, or of all together."""
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
        """The least margin found in the ball, and the move; normalised gradient steps."""
        generator = torch.Generator().manual_seed(rival)

        def margins(e: Tensor) -> Tensor:
            scores = self.net(self._moved(e))
            return scores[..., self.label] - scores[..., rival]

        size = starts, self.count, self.x.shape[1]
        e = torch.randn(size, generator=generator, dtype=self.x.dtype)
        e[0] = 0.0
        if start is not None:
            e[-1] = start.view(size[1:])
        e = self.project(e, radius)
        for k in range(steps):
            self.tell()
            e = e.detach().requires_grad_(True)
            (g,) = torch.autograd.grad(margins(e).sum(), e)
            step = radius * 0.5 * 0.02 ** (k / steps)
            e = self.project(e.detach() - step * g / (self._sizes(g) + 1e-300), radius)
        found = margins(e)
        found = found.where(found.isfinite(), math.inf)  # what overflows is no flip
        best = int(found.argmin())
        return float(found[best]), e[best].flatten()

    def _moved(self, e: Float[Tensor, "b s d"]) -> Float[Tensor, "b n d"]:
        index = self.tokens.nonzero()[:, 0]
        return self.x.expand(len(e), -1, -1).index_add(1, index, e)

    def smallest_flip(self, rival: int, above: float) -> float | None:
        """Size of the smallest move found that lets a rival win; none below ``above``."""
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
            # where a line from the margin to the least one found would end, or the middle
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
        """A lower bound of a margin in the ball that was grown: the first above 0, or the best."""
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
            apart = [one for one in _FIRST if abs(one - best) > 1]  # as radii grow they turn
            ahead = [
                one
                for one in dict.fromkeys((*_FIRST, *sides, *gaps))
                if one not in tried and (one in apart or most - gaps.get(one, 0.0) > -near)
            ]
        if math.isfinite(most):  # those that were not tried keep their distance to the best
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

    For every rival a quadratic minorant of the margin ``m``, anchored at a point of the ball where
    a descent led, ``m(x) >= m(x_1) - gap + <g, f> + <f, B f> / 2``, is minimised exactly over the
    ball. Radii below what an attack needs are tried, at most 16, until one that fails is within 2 %
    of one that holds, or is expected to be within 1 %. For attention by itself `read_out_radius`
    where that is more, or where the expansion would need more than 4 GB.

    Holds for networks of `lipscope.models.Network`; in float64, a relative ``1e-9`` is taken off
    for rounding. Memory grows like ``n m² + n³ d m``, time like ``(n d)³`` and linearly with depth,
    where ``m`` counts the coordinates that move.

    Args:
        ball: ``joint``, ``token`` or ``each``.
        tokens: Which tokens may move; all if None.
        progress: Called with a line now and then.
        before: What was proved of the same question until it was interrupted.

    Returns:
        The certificate; interrupted from the keyboard, with what is proved so far.

    Raises:
        InputError: For tokens that do not fit the ball, one class alone, attention whose scores are
            no inner products of affine maps of tokens, or where 4 GB would not do.

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
        asked = _Question(net, x.double(), ball, tokens, progress)
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
    """What is known so far: all of it holds at any time."""

    rival: int  # the class that limits the radius
    radius: float = 0.0
    attack: float | None = None  # the smallest flip
    bound: DecisionBound = "expansion"
    note: str | None = None
    stopped: bool = False

    def flips_at(self, size: float | None) -> None:
        """Note an attack."""
        known = (one for one in (self.attack, size) if one is not None)
        self.attack = min(known, default=None)


def check_memory(net: Network, shape: tuple[int, ...], count: int, ball: DecisionBall) -> None:
    """Refuse what would not fit; attention by itself always does, by moments of its rows."""
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
    """Of the expansion: above one layer of attention all coordinates move."""
    n, d = shape
    rows = n if _blocks(net) > 1 else count
    moving = rows * d
    # keys of pairs, for every row whose query moves
    pairs = 2 * rows * n**2 * d * moving if _blocks(net) else 0
    return 8 * (moving**2 * (_MATRICES + n) + pairs + len(net.head) * n * d)


def _search(asked: _Question, found: _Found) -> None:
    """Find the radius, the rival that limits it, the smallest flip, and what proved it."""
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
    asked.tell(f"certified {found.radius:.4g}, looking for an attack")
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
    lost = dict[float, float]()  # of the margin, beyond a line that ends where the attack does
    for k in range(_TRIES):
        if not size > found.radius or (found.radius > 0 and high / found.radius < _CLOSE):
            break
        asked.tell(f"certified {found.radius:.4g}, trying {size:.4g}")
        least, rival = _least(asked, found, size, moves)
        lost[size] = max(1 - size / end - least / float(asked.margins[rival]), 1e-6)
        if least > 0:
            found.radius, found.bound = size, "expansion"
        else:
            high = min(high, size)
        found.rival = last = rival if high == end or not least > 0 else last
        if found.radius >= far:  # nothing of what decides seems to depend on these tokens
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

    Just short of where a power of the radius, through the two values of what was lost that are
    nearest to the whole margin, takes it; ``low`` where that is less than 1 % further. ``even``, or
    where that is not known: the middle. Where no bound came near the margin: first a steep power of
    what failed, then steps that grow: by 2, 4, 16, 256 and 65536.
    """
    # those before are of other anchors; what is far above the margin grows faster than a power
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
    """Where ``1 - r / end`` of the margin meets a power of ``r`` through one value of the loss."""
    low = 1e-3 * most
    for _ in range(40):
        some = (low * most) ** 0.5
        holds = 1 - some / end > lost * (some / size) ** power
        low, most = (some, most) if holds else (low, some)
    return low


def _least(
    asked: _Question, known: _Found, radius: float, moves: dict[int, Tensor]
) -> tuple[float, int]:
    """The least lower bound of a margin within a radius, as far as it matters, and its rival."""
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
