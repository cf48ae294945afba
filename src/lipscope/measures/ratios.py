"""Lipschitz ratios between measures: their search, their limits, and tiny masses moved far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.display import Shown
from lipscope.errors import InputError, check_count, check_positive, shown
from lipscope.linalg import start_named
from lipscope.measures.mean_field import push_forward, token_map
from lipscope.measures.tokens import TokenMeasure
from lipscope.measures.transport import conditional_distance, wasserstein

_NEAR = 1e-4  # of the radius: least distance of two measures in a search


def lipschitz_ratio(
    layer: Attention,
    mu: TokenMeasure,
    nu: TokenMeasure,
    *,
    p: float = 2.0,
    residual: bool = False,
) -> float:
    """``W_p(F(μ), F(ν)) / W_p(μ, ν)``, for a causal layer in the conditional distance.

    Args:
        layer: As for `push_forward`.
        mu: First measure.
        nu: Second measure, at a positive and finite distance from the first.
        p: Power.
        residual: As for `push_forward`.

    Returns:
        The ratio: never above the Lipschitz constant of ``F``.

    Raises:
        InputError: As `push_forward`, or where both measures are one or positions differ.
    """
    before = _distance(layer, mu, nu, p)
    if not 0 < before < float("inf"):
        raise InputError(
            "The two measures should be at a positive and finite distance. Found "
            f"{before}: they are equal, or their positions differ."
        )
    image, other = (push_forward(layer, one, residual=residual) for one in (mu, nu))
    return _distance(layer, image, other, p) / before


def _distance(layer: Attention, mu: TokenMeasure, nu: TokenMeasure, p: float) -> float:
    """The distance in which a layer is looked at."""
    return float((conditional_distance if layer.causal else wasserstein)(mu, nu, p=p))


@dataclass(frozen=True, eq=False, repr=False)
class Worst(Shown):
    """The largest ratio that a search found.

    Attributes:
        ratio: The ratio.
        mu: First measure.
        nu: Second measure.
    """

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
    p: float = 2.0,
    seed: int = 0,
) -> Worst:
    """A large Lipschitz ratio between measures in a ball: points, moves and weights are searched.

    Steps of random size in all of them, kept where the ratio grows; points are projected onto the
    ball. Ratios are exact, so the result is a lower bound of the Lipschitz constant there, which
    is the supremum of the local ones (Lemma B.2). Weights of a pair are equal.

    Args:
        layer: As for `push_forward`.
        radius: Largest token norm.
        num_atoms: Atoms of each measure; a causal layer reads them in their order.
        steps: Trials for each start.
        starts: Random starts.
        p: Power.
        seed: Of everything random.

    Returns:
        The best pair.

    Raises:
        InputError: As `push_forward`, or if ``radius`` or ``starts`` is not positive.
    """
    check_positive("radius", radius)
    for name, number in (("num_atoms", num_atoms), ("starts", starts)):
        check_count(name, number)
    check_count("steps", steps, least=0)
    layer = layer.in_double()
    found = [
        _climb(layer, radius, num_atoms, steps, p, start_named(f"ratio|{seed}|{i}"))
        for i in range(starts)
    ]
    return max(found, key=lambda one: one.ratio)


def tiny_mass_gain(
    layer: Attention, mu: TokenMeasure, targets: Float[Tensor, "k d"]
) -> Float[Tensor, "n k"]:
    """``lim W_2(F(ν_ε), F(μ)) / W_2(ν_ε, μ)``, ``ν_ε = μ + ε (δ_y - δ_(x_i))``, as ε → 0.

    The limit is ``√( c_F(i, y) / c(i, y) )``: ``c`` is the least sum of squared lengths over
    chains from ``x_i`` to ``y`` through atoms, ``c_F`` the same for their images under ``Γ_μ``.
    It bounds the local Lipschitz constant of ``F`` at μ in ``W_2`` from below, however far ``y``
    is; near ``x_i`` it is what splitting does.

    Args:
        layer: As for `push_forward`, not causal.
        mu: The measure, all weights positive, its points distinct.
        targets: Points ``y``.

    Returns:
        The limits for every atom and target; 0 where the target is the atom.

    Raises:
        InputError: As `push_forward`, or for a causal layer.

    Source: derived here (``docs/theory/splitting.md``).
    """
    if layer.causal:
        raise InputError("not available: a causal layer moves mass within its position only.")
    x = mu.points.detach()
    y = _points("targets", targets, x, 2)
    images, ends = token_map(layer, mu, x), token_map(layer, mu, y)
    into, out = _chains(x, y), _chains(images, ends)
    return torch.where(into > 0, out / into.where(into > 0, torch.ones(())), 0.0).sqrt()


def tiny_mass_ratio(
    layer: Attention, mu: TokenMeasure, atom: int, target: Float[Tensor, " d"], *, mass: float
) -> float:
    """The ratio of `tiny_mass_gain` before its limit, by exact transport.

    Args:
        layer: As for `push_forward`.
        mu: The measure.
        atom: Index of the atom that gives mass.
        target: Where it goes.
        mass: ε, below the weight of the atom.

    Raises:
        InputError: As `tiny_mass_gain`, or for another atom or mass.
    """
    if type(atom) is not int or not 0 <= atom < len(mu.weights):
        raise InputError(
            f"`atom` should be between 0 and {len(mu.weights) - 1}. Found `atom = {shown(atom)}`."
        )
    target = _points("target", target, mu.points, 1)
    check_positive("mass", mass)
    if not mass < float(mu.weights[atom]):
        raise InputError(
            f"`mass` should be below the weight of the atom, {float(mu.weights[atom]):.4g}. "
            f"Found `mass = {mass}`."
        )
    weights = torch.cat([mu.weights, mu.weights.new_tensor([mass])])
    weights[atom] -= mass
    points = torch.cat([mu.points, target[None]])
    return lipschitz_ratio(layer, mu, TokenMeasure(points, weights))


def _points(name: str, value: object, like: Tensor, axes: int) -> Tensor:
    """Points of the width of others, in their precision."""
    wanted = f"(k, {like.shape[1]})" if axes == 2 else f"({like.shape[1]},)"
    if not isinstance(value, Tensor):
        raise InputError(f"`{name}` should be finite points, {wanted}. Found {shown(value)}.")
    fits = value.ndim == axes and value.shape[-1] == like.shape[1] and value.is_floating_point()
    if not fits or not bool(value.isfinite().all()):
        found = f"{tuple(value.shape)}, {str(value.dtype)[6:]}"
        raise InputError(f"`{name}` should be finite points, {wanted}. Found {found}.")
    return value.to(like)


def _chains(atoms: Tensor, targets: Tensor) -> Tensor:
    """Least sums of squared lengths over chains from each atom to each target, ``(n, k)``."""
    between = torch.cdist(atoms, atoms).square()
    for k in range(len(atoms)):
        between = torch.minimum(between, between[:, k, None] + between[k])
    last = torch.cdist(atoms, targets).square()
    return (between[:, :, None] + last).amin(1)


def _climb(
    layer: Attention, radius: float, n: int, steps: int, p: float, gen: torch.Generator
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
        before = _distance(layer, mu, nu, p)
        if before <= _NEAR * radius:  # they would be compared by their rounding
            return 0.0
        return _distance(layer, push_forward(layer, mu), push_forward(layer, nu), p) / before

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
