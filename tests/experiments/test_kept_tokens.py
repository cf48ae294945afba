"""Keys and values of single tokens: evicted, rounded, and kept by policy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lipscope_experiments.joint_test import flips, verdict
from lipscope_experiments.questions import kept_tokens
from lipscope_experiments.questions.kept_tokens import cached_run, on_grid, tokens_kept
from tiny import tiny

N, LATER = 6, 4
IDS = torch.arange(40, 40 + 7 * (N + LATER), 7)
EVICTED = torch.ones(3, N, dtype=torch.bool)
EVICTED[1, 2] = EVICTED[2, 0] = EVICTED[2, 4] = False


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(kept_tokens, "_CONTEXT", N)


def loss(hidden: torch.Tensor, table: torch.Tensor) -> float:
    logits = (hidden @ table.T)[N:-1]
    return float(torch.nn.functional.cross_entropy(logits, IDS[N + 1 :]))


def test_evicting_is_masking_in_the_model_itself() -> None:
    """Against one pass of its own attention, with a mask for later rows only."""
    loaded = tiny("llama", scale=2.0)
    model: Any = loaded.model
    with cached_run(loaded, IDS) as cost:
        found = cost(EVICTED, 0)
    model.set_attn_implementation("eager")
    table, losses = model.get_input_embeddings().weight.detach(), []
    for kept in EVICTED:
        seen = torch.ones(N + LATER, N + LATER).tril().bool()
        seen[N:, :N] &= kept
        mask = torch.zeros(seen.shape).masked_fill(~seen, -1e9)[None, None]
        with torch.no_grad():
            hidden = model(IDS[None], attention_mask=mask).last_hidden_state[0]
        losses.append(loss(hidden, table))
    assert found["loss"] == pytest.approx([one - losses[0] for one in losses], abs=1e-5)
    assert abs(found["divergence"][0]) < 1e-6 < min(found["divergence"][1:])
    assert abs(found["loss"][1]) > 1e-4


def test_evicting_from_an_encoder_is_a_mask_of_keys() -> None:
    loaded = tiny("bert", scale=2.0)
    model: Any = loaded.model
    ids = IDS[:N]
    with cached_run(loaded, ids) as cost:
        found = cost(EVICTED, 0)
        assert cost(torch.ones(1, N).bool(), 2)["hidden"] == pytest.approx([0.0], abs=1e-6)
    with torch.no_grad():
        hidden = model(ids.expand(3, -1), attention_mask=EVICTED.long()).last_hidden_state
    cosine = torch.cosine_similarity(hidden.mean(1), hidden[:1].mean(1)).tolist()
    assert found["cosine"] == pytest.approx([1 - one for one in cosine], abs=1e-6)
    change = (hidden - hidden[0]).flatten(1).norm(dim=1) / hidden[0].norm()
    assert found["hidden"] == pytest.approx(change.tolist(), abs=1e-6)
    assert abs(found["cosine"][0]) < 1e-6 < min(found["hidden"][1:])


def test_many_bits_lose_nothing_and_few_lose_more() -> None:
    """Heads of four entries: of two, both would be ends of the grid."""
    with cached_run(tiny("qwen3", scale=2.0), IDS) as cost:
        none = torch.zeros(1, N, dtype=torch.bool)
        lost = [cost(none, bits)["divergence"][0] for bits in (20, 8, 4, 2)]
    assert lost == sorted(lost) and lost[0] < 1e-6 < lost[-1]


@pytest.mark.parametrize("bits", [2, 4])
def test_errors_of_the_grid(bits: int) -> None:
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0] = 3.0
    found = on_grid(x, bits)
    half = (x.amax(-1) - x.amin(-1)) / (2**bits - 1) / 2
    assert ((found - x).abs().amax(-1) <= half * (1 + 1e-12)).all()
    assert max(len(row.unique()) for row in found) <= 2**bits
    torch.testing.assert_close(found.aminmax(dim=-1), x.aminmax(dim=-1))
    torch.testing.assert_close(on_grid(found, bits), found)


def test_policies_keep_as_many_as_they_may() -> None:
    place = torch.arange(12.0)
    scores = {kept_tokens.PLACE: place, kept_tokens.SHARE: (place - 5).abs().neg()}

    def kept(policy: str, causal: bool = True) -> list[int]:
        return tokens_kept(policy, scores, 6, causal).nonzero().flatten().tolist()

    assert kept(kept_tokens.FIRST) == [0, 1, 2, 3, 4, 5] and kept(kept_tokens.LAST)[0] == 6
    assert kept(kept_tokens.STREAM) == [0, 1, 2, 3, 10, 11]
    assert kept(kept_tokens.SHARE) == [4, 5, 6, 9, 10, 11]
    assert len(set(kept(kept_tokens.SHARE, causal=False)) & {3, 4, 5, 6, 7}) == 5


def test_levels_of_flips_are_counted_by_hand() -> None:
    values = {"all": [3.0, 2.0, 4.0, 1.0, 2.0], "mixed": [1.0, -1.0, 2.0, -2.0, 0.5]}
    found = flips(values)
    tops = []
    for signs in itertools.product((-1, 1), repeat=5):
        sums = [
            abs(sum(s * v for s, v in zip(signs, one, strict=True)))
            / sum(v * v for v in one) ** 0.5
            for one in values.values()
        ]
        tops.append(max(sums))
    for name, one in values.items():
        mine = abs(sum(one)) / sum(v * v for v in one) ** 0.5
        assert found[name][0] == pytest.approx(sum(one) / 5)
        assert found[name][1] == sum(top >= mine - 1e-9 for top in tops) / 32
    assert found["all"][1] == 2 / 32 and flips({"half": [-1.0] * 5})["half"] == (-1.0, 2 / 32)


def test_what_is_not_above_zero_or_not_sure_refutes() -> None:
    gaps = {"a": (0.25, 0.01), "b": (-0.5, 0.001), "c": (0.125, 0.05)}
    said = "a +0.250 (p 0.010); b -0.500 (p 0.001); c +0.125 (p 0.050)"
    assert verdict(gaps, 3) == f"{said}. Refuted by b, c"
    assert verdict({"a": gaps["a"]}) == "a +0.25 (p 0.010). Not refuted"
