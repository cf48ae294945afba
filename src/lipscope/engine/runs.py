"""Runs of one model in this process, row by row, into a run folder if there is one."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from lipscope.attention import Attention
from lipscope.engine.answer import explained, failed_rows
from lipscope.engine.checks import argument, no_several, path, whole_number
from lipscope.engine.plan import InputKey, Job, Shape, Survey, left_over, plan, row_ids
from lipscope.engine.ready_model import AnyModel, ReadyModel, masked, ready_model
from lipscope.engine.session import MapAtInput, ModelKey, Session
from lipscope.engine.spec import AXES, LENGTHS, REAL, SAMPLES, Spec, Verb, options_of, single_spec
from lipscope.errors import InputError, remark, unwritable
from lipscope.linalg import Watch
from lipscope.models import Sample, checked_data, device_of, digest, source_stamp
from lipscope.pages import Rows
from lipscope.records import (
    SURVEY,
    Bound,
    Direction,
    Finished,
    Measurement,
    Place,
    RunFolder,
    TokenShare,
    provenance,
    sha256_of,
    stable_id,
    version,
    write_file,
)
from lipscope.sources import default_text, split_revision, stamp_of

AnyData = str | Path | Tensor | Mapping[str, Any] | Sequence[Sample] | None
AnyFolder = str | Path | Place | RunFolder | None
Tell = Callable[[int, int, Measurement | None], None]
Progress = Tell | bool

# Options about inputs, which a map at its input does not need.
OF_INPUT = ("lengths", "samples", "windows", "images", "resolutions", "tokenizer", "revision")
_AT = Verb("at", without=options_of("theorems"), norms=True, by_layer=True)
_BEGINNING = 60  # number of characters that identify an unnamed text
_BAR = "measuring {bar:30} {n_fmt}/{total_fmt} {elapsed} left {remaining}{postfix}"


class LocalRun:
    """A prepared request for one model: its survey and its jobs.

    Use it in a ``with`` block, which opens the folder at its start, and surveys the model unless
    the folder has its survey. Model, data and options are those of `measure`. ``verb`` defines the
    valid options, ``more`` sets further entries of the specification, and ``asked`` holds the
    verb's own arguments, if its answers are for a single layer and input.
    """

    def __init__(
        self,
        model: AnyModel,
        data: AnyData,
        options: Mapping[str, Any],
        verb: Verb,
        *,
        more: Mapping[str, Any] | None = None,
        out: AnyFolder = None,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        options, dtype = dict(options), verb.dtype
        data, model = checked_data(data), str(model) if isinstance(model, Path) else model
        loading = {name: options.pop(name, None) for name in ("tokenizer", "revision")}
        revision = loading["revision"]
        if isinstance(model, str):
            name, revision = split_revision(model, revision)
        else:
            model = ready_model(model, **loading)
            name = model.name
            if isinstance(model.model, Attention):
                dtype = str(model.model.query.dtype)[6:]
        if options.get("images") is not None and data is not None:
            raise InputError("`images` take the place of a text. Found both; leave one out.")
        if is_text(data, options):
            usual = {"lengths": LENGTHS, "samples": SAMPLES}
            options |= {key: value for key, value in usual.items() if options.get(key) is None}
        spec = single_spec(verb, name, {"": _digest(data)}, options, dtype)
        self.spec: Spec = replace(spec, **(more or {}))
        self.data = data
        # A model given by name is loaded when a job needs it.
        self._named = isinstance(model, str) and loading["tokenizer"] is None
        how = {"seed": self.spec.seeds[0], "allow_pickle": self.spec.allow_pickle, **loading}

        def load() -> ReadyModel:
            found = ready_model(model, **how) if isinstance(model, str) else model
            found = masked(found, self.spec.causal)
            return found.in_memory(verb.whole) if verb.whole else found

        self._load = functools.cache(load)
        self._more = {"norms": verb.norms, "revision": revision}
        self._verb, self._out, self._asked = verb, out, asked
        self._stack = contextlib.ExitStack()
        self._values: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> LocalRun:
        with contextlib.ExitStack() as stack:
            self.folder = self.opened(stack)
            self.session = self.new_session(norms=self._verb.norms, by_layer=self._verb.by_layer)
            self.session.coming = None
            stack.callback(self.session.end)
            self._key = key = survey_key(self.spec, 0, self._more) if self._named else None
            known = {} if self.folder is None or key is None else self.folder.values(SURVEY)
            look = functools.partial(self.session.survey, 0)
            self.survey, held = surveyed(known, self.folder, key, look)
            tell_fewer(self.spec, self.survey)
            self.jobs: list[Job] = plan(self.spec, [self.survey])
            inputs = sum(map(len, self.survey.items.values()))
            if self._verb.one_input and inputs > 1:  # a batch, or pictures of several sizes
                raise InputError(
                    f"`data` should be one input here. Found {inputs}; give one of them."
                )
            if not held:
                self._note_model()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def new_session(self, **how: bool) -> Session:
        """A new session on the model and the data."""
        return Session(self.spec, {"": self.data}, {self.spec.models[0].name: self._load}, **how)

    def also(self, folder: RunFolder | None, **changes: Any) -> LocalRun:
        """The same run with some entries changed, into an open folder."""
        other = copy.copy(self)
        other.spec, other._out, other._values = replace(self.spec, **changes), folder, {}
        return other

    def opened(self, stack: contextlib.ExitStack) -> RunFolder | None:
        """The opened folder; its other lengths, samples and layers are added to the request."""
        if self._out is None or isinstance(self._out, RunFolder):
            return self._out
        origin = provenance(
            device=str(device_of(self.spec.device)), **source_of(self.data, self.spec.images)
        )
        written = self.spec.as_dict() | ({"asked": dict(self._asked)} if self._asked else {})
        written |= {name: written.pop(several) for name, several in AXES.items()}  # as in the call
        place, growing = folder_of(self._out), self._asked is None
        folder = RunFolder(place, written, origin, growing=growing)
        stack.enter_context(folder)
        grown = {name: folder.spec[name] for name in ("layers", "lengths", "samples")}
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in grown.items()}
        self.spec = replace(self.spec, **plain)
        return folder

    def _note_model(self) -> None:
        if self.folder is not None:
            self.folder.add_model(self.spec.models[0].name, self.session.about(0))

    @property
    def model(self) -> ReadyModel:
        """The model."""
        return self._load()

    def at(self, job: Job) -> MapAtInput:
        """The map of a job, at its input."""
        return self.session.at(job)

    def samples(self, chosen: Sequence[int]) -> list[Sample]:
        """The chosen inputs, without a survey of the layers."""
        with self.new_session() as session:
            some = session.items(ModelKey(0, None), "")
        count = 1 + max(one.sample for one in some)
        for index in chosen:
            if not 0 <= index < count:
                raise InputError(
                    f"`sample` should be between 0 and {count - 1}. Found `sample = {index}`."
                )
        return [replace(one, count=count) for one in some if one.sample in chosen]

    def left(self) -> list[Job]:
        """The jobs without rows in the folder."""
        return left_over(self.jobs, [self.survey.shape], self._held(self._ids()))

    def rows(self, progress: Progress | None = None, *, keep: bool = True) -> Rows:
        """All rows in the order of the jobs, including those of earlier runs in the folder.

        They are written to the folder, unless ``keep`` is false.
        """
        tell = as_callback(progress)
        ids, folder = self._ids(), self.folder
        if folder is not None and folder is not self._out and keep:
            folder.planned(ids)
        done = self._held(ids)
        tokens = folder.beside(TokenShare, done) if folder is not None and self.spec.tokens else []
        bounds = folder.beside(Bound, done) if folder is not None and self.spec.theorems else []
        parts = (
            folder.beside(Direction, done) if folder is not None and self.spec.directions else []
        )
        tell(sum(one in done for one in ids), len(ids), None)
        left = left_over(self.jobs, [self.survey.shape], done)
        for job in self.session.ordered(left):
            new = [one for one in self._answered(job) if one.row.id not in done]
            if folder is not None and keep:
                self._note_model()
                new = [_with_held(one, folder.done.get(one.row.id)) for one in new]
                folder.extend(new)
            tokens += [token for one in new for token in one.tokens]
            bounds += [bound for one in new for bound in one.bounds]
            parts += [part for one in new for part in one.directions]
            done |= {one.row.id: one.row for one in new}
            tell(sum(one in done for one in ids), len(ids), new[-1].row if new else None)
        return Rows(
            [done[one] for one in ids],
            tokens=tokens,
            windows=self.spec.windows,
            bounds=bounds,
            directions=parts,
        )

    def only_rows(self, progress: Progress | None = None) -> Rows:
        """The rows, for a run with no other results."""
        with self:
            return self.rows(progress)

    def once(
        self,
        part: str,
        asked: Mapping[str, Any],
        make: Callable[[], dict[str, Any]],
        file: str | None = None,
    ) -> dict[str, Any]:
        """A result other than rows, from the folder if it is there and complete.

        It is identified by ``asked`` and this run's request; ``make`` computes it, as plain
        values, and writes its file, if any.
        """
        if self.folder is None or self._key is None:
            return make()
        key = stable_id({"asked": dict(asked), "of": self._key})
        held = self.folder.values(part).get(key)
        path = None if file is None else self.folder.path / file
        if held is not None and (path is None or held["sha256"] == sha256_of(path)):
            return held
        made = make()
        return self.folder.add_value(
            part, key, made | ({"sha256": sha256_of(path)} if path else {})
        )

    def values(self, part: str) -> dict[str, Any]:
        """The values of a part by key, from the folder and new."""
        if part not in self._values:
            self._values[part] = {} if self.folder is None else self.folder.values(part)
        return self._values[part]

    def keep_value(self, part: str, key: str, made: Any) -> None:
        """Store a record as a value of a part, also in the folder if there is one."""
        self.values(part)[key] = content = asdict(made)
        if self.folder is not None:
            self.folder.add_value(part, key, content)

    def value(self, part: str, key: str, make: Callable[[], Any]) -> dict[str, Any]:
        """A value of a part; if missing, that of a new record, which is stored."""
        if key not in self.values(part):
            self.keep_value(part, key, make())
        return self.values(part)[key]

    def save(self, file: str, points: Mapping[str, Tensor]) -> None:
        """Write inputs atomically to a file in the folder, if there is one."""
        if self.folder is None:
            return
        content, folder = io.BytesIO(), self.folder.path
        arrays: dict[str, Any] = {name: point.cpu().numpy() for name, point in points.items()}
        np.savez(content, **arrays)
        try:
            write_file(folder / file, content.getvalue())
        except OSError as problem:
            raise unwritable(f"out = {folder}", problem) from None

    def keep(self, rows: Rows, row: Measurement, bounds: Sequence[Bound]) -> None:
        """Write one of the rows, with bounds beyond those that the run requests."""
        assert self.folder is not None
        tokens = tuple(one for one in rows.tokens if one.id == row.id)
        held = {(one.id, one.theorem, one.eps) for one in self.folder.beside(Bound)}
        new = tuple(one for one in bounds if (one.id, one.theorem, one.eps) not in held)
        if new or row.id not in self.folder.done:
            self.folder.extend([Finished(row, tokens, new)])

    def _ids(self) -> list[str]:
        return [one for job in self.jobs for one in row_ids(job, self.survey.shape)]

    def _held(self, ids: Sequence[str]) -> dict[str, Measurement]:
        """Complete rows in the folder; those shared with other requests may lack columns."""
        folder = self.folder
        done = {} if folder is None else folder.done
        held = {one: done[one] for one in ids if one in done}
        if folder is None or folder is not self._out:
            return held
        bounded = {one.id for one in folder.beside(Bound, held)} if self.spec.theorems else held
        worded = (
            {one.id for one in folder.beside(Direction, held)} if self.spec.directions else held
        )
        asked = {"sigma_rest": self.spec.rest, "frobenius": self.spec.average}

        def complete(row: Measurement) -> bool:
            filled = all(getattr(row, name) is not None for name, on in asked.items() if on)
            whole = row.id in bounded and (row.id in worded or not row.sigma)
            return row.sigma is None or (filled and whole)

        return {id: row for id, row in held.items() if complete(row)}

    def _answered(self, job: Job) -> list[Finished]:
        """The rows of a job; a failed row if its input cannot be built for a layer."""
        try:
            return self.at(job).finished
        except InputError as problem:
            if job.input == REAL:
                raise
            about = self.model.loaded.about
            return failed_rows(self.spec, job, self.survey.shape, explained(problem), about)


def _with_held(one: Finished, held: Measurement | None) -> Finished:
    """An answer completed by an earlier one to the same question."""
    if held is None:
        return one
    names = [name for name in ("sigma_rest", "frobenius") if getattr(one.row, name) is None]
    notes = [note for row in (held, one.row) for note in (row.note or "").split("; ") if note]
    more: dict[str, Any] = {name: getattr(held, name) for name in names}
    return one._replace(row=replace(one.row, **more, note="; ".join(dict.fromkeys(notes)) or None))


def folder_of(out: str | Path | Place) -> Place:
    """The place of a run folder, from its name."""
    return out if isinstance(out, Place) else Place(Path(argument(path, "out", out)))


def of_one_window(
    data: AnyData, options: Mapping[str, Any], length: int | None, sample: int = 0
) -> dict[str, Any]:
    """Lengths and samples for a verb on a single window, by default of 64 tokens of a text."""
    no_several(options)
    if is_text(data, options):
        length = 64 if length is None else argument(whole_number(1, 10**6), "length", length)
        return {"lengths": length, "samples": max(10, sample + 1) if sample else 1}
    if length is not None:
        raise InputError("`length` cuts a text into windows. Found it with a batch; leave it out.")
    return {}


def of_one_input(data: AnyData, options: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """The same for a verb on a single input, by default one picture."""
    one = {"samples": options.get("samples") or 1} if options.get("images") is not None else {}
    return one | of_one_window(data, options, length)


def is_text(data: AnyData, options: Mapping[str, Any]) -> bool:
    """Whether the input is a text, not a batch or pictures."""
    return (data is None or isinstance(data, str | Path)) and options.get("images") is None


def _digest(data: Any) -> str:
    """A digest of the data for the manifest; inputs have their own digests."""
    if isinstance(data, Tensor):
        return digest(data)
    if isinstance(data, Mapping):
        return stable_id({str(key): _digest(value) for key, value in data.items()})
    if isinstance(data, list) and all(isinstance(one, Sample) for one in data):
        data = [one.sha256 for one in data]
    elif not isinstance(data, str | int | float | None):
        data = type(data).__name__
    return hashlib.sha256(repr(data).encode("utf-8", "replace")).hexdigest()


def source_of(data: Any, images: str | Path | None) -> dict[str, str]:
    """The description of the data in a manifest; never compared, as rows have digests.

    ``images``, or ``text`` (``default`` or its beginning) and ``text_sha256``; empty for a batch.

    >>> source_of("It was late.", None)["text"]
    'It was late.'
    """
    if images is not None:
        return {"images": str(images)}
    text = default_text() if data is None else data
    if not isinstance(text, str):
        return {}
    begins = " ".join(text[:_BEGINNING].split()) + "…" * (len(text) > _BEGINNING)
    sha256 = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return {"text": "default" if data is None else begins, "text_sha256": sha256}


def maps_at(
    model: AnyModel,
    data: AnyData = None,
    *,
    chosen: Sequence[int] | None = None,
    watch: Callable[[int | None], Watch] | None = None,
    **options: Any,
) -> Iterator[MapAtInput]:
    """Maps of a model's layers at its inputs: for every length and sample, layer by layer.

    The model stays prepared during the iteration. Arguments and options are those of `measure`; a
    text gives one window by default. Only the ``chosen`` samples, if given. With ``watch``, sigma
    of all maps is solved ahead, and the callback that it returns for a layer receives intervals.
    """
    usual = {"lengths": 64, "samples": 1} if is_text(data, options) else {}
    asked = usual | {name: value for name, value in options.items() if value is not None}
    if chosen is not None:
        run = LocalRun(model, data, asked, _AT)
        model, data = run.model, run.samples(chosen)
        asked = {name: value for name, value in asked.items() if name not in OF_INPUT}
    # Sigma does not need norms, whose recording costs a fifth of a pass.
    verb = _AT if watch is None else _AT._replace(norms=False)
    verb = verb if chosen is not None else verb._replace(name="layers")
    with LocalRun(model, data, asked, verb) as run:
        if watch is not None:
            run.session.expect(run.jobs, watch)
        for job in run.jobs:
            yield run.at(job)


# --- surveys stored in a run folder, so that a finished run needs no model

Held = Mapping[str, Mapping[str, Any]]


def survey_key(spec: Spec, model: int, more: Mapping[str, Any]) -> str | None:
    """Digest of everything that a survey depends on; None if unknown.

    ``more`` holds what the specification lacks, such as the requested revision.
    """
    one = spec.models[model]
    revision = more.get("revision")
    is_now = source_stamp(f"{one.name}@{revision}" if revision else one.name)
    if is_now is None:
        return None
    pictures = os.path.expanduser(spec.images or "")
    seen = stamp_of(Path(pictures).glob("*")) if os.path.isdir(pictures) else ""
    asked = spec.as_dict() | {"models": [one.name, one.step], "pictures": seen}
    return stable_id({**asked, **more, "is_now": is_now, "version": version()})


def surveyed(
    held: Held, folder: RunFolder | None, key: str | None, look: Callable[[], Survey]
) -> tuple[Survey, bool]:
    """A survey, held under a key or made and stored in the folder, and whether it was held."""
    if key is not None and key in held:
        plain = held[key]
        layers, heads = plain["shape"]
        items = {name: [InputKey(*one) for one in some] for name, some in plain["items"].items()}
        return Survey(Shape(layers, heads and tuple(heads)), items, plain["revision"]), True
    found = look()
    if folder is not None and key is not None:
        plain = found._asdict() | {"items": {name: [*some] for name, some in found.items.items()}}
        folder.add_value(SURVEY, key, plain)
    return found, False


def tell_fewer(spec: Spec, survey: Survey) -> None:
    """Report texts of whose windows some are equal, or coincide."""
    if spec.samples is None or spec.images is not None or spec.lengths is None:
        return
    for name, items in survey.items.items():
        counts = Counter(one.num_tokens for one in items)
        fewer = {n: count for n, count in counts.items() if count < spec.samples}
        if fewer:
            which = ", ".join(f"{count} of {n} tokens" for n, count in sorted(fewer.items()))
            remark(
                f"Of the windows of the text{f' `{name}`' * bool(name)} for `samples = "
                f"{spec.samples}`, fewer are distinct: {which}. Each is measured once."
            )


# --- progress reporting: to a function, or as a line in a terminal or a notebook


class Bar:
    """A progress bar on standard error; it stays visible outside a terminal, as in a notebook.

    Remaining time is estimated from the rows of this run, not from those of earlier ones.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._line: tqdm | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def update(self, done: int, total: int, row: Measurement | None) -> None:
        """Update the bar; rows of earlier runs count as done."""
        if not self._shown:
            return
        if self._line is None:
            stays = not sys.stderr.isatty()
            self._line = tqdm(total=total, initial=done, bar_format=_BAR, smoothing=0, leave=stays)
        self._line.total = total
        self._line.update(done - self._line.n)
        if done >= total:
            self._end()

    def say(self, text: str) -> None:
        """Show the current step beside the bar."""
        if self._line is not None:
            self._line.set_postfix_str(text)

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None


def as_voice(tell: Tell) -> Callable[[str], None]:
    """A function that shows steps of a long answer beside the bar, if there is one."""
    return getattr(getattr(tell, "__self__", None), "say", lambda _: None)


def as_callback(progress: Progress | None) -> Tell:
    """The callback for progress: a function, a bar for True, a no-op for None and False.

    A verb calls this once, so that all of its parts share one bar.
    """
    if progress is None or progress is False:
        return lambda *_: None
    if progress is True:
        return Bar().update
    if not callable(progress):
        raise InputError(
            "`progress` should be true, or a function of `done`, `total` and the row. Found "
            f"`{type(progress).__name__}`."
        )
    return progress
