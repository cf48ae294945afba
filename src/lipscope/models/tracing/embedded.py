"""A model as a function of its token ids, and of the vectors that its table gives them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.tracing.arguments import bound_arguments
from lipscope.models.tracing.calls import Trace, as_tokens, first_tensor
from lipscope.models.tracing.map_endpoints import ends_of_attention
from lipscope.models.tracing.prepare import exact_maths, undisturbed
from lipscope.models.tracing.trace import run

Where = Literal["layer", "model"]


class Read(NamedTuple):
    """What a model makes of some texts of one length.

    Attributes:
        entering: What enters the layer, ``(b, n, d)``.
        layer: What leaves it, projection included, ``(b, n, d)``.
        model: What leaves the model, ``(b, n, d)``, or ``(b, c)`` where it ends in scores.
    """

    entering: Tensor
    layer: Tensor
    model: Tensor


class Embedded:
    """A model that reads token ids, at any ids, and at any vectors instead of theirs.

    Holds for models that read one text, as ids through one ``nn.Embedding``.

    Args:
        model: The model, ready to be run.
        inputs: Its inputs at one text.
        record: Trace of that text.
        layer: Index of the layer that is read.

    Attributes:
        ids: The ids of that text, ``(n,)``.
        size: How many tokens its table has.

    Raises:
        InputError: If the model reads anything else.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any] | tuple[Any, ...],
        record: Trace,
        layer: int,
    ) -> None:
        held = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
        if len(held) != 1 or held[0].is_floating_point():
            raise InputError(
                "Token edits need a model that reads one text by its token ids. Found "
                f"{len(held)} inputs, or vectors; they are not covered."
            )
        self._model, self._name = model, next(iter(inputs)) if isinstance(inputs, Mapping) else None
        self._ends = ends_of_attention(record, record.calls[layer])
        self.ids: Tensor = held[0][0]
        self._embedding = self._embedding_of(held[0])
        self.size: int = self._embedding.num_embeddings

    def read(self, ids: Int[Tensor, "b n"]) -> Read:
        """What the model makes of texts of one length."""
        with torch.no_grad():
            return self._run(ids, None)

    def vectors(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """The vectors of some tokens, as the model uses them."""
        with torch.no_grad():
            return self._embedding(ids)

    @cached_property
    def table(self) -> Float[Tensor, "v d"]:
        """The vectors of all tokens."""
        return self.vectors(torch.arange(self.size, device=self.ids.device))

    def function(
        self, ids: Int[Tensor, " n"], where: Where
    ) -> Callable[[Float[Tensor, "n d"]], Tensor]:
        """The output as a differentiable function of the vectors of a text.

        Args:
            ids: Its ids, which say where padding would be.
            where: ``layer`` or ``model``.

        Returns:
            A function of ``(n, d)``; at ``vectors(ids)`` it is the model itself.
        """
        return lambda x: getattr(self._run(ids[None], x), where)[0]

    def _run(self, ids: Tensor, x: Tensor | None) -> Read:
        ends, seen = self._ends, {"enters": [], "leaves": []}

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["enters"].append(bound_arguments(module, args, kwargs)[ends.arguments[0]])

        def leave(_: nn.Module, __: Any, out: Any) -> None:
            seen["leaves"].append(first_tensor(out, ends.place))

        def put(_: nn.Module, __: Any, out: Tensor) -> Tensor | None:
            return None if x is None else x.expand_as(out)

        start, end = (self._model.get_submodule(one) for one in (ends.enters, ends.leaves))
        with contextlib.ExitStack() as stack:
            stack.callback(start.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(end.register_forward_hook(leave).remove)
            stack.callback(self._embedding.register_forward_hook(put).remove)
            stack.enter_context(exact_maths(self._embedding.weight.dtype))
            stack.enter_context(undisturbed(self._model))
            out = run(self._model, (ids,) if self._name is None else {self._name: ids})
        entering, layer = (self._batch(some[ends.turn], ids) for some in seen.values())
        return Read(entering, layer, first_tensor(out))

    def _batch(self, y: Tensor, ids: Tensor) -> Tensor:
        """What every text has there, ``(b, n, d)``."""
        y = y.transpose(0, 1) if self._ends.token_axis == 0 and y.ndim == 3 else y
        if y.shape[:-1] != ids.shape:
            y = as_tokens(y, self._ends.token_axis).reshape(*ids.shape, -1)
        return y

    def _embedding_of(self, ids: Tensor) -> nn.Embedding:
        """The table that is asked for the ids themselves."""
        found: list[nn.Embedding] = []

        def look(module: nn.Embedding, args: tuple[Any, ...]) -> None:
            if args and args[0].shape == ids.shape and bool((args[0] == ids).all()):
                found.append(module)

        tables = [one for one in self._model.modules() if isinstance(one, nn.Embedding)]
        with contextlib.ExitStack() as stack, torch.no_grad(), undisturbed(self._model):
            for one in tables:
                stack.callback(one.register_forward_pre_hook(look).remove)
            run(self._model, (ids,) if self._name is None else {self._name: ids})
        if not found:
            raise InputError(
                "Token edits need a model with an embedding of its token ids. Found "
                f"`{type(self._model).__name__}` without one."
            )
        return found[0]
