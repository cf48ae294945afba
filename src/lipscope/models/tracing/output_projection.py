"""Beginning and end of an attention call: the source of its keys, and its output projection.

Decided when the forward pass is over, by running single modules once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.tracing.calls import Trace, as_tokens, first_tensor, take
from lipscope.models.tracing.flow import lies, place
from lipscope.models.tracing.replay import called_again
from lipscope.models.tracing.sites import (
    Applied,
    AttentionCall,
    has_weights,
    is_attention,
    is_norm,
    is_plain,
)
from lipscope.models.tracing.sums import close, distance


def settle(record: Trace, asked: str | None = None) -> None:
    """Finish the calls of a trace.

    Args:
        record: The trace.
        asked: Path of a module that is a layer because it was asked for by its own name.

    Raises:
        InputError: If a module that was called is no attention.
    """
    calls, record.calls = record.calls, []
    for call in calls:
        if call.in_parts:
            record.calls.append(call)
            continue
        if not _belongs(record, call):
            record.others.append(call.name)
            continue
        if not is_attention(call.module) and call.name != asked and call.num_tokens > 1:
            _check_mixes(call)
        _find_projection(call)
        record.calls.append(call)


def _belongs(record: Trace, call: AttentionCall) -> bool:
    """Whether a call is one of the layers, now that the source of its keys is known."""
    if not call.unsure:
        return True
    source = next((name for name in call.unsure if _mixes(call, [name])), None)
    if source is not None and record.side != "self":
        take(call, call.arguments, call.kept[0], call.arguments[source], record)
    return (source is None) == (record.side == "self")


def reaches_others(call: AttentionCall, names: Sequence[str], there: Tensor) -> bool:
    """Whether some tokens of these arguments change the output of other ones.

    Args:
        call: A call of attention.
        names: Arguments that hold one tensor of tokens.
        there: Which tokens are changed, ``(n,)`` booleans.
    """
    given: Tensor = call.arguments[names[0]]
    noise = torch.randn(given.shape, generator=start_named("what changes")).to(given)
    shape = [1, 1, 1]
    shape[call.token_axis] = -1
    moved = given + there.to(given).reshape(shape) * noise * given.abs().max()
    with torch.no_grad():
        at = [dict.fromkeys(names, given), dict.fromkeys(names, moved)]
        before, after = (called_again(call, changed) for changed in at)
    changed = (after != before).flatten(1).any(1)
    return bool((changed if len(changed) != len(there) else changed & ~there).any())


def _mixes(call: AttentionCall, names: Sequence[str]) -> bool:
    """Whether any of three tokens changes the output of another one."""
    count = call.arguments[names[0]].shape[call.token_axis]
    each = torch.arange(count, device=call.x.device)
    return any(reaches_others(call, names, each == t) for t in {0, count // 2, count - 1})


def _check_mixes(call: AttentionCall) -> None:
    if not _mixes(call, call.hidden):
        raise InputError(
            f"`modules` should match attention. Found `{call.name}`, a "
            f"`{type(call.module).__name__}` in which no token reads another; give its whole path "
            "to have it measured all the same."
        )


def _find_projection(call: AttentionCall) -> None:
    """The output projection: the last map inside, or one beside it that takes the output."""
    out = call.kept[1]
    if isinstance(call.module, nn.MultiheadAttention):
        call.projection = call.module.out_proj  # applied without being called
        call.projection_inside = True
        return
    for one in call.inside:
        as_it_is = _same(one.x, call.kept[0]) and one.x.shape == call.kept[0].shape
        if isinstance(one.module, nn.Conv1d) and as_it_is:  # not a transpose of it
            raise InputError(
                f"`{call.name}` should take (batch, tokens, width). Found channels first: a "
                "convolution runs over its input as it is; this layout is not covered."
            )
    inner = _projection_of([one for one in call.inside if _same(one.y, out)])
    call.projection_inside = inner is not None
    if inner is not None:
        call.projection, call.heads = inner.module, as_tokens(inner.x, call.token_axis)
        return
    _look_behind_a_sum(call, out)
    outer = None if call.projection or call.refusal else _projection_of(call.behind)
    if outer is not None:
        call.projection, call.heads = outer.module, as_tokens(outer.x, call.token_axis)
        call.output = as_tokens(outer.y, call.token_axis)
        call.kept.append(outer.y)


def _projection_of(applied: list[Applied]) -> Applied | None:
    """The outermost of these modules that is affine; the linear map in it that is all it does."""
    affine = [one for one in applied if _is_affine(one)]
    if not affine:
        return None
    last = affine[-1]  # what holds a module is done after it
    return next((one for one in affine if is_plain(one.module) and _same(one.y, last.y)), last)


def _is_affine(one: Applied) -> bool:
    """Whether a module with a matrix maps its input, alone, to ``x W + b``."""
    if is_plain(one.module):
        return True
    if not has_weights(one.module, 2):
        return False
    noise = torch.randn(one.x.shape, generator=start_named("what changes")).to(one.x)
    try:
        with torch.no_grad():
            near, sum_, zero = (
                first_tensor(one.module(x)) for x in (noise, one.x + noise, torch.zeros_like(one.x))
            )
            return distance(sum_ - near, one.y - zero) < 1e-3
    except Exception:  # it takes more than one tensor, or returns something else
        return False


def _look_behind_a_sum(call: AttentionCall, out: Tensor) -> None:
    """Modules that add the residual themselves (BLOOM), some with a norm after it (ALBERT).

    The attention ends at the projection, if the rest is seen to be such a sum.
    """
    axis = call.token_axis
    norm = next((one for one in call.inside if is_norm(one.module) and _same(one.y, out)), None)
    total = as_tokens(norm.x, axis) if norm is not None else call.output
    given = [v for k, v in call.arguments.items() if k not in call.hidden]
    given = [v for v in given if isinstance(v, Tensor) and v.shape == out.shape and lies(v)]
    terms = [as_tokens(v, axis) for v in given]
    for one in reversed(call.inside):
        if one.y.shape != out.shape or not _is_affine(one):
            continue
        branch = as_tokens(one.y, axis)
        if any(close(total, branch + t) for t in (call.x, *terms) if t.shape == branch.shape):
            call.projection, call.heads = one.module, as_tokens(one.x, axis)
            call.output, call.projection_inside, call.goes_on = branch, True, True
            call.kept.append(one.y)
            return
    if norm is not None:
        call.refusal = call.refusal or (
            f"`{call.name}` should end at its output projection. Found a norm at its end, so that "
            "its output is more than attention; use the map `block` or `model`."
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return place(a) == place(b) and a.numel() == b.numel()
