"""Bounds on the inputs that gradient ascent finds: the hardest for an upper bound."""

import pytest
import torch

from layers import draw
from lipscope import to_dense
from lipscope.attacks import ascend
from lipscope.theorems import LayerSubject, NotApplicableError, catalogue, evaluate
from searched import searched

REGIMES = ("medium", "sharp", "causal", "masked", "biased, causal", "heads", "rotary")


@pytest.mark.parametrize("regime", REGIMES)
@searched(1, 3)
def test_no_upper_bound_is_violated_where_ascent_leads(count: int, regime: str) -> None:
    asked = [
        t
        for t in catalogue()
        if t.kind == "upper" and t.sound and t.scope != "limit" and t.metric == "frobenius"
    ]
    checked = 0
    for seed in range(count):
        layer, start = draw(regime, seed)
        radius = float(start.norm(dim=1).max())
        found = ascend(
            layer,
            num_tokens=len(start),
            radius=radius,
            restarts=2,
            steps=25,
            start=start,
            generator=torch.Generator().manual_seed(seed),
        )
        x = found.x.double()
        sigma = float(torch.linalg.matrix_norm(to_dense(layer.linearise(x)), 2))
        at_start = float(torch.linalg.matrix_norm(to_dense(layer.linearise(start)), 2))
        assert sigma >= at_start * (1 - 1e-3), "the ascent should end above its start"
        shared = LayerSubject(layer, x=x)
        for theorem in asked:
            if "eps" in theorem.needs:
                continue
            try:
                bound = evaluate(theorem, shared, num_tokens=len(x), radius=radius * (1 + 1e-12))
            except NotApplicableError:
                continue
            checked += 1
            assert bound >= sigma * (1 - 1e-9), theorem.name
    assert checked >= 5 * count
