"""Small classifiers as networks of parts, the search for flips, and the peer's radius."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lipscope import SmoothTransformer
from lipscope.certificates import DecisionBall
from lipscope.control import MeanPool
from lipscope.models import Network, check_network, read_network
from lipscope_experiments import reproduce
from lipscope_experiments.certified import decisions
from lipscope_experiments.certified.classifiers import Recipe, Trained
from lipscope_experiments.certified.crown import Moved, bisected, compared, peer, scores
from lipscope_experiments.certified.decisions import decided, gaps_of

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _trained(name: str) -> Trained:
    """A classifier as it is first drawn, asked about one random input."""
    recipe = Recipe.of(name)
    torch.manual_seed(0)
    body = recipe.body(MeanPool()).double().eval()
    x = torch.randn(recipe.n, recipe.d, dtype=torch.float64)
    return Trained(recipe, body, [x], [int(body(x[None]).argmax())], 1.0)


def _network(name: str) -> tuple[Network, torch.Tensor]:
    trained = _trained(name)
    return trained.network(trained.inputs[0]), trained.inputs[0]


@pytest.mark.parametrize("name", ["A1", "N1-n16", "S2-gelu"])
def test_what_the_peer_reads_is_the_module(name: str) -> None:
    """`check_network` compares values and gradients."""
    trained = _trained(name)
    (x,), network = trained.inputs, trained.network(trained.inputs[0])
    assert len(network.branches) == (1 if name == "A1" else 4 * trained.recipe.blocks)
    check_network(lambda z: scores(network, z[None])[0], lambda z: trained.body(z[None])[0], x)


def _stored(folder: Path, blocks: int) -> dict[str, torch.Tensor]:
    """A small network by DeepT's names, with the sentences of its vocabulary."""
    torch.manual_seed(0)
    linear = {"linear_in": (8, 8), "bert.pooler.dense": (8, 8), "classifier": (8, 2)}
    norms = ["LayerNorm"]
    for at in (f"bert.encoder.layer.{i}." for i in range(blocks)):
        maps = "attention.self.query", "attention.self.key", "attention.self.value"
        linear |= {at + one: (8, 8) for one in (*maps, "attention.output.dense")}
        linear |= {f"{at}intermediate.dense": (8, 16), f"{at}output.dense": (16, 8)}
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    state = {}
    for name, sizes in linear.items():
        state |= nn.Linear(*sizes).state_dict(prefix=f"{name}.")
    for name in norms:
        state |= {f"{name}.weight": torch.rand(8) + 0.5, f"{name}.bias": torch.randn(8)}
    words = ["good", "bad", "film"]
    lines = [{"sentence": " ".join(words), "label": k} for k in (0, 1)]
    for part in ("train", "test"):
        (folder / f"{part}.json").write_text(json.dumps(lines))
    tables = {"word": torch.randn(len(SPECIAL) + 3, 8), "place": torch.randn(9, 8)}
    tables["kind"] = torch.randn(2, 8)
    stored = {"state_dict_embeddings": tables, "state_dict_model_from_embeddings": state}
    torch.save(stored, folder / "smaller_1.ckpt")
    return tables | state


def test_networks_of_deept_are_read_by_their_names(tmp_path) -> None:
    """Against their formula, written out: a linear map, norms, blocks, and a tanh pooler."""
    of = {name: t.double() for name, t in _stored(tmp_path, 1).items()}
    trained = Trained.deept(tmp_path, 1)
    (x,), label = trained.inputs, trained.labels[0]
    ids = torch.tensor([2, 5, 6, 7, 3])
    torch.testing.assert_close(x, of["word"][ids] + of["place"][:5] + of["kind"][0])

    def linear(name: str, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(y, of[f"{name}.weight"], of[f"{name}.bias"])

    def norm(name: str, y: torch.Tensor) -> torch.Tensor:
        return of[f"{name}.weight"] * (y - y.mean(-1, keepdim=True)) + of[f"{name}.bias"]

    def score(y: torch.Tensor) -> torch.Tensor:
        at, y = "bert.encoder.layer.0.", norm("LayerNorm", linear("linear_in", y))
        read = (linear(f"{at}attention.self.{one}", y) for one in ("query", "key", "value"))
        q, k, v = (one.view(-1, 4, 2).transpose(0, 1) for one in read)
        heads = (q @ k.mT / 2**0.5).softmax(-1) @ v
        mixed = linear(f"{at}attention.output.dense", heads.transpose(0, 1).flatten(1))
        y = norm(f"{at}attention.output.LayerNorm", y + mixed)
        wide = linear(f"{at}intermediate.dense", y).relu()
        y = norm(f"{at}output.LayerNorm", y + linear(f"{at}output.dense", wide))
        return linear("classifier", linear("bert.pooler.dense", y[0]).tanh())

    check_network(trained.network(x), score, x)
    assert int(score(x).argmax()) == label
    assert trained.accuracy == 0.5


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
    for ball, free in (("joint", torch.ones(8) > 0), ("token", torch.arange(8) == 0)):
        found = compared(network, x, free, ball)
        assert found["IBP"] < found["CROWN"] < found["attack"]


def test_training_repeats_itself() -> None:
    """A second call has the same inputs, which are classified correctly."""
    texts = [
        " ".join(f"{word} the {'ab'[i % 2]}" for i in range(700)) for word in ("left", "right")
    ]
    first, again = (Trained.of(Recipe.of("A1"), texts, steps=30) for _ in range(2))
    assert first.accuracy == 1.0
    for x, y, label in zip(first.inputs, again.inputs, first.labels, strict=True):
        assert torch.equal(x, y)
        assert int(first.network(x)(x).argmax()) == label


@pytest.mark.parametrize(("name", "ball"), [("A1-n4-d8", "joint"), ("N1-n4-d8", "token")])
def test_radii_and_bounds_at_an_input(name: str, ball: DecisionBall) -> None:
    """Ours is less than the attack's; no bound lies above a margin that was found."""
    found = decided(_trained(name), ball, 0, 1000)
    assert 0 < found["ours"] < found["attack"]
    assert found["points"] == 5000
    assert min(gap for gap in gaps_of(found) if gap is not None) > 0


@pytest.mark.parametrize("radius", [1e-3, 0.5])
def test_moves_of_a_ball_fill_it(radius: float) -> None:
    """None leaves it, some are of its sphere, some near where a descent ended."""
    end = torch.zeros(2, 3, dtype=torch.float64)
    end[0, 0] = radius
    sizes = (moves := decisions._moves(end, radius, 4000)).norm(dim=(1, 2)) / radius
    assert sizes.max() <= 1 + 1e-12
    assert (sizes[::4] - 1).abs().max() < 1e-12
    assert (moves - end).norm(dim=(1, 2)).min() < 0.1 * radius


def _records(trained: Trained, ball: str, index: int, points: int) -> dict[str, Any]:
    recipe = trained.recipe
    radii = {"attack": 1.0, "CROWN": 0.2, "IBP": 0.0, "ours": 0.5 / recipe.blocks}
    below = [[0.8, 0.9], [0.5, 0.7], [0.1, 0.5], [-1.0, 0.4], [None, 0.2]]
    shape = {"kind": recipe.kind, "blocks": recipe.blocks, "n": recipe.n, "d": recipe.d}
    seconds = {f"seconds, {who}": 1.0 for who in ("ours", "CROWN", "attack")}
    rest = {"accuracy": 0.8, "margin": 1.0, "below": below, "points": 5 * points}
    return {"ball": ball, "input": index, **shape, **radii, **seconds, **rest}


def test_findings_say_what_was_decided(tmp_path, monkeypatch) -> None:
    """Claims, a table and the three figures, from records that were not computed."""
    named = lambda _, name: _trained(name if name[0] in "ANS" else "N3")  # noqa: E731
    monkeypatch.setattr(decisions, "_trained", named)
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
    assert "1.25 (1.25 to 1.25)" in text


def test_what_is_not_there_is_left_out(tmp_path, monkeypatch) -> None:
    """In one line each: texts, DeepT's folder."""
    monkeypatch.setattr(decisions, "_FULL", {"N1": (1, 1), "N1-prose": (1, 1), "DeepT-1": (0, 1)})
    monkeypatch.setattr(Trained, "of", lambda recipe, *_: _trained(recipe.kind + "1"))
    monkeypatch.setattr(decisions, "decided", _records)
    monkeypatch.delenv("LIPSCOPE_DEEPT", raising=False)

    found = reproduce("certified/decisions", out=tmp_path)
    said = " ".join(found.remarks)
    assert "N1-prose was left out" in said
    assert "LIPSCOPE_DEEPT names no folder" in said


def test_the_benchmark_says_what_was_decided(monkeypatch) -> None:
    """Medians of ratios, some of them not measured."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    render = importlib.import_module("certified").render
    raw = [{"name": "N1", **_records(_trained("N1"), ball, 0, 1000)} for ball in ("joint", "token")]
    text = render(raw).text()
    assert "2.50 |" in text
    # radii and seconds of the ten goals that the records do not tell
    assert text.count("not measured") == 2 * 10 and text.count("**missed**") == 1
