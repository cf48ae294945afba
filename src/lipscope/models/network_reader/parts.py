"""The parts of a network, out of modules: token-wise networks and norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.families.affine import Affine, affine
from lipscope.models.network import ActivationName, Feed, Norm
from lipscope.models.network_reader.forward_pass import ModuleCall, same
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.models.tracing.sites import is_plain

# Of which functions an activation may be written.
WRITTEN: dict[ActivationName, set[str]] = {
    "relu": {"Relu"},
    "gelu": {"Gelu", "Erf"},
    "gelu_tanh": {"Gelu", "Tanh"},
    "silu": {"Silu", "Sigmoid"},
    "tanh": {"Tanh"},
}
_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_SMALL, _LARGE = 1e-3, 1e3  # sizes of tokens that feel ε, and that do not
_NO_EPS = 1e-19  # beside the square of a small token, what float64 rounds away


class Inner(NamedTuple):
    """What a linear map makes of the stream."""

    map: Affine
    z: Tensor
    time: int


def affine_of(call: ModuleCall) -> Affine:
    """The map of a module that is nothing else."""
    if not is_plain(call.module):
        raise InputError(
            f"`{call.name}` should be a linear map with a weight of its own. Found "
            f"`{type(call.module).__name__}`, which is not read; merge it into the model first."
        )
    return affine(call.module)


def bias_of(one: Affine) -> Tensor:
    """Its bias, zero if it has none; a copy."""
    return one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.clone()


def feed_of(name: ActivationName, inner: Affine, outer: Affine, gate: Affine | None) -> Feed:
    """The token-wise network of two linear maps, or three, copied."""
    return Feed(
        inner.weight.clone(),
        bias_of(inner),
        outer.weight.clone(),
        bias_of(outer),
        name,
        None if gate is None else gate.weight.clone(),
        None if gate is None or gate.bias is None else gate.bias.clone(),
    )


def read_norm(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module is: gain, shift and ε from random tokens, confirmed at three sizes.

    What a module calls its weights does not matter: some store ``γ - 1``.

    >>> kinds = (nn.LayerNorm(4), nn.RMSNorm(4), nn.Tanh())
    >>> [found and found.centred for found in (read_norm(kind.double(), 4) for kind in kinds)]
    [True, False, None]
    """
    generator, ask = start_named("norm"), ExactNorm(module)
    probe = torch.randn(8, width, generator=generator, dtype=torch.float64)
    one, zero = probe.new_ones(width), probe.new_zeros(width)
    try:
        answers = {size: ask(size * probe[None])[0] for size in (1.0, _SMALL, _LARGE)}
        odd = [
            ask(size * probe[None])[0] - ask(-size * probe[None])[0] for size in (_SMALL, _LARGE)
        ]
        for centred, scaled in ((True, True), (False, True), (True, False)):
            eps = _epsilon(module, Norm(one, zero, centred=centred).size(probe), *odd)
            unit, y = Norm(one, zero, eps, centred, scaled)(probe), answers[1.0]
            spread = unit - unit.mean(0)
            gain = (spread * y).sum(0) / spread.square().sum(0)
            shift = y.mean(0) - gain * unit.mean(0)
            gain = _stored(module, "weight", gain)
            norm = Norm(gain, _stored(module, "bias", shift), eps, centred, scaled)
            if all(same(norm(size * probe), y) for size, y in answers.items()):
                return norm
    except (RuntimeError, ValueError, TypeError, IndexError):  # no norm of tokens
        pass
    return None


def _epsilon(module: nn.Module, sizes: Tensor, small: Tensor, large: Tensor) -> float:
    """ε by its name, else from what a norm makes of small tokens and of large ones.

    A token of mean square ``m`` comes out ``q = s √(L² m + ε) / (L √(s² m + ε))`` times as large,
    ``s`` times as small as it is, as it does ``L`` times as large.
    """
    for name in _EPS:
        if hasattr(module, name):  # of torch's RMSNorm None is that of the dtype
            named = getattr(module, name)
            return torch.finfo(torch.float64).eps if named is None else named
    square = sizes.square() / small.shape[1]
    ratio = small.detach().square().sum(1) / large.detach().square().sum(1)
    found = (_SMALL * _LARGE) ** 2 * square * (1 - ratio) / (ratio * _LARGE**2 - _SMALL**2)
    eps = float(found.median())
    return eps if _NO_EPS < eps < _LARGE else 0.0  # what does not normalise seems to have more


def _stored(module: nn.Module, name: str, found: Tensor) -> Tensor:
    """What was found, without its rounding: zero, one, or the module's own weight."""
    own = getattr(module, name, None)
    kept = [own] if isinstance(own, Tensor) and own.shape == found.shape else []
    moved = found - found.detach()  # zero, with the derivative of what was found
    near = (*kept, torch.zeros_like(found) + moved, torch.ones_like(found) + moved)
    return next((t.clone() for t in near if (t - found).abs().max() <= 1e-9), found)
