"""Penalties and constraints that keep attention layers smooth in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lipscope.attention import (
    Attention,
    DotProduct,
    ScaledCosineAttention,
    Softmax,
    TokenNorm,
    spectral_norm,
    uncast,
)
from lipscope.control.alarm import largest_logits
from lipscope.control.probe import Layers, Probe, ProbedLayer
from lipscope.errors import InputError, check_count, check_finite_numbers, shown
from lipscope.linalg import draws_from, sigma, start_named, top_singular, unit_vector
from lipscope.theorems import JacobianRows, LayerSubject, NotApplicableError, weighted_rows

Batch = Tensor | Mapping[str, Any] | None
_LARGEST = 1e30  # largest accepted cap


_REGISTER: dict[str, type[Restraint]] = {}


class Restraint:
    """A penalty or a constraint on selected layers of a model in training.

    A single training loop serves every kind: constraints have penalty 0, and penalties do nothing
    after a step.
    """

    name: ClassVar[str]  # its name in `restrain`
    # A penalty counts only values above the cap; a constraint enforces it.
    cap_is: ClassVar[Literal["needed", "possible", "none"]] = "possible"

    def __init_subclass__(cls, name: str = "") -> None:
        """Register a kind of restraint by its name; classes without one are base classes."""
        if name:
            cls.name = name
            _REGISTER[name] = cls

    def __init__(self, probe: Probe, *, cap: float | None = None, seed: int = 0) -> None:
        check_count("seed", seed, least=0)
        self.probe, self.cap, self.seed = probe, _checked_cap(type(self), cap), seed

    def penalty(self, data: Batch = None) -> Tensor:
        """The term to add to the loss, with your own weight; 0 for a constraint.

        Evaluated at the layers' inputs on ``data``; None: on the batch given to `restrain`.
        """
        return torch.zeros((), device=self.probe.device)

    def step(self, data: Batch = None) -> dict[int, float]:
        """The action after an optimiser step; returns the smallest factor applied, by layer."""
        return {}

    def remove(self) -> None:
        """Remove parametrisations, if any, keeping the current weights."""


def _checked_cap(kind: type[Restraint], cap: float | None) -> float | None:
    if cap is None:
        if kind.cap_is == "needed":
            raise InputError(f"`{kind.name}` needs a `cap`. Found none.")
        return None
    if kind.cap_is == "none":
        raise InputError(f"`{kind.name}` takes no `cap`. Found `cap = {shown(cap)}`.")
    if isinstance(cap, bool) or not isinstance(cap, Real) or not 0 < cap < _LARGEST:
        raise InputError(f"`cap` should be positive and finite. Found `cap = {shown(cap)}`.")
    return float(cap)


def restraints() -> dict[str, type[Restraint]]:
    """Every kind of restraint by its name."""
    return dict(sorted(_REGISTER.items()))


# --- constraints that act at once, by weights and queries computed in every pass

_EPS = 1e-6


class Gain(nn.Module):
    """A matrix times a factor, optionally learnt."""

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
        held = (one for i in probe.indices for one in probe.weights(i))
        self._held = list(dict.fromkeys(held))  # modules that are called twice appear once
        for holder, name in self._held:
            if parametrize.is_parametrized(holder, name):
                raise InputError(
                    f"`{self.name}` needs weights without a parametrisation. Found one on "
                    f"`{name}` of `{type(holder).__name__}`."
                )
            check_finite_numbers(name, getattr(holder, name))
            if not bool(getattr(holder, name).any()):
                raise InputError(
                    f"`{self.name}` divides weights by their norm. Found `{name}` of "
                    f"`{type(holder).__name__}`, which is zero; start from other weights."
                )
        every = {getattr(*one).device for one in self._held}
        devices = sorted(one.index for one in every if one.type == "cuda")
        with draws_from(seed, devices):  # torch draws a random start
            for holder, name in self._held:
                weight: Tensor = getattr(holder, name)
                with torch.no_grad():
                    u, sizes, v = torch.linalg.svd(weight.double(), full_matrices=False)
                    size = sizes[0].to(weight)
                parametrizations.spectral_norm(holder, name)
                vectors = {"_u": u[:, 0].to(weight), "_v": v[0].to(weight)}
                holder.parametrizations[name][0].load_state_dict(vectors)  # pyright: ignore
                size = size if self.learnt else torch.full_like(size, self.cap or 1.0)
                gain = Gain(size, learnt=self.learnt)
                parametrize.register_parametrization(holder, name, gain)

    def remove(self) -> None:
        """Remove the parametrisations; the current weights become parameters again."""
        for holder, name in self._held:
            parametrize.remove_parametrizations(holder, name)
        self._held = []


class SpectralNorm(_Parametrised, name="spectral-norm"):
    """``W cap / ‖W‖`` for every weight matrix; one power step per training pass estimates the norm.

    The estimate starts exact and then lags from below: moving weights are slightly too large.

    Source: ``torch.nn.utils.parametrizations.spectral_norm``.
    """

    learnt = False


class SpectralGain(_Parametrised, name="spectral-gain"):
    """``g W / ‖W‖`` with a learnt ``g`` per matrix, initially its norm, which changes nothing.

    Create the optimiser afterwards, so that it includes ``g``.
    """

    learnt = True
    cap_is = "none"


class QueryKeyNorm(Restraint, name="query-key-norm"):
    """RMSNorm on the queries and keys of every head, with learnt gains.

    A gain starts as the root mean square of the vectors it normalises, so that logits keep their
    usual size. Logits are then at most ``k max|g_Q| max|g_K|`` times the scale, for any signs of
    the gains. The closed form remains available. `remove` keeps the norms.

    Holds for families with separate linear maps for queries and keys.
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
                if isinstance(getattr(holder, name), nn.Sequential):
                    continue  # of a module that is called twice
                size = torch.stack(squares).mean().sqrt()
                weight = nn.Parameter(size * torch.ones(widths[i]).to(size))
                old = getattr(holder, name)
                setattr(holder, name, nn.Sequential(old, TokenNorm(weight, _EPS)))

    def _place(self, index: int, weight: Tensor) -> tuple[nn.Module, str]:
        """The module with the linear map of this weight, and its attribute name."""
        for holder in self.probe.module(index).modules():
            for name, child in holder.named_children():
                if isinstance(child, nn.Linear) and child.weight is weight:
                    return holder, name
        raise InputError(
            "`query-key-norm` needs linear maps of their own for queries and keys. Found none in "
            f"layer {index} (`{type(self.probe.module(index)).__name__}`)."
        )


# --- constraints that act after an optimiser step

_CAP_TOL = 1e-2  # how far below its cap a sigma may end
_ROUNDING = 1e-4
_PASSES = 9  # beyond the number of layers: those of one module settle together


class SpectralCap(Restraint, name="spectral-cap"):
    """Reduce singular values of weight matrices above the cap to the cap.

    Exact, from the eigenvalues of the smaller Gram matrix in float64, at the cost of an
    eigenvalue problem per matrix.
    """

    cap_is = "needed"

    @torch.no_grad()
    def step(self, data: Batch = None) -> dict[int, float]:
        """See `Restraint.step`."""
        assert self.cap is not None
        found = {}
        for i in self.probe.indices:
            for holder, name in self.probe.weights(i):
                if parametrize.is_parametrized(holder, name):
                    raise _frozen_weights(self.name, i)
                factor = cap_singular_values(
                    getattr(holder, name), self.cap, f"{name} of layer {i}"
                )
                found[i] = min(found.get(i, 1.0), factor)
        return {i: factor for i, factor in found.items() if factor < 1}


def cap_singular_values(weight: Tensor, cap: float, name: str = "weights") -> float:
    """Reduce singular values above ``cap`` to it, in place: ``W - W V (1 - cap / S) V^T``.

    Returns the factor of the largest singular value; 1 if none exceeds the cap.
    """
    w = weight.detach().double()
    check_finite_numbers(name, w)
    flat = w if w.shape[0] >= w.shape[1] else w.T
    values, vectors = torch.linalg.eigh(flat.T @ flat)
    above = values > cap**2
    if not bool(above.any()):
        return 1.0
    size, v = values[above].sqrt(), vectors[:, above]
    flat = flat - (flat @ v) * (1 - cap / size) @ v.T
    weight.copy_((flat if w.shape[0] >= w.shape[1] else flat.T).to(weight))
    return float(cap / size.max())


class _Scaling(Restraint, ABC):
    """Scale the weights of layers above a cap, then evaluate the layers again.

    Earlier layers change the inputs of later ones: each pass settles one more layer. Layers that
    are calls of one module are scaled together, by the smallest of their factors.
    """

    cap_is = "needed"
    what: ClassVar[str]  # phrase for errors: the quantity that exceeds its cap despite scaling

    @torch.no_grad()
    def step(self, data: Batch = None) -> dict[int, float]:
        """See `Restraint.step`; afterwards every layer is below the cap on this batch.

        Raises:
            InputError: If the capped quantity is not finite, the weights are not the model's own,
                or the cap cannot be reached; the weights are then restored.
        """
        done: dict[int, Tensor] = {}
        before: list[tuple[Tensor, Tensor]] = []
        try:
            for _ in range(len(self.probe.indices) + _PASSES):
                over = self._above(data)
                if not over:
                    return {i: float(factor.min()) for i, factor in done.items()}
                for alike in self.probe.alike():
                    mine = [over[i] for i in alike if i in over]
                    if not mine:
                        continue
                    factor = torch.stack([each for _, each, _ in mine]).amin(0)
                    done |= {i: done.get(i, 1.0) * factor for i in alike}
                    for tensor, by in self._scaled(alike[0], mine[0][0], factor):
                        if not self.probe.owns(tensor):
                            raise _frozen_weights(self.name, alike[0])
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

    @abstractmethod
    def _above(self, data: Batch) -> dict[int, tuple[Attention, Tensor, float]]:
        """Layers above the cap: layer, required factor and current value."""

    @abstractmethod
    def _scaled(self, index: int, layer: Attention, factor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The weights to scale, with their factors."""


class QueryKeyClip(_Scaling, name="query-key-clip"):
    """Scale the queries and keys of heads whose largest logit on the batch exceeds the cap.

    Both are multiplied by ``√(cap / largest)``; if heads share keys, only the queries by
    ``cap / largest``; for scaled cosine attention the single temperature, if trained, by the
    smallest of these. The largest logit on the batch is then the cap.

    Holds for scores that are products of queries and keys: without norms of these, soft caps,
    divisors or shared memory.
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
            raise _frozen_weights(self.name, index)
        rows = (factor if shared else factor.sqrt()).repeat_interleave(layer.head_width)
        sides = [layer.query, layer.query_bias] + [layer.key, layer.key_bias] * (not shared)
        return [(t, rows.view(-1, *[1] * (t.ndim - 1)).to(t)) for t in sides if t is not None]


class SigmaCap(_Scaling, name="sigma-cap"):
    """Scale the output projections (values if there is none) of layers with sigma above the cap.

    The factor is ``cap / upper``, with ``upper`` the upper end of the interval of the largest sigma
    over the batch (tolerance 1 %, failure probability 1 %): sigma is at most the cap on this batch.
    For scaled cosine attention without an output projection, the gain is scaled.
    """

    what = "sigma up to {:.4g} whatever its values are scaled by (they are normalised)"

    def _above(self, data: Batch) -> dict[int, tuple[Attention, Tensor, float]]:
        assert self.cap is not None
        found: dict[int, tuple[Attention, Tensor, float]] = {}
        for seen in self.probe.seen(data):
            start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
            top = top_singular(seen.attention.linearise(seen.x), tol=_CAP_TOL, generator=start)
            if top.status == "non_finite":
                raise InputError(
                    f"Sigma of layer {seen.index} should be finite. Found that {top.note}."
                )
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


def _frozen_weights(name: str, index: int) -> InputError:
    return InputError(
        f"`{name}` should change the model's own weights. Found that those of layer {index} are "
        "computed from others (a parametrisation, tied or interleaved weights), or not trained."
    )


# --- penalties

_PENALTY_TOL = 1e-3  # solver tolerance, sufficient for an optimiser step
_CHUNK = 2**28  # approximate bytes of scores of the rows pulled back at a time
_ROUNDS = 20  # rounds of three subspace iterations for the certificate's directions
_SMALLEST = 1e-30  # smaller spreads count as zero


class Penalty(Restraint, ABC):
    """The mean of a quantity over layers and entries, or of its excess over a cap."""

    @abstractmethod
    def of(self, seen: ProbedLayer) -> Tensor:
        """The quantity of one layer."""

    def penalty(self, data: Batch = None) -> Tensor:
        """See `Restraint.penalty`."""
        with uncast(self.probe.device):
            values = torch.stack([self.of(seen) for seen in self.probe.seen(data)])
        return _above(values, self.cap)


def _above(values: Tensor, cap: float | None) -> Tensor:
    """The mean excess of values over the cap; their mean without a cap."""
    return (values if cap is None else (values - cap).clamp_min(0)).mean()


class Sigma(Penalty, name="sigma"):
    """Sigma of the layer, to a relative tolerance of 1e-3, solved from scratch each time."""

    def of(self, seen: ProbedLayer) -> Tensor:
        """See `lipscope.sigma`."""
        start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
        return sigma(seen.attention, seen.x, tol=_PENALTY_TOL, generator=start)


class SigmaEstimate(Penalty, name="sigma-estimate"):
    """``‖J^T u‖`` with ``u = J v / ‖J v‖``: two products, starting from the previous call's ``v``.

    Never above sigma, and closer with each call on the same inputs while the weights move slowly.
    Another batch starts from the ``v`` at the same position if the lengths agree. For the typical
    gap see ``docs/benchmarks-tables.md``.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self._held: dict[tuple[int, int], Tensor] = {}

    def of(self, seen: ProbedLayer) -> Tensor:
        """``<u, J v>``, whose gradient is that of sigma if ``u`` and ``v`` are singular vectors."""
        place = seen.index, seen.entry
        v = self._held.get(place)
        if v is None or v.shape != seen.x.shape or v.dtype != seen.x.dtype:
            start = start_named(f"{self.seed}|{seen.index}|{seen.entry}")
            v = torch.randn(seen.x.shape, generator=start, dtype=torch.float64).to(seen.x)
        op = seen.attention.linearise(seen.x)
        u = unit_vector(op.matvec(v))
        v = unit_vector(op.rmatvec(u))
        if bool(v.any()) and bool(v.isfinite().all()):  # otherwise start from scratch
            self._held[place] = v
        return seen.attention.stretch(seen.x, u, v)


class RowGram(Penalty, name="row-gram"):
    """The row-Gram certificate by rows, an upper bound of sigma at every step.

    ``sqrt(max_j sum_i p_ij ω_i)``, ``ω_i = sum_j |J_ij^T z_i|^2 / p_ij`` with the maximising
    direction ``z_i``. Computed in float64. At the optimal ``p`` all columns ``j`` are equal, and
    the gradient is their mean with weights ``y_j²``, ``y`` the Perron vector of ``B^T B``,
    ``B_ij = |J_ij^T z_i|``: for fixed ``z`` the minimum over ``p`` is ``‖B‖``. Exact if ``z`` is
    unique and ``p`` optimal.

    Holds for dot-product attention. Takes seconds for a few hundred tokens.

    Source: `lipscope.theorems.derived.row_gram`.
    """

    def of(self, seen: ProbedLayer) -> Tensor:
        """The certificate of one layer."""
        layer, x = seen.attention, seen.x
        if not isinstance(layer, DotProduct):
            raise InputError(
                f"`row-gram` is a bound of dot-product attention. Found `{type(layer).__name__}`."
            )
        try:
            at = LayerSubject(layer, x=x).together
            rows = JacobianRows(at)
            found = weighted_rows(rows)
        except NotApplicableError as problem:
            raise InputError(
                f"`row-gram` should hold for layer {seen.index}. Found none: {problem}."
            ) from problem
        if not 0 < found.value < float("inf"):
            return x.new_tensor(found.value)
        probes = torch.eye(rows.width, dtype=torch.float64)[:, -8:].expand(len(x), -1, -1)
        for _ in range(_ROUNDS):
            _, probes, _ = rows.probe(found.weights, probes)
        z, size = probes[..., -1], rows.seen(probes[..., -1:]).sqrt()
        columns = torch.linalg.eigh(size.T @ size).eigenvectors[:, -1].square()
        if at.output is not None:  # ‖W Y‖ = ‖R Y‖ for W = U R
            z = z @ torch.linalg.qr(at.output).Q.T
        if not torch.is_grad_enabled():
            return x.new_tensor(found.value)
        inverse = torch.where(rows.support, 1 / found.weights, 0.0)
        share = ((found.weights @ columns)[:, None] * inverse).to(x)
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


class SoftmaxSpread(Penalty, name="softmax-spread"):
    """``log max_i g_1(P_i)``, ``g_1(p) = p_(1) (1 - p_(1) + p_(2))``: mean over heads.

    ``g_1`` bounds the norm of the softmax's Jacobian. Refused for sigmoid and Sinkhorn weights,
    which have other derivatives, even after normalising rows.

    Source: the penalty of [yudin2025], as quoted elsewhere.
    """

    cap_is = "none"
    over: int | None = None

    def of(self, seen: ProbedLayer) -> Tensor:
        """The mean over heads."""
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
        value = _row_spread(top, 1).clamp_min(_SMALLEST).log()
        if self.over is not None:
            # Rows over fewer tokens have no ratio.
            under = _row_spread(top, self.over)
            value = torch.where(under > _SMALLEST, value - under.clamp_min(_SMALLEST).log(), 0.0)
        return value.amax(-1).mean()


class SoftmaxSpreadRatio(SoftmaxSpread, name="softmax-spread-ratio"):
    """``log max_i g_1(P_i) / g_2(P_i)``, ``g_k(p) = p_(k) (1 - p_(k) + p_(k+1))``: mean over heads.

    The baseline for ``softmax-spread``; ``k = 2`` is ours. Rows with a single visible token count
    as 0; those with two have the ratio 2 for any weights.
    """

    over = 2


def _row_spread(top: Tensor, k: int) -> Tensor:
    first, second = top[..., k - 1], top[..., k]
    return first * (1 - first + second)


class WeightNorms(Restraint, name="weight-norms"):
    """The mean spectral norm of a layer's weight matrices, independent of the input."""

    def penalty(self, data: Batch = None) -> Tensor:
        """See `Restraint.penalty`; independent of the batch."""
        weights = [[getattr(*one) for one in self.probe.weights(i)] for i in self.probe.indices]
        for i, held in zip(self.probe.indices, weights, strict=True):
            for one in held:
                check_finite_numbers(f"weights of layer {i}", one)
        with uncast(self.probe.device):
            values = [torch.stack([*map(spectral_norm, held)]).mean() for held in weights]
        return _above(torch.stack(values), self.cap)


def restrain(
    model: nn.Module,
    data: Tensor | Mapping[str, Any],
    how: str,
    *,
    layers: Layers = "all",
    cap: float | None = None,
    modules: str | None = None,
    seed: int = 0,
) -> Restraint:
    """Keep attention layers smooth in training by a penalty or constraint, selected by name.

    Penalties, each the mean over layers and entries of the batch of:

    - ``sigma``: sigma, solved from scratch each time
    - ``sigma-estimate``: a lower estimate of sigma, two products per call, warm start
    - ``row-gram``: the row-Gram certificate, never below sigma
    - ``softmax-spread``: the log of the largest ``g_1`` of a row [yudin2025]
    - ``softmax-spread-ratio``: the log of the largest ``g_1 / g_2``, its baseline form
    - ``weight-norms``: the mean spectral norm of the weight matrices

    Constraints:

    - ``spectral-norm``, at once: weight matrices ``W cap / ‖W‖``, cap 1 if None
    - ``spectral-gain``, at once: ``g W / ‖W‖`` with a learnt ``g``, initially ``‖W‖``
    - ``query-key-norm``, at once: RMSNorm with a learnt gain on queries and keys
    - ``spectral-cap``, after a step: singular values of weights above the cap
    - ``query-key-clip``, after a step: queries and keys of heads with a larger logit
    - ``sigma-cap``, after a step: output projections of layers with a larger sigma

    All act on the map ``attention`` at the layer's own input, which is held fixed: a penalty has
    gradients only for the weights of its own layer.

    Holds for layers whose weights are available in closed form; constraints on weight matrices
    and ``weight-norms`` for all.

    Args:
        model: The model in training, or an `Attention` layer.
        data: A few sequences without padding: input ids, embeddings, pixels or a mapping of
            arguments, on which layers are evaluated.
        layers: Indices from 0 as in the rows of `measure`, or "all".
        cap: For a penalty: count only the excess over it, if not None. For a constraint: see above.
        modules: Regular expression for the attention modules, as for `measure`.
        seed: Seed of random starts; torch's generators are not used.

    Returns:
        An object with `penalty`, to be added to the loss, and `step`, to be called after an
        optimiser step.

    Raises:
        InputError: If the restraint or layer does not exist, or they are incompatible.

    >>> import torch
    >>> from lipscope.attention import DotProduct
    >>> weights = [torch.nn.Parameter(2 * torch.eye(3)) for _ in range(3)]
    >>> layer, x = DotProduct(*weights), torch.zeros(4, 3)  # sigma = 2, the norm of the values
    >>> round(restrain(layer, x, "sigma").penalty().item(), 3)
    2.0
    >>> capped = restrain(layer, x, "sigma-cap", cap=1.0)
    >>> {i: round(factor, 2) for i, factor in capped.step().items()}
    {0: 0.5}
    """
    kind = restraints().get(how) if isinstance(how, str) else None
    if kind is None:
        raise InputError(f"`how` should be one of {', '.join(restraints())}. Found `{shown(how)}`.")
    probe = Probe(model, data, layers=layers, modules=modules)
    return kind(probe, cap=cap, seed=seed)
