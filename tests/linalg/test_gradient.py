"""Gradients of sigma against finite differences of the dense SVD, first and second order."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layers
import lipscope as ls
from lipscope.attention import jacobian as module

REGIMES = (
    "medium",
    "causal",
    "masked",
    "biased, causal",
    "rotary, biased, causal",
    "heads",
    "heads, grouped, biased, causal",
    "heads, no projection",
)
VARIANTS = layers.OTHERS
STEP = 1e-5  # central differences: 1e-10 of curvature plus 1e-11 of rounding


def draw(name: str) -> tuple[ls.Attention, Tensor]:
    made = layers.draw_variant(name, 4) if name in VARIANTS else layers.draw(name, 1)
    return made[0], made[1].requires_grad_()


def tensors(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The input and every weight, made to want gradients."""
    weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {"x": x} | {name: t.requires_grad_() for name, t in weights.items()}


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def value(layer: Any, x: Tensor, **options: Any) -> Tensor:
    return ls.sigma(layer, x, tol=1e-11, generator=seeded(), **options)


def dense(layer: Any, x: Tensor) -> float:
    jacobian = torch.autograd.functional.jacobian(layer, x.detach())
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def moved(tensor: Tensor, step: Tensor, f: Any) -> Any:
    """``f`` with a tensor changed in place, and put back."""
    with torch.no_grad():
        tensor += step
    answer = f()
    with torch.no_grad():
        tensor -= step
    return answer


@pytest.mark.parametrize("memory", [2**30, 2**12], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", [*REGIMES, *VARIANTS])
def test_first_derivatives_in_the_input_and_every_weight(name: str, memory: int) -> None:
    layer, x = draw(name)
    wanted = tensors(layer, x)
    found = value(layer, x, memory=memory)
    assert math.isclose(float(found.detach()), dense(layer, x), rel_tol=1e-9)
    gradients = torch.autograd.grad(found, list(wanted.values()), allow_unused=True)
    for (key, tensor), slope in zip(wanted.items(), gradients, strict=True):
        e = torch.randn(tensor.shape, generator=seeded(3), dtype=tensor.dtype)
        ahead, behind = (moved(tensor, s * STEP * e, lambda: dense(layer, x)) for s in (1.0, -1.0))
        expected = (ahead - behind) / (2 * STEP)
        ours = 0.0 if slope is None else float((slope * e).sum())
        assert ours == pytest.approx(expected, rel=1e-6, abs=1e-7 * float(found.detach())), key


@pytest.mark.parametrize(
    ("name", "memory"),
    [("masked", 2**12), ("heads, grouped, biased, causal", 2**30), ("cosine", 2**30)],
)
def test_second_derivatives_mixed_ones_too(name: str, memory: int) -> None:
    """The gradient of ``<grad sigma, e>`` over all tensors, against differences of gradients."""
    layer, x = draw(name)
    wanted = tensors(layer, x)
    directions = [
        torch.randn(t.shape, generator=seeded(i), dtype=t.dtype)
        for i, t in enumerate(wanted.values())
    ]

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        found = value(layer, x, memory=memory)
        return torch.autograd.grad(
            found, list(wanted.values()), allow_unused=True, materialize_grads=True, **options
        )

    first = gradients(create_graph=True)
    along = torch.stack([(g * e).sum() for g, e in zip(first, directions, strict=True)]).sum()
    second = torch.autograd.grad(
        along, list(wanted.values()), allow_unused=True, materialize_grads=True
    )
    ends = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for tensor, e in zip(wanted.values(), directions, strict=True):
                tensor.add_(e, alpha=sign * STEP)
        ends.append(gradients())
        with torch.no_grad():
            for tensor, e in zip(wanted.values(), directions, strict=True):
                tensor.sub_(e, alpha=sign * STEP)
    for key, ours, ahead, behind in zip(wanted, second, *ends, strict=True):
        expected = (ahead - behind) / (2 * STEP)
        scale = max(float(s.norm()) for s in second)
        assert float((ours - expected).norm()) <= 1e-6 * scale, key


def test_a_module_of_any_kind() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    found = value(net, x)
    found.backward()
    weight: Any = net[0].weight
    e = torch.randn(weight.shape, generator=seeded(1), dtype=torch.float64)
    ahead, behind = (moved(weight, s * STEP * e, lambda: dense(net, x)) for s in (1.0, -1.0))
    assert float((weight.grad * e).sum()) == pytest.approx((ahead - behind) / (2 * STEP), rel=1e-6)
    assert x.grad is not None


def test_weights_made_of_other_weights_are_counted_once() -> None:
    """L2 attention keeps a weight and a multiple of it: both belong to one parameter."""
    factor = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    base = torch.randn(4, 4, generator=seeded(), dtype=torch.float64)
    x = torch.randn(5, 4, generator=seeded(1), dtype=torch.float64)

    def build(c: Tensor) -> ls.Attention:
        return layers.L2Attention(c * base, base, heads=2)

    (slope,) = torch.autograd.grad(value(build(factor), x), factor)
    ahead, behind = (dense(build(factor.detach() + s * STEP), x) for s in (1.0, -1.0))
    assert float(slope) == pytest.approx((ahead - behind) / (2 * STEP), rel=1e-6)


def test_a_chain_of_functions_before_the_layer() -> None:
    """``sigma(layer, g(z))`` is differentiated in ``z``, twice."""
    layer, _ = layers.draw("heads", 0)
    z = torch.randn(6, 5, generator=seeded(), dtype=torch.float64, requires_grad=True)
    e = torch.randn(6, 5, generator=seeded(1), dtype=torch.float64)

    def slope(z: Tensor, **options: Any) -> Tensor:
        return torch.autograd.grad(value(layer, z.tanh()), z, **options)[0]

    (second,) = torch.autograd.grad((slope(z, create_graph=True) * e).sum(), z)
    ends = [slope((z.detach() + s * STEP * e).requires_grad_()) for s in (1.0, -1.0)]
    torch.testing.assert_close(second, (ends[0] - ends[1]) / (2 * STEP), rtol=1e-5, atol=1e-7)


def test_third_derivatives_and_crossing_values_are_refused() -> None:
    layer, x = draw("medium")
    (first,) = torch.autograd.grad(value(layer, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second.sum().backward()

    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(lambda z: z**2, scale), scale, create_graph=True)
    with pytest.raises(ls.InputError, match="simple"):
        torch.autograd.grad(slope.square().sum(), scale)


def test_a_function_that_hides_weights_is_refused() -> None:
    net = nn.Linear(3, 3)
    with pytest.raises(ls.InputError, match="should be a module"):
        ls.sigma(lambda z: net(z).square(), torch.ones(3))
    assert ls.sigma(net.requires_grad_(False), torch.ones(3)).grad_fn is None


def test_the_zero_map_and_a_layer_that_overflows() -> None:
    x = torch.ones(3, requires_grad=True)
    found = ls.sigma(lambda z: z * 0, x)
    found.backward()
    assert float(found.detach()) == 0.0
    assert x.grad is not None and not x.grad.any()
    broken = ls.DotProduct(*(1e25 * torch.ones(3, 1, 1)))
    assert math.isnan(float(ls.sigma(broken, torch.ones(3, 1))))


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    for layer, x in ((ls.DotProduct(*weights), torch.randn(5, 4)), (encoder, torch.randn(1, 5, 4))):
        found = []
        for on in (False, True):
            layer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                value = ls.sigma(layer, x, generator=torch.Generator().manual_seed(0))
                value.backward()
            found.append([value.detach(), *[p.grad for p in layer.parameters()]])
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def test_a_penalty_lowers_sigma() -> None:
    layer, x = draw("heads")
    layer.query, layer.key = (nn.Parameter(w.detach().clone()) for w in (layer.query, layer.key))
    before = dense(layer, x)
    optimiser = torch.optim.SGD([layer.query, layer.key], lr=1e-3)
    for _ in range(10):
        optimiser.zero_grad()
        value(layer, x).backward()
        optimiser.step()
    assert dense(layer, x) < 0.98 * before


def test_chunks_are_as_many_as_the_memory_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = draw("causal")
    seen: list[int] = []
    real = module.checkpoint

    def spy(f: Any, heads: slice, start: int, *arguments: Tensor, **options: Any) -> Any:
        seen.append(arguments[0].shape[-2])
        return real(f, heads, start, *arguments, **options)

    monkeypatch.setattr(module, "checkpoint", spy)
    n = len(x)
    value(layer, x, memory=2 * 24 * n * 8).backward()
    assert seen == [2] * (n // 2) + [1] * (n % 2)


def test_dropout_is_off_for_the_call_and_comes_back():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).double()
    layer.linear1.eval()  # what was off stays off
    x = torch.randn(1, 5, 8, generator=seeded(), dtype=torch.float64, requires_grad=True)
    modes = [part.training for part in layer.modules()]
    found = value(layer, x)
    found.backward()
    assert [part.training for part in layer.modules()] == modes
    layer.eval()
    assert float(found.detach()) == pytest.approx(dense(layer, x), rel=1e-9)
    gradient = x.grad
    assert gradient is not None
    e = torch.randn(x.shape, generator=seeded(1), dtype=torch.float64)

    def sigma() -> float:
        return dense(layer, x)

    slope = (moved(x, STEP * e, sigma) - moved(x, -STEP * e, sigma)) / (2 * STEP)
    assert float((gradient * e).sum()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8)])
def test_torch_s_own_attention_is_self_attention(shape):
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).double()
    x = torch.randn(shape, generator=seeded(), dtype=torch.float64)
    found = value(layer, x)
    found.backward()
    assert layer.in_proj_weight.grad is not None
    layer.eval()
    truth = dense(lambda z: layer(z, z, z)[0], x)
    assert float(found.detach()) == pytest.approx(truth, rel=1e-9)
