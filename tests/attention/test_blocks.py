"""Causal layers and windows skip what they hide: exact against all blocks at once, and cheaper."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import lipscope as ls
from lipscope.attention.jacobian import ChunkedCore

N, D, HEADS = 150, 12, 4
LAYERS: dict[str, dict[str, Any]] = {
    "encoder": {},
    "causal": {"causal": True},
    "window": {"window": 40},
    "causal, window": {"causal": True, "window": 70},
    "narrow window": {"causal": True, "window": 1},
    "causal, masked, empty rows": {"causal": True, "mask": "heads"},
    "causal, soft cap, bias": {"causal": True, "softcap": 2.0, "score_bias": "heads"},
    "window, bias": {"causal": True, "window": 33, "score_bias": "all"},
    "grouped": {"causal": True, "groups": 2},
}
# Everything kept; nothing kept, few rows of one head at a time; blocks of a few heads.
MEMORY = [2**30, 8 * 8 * N * 3 * HEADS, 8 * 8 * N * 130]


def build(name: str, n: int = N, d: int = D, heads: int = HEADS) -> tuple[ls.Attention, Tensor]:
    gen = torch.Generator().manual_seed(len(name))

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    options = dict(LAYERS[name])
    if options.get("mask"):
        options["mask"] = torch.rand(heads, n, n, generator=gen) < 0.03
    if bias := options.get("score_bias"):
        options["score_bias"] = t(heads, n, n) if bias == "heads" else t(n, n)
    k = (options.get("groups") or heads) * 3
    layer = ls.DotProduct(
        t(heads * 3, d), t(k, d), t(k, d), t(d, heads * 3), heads=heads, **options
    )
    return layer, t(n, d)


@pytest.mark.parametrize("memory", MEMORY, ids=["kept", "rebuilt", "parted"])
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_give_the_products_of_the_whole(name: str, memory: int) -> None:
    layer, x = build(name)
    e, g = torch.randn(2, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output, jvp = cast(Any, torch.func.jvp(layer, (x,), (e,)))
    vjp: Any = torch.func.vjp(layer, x)[1]
    op = layer.linearise(x, memory=memory)
    torch.testing.assert_close(op.matvec(e), jvp, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(op.rmatvec(g), vjp(g)[0], rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), output, rtol=1e-12, atol=1e-12)
    heads = layer.linearise(x, memory=memory, per_head=True).matvec(e.expand(HEADS, N, D))
    torch.testing.assert_close(heads.sum(0), jvp, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["causal", "causal, window", "window, bias"])
def test_row_statistics_are_those_of_the_whole(name: str) -> None:
    layer, x = build(name)
    core = ChunkedCore(layer, x, MEMORY[1])
    assert not core.stored and len(core.blocks) > 2
    found = torch.empty(HEADS, N, dtype=torch.float64)
    for block, statistic in zip(core.blocks, core.statistics, strict=True):
        assert statistic is not None
        found[block.heads, block.rows] = statistic[..., 0]
    q, k, _ = layer.project(x)
    s, bias = layer.score(q, k), layer.bias(k, slice(0, N), slice(0, N))
    assert bias is not None
    torch.testing.assert_close(found, torch.logsumexp(s + bias, -1))


def flops(layer: ls.Attention, x: Tensor, memory: int) -> list[float]:
    """Matrix products of the core alone: linearisation, one JVP, one VJP."""
    q, k, v = layer.project(x)
    counts, core = [], None
    for step in range(3):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            if step == 0:
                core = ChunkedCore(layer, x, memory)
            elif core is not None and step == 1:
                core.jvp(q, k, v)
            elif core is not None:
                core.vjp(v)
        counts.append(float(counter.get_total_flops()))
    return counts


@pytest.mark.parametrize("memory", [2**30, 2**23], ids=["kept", "rebuilt"])
def test_causal_layers_cost_about_half(memory: int) -> None:
    """Eight steps down the diagonal: (1 + 1/8) / 2 of all pairs; the projections are left out."""
    n, d = 512, 12
    whole, x = build("encoder", n, d)
    causal, _ = build("causal", n, d)
    projections = 3 * 2 * n * d * HEADS * 3
    full, half = flops(whole, x, memory), flops(causal, x, memory)
    for i in range(3):
        once = projections if i == 0 else 0
        assert (half[i] - once) / (full[i] - once) <= 0.5625 + 1e-9


def test_a_window_costs_in_proportion_to_its_width() -> None:
    n, window = 1024, 128
    whole, x = build("encoder", n, 4, 1)
    narrow = ls.DotProduct(whole.query, whole.key, whole.value, causal=True, window=window)
    kept, all_pairs = flops(narrow, x, 2**30)[1:], flops(whole, x, 2**30)[1:]
    for ours, full in zip(kept, all_pairs, strict=True):
        assert ours / full <= (window + 64) / n


def test_no_block_is_larger_than_asked() -> None:
    layer, x = build("causal")
    for memory in (2**16, 2**14, 2**12):
        core = ChunkedCore(layer, x, memory)
        assert all(b.size * 8 <= max(memory // 8, N * 8) for b in core.blocks)
        assert core.scratch.numel() * 8 <= 2 * max(memory // 8, N * 8)
