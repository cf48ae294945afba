"""Tracing: run a model once with hooks and record its attention calls."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.models.tracing.calls import (
    Trace,
    called_again,
    hook_block,
    hook_first,
    hook_norm,
    hook_site,
    hook_start,
    set_call_inputs,
)
from lipscope.models.tracing.prepare import eval_mode
from lipscope.models.tracing.recorder import (
    Inputs,
    Reached,
    Recorder,
    SumRecorder,
    TensorStore,
    called,
    each_tensor,
    first_tensor,
    mark_embeddings,
    marked,
    same_place,
    tensors_in,
    to_device,
    tracked,
)
from lipscope.models.tracing.resident_weights import ResidentWeights
from lipscope.models.tracing.sites import (
    AttentionCall,
    Side,
    attention_sites,
    block_of,
    first_block_of,
    is_attention,
    is_norm,
)


class BlockPass(NamedTuple):
    """A pass through a model whose weights are loaded block by block."""

    resident: ResidentWeights  # the weights in memory
    upto: int | None = None  # stop after the block of this layer; None for all layers
    briefly: bool = False  # stop after the attention of this layer


def trace(
    model: nn.Module,
    inputs: Inputs,
    sites: Mapping[str, nn.Module],
    *,
    norms: bool = False,
    blocks: bool = False,
    dtype: torch.dtype = torch.float32,
    side: Side = "self",
    asked: str | None = None,
    by_block: BlockPass | None = None,
) -> Trace:
    """Run a `prepared` model on one sample and record its attention calls, the layers.

    ``sites`` are its attention modules by path (`attention_sites`); ``side`` is ``self``, or the
    moving side of cross-attention layers; ``asked`` is the path of a module that is a layer because
    the user named it. ``norms``: record norms and sums, for the maps ``normed`` and ``residual``;
    ``blocks``: record the Transformer blocks around the sites; ``by_block``: the pass of a model
    whose weights are loaded block by block.
    """

    def once(marks: bool, copies: bool = False) -> Trace:
        kept = TensorStore(copies)
        resident = None if by_block is None else by_block.resident
        record = Trace(model, inputs, kept, SumRecorder(kept), side, resident=resident)
        _fill(record, sites, norms, blocks, dtype, marks, by_block)
        return record

    marks = True
    try:
        record = once(marks)
    except (InputError, *OF_MODELS):  # some code fails only with marks; real errors occur again
        marks = False
        if by_block is not None:
            by_block.resident.part = None
            by_block = by_block._replace(briefly=False)
        record = once(marks)
    if record.kept.overwritten():
        record = once(marks, copies=True)
    resolve_calls(record, asked)
    if not record.calls:
        _complain(record, list(sites))
    return record


def _complain(record: Trace, sites: list[str]) -> NoReturn:
    names, own = ", ".join(sites[:3]), record.side == "self"
    kind = "self-attention" if own else "cross-attention"
    elsewhere = "with keys from elsewhere" if own else "with keys of their own tokens"
    raise InputError(
        f"The model should call its {kind} modules ({names}, …). Found that it called "
        f"{f'them only {elsewhere}' if record.others else 'none of them'} on this input."
    )


def _fill(
    record: Trace,
    sites: Mapping[str, nn.Module],
    norms: bool,
    blocks: bool,
    dtype: torch.dtype,
    marks: bool,
    by_block: BlockPass | None,
) -> None:
    model, inputs, resident = record.model, record.inputs, record.resident

    def called_once(model: nn.Module, inputs: Inputs) -> Any:
        before = torch.get_rng_state()
        try:
            output = checked_call(model, inputs)
        except Reached:
            output, record.complete = None, False
        finally:
            if resident is not None:
                resident.turns.end()
        record.draws = not torch.equal(torch.get_rng_state(), before)
        return output

    if resident is not None:
        resident.turns.begin()
    with Recorder() as recorder:
        for name, module in sites.items():
            hook_site(recorder, record, name, module)
        for name, module in model.named_modules() if norms or blocks else ():
            if is_norm(module):
                hook_norm(recorder, record, name, module)
        if norms:
            recorder.enter_context(record.seen)
        if blocks:
            around = dict.fromkeys(filter(None, (block_of(model, site) for site in sites)))
            for name in around:
                hook_block(recorder, record, name, model.get_submodule(name))
            for name in dict.fromkeys(first_block_of(model, block) for block in around):
                hook_first(recorder, record, name, model.get_submodule(name))
        if by_block is not None:
            _hook_blocks(recorder, record, by_block)
        if marks:
            mark_embeddings(recorder, model, inputs)
        recorder.enter_context(tracked() if marks else torch.no_grad())
        given = each_tensor(inputs, marked) if marks else inputs
        output = recorder.run(model, given, dtype, differentiable=False, call=called_once)
        if tensors_in(output):  # composite models may return only nested outputs
            record.output = first_tensor(output).detach()
        record.hidden = getattr(output, "last_hidden_state", None) is not None


def _hook_blocks(recorder: Recorder, record: Trace, by_block: BlockPass) -> None:
    """Record the arguments of resident blocks, and stop the pass after the last requested layer."""
    resident, upto, briefly = by_block

    def enough() -> bool:
        return upto is not None and sum(not one.unsure for one in record.calls) > upto

    def inside() -> bool:
        """Whether the last requested attention is complete, including its output projection."""
        last = record.calls[-1] if enough() else None
        if last is None or not briefly or len(last.kept) < 2:
            return False
        torchs = isinstance(last.module, nn.MultiheadAttention)
        return torchs or any(same_place(one.y, last.kept[1]) for one in last.inside)

    for block in resident.kept:
        hook_start(recorder, record, block, record.model.get_submodule(block))
    recorder.enter_context(resident.passing(enough, inside))


_ROOM = __name__.rpartition(".")[0]
# Exceptions of models and torch layers for invalid inputs.
OF_MODELS = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(ArithmeticError, OSError),
)


def checked_call(model: nn.Module, inputs: Inputs) -> Any:
    """`called`, with exceptions of the model's code converted to one-line errors."""
    try:
        return called(model, inputs)
    except InputError:
        raise
    except OF_MODELS as problem:
        if _is_ours(problem):
            raise
        _check_indices(model, problem)
        raise InputError(
            f"`{type(model).__name__}` should run on this input. Found that its forward pass "
            f"raised {type(problem).__name__}: {str(problem)[:300]}"
        ) from problem


def _check_indices(model: nn.Module, problem: Exception) -> None:
    """Report token ids or positions outside an embedding table of the model."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        table, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(table, nn.Embedding) and isinstance(ids, Tensor) and ids.numel():
            name = next(name for name, one in model.named_modules() if one is table)
            least, most = ids.min().item(), ids.max().item()
            if least < 0 or most >= table.num_embeddings:
                raise InputError(
                    f"Token ids and positions should be from 0 to {table.num_embeddings - 1} for "
                    f"`{name}`. Found {least if least < 0 else most}."
                ) from None


def _is_ours(problem: Exception) -> bool:
    """Whether an exception comes from a hook of lipscope, not from the model's code."""
    frames = (frame for frame, _ in traceback.walk_tb(problem.__traceback__))
    codes = [
        frame.f_code for frame in frames if frame.f_globals.get("__name__", "").startswith(_ROOM)
    ]
    passed = {checked_call.__name__, called.__name__, "__torch_function__"}  # the model's own calls
    return any(code.co_name not in passed for code in codes)


def resolve_calls(record: Trace, asked: str | None = None) -> None:
    """Separate layers from other calls after the pass."""
    calls, record.calls = record.calls, []
    if record.resident is not None:
        resident = record.resident
        for one in (*calls, *record.blocks):
            one.have = functools.partial(resident.fill, resident.block_of(one.name))
    for call in calls:
        if not call.in_parts and not _belongs(record, call):
            record.others.append(call.name)
            continue
        known = call.in_parts or is_attention(call.module) or call.name == asked
        if not known and call.num_tokens > 1 and not _mixes(call, call.hidden):
            raise InputError(
                f"`modules` should match attention. Found `{call.name}`, a "
                f"`{type(call.module).__name__}` in which no token reads another; give its full "
                "path to measure it anyway."
            )
        record.calls.append(call)


def _belongs(record: Trace, call: AttentionCall) -> bool:
    """Whether a call is a layer, after the source of its keys is resolved."""
    if not call.unsure:
        return True
    source = next((name for name in call.unsure if _mixes(call, [name])), None)
    if source is not None and record.side != "self":
        set_call_inputs(call, call.arguments, call.kept[0], call.arguments[source], record)
    return (source is None) == (record.side == "self")


def reaches_others(call: AttentionCall, names: Sequence[str], there: Tensor) -> bool:
    """Whether the tokens in mask ``there`` of the given arguments change the output of others."""
    given: Tensor = call.arguments[names[0]]
    noise = torch.randn(given.shape, generator=start_named("what changes")).to(given)
    shape = [1, 1, 1]
    shape[call.token_axis] = -1
    moved = given + there.to(given).reshape(shape) * noise * given.abs().max()
    with torch.no_grad():
        before, after = (called_again(call, dict.fromkeys(names, x)) for x in (given, moved))
    changed = (after != before).flatten(1).any(1)
    return bool((changed if len(changed) != len(there) else changed & ~there).any())


def _mixes(call: AttentionCall, names: Sequence[str]) -> bool:
    """Whether any of three test tokens changes the output of another token."""
    count = call.arguments[names[0]].shape[call.token_axis]
    each = torch.arange(count, device=call.x.device)
    return any(reaches_others(call, names, each == t) for t in {0, count // 2, count - 1})


# --- overflow in half precision


def overflows(
    model: nn.Module,
    inputs: Inputs,
    modules: str | None = None,
    side: Side = "self",
    by_block: BlockPass | None = None,
) -> dict[int, str]:
    """Notes by layer on overflow in a model's half precision, which the measurement avoids.

    Empty for models in float32 or wider, and if this machine cannot run half precision.
    ``by_block`` as in `trace`.
    """
    first = next(model.parameters(), None)
    if first is None or not first.is_floating_point() or first.dtype.itemsize > 2:
        return {}
    device = first.device if by_block is None else by_block.resident.device
    name, given = str(first.dtype)[6:], to_device(inputs, device, first.dtype)
    try:
        with eval_mode(model):
            sites = attention_sites(model, modules, side=side)
            record = trace(model, given, sites, dtype=first.dtype, side=side, by_block=by_block)
    except InputError:  # not every operation exists in half precision everywhere
        return {}
    bad = [not bool(call.output.isfinite().all()) for call in record.calls]
    if True not in bad:
        return {}
    at = bad.index(True)
    inside = bool(record.calls[at].x.isfinite().all())
    what = f"layer {at} overflows" if inside else f"the model overflows before layer {at}"
    return {layer: f"in {name} {what} at this input" for layer in range(at, len(bad)) if bad[layer]}
