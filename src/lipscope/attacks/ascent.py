"""Gradient ascent on sigma over a ball of tokens, and confirmation of sigma by finite steps.

``d sigma = <u, (dJ) v>`` for the top singular pair of a simple singular value, so the
gradient of ``X -> <u, J(X) v>`` at fixed ``u, v`` is that of sigma.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.errors import InputError, check_count, check_positive
from lipscope.linalg import (
    Operator,
    Tape,
    TopSingular,
    few_threads,
    golub_kahan,
    stretch,
    top_singular,
)

_KRYLOV_STEPS = 2  # from the previous singular vector: enough to follow it
_FEWEST = 4  # minimum number of starts that continue
_RATE = 0.1  # in units of the radius
_COPIES = 24  # approximate number of score-sized tensors alive during a gradient
_SMALLEST_SCALE = 0.1  # smallest norm of random starts relative to the radius


@dataclass(frozen=True)
class Ascent:
    """The worst input found, measured again."""

    x: Float[Tensor, "n d"]  # the input, ``(n, d)``: the best of all iterates of all restarts
    top: TopSingular  # sigma there from a fresh random start, so that its ``upper`` holds
    found: float  # the value during the ascent: a lower bound of sigma, in float32
    start_values: Float[Tensor, " r"]  # value at each start, ``(restarts,)``
    best_values: Float[Tensor, " r"]  # best value of each restart, ``(restarts,)``


def ascend(
    layer: Attention,
    *,
    num_tokens: int,
    radius: float,
    restarts: int = 4,
    steps: int = 40,
    start: Tensor | Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
    memory: int = 2**30,
) -> Ascent:
    """Maximise sigma over inputs whose tokens have norm at most ``radius``.

    ``max_X sigma(X)``, by ascent along ``grad <u, J(X) v>`` with momentum, which need not be
    monotone. Every iterate, including the starts, is projected onto the ball, and the best value
    over all iterates is returned. After each quarter of the steps the better half of a batch
    continues, at least four starts (successive halving). The search is always in float32.

    Holds for every variant, mask and number of heads, including rotary embeddings: a lower
    bound of the largest sigma, never a proof of optimality. The winner is measured again from a
    random start drawn after everything else: choosing an input by a run, or warm-starting the run,
    makes its start depend on the Jacobian, which voids ``upper``.

    Args:
        layer: The layer; the map is the whole layer.
        restarts: Number of random starts, in addition to ``start``.
        start: One input ``(n, d)`` or several, for example constructions.
        generator: Source of starts; None: torch's global generator.
        memory: Approximate bytes of a batch of restarts; halving is within a batch.

    Source: derived here (``docs/theory/inputs.md``).
    """
    check_size(num_tokens, radius)
    for name, count in (("restarts", restarts), ("steps", steps)):
        check_count(name, count, least=0)
    inputs = _start_inputs(layer, num_tokens, radius, restarts, start, generator)
    search = copy.deepcopy(layer).float()  # twice as fast; the winner uses the layer's precision
    x = clamp(inputs.float(), radius)
    v = _randn(tuple(x.shape), generator).to(x)
    scores = layer.num_heads * num_tokens**2 + 8 * num_tokens * x.shape[-1]
    size = max(1, memory // (_COPIES * scores * x.element_size()))
    batches = list(zip(x.split(size), v.split(size), strict=True))
    with few_threads(len(batches[0][0]) * num_tokens * x.shape[-1]):
        parts = [_ascend_batch(search, xs, vs, radius, steps) for xs, vs in batches]
    first, values, points = (torch.cat(list(part)) for part in zip(*parts, strict=True))
    # NaN (a start that overflows) must lose, which argmax alone does not ensure.
    winner = int(values.nan_to_num(nan=-1.0).argmax())
    best = clamp(points[winner].to(inputs), radius)  # rounding must not leave the ball
    top = top_singular(layer.linearise(best), generator=generator)
    return Ascent(best, top, float(values[winner]), first, values)


def sigma_gradient(
    f: Callable[[Tensor], Tensor],
    x: Float[Tensor, "b n d"],
    v: Float[Tensor, "b n d"],
    *,
    steps: int,
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b n d"], Float[Tensor, "b n d"]]:
    """Sigma of a batch of inputs, its gradient, and the right singular vectors.

    ``grad_X <J(X)^T u, v>`` with ``u, v`` the top Ritz pair after ``steps`` steps of
    Golub–Kahan from ``v``; by reverse mode twice.

    Holds where the top singular value is simple; elsewhere the result is a subgradient of one
    branch. The value is a Ritz value, hence a lower bound.
    """
    tape = Tape(f, x)
    op = Operator(
        tape.matvec, tape.rmatvec, tuple(x.shape[1:]), tuple(tape.y.shape[1:]), x.dtype, x.device
    )
    sigma, left, right = _top_triplets(op, v, steps)
    with torch.enable_grad():
        value = stretch(tape.y, tape.point, left, right)
        (gradient,) = torch.autograd.grad(value, tape.point)
    return sigma, gradient, right


def confirm(
    layer: Attention, x: Float[Tensor, "n d"], direction: Float[Tensor, "n d"]
) -> list[tuple[float, float]]:
    """Finite steps along a direction: ``‖eta u‖`` and ``‖f(X + eta u) − f(X)‖ / ‖eta u‖``.

    The ratio tends to ``‖J u‖`` as ``eta -> 0``: to sigma for the top right singular vector.
    By Lemma 3.1 of [castin2024] it is at most the largest sigma on the segment.

    Holds for every layer; computed in float64 for an accurate difference. ``eta`` is a tenth of
    ``‖X‖`` (of 1 at ``X = 0``), a hundredth and so on.
    """
    if direction.shape != x.shape or not direction.norm() > 0:
        raise InputError("`direction` should be a nonzero tensor of the shape of `x`.")
    layer, x = layer.in_double(), x.detach().to("cpu", torch.float64)
    unit = direction.detach().to(x) / direction.detach().to(x).norm()
    scale = float(x.norm()) or 1.0
    with torch.no_grad():
        here = layer(x)
        return [
            (eta * scale, float((layer(x + eta * scale * unit) - here).norm()) / (eta * scale))
            for eta in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
        ]


def clamp(x: Float[Tensor, "*b n d"], radius: float) -> Float[Tensor, "*b n d"]:
    """Project tokens onto the ball of norm at most ``radius``."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > radius, x * (radius / norm), x)


def check_size(num_tokens: int, radius: float, *, least: int = 1) -> None:
    """Validate a number of tokens and a radius."""
    check_count("num_tokens", num_tokens, least)
    check_positive("radius", radius)


def _ascend_batch(
    layer: Attention, x: Tensor, v: Tensor, radius: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Values at the start, best values, and their inputs."""
    value, gradient, v = sigma_gradient(layer, x, v, steps=4 * _KRYLOV_STEPS)
    first, best, points = value, value.clone(), x.clone()
    alive, momentum = torch.arange(len(x), device=x.device), _Momentum(x, radius)
    quarters = {steps * k // 4 for k in (1, 2, 3)} - {0}
    for i in range(steps):
        if i in quarters and len(alive) > _FEWEST:
            fewer = max(_FEWEST, (len(alive) + 1) // 2)
            kept = best[alive].nan_to_num(nan=-1.0).topk(fewer).indices
            alive, x, value, gradient, v = (t[kept] for t in (alive, x, value, gradient, v))
            momentum.keep(kept)
        trial = clamp(x + momentum.step(gradient / _shape(value), 1 - i / steps), radius)
        found, slope, right = sigma_gradient(layer, trial, v, steps=_KRYLOV_STEPS)
        record = ~(found <= best[alive]) & found.isfinite()
        best[alive[record]], points[alive[record]] = found[record], trial[record]
        finite = found.isfinite()
        value = torch.where(finite, found, value)
        x, gradient, v = (
            torch.where(_shape(finite), new, old)
            for new, old in ((trial, x), (slope, gradient), (right, v))
        )
    return first, best, points


class _Momentum:
    """Adam (Kingma and Ba, 2015) on the logarithm of sigma, with a step that falls to zero."""

    def __init__(self, x: Tensor, radius: float) -> None:
        self.mean, self.square, self.count = torch.zeros_like(x), torch.zeros_like(x), 0
        self.rate = _RATE * radius / math.sqrt(x.shape[-1])

    def keep(self, kept: Tensor) -> None:
        self.mean, self.square = self.mean[kept], self.square[kept]

    def step(self, gradient: Tensor, share: float) -> Tensor:
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
        self.count += 1
        self.mean = self.mean * 0.9 + gradient * 0.1
        self.square = self.square * 0.99 + gradient.square() * 0.01
        mean = self.mean / (1 - 0.9**self.count)
        square = self.square / (1 - 0.99**self.count)
        return self.rate * share * mean / (square.sqrt() + 1e-30)


def _shape(flags: Tensor) -> Tensor:
    return flags[:, None, None]


def _top_triplets(op: Operator, start: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top Ritz triplets of a batch of operators."""
    *_, state = golub_kahan(op, start, min(steps, op.in_size))
    assert state.u is not None
    left, values, right = torch.linalg.svd(state.matrix().nan_to_num())
    broken = ~state.alpha.isfinite().all(1) | ~state.beta.isfinite().all(1)
    sigma = values[:, 0].masked_fill(broken, torch.nan).to(start)
    u = torch.einsum("bk,bkm->bm", left[:, :, 0].to(start), state.u)
    v = torch.einsum("bk,bkm->bm", right[:, 0].to(start), state.v[:, :-1])
    return sigma, u.unflatten(1, op.out_shape), v.unflatten(1, op.in_shape)


def _start_inputs(
    layer: Attention,
    num_tokens: int,
    radius: float,
    restarts: int,
    start: Tensor | Sequence[Tensor] | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The given starts, then random ones of all sizes, since sigma is flat in saturated regions."""
    shape = (num_tokens, layer.query.shape[1])
    starts = [start] if isinstance(start, Tensor) else list(start or [])
    for one in starts:
        if tuple(one.shape) != shape:
            raise InputError(f"`start` should have shape {shape}. Found {tuple(one.shape)}.")
    if not starts and not restarts:
        raise InputError("`restarts` should be positive where no `start` is given. Found 0.")
    drawn = _randn((restarts, *shape), generator)
    drawn = drawn / torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)
    share = torch.linspace(0, 1, restarts + 1)[1:]
    drawn = drawn * radius * _shape(_SMALLEST_SCALE ** (1 - share)).to(drawn)
    return torch.stack([one.to(layer.query) for one in (*starts, *drawn)])


def _randn(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device)
