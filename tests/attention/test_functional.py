"""`lipscope.attention` against attention written out, and torch's own: values, both derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import scaled_dot_product_attention

import lipscope as ls
from agreement import gaussian
from lipscope.attention import functional

B, H, N, M = 2, 3, 5, 7
SHAPES = ((B, H, N, 2), (B, H, M, 2), (B, H, M, 3))
SEEN = (gaussian(B, 1, N, M) < 0.5) | (torch.arange(M) == 0)
# Name: mask and causal.
CASES: dict[str, tuple[Tensor | None, bool]] = {
    "all": (None, False),
    "causal": (None, True),
    "booleans": (SEEN, False),
    "a row reads nothing": (SEEN & (torch.arange(N) != 2)[:, None], False),
    "booleans, causal": (SEEN[0, 0], True),
    "numbers": (gaussian(N, M), False),
    "numbers by head": (gaussian(H, N, M), True),
    "numbers by sample": (gaussian(B, 1, 1, M), False),
    "numbers by query": (gaussian(B, H, N, 1), False),
}
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Two rows of a head at a time."""
    monkeypatch.setattr(functional, "BLOCK_BYTES", 8 * M * 2)


def eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    s = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    empty = (s == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0) @ v


def both(case: str) -> tuple[list[Tensor], list[Callable[..., Tensor]]]:
    """Inputs, the mask among them where it is of numbers, and the two functions."""
    mask, causal = CASES[case]
    inputs = [gaussian(*shape) for shape in SHAPES]
    if mask is None or mask.dtype == torch.bool:

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ls.attention(q, k, v, mask=mask, causal=causal)

        return inputs, [ours, lambda q, k, v: eager(q, k, v, mask, causal=causal)]

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ls.attention(q, k, v, mask=mask, causal=causal)

    return [*inputs, mask], [masked, lambda *x: eager(*x, causal=causal)]


def same(find: Callable[[Any], Any], functions: list[Any]) -> None:
    """What is found of ours is what is found of attention written out, to rounding."""
    ours, true = (find(f) for f in functions)
    torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


@each_case
def test_value_and_first_derivatives(case: str) -> None:
    x, functions = both(case)
    e, g = [gaussian(*t.shape, seed=1) for t in x], gaussian(B, H, N, 3)
    same(lambda f: f(*x), functions)
    same(lambda f: jvp(f, tuple(x), tuple(e)), functions)
    same(lambda f: vjp(f, *x)[1](g), functions)
    same(lambda f: jvp(lambda k: f(x[0], k, *x[2:]), (x[1],), (e[1],)), functions)

    def dual(f: Any) -> Any:
        with forward_ad.dual_level():
            moved = [forward_ad.make_dual(*pair) for pair in zip(x, e, strict=True)]
            return forward_ad.unpack_dual(f(*moved)).tangent

    same(dual, functions)


@each_case
def test_second_derivatives(case: str) -> None:
    x, functions = both(case)
    e, every = [gaussian(*t.shape, seed=1) for t in x], tuple(range(len(x)))

    def through_a_jvp(f: Any) -> Any:  # as consistency models are trained
        def loss(*z: Tensor) -> Tensor:
            o, do = cast(Any, jvp(f, z[: len(x)], z[len(x) :]))
            return (o + do.square()).sum()

        return grad(loss, tuple(range(2 * len(x))))(*x, *e)

    def slope(f: Any) -> Any:
        return grad(lambda *z: f(*z).pow(3).sum(), every)

    def twice_backward(f: Any) -> Any:
        def along(*z: Tensor) -> Tensor:
            return torch.stack([(a * b).sum() for a, b in zip(slope(f)(*z), e, strict=True)]).sum()

        return grad(along, every)(*x)

    same(through_a_jvp, functions)
    same(lambda f: jvp(slope(f), tuple(x), tuple(e))[1], functions)
    same(twice_backward, functions)


@each_case
def test_torch_s_own_checks_of_gradients(case: str) -> None:
    x, (ours, _) = both(case)
    inputs = [t.requires_grad_() for t in (one.clone() for one in x)]
    gradcheck(ours, inputs, check_forward_ad=True, fast_mode=True)
    gradgradcheck(ours, inputs, check_fwd_over_rev=True, fast_mode=True)


@each_case
def test_the_axis_of_vmap(case: str, monkeypatch) -> None:
    monkeypatch.setattr(functional, "BLOCK_BYTES", 8 * M * N * 40)  # as many as tangents, about
    x, functions = both(case)
    two = [torch.stack([t, 2 * t], 1) for t in x]
    same(lambda f: vmap(f, 1)(*two), functions)
    same(lambda f: vmap(f, (1, *[None] * (len(x) - 1)), 2)(two[0], *x[1:]), functions)
    for i in range(len(x)):  # Jacobians, row by row and column by column
        same(lambda f, i=i: jacrev(f, i)(*x), functions)
        same(lambda f, i=i: jacfwd(f, i)(*x), functions)
    same(lambda f: hessian(lambda q: f(q, *x[1:]).square().sum())(x[0]), functions)
    same(lambda f: hessian(lambda *z: f(*z).square().sum(), len(x) - 1)(*x), functions)

    def by_sample(f: Any) -> Any:
        return vmap(grad(lambda v: f(*x[:2], v, *x[3:]).square().sum()))(two[2].movedim(1, 0))

    same(by_sample, functions)


def test_only_what_wants_a_gradient_gets_one() -> None:
    q, k, v = (gaussian(*shape) for shape in SHAPES)
    mask = gaussian(N, M).requires_grad_()
    (found,) = torch.autograd.grad(ls.attention(q, k, v, mask=mask).sum(), mask, create_graph=True)
    (true,) = torch.autograd.grad(eager(q, k, v, mask).sum(), mask)
    torch.testing.assert_close(found, true)
    assert found.shape == mask.shape
    q.requires_grad_()
    pushed = jvp(lambda v: ls.attention(q, k, v), (v,), (v,))[1]
    pushed.sum().backward()
    assert q.grad is not None and k.grad is None


@pytest.mark.parametrize(
    "shapes",
    [
        ((N, 2), (M, 2), (M, 3)),
        ((4, N, 2), (4, M, 2), (4, M, 3)),
        ((2, 4, N, 2), (2, 2, M, 2), (2, 2, M, 3)),
        ((2, 4, N, 2), (2, 1, M, 2), (2, 1, M, 3)),
        ((2, 4, N, 2), (1, 4, M, 2), (4, M, 3)),
        ((3, 2, 4, 1, 2), (3, 2, 4, M, 2), (3, 2, 4, M, 3)),
        ((2, 4, 0, 2), (2, 4, M, 2), (2, 4, M, 3)),
    ],
)
def test_shapes_are_those_of_torch_s_function(shapes) -> None:
    q, k, v = (gaussian(*shape).float() for shape in shapes)
    for causal in (False, True):
        found = ls.attention(q, k, v, causal=causal, scale=0.3)
        options: Any = {"is_causal": causal, "scale": 0.3, "enable_gqa": q.ndim == 4}
        true = scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(found, true)


def test_rows_that_read_nothing_are_those_of_torch_s_function() -> None:
    mask = SEEN & (torch.arange(N) != 2)[:, None]
    added = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)
    for one in (mask, added):
        results = []
        for function in (ls.attention, scaled_dot_product_attention):
            x = [gaussian(*shape).requires_grad_() for shape in SHAPES]
            name = "mask" if function is ls.attention else "attn_mask"
            o = function(*x, **{name: one})
            results.append((o, *torch.autograd.grad(o.square().sum(), x)))
        torch.testing.assert_close(*results)
        assert not results[0][0][:, :, 2].any() and not results[0][1][:, :, 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype) -> None:
    x = [gaussian(*shape).to(dtype).requires_grad_() for shape in SHAPES]
    exact = [t.detach().double().requires_grad_() for t in x]
    unit = torch.finfo(dtype).eps
    y, true = ls.attention(*x), eager(*exact)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), true, rtol=2 * unit, atol=2e-6)
    slopes = [torch.autograd.grad(one.sum(), at) for one, at in ((y, x), (true, exact))]
    for ours, expected in zip(*slopes, strict=True):
        assert ours.dtype == dtype
        # The scale is a multiple of 1/sqrt 2: one more rounding of queries, in float32.
        torch.testing.assert_close(ours.double(), expected, rtol=2 * unit, atol=5e-6)


def test_autocast_is_that_of_torch_s_function() -> None:
    x = [gaussian(*shape).float().requires_grad_() for shape in SHAPES]
    with torch.autocast("cpu", torch.bfloat16):
        y, true = ls.attention(*x), scaled_dot_product_attention(*x)
        moved = jvp(ls.attention, tuple(t.detach() for t in x), tuple(t.detach() for t in x))[1]
    assert y.dtype == true.dtype == moved.dtype == torch.bfloat16
    torch.testing.assert_close(y, true, rtol=2**-7, atol=2**-7)
    for ours in torch.autograd.grad(y.float().sum(), x):
        assert ours.dtype == torch.float32 and bool(ours.isfinite().all())


@pytest.mark.filterwarnings("default")  # Dynamo's own, of gradients of what is no leaf
def test_compiled_code_calls_it(unchecked) -> None:
    x = [gaussian(*shape).float().requires_grad_() for shape in SHAPES]
    f = torch.compile(lambda q, k, v: ls.attention(q.sin(), k, v).cos(), backend="eager")
    y, true = f(*x), eager(x[0].sin(), *x[1:]).cos()
    torch.testing.assert_close(y, true)
    slopes = (torch.autograd.grad(one.sum(), x) for one in (y, true))
    torch.testing.assert_close(*slopes)
    torch._dynamo.reset()


def test_no_pass_holds_all_scores(monkeypatch) -> None:
    """The largest tensor that any of the passes makes is no larger than a block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    n = 512
    monkeypatch.setattr(functional, "BLOCK_BYTES", 4 * n * 16)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, Tensor):
                    sizes.append(one.numel())
            return out

    x = [gaussian(n, 4).float().requires_grad_() for _ in range(3)]
    with Sizes():
        loss = jvp(lambda *z: ls.attention(*z, causal=True), tuple(x), tuple(x))[1].square().sum()
        slopes = torch.autograd.grad(loss, x)
        again = torch.autograd.grad(ls.attention(*x).pow(2).sum(), x, create_graph=True)
        torch.autograd.grad(sum(s.square().sum() for s in again), x)
    assert all(bool(s.isfinite().all()) for s in slopes)
    assert max(sizes) <= 5 * 16 * n  # what five rooms of a block are


def test_what_it_refuses(unchecked) -> None:
    q, k, v = (gaussian(*shape) for shape in SHAPES)
    third: Any = grad(lambda x: grad(lambda y: jvp(slope, (y,), (y,))[1].sum())(x).sum())

    def slope(q: Tensor) -> Tensor:
        return grad(lambda z: ls.attention(z, k, v).pow(3).sum())(q)

    refused: list[tuple[str, Callable[[], Any]]] = [
        (
            r"shapes \(..., n, k\).* Found \(2, 3, 5, 2\), \(2, 3, 7, 3\)",
            lambda: ls.attention(q, v, v),
        ),
        (
            r"at least one key with at least one entry. Found \(2, 3, 0, 2\)",
            lambda: ls.attention(q, k[..., :0, :], v[..., :0, :]),
        ),
        ("of one dtype. Found float64, float32, float64", lambda: ls.attention(q, k.float(), v)),
        ("of one dtype. Found int64", lambda: ls.attention(*[t.long() for t in (q, k, v)])),
        (
            r"at least one entry. Found \(2, 3, 7, 0\)",
            lambda: ls.attention(q[..., :0], k[..., :0], v),
        ),
        ("`k` should be a tensor. Found `list`", lambda: ls.attention(q, k.tolist(), v)),
        ("`v` should be a tensor. Found `ndarray`", lambda: ls.attention(q, k, v.numpy())),
        ("`mask` should be a tensor", lambda: ls.attention(q, k, v, mask=[[True]])),
        ("finite number. Found `scale = nan`", lambda: ls.attention(q, k, v, scale=math.nan)),
        ("finite number. Found `scale = '1'`", lambda: ls.attention(q, k, v, scale="1")),
        ("should broadcast, or the heads", lambda: ls.attention(q, k[:, :2], v[:, :2])),
        ("should broadcast, or the heads", lambda: ls.attention(q, torch.cat([k, k, k]), v)),
        ("hold booleans or float64. Found int64", lambda: ls.attention(q, k, v, mask=SEEN.long())),
        (
            r"broadcast to \(2, 3, 5, 7\). Found \(7, 5\)",
            lambda: ls.attention(q, k, v, mask=gaussian(M, N)),
        ),
        (
            "a forward-mode derivative in forward mode",
            lambda: jacfwd(jacfwd(ls.attention))(q, k, v),
        ),
        ("a third derivative", lambda: third(q)),
    ]
    for said, ask in refused:
        with pytest.raises(ls.InputError, match=said) as found:
            ask()
        assert "\n" not in str(found.value)
