"""Smooth Transformers in experiments: formula, attack, certified radii, and their findings."""

from __future__ import annotations

import math

import pytest
import torch

from lipscope import SmoothTransformer
from lipscope_experiments import reproduce
from lipscope_experiments.certified import smooth
from lipscope_experiments.certified.smooth import (
    CAPS,
    LINEAR,
    beside,
    fitted,
    slope_before_head,
)
from lipscope_experiments.data import Task
from lipscope_experiments.newhouse2025 import shakespeare
from lipscope_experiments.newhouse2025.shakespeare import as_rms, bound_of, formula
from lipscope_experiments.training import certified_radii


def decoder(cap: float, seed: int = 0) -> SmoothTransformer:
    torch.manual_seed(seed)
    sizes = {"outputs": 9, "length": 6, "vocabulary": 9, "causal": True, "capped": "after-step"}
    return SmoothTransformer(16, 4, 3, cap=cap, **sizes).double().eval()


@pytest.mark.parametrize(("cap", "value"), [(1.0, 0.88), (1.25, 2.5), (1.5, 11.0), (2.0, 840.0)])
def test_the_formula_as_coded_has_its_published_values(cap, value):
    """Those of its own code at three blocks with every norm at the cap, to their two digits."""
    assert formula(decoder(cap), right=False) == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize(
    "cap", [1.0, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.5, 2.0))]
)
def test_the_formula_put_right_and_ours_are_above_every_attack(cap):
    for seed in range(2):
        model = decoder(cap, seed)
        found = as_rms(model) * model.float().attack(num_tokens=6, starts=4, steps=30)[0]
        model = model.double()
        assert found <= min(bound_of(model), formula(model, right=True))


def test_shakespeare_says_what_it_found(monkeypatch, tmp_path):
    monkeypatch.setattr(shakespeare, "CAPS", (1.0, None))
    monkeypatch.setattr(shakespeare, "VARIANTS", {"dot product": {}})
    asked = list[int]()

    def few(model, loss, steps):
        asked.append(steps)
        return train(model, loss, 4)

    train = shakespeare.train
    monkeypatch.setattr(shakespeare, "train", few)
    monkeypatch.setattr(shakespeare, "_READINGS", 100)
    monkeypatch.setattr(shakespeare, "_WINDOWS", 1)
    first = reproduce("newhouse2025/shakespeare-256", quick=True, out=tmp_path / "run")
    assert first == reproduce("newhouse2025/shakespeare-256", quick=True, out=tmp_path / "run")
    assert asked == [300] * 2
    text = (tmp_path / "run" / "findings.md").read_text()
    assert "printed proof was not read" in text and (tmp_path / "run" / "shakespeare.svg").exists()
    assert len(first.tables[0].lines) == 2


def blobs(classes: int) -> Task:
    gen = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % classes
    rows = torch.randn(classes, 4, 3, generator=gen)[labels]
    rows = rows + 0.1 * torch.randn(120, 4, 3, generator=gen)
    return Task((rows, labels), (rows[:40], labels[:40]))


@pytest.mark.parametrize("kind", CAPS)
def test_no_move_within_the_radius_of_the_bound_changes_the_answer(kind):
    of = blobs(3)
    model = fitted(of, kind, 30, 0).double()
    x, labels = of.test[0].double(), of.test[1]
    with torch.no_grad():
        sure = certified_radii(model(x), model.head.weight, labels, slope_before_head(model))
    assert bool((sure > 0).any())
    hold(model, x, labels, sure)


def test_no_move_within_the_radius_of_a_certificate_changes_the_answer():
    of = blobs(3)
    model = fitted(of, "cap 2", 30, 0)
    x, labels = of.test
    with torch.no_grad():
        few = (model(x).argmax(1) == labels).nonzero()[:2, 0]
    found = [beside(model, x[i]) for i in few]
    assert all(0 < one["certificate"] <= one["no flip"] for one in found)
    sure = torch.tensor([one["certificate"] for one in found]).double()
    hold(model.double(), x[few].double(), labels[few], sure)


def hold(model, x, labels, sure):
    """Ascents of the loss within the radii change no answer."""
    move = torch.zeros_like(x)
    for _ in range(15):
        at = (x + move).requires_grad_()
        loss = torch.nn.functional.cross_entropy(model(at), labels, reduction="sum")
        (slope,) = torch.autograd.grad(loss, at)
        move = move + slope / slope.flatten(1).norm(dim=1)[:, None, None] * sure[:, None, None] / 3
        size = move.flatten(1).norm(dim=1)
        move = move * (0.999 * sure / size.clamp_min(1e-30)).clamp_max(1.0)[:, None, None]
        wrong = model(x + move).argmax(1) != labels
        assert not bool((wrong & (sure > 0)).any())


def test_the_radius_of_a_linear_model_is_the_distance():
    head = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    scores = torch.tensor([[10.0, 0.0], [0.0, 1.0]])
    found = certified_radii(scores, head, torch.tensor([0, 0]), 0.5)
    assert found.tolist() == [pytest.approx(10 / (0.5 * 5)), 0.0]


def test_without_a_folder_of_sentences_the_rest_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("LIPSCOPE_DEEPT", raising=False)
    monkeypatch.setattr(smooth, "digits", lambda: blobs(3))
    monkeypatch.setattr(smooth, "CAPS", {"cap 1": 1.0})
    found = reproduce("certified/smooth", quick=True, out=tmp_path / "run")
    assert any("SST was left out" in one for one in found.remarks)
    ways = [line[:2] for line in found.tables[0].lines if line[1] != "CROWN"]
    known = [("cap 1", by) for by in ("bound, all", "bound", "certificate", "no flip")]
    assert ways == [*known, (LINEAR, "bound, all"), (LINEAR, "certificate")]
    assert all(0 < float(line[2]) < math.inf for line in found.tables[0].lines)
