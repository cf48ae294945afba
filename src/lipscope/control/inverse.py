"""The inverse of ``x + g(x)``, to a stated error, with the derivative of an inverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import transformed
from lipscope.control.contraction import Contraction
from lipscope.control.determinant import LogDeterminant, log_determinant
from lipscope.display import Shown
from lipscope.errors import InputError, check_count, check_positive

_KEPT = 5  # differences that Anderson's step is made of
_UNITS = 8  # of rounding in a residual, relative to its tokens
_BACKWARD = (
    "`inverse` should be differentiated once, by `backward` or `torch.autograd.grad`. Found {}."
)


@dataclass(frozen=True, repr=False)
class Inverse(Shown):
    """A solution ``X`` of ``X + g(X) = Y``, and how good it is.

    Attributes:
        x: ``X``.
        steps: How often ``g`` was evaluated.
        error: A bound of ``‖X - X*‖_F`` of every sample, ``X*`` the exact solution.
    """

    x: Float[Tensor, "*b n d"]
    steps: int
    error: Float[Tensor, "*b"]


class InvertibleResidual(nn.Module):
    """``X ↦ X + g(X)`` for a contraction ``g``: one-to-one, with an inverse and a determinant.

    Args:
        g: A `Contraction`.

    Raises:
        InputError: If ``g`` is not certified to contract.

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
        """``X + g(X)``."""
        return x + self.g(x)

    def inverse(
        self, y: Float[Tensor, "*b n d"], *, tol: float | None = None, max_steps: int = 1000
    ) -> Inverse:
        """The ``X`` with ``X + g(X) = Y``, differentiable once, in ``Y`` and in the weights.

        ``‖X - X*‖_F ≤ c ‖Z + g(Z) - Y‖_F / (1 - c)`` for ``X = Y - g(Z)``, the last step, is the
        error that is returned, but never less than what rounding allows,
        ``8 ε max(‖Y‖_F, ‖Z‖_F) / (1 - c)``. Gradients are those of the inverse function: one
        more equation of this kind, no steps are recorded. All is in the dtype of ``Y``, under
        autocast too.

        Args:
            y: Samples, solved together.
            tol: Of the error of a sample, relative to ``max(‖Y‖_F, ‖Z‖_F)``; what rounding
                allows if None.
            max_steps: Evaluations of ``g`` at most.

        Raises:
            InputError: If the tolerance is not reached, or a second derivative or one in
                forward mode is asked for.
        """
        self.g.check("y", y)
        check_count("max_steps", max_steps)
        if transformed():
            raise InputError(_BACKWARD.format("forward mode or a transform of `torch.func`"))
        if not bool(y.isfinite().all()):
            raise InputError("`y` should hold finite numbers. Found others.")
        slack, units = 1 - self.g.c, _UNITS * torch.finfo(y.dtype).eps
        least = units / slack
        tol = least if tol is None else tol
        check_positive("tol", tol)

        def answer(h: Callable[[Tensor], Tensor], right: Tensor) -> Inverse:
            found = solve(h, right, c=self.g.c, tol=tol * slack, max_steps=max_steps)
            size = _size(right.flatten(-2), found.x.flatten(-2))
            error = torch.maximum(self.g.c * found.error / slack, least * size)
            if not bool((error <= tol * size).all()):
                raise InputError(
                    f"`tol` should be what {str(y.dtype)[6:]} can reach in `max_steps` steps. "
                    f"Found errors to {float((error / size).max()):.1g} with "
                    f"`tol = {tol:.1g}`, `max_steps = {max_steps}`."
                )
            return Inverse(found.x, found.steps + 1, error)

        # The last step has the derivative of the equation's own right side where it is recorded;
        # what is sent back is multiplied by (1 + J)^-T first.
        with torch.autocast(y.device.type, enabled=False):
            with torch.no_grad():
                found = answer(self.g, y.detach())
            x = y - self.g(found.x)
            if x.requires_grad:
                at = found.x.detach().requires_grad_()
                with torch.enable_grad():
                    there = self.g(at)

                def pull(w: Tensor) -> Tensor:
                    return torch.autograd.grad(there, at, w, retain_graph=True)[0]

                def back(grad: Tensor) -> Tensor:
                    if torch.is_grad_enabled():  # what is solved here would be held fixed
                        raise InputError(_BACKWARD.format("`create_graph`"))
                    return answer(pull, grad).x

                x.register_hook(back)
        return Inverse(x, found.steps, found.error)

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

    Mixed iterates are taken where they bring the residual down by more than ``c``, and a plain step
    is taken otherwise: a contraction's residual falls by at least ``c`` in two evaluations.

    Holds for contractions. For another ``g`` it may diverge, which its ``error`` says.

    Args:
        g: The function.
        y: Right sides.
        c: Its constant.
        tol: Of the residual of a sample, relative to ``max(‖Y‖_F, ‖X‖_F)``.
        max_steps: Evaluations at most.
        accelerate: Whether iterates are mixed.

    Returns:
        The best iterate of every sample; ``error`` is the norm of its residual.

    Source: [walker2011] for the mixing.
    """
    flat, shape = y.flatten(-2), y.shape
    best, best_gap = flat, torch.full_like(_size(flat, flat), torch.inf)
    x, plain = flat, torch.ones_like(best_gap, dtype=torch.bool)
    points: list[Tensor] = []
    moves: list[Tensor] = []
    move, steps = torch.zeros_like(flat), 0
    while steps < max_steps:
        steps += 1
        to = flat - g(x.view(shape)).flatten(-2)
        gap = (to - x).norm(dim=-1)
        # A mixed iterate must do what a plain one is sure to do; a plain one is always taken.
        taken = plain | (gap <= c * best_gap)
        nearer = gap < best_gap
        move = torch.where(nearer[..., None], to - x, move)
        best, best_gap = torch.where(nearer[..., None], x, best), torch.minimum(gap, best_gap)
        if bool((best_gap <= tol * _size(flat, best)).all()):
            break
        points, moves = [*points[-_KEPT:], x], [*moves[-_KEPT:], to - x]
        step = best + move
        plain = ~taken | (not accelerate) | (len(points) == 1)
        x = torch.where(plain[..., None], step, _mixed(points, moves))
    return Inverse(best.view(shape), steps, best_gap)


def _size(y: Tensor, x: Tensor) -> Tensor:
    return torch.maximum(y.norm(dim=-1), x.norm(dim=-1))


def _mixed(points: list[Tensor], moves: list[Tensor]) -> Tensor:
    """The plain step from the combination of the points whose move is the smallest."""
    last, move = points[-1], moves[-1]
    if len(points) == 1:
        return last + move
    across = torch.stack([move - m for m in moves[:-1]], -1)
    along = torch.stack([last - p for p in points[:-1]], -1)
    size = across.norm(dim=(-2, -1), keepdim=True)
    across, along = (t / torch.where(size > 0, size, 1.0) for t in (across, along))
    gram = across.mT @ across
    ridge = 10 * torch.finfo(gram.dtype).eps * torch.eye(gram.shape[-1]).to(gram)
    wide = torch.promote_types(gram.dtype, torch.float32)  # none is solved in half precision
    right = across.mT @ move[..., None]
    weights = torch.linalg.solve((gram + ridge).to(wide), right.to(wide)).to(gram.dtype)
    mixed = last + move - ((along + across) @ weights)[..., 0]
    return torch.where(mixed.isfinite(), mixed, last + move)
