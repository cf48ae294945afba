"""The character-level model: what is trained is measured, and a run is the same when repeated."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agreement import agree
from command import TEXT
from lipscope.errors import InputError
from lipscope.records.folder import RunFolder
from lipscope_experiments import reproduce
from lipscope_experiments.data import Corpus, Text, corpus
from lipscope_experiments.kim2021 import charlm
from lipscope_experiments.kim2021.charlm import (
    VARIANTS,
    CharacterRun,
    UntiedL2,
    train,
)

TINY = CharacterRun("dot product", 1, "warm-up", 0, 4, 2, width=8, heads=2, length=6, batch=2)


@pytest.fixture(scope="module")
def data() -> Corpus:
    return corpus(Text("a text", (TEXT * 100)[:6000]), TINY.length)


def run_of(
    path: Path, data: Corpus, run: CharacterRun = TINY
) -> tuple[dict[str, Any], dict[str, float]]:
    """What a run returns, and its sigmas by model, layer and step."""
    with RunFolder(path, {"a": 1}) as folder:
        found = train(run, data, folder)
        rows = {f"{row.model} {row.layer}": row.sigma or 0.0 for row in folder.done.values()}
        assert not [row.note for row in folder.done.values() if row.note or row.step is None]
    return found, rows


@pytest.mark.parametrize(
    "variant", [*(pytest.param(one, marks=pytest.mark.slow) for one in VARIANTS[:-1]), VARIANTS[-1]]
)
def test_a_killed_run_begins_anew_to_the_same_curve(tmp_path, monkeypatch, data, variant) -> None:
    run = replace(TINY, variant=variant)
    undisturbed, sigmas = run_of(tmp_path / "whole", data, run)
    rate_at = CharacterRun.rate_at

    def killed(run: CharacterRun, step: int) -> float:
        if step == 3:  # after the first readings
            raise KeyboardInterrupt
        return rate_at(run, step)

    monkeypatch.setattr(CharacterRun, "rate_at", killed)
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path / "killed", data, run)
    monkeypatch.setattr(CharacterRun, "rate_at", rate_at)
    again, anew = run_of(tmp_path / "killed", data, run)
    assert again == undisturbed and anew == sigmas
    assert {int(name.split("@")[1].split()[0]) for name in sigmas} == {0, 2, 4}
    if variant == VARIANTS[-1]:
        assert max(sigmas.values()) < charlm.CONSTANT


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch, data) -> None:
    monkeypatch.setattr(CharacterRun, "rate_at", lambda run, step: 1e-3 if step <= 2 else 1e30)
    found, _ = run_of(tmp_path / "run", data)
    assert found["bits"] is None and [point[0] for point in found["curve"]] == [2]
    assert "sigma of layer" in found["stopped"] and "blocks." in found["stopped"]


def test_what_cannot_be_trained_on_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"at least 4,480 characters.*Found 4,000 in `short`"):
        corpus(Text("short", "a" * 4000), 6)


def test_held_out_characters_are_not_trained_on() -> None:
    text = "ab" * 2500 + "c" * 555
    found = corpus(Text("a text", text), 6)
    assert found.characters == 3 and set(found.train.tolist()) == {0, 1}
    assert found.held.shape == (64, 7) and found.held.max() == 2  # c, which training never saw
    chances = torch.tensor([2501.0, 2500.0, 1.0]) / 5002  # each counted once more
    expected = -(chances.log2()[found.held[:, 1:]].mean())
    assert found.chance == pytest.approx(float(expected), rel=1e-6)
    assert found.rest[0] == 1 and (found.rest[1:] == 2).all()  # b, then c alone
    bits = (math.log2(2499 + 3) + 554 * math.log2(3)) / 555
    assert found.by_pairs == (0.0, pytest.approx(bits))


def test_untied_attention_has_the_derivative_of_autograd() -> None:
    gen = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 4, generator=gen, dtype=torch.float64) for _ in range(3)]
    layer = UntiedL2(*weights, heads=2, scale=1.0, causal=True)
    x = torch.randn(5, 4, generator=gen, dtype=torch.float64)
    agree(layer, x)
    q, k = ((x @ w.T)[:, :3] for w in weights[:2])
    p = torch.softmax(
        (-torch.cdist(q, k).square() / 3**0.5).masked_fill(
            ~torch.ones(5, 5).bool().tril(), -torch.inf
        ),
        1,
    )
    assert torch.allclose(layer(x)[:, :3], p @ (x @ weights[2].T)[:, :3])


def test_the_page_says_how_deep_each_trains_and_what_ended_early(tmp_path, monkeypatch) -> None:
    """Runs made up: dot products fail at four blocks, and one run of them has no finite loss."""

    def made_up(run: CharacterRun, data: Corpus, folder: RunFolder) -> dict[str, Any]:
        bad = run.variant == VARIANTS[0] and run.depth == 4
        early = bad and run.schedule == "warm-up"
        bits = None if early else data.chance - (0.1 if bad else 1.0)
        return {"curve": [], "stopped": "Not finite." if early else None, "bits": bits}

    monkeypatch.setattr(charlm, "train", made_up)
    found = reproduce("kim2021/charlm", quick=True, out=tmp_path / "run")
    for claim in found.claims:
        assert claim.found == (
            "dot product: 2; L2, untied: 4; L2, tied: 4; contractive L2: 4 (of 2, 4)"
        )
    lines = {line[:2]: line[2:] for line in found.tables[0].lines}
    assert lines["warm-up", "dot product"][1] == "ended early"
    text = (tmp_path / "run" / "findings.md").read_text()
    assert "1 of 16 runs ended in a loss that is not finite. dot product, 4: Not finite." in text
    assert "Not run: the paper's own sizes" in text and (tmp_path / "run" / "charlm.png").exists()
