"""Readings of a move of one token: another token in its place, logits, its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lipscope.errors import InputError
from lipscope.models.data.window_decoder import Written
from lipscope.models.tracing.calls import Trace, as_tokens
from lipscope.models.tracing.embedded import Embedded
from lipscope.models.tracing.logit_lens import Lens, Row, lens_of, near
from lipscope.models.tracing.maps import LayerMap, build_map
from lipscope.models.tracing.prepare import ExactNorm
from lipscope.models.tracing.residual import norm_before
from lipscope.models.tracing.sums import close

Space = Literal["vocabulary", "read-out", "window"]
ANY = "(any other)"
_LEAST = 1e-3  # of its largest stretch: what a norm shrinks more is not taken back through it
_ROUNDING = 1e-5  # of a token's norm


class Readings(NamedTuple):
    """Directions with names, in the space of one token of a map.

    Attributes:
        space: What they are.
        words: Their names; one more than vectors are asked for is that of their mean.
        vectors: From indices to vectors, ``(r,)`` to ``(r, d)``: a table can be large.
        least: Up to which norm a vector is rounding, and no direction.
        copies: How many such vectors it takes to make one.
    """

    space: Space
    words: Sequence[str]
    vectors: Callable[[Int[Tensor, " r"]], Float[Tensor, "r d"]]
    least: float = 0.0
    copies: int = 2

    @property
    def size(self) -> int:
        """How many vectors there are."""
        return len(self.words) - (self.words[-1:] == [ANY])


@dataclass(frozen=True)
class Reader:
    """What moves of the tokens of a map, and of its outputs, are read as.

    - ``vocabulary``: where the layer's input is a sum with the token's vector, then a norm or
      none: ``N(s_i + E_w - E_t) - N(s_i)``, the move of replacing the token t by w.
    - ``read-out``: gradients of ``(U g(N_f(h)))_w`` less its mean over all w at a stream h of a
      model that ends in logits: of a decoder, or of an encoder that fills in words, with the layers
      g of its head. For an input after the layer's norm, of the least move of h that this
      norm turns into it; for an output that a norm takes with the stream, through that norm;
      for scores, a single score less the mean of all.
    - ``window``: ``x_j - x_i``, towards the other tokens (or patches) of this input.

    The first that is so for this model and map, by its own values, is taken. The mean of the steps
    of ``vocabulary`` and ``window`` is one of them, under the name `ANY`.

    Args:
        built: The map.
        record: Its trace, with norms; None for a layer by itself.
        tokenizer: Of the model, or None.
        names: Of the tokens of the window.
        whole: The model with the head that its checkpoint holds, where it was loaded without.
    """

    built: LayerMap
    record: Trace | None
    tokenizer: Any
    names: Sequence[str]
    whole: nn.Module | None = None

    def right(self, i: int) -> Readings:
        """Readings of a move of input token ``i``."""
        built = self.built
        if self._vocabulary is not None:
            stream, known, after = self._vocabulary
            own = known.vectors(known.ids[i : i + 1])

            def moves(ids: Tensor) -> Tensor:
                with torch.no_grad():
                    return after(stream[i] + known.vectors(ids) - own) - built.x[i]

            words = self._ordinary("vocabulary", moves, 4)
            return words._replace(words=[*words.words, ANY], least=_rounding(built.x[i]))
        stream = self._stream
        if stream is None or self._lens is None:
            return self._window(built.x, i)
        before = stream.norms.before if stream.norms else None
        if built.map in ("attention", "heads") and before is not None:
            inside = _jacobian(ExactNorm(before), stream.x[i])
            back = torch.linalg.pinv(inside.double(), rtol=_LEAST).to(inside)
            return self._logits(stream.x[i], back)
        if not close(built.x, stream.x):
            return self._window(built.x, i)
        return self._logits(stream.x[i])

    def left(self, i: int) -> Readings:
        """Readings of a move of output token ``i``."""
        built, stream, lens = self.built, self._stream, self._lens
        if built.map == "logits" or stream is None or lens is None:
            return self._scores() if built.map == "logits" else self._window(built.output, i)
        if built.map == "model" and close(built.output, lens.output):
            return self._logits(built.output[i], inner=lens.head)
        if built.map in ("residual", "block", "stack"):
            return self._logits(built.output[i])
        if built.map not in ("attention", "normed") or built.output.shape != stream.x.shape:
            return self._window(built.output, i)
        total, outer = stream.x + built.output, stream.norms.outer if stream.norms else None
        after = ExactNorm(outer) if outer is not None else lambda h: h
        with torch.no_grad():
            added = (after(total) - stream.output).abs().max() <= 1e-4 * stream.output.abs().max()
        if not bool(added):
            return self._window(built.output, i)
        return self._logits(total[i], inner=lambda h: lens.inner(after(h)))

    # --- the three spaces

    def _window(self, x: Tensor, i: int) -> Readings:
        others = torch.tensor([j for j in range(len(x)) if j != i], device=x.device)
        names = [self.names[j] if j < len(self.names) else str(j) for j in others.tolist()]
        words = [*names, ANY] if names else []
        return Readings("window", words, lambda k: x[others[k]] - x[i], _rounding(x[i]))

    def _scores(self) -> Readings:
        """Single scores less the mean of all, by the names of their classes or tokens."""
        count = self.built.output.shape[-1]
        ids, names = torch.arange(count), [str(i) for i in range(count)]
        labels = getattr(getattr(self.record and self.record.model, "config", None), "id2label", {})
        if len(labels) == count:
            names = [str(labels[i]) for i in range(count)]
        elif self.tokenizer is not None and count > 1 and len(self.built.output) > 1:
            written = Written(self.tokenizer)
            ids = written.ordinary(min(count, _size(self.tokenizer, count))).nonzero()[:, 0]
            names = written.names(ids.tolist())
        like = self.built.output
        ids = ids.to(like.device)

        def vectors(k: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(ids[k], count).to(like) - 1 / count

        return Readings("read-out", names, vectors, copies=3)

    def _logits(self, h: Tensor, back: Tensor | None = None, inner: Row | None = None) -> Readings:
        """Gradients at one token of the stream, or, through ``back``, at what follows from it."""
        lens = self._lens
        assert lens is not None
        inside = _jacobian(inner or lens.inner, h)
        inside = inside if back is None else inside @ back
        mean = lens.weight.mean(0).to(h)
        return self._ordinary("read-out", lambda ids: (lens.weight[ids].to(h) - mean) @ inside, 3)

    def _ordinary(self, space: Space, vectors: Row, copies: int) -> Readings:
        ids, words = self._words
        return Readings(space, words, lambda k: vectors(ids[k]), copies=copies)

    @cached_property
    def _words(self) -> tuple[Tensor, list[str]]:
        """Ids of tokens of texts, and their names."""
        written = Written(self.tokenizer)
        if self._vocabulary is not None:
            count = self._vocabulary.embedded.size
        else:
            assert self._lens is not None
            count = len(self._lens.weight)
        count = min(count, _size(self.tokenizer, count))
        ids = written.ordinary(count).nonzero()[:, 0]
        return ids.to(self.built.x.device), written.names(ids.tolist())

    # --- what is so for this model

    @cached_property
    def _vocabulary(self) -> _Entering | None:
        """How tokens enter the map's input, if its layer is the first."""
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
        vectors = known.vectors(own)
        if not stream.shape == built.x.shape == vectors.shape or other.equal(own):
            return None
        with torch.no_grad():
            moves = after(stream + vectors.roll(1, 0) - vectors)
            reached = near(known.read(other[None]).entering[0], moves)
        if reached and close(built.x, stream):
            return _Entering(stream, known, lambda h: h)
        found = reached and close(built.x, call.x)
        return _Entering(stream, known, after) if found else None

    @cached_property
    def _stream(self) -> LayerMap | None:
        """``x + f(N(x))`` of a pre-norm layer, ``N(x + f(x))`` of a post-norm one."""
        if self.record is None:
            return None
        try:
            found = build_map(self.record, self.built.layer or 0, "residual")
        except InputError:
            return None
        norms = found.norms
        if norms is None or found.x.shape != self.built.x.shape:
            return None
        one = (norms.before is None) != (norms.outer is None)
        return found if one and norms.second is None and norms.scale is None else None

    @cached_property
    def _lens(self) -> Lens | None:
        """The logits that a stream would have, if the model ends in logits."""
        if self.record is None or self.tokenizer is None or self._stream is None:
            return None
        return lens_of(self.record, self.whole)


class _Entering(NamedTuple):
    """Tokens on their way into a first layer: the stream, their vectors, what leads on."""

    stream: Tensor
    embedded: Embedded
    after: Row


def _size(tokenizer: Any, count: int) -> int:
    """Ids that a tokenizer knows: tables are padded."""
    return len(tokenizer) if hasattr(tokenizer, "__len__") else count


def _rounding(x: Tensor) -> float:
    return _ROUNDING * float(x.norm())


def _jacobian(f: Row, x: Float[Tensor, " d"]) -> Float[Tensor, "e d"]:
    """The Jacobian of a function of one token."""
    with torch.enable_grad():
        found = torch.autograd.functional.jacobian(lambda row: f(row[None])[0], x.detach())
    assert isinstance(found, Tensor)
    return found
