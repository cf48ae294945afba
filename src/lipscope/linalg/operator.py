"""Linear operators (matrix-free Jacobians), composition, and finite-difference checks.

The solver sees a model only as an `Operator`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipscope.display import Shown
from lipscope.errors import InputError, out_of_memory, shown


def start_named(name: str, *at: Tensor) -> torch.Generator:
    """A generator seeded by a digest of a name and optional tensors.

    Inputs drawn after ``manual_seed(0)`` share their numbers with every other draw from that
    seed, and a start must be independent of the Jacobian.

    >>> torch.randn(1, generator=start_named("a")).equal(torch.randn(1, generator=start_named("b")))
    False
    """
    digest = hashlib.sha256(name.encode())
    for tensor in at:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return torch.Generator().manual_seed(int.from_bytes(digest.digest()[:8], "big") >> 1)


Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Operator(Shown):
    """A linear operator ``J: R^in_shape -> R^out_shape`` given by its two products.

    Args:
        matvec: ``(..., *in_shape) -> (..., *out_shape)``, the product ``J e`` (a JVP).
        rmatvec: ``(..., *out_shape) -> (..., *in_shape)``, the product ``J^T g`` (a VJP).

    >>> import torch
    >>> matrix = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    >>> op = Operator(lambda e: e @ matrix.T, lambda g: g @ matrix, (3,), (2,))
    >>> op.T.in_shape
    (2,)
    """

    matvec: Product
    rmatvec: Product
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    @property
    def T(self) -> Operator:
        """The transpose: the same two products, swapped."""
        return Operator(
            self.rmatvec, self.matvec, self.out_shape, self.in_shape, self.dtype, self.device
        )

    @property
    def in_size(self) -> int:
        """Dimension of the input space."""
        return math.prod(self.in_shape)


_REJOINED = 0.5  # rejoin the remaining operators once their share falls to this


@dataclass(frozen=True, repr=False)
class Together(Operator):
    """Operators of one shape with joint products along a leading axis; see `together`.

    Attributes:
        left: Indices of the operators still in use.
    """

    left: set[int] = field(default_factory=set)


Join = Callable[[Sequence[int]], Operator | None]


def together(join: Join, parts: Sequence[Operator]) -> Together | None:
    """Operators with joint products, which can be dropped as their solves end.

    None if they cannot be joined. Products of dropped operators are undefined; the last
    remaining operator is used alone.

    Args:
        join: The joint operator of the given indices, one per entry of a leading axis.
        parts: The operators.
    """
    left, now = set(range(len(parts))), list(range(len(parts)))
    if (joint := join(now)) is None:
        return None
    shapes, kind = (joint.in_shape, joint.out_shape), (joint.dtype, joint.device)

    def current_product(name: str, e: Tensor) -> Tensor:
        """Products of the remaining operators, and possibly of some dropped ones."""
        nonlocal joint, now
        if len(left) == 1:
            now = [*left]
            return getattr(parts[now[0]], name)(e[now[0]])[None]
        if len(left) <= _REJOINED * len(now):
            now = sorted(left)
            joint = join(now)
            assert joint is not None
        return getattr(joint, name)(e if len(now) == len(parts) else e[now])

    def product(name: str, e: Tensor) -> Tensor:
        if not left:
            return e.new_zeros(len(parts), *(shapes[1] if name == "matvec" else shapes[0]))
        part = current_product(name, e)
        if len(now) == len(parts):
            return part
        found = part.new_zeros(len(parts), *part.shape[1:])
        found[now] = part
        return found

    matvec, rmatvec = (functools.partial(product, name) for name in ("matvec", "rmatvec"))
    return Together(matvec, rmatvec, *shapes, *kind, left)


def over_leading(product: Product, event_dims: int) -> Product:
    """Extend a product of one tensor with ``event_dims`` axes to leading batch axes."""

    def batched(e: Tensor) -> Tensor:
        if e.ndim == event_dims:
            return product(e)
        return torch.stack([batched(one) for one in e])

    return batched


def linearise(f: Callable[[Tensor], Tensor], x: Tensor, **options: object) -> Operator:
    """The Jacobian of ``f`` at ``x`` as an `Operator`: linearise once, apply many times.

    A map with a method ``linearise(x, **options)`` (every `Attention`) provides a closed
    form. Any other differentiable function of a tensor uses reverse-mode automatic
    differentiation: ``J^T g`` is a pullback, and ``J e`` is the pullback of the linear map
    ``g -> J^T g``. Forward mode is avoided on purpose: fused attention does not support it,
    and custom operators return zeros for it.

    Holds for deterministic functions; live dropout raises an error.

    Args:
        f: Map from a tensor like ``x`` to a tensor.
        **options: Passed on to ``f.linearise`` if it exists.

    Raises:
        InputError: If two evaluations of ``f(x)`` differ, ``f(x)`` is not a tensor, or
            gradients are cut inside or not implemented.

    >>> import torch
    >>> op = linearise(lambda x: x * x, torch.tensor([1.0, 3.0]))
    >>> op.matvec(torch.tensor([1.0, 1.0]))
    tensor([2., 6.])
    """
    check_map(f, x)
    with in_one_line("`f` should run on `x`. Found that it"):
        own = getattr(f, "linearise", None)
        if own is not None:
            return own(x, **options)
        tape = Tape(f, x)
    y = tape.y
    _check_deterministic(f, tape.point, y)
    products = over_leading(tape.matvec, x.ndim), over_leading(tape.rmatvec, y.ndim)
    op = Operator(*products, tuple(x.shape), tuple(y.shape), y.dtype, y.device)
    size = y.detach().norm() / tape.point.detach().norm()
    with derivatives():
        check_adjoint(op, 1e3 * torch.finfo(y.dtype).eps * float(size) if size.isfinite() else 0.0)
    if not op.matvec(_random_direction(x)).any():
        _check_uncut(f, tape)
    return op


def check_map(f: object, x: object) -> None:
    """Require a callable ``f`` and a nonempty floating-point tensor ``x``."""
    if not callable(f):
        raise InputError(
            f"The map should be a function or a module. Found `{shown(f)}`; a layer of a "
            'model is `lipscope.load_model("minilm").at(text)`, which has `sigma`.'
        )
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.numel()):
        found = f"{x.dtype}, {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"`x` should be a tensor of some real numbers. Found `{found}`.")


def no_operator(op: object) -> InputError:
    """The error for a non-operator argument."""
    return InputError(
        "`op` should be an `Operator`, as returned by `lipscope.linearise(layer, x)`. Found "
        f"`{type(op).__name__}`."
    )


def _random_direction(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=start_named("a direction of change")).to(x)


def _check_uncut(f: Callable[[Tensor], Tensor], tape: Tape) -> None:
    """Refuse a function that changes with its input although autograd gives zero."""
    x, y = tape.point.detach(), tape.y.detach()
    step = 1e-3 * x.square().mean().sqrt().clamp_min(1e-3)
    with torch.no_grad():
        change = (f(x + step * _random_direction(x)) - y).abs().max()
    if change > 1e3 * torch.finfo(y.dtype).eps * y.abs().max():
        raise InputError(
            "`f` should be differentiable. Found that its output changes with its input while "
            "automatic differentiation gives zero: `no_grad`, `inference_mode`, `detach` or a "
            "custom backward inside cuts the gradient."
        )


@contextlib.contextmanager
def in_one_line(words: str) -> Iterator[None]:
    """Turn torch errors into a one-line `InputError` that starts with ``words``."""
    try:
        yield
    except (RuntimeError, AssertionError) as problem:
        if out_of_memory(problem):
            raise
        raise InputError(f"{words} raised {type(problem).__name__}: {problem}") from problem


def derivatives() -> contextlib.AbstractContextManager[None]:
    """`in_one_line` for first backward passes."""
    return in_one_line(
        "The map should be differentiable twice by `torch.autograd.grad`. Found that its "
        "backward pass"
    )


class Tape:
    """``y = f(x)`` and its pullback, recorded once: reverse-mode Jacobian products.

    Products are zero if the graph shows that ``y`` is constant.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.point = x.detach().clone().requires_grad_(True)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            self.y = f(self.point)
            if not isinstance(self.y, Tensor) or not self.y.is_floating_point():
                found = self.y.dtype if isinstance(self.y, Tensor) else type(self.y).__name__
                raise InputError(
                    f"`f(x)` should be one tensor of real numbers. Found `{found}`; "
                    "wrap `f` so that it returns the output to be measured."
                )
            self.weight = torch.zeros_like(self.y, requires_grad=True)
            self.pulled = torch.zeros_like(self.point)
            if self.y.requires_grad:
                with derivatives():
                    self.pulled = _pulled(self.y, self.point, self.weight, graph=True)

    def matvec(self, e: Tensor) -> Tensor:
        """``J e``: the pullback is linear in its weight, so its own pullback is J."""
        constant = not self.pulled.requires_grad
        return torch.zeros_like(self.y) if constant else _pulled(self.pulled, self.weight, e)

    def rmatvec(self, g: Tensor) -> Tensor:
        """``J^T g``."""
        constant = not self.pulled.requires_grad
        return torch.zeros_like(self.point) if constant else _pulled(self.y, self.point, g)


def stretch(y: Tensor, x: Tensor, g: Tensor, e: Tensor) -> Tensor:
    """``<g, J e>`` for ``y = f(x)`` with its graph, differentiable in all arguments."""
    return (_pulled(y, x, g, graph=True) * e).sum()


def _pulled(y: Tensor, x: Tensor, g: Tensor, *, graph: bool = False) -> Tensor:
    (out,) = torch.autograd.grad(
        y, x, g, retain_graph=True, create_graph=graph, materialize_grads=True
    )
    return out


def _check_deterministic(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Refuse a function whose second evaluation differs."""
    with torch.no_grad():
        again = f(x.detach())
    same = torch.allclose(again, y, rtol=1e-4, atol=0.0, equal_nan=True)
    if not same and not (again - y).abs().max() <= 1e-4 * y.abs().max():
        raise InputError(
            "`f` should give the same output twice. Found two different outputs for one "
            "input; switch dropout off, for example with `.eval()`."
        )


def check_adjoint(op: Operator, rounding: float = 0.0) -> None:
    """Refuse an operator whose products are not transposes of each other.

    Checks ``<J e, g> = <e, J^T g>`` on one fixed pair of vectors. It catches layers whose
    forward and backward passes belong to different functions, and errors in torch itself: in
    2.13 `nn.BatchNorm2d` in eval mode has a wrong gradient on the CPU if a single sample's output
    is used in channels-last layout (RT-DETR). ``rounding`` is the tolerance for products with
    unit vectors where the Jacobian is zero.
    """
    gen = start_named("the adjoint")
    e = torch.randn(op.in_shape, generator=gen).to(op.device, op.dtype)
    g = torch.randn(op.out_shape, generator=gen).to(op.device, op.dtype)
    je, jg = op.matvec(e), op.rmatvec(g)
    left, right = (je * g).sum(), (e * jg).sum()
    scale = je.norm() * g.norm() + e.norm() * jg.norm()
    allowed = 1e-3 * scale + rounding * e.norm() * g.norm()
    if scale.isfinite() and (left - right).abs() > allowed:
        raise InputError(
            "The forward and backward products of this map should be transposes of each "
            f"other. Found <Je, g> = {left:.6g} and <e, J^T g> = {right:.6g}: a derivative "
            "from torch or a custom autograd function inside is wrong, or the scores are so large "
            "that rounding shows."
        )


def compose(outer: Operator, inner: Operator) -> Operator:
    """The Jacobian of ``outer ∘ inner`` (the chain rule)."""
    return replace(
        outer,
        matvec=lambda e: outer.matvec(inner.matvec(e)),
        rmatvec=lambda g: inner.rmatvec(outer.rmatvec(g)),
        in_shape=inner.in_shape,
    )


def plus_identity(op: Operator) -> Operator:
    """The Jacobian of a residual map ``x + f(x)``."""
    return replace(op, matvec=lambda e: e + op.matvec(e), rmatvec=lambda g: g + op.rmatvec(g))


def restrict(
    op: Operator,
    *,
    move: Tensor | None = None,
    read: Tensor | None = None,
    scale: Tensor | None = None,
) -> Operator:
    """``J`` restricted to some tokens: ``R J D M``, for an operator on token matrices.

    ``M`` embeds the moving tokens, ``D = diag(scale)`` rescales each token's move, and ``R``
    selects output tokens. The result acts on the smaller spaces, so that a random start is
    uniform on the sphere of allowed moves.

    Args:
        move: Indices of the tokens that may move, ``(m,)``, or ``(b, m)`` with one set per
            entry of a leading batch axis; None for all.
        read: Indices of the output tokens that are read, ``(m,)``, or None for all.
        scale: Factor per input token, ``(n,)``, or ``(b, n)`` likewise, or None for 1.
    """
    if move is None and read is None and scale is None:
        return op
    n, n_out = op.in_shape[-2], op.out_shape[-2]
    factor = None if scale is None else scale[..., None].to(op.device, op.dtype)

    def matvec(e: Tensor) -> Tensor:
        if move is not None:
            e = _embed(e, move, n)
        y = op.matvec(e if factor is None else e * factor)
        return y if read is None else _pick(y, read)

    def rmatvec(g: Tensor) -> Tensor:
        if read is not None:
            g = _embed(g, read, n_out)
        x = op.rmatvec(g)
        x = x if factor is None else x * factor
        return x if move is None else _pick(x, move)

    def shrink(shape: tuple[int, ...], index: Tensor | None) -> tuple[int, ...]:
        return shape if index is None else (*shape[:-2], index.shape[-1], shape[-1])

    return Operator(
        matvec, rmatvec, shrink(op.in_shape, move), shrink(op.out_shape, read), op.dtype, op.device
    )


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` of token matrices."""
    if index.ndim == 1:
        return x.index_select(-2, index)
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def _embed(x: Tensor, index: Tensor, n: int) -> Tensor:
    """The transpose of `_pick`: rows ``index`` of zero matrices with ``n`` rows."""
    out = x.new_zeros(*x.shape[:-2], n, x.shape[-1])
    if index.ndim == 1:
        return out.index_copy_(-2, index, x)
    return out.scatter_(-2, index[..., None].expand_as(x), x)


def to_dense(op: Operator) -> Tensor:
    """The dense matrix of ``op``, shape ``(prod(out_shape), prod(in_shape))``.

    Costs one product per input dimension: for tests and very small layers.

    >>> import torch
    >>> to_dense(linearise(lambda x: x**2, torch.tensor([1.0, 2.0])))
    tensor([[2., 0.],
            [0., 4.]])
    """
    if not isinstance(op, Operator):
        raise no_operator(op)
    try:
        eye = torch.eye(op.in_size, dtype=op.dtype, device=op.device)
        columns = op.matvec(eye.reshape(op.in_size, *op.in_shape))
        return columns.reshape(op.in_size, -1).T.contiguous()
    except (RuntimeError, MemoryError) as problem:
        if not out_of_memory(problem):
            raise
        raise InputError(
            f"`op` should be small enough for a matrix. Found {math.prod(op.out_shape):,} rows and "
            f"{op.in_size:,} columns, which exceed the memory; use its products."
        ) from problem


# --- comparison with finite differences

# Step sizes in multiples of the cube root of the rounding unit, which balances rounding and
# curvature: smaller steps for curved functions, larger ones for noisy ones.
_SIZES = (1 / 8, 1 / 64, 2.0, 1 / 512)
# Largest difference explained by rounding and curvature at a bad step; wrong maps exceed it.
_LIMITS = {torch.float32: 1e-2, torch.float64: 1e-4}
_ROUNDING = 8  # rounding error of a difference, in units of the output norm times eps
_GOOD = 0.1  # share of the limit below which no other step is steps


@dataclass(frozen=True)
class Difference:
    """Comparison of a Jacobian product with a finite difference."""

    # ``‖D - J e‖ / max(‖D‖, ‖J e‖)`` for the difference ``D`` at the best step; 0 if both are zero
    error: float
    product: float  # ``‖J e‖``
    quotient: float  # ``‖D‖`` at that step
    # ``agrees``; ``disagrees``: two differences agree with each other but not with the product;
    # ``unsettled``: no differences agree, or rounding explains the distance from the product
    status: str
    # ``‖D+‖`` and ``‖D-‖``, the one-sided quotients, if they disagree consistently at two steps:
    # the function is not differentiable there
    sides: tuple[float, float] | None = None


def difference(f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, product: Tensor) -> Difference:
    """Compare ``J e`` with ``(f(x + t e) - f(x - t e)) / 2t``.

    The step ``t`` moves no token by more than a small part of its own norm (zero tokens: of the
    mean norm). If that is inconclusive, ``t`` is chosen to move the output by a small part of
    its norm, according to ``J e``: a norm layer resolves zero tokens only within its epsilon.
    Two evaluations, unless they disagree.

    >>> x = torch.eye(2, dtype=torch.float64)
    >>> difference(lambda x: x**2, x, x, 2 * x).status, difference(lambda x: x**2, x, x, x).status
    ('agrees', 'disagrees')
    >>> difference(torch.abs, 0 * x, x, x).sides is None  # slope 1 ahead, -1 behind
    False
    """
    product, e = product.double(), e.to(x)
    norms = torch.linalg.vector_norm(x, dim=-1)
    norms = torch.where(norms > 0, norms, norms.square().mean().sqrt())
    whole = float((norms / torch.linalg.vector_norm(e, dim=-1)).min()) or 1.0
    found = _compare_steps(whole, f, x, e, product)
    if found.status != "unsettled":
        return found
    closer = float(f(x).detach().double().norm()) / found.product if found.product else whole
    again = _compare_steps(closer, f, x, e, product) if closer < whole else found
    # Rounding may swallow such a small step, so it cannot refute the product.
    return again if again.status == "agrees" else found


def _compare_steps(
    whole: float, f: Callable[[Tensor], Tensor], x: Tensor, e: Tensor, product: Tensor
) -> Difference:
    """Compare at steps that are small relative to ``whole``."""
    limit = _LIMITS[x.dtype]
    base = torch.finfo(x.dtype).eps ** (1 / 3) * whole
    best: Difference | None = None
    steps: list[_Step] = []
    for size in _SIZES:
        step = e * (base * size)
        ahead, behind = (f(x + sign * step).detach().double() for sign in (1, -1))
        now = _Step(ahead, behind, base * size)
        error = _relative_distance(now.quotient, product)
        if best is None or error < best.error:
            best = Difference(error, float(product.norm()), float(now.quotient.norm()), "unsettled")
        if error <= _GOOD * limit:
            break
        if float((now.quotient - product).norm()) <= now.rounding(torch.finfo(x.dtype).eps):
            break  # rounding dominates smaller steps
        alike = (one for one in steps if _relative_distance(now.quotient, one.quotient) <= limit)
        if best.error > limit and (other := next(alike, None)):
            sides = _sides(f(x).detach().double(), now, other, limit)
            quotient = float(now.quotient.norm())
            return Difference(best.error, best.product, quotient, "disagrees", sides)
        steps.append(now)
    assert best is not None
    return replace(best, status="agrees") if best.error <= limit else best


@dataclass(frozen=True)
class _Step:
    """Values of a function one step ahead and one step behind."""

    ahead: Tensor
    behind: Tensor
    step: float

    @property
    def quotient(self) -> Tensor:
        return (self.ahead - self.behind) / (2 * self.step)

    def rounding(self, unit: float) -> float:
        """The largest contribution of output rounding to the quotient."""
        size = max(float(self.ahead.norm()), float(self.behind.norm()))
        return _ROUNDING * unit * size / (2 * self.step)


def _sides(here: Tensor, now: _Step, other: _Step, limit: float) -> tuple[float, float] | None:
    """One-sided quotients at a kink, whose jump is the same at two step sizes.

    A jump from curvature would shrink in proportion to the step.
    """
    jumps = [(one.ahead + one.behind - 2 * here) / one.step for one in (now, other)]
    sides = [float((end - here).norm()) / now.step for end in (now.ahead, now.behind)]
    kinked = float(jumps[0].norm()) > limit * max(sides) and _relative_distance(*jumps) < 0.5
    return (sides[0], sides[1]) if kinked else None


def _relative_distance(a: Tensor, b: Tensor) -> float:
    largest = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / largest if largest > 0 else 0.0
