"""Residual sums with weights as plain ones: the same function in other coordinates."""

import pytest
import torch

from agreement import gaussian
from lipscope.attention import DotProduct
from lipscope.models import Branch, Feed, Network, Norm, scaled, with_plain_sums


def attention(seed: int) -> DotProduct:
    q, k, v, o = (gaussian(4, 4, seed=seed + i) for i in range(4))
    biases = {f"{name}_bias": gaussian(4, seed=seed) for name in ("query", "key", "value")}
    return DotProduct(q, k, v, o, heads=2, output_bias=gaussian(4, seed=9), **biases)


@pytest.mark.parametrize("by_mean_square", [False, True])
def test_weighted_sums_become_plain_ones(by_mean_square):
    norm = Norm(gaussian(4, seed=1), gaussian(4, seed=2), eps=0.3, scaled=by_mean_square)
    gated = Feed(
        *(gaussian(*s, seed=3) for s in ((6, 4), (6,), (4, 6), (4,))),
        "silu",
        gaussian(6, 4, seed=4),
        gaussian(6, seed=5),
    )
    plain = Feed(*(gaussian(*s, seed=6) for s in ((6, 4), (6,), (4, 6), (4,))), "gelu")
    branches = (
        Branch(attention(1), skip=0.7),
        Branch(gated, skip=-1.5),
        Branch(attention(2), norm, skip=0.4),
        Branch(plain, norm, skip=0.9),
        Branch(plain, skip=False),
        Branch(gated, skip=1.2),
    )
    share = torch.full((5,), 0.2, dtype=torch.float64)
    network = Network(
        branches,
        share,
        gaussian(3, 4, seed=7),
        gaussian(3, seed=8),
        tail=(Branch(plain, skip=0.5),),
    )
    found = with_plain_sums(network)
    assert all(isinstance(one.skip, bool) for one in (*found.branches, *found.tail))
    x = gaussian(5, 4, seed=10)
    torch.testing.assert_close(found(x), network(x), rtol=1e-11, atol=1e-11)


def test_a_number_scales_a_part_on_any_device():
    """Numbers are made where the weights are: here on `meta`, which takes no others."""
    sizes = ((6, 4), (6,), (4, 6), (4,))
    found = scaled(Feed(*(torch.empty(s, device="meta") for s in sizes), "relu"), 0.5)
    assert found.outer.device.type == "meta"
