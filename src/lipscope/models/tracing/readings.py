"""What a move of one token can be read as: another token in its place, logits, its neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.data.written import Written
from lipscope.models.tracing.calls import Trace, as_tokens
from lipscope.models.tracing.embedded import Embedded
from lipscope.models.tracing.maps import LayerMap, build_map
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.models.tracing.residual import norm_before
from lipscope.models.tracing.sums import close

Space = Literal["vocabulary", "read-out", "window"]
Row = Callable[[Tensor], Tensor]
ANY = "(any other)"
_LEAST = 1e-3  # of its largest stretch: what a norm shrinks more is not taken back through it


class Readings(NamedTuple):
    """Directions with names, in the space of one token of a map.

    Attributes:
        space: What they are.
        words: Their names.
        vectors: One for each name, ``(r, d)``.
    """

    space: Space
    words: Sequence[str]
    vectors: Tensor


class _ReadOut(NamedTuple):
    """``logits = U N(h) + c`` of a stream ``h``."""

    norm: Row
    weight: Float[Tensor, "v d"]
    output: Float[Tensor, "n d"]


@dataclass(frozen=True)
class Reader:
    """What moves of the tokens of a map, and of its outputs, are read as.

    - ``vocabulary``: where the layer's input is a sum with the token's vector, then a norm or
      none: ``N(s_i + E_w - E_t) - N(s_i)``, the move of putting the token w in the place of t.
    - ``read-out``: gradients of ``(U N_f(h))_w`` less its mean over all w at a stream h of a
      pre-norm model that ends in logits. For an input behind the layer's norm, of the least
      move of h that this norm turns into it.
    - ``window``: ``x_j - x_i``, towards the other tokens (or patches) of this input.

    The first that is so for this model and map, by its own values, is taken. The mean of the steps
    of ``vocabulary`` and ``window`` is one of them, under the name `ANY`.

    Args:
        built: The map.
        record: Its trace, with norms; None for a layer by itself.
        tokenizer: Of the model, or None.
        names: Of the tokens of the window.
    """

    built: LayerMap
    record: Trace | None
    tokenizer: Any
    names: Sequence[str]

    def right(self, i: int) -> Readings:
        """Readings of a move of input token ``i``."""
        built = self.built
        if self._vocabulary is not None:
            stream, table, ids, after = self._vocabulary
            moves = after(stream[i] + table - table[ids[i]]) - built.x[i]
            return _with_mean(self._ordinary("vocabulary", moves))
        stream = self._stream
        if stream is None or self._read_out is None:
            return self._window(built.x, i)
        if built.map in ("attention", "heads"):
            assert stream.norms is not None and stream.norms.before is not None
            inside = _jacobian(ExactNorm(stream.norms.before), stream.x[i])
            back = torch.linalg.pinv(inside.double(), rtol=_LEAST).to(inside)
            return self._logits(stream.x[i], back)
        if not close(built.x, stream.x):
            return self._window(built.x, i)
        return self._logits(stream.x[i])

    def left(self, i: int) -> Readings:
        """Readings of a move of output token ``i``."""
        built, stream, out = self.built, self._stream, self._read_out
        if stream is None or out is None:
            return self._window(built.output, i)
        if built.map == "model" and close(built.output, out.output):
            return self._ordinary("read-out", out.weight)
        if built.map in ("residual", "block", "stack"):
            return self._logits(built.output[i])
        added = stream.output - stream.x
        if built.map in ("attention", "normed") and built.output.shape == added.shape:
            same = (built.output - added).abs().max() <= 1e-4 * stream.output.abs().max()
            if bool(same):
                return self._logits(stream.output[i])
        return self._window(built.output, i)

    # --- the three spaces

    def _window(self, x: Tensor, i: int) -> Readings:
        others = [j for j in range(len(x)) if j != i]
        names = [self.names[j] if j < len(self.names) else str(j) for j in others]
        return _with_mean(Readings("window", names, x[others] - x[i]))

    def _logits(self, h: Tensor, back: Tensor | None = None) -> Readings:
        """Gradients at one token of the stream, or, through ``back``, at what follows from it."""
        assert self._read_out is not None
        inside = _jacobian(self._read_out.norm, h)
        inside = inside if back is None else inside @ back
        return self._ordinary("read-out", self._read_out.weight @ inside)

    def _ordinary(self, space: Space, vectors: Tensor) -> Readings:
        keep, words = self._words
        return Readings(space, words, vectors[: len(keep)][keep.to(vectors.device)])

    @cached_property
    def _words(self) -> tuple[Tensor, list[str]]:
        """Which ids are tokens of texts, and their names."""
        written, known = Written(self.tokenizer), self._vocabulary or self._read_out
        assert known is not None
        count = len(known[1])
        if hasattr(self.tokenizer, "__len__"):  # tables are padded
            count = min(count, len(self.tokenizer))
        keep = written.ordinary(count)
        return keep, written.names(keep.nonzero()[:, 0].tolist())

    # --- what is so for this model

    @cached_property
    def _vocabulary(self) -> tuple[Tensor, Tensor, Tensor, Row] | None:
        """Stream, vectors of all tokens, ids, and what leads on to the map's input."""
        record, built = self.record, self.built
        first = built.layer in (0, None) or built.map == "stack"
        if record is None or self.tokenizer is None or not first:
            return None
        call = record.calls[0]
        try:
            known = Embedded(record.model, record.inputs, record, 0)
        except InputError:
            return None
        norm = norm_before(record, call)
        stream = call.x if norm is None else as_tokens(norm.x, call.token_axis)
        after: Row = (lambda h: h) if norm is None else ExactNorm(norm.module)
        other, own = known.ids.roll(1), known.ids
        width = known.table.shape[1]
        if not stream.shape == built.x.shape == (len(own), width) or other.equal(own):
            return None
        with torch.no_grad():
            moves = after(stream + known.table[other] - known.table[own])
            reached = _near(known.read(other[None]).entering[0], moves)
        if reached and close(built.x, stream):
            return stream, known.table, own, lambda h: h
        found = reached and close(built.x, call.x)
        return (stream, known.table, own, after) if found else None

    @cached_property
    def _stream(self) -> LayerMap | None:
        """The map ``x + f(N(x))`` of a pre-norm layer, from the stream to the stream."""
        if self.record is None:
            return None
        try:
            found = build_map(self.record, self.built.layer or 0, "residual")
        except InputError:
            return None
        norms = found.norms
        if norms is None or norms.before is None or found.x.shape != self.built.x.shape:
            return None
        more = (norms.second, norms.scale, norms.outer)
        return found if all(one is None for one in more) else None

    @cached_property
    def _read_out(self) -> _ReadOut | None:
        """The final norm and the unembedding, centred, if the model ends in them."""
        if self.record is None or self.tokenizer is None or self._stream is None:
            return None
        head, output = _unembedding(self.record.model), self.record.output
        if head is None or output is None:
            return None
        call = self.record.calls[0]
        first = next((k for k, part in enumerate(call.name.split(".")) if part.isdigit()), 0)
        blocks = ".".join([*call.name.split(".")[:first], ""])
        outside = [n for n in self.record.norms if not (first and n.name.startswith(blocks))]
        weight = head.weight.detach().to(call.x)
        for norm in reversed(outside):
            y = as_tokens(norm.y, call.token_axis)
            takes_stream = self.record.seen.of(norm.x_place) is not None  # which is a sum
            if not takes_stream or not y.shape[-1] == weight.shape[1] == call.x.shape[-1]:
                continue
            ends = as_tokens(output, call.token_axis)
            with torch.no_grad():
                if close(ends, y) or (isinstance(head, nn.Linear) and _near(ends, head(y))):
                    return _ReadOut(ExactNorm(norm.module), weight - weight.mean(0), y)
        return None


def _with_mean(steps: Readings) -> Readings:
    """What all steps have in common, away from the token itself, as a reading of its own."""
    if not len(steps.words):
        return steps
    vectors = torch.cat([steps.vectors, steps.vectors.mean(0, keepdim=True)])
    return Readings(steps.space, [*steps.words, ANY], vectors)


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
    """Whether the language model of a configuration is this model and one matrix behind it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        head = model.get_output_embeddings()
    except Exception:  # each family has errors of its own: there is no such model
        return False
    parts = [one for one in model.children() if next(one.parameters(), None) is not None]
    return isinstance(head, nn.Linear) and len(parts) == 2 and head in parts


def _jacobian(f: Row, x: Float[Tensor, " d"]) -> Float[Tensor, "e d"]:
    """The Jacobian of a function of one token."""
    with torch.enable_grad():
        found = torch.autograd.functional.jacobian(lambda row: f(row[None])[0], x.detach())
    assert isinstance(found, Tensor)
    return found


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-4 * b.abs().max())
