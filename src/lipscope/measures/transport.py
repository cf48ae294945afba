"""Exact Wasserstein distances between token measures, Sinkhorn divergence, Lipschitz ratios."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, check_layer
from lipscope.display import Shown
from lipscope.errors import (
    InputError,
    check_count,
    check_positive,
    check_tokens,
    install,
    shown,
)
from lipscope.linalg import start_named
from lipscope.measures.mean_field import TokenMeasure, check_measure, push_forward, token_map

Method = Literal["sorting", "assignment", "network simplex"]

_LARGEST = 2**26  # maximum size of a cost matrix: half a gibibyte
_GAP = 1e-9  # accepted duality gap of a plan, relative to the largest cost
_ROOM = 10  # costs above this factor, times the number of atoms and the plan's cost, are cut
_FAR = 100  # further factor above which a largest cost hides the plan's cost
_SEEN = 1e-16  # relative costs below it are zero to a solver
_DUST = 4e-16  # smaller masses are rounding of the weights and would move far for nothing
_MARGINAL = 1e-9  # tolerance of Sinkhorn's iteration
_STEPS = 10**8  # of the network simplex
_NOT_EXACT = "is not known: the network simplex ended with"


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """An optimal transport plan."""

    rows: Tensor  # atoms of the first measure, ``(k,)``
    columns: Tensor  # atoms of the second, ``(k,)``
    mass: Tensor  # transported mass, ``(k,)``, positive
    method: Method  # algorithm


def wasserstein(mu: TokenMeasure, nu: TokenMeasure, *, p: float = 2.0) -> Tensor:
    """``W_p(μ, ν) = ( min_π Σ_ij π_ij |x_i - y_j|^p )^(1/p)``, exact, differentiable in the points.

    Sorting in one dimension, an assignment for equal numbers of equal weights, otherwise the
    network simplex of POT, verified by its dual. Positions are ignored; see
    `conditional_distance`.

    The gradient is taken at the computed plan: that of W_p if the plan is unique (almost
    everywhere), otherwise a generalised gradient. At distance zero it is 0.

    Holds for finite ``p >= 1`` and any two measures of equal width; beyond one dimension, up to
    2^26 pairs of atoms.

    Source: Definition A.2 of [castin2024]; the network simplex is that of [flamary2021].

    >>> mu, nu = TokenMeasure(torch.zeros(2, 3)), TokenMeasure(torch.ones(1, 3))
    >>> round(float(wasserstein(mu, nu)) ** 2, 12)
    3.0
    """
    plan = optimal_plan(mu, nu, p=p)
    return _power_mean(plan.mass, mu.points[plan.rows] - nu.points[plan.columns], p)


def optimal_plan(mu: TokenMeasure, nu: TokenMeasure, *, p: float = 2.0) -> Plan:
    """The plan of `wasserstein`."""
    _check_pair(mu, nu, p)
    a, b = mu.weights, nu.weights
    n, m = mu.num_tokens, nu.num_tokens
    alike = n == m and torch.equal(a, a[:1].expand(n)) and torch.equal(a, b)
    if mu.points.shape[1] == 1:
        return _sorted_plan(mu, nu, alike)
    if n * m > _LARGEST:
        raise InputError(
            f"The two measures should have at most {_LARGEST:,} pairs of atoms. Found {n * m:,}; "
            "use fewer tokens, or one dimension."
        )
    sources, targets = a.nonzero()[:, 0], b.nonzero()[:, 0]
    apart = _distances(mu.points.detach()[sources], nu.points.detach()[targets])
    if alike:
        from scipy.optimize import linear_sum_assignment

        def assigned(costs: Tensor) -> Plan:
            rows, columns = map(torch.from_numpy, linear_sum_assignment(costs.numpy()))
            return Plan(rows, columns, a.clone(), "assignment")

        return _at_its_scale(assigned, apart, p)
    plan = _at_its_scale(lambda costs: _simplex(a[sources], b[targets], costs, p), apart, p)
    return Plan(sources[plan.rows], targets[plan.columns], plan.mass, plan.method)


def conditional_distance(mu: TokenMeasure, nu: TokenMeasure, *, p: float = 2.0) -> Tensor:
    """``d_p(μ, ν) = ( ∫ W_p(μ^s, ν^s)^p dθ(s) )^(1/p)``; infinite if positions differ.

    ``θ`` is the common marginal of the positions, ``μ^s`` the tokens at position s. Mass keeps its
    position, as in transport with prohibitive cost across positions. Never below ``W_p`` of the
    tokens alone.

    Positions are compared exactly, their masses up to rounding (1e-12). The exponent is that of
    ``W_p``; the paper's formula was read for p = 2.

    Source: Definition 4.1 of [castin2024].
    """
    _check_pair(mu, nu, p)
    if mu.positions is None or nu.positions is None:
        raise InputError("Both measures should have positions. Found one without.")
    held = [(mu.positions, mu.weights), (nu.positions, nu.weights)]
    places = torch.unique(torch.cat([s for s, _ in held]))
    masses = [
        torch.zeros_like(places).index_add_(0, torch.searchsorted(places, s), w) for s, w in held
    ]
    if not torch.allclose(*masses, rtol=1e-12, atol=1e-12):
        return torch.tensor(math.inf, dtype=torch.float64)
    mass, moves = [], []
    for place, share in zip(places, masses[0], strict=True):
        if share > 0:
            first, second = _at_position(mu, place), _at_position(nu, place)
            plan = optimal_plan(first, second, p=p)
            mass.append(share * plan.mass)
            moves.append(first.points[plan.rows] - second.points[plan.columns])
    return _power_mean(torch.cat(mass), torch.cat(moves), p)


def sinkhorn_divergence(
    mu: TokenMeasure, nu: TokenMeasure, *, epsilon: float, max_steps: int = 10_000
) -> Tensor:
    """``S_ε = OT_ε(μ, ν) - (OT_ε(μ, μ) + OT_ε(ν, ν)) / 2`` for the cost ``|x - y|²``.

    ``OT_ε = min_π <C, π> + ε KL(π | μ ⊗ ν)``. Not a distance: it violates the triangle inequality;
    it tends to ``W_2²`` as ε → 0. Differentiable in the points. Log-domain Sinkhorn iteration until
    marginals are correct to 1e-9; ε in units of the cost.

    Source: [feydy2019].
    """
    _check_pair(mu, nu, 2.0)
    check_positive("epsilon", epsilon)
    check_count("max_steps", max_steps)
    cross, first, second = (
        _entropic(*pair, epsilon, max_steps) for pair in ((mu, nu), (mu, mu), (nu, nu))
    )
    return cross - (first + second) / 2


# --- costs and plans


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """``|x_i - y_j|`` from differences: expanding the square would lose small moves to rounding."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """``|x_i - y_j|`` in some unit, for points of any size."""
    size = _largest_entry(torch.cat([x, y]))
    return _apart(x / size, y / size)


def _power_mean(mass: Tensor, moves: Tensor, p: float) -> Tensor:
    """``(Σ m_k |z_k|^p)^(1/p)``, with gradients; 0 for moves of length zero."""
    size = _largest_entry(moves)
    if not bool(size.isfinite()):
        raise InputError("Points should be within the float64 range of each other. Found others.")
    squared = (moves / size).square().sum(-1)
    longest = squared.detach().max()
    apart = squared > 0
    if not bool(apart.any()):
        return squared.sum() * 0.0
    share = torch.where(apart, squared / longest, 1.0)
    total = (mass * torch.where(apart, share.pow(p / 2), 0.0)).sum()
    return size * longest.sqrt() * total.pow(1 / p)


def _largest_entry(x: Tensor) -> Tensor:
    """The largest entry, for scaling."""
    size = x.detach().abs().max()
    return torch.where(size > 0, size, 1.0)


def _sorted_plan(mu: TokenMeasure, nu: TokenMeasure, alike: bool) -> Plan:
    """The monotone coupling: optimal for every p >= 1 on the line."""
    i, j = (one.points.detach().flatten().argsort(stable=True) for one in (mu, nu))
    if alike:
        return Plan(i, j, mu.weights.clone(), "sorting")
    up, down = mu.weights[i].cumsum(0), nu.weights[j].cumsum(0)
    up[-1] = down[-1] = 1.0  # both end at 1 up to rounding
    ends = torch.cat([up, down]).sort().values
    mass = ends.diff(prepend=ends.new_zeros(1))
    middle = ends - mass / 2
    rows = torch.searchsorted(up, middle).clamp_max(len(up) - 1)
    columns = torch.searchsorted(down, middle).clamp_max(len(down) - 1)
    kept = mass > _DUST * len(mass)
    return Plan(i[rows[kept]], j[columns[kept]], mass[kept], "sorting")


def _at_its_scale(find: Callable[[Tensor], Plan], apart: Tensor, p: float) -> Plan:
    """The plan from costs truncated where they exceed the plan's cost by far.

    Solvers are accurate relative to the largest cost. Truncation raises no cost, so a plan that is
    optimal with it and uses no truncated pair is optimal. If it uses one, a tiny mass moves far,
    and the previous plan is as accurate as the solver.
    """
    reach, room = float(apart.max()) or 1.0, _ROOM * sum(apart.shape)
    before, share = None, 0.0
    while True:
        plan = find((apart / reach).clamp_max(1.0).pow(p))
        moved = apart[plan.rows, plan.columns]
        if before is not None and bool((moved > reach).any()):
            if share < _SEEN:
                raise InputError(f"W_{p:g} {_NOT_EXACT} costs too far apart; use a smaller `p`.")
            return before
        enough = float(_power_mean(plan.mass, moved[:, None], p))
        before, share = plan, (enough / reach) ** p
        enough *= room ** (1 / p)
        if not 0 < enough * _FAR ** (1 / p) < reach:
            return plan
        reach = enough


def _simplex(a: Tensor, b: Tensor, costs: Tensor, p: float) -> Plan:
    with warnings.catch_warnings():
        # POT's message is also in the log; some of its files are not written for Python 3.12.
        warnings.simplefilter("ignore")
        try:
            from ot.lp import emd
        except ImportError as problem:
            raise InputError(
                "Transport between measures of unequal weights needs the package POT; run "
                f"`{install('measures')}` in the folder of lipscope."
            ) from problem
        plan, log = emd(a.numpy(), b.numpy(), costs.numpy(), numItermax=_STEPS, log=True)
    if log["warning"] is not None:
        raise InputError(f"W_{p:g} {_NOT_EXACT} `{log['warning']}`; use fewer or equal weights.")
    _check_optimal(a.numpy(), b.numpy(), costs.numpy(), plan, log, p)
    found = torch.from_numpy(plan)
    rows, columns = (found > _DUST).nonzero(as_tuple=True)
    return Plan(rows, columns, found[rows, columns], "network simplex")


def _check_optimal(
    a: np.ndarray, b: np.ndarray, costs: np.ndarray, plan: np.ndarray, log: dict, p: float
) -> None:
    """Refuse a plan with wrong marginals, or whose optimality weak duality does not prove."""
    off = max(np.abs(plan.sum(1) - a).max(), np.abs(plan.sum(0) - b).max())
    # Lowered by their violation, the potentials are feasible: their value is a lower bound.
    u, v = log["u"], log["v"]
    excess = max(float((u[:, None] + v - costs).max()), 0.0)
    gap = float((plan * costs).sum()) - (float(a @ u + b @ v) - excess)
    if not (off <= _GAP and gap <= _GAP):
        raise InputError(
            f"W_{p:g} {_NOT_EXACT} a plan that may be {gap:.2g} of the largest cost too dear; use "
            "fewer or equal weights."
        )


def _at_position(mu: TokenMeasure, place: Tensor) -> TokenMeasure:
    """The tokens at one position, as a measure."""
    assert mu.positions is not None
    here = mu.positions == place
    weights = mu.weights[here]
    return TokenMeasure(mu.points[here], weights / weights.sum())


def _entropic(mu: TokenMeasure, nu: TokenMeasure, epsilon: float, max_steps: int) -> Tensor:
    """``OT_ε``, whose derivative is that of ``<C, π>`` at the optimal π."""
    a, b = (one.weights.log() for one in (mu, nu))
    costs = (mu.points[:, None] - nu.points).square().sum(-1)
    c = costs.detach() / epsilon
    g, off = torch.zeros_like(b), math.inf
    for _ in range(max_steps):
        f = -torch.logsumexp(g + b - c, 1)
        # Damped steps are far faster if both measures, and so both potentials, are equal.
        new = (g + f) / 2 if mu is nu else -torch.logsumexp((f + a)[:, None] - c, 0)
        # The change of the potentials measures the error of the marginals of the old ones.
        off = float(((g - new).expm1().abs() * nu.weights).sum())
        g = new
        if off <= _MARGINAL:
            break
    else:
        raise InputError(
            f"Sinkhorn's iteration should end within {max_steps:,} steps. Found marginals that "
            f"are {off:.2g} off; raise `epsilon = {epsilon:g}`."
        )
    f = g if mu is nu else -torch.logsumexp(g + b - c, 1)
    plan = ((f + a)[:, None] + g + b - c).exp()
    lost = float((plan.sum(0) - nu.weights).abs().sum())
    if not lost <= 10 * _MARGINAL:  # potentials so large that rounding swallows a step
        raise InputError(
            "Sinkhorn's iteration should end with the right marginals. Found rounding errors of "
            f"{lost:.2g}; raise `epsilon = {epsilon:g}`."
        )
    value = epsilon * (mu.weights @ f + nu.weights @ g)
    through = (plan * costs).sum()
    return value + through - through.detach()


def _check_pair(mu: TokenMeasure, nu: TokenMeasure, p: float) -> None:
    if not (isinstance(mu, TokenMeasure) and isinstance(nu, TokenMeasure)):
        raise InputError("Two of `TokenMeasure` should be given. Found something else.")
    if mu.points.shape[1] != nu.points.shape[1]:
        raise InputError(
            "Both measures should have tokens of one width. Found "
            f"{mu.points.shape[1]} and {nu.points.shape[1]}."
        )
    if isinstance(p, bool) or not isinstance(p, Real) or not 1 <= p < math.inf:
        raise InputError(f"`p` should be finite and at least 1. Found `p = {p!r}`.")


# --- Lipschitz ratios: search, limits, and tiny masses moved far

_NEAR = 1e-4  # smallest distance of two measures in a search, relative to the radius


def lipschitz_ratio(
    layer: Attention, mu: TokenMeasure, nu: TokenMeasure, *, p: float = 2.0
) -> float:
    """``W_p(F(μ), F(ν)) / W_p(μ, ν)``, for a causal layer in the conditional distance."""
    check_layer(layer)
    before = _distance(layer, mu, nu, p)
    if not 0 < before < float("inf"):
        raise InputError(
            "The two measures should be at a positive and finite distance. Found "
            f"{before}: they are equal, or their positions differ."
        )
    image, other = (push_forward(layer, one) for one in (mu, nu))
    return _distance(layer, image, other, p) / before


def _distance(layer: Attention, mu: TokenMeasure, nu: TokenMeasure, p: float) -> float:
    """The distance used for a layer."""
    return float((conditional_distance if layer.causal else wasserstein)(mu, nu, p=p))


@dataclass(frozen=True, eq=False, repr=False)
class Worst(Shown):
    """The largest ratio that a search found."""

    ratio: float
    mu: TokenMeasure
    nu: TokenMeasure


def search_ratio(
    layer: Attention,
    *,
    radius: float,
    num_atoms: int = 3,
    steps: int = 1000,
    starts: int = 4,
) -> Worst:
    """A large Lipschitz ratio between measures in a ball, by random search.

    Random steps of random size in points, moves and weights, accepted if the ratio grows; points
    are projected onto the ball. Ratios are exact, so the result is a lower bound of the Lipschitz
    constant there, which is the supremum of the local ones (Lemma B.2). A pair has equal weights.
    """
    check_layer(layer)
    check_positive("radius", radius)
    for name, number in (("num_atoms", num_atoms), ("starts", starts)):
        check_count(name, number)
    check_count("steps", steps, least=0)
    layer = layer.in_double()
    found = [
        _search_pair(layer, radius, num_atoms, steps, start_named(f"ratio|0|{i}"))
        for i in range(starts)
    ]
    return max(found, key=lambda one: one.ratio)


def tiny_mass_gain(
    layer: Attention, mu: TokenMeasure, targets: Float[Tensor, "k d"]
) -> Float[Tensor, "n k"]:
    """``lim W_2(F(ν_ε), F(μ)) / W_2(ν_ε, μ)``, ``ν_ε = μ + ε (δ_y - δ_(x_i))``, as ε → 0.

    The limit is ``√( c_F(i, y) / c(i, y) )``: ``c`` is the least sum of squared lengths over
    chains from ``x_i`` to ``y`` through atoms, ``c_F`` the same for their images under ``Γ_μ``.
    It bounds the local Lipschitz constant of ``F`` at μ in ``W_2`` from below, for any ``y``; near
    ``x_i`` it is the effect of splitting. All weights are positive, all points distinct.

    Source: derived here (``docs/theory/splitting.md``).
    """
    check_layer(layer)
    check_measure(mu)
    if layer.causal:
        raise InputError("not available: a causal layer moves mass within its position only.")
    if not bool((mu.weights > 0).all()):
        raise InputError("`mu` should have positive weights. Found an atom without; leave it out.")
    x = mu.points.detach()
    check_tokens("targets", targets, x.shape[1])
    y = targets.to(x)
    images, ends = token_map(layer, mu, x), token_map(layer, mu, y)
    into, out = _chain_costs(x, y), _chain_costs(images, ends)
    return torch.where(into > 0, out / into.where(into > 0, torch.ones(())), 0.0).sqrt()


def tiny_mass_ratio(
    layer: Attention, mu: TokenMeasure, atom: int, target: Float[Tensor, " d"], *, mass: float
) -> float:
    """The ratio of `tiny_mass_gain` before its limit: exact transport of ``mass`` from an atom."""
    check_measure(mu)
    if isinstance(atom, bool) or not isinstance(atom, Integral) or not 0 <= atom < len(mu.weights):
        raise InputError(
            f"`atom` should be between 0 and {len(mu.weights) - 1}. Found `atom = {shown(atom)}`."
        )
    target = target[None] if isinstance(target, Tensor) else target
    check_tokens("target", target, mu.points.shape[1])
    check_positive("mass", mass)
    if not mass < float(mu.weights[atom]):
        raise InputError(
            f"`mass` should be below the weight of the atom, {float(mu.weights[atom]):.4g}. "
            f"Found `mass = {mass}`."
        )
    weights = torch.cat([mu.weights, mu.weights.new_tensor([mass])])
    weights[atom] -= mass
    points = torch.cat([mu.points, target.to(mu.points)])
    return lipschitz_ratio(layer, mu, TokenMeasure(points, weights))


def _chain_costs(atoms: Tensor, targets: Tensor) -> Tensor:
    """Least sums of squared lengths over chains from each atom to each target, ``(n, k)``."""
    between = _apart(atoms, atoms).square()
    for k in range(len(atoms)):
        between = torch.minimum(between, between[:, k, None] + between[k])
    last = _apart(atoms, targets).square()
    return (between[:, :, None] + last).amin(1)


def _search_pair(
    layer: Attention, radius: float, n: int, steps: int, gen: torch.Generator
) -> Worst:
    d = layer.query.shape[1]
    positions = torch.arange(1, n + 1, dtype=torch.float64) / n if layer.causal else None

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def pair(state: tuple[Tensor, Tensor, Tensor]) -> tuple[TokenMeasure, TokenMeasure]:
        first, move, logits = state
        weights = logits.softmax(0)
        ends = (in_ball(first), in_ball(first + move))
        mu, nu = (TokenMeasure(x, weights, positions) for x in ends)
        return mu, nu

    def in_ball(x: Tensor) -> Tensor:
        return x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(radius))

    def value(state: tuple[Tensor, Tensor, Tensor]) -> float:
        mu, nu = pair(state)
        before = _distance(layer, mu, nu, 2.0)
        if before <= _NEAR * radius:  # the ratio would be dominated by rounding
            return 0.0
        return _distance(layer, push_forward(layer, mu), push_forward(layer, nu), 2.0) / before

    state = (radius * normal(n, d), 0.3 * radius * normal(n, d), 2.0 * normal(n))
    best, size = value(state), 0.3
    for _ in range(steps):
        scale = size * 10 ** float(normal(1))
        first, move, logits = state
        far = move.norm(dim=-1, keepdim=True) + 1e-6 * radius
        trial = (
            first + scale * radius * normal(n, d),
            move + scale * far * normal(n, d),
            logits + scale * normal(n),
        )
        tried = value(trial)
        if tried > best:
            best, state = tried, trial
    return Worst(best, *pair(state))
