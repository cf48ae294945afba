"""Operators: adjoint identity, chain rule, restriction, refusal of what is not one map."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from lipscope import Operator, linearise, to_dense
from lipscope.errors import InputError
from lipscope.linalg.operator import check_adjoint, compose, plus_identity, restrict


def dense(matrix: torch.Tensor) -> Operator:
    m, n = matrix.shape
    return Operator(lambda e: e @ matrix.T, lambda g: g @ matrix, (n,), (m,), dtype=matrix.dtype)


def token_operator(n: int, d: int, d_out: int) -> tuple[Operator, torch.Tensor]:
    matrix = torch.randn(n * d_out, n * d, dtype=torch.float64)
    op = Operator(
        lambda e: (e.flatten(-2) @ matrix.T).unflatten(-1, (n, d_out)),
        lambda g: (g.flatten(-2) @ matrix).unflatten(-1, (n, d)),
        (n, d),
        (n, d_out),
        dtype=torch.float64,
    )
    return op, matrix.reshape(n, d_out, n, d)


def test_autograd_operator_is_the_dense_jacobian():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    op = linearise(net, x)
    jacobian = torch.autograd.functional.jacobian(net, x)
    assert isinstance(jacobian, torch.Tensor)
    jacobian = jacobian.reshape(12, 20)
    assert torch.allclose(to_dense(op), jacobian, atol=1e-13)
    assert torch.allclose(to_dense(op.T), jacobian.T, atol=1e-13)


def test_a_matrix_that_does_not_fit_the_memory_is_refused_in_one_line():
    wide = Operator(lambda e: e, lambda g: g, (10**8,), (10**8,), torch.float64)
    with pytest.raises(InputError, match="100,000,000 columns, which exceed the memory"):
        to_dense(wide)


def test_leading_axes_are_free():
    x = torch.randn(3, 2)
    op = linearise(lambda x: torch.sin(x) @ torch.ones(2, 4), x)
    e = torch.randn(2, 5, 3, 2)
    assert op.matvec(e).shape == (2, 5, 3, 4)
    assert torch.allclose(op.matvec(e)[1, 2], op.matvec(e[1, 2]))


@pytest.mark.parametrize(
    "constant",
    [
        lambda x: torch.ones(3),
        lambda x: (0 * x).detach() + 1,
        lambda x: x * 0,
        lambda x: torch.zeros(3, requires_grad=True) * 2,
    ],
)
def test_a_constant_function_has_the_zero_jacobian(constant):
    assert not to_dense(linearise(constant, torch.ones(3))).any()


def test_live_dropout_is_refused():
    drop = nn.Dropout(0.5)
    with pytest.raises(InputError, match="same output twice"):
        linearise(drop, torch.ones(50))
    assert to_dense(linearise(drop.eval(), torch.ones(2))).equal(torch.eye(2))


def test_a_function_without_tensor_output_is_refused():
    with pytest.raises(InputError, match="one tensor"):
        linearise(lambda x: (x, x), torch.ones(2))  # pyright: ignore[reportArgumentType]


def test_products_that_are_not_transposes_are_refused():
    op = dense(torch.randn(4, 4))
    broken = Operator(op.matvec, lambda g: 2 * op.rmatvec(g), (4,), (4,))
    with pytest.raises(InputError, match="transposes"):
        check_adjoint(broken)


def test_a_gradient_that_torch_gets_wrong_is_refused_or_right():
    """In eval mode, of one sample whose output is read with channels last (torch 2.13, CPU)."""
    norm = nn.BatchNorm2d(16).eval().double()
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 16, 2, 2, dtype=torch.float64)
    try:
        found = to_dense(linearise(lambda x: norm(x).flatten(2).transpose(1, 2).tanh(), x))
    except InputError as error:
        assert "transposes" in str(error)  # noqa: PT017  (either answer is good)
    else:
        slope = (1 - norm(x).tanh().square()) * norm.weight.view(1, -1, 1, 1)
        values = torch.linalg.svdvals(found.reshape(64, 64))
        expected = slope.abs().flatten().sort(descending=True).values / math.sqrt(1 + norm.eps)
        assert torch.allclose(values, expected)


class DetachedSoftmax(torch.autograd.Function):
    """Saves a probability that is not differentiable: its second derivatives are wrong."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        (s,) = args
        p = s.softmax(-1)
        ctx.save_for_backward(p.detach())
        return p

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (p,) = ctx.saved_tensors
        (g,) = grad_outputs
        return p * (g - (p * g).sum(-1, keepdim=True))


def test_an_autograd_function_with_wrong_second_derivatives_still_gives_its_jacobian():
    """Our JVP differentiates the pullback along its cotangent only, which stays right."""
    x = torch.randn(6, dtype=torch.float64)
    ours = to_dense(linearise(DetachedSoftmax.apply, x))  # pyright: ignore[reportArgumentType]
    p = x.softmax(-1)
    assert torch.allclose(ours, torch.diag(p) - torch.outer(p, p), atol=1e-14)


def test_fused_attention_has_both_products():
    """Forward mode through fused attention raises; ours needs reverse mode only."""
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, q, q)

    plain = torch.autograd.functional.jacobian(lambda x: torch.softmax(x @ q.mT / 2, -1) @ q, q)
    assert isinstance(plain, torch.Tensor)
    assert torch.allclose(to_dense(linearise(attend, q)), plain.reshape(40, 40), atol=1e-13)


def test_chain_rule_and_residual():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.allclose(to_dense(compose(dense(a), dense(b))), a @ b, atol=1e-6)
    square = torch.randn(4, 4)
    assert torch.allclose(to_dense(plus_identity(dense(square))), torch.eye(4) + square)


def test_restriction_is_the_sub_matrix():
    torch.manual_seed(1)
    op, blocks = token_operator(4, 3, 2)
    move, read = torch.tensor([0, 3]), torch.tensor([2])
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    part = restrict(op, move=move, read=read, scale=scale)
    expected = (blocks * scale[None, None, :, None])[read][:, :, move].reshape(2, 6)
    assert torch.allclose(to_dense(part), expected, atol=1e-14)
    assert torch.allclose(to_dense(part.T), expected.T, atol=1e-14)
    assert (part.in_shape, part.out_shape) == ((2, 3), (1, 2))


def test_restriction_with_one_set_of_tokens_per_batch_entry():
    op, _ = token_operator(4, 3, 2)
    sets = torch.tensor([[0, 1], [1, 3]])
    both = restrict(op, move=sets)
    e, g = torch.randn(2, 2, 3, dtype=torch.float64), torch.randn(2, 4, 2, dtype=torch.float64)
    for i, chosen in enumerate(sets):
        one = restrict(op, move=chosen)
        assert torch.allclose(both.matvec(e)[i], one.matvec(e[i]))
        assert torch.allclose(both.rmatvec(g)[i], one.rmatvec(g[i]))
