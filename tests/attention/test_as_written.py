"""Layers that compute something else than their class: refused, or copied as what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lipscope as ls
from agreement import gaussian, slope_at
from lipscope.attention import (
    Clip,
    DotProduct,
    InnerProduct,
    L2Attention,
    MultiheadAttention,
    Rotary,
    Softmax,
    TokenNorm,
)

D, N = 4, 5
X = gaussian(N, D)
ANGLES = torch.outer(torch.arange(float(N)).double(), torch.ones(2).double())


def weights() -> list[Tensor]:
    return [gaussian(D, D, seed=seed) for seed in range(4)]


class Longer(Rotary):
    def __call__(self, x: Tensor) -> Tensor:
        return 3 * super().__call__(x)


class Larger(TokenNorm):
    def forward(self, z: Tensor) -> Tensor:
        return 3 * super().forward(z)


OTHER: dict[str, dict[str, Any]] = {
    "Longer": {"rotary": Longer(ANGLES.cos(), ANGLES.sin())},
    "Larger": {"value_norm": Larger(torch.ones(2).double(), 1e-6)},
    "hooks": {},
}


@pytest.mark.parametrize("what", OTHER)
def test_parts_of_a_layer_are_those_that_closed_forms_know(what: str) -> None:
    layer = DotProduct(*weights(), heads=2, **OTHER[what])
    if what == "hooks":
        layer.register_forward_hook(lambda _, __, y: 3 * y)
    verbs: tuple[Callable[[], Any], ...] = (
        lambda: ls.sigma(layer, X),
        lambda: ls.lipschitz_bound(layer, radius=1.0, num_tokens=N),
        lambda: ls.measure(layer, X),
    )
    for verb in verbs:
        with pytest.raises(ls.InputError, match=f"as its class is written. Found .*{what}"):
            verb()


class Tripled(MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        y, p = super().forward(*args, **options)
        return 3 * y, p


class Called(MultiheadAttention):
    def __call__(self, *args: Any, **options: Any) -> Any:
        y, p = super().__call__(*args, **options)
        return 3 * y, p


class Unmasked(MultiheadAttention):
    def _mask(self, *_: Any, **__: Any) -> None:
        return None


@pytest.mark.parametrize("kind", [Called, Unmasked])
def test_a_class_changes_its_attention_by_any_method(kind: type[MultiheadAttention]) -> None:
    with pytest.raises(ls.InputError, match="should compute what `MultiheadAttention` computes"):
        kind(D, 2, batch_first=True).as_layer()


@pytest.mark.parametrize("how", ["a class", "a hook", "a forward"])
def test_a_module_that_changes_its_attention_is_not_that(how: str) -> None:
    kind = Tripled if how == "a class" else MultiheadAttention
    module: Any = kind(D, 2, batch_first=True).double()
    if how == "a hook":
        module.register_forward_hook(lambda _, __, y: (3 * y[0], None))
    if how == "a forward":
        module.forward = lambda *_, **__: (X[None], None)
    said = "another `forward`" if how == "a class" else "computed as its class is written"
    for verb in (ls.sigma, ls.certify, ls.measure):
        with pytest.raises(ls.InputError, match=said):
            verb(module, X)
    with pytest.raises(ls.InputError, match=said):
        ls.lipschitz_bound(module, radius=1.0, num_tokens=N)
    assert float(ls.sigma(module.attention, X).detach()) > 0


class OfWidth(DotProduct):
    """Its constructor takes what it does not keep."""

    def __init__(self, width: int, *others: Any, label: str = "", **options: Any) -> None:
        super().__init__(*weights(), heads=2, **options)


def test_a_kind_of_a_variant_is_copied_as_that() -> None:
    layer, plain = OfWidth(D, label="first", causal=True), DotProduct(*weights(), heads=2)
    plain = plain.replace(causal=True)
    assert torch.equal(layer.in_double()(X), plain(X)) and layer.head(1).causal
    found, expected = (ls.certify(one, X, eps=1e-3).value for one in (layer, plain))
    assert found == expected


def test_what_a_layer_of_ones_own_does_not_keep_is_no_copy() -> None:
    class Named(InnerProduct):
        def __init__(self, name: str) -> None:
            super().__init__(*weights())

    with pytest.raises(ls.InputError, match=r"keep what their constructors take.*has no attribute"):
        Named("first").in_double()


def test_derivatives_are_those_of_the_score_and_the_weights() -> None:
    with pytest.raises(ls.InputError, match="Found `score` without `score_jvp`"):
        type("Hot", (InnerProduct,), {"score": lambda _, q, k, **__: 3 * q @ k.mT})
    with pytest.raises(ls.InputError, match="derive from `Weighting`"):
        type("Hot", (Softmax,), {"weights": lambda _, s: (3 * s).softmax(-1)})


class Hot(InnerProduct):
    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        return 9 * super().score(q, k)

    def score_jvp(self, *args: Any, **options: Any) -> Tensor:
        return 9 * super().score_jvp(*args, **options)

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        return super().score_vjp(q, k, 9 * gs)


class Wide(InnerProduct):
    def project_in(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project_in(*args, **options)
        return q, k, 9 * v


class Clipped(InnerProduct):
    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, 9 * self.value

    def entrance(self) -> Clip:
        return Clip(0.5)


def test_no_bound_is_that_of_another_score() -> None:
    for kind in (Hot, Wide):
        with pytest.raises(ls.InputError, match="no bound of its kind is known"):
            ls.lipschitz_bound(kind(*weights()), radius=1.0, num_tokens=N)
    layer, near = Clipped(*weights()), X / X.norm(dim=-1, keepdim=True)
    bound = ls.lipschitz_bound(layer, radius=1.0, norm="frobenius", num_tokens=N)
    for size in (0.1, 0.4, 1.0):
        assert slope_at(layer, size * near) <= float(bound)
    assert float(ls.lipschitz_bound(L2Attention(*weights()[:2]), num_tokens=N)) > 0
