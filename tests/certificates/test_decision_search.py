"""The search for a certified radius: against a plain bisection, and where numbers overflow."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lipscope import DotProduct
from lipscope.certificates import DecisionSearch, NetworkBall, certify_network
from lipscope.errors import InputError
from lipscope.models import Branch, Feed, Network, Norm

F64 = torch.float64
EYE = torch.eye(2, dtype=F64)
X = torch.tensor([[1.0, 0.2], [0.3, 1.0]], dtype=F64)
HALF = torch.full((2,), 0.5, dtype=F64)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def feed(scale: float, bias: float, out: float, gate: float | None = None) -> Feed:
    gated = None if gate is None else gate * EYE
    kind = "relu" if bias else "gelu"
    return Feed(scale * EYE, vector(bias, bias), out * EYE, vector(0, 0), kind, gated)


def three_classes() -> Network:
    head = torch.tensor([[1, 0.3], [-1, 0], [0.2, -1]], dtype=F64)
    parts = Branch(DotProduct(EYE, EYE, EYE, EYE)), Branch(feed(1.0, 0.5, 1.0))
    return Network(parts, HALF, head, vector(0.3, 0, 0))


def bisected(net: Network, x: torch.Tensor) -> float:
    """A radius that is proved by plain bisection, from anchors along gradients."""
    every = torch.ones(len(x), dtype=torch.bool)
    bounds, label = NetworkBall(net, x, every), int(net(x).argmax())
    rivals = [c for c in range(len(net.head)) if c != label]
    moves = []
    for rival in rivals:
        at = x.clone().requires_grad_(True)
        (g,) = torch.autograd.grad(net(at)[label] - net(at)[rival], at)
        moves.append(-g.flatten() / g.norm())

    def proved(radius: float) -> bool:
        if not bounds.grow(radius):
            return False
        sizes = [share * radius for share in (0.0, 0.2, 0.5, 0.9)]
        return all(
            any(bounds.lower(size * move, label, rival)[0] > 0 for size in sizes)
            for rival, move in zip(rivals, moves, strict=True)
        )

    low, high = 0.0, 10.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if proved(middle) else (low, middle)
    return low


def test_three_classes_are_certified_as_far_as_by_bisection(monkeypatch) -> None:
    net, grown = three_classes(), list[float]()
    grow = NetworkBall.grow
    monkeypatch.setattr(
        NetworkBall, "grow", lambda self, radius: grown.append(radius) or grow(self, radius)
    )
    found = certify_network(net, X)
    tried = len(grown)
    assert found.radius >= 0.97 * bisected(net, X)
    assert found.attack is not None and found.attack >= found.radius
    assert tried <= 12 and found.note is None


def steep(power: float) -> Callable[[float], float]:
    return lambda r: 0.7 * (r / 0.3) ** power * math.exp(r / 0.3 - 1)


LOSSES = {
    "steep": (steep(9.0), 8), "steeper": (steep(16.0), 8), "fourth power": (steep(4.0), 8),
    "a jump": (lambda r: 0.9 * (r / 0.3) ** 2 + 1e6 * (r > 0.31), 12),
    "far below": (lambda r: 0.7 * (r / 1e-3) ** 2, 13),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("far", [1.2, 2.0, 5.0])
def test_few_radii_are_tried_whatever_is_lost(
    kind: str, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds fall off a cliff, steep or sudden, or hold far below what an attack needs."""
    (loss, most), tried = LOSSES[kind], list[float]()

    def holds(radius: float) -> bool:
        return 1 - radius / far > loss(radius)

    def least(asked: DecisionSearch, _: object, radius: float, __: object) -> tuple[float, int]:
        tried.append(radius)
        rival = asked.others[0]
        return (1 - radius / far - loss(radius)) * float(asked.margins[rival]), rival

    monkeypatch.setattr("lipscope.certificates.network_decision._least", least)
    monkeypatch.setattr(DecisionSearch, "smallest_flip", lambda *_: far)
    found = certify_network(three_classes(), X)
    low, high = 0.0, far
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    assert 0.96 * low <= found.radius <= low
    assert len(tried) <= most


def test_what_is_flat_at_the_centre_is_searched_for_far_away() -> None:
    dead = Network((Branch(feed(1.0, -30.0, 1.0), skip=False),), HALF, EYE[[1, 0]], vector(0.1, 0))
    found = certify_network(dead, X)
    # a unit opens where its argument has grown by 29, in one token
    assert found.radius > 25 and (found.attack is None or found.attack >= found.radius)


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_where_first_order_is_far_a_radius_is_found_that_a_norm_limits(size: float) -> None:
    norm = Norm(vector(1, 1), vector(0, 0), eps=0.0, centred=False)
    part = Branch(feed(1.0, 0.0, 1.0), norm=norm, skip=False)
    found = certify_network(Network((part,), HALF, 1e-6 * EYE, vector(1.0, 0)), size * X)
    # a token may be taken to zero there, where the norm has no bound
    least = float((size * X).norm(dim=1).min())
    assert 0.95 * least < found.radius <= least < 1e-3 * found.first_order


@pytest.mark.parametrize(
    ("part", "skip", "head"),
    [
        (feed(1e100, 0.0, 1e-100), True, 1.0),
        (feed(1e155, 0.0, 1e-155), True, 1.0),
        (feed(1e6, 0.0, 1.0, 1e6), False, 1.0),
        (feed(1e15, 0.0, 1.0, 1e15), False, 1.0),
        (feed(1.0, 0.0, 1.0), True, 1e160),
    ],
)
def test_what_overflows_is_neither_certified_nor_a_flip(
    part: Feed, skip: bool, head: float
) -> None:
    rows = head * torch.tensor([[1, 0], [-1, 0]], dtype=F64)
    net = Network((Branch(part, skip=skip),), HALF, rows, vector(1.0, 0))
    found = certify_network(net, X if skip else 0 * X)
    assert math.isfinite(found.radius) and found.radius < 10
    assert found.attack is None or found.radius <= found.attack < 100


def test_an_anchor_keeps_its_distance_to_the_best_though_another_becomes_the_best(
    monkeypatch,
) -> None:
    """Bounds over the margin by anchor, as they stood at three radii of a network."""
    asked = DecisionSearch(three_classes(), X, "joint", torch.ones(2, dtype=torch.bool))
    rival = asked.others[0]
    move, margin = torch.ones(4, dtype=F64), float(asked.margins[rival])
    known, anchors = dict[float, float](), list[float]()

    def lower(_: NetworkBall, e: torch.Tensor, *__: object) -> tuple[float, torch.Tensor]:
        anchors.append(round(float(e[0]), 2))
        return margin * known[anchors[-1]], e

    monkeypatch.setattr(NetworkBall, "lower", lower)
    known |= {0.98: -0.2, 0.2: -0.13, 0.3: -0.09, 0.4: -0.05, 0.5: -0.003, 0.7: -0.1, 0.1: -0.3}
    assert asked.lower(rival, move) == pytest.approx(-0.003 * margin)
    known |= {0.98: -0.5, 0.2: -0.25, 0.5: -0.3}
    assert asked.lower(rival, move) == pytest.approx(-0.25 * margin)
    known |= {0.2: -0.054, 0.4: 0.03}
    anchors.clear()
    assert asked.lower(rival, move) == pytest.approx(0.03 * margin)
    assert anchors == [0.4]


@pytest.mark.parametrize(
    ("size", "asked", "said"),
    [
        (1.0, {"ball": "foo"}, "`ball` should be joint, token or each. Found `foo`"),
        (1.0, {"tokens": [0]}, r"`tokens` should be True for some of 2 tokens. Found `\[0\]`"),
        (math.nan, {}, "`x` should be finite"),
    ],
)
def test_what_cannot_be_asked_is_refused(size: float, asked: Any, said: str, unchecked) -> None:
    with pytest.raises(InputError, match=said):
        certify_network(three_classes(), size * X, **asked)
