"""Constraints that act after a step of the optimiser: what went too far is put back."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from lipscope.attention import Attention, ScaledCosineAttention
from lipscope.control.restraint import Batch, Restraint, restraint
from lipscope.control.signals import largest_logits
from lipscope.errors import InputError
from lipscope.linalg import start_named, top_singular

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


class _Scaling(Restraint):
    """Weights of layers above a cap are multiplied, and the layers are looked at again.

    Earlier layers move the inputs of later ones: each pass settles one layer more.
    """

    cap_is = "needed"
    what: ClassVar[str]  # is capped, and whatever is multiplied, in words

    @torch.no_grad()
    def step(self, data: Batch = None) -> dict[int, float]:
        """As `Restraint.step`; afterwards every layer is below the cap, at this batch.

        Raises:
            InputError: If what is capped is not finite, the weights are not the model's own, or
                the cap is out of reach; the weights are then as they were.
        """
        done: dict[int, Tensor] = {}
        before: list[tuple[Tensor, Tensor]] = []
        try:
            for _ in range(len(self.probe.indices) + 1):
                over = self._above(data)
                if not over:
                    return {i: float(factor.min()) for i, factor in done.items()}
                for i, (layer, factor, _) in over.items():
                    done[i] = done.get(i, 1.0) * factor
                    for tensor, by in self._scaled(i, layer, factor):
                        if not self.probe.owns(tensor):
                            raise _not_own(self.name, i)
                        before.append((tensor.detach(), tensor.detach().clone()))
                        tensor.detach().mul_(by)
            if over := self._above(data):
                i, found = min(over), over[min(over)][2]
                raise InputError(
                    f"`{self.name}` should bring layer {i} to {self.cap:g}. "
                    f"Found {self.what.format(found)}."
                )
        except InputError:
            for tensor, old in reversed(before):
                tensor.copy_(old)
            raise
        return {i: float(factor.min()) for i, factor in done.items()}

    def _above(self, data: Batch) -> dict[int, tuple[Attention, Tensor, float]]:
        """Layers above the cap: what would bring each there, and what was found."""
        raise NotImplementedError

    def _scaled(self, index: int, layer: Attention, factor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The weights that are multiplied, each with what it is multiplied by."""
        raise NotImplementedError


@restraint("query-key-clip")
class QueryKeyClip(_Scaling):
    """Queries and keys of every head whose largest logit at the batch is above the cap.

    Both are multiplied by ``√(cap / largest)``; where heads share keys, the queries alone by
    ``cap / largest``; of scaled cosine attention, its one temperature, if trained, by the least of
    these. The largest logit at the batch is then the cap.

    Holds for scores that are products of queries and keys: no other norms of them, no soft cap,
    no divisor and no shared memory.
    """

    what = "a largest logit of {:.4g} whatever its queries and keys are scaled by"

    def _above(self, data: Batch) -> dict[int, tuple[Attention, Tensor, float]]:
        assert self.cap is not None
        largest: dict[int, Tensor] = {}
        layers: dict[int, Attention] = {}
        for seen in self.probe.seen(data):
            found = largest_logits(seen.attention, seen.x)
            if not bool(found.isfinite().all()):
                raise InputError(
                    f"Logits of layer {seen.index} should be finite. Found {float(found.max())}."
                )
            layers[seen.index] = seen.attention
            largest[seen.index] = torch.maximum(found, largest.get(seen.index, found))
        return {
            i: (layers[i], (self.cap / most).where(most > self.cap, 1.0), float(most.max()))
            for i, most in largest.items()
            if bool((most > self.cap * (1 + _ROUNDING)).any())
        }

    def _scaled(self, index: int, layer: Attention, factor: Tensor) -> list[tuple[Tensor, Tensor]]:
        if isinstance(layer, ScaledCosineAttention) and self.probe.owns(layer.temperature):
            return [(layer.temperature, factor.min())]
        normed = any(norm is not None for norm in layer.norms()[:2])
        if normed or layer.softcap is not None or not layer.by_token:
            raise InputError(
                f"`{self.name}` needs logits that follow the weights. Found a norm, a divisor or a "
                f"soft cap of them in layer {index} (`{type(layer).__name__}`)."
            )
        shared = layer.num_groups != layer.num_heads
        if layer.key is layer.query:
            raise _not_own(self.name, index)
        each = factor if shared else factor.sqrt()
        sides = [layer.query, layer.query_bias] + [layer.key, layer.key_bias] * (not shared)
        rows = [each.repeat_interleave(layer.head_width) for _ in sides]
        return [
            (tensor, by.view(-1, *[1] * (tensor.ndim - 1)).to(tensor))
            for tensor, by in zip(sides, rows, strict=True)
            if tensor is not None
        ]


@restraint("sigma-cap")
class SigmaCap(_Scaling):
    """Output projections (values where there is none) of layers whose sigma is above the cap.

    Each is multiplied by ``cap / upper``, ``upper`` the upper end of the interval of its largest
    sigma over the batch (tolerance 1 %, failure probability 1 %): sigma is at most the cap, at
    this batch. Of scaled cosine attention without an output projection, its gain is.
    """

    what = "sigma up to {:.4g} whatever its values are scaled by (they are normalised)"

    def _above(self, data: Batch) -> dict[int, tuple[Attention, Tensor, float]]:
        assert self.cap is not None
        found: dict[int, tuple[Attention, Tensor, float]] = {}
        for seen in self.probe.seen(data):
            start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
            top = top_singular(seen.attention.linearise(seen.x), tol=_TOL, generator=start)
            if top.status == "non_finite":
                raise InputError(f"Sigma of layer {seen.index} should be finite. Found {top.note}.")
            least = found[seen.index][2] if seen.index in found else self.cap * (1 + _ROUNDING)
            if top.upper > least:
                factor = torch.tensor(self.cap / top.upper, dtype=torch.float64)
                found[seen.index] = seen.attention, factor, top.upper
        return found

    def _scaled(self, index: int, layer: Attention, factor: Tensor) -> list[tuple[Tensor, Tensor]]:
        if layer.output is not None:
            return [(layer.output, factor)]
        if isinstance(layer, ScaledCosineAttention):
            return [(layer.gain, factor)]
        return [(t, factor) for t in (layer.value, layer.value_bias) if t is not None]


def _not_own(name: str, index: int) -> InputError:
    return InputError(
        f"`{name}` should change the model's own weights. Found that those of layer {index} are "
        "computed from others (a parametrisation, tied or interleaved weights), or not trained."
    )
