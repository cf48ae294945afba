"""The proof that dot-product attention is not Lipschitz, and ascent in the infinity norm."""

import pytest
import torch

from lipscope import DotProduct, L2Attention
from lipscope.errors import InputError
from lipscope.theorems.papers.kim2021 import kim_thm_3_2_infinity, tight_value
from lipscope_experiments.kim2021.tightness import ascend_infinity
from lipscope_experiments.kim2021.witness import proof_steps
from small import drawn

ONE = torch.eye(1).double()


def test_every_step_holds() -> None:
    gen = torch.Generator().manual_seed(0)
    x, e = (torch.randn(6, 4, generator=gen).double() for _ in range(2))
    x[2] = 0
    steps = proof_steps(drawn(3), x, e, 2)
    assert len(steps) == 6 and max(steps.values()) < 1e-12


def test_a_wrong_layer_fails_a_step_or_is_refused() -> None:
    x = torch.ones(3, 4).double()
    with pytest.raises(InputError, match="should be zero"):
        proof_steps(drawn(0), x, x, 0)
    with pytest.raises(InputError, match="unmasked"):
        proof_steps(drawn(0, causal=True), x, x, 0)


def test_ascent_beats_the_extremal_input_and_not_the_bound() -> None:
    layer = L2Attention(ONE, ONE)
    best = ascend_infinity(layer, num_tokens=3, restarts=6, steps=100)
    assert 0.99 * tight_value(3) < best <= kim_thm_3_2_infinity(layer, 3)


def test_ascent_of_a_linear_map() -> None:
    """Zero queries: every row averages, and the infinity norm is 1 wherever one looks."""
    layer = DotProduct(0 * ONE, ONE, ONE)
    assert ascend_infinity(layer, num_tokens=4, restarts=2, steps=3) == pytest.approx(1.0)
