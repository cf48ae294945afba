"""Areas of signals, their intervals and joint levels, on numbers with known answers."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from lipscope_experiments.questions.early_warning import _error, areas

GEN = torch.Generator().manual_seed(0)
BAD = torch.rand(40, generator=GEN) < 0.5
NOISE = torch.rand(40, 3, generator=GEN).round(decimals=1)  # with ties


def test_an_area_is_the_statistic_of_mann_and_whitney() -> None:
    found, without, _ = areas(NOISE, BAD, torch.ones(40, 40).bool())
    for k in range(3):
        u = stats.mannwhitneyu(NOISE[BAD, k], NOISE[~BAD, k]).statistic
        assert float(found[k]) == pytest.approx(u / int(BAD.sum()) / int((~BAD).sum()))
    rest = torch.arange(40) != 7
    left, *_ = areas(NOISE[rest], BAD[rest], torch.ones(39, 39).bool())
    assert without[7].tolist() == pytest.approx(left.tolist())
    # Beside the standard error without ties, of as many runs that are told apart by chance alone.
    chance = 1.96 * (41 / 12 / int(BAD.sum()) / int((~BAD).sum())) ** 0.5
    assert _error(without).tolist() == pytest.approx([chance] * 3, rel=0.3)


def test_pairs_are_of_one_kind_and_levels_joint() -> None:
    """A kind that is higher by itself, and has more bad runs, says nothing within kinds."""
    kind = torch.arange(40) < 20
    bad = torch.where(kind, torch.arange(40) % 4 > 0, torch.arange(40) % 4 == 0)
    same = kind[:, None] == kind[None]
    values = torch.stack(
        [kind.int() + 0.01 * NOISE[:, 0], bad.int() + NOISE[:, 1], -NOISE[:, 1] - bad.int()], 1
    )
    found, _, levels = areas(values, bad, same)
    whole, *_ = areas(values, bad, torch.ones_like(same))
    assert float(whole[0]) > 0.7 and abs(float(found[0]) - 0.5) < 0.2
    assert found[1] + found[2] == pytest.approx(1.0) and levels[1] == levels[2]
    assert levels[1] < 0.01 < 0.2 < levels[0]
