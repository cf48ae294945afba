"""The map ``residual``: which sum of its input and output an attention layer is part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg.operator import Operator, compose, linearise, plus_identity
from lipscope.models.tracing.calls import Trace, as_tokens
from lipscope.models.tracing.itself import (
    Ends,
    ends_of_attention,
    from_norm,
    plus_input,
    to_norm,
)
from lipscope.models.tracing.replay import ClosedForm, Replayed, TokenModule
from lipscope.models.tracing.sites import AttentionCall
from lipscope.models.tracing.sums import NormCall, Sum, close


@dataclass(frozen=True)
class Norms:
    """Norms of a residual map ``x -> N_o(x + N_s(f(N_b(x))))``, None where there is none.

    Attributes:
        before: ``N_b``, in front of the attention.
        second: ``N_s``, which takes the attention's own output.
        outer: ``N_o``, which takes the sum.
    """

    before: nn.Module | None = None
    second: nn.Module | None = None
    outer: nn.Module | None = None


# Input, the model's own output, the function, how to linearise it, where it is, and its norms.
Parts = tuple[
    Tensor,
    Tensor,
    Callable[[Tensor], Tensor],
    Callable[[Tensor, int, bool], Operator],
    Ends,
    Norms,
]


def norm_before(record: Trace, call: AttentionCall) -> NormCall | None:
    """The norm whose output is the layer's input: the same place, with the same values."""
    place = call.kept[0].data_ptr()
    found = [n for n in record.norms if n.y_place == place and n.y.numel() == call.x.numel()]
    same = (n for n in found if close(as_tokens(n.y, call.token_axis), call.x))
    return next(same, None)


def _norm_after(record: Trace, call: AttentionCall) -> NormCall | None:
    """The norm that takes the attention's own output, before any sum."""
    place = call.kept[-1].data_ptr()
    found = [n for n in record.norms if n.x_place == place and n.x.numel() == call.output.numel()]
    same = (n for n in found if close(as_tokens(n.x, call.token_axis), call.output))
    return next(same, None)


def residual(
    record: Trace, call: AttentionCall, norm: NormCall | None, core: ClosedForm | Replayed
) -> Parts:
    """``x + f(N(x))`` (pre-norm) or ``N(u + f(u))`` (post-norm), with further norms.

    Which of them the model computes is read off the trace. Its sum is one that the model
    formed; it is the stream if the model adds to it again, and enters the stream through
    its norm if the norm alone took it.

    Args:
        record: A trace with norms.
        call: The attention call.
        norm: The norm that feeds it, or None.
        core: Its attention.

    Returns:
        The map's input and output, the function, its linearisation, its ends and its norms.

    Raises:
        InputError: If the model forms no such sum.
    """
    after = _norm_after(record, call)
    added = call.output if after is None else as_tokens(after.y, call.token_axis)
    second = TokenModule(after.module, after.x) if after is not None else None
    own = None if after is None else after.module
    ends = ends_of_attention(record, call)
    ends = plus_input(ends if after is None else to_norm(after, ends))

    def branch(u: Tensor) -> Tensor:
        return core.attend(u) if second is None else second(core.attend(u))

    def branch_operator(u: Tensor, memory: int, per_head: bool) -> Operator:
        op = core.linearise_attention(u, memory, per_head)
        return op if second is None else compose(linearise(second, core.attend(u)), op)

    if norm is not None:
        x = as_tokens(norm.x, call.token_axis)
        total = _sum_of(record, call, x, added)
        if total is not None:
            before = TokenModule(norm.module, norm.x)
            return (
                x,
                as_tokens(total.value, call.token_axis),
                lambda x: x + branch(before(x)),
                lambda x, m, h: plus_identity(
                    compose(branch_operator(before(x), m, h), linearise(before, x))
                ),
                from_norm(record, norm, ends),
                Norms(norm.module, own),
            )
    total = _sum_of(record, call, call.x, added)
    if total is None:
        raise InputError(
            f"The map `residual` needs a sum of the layer's input and output from which the model "
            f"goes on. Found none after `{call.name}`; use the map `block`."
        )
    if total.norm is None or total.added:
        return (
            call.x,
            as_tokens(total.value, call.token_axis),
            lambda u: u + branch(u),
            lambda u, m, h: plus_identity(branch_operator(u, m, h)),
            ends,
            Norms(second=own),
        )
    outer = TokenModule(total.norm.module, total.norm.x)
    return (
        call.x,
        as_tokens(total.norm.y, call.token_axis),
        lambda u: outer(u + branch(u)),
        lambda u, m, h: compose(
            linearise(outer, u + branch(u)), plus_identity(branch_operator(u, m, h))
        ),
        to_norm(total.norm, ends_of_attention(record, call)),
        Norms(second=own, outer=total.norm.module),
    )


def _sum_of(record: Trace, call: AttentionCall, x: Tensor, added: Tensor) -> Sum | None:
    """The sum ``x + added`` that the model formed and went on from."""
    if x.shape != added.shape:
        return None
    for total in record.seen.sums[call.sums_before :]:
        if not total.read or total.value.numel() != x.numel():
            continue
        if close(as_tokens(total.value, call.token_axis), x + added):
            return total
    return None
