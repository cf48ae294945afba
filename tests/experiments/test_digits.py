"""The vision Transformer of known Lipschitz constant: certificates hold, attacks find less."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lipscope import DotProduct
from lipscope.attacks import quadratic
from lipscope.errors import InputError
from lipscope_experiments import reproduce
from lipscope_experiments.castin2024 import divide_by_bound
from lipscope_experiments.castin2024.divide_by_bound import (
    _KINDS,
    Linear,
    VisionTransformer,
    attacked,
    train,
)
from lipscope_experiments.data import Task, digits
from lipscope_experiments.simple_layers import bound_values, top
from lipscope_experiments.training import certified_radii


def blobs() -> Task:
    """Ten noisy images of their own, as many of each as of the others."""
    gen = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 10
    images = torch.rand(10, 8, 8, generator=gen)[labels]
    images = images + 0.1 * torch.randn(120, 8, 8, generator=gen)
    return Task((images, labels), (images[:40], labels[:40]))


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in _KINDS if "3.3" in one]


@pytest.mark.parametrize("kind", [*(one for one in _KINDS[1:] if "3.3" not in one), *SLOW])
def test_no_move_within_the_radius_changes_the_answer(kind) -> None:
    torch.manual_seed(0)
    data = blobs()
    train(net := VisionTransformer(kind), data, 5, 0)
    net.double()
    images, labels = data.test[0].double(), data.test[1]
    slope = net.slope()
    radii = certified_radii(net(images), net.head.weight, labels, slope)

    def inner(x):
        held = []
        handle = net.head.register_forward_pre_hook(lambda _, given: held.append(given[0]))
        net(x)
        handle.remove()
        return held[0]

    jacobian = torch.autograd.functional.jacobian(lambda x: inner(x[None])[0], images[0])
    assert torch.linalg.matrix_norm(jacobian.flatten(1), 2) <= slope
    right = net(images).argmax(1) == labels
    assert bool(right.any()) and bool((radii > 0).equal(right))
    # Each image is attacked at its own radius: as one image, of a ball of that size.
    for i in right.nonzero()[:5, 0].tolist():
        assert bool(attacked(net, images[i : i + 1], labels[i : i + 1], float(radii[i])).all())
    assert int(attacked(net, images, labels, 1e3).sum()) < int(right.sum())


def test_a_linear_map_is_certified_to_its_nearest_other_answer() -> None:
    """The nearest image with another answer lies on the plane where two scores tie."""
    data = blobs()
    train(net := Linear(), data, 5, 0)
    net.double()
    images, labels = data.test[0].double(), data.test[1]
    w = net.head.weight
    radii = certified_radii(net(images), w, labels, net.slope())
    for i in (radii > 0).nonzero()[:5, 0].tolist():
        y, tied = int(labels[i]), []
        for c in set(range(10)) - {y}:
            away = w[c] - w[y]
            gap = net(images[i : i + 1])[0, [y, c]].diff()
            tied.append(float((away * gap / away.square().sum()).norm()))
            move = (-(1 + 1e-9) * gap * away / away.square().sum()).view(1, 8, 8)
            scores = net(images[i : i + 1] + move)[0]
            assert scores[c] > scores[y]
        assert float(radii[i]) == pytest.approx(min(tied), rel=1e-9)


def test_a_sum_over_patches_cannot_tell_the_marked_pairs() -> None:
    """The labels against the images; and the best sum of one function, which is right on 2/3.

    A threshold that has k of the three equal pairs right has k (k - 1) of the six others wrong:
    1/2 + k/6 - k (k - 1)/12 is 2/3 at most.
    """
    images, labels = divide_by_bound.marked_pairs(400).train
    patches = torch.nn.functional.unfold(images[:, None], 2, stride=2).mT
    marked = [one[one[:, 0] == 1, 1:] for one in patches]
    same = torch.tensor([bool((a == b).all()) for a, b in marked])
    assert all(len(one) == 2 for one in marked) and bool((same.long() == labels).all())
    assert float(labels.double().mean()) == 0.5
    sums = torch.cartesian_prod(*3 * [torch.linspace(-1, 1, 9)])  # f of each symbol
    scores = torch.stack([sums @ one.sum(0) for one in marked], 1)
    cuts = torch.linspace(-2.1, 2.1, 43)
    right = ((scores[..., None] > cuts) == same[:, None]).double().mean(1)
    best = float(torch.maximum(right, 1 - right).max())
    assert best == pytest.approx(2 / 3, abs=0.05)  # three standard deviations are 0.07


@pytest.mark.slow
def test_the_experiment_says_what_was_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(divide_by_bound, "digits", blobs)
    found = reproduce("castin2024/divide-by-bound", quick=True, out=tmp_path / "a")
    for kind, _, *cells in (line for table in found.tables for line in table.lines):
        means = [float(one.split()[0]) for one in cells[:6]]
        assert all(sure <= tried for sure, tried in zip(means[::2], means[1::2], strict=True)), kind
    assert Path(tmp_path / "a" / "divide-by-bound.png").exists()


def test_without_its_package_the_experiment_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install '\.\[digits\]'"):
        digits()


def test_the_limit_for_large_tokens_is_no_bound_on_a_ball() -> None:
    """One dimension, A = 9, V = 1: sigma at (0, R, -R) is about 6 R², above √3."""
    one = torch.ones(1, 1).double()
    layer = DotProduct(9 * one, one, one, scale=1.0)
    sigma = top(layer.linearise(quadratic(layer, num_tokens=3, radius=1.0).x), tol=1e-8).sigma
    assert 3**0.5 < sigma <= min(bound_values(layer, 3, 1.0).values())
