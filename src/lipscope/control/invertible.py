"""Invertible residual blocks: contractions, inverses, log-determinants, normalising flows."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention, exact, spectral_norm, transformed, uncast
from lipscope.display import Shown
from lipscope.errors import InputError, check_count, check_positive, shown

_ROUNDING = 128  # rounding units: of singular values and their products


class Contraction(nn.Module, ABC):
    """``g`` with ``‖g(X) - g(Y)‖_F ≤ c ‖X - Y‖_F``, ``c < 1``, for all X, Y of the same length."""

    def __init__(self, c: float) -> None:
        super().__init__()
        if not isinstance(c, int | float) or not 0 < c < 1:
            raise InputError(f"`c` should be above 0 and below 1 to contract. Found `c = {c}`.")
        self.c = c

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``g(X)``."""

    @property
    @abstractmethod
    def first(self) -> Tensor:
        """The weights applied first to a token, ``(_, d)``."""

    def check(self, name: str, x: object) -> None:
        """Require tokens with the width and dtype of the weights."""
        d, dtype = self.first.shape[1], self.first.dtype
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != d or x.dtype != dtype:
            found = type(x).__name__
            if isinstance(x, Tensor):
                found = f"{tuple(x.shape)} in {str(x.dtype)[6:]}"
            raise InputError(
                f"`{name}` should have shape (..., n, {d}) in {str(dtype)[6:]}, as the weights. "
                f"Found {found}."
            )


class ContractiveAttention(Contraction):
    """``c F(X) / L``, ``L = layer.constant(n)``: attention that contracts on all inputs.

    ``L`` is computed from the weights and the number of tokens in every pass, so that the layer
    stays a contraction in training; gradients go through ``L``.

    Holds for variants with a bound at all inputs: `L2Attention`, `ScaledCosineAttention`,
    `LipschitzNormAttention`, `ClippedAttention`; not for dot products, Sinkhorn, sigmoid
    or divided attention, whose bounds are on a ball.

    Raises:
        InputError: If ``c`` is out of range, the layer has no known constant, or widths differ; in
            a pass, if the constant is invalid (NaN, negative).

    Source: Contractive-L2-MHA of [kim2021], for every variant with a constant.

    >>> from lipscope.attention import L2Attention
    >>> g = ContractiveAttention(L2Attention(torch.eye(2), torch.eye(2)), c=0.9)
    >>> round(g(torch.tensor([[3.0, 4.0]])).norm().item(), 3)  # one token: F(x) = x / √2, as L
    4.5
    """

    def __init__(self, layer: Attention, c: float) -> None:
        super().__init__(c)
        if not isinstance(layer, Attention):
            raise InputError(
                "`layer` should be an attention layer, such as `attention` of a "
                f"`lipscope.MultiheadAttention`. Found `{type(layer).__name__}`."
            )
        d = layer.query.shape[1]
        width = layer.num_heads * layer.value_width if layer.output is None else len(layer.output)
        if width != d:
            raise InputError(f"The output should be as wide as the input, {d}. Found {width}.")
        layer.constant(1 if layer.mask is None else layer.mask.shape[-1])
        self.layer = layer

    @property
    def first(self) -> Tensor:
        """The query weights."""
        return self.layer.query

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``c F(X) / L``."""
        return self.layer(x) * self._share(x.shape[-2])

    def as_layer(self, num_tokens: int) -> Attention:
        """The same function for ``num_tokens`` tokens, as a single measurable attention layer."""
        layer, share = self.layer, self._share(num_tokens)
        last = torch.eye(layer.query.shape[1]).to(share) if layer.output is None else layer.output
        bias = {} if layer.output_bias is None else {"output_bias": share * layer.output_bias}
        return layer.replace(output=share * last, **bias)

    def _share(self, num_tokens: int) -> Tensor:
        with torch.autocast(self.first.device.type, enabled=False):
            return _scale_to(self.c, self.layer.constant(num_tokens), self.first.dtype)


class ContractiveMLP(Contraction):
    """``c f(x) / Π_l ‖W_l‖`` for every token, ``f`` linear maps with ``tanh`` in between.

    >>> g = ContractiveMLP([2, 8, 2], c=0.5)
    >>> g(torch.zeros(5, 1, 2)).shape
    torch.Size([5, 1, 2])
    """

    def __init__(
        self, widths: Sequence[int], c: float, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(c)
        whole = isinstance(widths, Sequence) and all(type(w) is int and w > 0 for w in widths)
        if not whole or len(widths) < 2 or widths[0] != widths[-1]:
            raise InputError(
                "`widths` should be two or more positive integers, the last as the first. "
                f"Found `{shown(widths)}`."
            )
        pairs = itertools.pairwise(widths)
        self.weights = nn.ParameterList(
            [torch.randn(b, a, generator=generator) / math.sqrt(a) for a, b in pairs]
        )
        self.biases = nn.ParameterList([torch.zeros(b) for b in widths[1:]])

    @property
    def first(self) -> Tensor:
        """The weights of the first layer."""
        return self.weights[0]

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``c f(x) / Π_l ‖W_l‖``."""
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = nn.functional.linear(x, weight, bias)
            x = x if layer == last else x.tanh()
        with torch.autocast(self.first.device.type, enabled=False):
            sizes = torch.stack([spectral_norm(weight) for weight in self.weights])
            return x * _scale_to(self.c, sizes.prod(), x.dtype)


def _scale_to(c: float, constant: Tensor, dtype: torch.dtype) -> Tensor:
    """``c / L`` in a dtype, rounded down; 0 if ``L`` is 0, since the output is then constant."""
    if not transformed() and not bool(constant >= 0):
        raise InputError(
            "The constant of a contraction should be 0 or larger, to be divided by. Found "
            f"{constant.item():g}: a weight is no number, or `constant` no bound of its layer."
        )
    bound = constant * (1 + _ROUNDING * torch.finfo(dtype).eps)
    none = torch.full_like(bound, torch.nan)  # under torch transforms: no exception
    return (c / torch.where(bound > 0, bound, torch.where(bound == 0, 1.0, none))).to(dtype)


_DENSE = 64  # maximum number of entries of a sample for a dense Jacobian
_TRACED = 1024  # maximum number of entries for exact traces: one product each per term
_CERTAIN = 4  # terms that the roulette always includes
_GOES_ON = 0.5  # its minimum probability of one more term


_Method = Literal["exact", "series", "roulette"]


@dataclass(frozen=True, repr=False)
class LogDeterminant(Shown):
    """``log det(I + J_g(X))`` of every sample."""

    value: Float[Tensor, "*b"]  # the value or its estimate, differentiable
    error: float  # bound of the truncation error of the series; 0 if not truncated
    terms: int  # of the series; 0 for a dense Jacobian
    # random vectors per sample; 0 for exact traces. Otherwise ``value`` is random, unbiased up
    # to ``error``
    probes: int


def log_determinant(
    g: Contraction,
    x: Float[Tensor, "*b n d"],
    *,
    method: _Method | None = None,
    terms: int | None = None,
    probes: int | None = None,
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> LogDeterminant:
    """``log det(I + J_g(X))`` of every sample, ``Σ_{k≥1} (-1)^(k+1) tr(J^k) / k``.

    Args:
        method: ``exact`` forms the Jacobian. ``series`` truncates after ``terms``, with error at
            most ``n d c^(K+1) / ((K+1) (1-c))``. ``roulette`` stops at random and weights terms by
            their inverse probability: unbiased. None: ``exact`` for up to 64 entries, else
            ``series``.
        terms: ``K`` of the series; None: chosen by ``tol``.
        probes: Random sign vectors ``v`` per sample, ``E v^T J^k v = tr(J^k)``; None: exact traces,
            ``n d`` products per term, for up to 1,024 entries.
        tol: Limit of ``error`` if ``terms`` is None.
        generator: Source of signs and of the roulette.

    Source: the series of [behrmann2019], the roulette of [chen2019].
    """
    if not isinstance(g, Contraction):
        raise InputError(f"`g` should be certified to contract. Found `{type(g).__name__}`.")
    g.check("x", x)
    check_positive("tol", tol)
    size = x.shape[-2] * x.shape[-1]
    method = method or ("exact" if size <= _DENSE else "series")
    if method not in get_args(_Method):
        known = ", ".join(get_args(_Method))
        raise InputError(f"`method` should be one of {known}. Found `{method}`.")
    for name, number in (("terms", terms), ("probes", probes)):
        if number is not None and (type(number) is not int or number < 1 or method == "exact"):
            raise InputError(
                f"`{name}` should be a positive integer, and left out of the method `exact`. "
                f"Found `{name} = {number}` and `{method}`."
            )
    if size > _TRACED and probes is None and method != "exact":
        raise InputError(
            f"`probes` should be given for samples of more than {_TRACED} entries. Found {size}, "
            "each of which costs one product per term for exact traces."
        )
    if method == "exact":
        return LogDeterminant(_log_determinant(g, x), 0.0, 0, 0)
    if method == "series":
        count = _terms(size, g.c, tol) if terms is None else terms
        weights = [1.0] * count
        error = _series_remainder(size, g.c, count)
    else:
        if terms is not None:
            raise InputError("`terms` should be left out of the method `roulette`. Found it.")
        goes_on = max(_GOES_ON, g.c)  # with a probability below c, the weights would outgrow J^k
        weights, chance = [], 1.0
        while len(weights) < _CERTAIN or float(torch.rand((), generator=generator)) < goes_on:
            chance *= goes_on if len(weights) >= _CERTAIN else 1.0
            weights.append(1 / chance)
        error = 0.0
    value = _trace_series(g, x, weights, probes, generator)
    return LogDeterminant(value, error, len(weights), probes or 0)


@exact
def _log_determinant(g: Contraction, x: Tensor) -> Tensor:
    size = x.shape[-2] * x.shape[-1]

    def jacobian(one: Tensor) -> Tensor:
        found = torch.func.jacrev(g)(one)
        assert isinstance(found, Tensor)
        return found.reshape(size, size)

    every = torch.func.vmap(jacobian)(x.reshape(-1, *x.shape[-2:]))
    wide = torch.promote_types(x.dtype, torch.float32)  # unavailable in half precision
    eye = torch.eye(size, dtype=wide, device=x.device)
    return torch.linalg.slogdet(every + eye).logabsdet.to(x.dtype).reshape(x.shape[:-2])


@exact
def _trace_series(
    g: Contraction,
    x: Tensor,
    weights: list[float],
    probes: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """``Σ_k (-1)^(k+1) w_k tr(J^k) / k`` with traces from products ``J^T v``."""
    learns = torch.is_grad_enabled()
    size = x.shape[-2] * x.shape[-1]
    shape = (size if probes is None else probes, *x.shape)
    if probes is None:
        v = torch.eye(size).to(x).reshape(size, *(1,) * (x.ndim - 2), *x.shape[-2:]).expand(shape)
    else:
        v = torch.randint(0, 2, shape, generator=generator).to(x) * 2 - 1
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        there = at.expand(shape) * 1.0  # one copy per probe keeps products separate
        y, w, total = g(there), v, x.new_zeros(x.shape[:-2])
        for k, weight in enumerate(weights, 1):
            (w,) = torch.autograd.grad(y, there, w, create_graph=learns, retain_graph=True)
            trace = (w * v).flatten(-2).sum(-1).sum(0) / (probes or 1)
            total = total + (-1) ** (k + 1) * weight / k * trace
    return total


def _series_remainder(size: int, c: float, terms: int) -> float:
    """``n d c^(K+1) / ((K+1) (1-c))``: ``|tr J^k| ≤ n d c^k``."""
    return size * c ** (terms + 1) / ((terms + 1) * (1 - c))


def _terms(size: int, c: float, tol: float) -> int:
    first = max(1, math.ceil(math.log(tol * (1 - c) / size) / math.log(c)) - 1)
    # Sufficient without the factor 1 / (K+1); possibly more than necessary.
    return next(
        k for k in range(1, first + 1) if _series_remainder(size, c, k) <= tol or k == first
    )


_KEPT = 5  # differences used by Anderson mixing
_UNITS = 8  # rounding units of a residual, relative to its tokens, at which steps end
_WITHIN = 256  # those of float64 within ``g``
_BACKWARD = (
    "`inverse` should be differentiated once, by `backward` or `torch.autograd.grad`. Found {}."
)


@dataclass(frozen=True, repr=False)
class Inverse(Shown):
    """A solution ``X`` of ``X + g(X) = Y``, with an error bound."""

    x: Float[Tensor, "*b n d"]  # ``X``
    steps: int  # number of evaluations of ``g``
    # bound of ``‖X - X*‖_F`` for every sample, ``X*`` the exact solution
    error: Float[Tensor, "*b"]


class InvertibleResidual(nn.Module):
    """``X ↦ X + g(X)`` for a contraction ``g``: a bijection with inverse and determinant.

    Source: residual blocks of [behrmann2019], attention of [kim2021].

    >>> from lipscope.control import ContractiveMLP
    >>> block = InvertibleResidual(ContractiveMLP([2, 8, 2], c=0.5))
    >>> x = torch.ones(3, 1, 2)
    >>> bool(torch.allclose(block.inverse(block(x)).x, x))
    True
    """

    def __init__(self, g: Contraction) -> None:
        super().__init__()
        if not isinstance(g, Contraction):
            raise InputError(
                "`g` should be certified to contract, such as `ContractiveAttention`. "
                f"Found `{type(g).__name__}`."
            )
        self.g = g

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """``X + g(X)``, in the dtype of the weights even under autocast."""
        with uncast(x.device):
            x = x.to(torch.promote_types(x.dtype, self.g.first.dtype))
            return x + self.g(x)

    def inverse(
        self, y: Float[Tensor, "*b n d"], *, tol: float | None = None, max_steps: int = 1000
    ) -> Inverse:
        """The ``X`` with ``X + g(X) = Y``, differentiable once, in ``Y`` and in the weights.

        The returned error bound is ``‖X - X*‖_F ≤ ‖X + g(X) - Y‖_F / (1 - c)`` in float64, so that
        rounding within ``g`` counts, and 256 rounding units of float64 more. Gradients are those of
        the inverse function: one more equation of this kind, without recorded steps. Everything
        else is in the dtype of ``Y``, even under autocast.

        Args:
            y: Samples, solved together.
            tol: Error tolerance per sample, relative to ``max(‖Y‖_F, ‖X‖_F)``; None: until a step
                changes no more than rounding.
            max_steps: Maximum number of evaluations of ``g``.

        Raises:
            InputError: If the tolerance is not reached, or a second or forward-mode derivative
                is requested.
        """
        self.g.check("y", y)
        check_count("max_steps", max_steps)
        if transformed():
            raise InputError(_BACKWARD.format("forward mode or a transform of `torch.func`"))
        if not bool(y.isfinite().all()):
            raise InputError("`y` should hold finite numbers. Found others.")
        slack, least = 1 - self.g.c, _UNITS * torch.finfo(y.dtype).eps / (1 - self.g.c)
        limit = least if tol is None else tol
        check_positive("tol", limit)

        def check(error: Tensor, size: Tensor) -> None:
            if not bool((error <= limit * size).all()):
                raise InputError(
                    f"`tol` should be what {str(y.dtype)[6:]} can reach in `max_steps` steps. "
                    f"Found errors to {float((error / size).max()):.1g} with "
                    f"`tol = {limit:.1g}`, `max_steps = {max_steps}`."
                )

        @exact
        def answer(h: Callable[[Tensor], Tensor], right: Tensor) -> Inverse:
            found = solve(h, right, c=self.g.c, tol=limit * slack, max_steps=max_steps)
            size = _larger_norm(right.flatten(-2), found.x.flatten(-2))
            check(torch.maximum(self.g.c * found.error / slack, least * size), size)
            return found

        # The last step carries the derivative of the right side; the hook then multiplies gradients
        # by (1 + J)^-T.
        with uncast(y.device):
            with torch.no_grad():
                found = answer(self.g, y.detach())
            x = y - self.g(found.x)
            error = self._error(x.detach(), y.detach())
            if tol is not None:
                check(error, _larger_norm(y.detach().flatten(-2), x.detach().flatten(-2)))
            if x.requires_grad:
                at = found.x.detach().requires_grad_()
                with torch.enable_grad():
                    there = self.g(at)

                def pull(w: Tensor) -> Tensor:
                    return torch.autograd.grad(there, at, w, retain_graph=True)[0]

                def back(grad: Tensor) -> Tensor:
                    if torch.is_grad_enabled():  # the solution would be treated as constant
                        raise InputError(_BACKWARD.format("`create_graph`"))
                    return answer(pull, grad).x

                x.register_hook(back)
        return Inverse(x, found.steps + 1, error)

    @torch.no_grad()
    def _error(self, x: Tensor, y: Tensor) -> Tensor:
        """The bound of ``‖X - X*‖_F`` of every sample, rounded up."""
        dtype, held = y.dtype, [*self.g.named_parameters(), *self.g.named_buffers()]
        wide = {name: t.double() for name, t in held if t.is_floating_point()}
        x, y = x.double(), y.double()
        off = x + torch.func.functional_call(self.g, wide, (x,)) - y
        x, y, off = (t.flatten(-2) for t in (x, y, off))
        units = _WITHIN * torch.finfo(x.dtype).eps
        error = (off.norm(dim=-1) + units * _larger_norm(y, x)) / (1 - self.g.c)
        kind = torch.finfo(dtype)
        return (error * (1 + 2 * kind.eps)).clamp_min(kind.tiny).to(dtype)

    def log_determinant(self, x: Float[Tensor, "*b n d"], **options: object) -> LogDeterminant:
        """``log det(I + J_g(X))`` of every sample, with the options of `log_determinant`."""
        return log_determinant(self.g, x, **options)  # pyright: ignore[reportArgumentType]


def solve(
    g: Callable[[Tensor], Tensor],
    y: Float[Tensor, "*b n d"],
    *,
    c: float = 1.0,
    tol: float,
    max_steps: int,
    accelerate: bool = True,
) -> Inverse:
    """``X + g(X) = Y`` by ``X ← Y - g(X)``, accelerated by Anderson's mixing.

    Mixed iterates are accepted if they reduce the residual by more than ``c``; otherwise a plain
    step is taken, so the residual falls by at least ``c`` in two evaluations.

    Holds for contractions. For another ``g`` it may diverge, as its ``error`` then shows.

    Source: [walker2011] for the mixing.
    """
    flat, shape = y.flatten(-2), y.shape
    best, best_gap = flat, torch.full_like(_larger_norm(flat, flat), torch.inf)
    x, plain = flat, torch.ones_like(best_gap, dtype=torch.bool)
    points: list[Tensor] = []
    moves: list[Tensor] = []
    move, steps = torch.zeros_like(flat), 0
    while steps < max_steps:
        steps += 1
        to = flat - g(x.view(shape)).flatten(-2)
        gap = (to - x).norm(dim=-1)
        # A mixed iterate must achieve the guaranteed reduction; a plain one is always accepted.
        taken = plain | (gap <= c * best_gap)
        nearer = gap < best_gap
        move = torch.where(nearer[..., None], to - x, move)
        best, best_gap = torch.where(nearer[..., None], x, best), torch.minimum(gap, best_gap)
        if bool((best_gap <= tol * _larger_norm(flat, best)).all()):
            break
        points, moves = [*points[-_KEPT:], x], [*moves[-_KEPT:], to - x]
        step = best + move
        plain = ~taken | (not accelerate) | (len(points) == 1)
        x = (
            step
            if bool(plain.all())
            else torch.where(plain[..., None], step, _mixed(points, moves))
        )
    return Inverse(best.view(shape), steps, best_gap)


def _larger_norm(y: Tensor, x: Tensor) -> Tensor:
    return torch.maximum(y.norm(dim=-1), x.norm(dim=-1))


def _mixed(points: list[Tensor], moves: list[Tensor]) -> Tensor:
    """The plain step from the combination of points with the smallest move."""
    last, move = points[-1], moves[-1]
    across = torch.stack([move - m for m in moves[:-1]], -1)
    along = torch.stack([last - p for p in points[:-1]], -1)
    size = across.norm(dim=(-2, -1), keepdim=True)
    across, along = (t / torch.where(size > 0, size, 1.0) for t in (across, along))
    gram = across.mT @ across
    ridge = 10 * torch.finfo(gram.dtype).eps * torch.eye(gram.shape[-1]).to(gram)
    wide = torch.promote_types(gram.dtype, torch.float32)  # no solver in half precision
    right = across.mT @ move[..., None]
    weights = torch.linalg.solve((gram + ridge).to(wide), right.to(wide)).to(gram.dtype)
    mixed = last + move - ((along + across) @ weights)[..., 0]
    return torch.where(mixed.isfinite(), mixed, last + move)


class Flow(nn.Module):
    """``log p(X) = log N(Z; 0, 1) + Σ log det``, where the blocks map ``X`` to ``Z``.

    A sample is a set of ``n`` points in ``d`` dimensions, ``(n, d)``; a single point has n = 1.
    Attention blocks couple the points, and the density is invariant under permutations of them.

    Source: residual flows [behrmann2019].

    >>> from lipscope.control import ContractiveMLP
    >>> flow = Flow([InvertibleResidual(ContractiveMLP([2, 8, 2], c=0.5))])
    >>> flow.log_density(torch.zeros(7, 1, 2)).shape
    torch.Size([7])
    """

    def __init__(self, blocks: Sequence[InvertibleResidual]) -> None:
        super().__init__()
        several = isinstance(blocks, Sequence | nn.ModuleList)
        if not several or not blocks or not all(isinstance(b, InvertibleResidual) for b in blocks):
            kinds = blocks if several else [blocks]
            found = ", ".join(type(block).__name__ for block in kinds) or "none"
            raise InputError(f"`blocks` should be a list of `InvertibleResidual`. Found `{found}`.")
        self.blocks = nn.ModuleList(blocks)

    def log_density(self, x: Float[Tensor, "*b n d"], **options: object) -> Float[Tensor, "*b"]:
        """``log p(X)`` of every sample, in nats; options as in `log_determinant`."""
        self._each()[0].g.check("x", x)
        total = x.new_zeros(x.shape[:-2])
        for block in self._each():
            total = total + block.log_determinant(x, **options).value
            x = block(x)
        size = x.shape[-2] * x.shape[-1]
        return total - (x.square().sum((-2, -1)) + size * math.log(2 * math.pi)) / 2

    def inverse(self, z: Float[Tensor, "*b n d"], **options: float) -> Inverse:
        """The ``X`` that maps to ``Z``; options as in `InvertibleResidual.inverse`.

        The error of a block grows by ``1 / (1 - c)`` in the next one; the returned bound covers all
        blocks.
        """
        steps, error = 0, z.new_zeros(z.shape[:-2])
        for block in reversed(list(self._each())):
            found = block.inverse(z, **options)  # pyright: ignore[reportArgumentType]
            z, steps = found.x, steps + found.steps
            error = error / (1 - block.g.c) + found.error
        return Inverse(z, steps, error)

    def sample(
        self, count: int, num_tokens: int, width: int, *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "b n d"]:
        """``count`` samples of ``num_tokens`` points in ``width`` dimensions."""
        for name, number in (("count", count), ("num_tokens", num_tokens), ("width", width)):
            check_count(name, number, least=0 if name == "count" else 1)
        like = next(self.parameters())
        z = torch.randn(count, num_tokens, width, generator=generator, dtype=like.dtype)
        with torch.no_grad():
            return self.inverse(z.to(like.device)).x

    def _each(self) -> list[InvertibleResidual]:
        return [block for block in self.blocks if isinstance(block, InvertibleResidual)]
