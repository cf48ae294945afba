"""The model itself as a function between the two ends of a map, as nothing but hooks see it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.linalg import derivatives
from lipscope.models.tracing.arguments import bound_arguments
from lipscope.models.tracing.calls import (
    BlockCall,
    Inputs,
    Trace,
    as_tokens,
    first_tensor,
)
from lipscope.models.tracing.flow import each_tensor
from lipscope.models.tracing.prepare import exact_maths, undisturbed
from lipscope.models.tracing.replay import Streams, projected
from lipscope.models.tracing.sites import AttentionCall
from lipscope.models.tracing.sums import AtSum, NormCall
from lipscope.models.tracing.trace import run


class _Reached(BaseException):
    """The output is there; what follows is not run. No model catches it by mistake."""


@dataclass(frozen=True)
class Ends:
    """Where a map begins and ends in its model.

    Attributes:
        enters: Path of the module before whose call the tokens move.
        arguments: Which of its arguments hold them, one after the other.
        turn: At which of its calls.
        leaves: Path of the module whose output is read.
        until: Path of the module at whose end the run ends: it, or one around it.
        token_axis: Axis of the tokens, 0 or 1.
        place: Which of the tensors that it returns is read.
        total: Which of the sums of the pass is read instead; None for none.
        onward: From ``J e`` to the derivative of what is read.
        moved: Which tokens the map's input holds; None for all.
        read: Which tokens its output holds; None for all.
        last: What is made of them at the end.
    """

    enters: str
    arguments: tuple[str, ...]
    turn: int
    leaves: str
    until: str
    token_axis: int
    place: int = 0
    total: int | None = None
    onward: Callable[[Tensor], Tensor] = lambda product: product
    moved: Tensor | None = None
    read: Tensor | None = None
    last: Callable[[Tensor], Tensor] = lambda y: y

    def function(self, model: nn.Module, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        """What the model reads at one end for what moves at the other.

        The tokens are written into the memory where the model holds them, so that whatever
        else the model makes of that memory moves with them: no name of an argument is trusted.

        Args:
            model: The model; it is put back as it was after each call.
            inputs: Its inputs.

        Returns:
            A function of ``(n, d)``.

        Raises:
            InputError: When called, if the model does not come by the two ends again.
        """
        return lambda x: self.beside((), model, inputs)(x)[0]

    def beside(
        self, others: Sequence[Ends], model: nn.Module, inputs: Inputs
    ) -> Callable[[Tensor], list[Tensor]]:
        """The same, with what the model reads at other ends of the same pass.

        Args:
            others: Where else it is read; where they begin does not matter.
            model: As for `function`.
            inputs: Likewise.

        Returns:
            A function of ``(n, d)``: what is read here, then at each other end.
        """
        ends = (self, *others)

        def function(x: Tensor) -> list[Tensor]:
            found = self._run(ends, model, inputs, x)
            return [end.tokens(y) for end, y in zip(ends, found, strict=True)]

        return function

    def entering(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """What enters the map when the model reads other inputs, ``(n, d)``."""
        seen: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = bound_arguments(module, args, kwargs)
            held = [as_tokens(given[name], self.token_axis) for name in self.arguments]
            seen.append(torch.cat(held))  # a copy

        start = model.get_submodule(self.enters)
        handle = start.register_forward_pre_hook(enter, with_kwargs=True)
        dtype = next(model.parameters()).dtype
        try:
            with torch.no_grad(), exact_maths(dtype, differentiable=False), undisturbed(model):
                run(model, each_tensor(inputs, torch.clone))
        finally:
            handle.remove()
        whole = seen[self.turn]
        return whole if self.moved is None else whole[self.moved]

    def gradients(
        self, model: nn.Module, inputs: Inputs, path: str, scores: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "m n d"]:
        """Gradients, in the tokens that move, of scores of what a module returns.

        Args:
            model: The model.
            inputs: Its inputs.
            path: The module, "" for the model.
            scores: From what it returns, ``(n, d)``, to ``(m,)``.

        Raises:
            InputError: If no gradient comes back from there.
        """
        held: list[list[Tensor]] = []
        seen: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = bound_arguments(module, args, kwargs)
            held.append([given[name].requires_grad_() for name in self.arguments])

        with contextlib.ExitStack() as stack:
            start, end = model.get_submodule(self.enters), model.get_submodule(path)
            stack.callback(start.register_forward_pre_hook(enter, with_kwargs=True).remove)
            leave = end.register_forward_hook(lambda *a: seen.append(first_tensor(a[2])))
            stack.callback(leave.remove)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(exact_maths(next(model.parameters()).dtype))
            stack.enter_context(undisturbed(model))
            run(model, each_tensor(inputs, torch.clone))
            found = scores(as_tokens(seen[-1], self.token_axis))
        if not found.requires_grad:
            raise InputError(
                f"The model should have gradients from its output back to `{self.enters}`. Found "
                "that they are cut on the way."
            )
        moving, some = held[self.turn], []
        for one in found:
            with derivatives():
                parts = torch.autograd.grad(
                    one, moving, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            whole = torch.cat([as_tokens(part, self.token_axis) for part in parts])
            some.append(whole if self.moved is None else whole[self.moved])
        return torch.stack(some)

    def tokens(self, y: Tensor) -> Tensor:
        """What was read, as the tokens that are asked for."""
        y = as_tokens(y, self.token_axis)
        return self.last(y if self.read is None else y[self.read])

    def _run(
        self, ends: Sequence[Ends], model: nn.Module, inputs: Inputs, x: Tensor
    ) -> list[Tensor]:
        waiting = self.turn
        written: list[tuple[Tensor, Tensor]] = []
        found: dict[int, Tensor] = {}  # the last one that was read at each end
        settled: set[int] = set()

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal waiting
            if waiting == 0:
                given = bound_arguments(module, args, kwargs)
                self._check_apart([given[name] for name in self.arguments])
                written.extend((given[name], given[name].clone()) for name in self.arguments)
                self._write([held for held, _ in written], x)
            waiting -= 1

        def leave(k: int, out: Any) -> None:
            if written and k not in settled:
                # A copy: it may lie where the model goes on, or where the tokens are put back.
                found[k] = first_tensor(out, ends[k].place).clone()

        def end(k: int) -> None:
            if k in found:
                settled.add(k)
            if len(settled) == len(ends):
                raise _Reached

        def at_sum(k: int, value: Tensor) -> None:
            leave(k, value)
            end(k)

        with contextlib.ExitStack() as stack:
            start = model.get_submodule(self.enters)
            stack.callback(start.register_forward_pre_hook(enter, with_kwargs=True).remove)
            for k, one in enumerate(ends):
                if one.total is not None:
                    stack.enter_context(AtSum(one.total, functools.partial(at_sum, k)))
                    continue
                left, last = (model.get_submodule(path) for path in (one.leaves, one.until))
                seen = left.register_forward_hook(lambda *a, k=k: leave(k, a[2]))
                over = last.register_forward_hook(lambda *_, k=k: end(k))
                stack.callback(seen.remove)
                stack.callback(over.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(exact_maths(x.dtype, differentiable=False))
            stack.enter_context(undisturbed(model))
            try:
                run(model, each_tensor(inputs, torch.clone))
            except _Reached:
                pass
            finally:
                for held, before in written:
                    held.copy_(before)
        missing = next((one for k, one in enumerate(ends) if k not in found), None)
        if missing is not None:
            raise InputError(
                f"The model should run twice in the same way. Found that a second run on the same "
                f"input did not lead from `{self.enters}` to `{missing.leaves}`."
            )
        return [found[k] for k in range(len(ends))]

    def _check_apart(self, held: list[Tensor]) -> None:
        steps = (pair for t in held for pair in zip(t.stride(), t.shape, strict=True))
        if any(step == 0 and size > 1 for step, size in steps):
            raise InputError(
                f"`{self.enters}` should take tokens that move one by one. Found that one value in "
                "memory stands for several (`expand`); use the map `block` or `model`."
            )

    def _write(self, held: list[Tensor], x: Tensor) -> None:
        tokens = [as_tokens(one, self.token_axis) for one in held]
        whole = torch.cat(tokens)
        whole[slice(None) if self.moved is None else self.moved] = x.to(whole)
        for one, part in zip(held, whole.split([len(t) for t in tokens]), strict=True):
            one.copy_(part.reshape(one.shape))

    def at(self, path: str) -> Ends:
        """The same beginning, but all that a module returns is read; "" for the model."""
        whole = Ends(self.enters, self.arguments, self.turn, path, path, self.token_axis)
        return replace(whole, moved=self.moved)


def ends_of_attention(record: Trace, call: AttentionCall, *, heads: bool = False) -> Ends:
    """Ends of the maps ``attention`` and ``heads``, both read after the output projection."""
    leaves, until, place = call.name, call.name, call.out_at
    if call.projection is not None and (call.goes_on or not call.projection_inside):
        leaves, place = path_of(record.model, call.projection), 0
        until = call.name if call.projection_inside else leaves
    hidden = call.hidden[:1]
    ends = Ends(call.name, hidden, call.turn, leaves, until, call.token_axis, place)
    projection = call.projection
    if not heads or projection is None:
        return ends

    def onward(product: Tensor) -> Tensor:
        with torch.no_grad():
            return projected(projection, product)

    return replace(ends, onward=onward)


def from_norm(record: Trace, norm: NormCall, ends: Ends) -> Ends:
    """The same end, but the tokens move before the norm."""
    calls = [other for other in record.norms if other.module is norm.module]
    turn = next(i for i, other in enumerate(calls) if other is norm)
    first = next(iter(inspect.signature(norm.module.forward).parameters))
    return replace(ends, enters=norm.name, arguments=(first,), turn=turn)


def to_norm(norm: NormCall, ends: Ends) -> Ends:
    """The same beginning, but a norm's output is read."""
    return replace(ends, leaves=norm.name, until=norm.name, place=0)


def to_sum(index: int, ends: Ends) -> Ends:
    """The same beginning, but a sum that the model forms is read."""
    return replace(ends, leaves="", until="", total=index)


def ends_of_block(record: Trace, block: BlockCall, moved: Streams, token_axis: int) -> Ends:
    """Ends of the map ``block``."""
    calls = [other for other in record.blocks if other.name == block.name]
    turn = next(i for i, other in enumerate(calls) if other is block)
    return Ends(block.name, moved.firsts, turn, block.name, block.name, token_axis)


def ends_of_model(record: Trace, first: str, moved: Streams, last: str) -> Ends:
    """From a first block to the output of a module, "" for the model's own."""
    return Ends(first, moved.firsts, 0, last, last, record.calls[0].token_axis)


def path_of(model: nn.Module, module: nn.Module) -> str:
    """Dotted path of a module in a model."""
    return next(name for name, one in model.named_modules() if one is module)
