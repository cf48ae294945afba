"""Constraints that act after a step of the optimiser: what went too far is put back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from lipscope.attention import Attention
from lipscope.control.restraint import Batch, Restraint, restraint
from lipscope.control.signals import largest_logits
from lipscope.errors import InputError
from lipscope.linalg.singular import top_singular
from lipscope.linalg.starts import start_named

_TOL = 1e-2  # how far below its cap a sigma may end
_ROUNDING = 1e-4


@restraint("spectral-cap")
class SpectralCap(Restraint):
    """Singular values of weight matrices above the cap become the cap; the others stay.

    Exact, from the eigenvalues of the smaller Gram matrix in float64: no iteration that
    overshoots. The price is that of an eigenvalue problem for each matrix.
    """

    cap_is = "needed"

    @torch.no_grad()
    def step(self, data: Batch = None) -> dict[int, float]:
        """As `Restraint.step`."""
        del data
        assert self.cap is not None
        found = {}
        for i in self.probe.indices:
            for holder, name in self.probe.weights(i):
                if parametrize.is_parametrized(holder, name):
                    raise _not_own(self.name, i)
                factor = cap_singular_values(getattr(holder, name), self.cap)
                found[i] = min(found.get(i, 1.0), factor)
        return {i: factor for i, factor in found.items() if factor < 1}


def cap_singular_values(weight: Tensor, cap: float) -> float:
    """Bring singular values above ``cap`` down to it, in place: ``W - W V (1 - cap / S) V^T``.

    Args:
        weight: Any matrix.
        cap: Positive.

    Returns:
        The factor of the largest singular value, 1 if none is above.
    """
    w = weight.detach().double()
    flat = w if w.shape[0] >= w.shape[1] else w.T
    values, vectors = torch.linalg.eigh(flat.T @ flat)
    above = values > cap**2
    if not bool(above.any()):
        return 1.0
    size, v = values[above].sqrt(), vectors[:, above]
    flat = flat - (flat @ v) * (1 - cap / size) @ v.T
    weight.copy_((flat if w.shape[0] >= w.shape[1] else flat.T).to(weight))
    return float(cap / size.max())


@restraint("query-key-clip")
class QueryKeyClip(Restraint):
    """Queries and keys of every head whose largest logit at the batch is above the cap.

    Both are multiplied by ``√(cap / largest)``; where heads share keys, the queries alone by
    ``cap / largest``. The largest logit at the batch is then the cap.

    Holds for dot-product scores without norms of queries and keys, soft cap or shared memory.
    """

    cap_is = "needed"

    @torch.no_grad()
    def step(self, data: Batch = None) -> dict[int, float]:
        """As `Restraint.step`; inputs of later layers move with the earlier ones."""
        assert self.cap is not None
        largest: dict[int, Tensor] = {}
        layers: dict[int, Attention] = {}
        for seen in self.probe.seen(data):
            layers[seen.index] = seen.attention
            found = largest_logits(seen.attention, seen.x)
            largest[seen.index] = torch.maximum(found, largest.get(seen.index, found))
        done = {}
        for i, most in largest.items():
            factor = (self.cap / most).where(most > self.cap * (1 + _ROUNDING), 1.0)
            if bool((factor < 1).any()):
                self._scale(i, layers[i], factor)
                done[i] = float(factor.min())
        return done

    def _scale(self, index: int, layer: Attention, factor: Tensor) -> None:
        if layer.query_norm is not None or layer.softcap is not None:
            raise InputError(
                f"`{self.name}` needs logits that follow the weights. Found a norm or a soft cap "
                f"in layer {index}."
            )
        shared = layer.num_groups != layer.num_heads
        sides = [(layer.query, layer.query_bias)]
        if not shared:
            sides.append((layer.key, layer.key_bias))
        each = factor if shared else factor.sqrt()
        tensors = [t for side in sides for t in side if t is not None]
        if layer.key is layer.query or not all(map(self.probe.owns, tensors)):
            raise _not_own(self.name, index)
        for tensor in tensors:
            rows = each.repeat_interleave(len(tensor) // layer.num_heads)
            tensor.detach().mul_(rows.view(-1, *[1] * (tensor.ndim - 1)).to(tensor))


@restraint("sigma-cap")
class SigmaCap(Restraint):
    """Output projections (values where there is none) of layers whose sigma is above the cap.

    Each is multiplied by ``cap / upper``, ``upper`` the upper end of the interval of its largest
    sigma over the batch (tolerance 1 %, failure probability 1 %): sigma is at most the cap, at
    this batch. Earlier layers move the inputs of later ones, which are looked at again.
    """

    cap_is = "needed"

    @torch.no_grad()
    def step(self, data: Batch = None) -> dict[int, float]:
        """As `Restraint.step`.

        Raises:
            InputError: If a sigma is not finite, or the weights are not the model's own.
        """
        assert self.cap is not None
        done: dict[int, float] = {}
        for _ in range(len(self.probe.indices) + 1):
            over = self._above(data)
            if not over:
                return done
            for i, (layer, upper) in over.items():
                factor = self.cap / upper
                done[i] = done.get(i, 1.0) * factor
                weights = [layer.output] if layer.output is not None else [layer.value]
                if layer.output is None:
                    weights += [layer.value_bias]
                for weight in weights:
                    if weight is not None and not self.probe.owns(weight):
                        raise _not_own(self.name, i)
                    if weight is not None:
                        weight.detach().mul_(factor)
        if over := self._above(data):
            raise InputError(
                f"`sigma-cap` should bring layer {min(over)} to {self.cap:g}. Found sigma up to "
                f"{over[min(over)][1]:.4g} whatever its values are scaled by (they are normalised)."
            )
        return done

    def _above(self, data: Batch) -> dict[int, tuple[Attention, float]]:
        """Layers above the cap, with the largest upper end over the batch."""
        assert self.cap is not None
        found: dict[int, tuple[Attention, float]] = {}
        for seen in self.probe.seen(data):
            start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
            top = top_singular(seen.attention.linearise(seen.x), tol=_TOL, generator=start)
            if top.status == "non_finite":
                raise InputError(f"Sigma of layer {seen.index} should be finite. Found {top.note}.")
            if top.upper > max(self.cap * (1 + _ROUNDING), found.get(seen.index, (None, 0.0))[1]):
                found[seen.index] = seen.attention, top.upper
        return found


def _not_own(name: str, index: int) -> InputError:
    return InputError(
        f"`{name}` should change the model's own weights. Found that those of layer {index} are "
        "computed from others (a parametrisation, tied or interleaved weights)."
    )
