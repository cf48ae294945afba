"""Scalars that training turned negative: constants and theorems still hold, or are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from agreement import agree, gaussian
from examples import EXAMPLES, N, build, each_variant
from lipscope.attention import (
    Attention,
    ClippedAttention,
    L2Attention,
    ScaledCosineAttention,
    variants,
)
from lipscope.control import ContractiveAttention, InvertibleResidual
from lipscope.errors import InputError
from lipscope.theorems import NotApplicableError, catalogue, evaluate

SCALARS = ("temperature", "gain", "scale", "offset")
SIZES = (0.02, 0.5, 2.0)


def flipped(kind: type[Attention], seed: int) -> tuple[Attention, float]:
    """A layer of the register with scalars of random sign and size, and the size of its inputs."""
    gen = torch.Generator().manual_seed(seed)
    weights = list(EXAMPLES[kind].weights.values())
    fields = build(kind).fields()
    changes = {}
    for name in SCALARS:
        if name in fields:
            size = 10 ** (2 * torch.rand(1, generator=gen).double() - 1.3)
            number = (size * (1 - 2 * torch.randint(2, (1,), generator=gen))).squeeze()
            trained = isinstance(fields[name], nn.Parameter)
            changes[name] = nn.Parameter(number) if trained else float(number)
    for i, name in enumerate(EXAMPLES[kind].weights):
        if weights[i]:
            changes[name] = gaussian(*weights[i], seed=100 * seed + i)
    return build(kind, trained=False).replace(**changes), SIZES[seed % len(SIZES)]


def sigma_of(layer: Attention, x: torch.Tensor) -> float:
    jacobian = torch.func.jacrev(layer)(x)
    return float(torch.linalg.matrix_norm(jacobian.flatten(2).flatten(0, 1), 2).detach())


@each_variant
def test_constants_and_theorems_hold_whatever_the_signs_are(kind) -> None:
    """Every constant, and every theorem of a whole layer, beside the dense Jacobian's SVD."""
    asked = [t for t in catalogue() if t.subject is kind and t.metric == "frobenius"]
    upper = [t for t in asked if t.kind == "upper" and t.sound]
    held: set[str] = set()
    for seed in range(24):
        layer, size = flipped(kind, seed)
        x = size * gaussian(N, 4, seed=seed)
        sigma = sigma_of(layer, x)
        try:
            bound = float(layer.constant(N).detach())
        except InputError:
            pass
        else:
            held.add("constant")
            assert bound >= sigma * (1 - 1e-9), seed
        radius = float(x.norm(dim=-1).max())
        for theorem in upper:
            try:
                bound = evaluate(theorem, layer, x=x, num_tokens=N, radius=radius)
            except NotApplicableError:
                continue
            held.add(theorem.name)
            assert bound >= sigma * (1 - 1e-9), (theorem.name, seed)
    assert {t.name for t in upper} <= held


@each_variant
def test_two_signs_that_cancel_change_no_constant(kind) -> None:
    """``(-scale) <-q, k>`` is the score that it was: the same function has the same bounds."""
    layer = build(kind, trained=False)
    if "scale" not in layer.fields():
        return
    biases = [name for name in ("query_bias",) if getattr(layer, name) is not None]
    turned = {name: -getattr(layer, name) for name in ("query", *biases)}
    same, x = layer.replace(scale=-layer.scale, **turned), 0.5 * gaussian(N, 4)
    torch.testing.assert_close(same(x), layer(x))
    asked = [t for t in catalogue() if t.subject is kind and t.metric == "frobenius"]
    for theorem in asked:
        one, two = (evaluate(theorem, f, x=x, num_tokens=N, radius=1.0) for f in (layer, same))
        assert two == pytest.approx(one, rel=1e-12), theorem.name


def test_every_scalar_of_the_register_is_turned() -> None:
    """A new variant with a number of its own belongs to `SCALARS`, or is positive by its check."""
    known = {*SCALARS, "heads", "groups", "softcap", "window", "eps", "radius", "num_tokens"}
    own = {
        name
        for kind in variants()
        for name, held in build(kind).fields().items()
        if (isinstance(held, int | float) and not isinstance(held, bool))
        or (isinstance(held, torch.Tensor) and not held.ndim)
    }
    assert own <= known


def test_a_step_of_training_that_turns_the_gain_leaves_a_contraction() -> None:
    """Gain and temperature below zero after a step: sigma, determinant and inverse are right."""
    weights = [nn.Parameter(gaussian(4, 4, seed=i)) for i in range(3)]
    for name in ("gain", "temperature"):
        scalars = {"temperature": torch.tensor(0.1).double(), "gain": torch.tensor(0.1).double()}
        scalars[name] = nn.Parameter(scalars[name])
        layer = ScaledCosineAttention(*weights, eps=1e-2, **scalars)
        block = InvertibleResidual(ContractiveAttention(layer, c=0.9))
        x = 0.05 * gaussian(N, 4)
        before = layer(x).detach()
        optimiser = torch.optim.SGD([scalars[name]], lr=1.0)
        scalars[name].grad = torch.ones(()).double()
        optimiser.step()
        assert scalars[name].item() == pytest.approx(-0.9)
        if name == "gain":  # what the layer computes is odd in its gain
            torch.testing.assert_close(layer(x), -9 * before)
        agree(layer, x)
        sigma = sigma_of(block.g, x)
        assert 0.01 < sigma <= 0.9
        jacobian = torch.func.jacrev(block.g)(x).reshape(x.numel(), x.numel())
        true = torch.linalg.slogdet(torch.eye(x.numel()).double() + jacobian).logabsdet
        found = block.log_determinant(x, method="series")
        assert abs((found.value - true).item()) <= found.error
        solved = block.inverse(block(x).detach())
        assert (solved.x - x).norm().item() <= solved.error.item()
        torch.testing.assert_close(block.g.as_layer(N)(x), block.g(x))


@pytest.mark.parametrize("n", [2, 5])
def test_a_constant_that_is_no_bound_is_refused(n, monkeypatch) -> None:
    wrong = torch.tensor(float("nan") if n > 3 else -66.0)
    monkeypatch.setattr(L2Attention, "constant", lambda *_: wrong)
    g = ContractiveAttention(L2Attention(gaussian(4, 4), gaussian(4, 4)), c=0.9)
    with pytest.raises(InputError, match=r"constant.*should be.*Found (-66|nan)"):
        g(gaussian(n, 4))


def test_weights_of_zero_contract_as_they_are() -> None:
    """A constant of exactly 0 is that of a constant map."""
    g = ContractiveAttention(L2Attention(gaussian(4, 4), torch.zeros(4, 4).double()), c=0.9)
    assert not bool(g(gaussian(3, 4)).any())


def test_radius_and_eps_that_training_moved_are_refused_where_they_have_no_meaning() -> None:
    weights = [gaussian(4, 4, seed=i) for i in range(3)]
    clipped = ClippedAttention(*weights, radius=1.0)
    clipped.radius = -1.0
    with pytest.raises(InputError, match=r"`radius` should be positive. Found `radius = -1.0`"):
        clipped.constant(3)
    cosine = ScaledCosineAttention(*weights, temperature=1.0, eps=0.1)
    cosine.eps = -0.1
    with pytest.raises(InputError, match=r"`eps` should be positive. Found `eps = -0.1`"):
        cosine.constant(3)


def test_a_temperature_is_finite_where_it_is_trained_and_positive_where_it_is_chosen() -> None:
    weights = [gaussian(4, 4, seed=i) for i in range(3)]
    for number, name in itertools.product((0.0, -1.0), ("temperature", "gain")):
        with pytest.raises(InputError, match=rf"`{name}` should be positive"):
            ScaledCosineAttention(*weights, **({"temperature": 1.0} | {name: number}))
    ScaledCosineAttention(*weights, temperature=torch.tensor(-1.0).double())
    with pytest.raises(InputError, match="`temperature` should be a finite number"):
        ScaledCosineAttention(*weights, temperature=torch.tensor(float("nan")).double())
