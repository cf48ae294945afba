"""Where jobs are answered: one model at a time, one forward pass for all jobs of a window."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch

from lipscope.engine.answer import Question, answer
from lipscope.engine.ranges import parse_bytes
from lipscope.engine.rows import row_of
from lipscope.engine.sweep.built import asked, rebuilt
from lipscope.engine.sweep.plan import FUSED, Job, Shape, failed_rows, row_id
from lipscope.engine.sweep.spec import REAL, Spec
from lipscope.engine.sweep.wire import Result
from lipscope.errors import InputError
from lipscope.models import (
    LayerMap,
    LoadedModel,
    Sample,
    Trace,
    attention_sites,
    build_map,
    device_of,
    load_model,
    moved,
    overflows,
    prepared,
    reader_of,
    remarks_on,
    samples_of,
    trace,
)
from lipscope.records.folder import Finished


class Bench:
    """Answers the jobs of a sweep; what consecutive jobs share is computed once.

    Args:
        spec: The specification.
        texts: Content of every text.
    """

    def __init__(self, spec: Spec, texts: Mapping[str, str]) -> None:
        self.spec, self.texts = spec, texts
        self.device = device_of(spec.device)
        self.memory = parse_bytes(spec.memory)
        self._held: dict[str, tuple[Any, Any]] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        """Put the model back as it was, and let go of it."""
        self._stack.close()
        self._held.clear()

    def about(self, job: Job) -> dict[str, Any]:
        """Revision and weights of the job's model."""
        if job.weights is not None:
            return {"revision": None, "weights": "random"}
        loaded = self._loaded(job)
        return {"revision": loaded.revision, "weights": loaded.weights}

    def shape(self, job: Job) -> Shape:
        """Layers of the job's model, and its heads if they are measured one by one.

        Raises:
            InputError: If the model, a layer, a length or a map is not to be had.
        """
        record, heads = self._trace(job), None
        count = len(record.calls)
        for layer in self.spec.layers or ():
            if layer >= count:
                raise InputError(
                    f"`layers` should be between 0 and {count - 1} for "
                    f"`{self.spec.models[job.model].name}`. Found {layer}."
                )
        built = self._built(job)
        if self.spec.per_head:
            heads = built.num_heads
        return Shape(count, heads)

    def result(self, job: Job, shape: Shape) -> Result:
        """What becomes of a job; one that fails has rows that say so.

        Args:
            job: The job.
            shape: That of its model.

        Returns:
            Its rows with their side tables, and what the model is.
        """
        try:
            finished = self._answered(job)
        except Exception as problem:  # whatever it is, the other jobs go on
            kind = "" if isinstance(problem, InputError) else f"{type(problem).__name__}: "
            about = self._about_if_loaded(job)
            rows = failed_rows(self.spec, job, shape, f"{kind}{problem}", about)
            finished = [Finished(row) for row in rows]
        return Result(job.id, job.model, self._about_if_loaded(job), finished)

    def seconds(self, job: Job, shape: Shape) -> tuple[float, float]:
        """Time of the forward pass of a job's window, and of the job once that is done.

        Args:
            job: The job.
            shape: That of its model.
        """
        with suppress(Exception):  # a job that fails takes its time too
            self._prepared(job)
            self._item(job)
        self._held.pop("trace", None)
        began = time.perf_counter()
        with suppress(Exception):
            self._trace(job)
        between = time.perf_counter()
        self.result(job, shape)
        return between - began, time.perf_counter() - between

    def _answered(self, job: Job) -> list[Finished]:
        item, loaded = self._item(job), self._loaded(job)
        notes = [*self._prepared(job)[1], *remarks_on(loaded, item)]
        built, key = self._built(job), ""
        if job.input != REAL:
            built, item, remarks = rebuilt(built, item, job, self.spec)
            notes, key = notes + remarks, f"|{job.input}|{job.radius or ''}"
        model = self.spec.models[job.model]
        key = f"{model.name}|{job.layer}|{job.num_tokens}|{job.sample}{key}"
        question = self._question(job)
        rows = []
        for reply in answer(built, question, key):
            row = row_of(
                reply,
                id=row_id(job, reply.head),
                loaded=loaded,
                question=question,
                item=item,
                layer=job.layer,
                device=self.device,
                notes=notes,
            )
            row = replace(row, text=job.text, step=model.step)
            tokens = reply.token_shares(row.id, item.tokens) if self.spec.tokens else []
            rows.append(Finished(row, tuple(tokens), asked(row, built, self.spec)))
        return rows

    def _question(self, job: Job) -> Question:
        spec = self.spec
        return Question(
            map=job.map,
            per_head=spec.per_head,
            metric=job.metric,
            move=spec.move,
            read=spec.read,
            rest=spec.rest,
            average=spec.average,
            tol=spec.tol,
            delta=spec.delta,
            tight=spec.tight,
            dtype=getattr(torch, job.dtype),
            seed=job.seed,
            memory=self.memory,
        )

    def _once(self, what: str, key: Any, make: Any) -> Any:
        """What was made for this key; anything made for another one is let go first."""
        if self._held.get(what, (None, None))[0] != key:
            self._held.pop(what, None)
            try:
                self._held[what] = (key, make())
            except Exception as problem:
                if what != "model":
                    raise
                self._held[what] = (key, problem)  # not to be loaded again for every job
        found = self._held[what][1]
        if isinstance(found, Exception):
            raise found
        return found

    def _loaded(self, job: Job) -> LoadedModel:
        def load() -> LoadedModel:
            self.close()
            name = self.spec.models[job.model].name
            return load_model(name, seed=job.weights or 0, allow_pickle=self.spec.allow_pickle)

        return self._once("model", (job.model, job.weights), load)

    def _about_if_loaded(self, job: Job) -> dict[str, Any]:
        held = self._held.get("model", (None, None))
        if held[0] != (job.model, job.weights) or isinstance(held[1], Exception):
            return {}
        return self.about(job)

    def _prepared(self, job: Job) -> tuple[torch.nn.Module, list[str]]:
        loaded = self._loaded(job)

        def prepare() -> tuple[torch.nn.Module, list[str]]:
            self._stack.close()
            self._held.pop("trace", None)
            sites = attention_sites(loaded.model, self.spec.modules)
            closed = job.fused and all(reader_of(site) for site in sites.values())
            return self._stack.enter_context(
                prepared(
                    loaded.model,
                    dtype=getattr(torch, job.dtype),
                    device=self.device,
                    implementation="sdpa" if closed else "eager",
                )
            )

        return self._once("prepared", job[1:5], prepare)

    def _item(self, job: Job) -> Sample:
        loaded, spec = self._loaded(job), self.spec

        def cut() -> dict[tuple[int | None, int], Sample]:
            text = self.texts[job.text]
            found = samples_of(
                loaded, text, spec.lengths, spec.samples, spec.windows, spec.special_tokens
            )
            return {(one.num_tokens, one.sample): one for one in found}

        windows = self._once("text", (job.model, job.weights, job.text), cut)
        return windows[job.num_tokens, job.sample]

    def _trace(self, job: Job) -> Trace:
        model, item = self._prepared(job)[0], self._item(job)
        maps = [name for name in self.spec.maps if (name in FUSED) == job.fused]

        def run() -> Trace:
            self._held.pop("map", None)
            dtype = getattr(torch, job.dtype)
            record = trace(
                model,
                moved(item.arguments, self.device, dtype),
                attention_sites(model, self.spec.modules),
                norms=bool({"normed", "residual"} & set(maps)),
                blocks=bool({"block", "model"} & set(maps)),
                dtype=dtype,
            )
            record.remarks = overflows(self._loaded(job).model, item, self.spec.modules)
            return record

        return self._once("trace", job.window, run)

    def _built(self, job: Job) -> LayerMap:
        record = self._trace(job)

        def build() -> LayerMap:
            per_head = self.spec.per_head
            return build_map(record, job.layer, job.map, memory=self.memory, per_head=per_head)

        return self._once("map", (*job.window, job.map, job.layer), build)
