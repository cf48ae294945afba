"""Scores from 1 to 1e30: the Jacobian is right, or refused in one line."""

from __future__ import annotations

import pytest
import torch

import lipscope as ls
from hostile import EXTENDED, jacobian
from lipscope import DotProduct, InputError, to_dense
from lipscope.attention import L2Attention, SigmoidAttention, SinkhornAttention

SCALES = [10.0**e for e in range(0, 31, 3)]


def layer_of(n: int, scale: float, seed: int = 3) -> tuple[DotProduct, torch.Tensor]:
    """Queries and keys that make scores of this size."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, x = (torch.randn(m, 8, generator=g, dtype=torch.float64) for m in (8, 8, 8, n))
    return DotProduct(scale**0.5 * q, scale**0.5 * k, v), x


def off(layer: DotProduct, x: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Relative error beside the sum of blocks in long double; None where it is refused."""
    rounded = layer.to(dtype), x.to(dtype)
    try:
        found = to_dense(rounded[0].linearise(rounded[1])).double()
    except InputError:
        return None
    same = rounded[0].double(), rounded[1].double()
    truth = torch.from_numpy(jacobian(*same).astype(float)).flatten(2).flatten(0, 1)
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
def test_one_token_gives_its_value(scale: float, dtype: torch.dtype) -> None:
    """J = V, whatever the scores; it was 11 % off at 1e6 and 24 times too large at 1e8."""
    layer, x = layer_of(1, scale)
    found = to_dense(layer.to(dtype).linearise(x.to(dtype))).double()
    assert torch.allclose(found, layer.value.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")
@pytest.mark.parametrize("scale", SCALES)
def test_tokens_of_which_one_takes_all_weight(scale: float) -> None:
    """24 different ones, never refused: their scores are far apart."""
    layer, x = layer_of(24, scale)
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        error = off(layer, x, dtype)
        assert error is not None and error < most


@pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")
@pytest.mark.parametrize("scale", SCALES)
def test_tokens_that_share_it(scale: float) -> None:
    """Every token twice: rounding of the scores moves weight, and is refused where it shows."""
    layer, x = layer_of(24, scale)
    x[1::2] = x[::2]
    for dtype, most, sure in ((torch.float64, 1e-3, 1e9), (torch.float32, 1e-3, 1e2)):
        error = off(layer, x, dtype)
        assert (error is None and scale > sure) or (error is not None and error < most)


def test_small_models_are_never_silently_wrong() -> None:
    """54 layers with Q and K scaled by 3e4 to 3e5, of which 18 were off by 1 % to 102 times."""
    answered = 0
    for seed in range(18):
        for factor in (3e4, 1e5, 3e5):
            layer, x = layer_of(6, factor**2, seed)
            x = x if seed % 2 else 1e-3 * x
            single, tokens = layer.float(), x.float()
            truth = torch.from_numpy(jacobian(single.double(), tokens.double()).astype(float))
            sigma = float(torch.linalg.matrix_norm(truth.flatten(2).flatten(0, 1), 2))
            try:
                top = ls.top_singular(single.float().linearise(tokens))
            except InputError:
                continue
            answered += 1
            assert abs(top.sigma / sigma - 1) < 2e-3
    assert answered > 20


def test_weights_of_1e18_in_float64() -> None:
    layer, x = layer_of(6, 1e36)
    x[1::2] = x[::2]
    with pytest.raises(InputError, match="for float64 to know the attention weights"):
        layer.linearise(x)


def test_distances_that_cancel() -> None:
    """L2 attention far from the origin: distances are small, and what they are made of is not."""
    g = torch.Generator().manual_seed(0)
    x = 1e4 + torch.randn(5, 3, generator=g, dtype=torch.float64)
    layer = L2Attention(torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    with pytest.raises(InputError, match="for float32 to know the attention weights"):
        layer.float().linearise(x.float())


def test_weights_without_a_sum_at_large_scores() -> None:
    """Sigmoid and Sinkhorn: right, or refused, and settled where no rounding matters."""
    g = torch.Generator().manual_seed(0)
    q, k, v, x = (torch.randn(m, 4, generator=g, dtype=torch.float64) for m in (4, 4, 4, 6))
    for kind in (SigmoidAttention, SinkhornAttention):
        for scale in (1.0, 1e2, 1e4, 1e6):
            layer = kind(scale * q, k, v)
            try:
                found = to_dense(layer.float().linearise(x.float()))
                exact = to_dense(layer.double().linearise(x.float().double()))
            except InputError:
                assert scale > 1
                continue
            assert float((found.double() - exact).norm()) <= 2e-3 * float(exact.norm()) + 1e-12
    one = torch.ones(1, 1)
    settled = SigmoidAttention(1e8 * one, one, one, offset=0.0).linearise(torch.ones(3, 1))
    torch.testing.assert_close(to_dense(settled), torch.ones(3, 3))
    turn = torch.linalg.qr(q).Q  # scores of two tokens cancel, and are of any sign
    with pytest.raises(InputError, match="for float64 to know the attention weights"):
        SigmoidAttention(1e14 * turn, turn, v, offset=0.0).linearise(torch.eye(4).double())
