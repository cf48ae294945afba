"""The leading singular directions of an operator, one after the other, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope.display import Shown
from lipscope.linalg.operator import Operator
from lipscope.linalg.singular import SLACK, TopSingular, top_singular_batch


@dataclass(frozen=True, repr=False)
class Leading(Shown):
    """One of the leading singular directions."""

    sigma: float  # at most the singular value of this rank
    upper: float  # at least it, with probability ``1 - delta`` for each rank
    u: Tensor  # left vector, ``out_shape``, unit norm
    v: Tensor  # right vector, ``in_shape``, unit norm
    residual: float  # ``‖J^T J v - theta^2 v‖ / (sqrt(2) theta^2)``, ``theta = ‖J v‖``
    # upper bound of the sine of the angle between ``v`` and the singular vector of this rank; None
    # where the intervals do not tell its value from its neighbours'
    sine: float | None = None


def leading(
    op: Operator,
    first: TopSingular,
    start: Callable[[int], torch.Generator],
    *,
    count: int,
    **solver: Any,
) -> list[Leading]:
    """The first ``count`` singular directions of ``op``, largest first.

    Direction j is the top one of ``J P`` with ``P`` the projection onto what is orthogonal to the
    right vectors ``W`` before it. ``sigma_j(J) <= ‖J P‖`` for every such ``W`` (Courant, Fischer),
    so the upper end of its top singular value is one of ``sigma_j``; and ``sigma_j(J) >=
    sigma_min(J [W, v_j])`` (Cauchy). The angle is that of Davis and Kahan for ``J^T J``:
    ``sin <= ‖J^T J v - theta^2 v‖ / distance``, with the distance of ``theta^2`` from the squares
    of the neighbours' intervals.

    Holds for any real operator; equal singular values have no directions of their own, and no sine.

    Source: derived here (``docs/theory/directions.md``), after [davis1970].

    >>> matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    >>> one = Operator(lambda e: e @ matrix.T, lambda g: g @ matrix, (3,), (3,), matrix.dtype)
    >>> from lipscope.linalg.singular import top_singular
    >>> seeded = torch.Generator().manual_seed
    >>> top = top_singular(one, generator=seeded(0))
    >>> [round(each.sigma, 6) for each in leading(one, top, seeded, count=2)]
    [3.0, 2.0]
    """
    found = [_measured_direction(op, first.v, first.sigma, first.upper)]
    images, uppers = [_image(op, first.v)], [first.upper]
    while len(found) <= count and len(found) < op.in_size:  # one more says what comes after
        basis = torch.stack([one.v for one in found]).flatten(1)
        top = top_singular_batch(_deflated(op, basis), [start(len(found) + 1)], **solver)[0]
        # Products are rounded in units of the whole operator, whatever is taken away from it.
        uppers.append(top.upper + SLACK[op.dtype] * first.sigma)
        if not top.sigma > 16 * torch.finfo(op.dtype).eps * first.sigma:
            break
        v = _away(top.v.flatten(), basis)
        v = (v / v.norm()).reshape(op.in_shape)
        images.append(_image(op, v))
        least = float(torch.linalg.svdvals(torch.stack(images))[-1])
        found.append(_measured_direction(op, v, min(least, uppers[-1]), uppers[-1]))
    above = [math.inf, *(one.sigma for one in found)]
    below = [*uppers[1:], 0.0]  # where the space is exhausted, nothing comes after
    thetas = [float(image.norm()) for image in images]
    return [
        replace(one, sine=_sine(one.residual, thetas[j], above[j], below[j]))
        for j, one in enumerate(found[:count])
    ]


def _deflated(op: Operator, basis: Tensor) -> Operator:
    """``J P``, with ``P`` the projection onto what is orthogonal to the rows of ``basis``."""

    def away(e: Tensor) -> Tensor:
        return _away(e.flatten(-len(op.in_shape)), basis).reshape(e.shape)

    return replace(op, matvec=lambda e: op.matvec(away(e)), rmatvec=lambda g: away(op.rmatvec(g)))


def _away(e: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):  # the second time for what rounding left
        e = e - (e @ basis.T) @ basis
    return e


def _image(op: Operator, v: Tensor) -> Tensor:
    return op.matvec(v[None])[0].double().flatten()


def _measured_direction(op: Operator, v: Tensor, sigma: float, upper: float) -> Leading:
    image = op.matvec(v[None])
    theta = image.double().norm()
    off = op.rmatvec(image)[0].double() - theta**2 * v.double()
    residual = float(off.norm() / (math.sqrt(2) * theta**2))
    return Leading(sigma, upper, (image[0].double() / theta).to(v), v, residual)


def _sine(residual: float, theta: float, above: float, below: float) -> float | None:
    """At most the sine of the angle, if the neighbours' values are known to be others."""
    distance = min(theta**2 - below**2, above**2 - theta**2)
    return min(residual * math.sqrt(2) * theta**2 / distance, 1.0) if distance > 0 else None
