"""The register of experiments, and what they share: the folder, resuming, files, findings."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lipscope import InputError, LayerAtInput, Measurement, OpenModel, Rows, bounds, charts, measure
from lipscope.engine import Progress as RowProgress, folder_of, measure_built
from lipscope.errors import unwritable
from lipscope.models import LoadedModel, inputs_of, load_model
from lipscope.records import Place, RunFolder, provenance, stable_id, write_file
from lipscope_experiments.data import Text, texts_named
from lipscope_experiments.findings import Claim, Columns, Findings, Record, Table, page_of, table_of

Progress = Callable[[int, int, str], None]
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Experiment:
    """One entry of the register."""

    name: str  # ``paper/figure``
    function: Callable[[Study], None]  # what runs it
    title: str  # what is reproduced, in a line
    cite: str  # key of ``docs/references.bib``
    models: tuple[str, ...] = ()  # by default; none where the experiment needs no model
    quick_models: tuple[str, ...] = ()  # those of ``--quick``, where they are others
    reads_text: bool = True  # whether it reads texts
    reads_images: bool = False  # whether it reads pictures, where a model does


@dataclass(frozen=True)
class Source:
    """A model with what it reads, a text or pictures, and a verb's option for that."""

    model: LoadedModel
    name: str = ""
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def sees(self) -> bool:
        """Whether it reads pictures."""
        return "images" in self.asked

    @property
    def text(self) -> Text:
        """The text, where it reads one."""
        return Text(self.name, self.asked["data"])

    @property
    def where(self) -> str:
        """Model and text, for tables."""
        return f"{self.model.name}, {self.name}"

    @property
    def depth(self) -> int:
        """How many layers the model has."""
        return int(self.model.config.num_hidden_layers)

    @property
    def is_deep(self) -> bool:
        """Deeper than the models of the paper: run on fewer layers and lengths."""
        return self.depth > 12

    @property
    def first_and_middle(self) -> list[int]:
        """The layers that stand for the paper's 0 and 6 of 12."""
        return [0, self.depth // 2]

    @property
    def first_middle_last(self) -> list[int]:
        """The first, the middle and the last layer, each once."""
        return sorted({*self.first_and_middle, self.depth - 1})

    def even_layers(self, most: int) -> list[int]:
        """At most so many layers, from the first one on at even distances."""
        return [*range(0, self.depth, math.ceil(self.depth / most))]

    def asking(self, tokens: int, samples: int) -> dict[str, Any]:
        """With windows of so many tokens, or pictures of the model's own side, all of a folder."""
        drawn = self.asked.get("images", "random") == "random"
        size = {} if self.sees else {"lengths": [tokens]}
        return {**self.asked, **size, **({"samples": samples} if drawn else {})}


_REGISTER: dict[str, Experiment] = {}


def experiment(name: str, **fields: Any) -> Callable[[Function], Function]:
    """Enter a function into the register under its name, with the fields of `Experiment`.

    Its title is the first line of its docstring. Unless said it cites the paper of its name, if
    that is one, a quick run takes the smallest of its models, and ``dinov2`` reads pictures.
    """
    paper, models = name.partition("/")[0], fields.get("models", ())
    derived = {
        "cite": paper if paper[-1].isdigit() else "derived here",
        "quick_models": tuple(one for one in models if one == "minilm"),
        "reads_images": "dinov2" in models,
    }

    def enter(function: Function) -> Function:
        title = (function.__doc__ or "").partition("\n")[0].removesuffix(".")
        _REGISTER[name] = Experiment(name, function, title, **derived | fields)
        return function

    return enter


def experiments() -> list[Experiment]:
    """Every experiment, in the order of registration."""
    return list(_REGISTER.values())


def grid(**axes: Iterable[Any]) -> list[Record]:
    """Every combination of values by name, the last name varying fastest.

    >>> grid(n=[1, 2], kind=["a"])
    [{'n': 1, 'kind': 'a'}, {'n': 2, 'kind': 'a'}]
    """
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]


class Study:
    """What an experiment is given: what to run on, and where go rows, figures and findings."""

    def __init__(
        self,
        folder: RunFolder,
        models: tuple[str, ...],
        texts: tuple[Text, ...],
        quick: bool,
        progress: Progress | None,
        images: str = "random",
    ) -> None:
        self.folder, self.quick, self.images = folder, quick, images
        self.models, self.texts = models, texts
        self.figures: list[tuple[str, str, str]] = []
        self._claims, self._tables, self._remarks = list[Claim](), list[Table](), list[str]()
        self.missing: list[str] = []  # why something was not run or drawn: the last remarks
        self._plan: tuple[str, ...] = ()
        self._progress = progress
        self.load = functools.lru_cache(maxsize=2)(load_model)

    def pick(self, quick: T, full: T) -> T:
        """One of two settings."""
        return quick if self.quick else full

    def some_layers(self, source: Source) -> list[int]:
        """The first, the middle and the last layer; of a quick run the middle one."""
        return self.pick(source.first_and_middle[1:], source.first_middle_last)

    def sources(self) -> Iterator[Source]:
        """Every model on every text, or on pictures if it reads them.

        Without the package of ``dinov2``, which is no part of the set-up, it is left out.
        """
        for name in self.models:
            try:
                loaded = self.load(name)
            except InputError as why:
                if name != "dinov2":
                    raise
                self.missing.append(f"Not run: {why}")
                continue
            yield from self.sources_of(loaded)

    def sources_of(self, loaded: LoadedModel) -> Iterator[Source]:
        """A model on every text, or on pictures if it reads them."""
        if loaded.tokenizer is None and hasattr(loaded.config, "patch_size"):
            what = "random pixels" if self.images == "random" else "pictures"
            yield Source(loaded, what, {"images": self.images})
            return
        for text in self.texts:
            yield Source(loaded, text.name, {"data": text.content})

    @property
    def findings(self) -> Findings:
        """What was said so far."""
        remarks = (*self._remarks, *self.missing)
        return Findings(tuple(self._claims), tuple(self._tables), remarks, self._plan)

    def plan(self, *sentences: str) -> None:
        """Say, before anything runs, what is asked, how it is judged and what would refute it.

        It is the first value of the run folder, and the page holds it.
        """
        self._plan = sentences
        self.values("plan", [{"plan": list(sentences)}], lambda **_: {})

    def claim(self, about: str, said: str, found: str) -> None:
        """Say what is compared, what the paper (or a derivation here) says, and what was found."""
        self._claims.append(Claim(about, said, found))

    def remark(self, *remarks: str) -> None:
        """Say what a reader must know: what was not run, what does not apply."""
        self._remarks += remarks

    def table(self, title: str, items: Iterable[Any], columns: Columns, digits: int = 4) -> None:
        """Add a table: lines of cells, or of the values of records by name or by function."""
        self._tables.append(table_of(title, items, columns, digits))

    def not_run(self, *names: str) -> list[str]:
        """A remark, if any, on models that the paper used and this run did not."""
        missing = [name for name in names if name not in self.models]
        return [f"Not run on {' or '.join(missing)}."] if missing else []

    def measure(self, part: str, model: LoadedModel, data: Any = None, **options: Any) -> Rows:
        """Rows of `lipscope.measure`, in the run folder."""
        return measure(model, data, out=self.folder, progress=self._in(part), **options)

    def bounds(self, part: str, model: LoadedModel, data: Any = None, **options: Any) -> Rows:
        """Rows of `lipscope.bounds`, in the run folder."""
        return bounds(model, data, out=self.folder, progress=self._in(part), **options)

    def built(
        self, part: str, inputs: Sequence[tuple[int, Callable[[], Tensor]]], **options: Any
    ) -> Iterator[Measurement]:
        """Rows of `measure_built` for samples and what builds their inputs, in the run folder."""
        for done, (sample, build) in enumerate(inputs, 1):
            yield measure_built(x=build(), sample=sample, out=self.folder, **options)
            self._tell(done, len(inputs), part)

    def values(
        self, part: str, keys: Iterable[Record], compute: Callable[..., Record]
    ) -> list[Record]:
        """A record for each key with ``compute(**key)``, computed once and kept in the run folder.

        A key holds plain values, which determine the record.
        """
        keys, held = list(keys), self.folder.values(part)
        found = []
        for done, key in enumerate(keys):
            name = stable_id({"part": part, **key})
            if name not in held:
                self._tell(done, len(keys), part)
                held[name] = self.folder.add_value(part, name, {**key, **compute(**key)})
            found.append(held[name])
        self._tell(len(keys), len(keys), part)
        return found

    def draw(
        self,
        stem: str,
        title: str,
        panels: Sequence[charts.Panel],
        notes: Sequence[str] = (),
        columns: int = 3,
    ) -> None:
        """Save panels, if any, as ``<stem>.svg``, which the findings show, and ``<stem>.png``."""
        if not panels:
            return
        chart = charts.curves_chart(title, panels, notes=notes, columns=columns)
        stem = _file_name(stem)
        charts.save_each(chart, [self.folder.path / f"{stem}.{kind}" for kind in ("svg", "png")])
        self._drawn(f"{stem}.svg", title)

    def animate(self, stem: str, title: str, scenes: Sequence[charts.Scene]) -> None:
        """Save scenes as ``<stem>.gif``, which the findings show; a remark where that cannot be."""
        name = f"{_file_name(stem)}.gif"
        try:
            charts.animate(self.folder.path / name, scenes)
        except InputError as why:
            self.missing.append(f"{title}: not drawn. {why}")
        else:
            self._drawn(name, title)

    def _drawn(self, name: str, title: str) -> None:
        """Keep a figure for the page, with the digest by which it is known again."""
        content = (self.folder.path / name).read_bytes()
        self.figures.append((name, title, hashlib.sha256(content).hexdigest()[:16]))

    def _in(self, part: str) -> RowProgress:
        return lambda done, total, row: self._tell(done, total, part)

    def _tell(self, done: int, total: int, part: str) -> None:
        if self._progress is not None:
            self._progress(done, total, part)


def layers_of(model: LoadedModel, data: Any = None, **options: Any) -> Iterator[LayerAtInput]:
    """Layers of a model at inputs, on the CPU, in float64 unless another type is asked for."""
    asked: dict[str, Any] = {"dtype": "float64", "device": "cpu", **options}
    return OpenModel(model).layers(data, **asked)


def batch_of(model: LoadedModel, data: Any = None, **options: Any) -> dict[str, Any]:
    """A model's arguments for all windows at once, which are spread over the text."""
    asked: dict[str, Any] = {"lengths": None, "samples": None, **options}
    found = inputs_of(model, data, windows="spread", special_tokens=True, **asked)
    every = [dict(one.arguments) for one in found]
    return {
        name: torch.cat([one[name] for one in every]) if isinstance(value, Tensor) else value
        for name, value in every[0].items()
    }


def reproduce(
    name: str,
    *,
    models: Sequence[str] | None = None,
    texts: Sequence[str] = (),
    images: str | None = None,
    quick: bool = False,
    out: str | Path | Place,
    progress: Progress | None = None,
) -> Findings:
    """Run one experiment; the same call again goes on where it stopped.

    Figures and findings of a finished run are made anew, from the rows and values that are there.

    Args:
        models: Names for `load_model`; those of the experiment if None.
        texts: Files, or ``ag_news``, besides the default text.
        images: Folder of pictures for models that read them; random pixels if None.
        quick: About a minute instead of the paper's size.
        out: Folder of the rows, figures and ``findings.md``, which says what is returned.
    """
    entry = _REGISTER.get(name)
    if entry is None:
        known = ", ".join(_REGISTER)
        raise InputError(f"`NAME` should be one of {known}. Found `{name}`.")
    models = [models] if isinstance(models, str) else models
    if models is not None and not all([*models, models]):
        raise InputError(f"`models` should name models. Found `{','.join(models)}`.")
    for option, given, on, goes in (
        ("models", models is not None, "models", entry.models),
        ("texts", texts, "text", entry.reads_text),
        ("images", images is not None, "pictures", entry.reads_images),
    ):
        if given and not goes:
            raise InputError(f"`{option}` goes with experiments on {on}. Found it with `{name}`.")
    chosen = tuple(models or (quick and entry.quick_models) or entry.models)
    held = texts_named(texts) if entry.reads_text else ()
    spec = {"experiment": name, "quick": quick, "models": chosen}
    spec |= {"texts": {text.name: text.sha256 for text in held}}
    if images is not None:
        spec["images"] = str(images)
    origin = provenance()
    with RunFolder(folder_of(out), spec, origin) as folder:
        study = Study(folder, chosen, held, quick, progress, images or "random")
        entry.function(study)
        text = page_of(
            study.findings,
            study.figures,
            title=entry.title,
            cite=entry.cite,
            command=_command(name, models, held[1:], images, quick),
            origin=f"lipscope {origin['lipscope']}, torch {origin['torch']}, transformers "
            f"{origin['transformers']}",
        )
        path = folder.path / "findings.md"
        try:
            write_file(path, text.encode())
        except OSError as problem:
            raise unwritable(path, problem) from problem
    return study.findings


def _file_name(words: str) -> str:
    """Words as a name for a file on any system."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in words).strip("-")


def _command(
    name: str, models: Sequence[str] | None, texts: Sequence[Text], images: str | None, quick: bool
) -> str:
    words = ["lipscope reproduce", name]
    if models:
        words += ["--models", ",".join(models)]
    for text in texts:
        words += ["--text", text.name]
    if images is not None:
        words += ["--images", Path(images).name]
    return " ".join([*words, "--quick"] if quick else words)
