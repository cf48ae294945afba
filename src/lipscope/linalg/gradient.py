"""Sigma as a differentiable function of a layer's input and weights.

Its gradient is that of ``<u, J v>`` at fixed ``u, v``, recomputed in the backward pass with at
most one chunk of attention in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipscope.errors import InputError, check_count, check_finite_numbers
from lipscope.linalg.operator import Operator, check_map, linearise, stretch
from lipscope.linalg.singular import DEFAULT_MEMORY, TopSingular, top_singular

_SOLVE_STEPS = 500
_SOLVE_TOL = {torch.float32: 1e-5, torch.float64: 1e-11}  # relative; a few rounding units


def sigma(
    layer: nn.Module | Callable[[Tensor], Tensor],
    x: Float[Tensor, ...],
    *,
    tol: float = 1e-4,
    memory: int = DEFAULT_MEMORY,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """Sigma of a layer at ``x`` with gradients, for a penalty or for gradient ascent.

    ``sigma = max_e ‖J(x) e‖ / ‖e‖`` in the Frobenius norm, and ``d sigma = <u, (dJ) v>`` for
    changes of the input and of the weights. Second derivatives follow from those of ``u`` and
    ``v``, which solve a linear system with ``sigma^2 - J^T J`` (conjugate gradients); third
    derivatives raise torch's error about differentiating twice.

    Holds where the top singular value is simple. Where two singular values cross, sigma has a
    kink and the gradient is that of one branch. The value is a Ritz value, a lower bound of sigma,
    without an interval: a penalty selects inputs by their sigma, which voids it. Use
    `top_singular` for values to be reported.

    A module in training mode is measured in evaluation mode, and without autocast: its dropout
    is off during this call and its backward pass only.

    Args:
        layer: An attention layer (chunked, so that long inputs fit), any module, or a function
            without trainable weights. ``nn.MultiheadAttention`` is used as self-attention:
            query, key and value are ``x``.
        x: One input: ``(n, d)`` for an attention layer, else what the module takes, such as
            ``(1, n, d)``.
        tol: Relative tolerance of the solver; the error of the gradient is of the order of
            ``tol · sigma_1 / (sigma_1 - sigma_2)``.
        memory: Bytes for chunks, stored probabilities and the solver's basis.
        generator: Source of the solver's random start; None: torch's global generator.

    Returns:
        A scalar in the dtype of ``x``; NaN where the layer overflows.

    Raises:
        InputError: If ``layer`` is a plain function with trainable weights; in a second
            derivative, if sigma_1 and sigma_2 are too close.

    Source: derived here (``docs/theory/gradient.md``).

    >>> x = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> value = sigma(lambda z: z**3, x)  # J = diag(3 z^2)
    >>> value.backward()
    >>> round(float(value.detach()), 3), round(float(x.grad[1]), 3)
    (27.0, 18.0)
    """
    check_map(layer, x)
    whole = _Stretch(layer, memory)
    for name, one in (("x", x), *whole.named_parameters()):
        check_finite_numbers(name, one)
    check_count("memory", memory)
    with torch.autocast(x.device.type, enabled=False):
        op = _operator(layer, x, memory)
        _refuse_hidden(layer, x)
        top = top_singular(op, tol=tol, memory=memory // 2, generator=generator)
    return _Sigma.apply(whole, top, x, *whole.weights)  # pyright: ignore[reportReturnType]


class _Stretch(nn.Module):
    """``<g, J(x) e>`` with the layer as a submodule, so that its weights can be replaced.

    A layer with a method ``stretch`` computes it itself, in chunks within ``memory``.
    """

    def __init__(self, layer: nn.Module | Callable[[Tensor], Tensor], memory: int) -> None:
        super().__init__()
        self.layer, self.memory = layer, memory
        named = [*self.named_parameters(), *self.named_buffers()]
        # parameters that require gradients
        self.names = [name for name, t in named if t.requires_grad]
        self.weights = [t for _, t in named if t.requires_grad]

    def forward(self, x: Tensor, g: Tensor, e: Tensor) -> Tensor:
        if (own := getattr(self.layer, "stretch", None)) is not None:
            return own(x, g, e, memory=self.memory)
        with sdpa_kernel(SDPBackend.MATH), _evaluation_mode(self.layer):
            return stretch(_output(self.layer, x), x, g, e)

    def gradients(
        self,
        tensors: tuple[Tensor, ...],
        pairs: list[tuple[Tensor, Tensor]],
        weight: Tensor | None = None,
        *,
        create_graph: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Partial derivatives of ``sum <g, J e>`` over the pairs ``(g, e)``, held fixed."""
        with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            # Use copies in the graph: a weight may depend on another one, and autograd adds that
            # share itself. The input always needs a gradient for the inner products.
            copies = [
                t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors
            ]
            x, *weights = copies
            named = dict(zip(self.names, weights, strict=True))
            values = [functional_call(self, named, (x, g, e)) for g, e in pairs]
            value = torch.stack(values).sum()
            return torch.autograd.grad(
                value, copies, weight, create_graph=create_graph, allow_unused=True
            )


class _TopFunction(torch.autograd.Function):
    """Base of functions of `_Stretch`, the solver's result, the input and the weights."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.whole, ctx.top, *tensors = inputs
        ctx.save_for_backward(*tensors)


class _Sigma(_TopFunction):
    """The top singular value; its backward pass is ``<u, (dJ) v>``."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        _, top, x, *_ = args
        return x.new_tensor(top.sigma)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tensors, top = ctx.saved_tensors, ctx.top
        if top.sigma == 0.0:  # J = 0: zero is a subgradient
            return None, None, *map(torch.zeros_like, tensors)
        again = torch.is_grad_enabled()
        u, v = _Vectors.apply(ctx.whole, top, *tensors) if again else (top.u, top.v)  # pyright: ignore
        found = ctx.whole.gradients(tensors, [(u, v)], *grad_outputs, create_graph=again)
        return None, None, *found


class _Vectors(_TopFunction):
    """The top singular vectors, as functions of the input and the weights.

    With ``<u, du> = <v, dv> = 0``: ``sigma du - J dv = (dJ) v - u d sigma`` and
    ``sigma dv - J^T du = (dJ)^T u - v d sigma``, a symmetric system. Its solution ``p, q``
    for the cotangents of ``u, v`` gives the cotangent of J: ``p v^T + u q^T``.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        top = args[1]
        return top.u.clone(), top.v.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        top, tensors = ctx.top, ctx.saved_tensors
        op = _operator(ctx.whole.layer, tensors[0].detach(), ctx.whole.memory)
        gu, gv = (_orthogonal_to(g, w) for g, w in zip(grad_outputs, (top.u, top.v), strict=True))
        q = _solve(op, top, top.sigma * gv + op.rmatvec(gu))
        p = (gu + op.matvec(q)) / top.sigma
        found = ctx.whole.gradients(tensors, [(_orthogonal_to(p, top.u), top.v), (top.u, q)])
        return None, None, *found


def _solve(op: Operator, top: TopSingular, target: Tensor) -> Tensor:
    """``(sigma^2 - J^T J)^{-1}`` of a vector, orthogonal to ``v``, by conjugate gradients."""
    target = _orthogonal_to(target, top.v)
    q, left, way = torch.zeros_like(target), target, target
    size = start = float(left.square().sum())
    for _ in range(_SOLVE_STEPS):
        if size <= _SOLVE_TOL.get(target.dtype, 1e-2) ** 2 * start:
            return q
        image = _orthogonal_to(top.sigma**2 * way - op.rmatvec(op.matvec(way)), top.v)
        bent = float((way * image).sum())
        if not bent > 0:  # the second singular value equals the first up to rounding
            break
        q, left = q + (size / bent) * way, left - (size / bent) * image
        before, size = size, float(left.square().sum())
        way = left + (size / before) * way
    raise InputError(
        "A second derivative of sigma should be taken where the top singular value is simple. "
        f"Found that its linear system did not converge at sigma = {top.sigma:.6g}; move away "
        "from this input, or use a smaller `tol` and float64."
    )


def _orthogonal_to(vector: Tensor, unit: Tensor) -> Tensor:
    return vector - (vector * unit).sum() * unit


def _operator(layer: nn.Module | Callable[[Tensor], Tensor], x: Tensor, memory: int) -> Operator:
    x = x.detach()
    if hasattr(layer, "stretch"):
        return linearise(layer, x, memory=memory)
    with _evaluation_mode(layer):
        return linearise(lambda z: _output(layer, z), x)


@contextlib.contextmanager
def _evaluation_mode(layer: nn.Module | Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Switch the layer to evaluation mode temporarily, module by module."""
    parts = layer.modules() if isinstance(layer, nn.Module) else ()
    live = [part for part in parts if part.training]
    try:
        for part in live:
            part.training = False
        yield
    finally:
        for part in live:
            part.training = True


def _output(layer: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x, need_weights=False)[0]
    return layer(x)


def _refuse_hidden(layer: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Refuse plain functions with trainable weights, which would get no gradient."""
    if isinstance(layer, nn.Module) or not torch.is_grad_enabled():
        return
    if layer(x.detach()).requires_grad:
        raise InputError(
            "`layer` should be a module if its weights need gradients. Found a plain "
            "function that uses such weights; pass the module, or detach them."
        )
