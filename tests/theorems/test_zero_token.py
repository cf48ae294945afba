"""The proof that dot-product attention is not Lipschitz, and ascent in the infinity norm."""

import pytest
import torch

from lipscope import DotProduct, L2Attention
from lipscope.theorems.papers.kim2021 import kim_thm_3_2_infinity, tight_value
from lipscope_experiments.kim2021.tightness import ascend_infinity
from lipscope_experiments.kim2021.witness import proof_steps

ONE = torch.eye(1).double()


@pytest.mark.parametrize("seed", [0, 3])
def test_every_step_holds(seed: int) -> None:
    steps = proof_steps(seed)
    assert len(steps) == 6 and max(steps.values()) < 1e-12


def test_ascent_beats_the_extremal_input_and_not_the_bound() -> None:
    layer = L2Attention(ONE, ONE)
    best = ascend_infinity(layer, num_tokens=3, restarts=6, steps=100)
    assert 0.99 * tight_value(3) < best <= kim_thm_3_2_infinity(layer, 3)


def test_ascent_of_a_linear_map() -> None:
    """Zero queries: every row averages, and the infinity norm is 1 wherever one looks."""
    layer = DotProduct(0 * ONE, ONE, ONE)
    assert ascend_infinity(layer, num_tokens=4, restarts=2, steps=3) == pytest.approx(1.0)
