"""Attention of one's own, written as people write it, and described by `lipscope.models.family`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope import InputError
from lipscope.models import AttentionCall, family

WIDTH, HEADS = 8, 2


class Merge(nn.Module):
    """A step without weights, as einops and others write it."""

    def forward(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)


class ViTLikeAttention(nn.Module):
    """Softmax and the merging of heads as modules, the projection with its dropout in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attend, self.dropout, self.merge = nn.Softmax(-1), nn.Dropout(0.1), Merge()
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
        self.inner: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in self.to_qkv(self.inner(x)).chunk(3, -1)
        )
        p = self.dropout(self.attend(q @ k.mT / q.shape[-1] ** 0.5))
        return self.to_out(self.merge(p @ v))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), ViTLikeAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


@pytest.fixture(autouse=True)
def _described(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in {"_READERS": {}, "_REGISTRY": []}.items():
        monkeypatch.setattr(f"lipscope.models.tracing.sites.{name}", empty)

    @family("ViTLikeAttention", package=__name__)
    def read(call: AttentionCall) -> ls.DotProduct:
        own: Any = call.module
        q, k, v = own.to_qkv.weight.chunk(3)
        last = own.to_out[0]
        return ls.DotProduct(q, k, v, last.weight, heads=HEADS, output_bias=last.bias)


def drawn() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()), torch.randn(1, 4, WIDTH)


def test_softmax_and_modules_of_the_same_package_are_part_of_a_family() -> None:
    model, x = drawn()
    at = ls.load_model(model.train()).at(x, layer=1, dtype="float64")
    assert torch.equal(at.attention.value, model[1].attention.to_qkv.weight.chunk(3)[2].double())
    (bound,) = ls.bounds(model, x, layers=[1], theorems="local_rows").bounds
    assert bound.value is not None and at.sigma <= bound.value
    network = nn.Sequential(model, nn.Linear(WIDTH, 3))
    decision = ls.load_model(network).decision(x, pool="last")
    found = decision.certify(ball="token", token=1)
    assert found.radius > 0


def test_a_part_that_no_family_knows_is_named() -> None:
    model, x = drawn()
    model[0].attention.dropout = nn.Hardtanh(-1e3, 1e3)
    with pytest.raises(InputError, match=r"its family does not: `dropout` \(torch.*\.Hardtanh\)"):
        ls.bounds(model, x)


def test_a_family_that_forgets_a_norm_is_told_so() -> None:
    model, x = drawn()
    model[0].attention.inner = nn.LayerNorm(WIDTH, elementwise_affine=True)
    with torch.no_grad():
        model[0].attention.inner.weight.mul_(2)
    with pytest.raises(InputError, match="family of `ViTLikeAttention` lacks something, such as a"):
        ls.bounds(model, x)


def test_a_family_of_another_package_is_named() -> None:
    class Attention(ViTLikeAttention): ...

    family("Attention")(read_nothing)
    model, x = drawn()
    model[0].attention = Attention()
    with pytest.raises(InputError, match=rf"`Attention` of `{__name__}`, only of `transformers`"):
        ls.bounds(model, x)
    family("Attention", package=__name__)(read_nothing)
    with pytest.raises(InputError, match=r"should return an attention layer. Found `NoneType`"):
        ls.bounds(model, x)


def read_nothing(_: AttentionCall) -> Any: ...
