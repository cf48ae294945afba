"""A map of a layer at an input: what every verb is asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.engine.answer import answer
from lipscope.engine.direction_words import worded
from lipscope.engine.plan import Job
from lipscope.engine.ranges import COPIES
from lipscope.engine.ready_model import Last, ReadyModel, Setting, Window
from lipscope.engine.result import Answer
from lipscope.engine.rows import row_of
from lipscope.engine.spec import REAL, Spec
from lipscope.engine.synthetic_inputs import (
    BuiltInput,
    asked,
    built_input,
    front_of,
    moved_to,
    on_all_inputs,
)
from lipscope.engine.text_gradients import Texts, texts_for, turned
from lipscope.errors import InputError, memory_for
from lipscope.linalg import Operator
from lipscope.models import ExactNorm, LayerMap, Norms, Sample, norm_before, why_run
from lipscope.records import Direction, Finished, Measurement
from lipscope.theorems import Normed, Residual, norm_of, radius_of_norm

_MASKS = {
    True: "run with a causal mask in every layer",
    False: "run without a causal mask",
}


@runtime_checkable
class Asking(Protocol):
    """What a map at an input has to know of whoever asks."""

    spec: Spec
    memory: int
    texts: Last[Setting, Texts]

    def first(self, job: Job) -> bool:
        """Whether its input is the first one of its length."""
        ...

    def of_inputs(self, job: Job) -> tuple[float | None, float | None]:
        """Largest token norm over all inputs of a layer; the smallest with a norm in front."""
        ...


class _Solved(NamedTuple):
    """Which answers a window holds."""

    job: Job
    per_head: bool
    rest: bool
    average: bool
    directions: int


class MapAtInput:
    """A map of a model's layer at an input, with everything that verbs want to know of it.

    What is asked for is computed once, when it is first asked for; the model is ready while
    that happens, and as it was found afterwards.

    Args:
        asking: Whose specification says what is asked.
        job: Which map, which input.
        window: The model at the input that was given.
        given: The map there, if it was built before.
    """

    def __init__(
        self, asking: Asking, job: Job, window: Window, given: LayerMap | None = None
    ) -> None:
        self.asking, self.job, self.window = asking, job, window
        if given is not None:
            self.__dict__["given"] = given

    # --- what it is

    @property
    def spec(self) -> Spec:
        """What is asked."""
        return self.asking.spec

    @property
    def model(self) -> ReadyModel:
        """The model."""
        return self.window.model

    @property
    def layer(self) -> int | None:
        """Index from 0; None for the map ``model``."""
        return self.job.layer

    @property
    def sample(self) -> int:
        """Index of the window, or of the entry of a batch."""
        return self.job.sample

    @property
    def id(self) -> str:
        """Digest of the question, the same whichever verb asks it."""
        return self.rows[0].id

    @cached_property
    def given(self) -> LayerMap:
        """The map at the input that was given, padding held fixed."""
        held = self.window.maps.pop((self.job.layer, self.job.map), None)
        return held or self.window.map(
            self.job.layer,
            self.job.map,
            memory=self.asking.memory,
            per_head=self.spec.per_head,
        )

    @cached_property
    def _place(self) -> tuple[LayerMap, Sample, list[str]]:
        notes = self.window.notes()
        if self.spec.causal is not None:
            notes.append(_MASKS[self.spec.causal])
        if self.job.input == REAL:
            return self.given, self.window.sample, notes
        made = self.built_input
        with self.window.ready():
            moved = moved_to(self.given, self.window.sample, self.job, made.x)
        return *moved, [*notes, made.remark]

    @property
    def map(self) -> LayerMap:
        """The map, with its input: the one that was given, or the one that was built."""
        return self._place[0]

    @property
    def item(self) -> Sample:
        """The input of the model, as rows name it."""
        return self._place[1]

    @property
    def remarks(self) -> list[str]:
        """What rows say of the model, the input and the reach of bounds."""
        return [*self._place[2], *self._reach()]

    @property
    def x(self) -> Float[Tensor, "n d"]:
        """Input of the map."""
        return self.map.x

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens in the model's own words; their indices where it has none."""
        own = self.item.tokens
        return own if own and len(own) == len(self.x) else tuple(map(str, range(len(self.x))))

    def __call__(self, x: Float[Tensor, "n d"]) -> Tensor:
        """The map at another input."""
        with self.window.ready():
            return self.map(x)

    def linearise(self, x: Float[Tensor, "n d"] | None = None) -> Operator:
        """The Jacobian at the input, or at another one; the model is ready during its products."""
        with self.window.ready():
            found = self.map.linearise(self.x if x is None else x, memory=self.asking.memory)

        def ready(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def inside(vector: Tensor) -> Tensor:
                with self.window.ready():
                    return product(vector)

            return inside

        return replace(found, matvec=ready(found.matvec), rmatvec=ready(found.rmatvec))

    # --- what theorems see

    @cached_property
    def for_theorems(self) -> Attention | Normed | Residual:
        """The layer as theorems see it: with the norms of the maps ``normed`` and ``residual``.

        Raises:
            InputError: If its weights are not read in closed form.
        """
        built = self.given
        if built.attention is None:
            why = "it is not known"
            if not self.model.is_layer:
                why = why_run(self.window.trace.calls[self.job.layer or 0].module)
            raise InputError(
                f"Weight-based bounds are not available for this layer, because {why}. "
                "`lipscope measure` measures it."
            )
        if built.norms is not None:
            return _residual(built.attention, built.norms)
        if self.job.map != "normed":
            return built.attention
        assert self.norm is not None  # else the map does not exist
        return Normed(built.attention, ExactNorm(self.norm))

    @property
    def attention(self) -> Attention:
        """The attention layer in closed form.

        Raises:
            InputError: If its weights are not read in closed form.
        """
        found = self.for_theorems
        branch = found.branch if isinstance(found, Residual) else found
        return branch.attention if isinstance(branch, Normed) else branch

    @cached_property
    def norm(self) -> nn.Module | None:
        """The normalisation that feeds the layer, or None."""
        if self.model.is_layer:
            return None
        record = self.window.trace
        found = norm_before(record, record.calls[self.job.layer or 0])
        return None if found is None else found.module

    @property
    def radius(self) -> float:
        """Largest token norm of the input."""
        return float(torch.linalg.vector_norm(self.x, dim=-1).max())

    def radius_of_norm(self) -> float:
        """Largest norm that a token can have after the norm that feeds the layer.

        Raises:
            InputError: If there is no such norm, or it is neither RMSNorm nor LayerNorm.
        """
        if self.norm is None:
            raise InputError(
                "`radius = norm` needs a norm that feeds the layer. Found none before layer "
                f"{self.job.layer}; give a number."
            )
        return radius_of_norm(norm_of(self.norm, self.given.x.shape[1]))

    @cached_property
    def allowed(self) -> tuple[float | None, float | None]:
        """Of which tokens bounds on all inputs speak: up to a radius, or from a norm on."""
        radius = self.spec.radius
        layer = self.for_theorems
        if radius == "inputs":
            return self.asking.of_inputs(self.job)
        if front_of(layer) is not None:
            if radius != "row":
                raise InputError(
                    "`radius` should be left out for a layer with a norm in front, whose bounds "
                    f"hold for tokens of every norm. Found `radius = {radius}`."
                )
            return None, None
        if radius == "norm":
            return self.radius_of_norm(), None
        return (None if radius == "row" else float(radius)), None

    @property
    def size(self) -> float:
        """Largest token norm of the input; the smallest with a norm in front."""
        front, x = front_of(self.for_theorems), self.given.x
        return float(x.norm(dim=-1).max() if front is None else front.constants.size(x).min())

    @cached_property
    def built_input(self) -> BuiltInput:
        """The input that the job builds, within the radius of which bounds on all inputs speak."""
        job, built = self.job._replace(metric="", id=""), self.given

        def make() -> BuiltInput:
            radius = self.allowed[0] if job.radius is None else job.radius
            largest = float(torch.linalg.vector_norm(built.x, dim=-1).max())
            with self.window.ready():
                return built_input(built, job, self.spec, radius or largest)

        return self.window.built_inputs.get((job, self.spec.ascent_steps, self.spec.radius), make)

    def _reach(self) -> list[str]:
        """Of which tokens bounds through a norm in front speak, if any are asked for."""
        if not self.spec.theorems or self.map.attention is None:
            return []
        named = self.job.map in ("normed", "residual")
        layer = self.for_theorems if named else self.map.attention
        if front_of(layer) is None:
            return []
        return [on_all_inputs(layer, self.x, self.allowed[1])]

    # --- answers

    @property
    def answers(self) -> list[Answer]:
        """What the map, or each of its heads, answers: singular vectors included."""
        spec, job = self.spec, self.job
        key = f"{spec.models[job.model].name}|{job.layer}|{job.num_tokens or ''}|{job.sample}"
        if job.input != REAL:
            key += f"|{job.input}|{job.radius or ''}"
        whole_tokens = spec.move != COPIES  # the model itself has no copies

        def make() -> list[Answer]:
            with self.window.ready():
                check = self.asking.first(job) and whole_tokens
                reference = self.window.reference(self.map) if check else None
                return answer(self.map, spec, job, self.asking.memory, key, reference)

        asked_for = _Solved(job, spec.per_head, spec.rest, spec.average, spec.directions)
        return self.window.answers.get(asked_for, make)

    @cached_property
    def finished(self) -> list[Finished]:
        """The rows, each with its side tables.

        Raises:
            InputError: If it cannot be answered as asked.
        """
        found, about = [], self.model.loaded.about
        remarks, device = self.remarks, self.window.device.type
        for reply in self.answers:
            row = row_of(
                self.spec,
                self.job,
                reply,
                about,
                of=self.map,
                item=self.item,
                device=device,
                notes=remarks,
            )
            tokens = reply.token_shares(row.id, self.item.tokens) if self.spec.tokens else []
            bounds = self._bounds(row) if self.spec.theorems else ()
            with memory_for("The readings of a whole vocabulary", self.job.dtype):
                parts = self._worded(row, reply)
            found.append(Finished(row, tuple(tokens), bounds, parts))
        return found

    @property
    def rows(self) -> list[Measurement]:
        """The row of all heads together, or one for each head."""
        return [one.row for one in self.finished]

    def _bounds(self, row: Measurement) -> tuple[Any, ...]:
        with self.window.ready():
            return asked(row, self.map, self.spec, lambda: (self.for_theorems, self.allowed))

    def _worded(self, row: Measurement, reply: Answer) -> tuple[Direction, ...]:
        if not reply.leading:
            return ()
        model, window = self.model, self.window
        record = None if model.is_layer else window.trace
        with window.ready() as ready:
            whole = None if record is None else window.with_head(ready)
            about = (self.map, row.id, model.loaded, self.item, record, self.asking.memory, whole)
            found = (*worded(reply.leading, *about),)
            if not self.spec.among:
                return found
            among = (self.spec.among, model.loaded, record, self.spec.special_tokens)
            texts = self.asking.texts.get(window.setting, lambda: texts_for(*among))
            assert record is not None  # or there are no texts for it
            return (*found, *turned(reply.leading, self.map, row.id, record, texts))


def _residual(layer: Attention, norms: Norms) -> Residual:
    """Attention with its norms, each in the precision of what it takes, added to its input.

    A scale is taken into the output projection, or into the norm that takes the attention's output.
    """
    before, outer = (None if one is None else ExactNorm(one) for one in (norms.before, norms.outer))
    second = None if norms.second is None else ExactNorm(norms.second, norms.scale)
    if norms.scale is not None and second is None:
        layer = _scaled(layer, norms.scale.double().cpu())
    return Residual(layer if before is None else Normed(layer, before), second, outer)


def _scaled(layer: Attention, scale: Tensor) -> Attention:
    """The layer in float64, its output times one number or one for every channel."""
    layer = layer.in_double()
    fields = layer.fields()
    concat, bias = layer.num_heads * layer.value_width, fields.get("output_bias")
    output = torch.eye(concat, dtype=torch.float64) if layer.output is None else layer.output
    changes: dict[str, Tensor] = {"output": scale.reshape(-1, 1) * output}
    if bias is not None:
        changes["output_bias"] = scale * bias
    return layer.replace(**changes)
