"""The one verb: measure the local Lipschitz constant of a model's attention on an input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lipscope.engine.answer import Answer, Question, answer
from lipscope.engine.ranges import parse_bytes, parse_tokens
from lipscope.engine.rows import named, row_of, source_of
from lipscope.errors import InputError, memory_for
from lipscope.models import (
    MAPS,
    SIDES,
    LayerMap,
    LoadedModel,
    Sample,
    Side,
    Trace,
    adopt_model,
    attention_sites,
    build_map,
    check_request,
    device_of,
    implementation_for,
    inputs_of,
    later_positions,
    load_model,
    moved,
    overflows,
    prepared,
    reader_of,
    remarks_on,
    trace,
    without_padding,
)
from lipscope.models.data.windows import WindowKind
from lipscope.pages.rows import Rows
from lipscope.records.folder import RunFolder
from lipscope.records.rows import Measurement, TokenShare, provenance, stable_id

Progress = Callable[[int, int, Measurement | None], None]
Metric = Literal["frobenius", "token-relative"]
METRICS = ("frobenius", "token-relative")
_CLOSED_MAPS = ("heads", "attention", "normed", "residual")


def measure(
    model: str | nn.Module | LoadedModel = "minilm",
    data: str | Tensor | Mapping[str, Any] | None = None,
    *,
    layers: Sequence[int] | Literal["all"] = "all",
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    windows: WindowKind = "spread",
    special_tokens: bool = True,
    map: str = "attention",
    per_head: bool = False,
    metric: Metric = "frobenius",
    move: str = "all",
    read: str = "all",
    side: Side = "self",
    position_offset: int = 0,
    images: str | Path | None = None,
    resolutions: Sequence[int] | None = None,
    rest: bool = False,
    average: bool = False,
    tol: float = 1e-3,
    delta: float = 1e-6,
    tight: bool = False,
    dtype: Literal["float32", "float64"] | None = None,
    device: str = "auto",
    seed: int = 0,
    memory: int | str = "1GiB",
    out: str | Path | None = None,
    modules: str | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Rows:
    """Measure sigma, the local Lipschitz constant of attention, on real inputs.

    ``sigma = max ‖R J D e‖_F / ‖e‖_F`` over moves ``e`` of the tokens in ``move``, where ``J`` is
    the Jacobian of the map at the captured input, ``R`` reads the tokens in ``read`` and
    ``D`` is the metric. Every row carries the interval ``[sigma, upper]``, valid with probability
    ``1 - delta``.

    Holds for any model whose attention modules can be found. Dropout is switched off.

    Args:
        model: A name for `load_model`, a loaded model, or a torch module.
        data: Text, or a batch for a module: input ids (integers), input embeddings
            (3 axes) or pixel values (4 axes), or a mapping of keyword arguments. The default
            text if None.
        layers: Layer indices from 0, or "all".
        lengths: Numbers of tokens of the text windows; 16, 64, 256 if None.
        samples: Windows per length, or pictures; 10 if None.
        windows: ``spread`` over the text, or ``consecutive``.
        special_tokens: Put the model's own special tokens around each window.
        map: ``heads``, ``attention``, ``normed``, ``residual``, ``block`` or ``model``.
        per_head: One row per query head.
        metric: ``frobenius``, or ``token-relative`` (each token's move in proportion to its norm).
        move: Tokens that may move: ``all``, ``first``, ``last``, ``not-first``, ``a:b`` (both
            included).
        read: Output tokens that are read, likewise.
        side: ``self``, or the layers of cross-attention instead, moved through their ``query``
            side (the decoder's stream) or their ``key`` side (encoder states, retrieved
            passages) while the other stays.
        position_offset: Position ids start this much later, to tell length from position.
        images: Pictures instead of a text: a folder, or ``random`` pixels.
        resolutions: Sides of the pictures in pixels; the model's own if None.
        rest: Also sigma with the most sensitive token held fixed.
        average: Also ``‖J‖_F`` by random probes.
        tol: Relative tolerance of the stopping rule.
        delta: Failure probability of each interval.
        tight: Go on, in float64, until ``upper <= (1 + tol) sigma``.
        dtype: ``float32`` unless ``tight``.
        device: ``auto`` takes a GPU where there is one.
        seed: Seed of the random starts.
        memory: Budget for chunks, stored probabilities and the solver's basis.
        out: Run folder; an interrupted run there is continued.
        modules: Regular expression for the attention modules, searched in their paths.
        tokenizer: Tokenizer for a module of your own that reads text.
        revision: Revision of a hub id.
        allow_pickle: Accept a checkpoint that exists only as a pickle.
        progress: Called as ``progress(done, total, row)``.

    Returns:
        The rows, in order of length, sample, layer and head.

    Raises:
        InputError: For every request that cannot be answered as asked.

    Source: the local Lipschitz constant of [castin2024], Section 3; interval derived here.

    >>> import lipscope as ls
    >>> rows = ls.measure("minilm", layers=[0], lengths=[16], samples=1)
    >>> rows[0].status, rows[0].sigma < rows[0].upper
    ('converged', True)
    """
    question = Question(
        map=_one_of("map", map, MAPS),
        per_head=per_head,
        metric=_one_of("metric", metric, METRICS),
        move=move,
        read=read,
        rest=rest,
        average=average,
        tol=tol,
        delta=delta,
        tight=tight,
        dtype=_dtype(dtype, tight),
        seed=seed,
        memory=parse_bytes(memory),
        side=_one_of("side", side, SIDES),
        position_offset=position_offset,
    )
    known = isinstance(model, LoadedModel)
    loaded = model if known else _loaded(model, tokenizer, revision, seed, allow_pickle)
    inputs = inputs_of(
        loaded,
        data,
        lengths=lengths,
        samples=samples,
        windows=windows,
        special_tokens=special_tokens,
        images=images,
        resolutions=resolutions,
        position_offset=position_offset,
    )
    for item in inputs:
        if item.num_tokens is not None:
            parse_tokens(move, item.num_tokens, "move")
            parse_tokens(read, item.num_tokens, "read")
    run = _Run(loaded, inputs, question, device_of(device), modules, progress)
    return run.carry_out(layers, out, windows, source_of(data, images))


def _one_of(name: str, value: Any, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise InputError(f"`{name}` should be one of {', '.join(choices)}. Found `{value}`.")
    return value


def _dtype(name: str | None, tight: bool) -> torch.dtype:
    name = name or ("float64" if tight else "float32")
    if name not in ("float32", "float64"):
        raise InputError(f"`dtype` should be float32 or float64. Found `{name}`.")
    if tight and name == "float32":
        raise InputError("`tight` intervals need float64. Found `dtype = float32`; leave it out.")
    return torch.float64 if name == "float64" else torch.float32


def _loaded(
    model: str | nn.Module, tokenizer: Any, revision: str | None, seed: int, allow_pickle: bool
) -> LoadedModel:
    if isinstance(model, nn.Module):
        return adopt_model(model, tokenizer)
    loaded = load_model(model, revision=revision, seed=seed, allow_pickle=allow_pickle)
    return loaded if tokenizer is None else replace(loaded, tokenizer=tokenizer)


class _Run:
    """All measurements of one call: probe the model, plan the rows, answer them."""

    def __init__(
        self,
        loaded: LoadedModel,
        inputs: list[Sample],
        question: Question,
        device: torch.device,
        modules: str | None,
        progress: Progress | None,
    ) -> None:
        self.loaded, self.inputs, self.question = loaded, inputs, question
        self.named = named(loaded)
        self.device, self.modules, self.progress = device, modules, progress
        self.sites = attention_sites(loaded.model, modules, side=question.side)
        self.probed: dict[int | None, LayerMap] = {}  # the maps of the first input
        closed = all(reader_of(m) for m in self.sites.values()) and question.map in _CLOSED_MAPS
        self.implementation = implementation_for(loaded.model, closed=closed)

    def carry_out(
        self, layers: Sequence[int] | str, out: Any, windows: WindowKind, source: dict[str, str]
    ) -> Rows:
        with (
            prepared(
                self.loaded.model,
                dtype=self.question.dtype,
                device=self.device,
                implementation=self.implementation,
            ) as (model, notes),
            contextlib.ExitStack() as stack,
        ):
            for moved_on in {model, self.loaded.model}:
                stack.enter_context(later_positions(moved_on, self.question.position_offset))
            self.sites = attention_sites(model, self.modules, side=self.question.side)
            self.notes = [*notes, *remarks_on(self.loaded, self.inputs[0])]
            first = self._trace(model, self.inputs[0])
            chosen = self._layers(first, layers)
            longest = max(i.num_tokens or first.calls[0].num_tokens for i in self.inputs)
            for layer in chosen:
                check_request(first, layer, self.question.map, longest, self.question.memory)
            heads = [self._heads(first, layer) for layer in chosen]
            one = self.probed[chosen[0]]
            parse_tokens(self.question.move, len(one.x), "move")
            parse_tokens(self.question.read, len(one.output), "read")
            folder = self._folder(out, chosen, windows, source)
            finished: dict[str, Measurement] = dict(folder.done) if folder else {}
            kept: list[TokenShare] = folder.tokens() if folder else []
            if folder is not None:
                folder.add_model(self.loaded.name, self.named)
            with folder or contextlib.nullcontext():
                for row, tokens in self._rows(model, chosen, heads, finished, first):
                    if folder is not None:
                        folder.append(row, tokens)
                    finished[row.id] = row
                    kept.extend(tokens)
        order = [i for item in self.inputs for i in self._ids(item, chosen, heads)]
        return Rows([finished[i] for i in order], tokens=kept, windows=windows)

    @memory_for("The model's own forward pass")
    def _trace(self, model: nn.Module, item: Sample) -> Trace:
        q = self.question
        record = trace(
            model,
            moved(item.arguments, self.device, q.dtype),
            self.sites,
            norms=q.map in ("normed", "residual"),
            blocks=q.map in ("block", "model"),
            dtype=q.dtype,
            side=q.side,
        )
        record.remarks = overflows(self.loaded.model, item, self.modules, q.side)
        return record

    def _layers(self, record: Trace, layers: Sequence[int] | str) -> list[int | None]:
        if self.question.map == "model":
            return [None]
        count = len(record.calls)
        chosen = list(range(count)) if layers == "all" else [int(i) for i in layers]
        if not chosen:
            raise InputError("`layers` should name at least one layer. Found none.")
        for layer in chosen:
            if not 0 <= layer < count:
                raise InputError(
                    f"`layers` should be between 0 and {count - 1} for `{self.loaded.name}`. "
                    f"Found {layer}."
                )
        return list(dict.fromkeys(chosen))

    @memory_for("The layer's own forward pass")
    def _build(self, record: Trace, layer: int | None) -> LayerMap:
        q = self.question
        built = build_map(record, layer, q.map, memory=q.memory, per_head=q.per_head)
        return without_padding(built, record)

    def _heads(self, record: Trace, layer: int | None) -> int | None:
        """Number of heads to measure one by one, or None for all together.

        Building the map here also finds a map that the model does not have, and one that the
        memory does not allow, before anything is written.
        """
        built = self.probed[layer] = self._build(record, layer)
        return built.num_heads if self.question.per_head else None

    def _ids(
        self, item: Sample, layers: Sequence[int | None], heads: Sequence[int | None]
    ) -> Iterator[str]:
        for layer, count in zip(layers, heads, strict=True):
            for head in [None] if count is None else range(count):
                yield self._id(item, layer, head)

    def _id(self, item: Sample, layer: int | None, head: int | None) -> str:
        return stable_id(
            {
                **self.named,
                "modules": self.modules,
                "layer": layer,
                "head": head,
                "tokens": item.sha256,
                "sample": item.sample,
                "start": item.start,
                **self.question.as_spec(),
            }
        )

    def _rows(
        self,
        model: nn.Module,
        layers: list[int | None],
        heads: list[int | None],
        finished: Mapping[str, Measurement],
        first: Trace,
    ) -> Iterator[tuple[Measurement, list[TokenShare]]]:
        total = sum(h or 1 for h in heads) * len(self.inputs)
        done = sum(i in finished for item in self.inputs for i in self._ids(item, layers, heads))
        self._tell(done, total, None)
        for item in self.inputs:
            if all(i in finished for i in self._ids(item, layers, heads)):
                continue
            record = first if item is self.inputs[0] else self._trace(model, item)
            for layer, count in zip(layers, heads, strict=True):
                wanted = list(self._ids(item, [layer], [count]))
                if all(i in finished for i in wanted):
                    continue
                for key, reply in zip(wanted, self._answers(record, item, layer), strict=True):
                    if key in finished:
                        continue
                    row = self._row(key, item, layer, reply)
                    done += 1
                    self._tell(done, total, row)
                    yield row, reply.token_shares(row.id, item.tokens)

    def _tell(self, done: int, total: int, row: Measurement | None) -> None:
        if self.progress is not None:
            self.progress(done, total, row)

    def _answers(self, record: Trace, item: Sample, layer: int | None) -> list[Answer]:
        key = f"{self.loaded.name}|{layer}|{item.num_tokens or ''}|{item.sample}"
        built = self.probed.pop(layer, None) if item is self.inputs[0] else None
        return answer(built or self._build(record, layer), self.question, key)

    def _row(self, key: str, item: Sample, layer: int | None, reply: Answer) -> Measurement:
        return row_of(
            reply,
            id=key,
            loaded=self.loaded,
            question=self.question,
            item=item,
            layer=layer,
            device=self.device,
            notes=self.notes,
        )

    def _folder(
        self, out: Any, layers: Sequence[int | None], windows: str, source: dict[str, str]
    ) -> RunFolder | None:
        if out is None:
            return None
        spec = {
            **self.named,
            "modules": self.modules,
            "layers": list(layers),
            "windows": windows,
            "inputs": stable_id({"all": [(i.sha256, i.sample, i.start) for i in self.inputs]}),
            "lengths": sorted({i.num_tokens for i in self.inputs if i.num_tokens}),
            "samples": len({i.sample for i in self.inputs}),
            **self.question.as_spec(),
        }
        return RunFolder(Path(out), spec, provenance(device=str(self.device), **source))
