"""Weightings other than softmax: what the interface asks for is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agreement import agree, gaussian
from lipscope import to_dense
from lipscope.attention import Distance, DotProduct, InnerProduct, Softmax, Weighting
from lipscope.attention.jacobian import ChunkedCore
from lipscope.attention.weighting import At
from lipscope.certificates import certify_ball
from lipscope.errors import InputError
from lipscope.measures import repeated_tokens
from lipscope.theorems import NotApplicableError, catalogue, evaluate


class Sigmoid(Weighting):
    """Every weight by itself: rows do not add up to 1."""

    def weights(self, s: Tensor) -> Tensor:
        return s.sigmoid()

    def jvp(self, at: At, ds: Tensor) -> Tensor:
        return ds * at[0] * (1 - at[0])

    def vjp(self, at: At, gp: Tensor) -> Tensor:
        return gp * at[0] * (1 - at[0])


class Sinkhorn(Weighting):
    """Rows and columns normalised in turn, a few times: a weight depends on all rows."""

    all_rows = True
    kept = steps = 4

    def weights(self, s: Tensor) -> Tensor:
        return self._stages(s)[-1]

    def at(self, s: Tensor) -> At:
        return tuple(reversed(self._stages(s)))

    def jvp(self, at: At, ds: Tensor) -> Tensor:
        for t, p in enumerate(reversed(at)):
            ds = ds - (p * ds).sum(-1 - t % 2, keepdim=True)
        return at[0] * ds

    def vjp(self, at: At, gp: Tensor) -> Tensor:
        gs = at[0] * gp
        for t, p in zip(reversed(range(self.steps)), at, strict=True):
            gs = gs - p * gs.sum(-1 - t % 2, keepdim=True)
        return gs

    def _stages(self, s: Tensor) -> list[Tensor]:
        found = []
        for t in range(self.steps):
            s = s - s.logsumexp(-1 - t % 2, keepdim=True)
            found.append(s.exp())
        return found


class PlainSoftmax(Weighting):
    """Softmax with nothing but what is asked for."""

    def weights(self, s: Tensor) -> Tensor:
        return torch.softmax(s, -1)

    def jvp(self, at: At, ds: Tensor) -> Tensor:
        return Softmax().jvp(at, ds)

    def vjp(self, at: At, gp: Tensor) -> Tensor:
        return Softmax().vjp(at, gp)


WEIGHTINGS = (Sigmoid(), Sinkhorn(), PlainSoftmax())
N, HEADS = 7, 3
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "masked": {"mask": (gaussian(HEADS, N, N) < 0.3) | torch.eye(N, dtype=torch.bool)},
    "capped, bias": {"softcap": 1.5, "score_bias": gaussian(HEADS, N, N, seed=3)},
    "grouped": {"groups": 1},
}


def build(weighting: Weighting, case: str) -> InnerProduct:
    kind = type("Weighted", (InnerProduct,), {"weighting": weighting})
    k = 2 * CASES[case].get("groups", HEADS)
    weights = [gaussian(2 * HEADS, 4), gaussian(k, 4), gaussian(k, 4), gaussian(5, 2 * HEADS)]
    return kind(*weights, heads=HEADS, **CASES[case])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda one: type(one).__name__)
def test_three_methods_make_a_weighting(weighting: Weighting, case: str) -> None:
    layer = build(weighting, case)
    agree(layer, gaussian(N, 4))
    agree(layer, gaussian(N, 4), gaussian(N, seed=5))


def test_a_score_takes_any_weighting() -> None:
    kind = type("Weighted", (Distance,), {"weighting": Sinkhorn()})
    agree(kind(gaussian(6, 4), gaussian(6, 4), gaussian(4, 4), heads=2), gaussian(N, 4))


def test_all_rows_at_once_are_parted_by_heads() -> None:
    core = ChunkedCore(build(Sinkhorn(), "causal"), gaussian(N, 4), 400)
    assert [b.shape for b in core.blocks] == [(1, N, N)] * HEADS


def test_softmax_is_what_its_parts_make_it() -> None:
    x = gaussian(N, 4)
    fused, plain = (to_dense(build(w, "masked").linearise(x)) for w in (Softmax(), PlainSoftmax()))
    torch.testing.assert_close(fused, plain)


def test_rows_that_read_nothing() -> None:
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[2] = False
    layer = build(Sigmoid(), "plain").replace(mask=mask, output=None)
    agree(layer, gaussian(N, 4))
    assert not layer(gaussian(N, 4))[2].any()
    with pytest.raises(InputError, match="every row"):
        build(Sinkhorn(), "plain").replace(mask=mask)(gaussian(N, 4))


def test_statements_about_softmax_are_not_made_of_others() -> None:
    layer = DotProduct(*(gaussian(6, 4) for _ in range(3)), heads=HEADS)
    layer.weighting = Sigmoid()
    theorem = next(one for one in catalogue() if one.name == "row_gram")
    with pytest.raises(NotApplicableError, match="no softmax"):
        evaluate(theorem, layer, x=gaussian(N, 4))
    with pytest.raises(InputError, match="Found a `weighting` of its own"):
        certify_ball(layer, gaussian(N, 4), eps=0.1)
    with pytest.raises(InputError, match="not available"):
        repeated_tokens(build(Sigmoid(), "plain"), gaussian(2, 4), (1, 3))
