"""The margin's gain at a stream, moves that change an answer, and joint tests of predictors."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from lipscope_experiments.joint_test import better, different, mean_correlation, ranks
from lipscope_experiments.questions.margin_gain import StreamRun
from tiny import TEXT, tiny

GEN = torch.Generator().manual_seed(0)
TRUTH = torch.rand(2, 20, 3, generator=GEN)
NEAR = TRUTH + 0.05 * torch.rand(2, 20, 3, generator=GEN)
NOISE = torch.rand(2, 20, 3, generator=GEN)


def ranked(values: torch.Tensor) -> list[torch.Tensor]:
    return [ranks(one.tolist()) for one in values]


def test_the_mean_correlation_is_that_of_scipy() -> None:
    expected = [
        stats.spearmanr(NOISE[s, :, c], TRUTH[s, :, c]).statistic for s in (0, 1) for c in range(3)
    ]
    found = mean_correlation(ranked(NOISE), ranked(TRUTH))
    assert found == pytest.approx(sum(expected) / 6)
    assert mean_correlation(ranked(0 * NOISE), ranked(TRUTH)) == 0.0


def test_a_planted_predictor_is_told_from_noise() -> None:
    known = {"near": ranked(NEAR), "noise": ranked(NOISE), "against": ranked(-NEAR)}
    levels = different(known, ranked(TRUTH))
    assert max(levels["near"], levels["against"]) < 0.01 < 0.1 < levels["noise"]
    gaps = better(known, ranked(TRUTH), ["near", "noise"], ["noise", "near"])
    assert gaps["near", "noise"][0] == pytest.approx(-gaps["noise", "near"][0])
    assert gaps["near", "noise"][1] < 0.01 and gaps["noise", "near"][1] > 0.9
    assert gaps["noise", "noise"] == (0.0, pytest.approx(gaps["noise", "noise"][1]))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_gain_and_moves_at_a_stream(family: str) -> None:
    """Against central differences of the model itself, moved at the block by a hook of its own."""
    loaded, layer = tiny(family, scale=1.0), 1
    samples = 3 if family == "gpt2" else 6
    run = StreamRun(
        loaded, [0, layer], {"data": TEXT, "lengths": [9], "samples": samples}, range(samples)
    )
    sample = run.order[0]
    found = run.flipped(sample, layer)
    block = loaded.model.get_submodule(run.paths[layer])
    held: list[torch.Tensor] = []

    def scores(move: torch.Tensor) -> torch.Tensor:
        def before(_, args):
            held.append(args[0][0].detach())
            return (args[0] + move, *args[1:])

        hook = block.register_forward_pre_hook(before)
        with torch.no_grad():
            hidden = run.read(sample).last_hidden_state[0]
        hook.remove()
        return run.scores(hidden)

    first, second = scores(torch.zeros(())).topk(2).indices.tolist()
    x = held[0]
    assert found["norm"] == pytest.approx(float(x.norm()), rel=1e-5)
    slopes, step = [], 1e-2
    for move in step * torch.eye(x.numel()).view(-1, *x.shape):
        gaps = [one[first] - one[second] for one in (scores(move), scores(-move))]
        slopes.append(float(gaps[0] - gaps[1]) / (2 * step))
    assert found["gain"] == pytest.approx(float(torch.tensor(slopes).norm()), rel=2e-2)
    # Along the gradient, a little further than the flip that was found, the answer is another one.
    assert found["flip"] is not None and found["flip"] > 0
    if found["patch"] is not None:
        assert found["flip"] <= found["patch"] * 1.05
