"""The logits that a model would give a stream inside it: its own last steps, applied early."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.models.library_messages import quiet
from lipscope.models.tracing.calls import Trace, as_tokens, first_tensor
from lipscope.models.tracing.prepare import ExactNorm, exact_maths, undisturbed
from lipscope.models.tracing.sums import NormCall, close
from lipscope.models.tracing.trace import run

Row = Callable[[Tensor], Tensor]


class Lens(NamedTuple):
    """``logits = U g(N(h)) + c`` of a stream ``h``.

    Attributes:
        norm: ``N``, the final norm; the identity where streams leave their layers normed.
        head: ``g``, the layers that the model has in front of ``U``, or the identity.
        weight: ``U``, ``(v, d)``.
        output: What the model's body hands to its head, ``(n, d)``.
    """

    norm: Row
    head: Row
    weight: Float[Tensor, "v d"]
    output: Float[Tensor, "n d"]

    def inner(self, h: Tensor) -> Tensor:
        """What the unembedding takes."""
        return self.head(self.norm(h))


def lens_of(record: Trace, whole: nn.Module | None = None) -> Lens | None:
    """How a model turns the stream after its last layer into logits, if it does so.

    The final norm, or the norm that ends every layer, must take a sum, and what follows must be the
    model's own output: the norm's, or its logits.

    Args:
        record: A trace with norms.
        whole: The model with the head that its checkpoint holds, where it was loaded without.

    Returns:
        The lens; None where there is none, or its values are not the model's.
    """
    table, output = _unembedding(record.model if whole is None else whole), record.output
    if table is None or output is None:
        return None
    call = record.calls[0]
    first = next((k for k, part in enumerate(call.name.split(".")) if part.isdigit()), 0)
    blocks = ".".join([*call.name.split(".")[:first], ""])

    def inside(norm: NormCall) -> bool:
        return bool(first) and norm.name.startswith(blocks)

    ends, weight = as_tokens(output, call.token_axis), table.weight.detach()
    taking = [n for n in record.norms if record.seen.of(n.x_place) is not None]  # a sum
    final = [n for n in taking if not inside(n)]
    ending = [n for n in taking if inside(n)]
    for norm in (*reversed(final), *ending[-1:]):
        y = as_tokens(norm.y, call.token_axis)
        if y.shape != call.x.shape:
            continue
        head = _head(record, y, ends, table, whole)
        if head is not None:
            return Lens(_same if inside(norm) else ExactNorm(norm.module), head, weight, y)
    return None


def _head(
    record: Trace, y: Tensor, ends: Tensor, table: Any, whole: nn.Module | None
) -> Row | None:
    """What leads from the body's output ``y`` to the unembedding; None if ``y`` is another."""
    with torch.no_grad():
        if whole is not None:
            behind = _Behind(record, whole, table)
            return behind if close(ends, y) and behind.reaches(y) else None
        straight = y.shape[-1] == table.weight.shape[1]
        if straight and (close(ends, y) or (isinstance(table, nn.Linear) and near(ends, table(y)))):
            return _same
        if not isinstance(table, nn.Linear):
            return None
        behind = _Behind(record, record.model, table)
        return behind if behind.reaches(y) and near(ends, table(behind(y))) else None


def _same(h: Tensor) -> Tensor:
    return h


class _Behind:
    """The layers of a model between its body and its unembedding, run where they are.

    Args:
        record: A trace, whose input the model is run on.
        model: The model.
        table: Its unembedding.
    """

    def __init__(self, record: Trace, model: nn.Module, table: nn.Linear) -> None:
        self._record, self._model, self._table = record, model, table
        self._body = getattr(model, str(getattr(model, "base_model_prefix", "")) or " ", None)

    def reaches(self, y: Tensor) -> bool:
        """Whether this is the body's output, from which the model goes on to its unembedding."""
        if not isinstance(self._body, nn.Module):
            return False
        found: list[Tensor] = []
        taken = self._run(lambda out: found.append(as_tokens(first_tensor(out), 1)))
        return taken is not None and found[0].shape == y.shape and close(found[0], y)

    def __call__(self, h: Tensor) -> Tensor:
        """What the unembedding takes, for other tokens instead of the body's output."""

        def put(out: Any) -> Any:
            if isinstance(out, tuple):
                return (h[None], *out[1:])
            named = hasattr(out, "keys")
            return type(out)(**{**out, next(iter(out)): h[None]}) if named else h[None]

        taken = self._run(put)
        assert taken is not None
        return as_tokens(taken, 1)

    def _run(self, at_body: Callable[[Any], Any]) -> Tensor | None:
        taken: list[Tensor] = []
        assert self._body is not None
        with contextlib.ExitStack() as stack:
            for handle in (
                self._body.register_forward_hook(lambda *a: at_body(a[2])),
                self._table.register_forward_pre_hook(lambda _, args: taken.append(args[0])),
            ):
                stack.callback(handle.remove)
            stack.enter_context(exact_maths(self._record.calls[0].x.dtype))
            stack.enter_context(undisturbed(self._model))
            run(self._model, self._record.inputs)
        return taken[0] if taken else None


def _unembedding(model: nn.Module) -> Any:
    """What turns the last hidden state into logits: the model's own, or its tied embedding."""
    config: Any = getattr(model, "config", None)
    try:
        own = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        table = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return None
    if isinstance(own, nn.Linear):
        return own
    tied = getattr(config, "tie_word_embeddings", False) and isinstance(table, nn.Embedding)
    return table if tied and _ends_in_a_matrix(config) else None


def _ends_in_a_matrix(config: Any) -> bool:
    """Whether the language model of a configuration is this model and one matrix after it."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        head = model.get_output_embeddings()
    except Exception:  # each family has errors of its own: there is no such model
        return False
    parts = [one for one in model.children() if next(one.parameters(), None) is not None]
    return isinstance(head, nn.Linear) and len(parts) == 2 and head in parts


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same to four digits of the largest entry."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-4 * b.abs().max())
