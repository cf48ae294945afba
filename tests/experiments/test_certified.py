"""Small classifiers as networks of parts, the search for flips, and the peer's radius."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lipscope import SmoothTransformer
from lipscope.models import Network, check_network, read_network
from lipscope_experiments import reproduce
from lipscope_experiments.certified import decisions
from lipscope_experiments.certified.classifiers import (
    Recipe,
    Trained,
    first_weights,
    network_of,
    scores,
)
from lipscope_experiments.certified.crown import Moved, bisected, peer, peer_radius
from lipscope_experiments.certified.decisions import Search, decided, gaps_of


class _Affine(nn.Module):
    """``<w, x> + 1`` against 0: a flip takes ``1 / |w|``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.tensor([[1.0, 2.0], [0.0, 2.0]], dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = (self.weight * x).sum((1, 2)) + 1
        return torch.stack([score, torch.zeros_like(score)], 1)


def _weights(recipe: Recipe, front: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = first_weights(recipe)
    for name in ("linear_in", "bert.pooler.dense") if front else ():
        found |= nn.Linear(recipe.d, recipe.d).state_dict(prefix=f"{name}.")
    if front:
        found |= nn.LayerNorm(recipe.d).state_dict(prefix="LayerNorm.")
    return {name: one.double() for name, one in found.items()}


def _network(name: str, front: bool = False) -> tuple[Network, torch.Tensor]:
    recipe = Recipe.of(name)
    found = network_of(_weights(recipe, front), recipe, recipe.n)
    return found, torch.randn(recipe.n, recipe.d, dtype=torch.float64)


@pytest.mark.parametrize("name", ["A1", "N1-n16", "S2-gelu"])
def test_a_classifier_is_its_parts(name: str) -> None:
    """`check_network` compares values and gradients."""
    network, x = _network(name)
    assert len(network.branches) == (1 if name == "A1" else 4 * Recipe.of(name).blocks)
    check_network(network, lambda z: scores(network, z[None])[0], x)


def test_a_front_and_a_pooler_are_parts_too() -> None:
    """DeepT's networks: a linear map and a norm first, one token read through a tanh."""
    network, x = _network("N1-d64", front=True)
    check_network(network, lambda z: scores(network, z[None])[0], x)
    assert len(network.branches) == 6
    assert len(network.tail) == 1
    assert network.share.tolist() == [1.0, *[0.0] * 7]


def test_a_flip_of_an_affine_classifier_is_its_distance() -> None:
    """1/3 where both tokens move, 1/2 where the second does; margins fall by no more."""
    model, x = _Affine(), torch.zeros(2, 2, dtype=torch.float64)
    for moves, distance in (([[1.0], [1.0]], 1 / 3), ([[0.0], [1.0]], 1 / 2)):
        search = Search(model, x, 0, torch.tensor(moves, dtype=torch.float64))
        radius, move = search.smallest_flip()
        assert distance <= radius < 1.0001 * distance
        assert float(search.margins(move[None])) <= 0
        least = search.least_margin(distance / 2, move)
        assert 0.5 - 1e-12 <= least < 0.5001


def test_a_bisection_ends_below_what_is_proved() -> None:
    """Within 4 %, and 0 where nothing is."""
    assert 0.7 / 1.04 <= bisected(lambda r: r < 0.7, 1.0)[0] < 0.7
    assert bisected(lambda r: False, 1.0)[0] == 0


@pytest.mark.parametrize("name", ["A1", "S1", "capped"])
def test_what_the_peer_is_given_is_the_network(name: str) -> None:
    """Scores at moved tokens."""
    if name == "capped":
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"outputs": 3, "length": 8, "features": 5, "activation": "relu"}
        smooth = SmoothTransformer(32, 4, 2, pool="mean", **sizes).double().eval()
        network, x = read_network(smooth, (3 * torch.randn(1, 8, 5, dtype=torch.float64),))
    else:
        network, x = _network(name)
    assert isinstance(network, Network)
    move = torch.randn(1, 8, 32, dtype=torch.float64)
    moved = Moved(network, 32)
    for moves in (torch.ones(8, 1).double(), torch.eye(8)[:, :1].double()):
        found = moved(move, moved.map(x)[None] + moved.bias, moves[None])
        torch.testing.assert_close(found[0], network(x + moves * move[0]))


@pytest.mark.parametrize("name", ["A1", "N1"])
def test_the_peer_proves_less_than_an_attack_reaches(name: str) -> None:
    """In both balls; the intervals widen as they should, or IBP would prove more than CROWN."""
    if peer() is None:
        pytest.skip("auto_LiRPA cannot be imported")
    network, x = _network(name)
    model = functools.partial(scores, network)
    label = int(network(x).argmax())
    for moves in (torch.ones(8, 1), torch.eye(8)[:, :1]):
        attack, _ = Search(model, x, label, moves.double()).smallest_flip(restarts=2, steps=50)
        crown, ibp = (
            peer_radius(network, x, label, moves.double(), attack, one) for one in ("CROWN", "IBP")
        )
        assert crown is not None and ibp is not None
        assert ibp[0] < crown[0] < attack


def test_training_repeats_itself() -> None:
    """A second call has the same inputs, which are classified correctly."""
    texts = [
        " ".join(f"{word} the {'ab'[i % 2]}" for i in range(700)) for word in ("left", "right")
    ]
    first, again = (Trained.of(Recipe.of("A1"), texts, steps=40) for _ in range(2))
    assert first.accuracy == 1.0
    for x, y, label in zip(first.inputs, again.inputs, first.labels, strict=True):
        assert torch.equal(x, y)
        assert int(network_of(first.weights, first.recipe, len(x))(x).argmax()) == label


@pytest.mark.parametrize(("name", "front"), [("A1-n4-d8", False), ("N1-n4-d8", True)])
def test_radii_and_bounds_at_an_input(name: str, front: bool) -> None:
    """Ours is less than the attack's; no bound lies above a margin that was found."""
    network, x = _network(name, front)
    label, recipe = int(network(x).argmax()), Recipe.of(name)
    trained = Trained(recipe, _weights(recipe, front), [x], [label], 1.0)
    found = decided(trained, "token", 0, 1000)
    assert 0 < found["ours"] < found["attack"]
    assert found["points"] == 5000
    assert min(gap for gap in gaps_of(found) if gap is not None) > 0


def _records(recipe: Recipe, ball: str, index: int, points: int) -> dict[str, Any]:
    radii = {"attack": 1.0, "CROWN": 0.2, "IBP": 0.0, "ours": 0.5 / recipe.blocks}
    below = [[0.8, 0.9], [0.5, 0.7], [0.1, 0.5], [-1.0, 0.4], [None, 0.2]]
    shape = {"kind": recipe.kind, "blocks": recipe.blocks, "n": recipe.n, "d": recipe.d}
    seconds = {f"seconds, {who}": 1.0 for who in ("ours", "CROWN", "attack")}
    rest = {"accuracy": 0.8, "margin": 1.0, "below": below, "points": 5 * points}
    return {"ball": ball, "input": index, **shape, **radii, **seconds, **rest}


def test_findings_say_what_was_decided(tmp_path, monkeypatch) -> None:
    """Claims, a table and the three figures, from records that were not computed."""
    named = lambda _, name: lambda: Recipe.of(name if name[0] in "ANS" else "N3")  # noqa: E731
    monkeypatch.setattr(decisions, "_source", named)
    monkeypatch.setattr(decisions, "decided", _records)
    found = reproduce("certified/decisions", out=tmp_path)
    assert "N2: 1.25 (1.25 to 1.25)" in found.claims[0].found
    assert "N2: 0.25" in found.claims[1].found
    assert found.claims[-1].found.startswith("0.1 at the least, in ")
    asked = [k for counts in decisions._FULL.values() for k in counts]
    assert len(found.tables[0].lines) == len(asked) - asked.count(0)
    assert (tmp_path / "decisions.svg").is_file()
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setenv("LIPSCOPE_DECISIONS", str(tmp_path))
    benchmark = importlib.import_module("certified")
    text = benchmark.render(benchmark.measure(quick=False)).text()
    assert "1.25 [1.25, 1.25]" in text


def test_what_is_not_there_is_left_out(tmp_path, monkeypatch) -> None:
    """In one line each: texts, DeepT's folder."""
    monkeypatch.setattr(decisions, "_FULL", {"N1": (1, 1), "N1-prose": (1, 1), "DeepT-1": (0, 1)})
    monkeypatch.setattr(Trained, "of", lambda recipe, *_: recipe)
    monkeypatch.setattr(decisions, "decided", _records)
    monkeypatch.delenv("LIPSCOPE_DEEPT", raising=False)

    found = reproduce("certified/decisions", out=tmp_path)
    said = " ".join(found.remarks)
    assert "N1-prose was left out" in said
    assert "LIPSCOPE_DEEPT names no folder" in said


def test_the_benchmark_says_what_was_decided(monkeypatch) -> None:
    """Ratios, the least gap by share, and targets, some of them not measured."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    render = importlib.import_module("certified").render
    raw = [{"name": "N1", **_records(Recipe(), ball, 0, 1000)} for ball in ("joint", "token")]
    text = render(raw).text()
    assert "2.50 [2.50, 2.50]" in text
    assert "0.100 | 0.200 | 0.400 | 1.400 |" in text
    # radii and seconds of the ten goals that the records do not tell
    assert text.count("not measured") == 2 * 10 and text.count("**missed**") == 1
