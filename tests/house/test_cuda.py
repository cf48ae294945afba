"""The same code on a GPU: against the CPU in float64. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lipscope as ls
from lipscope.attention import Rotary
from tiny import encoder, tiny

IDS = torch.arange(24)[None] % 11
N, WIDTH, HEADS = 48, 32, 4

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of NVIDIA here")
pytestmark = pytest.mark.cuda


def layer_of(kind: str) -> ls.DotProduct:
    gen = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=gen).double() / 4 for _ in range(4)]
    angle = torch.rand(N, WIDTH // HEADS, generator=gen).double()
    angle[:, WIDTH // HEADS // 2 :] = angle[:, : WIDTH // HEADS // 2]
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal window": {"causal": True, "window": 9},
        "mask": {"mask": torch.rand(HEADS, N, N, generator=gen) > 0.5},
        "rotary": {"rotary": Rotary(angle.cos(), angle.sin()), "causal": True},
        "soft cap": {"softcap": 2.0},
    }
    return ls.DotProduct(*weights, heads=HEADS, **options[kind])


KINDS = ("plain", "causal window", "mask", "rotary", "soft cap")


def tokens() -> Tensor:
    return torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_moves_with_everything_in_it(kind):
    """To a device without values: what were left behind would be on the CPU."""
    layer = layer_of(kind).to("meta", torch.float32)
    own = [layer.query, layer.value, layer.mask]
    own += [layer.rotary.cos, layer.rotary.sin] if layer.rotary is not None else []
    for tensor in own:
        assert tensor is None or tensor.device.type == "meta"
        assert tensor is None or tensor.dtype in (torch.float32, torch.bool)


@on_gpu
@pytest.mark.parametrize("memory", [2**30, 2**14], ids=["stored", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_in_closed_form(kind, memory):
    x = tokens()
    here = layer_of(kind).linearise(x)
    there = layer_of(kind).cuda().linearise(x.cuda(), memory=memory)
    e = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    for name in ("matvec", "rmatvec"):
        found, expected = getattr(there, name)(e.cuda()), getattr(here, name)(e)
        assert found.device.type == "cuda"
        # float64 on both: sums in another order
        assert torch.allclose(found.cpu(), expected, rtol=1e-10, atol=1e-12)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_solver(dtype):
    x, layer = tokens(), layer_of("plain")
    truth = float(torch.linalg.matrix_norm(ls.to_dense(layer.linearise(x)), 2))
    layer = layer.to("cuda", dtype)
    start = torch.Generator().manual_seed(3)
    top = ls.top_singular(layer.linearise(x.to("cuda", dtype)), tol=1e-4, generator=start)
    assert top.status == "converged" and top.u.device.type == top.v.device.type == "cuda"
    assert top.sigma == pytest.approx(truth, rel=1e-4)
    assert top.sigma <= truth * (1 + 1e-5) and truth <= top.upper


@on_gpu
@pytest.mark.parametrize("name", ["attention", "normed", "residual", "block", "stack", "model"])
@pytest.mark.parametrize("family", ["bert", "llama", "olmo", "torch"])
def test_measurements(family, name):
    """Starts are drawn on the CPU, so that a row is the same on either device."""
    data = IDS if family != "torch" else torch.randn(1, 6, 8)
    model: Any = tiny(family).model if family != "torch" else encoder()
    options: dict[str, Any] = {"map": name, "dtype": "float64", "rest": True, "average": True}
    if family == "torch":
        options["modules"] = r"layers\.\d+\.self_attn$"
        if name == "normed":
            return  # its first layer has no norm before it
    found = ls.measure(model, data, device="cuda", **options)
    expected = ls.measure(model, data, device="cpu", **options)
    for a, b in zip(found, expected, strict=True):
        assert (a.device, b.device, a.status) == ("cuda", "cpu", b.status)
        for column in ("sigma", "upper", "sigma_rest", "frobenius", "relative"):
            assert getattr(a, column) == pytest.approx(getattr(b, column), rel=1e-6), column


@on_gpu
def test_padding_and_sides():
    mask = torch.tensor([[1] * 20 + [0] * 4])
    given = {"input_ids": IDS, "attention_mask": mask}
    rows = [ls.measure(tiny("bert").model, given, device=d) for d in ("cuda", "cpu")]
    for a, b in zip(*rows, strict=True):
        assert a.sigma == pytest.approx(b.sigma, rel=1e-4) and a.note == b.note
    t5 = "random:t5:d_model=12,num_heads=3,d_kv=4,d_ff=16,num_layers=1,vocab_size=300"
    text = "The quick brown fox jumps over the lazy dog. " * 5
    for side in ("query", "key"):
        options: dict[str, Any] = {"lengths": [8], "samples": 1, "side": side, "map": "block"}
        there, here = (ls.measure(t5, text, device=d, **options)[0] for d in ("cuda", "cpu"))
        assert there.sigma == pytest.approx(here.sigma, rel=1e-4)


@on_gpu
def test_gradients_of_sigma():
    x, layer = tokens().float(), layer_of("plain").float()
    grads = []
    for device in ("cuda", "cpu"):
        at = x.to(device).requires_grad_()
        start = torch.Generator().manual_seed(4)
        ls.sigma(layer.to(device), at, tol=1e-5, generator=start).backward()
        assert at.grad is not None
        grads.append(at.grad.cpu())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-2


@on_gpu
def test_the_chunked_core_stays_within_its_budget():
    """n = 8192 with 4 heads: the scores alone would take 1 GiB, the budget is 64 MiB."""
    layer = layer_of("causal window").to("cuda", torch.float32)
    layer.window = None
    x = torch.randn(8192, WIDTH, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op = layer.linearise(x, memory=2**26)
    op.rmatvec(op.matvec(x))
    assert torch.cuda.max_memory_allocated() - before < 2**27
