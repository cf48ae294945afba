"""One model's questions answered in this process, row by row, into a folder if there is one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.engine.plan import Job, Shape, Survey, plan, row_ids
from lipscope.engine.rows import failed_rows, source_of
from lipscope.engine.session import Session
from lipscope.engine.spec import AXES, REAL, Spec, single_spec
from lipscope.errors import InputError
from lipscope.models import LoadedModel, Sample, adopt_model, load_model
from lipscope.models.data.windows import digest
from lipscope.pages.rows import Rows
from lipscope.records.folder import Finished, RunFolder
from lipscope.records.rows import Bound, Measurement, provenance, stable_id

Progress = Callable[[int, int, Measurement | None], None]
AnyModel = str | nn.Module | LoadedModel
AnyData = str | Tensor | Mapping[str, Any] | Sequence[Sample] | None


class LocalRun:
    """A request of one model, prepared: what it has, and the jobs that are to be done.

    Use it in a ``with`` block.

    Args:
        model: A name for `load_model`, a loaded model, a module, or an `Attention` layer.
        data: What it reads, as for `measure`.
        options: Options as for `measure`.
        verb: Whose options they are.
        without: Options that make no sense for the verb.
        dtype: Floating type if none is asked for; that of the weights for a layer.
        more: Entries of the specification that the verb sets itself.
        norms: Whether the norms that feed layers are asked for.
    """

    def __init__(
        self,
        model: AnyModel,
        data: AnyData,
        options: Mapping[str, Any],
        *,
        verb: str,
        without: Sequence[str] = (),
        dtype: str = "float32",
        more: Mapping[str, Any] | None = None,
        norms: bool = False,
    ) -> None:
        options = dict(options)
        loading = {name: options.pop(name, None) for name in ("tokenizer", "revision")}
        loaded = loaded_model(
            model,
            seed=options.get("seed") or 0,
            allow_pickle=bool(options.get("allow_pickle")),
            **loading,
        )
        if isinstance(loaded.model, Attention):
            dtype = str(loaded.model.query.dtype)[6:]
        if options.get("images") is not None and data is not None:
            raise InputError("`images` take the place of a text. Found both; leave one out.")
        texts = {"": _digest(data)}
        spec = single_spec(loaded.name, texts, options, verb=verb, without=without, dtype=dtype)
        self.spec: Spec = replace(spec, **(more or {}))
        self.loaded, self.data = loaded, data
        self.session = Session(self.spec, {"": data}, {loaded.name: loaded}, norms=norms)
        try:
            self.survey: Survey = self.session.survey(0)
        except BaseException:
            self.session.close()
            raise
        self.jobs: list[Job] = plan(self.spec, [self.survey])

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    @property
    def shape(self) -> Shape:
        """Layers and heads of the model."""
        return self.survey.shape

    def rows(self, out: str | Path | RunFolder | None, progress: Progress | None) -> Rows:
        """All rows, those of an earlier run in the folder included, in the order of the jobs.

        Args:
            out: Run folder, or one that is open; None for none.
            progress: Called as ``progress(done, total, row)``.

        Returns:
            The rows with their side tables.
        """
        tell = progress or (lambda *_: None)
        ids = [one for job in self.jobs for one in row_ids(job, self.shape)]
        with self._folder(out) as folder:
            done = self._held(folder, ids, own=folder is not out)
            tokens = folder.tokens(done) if folder is not None and self.spec.tokens else []
            bounds = folder.bounds(done) if folder is not None and self.spec.theorems else []
            tell(sum(one in done for one in ids), len(ids), None)
            for job in self.jobs:
                wanted = row_ids(job, self.shape)
                if all(one in done for one in wanted):
                    continue
                new = [one for one in self._answered(job) if one.row.id not in done]
                if folder is not None:
                    new = [_with_more(one, folder.done.get(one.row.id)) for one in new]
                    folder.extend(new)
                tokens += [token for one in new for token in one.tokens]
                bounds += [bound for one in new for bound in one.bounds]
                done |= {one.row.id: one.row for one in new}
                tell(sum(one in done for one in ids), len(ids), new[-1].row if new else None)
        return Rows(
            [done[one] for one in ids],
            tokens=tokens,
            windows=self.spec.windows,  # pyright: ignore[reportArgumentType]
            bounds=bounds,
        )

    def keep(self, finished: Sequence[Finished], out: str | Path | RunFolder) -> None:
        """Write rows with more side tables than the run itself asks for."""
        with self._folder(out) as folder:
            assert folder is not None
            held = {_key(one) for one in folder.bounds()}
            for one in finished:
                new = tuple(bound for bound in one.bounds if _key(bound) not in held)
                if new or one.row.id not in folder.done:
                    folder.extend([one._replace(bounds=new)])

    def _held(
        self, folder: RunFolder | None, ids: Sequence[str], *, own: bool
    ) -> dict[str, Measurement]:
        """Rows that a folder holds; one that other questions share may say less than is asked."""
        done = {} if folder is None else folder.done
        held = {one: done[one] for one in ids if one in done}
        if folder is None or own:
            return held
        bounded = {one.id for one in folder.bounds(held)} if self.spec.theorems else held
        asked = {"sigma_rest": self.spec.rest, "frobenius": self.spec.average}

        def complete(row: Measurement) -> bool:
            said = all(getattr(row, name) is not None for name, on in asked.items() if on)
            return row.sigma is None or (said and row.id in bounded)

        return {id: row for id, row in held.items() if complete(row)}

    def _answered(self, job: Job) -> list[Finished]:
        """The rows of a job; an input that cannot be built for a layer is a row that says so."""
        try:
            return self.session.rows(job)
        except InputError as problem:
            if job.input == REAL:
                raise
            about = {"revision": self.loaded.revision, "weights": self.loaded.weights}
            rows = failed_rows(self.spec, job, self.shape, str(problem), about)
            return [Finished(row) for row in rows]

    @contextlib.contextmanager
    def _folder(self, out: str | Path | RunFolder | None) -> Iterator[RunFolder | None]:
        if out is None or isinstance(out, RunFolder):
            if out is not None:
                out.add_model(self.loaded.name, self.session.about(0))
            yield out
            return
        origin = provenance(
            device=str(self.session.places.device), **source_of(self.data, self.spec.images)
        )
        with RunFolder(Path(out), self._as_written(), origin) as folder:
            folder.add_model(self.loaded.name, self.session.about(0))
            yield folder

    def _as_written(self) -> dict[str, Any]:
        """The specification in the words of the call, with a digest of its inputs."""
        items = [one for some in self.survey.items.values() for one in some]
        plain = self.spec.as_dict() | {"texts": {"": stable_id({"items": items})}}
        return plain | {name: plain.pop(several) for name, several in AXES.items()}


def _with_more(one: Finished, held: Measurement | None) -> Finished:
    """An answer with what an earlier one to the same question says besides."""
    if held is None:
        return one
    names = [name for name in ("sigma_rest", "frobenius") if getattr(one.row, name) is None]
    notes = [note for row in (held, one.row) for note in (row.note or "").split("; ") if note]
    more: dict[str, Any] = {name: getattr(held, name) for name in names}
    return one._replace(row=replace(one.row, **more, note="; ".join(dict.fromkeys(notes)) or None))


def _key(bound: Bound) -> tuple[str, str, float | None]:
    return bound.id, bound.theorem, bound.eps


def of_one_window(data: AnyData, options: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """Lengths and samples of a verb that looks at one input: a window of 64 tokens, of a text."""
    if is_text(data, options):
        return {"lengths": 64 if length is None else length, "samples": 1}
    if length is not None:
        raise InputError("`length` cuts a text into windows. Found it with a batch; leave it out.")
    return {}


def is_text(data: AnyData, options: Mapping[str, Any]) -> bool:
    """Whether a text is read, and not a batch or pictures."""
    return (data is None or isinstance(data, str)) and options.get("images") is None


def loaded_model(
    model: AnyModel,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    seed: int = 0,
    allow_pickle: bool = False,
) -> LoadedModel:
    """The model that is meant: by its name, loaded already, a module, or one attention layer."""
    if isinstance(model, LoadedModel):
        loaded = model
    elif isinstance(model, Attention):
        loaded = replace(adopt_model(model), name="layer")
    elif isinstance(model, nn.Module):
        loaded = adopt_model(model)
    else:
        loaded = load_model(model, revision=revision, seed=seed, allow_pickle=allow_pickle)
    return loaded if tokenizer is None else replace(loaded, tokenizer=tokenizer)


def _digest(data: Any) -> str:
    """A digest of what was given, for the manifest; inputs have digests of their own."""
    if isinstance(data, Tensor):
        return digest(data)
    if isinstance(data, list):
        data = [one.sha256 for one in data]
    return hashlib.sha256(repr(data).encode("utf-8", "replace")).hexdigest()
