"""Constraints that act at once: weights and queries computed from others in every pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lipscope.attention import TokenNorm
from lipscope.control.probe import Probe
from lipscope.control.restraint import Restraint, restraint
from lipscope.errors import InputError

_ROUNDS = 30  # of the power iteration when it begins; afterwards one in each training pass
_EPS = 1e-6


class Gain(nn.Module):
    """A matrix times a factor, learnt or not."""

    def __init__(self, value: Tensor, *, learnt: bool) -> None:
        super().__init__()
        if learnt:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def forward(self, weight: Tensor) -> Tensor:
        """The product."""
        return self.value * weight


class _Parametrised(Restraint):
    learnt: bool

    def __init__(self, probe: Probe, *, cap: float | None = None, seed: int = 0) -> None:
        super().__init__(probe, cap=cap, seed=seed)
        self._held = [one for i in probe.indices for one in probe.weights(i)]
        for holder, name in self._held:
            if parametrize.is_parametrized(holder, name):
                raise InputError(
                    f"`{self.name}` needs weights without a parametrisation. Found one on "
                    f"`{name}` of `{type(holder).__name__}`."
                )
        devices = {getattr(*one).device for one in self._held if getattr(*one).is_cuda}
        with torch.random.fork_rng(devices=list(devices)):  # torch draws its start itself
            torch.manual_seed(seed)
            for holder, name in self._held:
                weight: Tensor = getattr(holder, name)
                with torch.no_grad():
                    size = torch.linalg.matrix_norm(weight, 2)
                parametrizations.spectral_norm(holder, name, n_power_iterations=_ROUNDS)
                holder.parametrizations[name][0].n_power_iterations = 1  # pyright: ignore
                size = size if self.learnt else torch.full_like(size, self.cap or 1.0)
                gain = Gain(size, learnt=self.learnt)
                parametrize.register_parametrization(holder, name, gain)

    def remove(self) -> None:
        """Leave the weights as they are now, parameters again."""
        for holder, name in self._held:
            parametrize.remove_parametrizations(holder, name)
        self._held = []


@restraint("spectral-norm")
class SpectralNorm(_Parametrised):
    """``W cap / ‖W‖`` instead of every weight matrix, the norm by one power step a pass.

    The norm is approached from below, so that weights that move fast are a little too large.

    Source: ``torch.nn.utils.parametrizations.spectral_norm``.
    """

    learnt = False


@restraint("spectral-gain")
class SpectralGain(_Parametrised):
    """``g W / ‖W‖`` with a learnt ``g`` for each matrix, at first its norm: nothing changes then.

    Make the optimiser afterwards, so that it knows ``g``.
    """

    learnt = True
    cap_is = "none"


@restraint("query-key-norm")
class QueryKeyNorm(Restraint):
    """RMSNorm on the queries and keys of every head, with learnt gains.

    A gain begins as the root mean square of what it replaces, so that logits keep their usual
    size. Logits are then at most ``k max|g_Q| max|g_K|`` times the scale, whatever the gains'
    signs.
    The layers stay known in closed form. `remove` leaves the norms where they are.

    Holds for families with linear maps of their own for queries and keys.
    """

    cap_is = "none"

    def __init__(self, probe: Probe, *, cap: float | None = None, seed: int = 0) -> None:
        super().__init__(probe, cap=cap, seed=seed)
        sums: dict[int, list[list[Tensor]]] = {i: [[], []] for i in probe.indices}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        widths: dict[int, int] = {}
        for seen in probe.seen():
            layer = seen.attention
            if layer.query_norm is not None or layer.key_norm is not None:
                raise InputError(
                    "`query-key-norm` needs queries and keys without a norm. Found one in layer "
                    f"{seen.index}."
                )
            places[seen.index] = [
                self._place(seen.index, weight) for weight in (layer.query, layer.key)
            ]
            widths[seen.index] = layer.head_width
            with torch.no_grad():
                for held, z in zip(sums[seen.index], layer.project_in(seen.x), strict=False):
                    held.append(z.square().mean())
        for i, both in places.items():
            for (holder, name), squares in zip(both, sums[i], strict=True):
                size = torch.stack(squares).mean().sqrt()
                weight = nn.Parameter(size * torch.ones(widths[i]).to(size))
                old = getattr(holder, name)
                setattr(holder, name, nn.Sequential(old, TokenNorm(weight, _EPS)))

    def _place(self, index: int, weight: Tensor) -> tuple[nn.Module, str]:
        """Who holds the linear map with this weight, and under which name."""
        for holder in self.probe.module(index).modules():
            for name, child in holder.named_children():
                if isinstance(child, nn.Linear) and child.weight is weight:
                    return holder, name
        raise InputError(
            "`query-key-norm` needs linear maps of their own for queries and keys. Found none in "
            f"layer {index} (`{type(self.probe.module(index)).__name__}`)."
        )
