"""Penalties: quantities of a layer with gradients for its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Softmax, uncast
from lipscope.control.probe import Seen
from lipscope.control.restraint import Batch, Restraint, restraint
from lipscope.errors import InputError
from lipscope.linalg import sigma, start_named
from lipscope.theorems import AskedLayer, JacobianRows, NotApplicableError, weighted_rows

_TOL = 1e-3  # of the solver, for a gradient that is as good as the step it is taken in
_CHUNK = 2**28  # bytes of scores of rows that are pulled back at a time, roughly
_FOLLOWED = 20  # subspace iterations for the directions of the certificate, three each
_SMALLEST = 1e-30  # a spread below it is none


class Penalty(Restraint, ABC):
    """The mean of a quantity over layers and entries; above a cap, if there is one."""

    @abstractmethod
    def of(self, seen: Seen) -> Tensor:
        """The quantity of one layer."""

    def penalty(self, data: Batch = None) -> Tensor:
        """As `Restraint.penalty`."""
        with uncast(self.probe.device):
            values = torch.stack([self.of(seen) for seen in self.probe.seen(data)])
        return _above(values, self.cap)


def _above(values: Tensor, cap: float | None) -> Tensor:
    """The mean of what values have above a cap; their mean where there is none."""
    return (values if cap is None else (values - cap).clamp_min(0)).mean()


@restraint("sigma")
class Sigma(Penalty):
    """Sigma of the layer, to a relative tolerance of 1e-3, solved anew each time."""

    def of(self, seen: Seen) -> Tensor:
        """As `lipscope.sigma`."""
        start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
        return sigma(seen.attention, seen.x, tol=_TOL, generator=start)


@restraint("sigma-estimate")
class SigmaEstimate(Penalty):
    """``‖J^T u‖`` with ``u = J v / ‖J v‖``: two products, from the ``v`` of the call before.

    Never above sigma, and nearer to it with each call at the same inputs while the weights move
    slowly. Another batch starts from the ``v`` of the same place where its length is the same.
    How far below it stays: ``docs/benchmarks-tables.md``.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self._held: dict[tuple[int, int], Tensor] = {}

    def of(self, seen: Seen) -> Tensor:
        """``<u, J v>``, whose gradient is that of sigma where ``u`` and ``v`` are its own."""
        place = seen.index, seen.entry
        v = self._held.get(place)
        if v is None or v.shape != seen.x.shape or v.dtype != seen.x.dtype:
            start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
            v = torch.randn(seen.x.shape, generator=start, dtype=torch.float64).to(seen.x)
        op = seen.attention.linearise(seen.x)
        u = _unit(op.matvec(v))
        v = _unit(op.rmatvec(u))
        if bool(v.any()) and bool(v.isfinite().all()):  # else a new start is as good
            self._held[place] = v
        return seen.attention.stretch(seen.x, u, v)


@restraint("row-gram")
class RowGram(Penalty):
    """The row-Gram certificate by rows, an upper bound of sigma at every step.

    ``sqrt(max_j sum_i p_ij ω_i)``, ``ω_i = sum_j |J_ij^T z_i|^2 / p_ij`` with ``z_i`` the direction
    that makes it largest. The value is that of float64; its gradient is taken with ``p`` and ``z``
    held, which is exact where ``z`` is single.

    Holds for dot-product attention. Takes seconds for some hundred tokens.

    Source: `lipscope.theorems.derived.row_gram`.
    """

    def of(self, seen: Seen) -> Tensor:
        """The certificate of one layer."""
        layer, x = seen.attention, seen.x
        if not isinstance(layer, DotProduct):
            raise InputError(
                f"`row-gram` is a bound of dot-product attention. Found `{type(layer).__name__}`."
            )
        try:
            at = AskedLayer(layer, x=x).together
            rows = JacobianRows(at)
            found = weighted_rows(rows)
        except NotApplicableError as problem:
            raise InputError(
                f"`row-gram` should hold for layer {seen.index}. Found none: {problem}."
            ) from problem
        if not 0 < found.value < float("inf"):
            return x.new_tensor(found.value)
        probes = torch.eye(rows.width, dtype=torch.float64)[:, -8:].expand(len(x), -1, -1)
        for _ in range(_FOLLOWED):
            _, probes, _ = rows.probe(found.weights, probes)
        omega = rows.eigenvalues(found.weights)
        z = probes[..., -1]
        if at.output is not None:  # ‖W Y‖ = ‖R Y‖ for W = U R
            z = z @ torch.linalg.qr(at.output).Q.T
        column = int((found.weights * omega[:, None]).sum(0).argmax())
        inverse = torch.where(rows.support, 1 / found.weights, 0.0)
        share = (found.weights[:, column, None] * inverse).to(x)
        total = _pulled_rows(layer, x, z.to(x), share)
        return found.value + (total - total.detach()) / (2 * found.value)


def _pulled_rows(layer: Attention, x: Tensor, z: Tensor, share: Tensor) -> Tensor:
    """``sum_ij share_ij |J_ij^T z_i|^2``, differentiable in the weights."""
    point = x.detach().requires_grad_()
    y = layer(point)
    n, total = len(x), y.new_zeros(())
    step = max(1, _CHUNK // (layer.num_heads * n * n * 4))
    for i in range(0, n, step):
        rows = torch.arange(i, min(i + step, n), device=x.device)
        g = y.new_zeros(len(rows), *y.shape)
        g[torch.arange(len(rows)), rows] = z[rows]
        (pulled,) = torch.autograd.grad(y, point, g, is_grads_batched=True, create_graph=True)
        total = total + (share[rows] * pulled.square().sum(-1)).sum()
    return total


@restraint("softmax-spread")
class SoftmaxSpread(Penalty):
    """``log max_i g_1(P_i)``, ``g_1(p) = p_(1) (1 - p_(1) + p_(2))``: mean over heads.

    ``g_1`` bounds the norm of the softmax's Jacobian. Refused for sigmoid and Sinkhorn weights,
    whose derivatives are others, whether or not rows are divided by their sums.

    Source: the penalty of [yudin2025], as quoted by others.
    """

    cap_is = "none"
    over: int | None = None

    def of(self, seen: Seen) -> Tensor:
        """The mean over heads.

        Raises:
            InputError: For weights that are no softmax: nothing is known of them from their rows.
        """
        if not isinstance(seen.attention.weighting, Softmax):
            raise InputError(
                f"`{self.name}` bounds the derivative of the softmax. Found "
                f"`{type(seen.attention).__name__}` in layer {seen.index}, which has none."
            )
        q, k, _ = seen.attention.project(seen.x)
        p = seen.attention.weights(q, k)
        most = 3 if self.over is None else self.over + 1
        top = p.topk(min(most, p.shape[-1]), dim=-1).values
        top = torch.nn.functional.pad(top, (0, most - top.shape[-1]))
        value = _spread(top, 1).clamp_min(_SMALLEST).log()
        if self.over is not None:
            # Rows that spread over fewer tokens have no ratio.
            under = _spread(top, self.over)
            value = torch.where(under > _SMALLEST, value - under.clamp_min(_SMALLEST).log(), 0.0)
        return value.amax(-1).mean()


@restraint("softmax-spread-ratio")
class SoftmaxSpreadRatio(SoftmaxSpread):
    """``log max_i g_1(P_i) / g_2(P_i)``, ``g_k(p) = p_(k) (1 - p_(k) + p_(k+1))``: mean over heads.

    The baseline beside ``softmax-spread``; ``k = 2`` is ours. Rows that see one token count 0;
    those that see two have the ratio 2 whatever their weights.
    """

    over = 2


def _spread(top: Tensor, k: int) -> Tensor:
    first, second = top[..., k - 1], top[..., k]
    return first * (1 - first + second)


@restraint("weight-norms")
class WeightNorms(Restraint):
    """The mean spectral norm of the weight matrices of a layer, whatever the input."""

    def penalty(self, data: Batch = None) -> Tensor:
        """As `Restraint.penalty`; the same for every batch."""
        del data
        with uncast(self.probe.device):
            values = [
                torch.stack([_spectral_norm(getattr(*one)) for one in held]).mean()
                for held in map(self.probe.weights, self.probe.indices)
            ]
        return _above(torch.stack(values), self.cap)


def _spectral_norm(weight: Tensor) -> Tensor:
    """``u^T W v`` with the top singular vectors, found without gradients: those of ``‖W‖``."""
    w = weight if weight.shape[0] >= weight.shape[1] else weight.T
    with torch.no_grad():
        v = torch.linalg.eigh(w.T @ w).eigenvectors[:, -1]
        u = _unit(w @ v)
    return u @ w @ v


def _unit(x: Tensor) -> Tensor:
    norm = x.norm()
    return x / norm if norm > 0 else x
