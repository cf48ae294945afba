"""The map ``residual``: which sum of its input and output an attention layer is part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import Operator, compose, linearise, plus_identity
from lipscope.models.tracing.calls import Trace, as_tokens
from lipscope.models.tracing.flow import place
from lipscope.models.tracing.map_endpoints import (
    Ends,
    ends_of_attention,
    from_norm,
    to_norm,
    to_sum,
)
from lipscope.models.tracing.replay import ClosedForm, Replayed, TokenModule
from lipscope.models.tracing.sites import AttentionCall
from lipscope.models.tracing.sums import NormCall, close, distance


@dataclass(frozen=True)
class Norms:
    """Norms and scale of a map ``x -> N_o(x + s N_s(f(N_b(x))))``, None where there is none.

    Attributes:
        before: ``N_b``, in front of the attention.
        second: ``N_s``, which takes the attention's own output.
        outer: ``N_o``, which takes the sum.
        scale: ``s``, one number, ``()``, or one for every channel, ``(d,)``.
    """

    before: nn.Module | None = None
    second: nn.Module | None = None
    outer: nn.Module | None = None
    scale: Tensor | None = None


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
    here = place(call.kept[0])
    found = [n for n in record.norms if n.y_place == here and n.y.numel() == call.x.numel()]
    same = (n for n in found if close(as_tokens(n.y, call.token_axis), call.x))
    return next(same, None)


def _norm_after(record: Trace, call: AttentionCall) -> NormCall | None:
    """The norm that takes the attention's own output, before any sum."""
    here = place(call.kept[-1])
    found = [n for n in record.norms if n.x_place == here and n.x.numel() == call.output.numel()]
    same = (n for n in found if close(as_tokens(n.x, call.token_axis), call.output))
    return next(same, None)


def residual(
    record: Trace, call: AttentionCall, norm: NormCall | None, core: ClosedForm | Replayed
) -> Parts:
    """``x + s f(N(x))`` (pre-norm) or ``N(u + s f(u))`` (post-norm), with further norms.

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
    here = place(call.kept[-1]) if after is None else after.y_place
    ends, scale = ends_of_attention(record, call), None

    def behind(y: Tensor) -> Tensor:
        y = y if second is None else second(y)
        return y if scale is None else y * scale

    def branch(u: Tensor) -> Tensor:
        return behind(core.attend(u))

    def branch_operator(u: Tensor, memory: int, per_head: bool) -> Operator:
        op = core.linearise_attention(u, memory, per_head)
        plain = second is None and scale is None
        return op if plain else compose(linearise(behind, core.attend(u)), op)

    if norm is not None:
        x = as_tokens(norm.x, call.token_axis)
        index, scale = _sum_of(record, call, x, added, here)
        if index is not None:
            total, before = record.seen.sums[index], TokenModule(norm.module, norm.x)
            return (
                x,
                as_tokens(total.value, call.token_axis),
                lambda x: x + branch(before(x)),
                lambda x, m, h: plus_identity(
                    compose(branch_operator(before(x), m, h), linearise(before, x))
                ),
                to_sum(index, from_norm(record, norm, ends)),
                Norms(norm.module, own, scale=scale),
            )
    index, scale = _sum_of(record, call, call.x, added, here)
    if index is None:
        raise InputError(
            f"The map `residual` needs a sum of the layer's input and output from which the model "
            f"goes on. Found none after `{call.name}`; use the map `block`."
        )
    total = record.seen.sums[index]
    if total.norm is None or total.added:
        return (
            call.x,
            as_tokens(total.value, call.token_axis),
            lambda u: u + branch(u),
            lambda u, m, h: plus_identity(branch_operator(u, m, h)),
            to_sum(index, ends),
            Norms(second=own, scale=scale),
        )
    outer = TokenModule(total.norm.module, total.norm.x)
    return (
        call.x,
        as_tokens(total.norm.y, call.token_axis),
        lambda u: outer(u + branch(u)),
        lambda u, m, h: compose(
            linearise(outer, u + branch(u)), plus_identity(branch_operator(u, m, h))
        ),
        to_norm(total.norm, ends),
        Norms(second=own, outer=total.norm.module, scale=scale),
    )


def _sum_of(
    record: Trace, call: AttentionCall, x: Tensor, added: Tensor, here: int
) -> tuple[int | None, Tensor | None]:
    """Which sum is ``x + s added``, formed by the model, that it went on from; and ``s``.

    ``s`` is a factor that the model multiplied with what lies at this place, the attention's
    output; None for 1.
    """
    if x.shape != added.shape:
        return None, None
    scales = (None, *record.seen.factors(here, call.sums_before))
    expected = [x + (added if scale is None else added * scale) for scale in scales]
    for index, total in enumerate(record.seen.sums[call.sums_before :], call.sums_before):
        if not total.read or total.value.numel() != x.numel():
            continue
        value = as_tokens(total.value, call.token_axis)
        # Beside a large x, several of them are close.
        off = {i: distance(value, one) for i, one in enumerate(expected) if close(value, one)}
        if off:
            return index, scales[min(off, key=off.__getitem__)]
    return None, None
