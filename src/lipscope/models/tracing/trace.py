"""Run a model once with hooks and keep what its attention layers saw.

Nothing is patched: hooks live in context managers and are undone on exit.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from lipscope.errors import InputError
from lipscope.models.tracing.calls import (
    Inputs,
    Trace,
    first_tensor,
    hook_block,
    hook_first,
    hook_norm,
    hook_site,
    tensors_in,
)
from lipscope.models.tracing.flow import each_tensor, followed, hook_embeddings, marked
from lipscope.models.tracing.output_projection import settle
from lipscope.models.tracing.prepare import exact_maths, undisturbed
from lipscope.models.tracing.sites import Side, block_of, first_block_of, is_norm
from lipscope.models.tracing.sums import Kept, SeenSums


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
) -> Trace:
    """Run ``model`` on one input and record its attention calls.

    Args:
        model: A model inside `prepared`.
        inputs: Keyword arguments, or a tuple of positional ones; one sample.
        sites: Attention modules by path (`attention_sites`).
        norms: Also record every sum (for the maps ``normed`` and ``residual``).
        blocks: Also record the Transformer blocks around the sites.
        dtype: Floating type of the run.
        side: ``self``, or through which side the calls of cross-attention are layers.
        asked: Path of a module that is a layer because it was asked for by its own name.

    Returns:
        The trace; its ``calls`` are the layers.

    Raises:
        InputError: If no attention module was called, or one that is none.
    """
    options = (model, inputs, sites, norms, blocks, dtype, side)
    marks = True
    try:
        record = _traced(*options, Kept(), marks)
    except (InputError, *_OF_MODELS):  # some code runs without marks only; mistakes come again
        marks = False
        record = _traced(*options, Kept(), marks)
    if record.kept.overwritten():
        record = _traced(*options, Kept(copies=True), marks)
    settle(record, asked)
    if not record.calls:
        _complain(record, list(sites))
    return record


def _complain(record: Trace, sites: list[str]) -> NoReturn:
    """Say that no module was called as the layers are."""
    names, own = ", ".join(sites[:3]), record.side == "self"
    kind = "self-attention" if own else "cross-attention"
    elsewhere = "with keys from elsewhere" if own else "with keys of their own tokens"
    raise InputError(
        f"The model should call its {kind} modules ({names}, …). Found that it called "
        f"{f'them only {elsewhere}' if record.others else 'none of them'} on this input."
    )


def _traced(
    model: nn.Module,
    inputs: Inputs,
    sites: Mapping[str, nn.Module],
    norms: bool,
    blocks: bool,
    dtype: torch.dtype,
    side: Side,
    kept: Kept,
    marks: bool,
) -> Trace:
    record = Trace(model, inputs, kept, SeenSums(kept), side)
    with contextlib.ExitStack() as stack:
        for name, module in sites.items():
            hook_site(stack, record, name, module)
        for name, module in model.named_modules() if norms or blocks else ():
            if is_norm(module):
                hook_norm(stack, record, name, module)
        if norms:
            stack.enter_context(record.seen)
        if blocks:
            around = dict.fromkeys(filter(None, (block_of(model, site) for site in sites)))
            for name in around:
                hook_block(stack, record, name, model.get_submodule(name))
            for name in dict.fromkeys(first_block_of(block) for block in around):
                hook_first(stack, record, name, model.get_submodule(name))
        stack.enter_context(exact_maths(dtype, differentiable=False))
        stack.enter_context(undisturbed(model))
        if marks:
            hook_embeddings(stack, model, inputs)
            stack.enter_context(followed())
        else:
            stack.enter_context(torch.no_grad())
        stack.enter_context(_same_draws(model))
        before = torch.get_rng_state()
        output = _run_once(model, each_tensor(inputs, marked) if marks else inputs)
        record.draws = not torch.equal(torch.get_rng_state(), before)
        if tensors_in(output):  # a composite model may return what its parts return, and no more
            record.output = first_tensor(output).detach()
        record.hidden = getattr(output, "last_hidden_state", None) is not None
    return record


_ROOM = __name__.rpartition(".")[0]
# What the code of models and of torch's own layers raises where an input does not fit.
_OF_MODELS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def _run_once(model: nn.Module, inputs: Inputs) -> Any:
    """`run`, with whatever the model's own code raises as one line."""
    try:
        return _called(model, inputs)
    except InputError:
        raise
    except _OF_MODELS as problem:
        if _is_ours(problem):
            raise
        text = " ".join(str(problem).split())[:300]
        raise InputError(
            f"`{type(model).__name__}` should run on this input. Found that its forward pass "
            f"raised {type(problem).__name__}: {text}"
        ) from problem


def _is_ours(problem: Exception) -> bool:
    """Whether a hook of lipscope raised it, and not the model that ran between the hooks."""
    frames = (frame for frame, _ in traceback.walk_tb(problem.__traceback__))
    codes = [
        frame.f_code for frame in frames if frame.f_globals.get("__name__", "").startswith(_ROOM)
    ]
    passed = {_run_once.__name__, _called.__name__, "__torch_function__"}  # the model's own calls
    return any(code.co_name not in passed for code in codes)


@contextlib.contextmanager
def _same_draws(model: nn.Module) -> Iterator[None]:
    """What a forward pass draws (noise that masks patches) is the same each time it is run."""
    used = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    # Not `torch.manual_seed`: it writes down the stack for every kind of device that is asleep,
    # which took longer than a small model.
    with torch.random.fork_rng(used):
        torch.default_generator.manual_seed(0)
        for index in used:
            torch.cuda.default_generators[index].manual_seed(0)
        yield


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model without a key/value cache; what it draws is the same each time."""
    with _same_draws(model):
        return _called(model, inputs)


def _called(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    extra = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        extra["use_cache"] = False
    return model(**{**inputs, **extra})
