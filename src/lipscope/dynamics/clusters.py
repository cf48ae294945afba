"""Groups of tokens over time: how many, who leads them, how long they last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lipscope.display import Shown
from lipscope.dynamics.integrate import Event
from lipscope.errors import InputError


@dataclass(frozen=True, eq=False, repr=False)
class Clusters(Shown):
    """Groups of points within reach of each other.

    Attributes:
        count: How many.
        labels: The group of every point, from 0, in the order of their first points.
        sizes: Points in each.
    """

    count: int
    labels: Int[Tensor, " n"]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Phase:
    """A time during which the number of clusters stays as it is.

    Attributes:
        count: The number.
        start: First time at which it was seen.
        end: First time at which it was another one; the last time of all for the last phase.
    """

    count: int
    start: float
    end: float


def clusters(points: Float[Tensor, "n d"], radius: float) -> Clusters:
    """Connected components of the graph of pairs with ``|x_i - x_j| <= radius``.

    Single linkage: two points are in one cluster if a chain of points, each within the radius of
    the next one, leads from one to the other. So the count falls with the radius, and does
    not depend on the order or the position of the points.

    Raises:
        InputError: For a radius that is not positive, or points that are not finite.

    >>> clusters(torch.tensor([[0.0], [3.0], [1.0], [2.0], [9.0]]), 1.0).sizes
    (4, 1)
    """
    _check_radius(radius)
    if points.ndim != 2 or not len(points) or not bool(points.isfinite().all()):
        found = f"NaN or Inf in {tuple(points.shape)}" if points.ndim == 2 else tuple(points.shape)
        raise InputError(f"`points` should be finite, (n, d), at least one. Found {found}.")
    points = points.double()
    near = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") <= radius
    count, found = connected_components(csr_matrix(near.numpy()), directed=False)
    labels = torch.as_tensor(found).long()
    return Clusters(int(count), labels, tuple(labels.bincount(minlength=count).tolist()))


def phases(times: Sequence[float] | Tensor, counts: Sequence[int]) -> tuple[Phase, ...]:
    """Times of constant count, in order; a long one that is not the last is metastable.

    >>> phases([0.0, 1.0, 2.0, 3.0], [5, 2, 2, 1])[1]
    Phase(count=2, start=1.0, end=3.0)
    """
    at = [float(t) for t in times]
    starts = [i for i in range(len(counts)) if i == 0 or counts[i] != counts[i - 1]]
    ends = [*starts[1:], len(counts) - 1]
    return tuple(Phase(counts[i], at[i], at[j]) for i, j in zip(starts, ends, strict=True))


def leaders(weights: Float[Tensor, "h n n"], share: float = 0.5) -> tuple[int, ...]:
    """Tokens to which some token gives more than ``share`` of its weight, mean over heads.

    In the limit of the renormalised flow every token reads one leader alone.

    >>> leaders(torch.tensor([[[1.0, 0.0], [0.9, 0.1]]]))
    (0,)
    """
    return tuple((weights.mean(0) > share).any(0).nonzero()[:, 0].tolist())


def consensus(radius: float, *, terminal: bool = True) -> Event:
    """The event ``consensus``: no two tokens are further apart than the radius."""
    _check_radius(radius)
    return Event("consensus", lambda _, x: diameter(x) - radius, terminal)


def diameter(points: Float[Tensor, "n d"]) -> float:
    """The largest distance between two points."""
    return float(torch.pdist(points.double()).max()) if len(points) > 1 else 0.0


def outgrows(radius: float, *, terminal: bool = True) -> Event:
    """The event ``outgrown``: some token is further from the origin than the radius."""
    _check_radius(radius)
    return Event("outgrown", lambda _, x: radius - float(x.norm(dim=-1).max()), terminal)


def _check_radius(radius: float) -> None:
    if not 0 < radius < float("inf"):
        raise InputError(f"`radius` should be positive. Found `radius = {radius}`.")
