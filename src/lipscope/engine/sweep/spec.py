"""What a sweep asks for: every entry checked, every list expanded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipscope.attacks import PER_HEAD, PER_LAYER
from lipscope.engine.measure import METRICS
from lipscope.engine.ranges import parse_tokens
from lipscope.engine.sweep import checks
from lipscope.engine.sweep.checks import OF_TEXT, Check, items
from lipscope.engine.sweep.source import Source, read_source
from lipscope.errors import InputError
from lipscope.linalg.singular import SMALLEST_TOL
from lipscope.models import MAPS, default_text
from lipscope.theorems import catalogue

REAL, ADVERSARIAL, ASCENT = "real", "adversarial", "ascent"
CONSTRUCTIONS = (*PER_LAYER, *PER_HEAD)
INPUTS = (REAL, ADVERSARIAL, ASCENT, *CONSTRUCTIONS)
WITH_THEOREMS = ("attention", "heads")  # maps of which theorems speak, and inputs are built for
_AT_INPUTS = [one for one in catalogue() if "eps" not in one.needs]
THEOREMS = tuple(one.name for one in _AT_INPUTS)
DEFAULT = "default"

_CHECKS: dict[str, Check] = {
    "layers": checks.layers,
    "maps": checks.words(MAPS),
    "metrics": checks.words(METRICS),
    "lengths": checks.lengths,
    "samples": checks.whole(1),
    "inputs": checks.words(INPUTS),
    "radii": checks.radii,
    "dtypes": checks.words(("float32", "float64")),
    "seeds": checks.seeds,
    "theorems": checks.theorems(THEOREMS, [one.name for one in _AT_INPUTS if not one.slow]),
    "ascent_steps": checks.whole(1),
    "windows": checks.one_of("spread", "consecutive"),
    "special_tokens": checks.flag,
    "per_head": checks.flag,
    "move": checks.word,
    "read": checks.word,
    "rest": checks.flag,
    "average": checks.flag,
    "tol": checks.number,
    "delta": checks.number,
    "tight": checks.flag,
    "memory": checks.memory,
    "device": checks.word,
    "modules": checks.word,
    "allow_pickle": checks.flag,
    "tokens": checks.flag,
}


class Model(NamedTuple):
    """A model, or one checkpoint of one.

    Attributes:
        name: For `load_model`, and in the rows.
        step: Training step of a checkpoint; None elsewhere.
        entry: Number of its entry in the specification; the checkpoints of one share it.
    """

    name: str
    step: int | None
    entry: int


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A sweep: every combination of its lists is a job. Single values are as for `measure`.

    Attributes:
        models: Models and checkpoints.
        texts: Names of texts and digests of their content.
        layers: Indices from 0, or None for all.
        maps: ``heads``, ``attention``, ``normed``, ``residual``, ``block``, ``model``.
        metrics: ``frobenius``, ``token-relative``.
        lengths: Numbers of tokens.
        samples: Windows per length.
        inputs: ``real`` (the text), a construction, ``adversarial`` (the worst of all
            constructions) or ``ascent``; those that are built are built once per length.
        radii: Largest token norm of inputs that are built; ``text`` for that of the text.
        dtypes: ``float32``, ``float64``.
        seeds: Of random starts, and of the weights of random models.
        theorems: Names in the catalogue (``all`` stands for those that do not take seconds a
            head); asked about rows of the maps ``attention`` and ``heads``.
        ascent_steps: Steps of gradient ascent.
        tokens: Whether the tokens of every row are kept.
    """

    models: tuple[Model, ...]
    texts: Mapping[str, str]
    layers: tuple[int, ...] | None = None
    maps: tuple[str, ...] = ("attention",)
    metrics: tuple[str, ...] = ("frobenius",)
    lengths: tuple[int, ...] = (16, 64, 256)
    samples: int = 10
    inputs: tuple[str, ...] = (REAL,)
    radii: tuple[float | str, ...] = (OF_TEXT,)
    dtypes: tuple[str, ...] = ("float32",)
    seeds: tuple[int, ...] = (0,)
    theorems: tuple[str, ...] = ()
    ascent_steps: int = 20
    windows: str = "spread"
    special_tokens: bool = True
    per_head: bool = False
    move: str = "all"
    read: str = "all"
    rest: bool = False
    average: bool = False
    tol: float = 1e-3
    delta: float = 1e-6
    tight: bool = False
    memory: str = "1GiB"
    device: str = "auto"
    modules: str | None = None
    allow_pickle: bool = False
    tokens: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what the manifest holds and what workers are told."""
        return asdict(self) | {"models": [list(model) for model in self.models]}


def spec_of(values: Mapping[str, Any]) -> Spec:
    """The specification of `Spec.as_dict`."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    plain["models"] = tuple(Model(*one) for one in values["models"])
    return Spec(**plain)


@dataclass(frozen=True)
class Request:
    """A specification with what it only names.

    Attributes:
        spec: The specification.
        texts: Content of every text.
        name: Of its file, without the ending; "" if there is none.
    """

    spec: Spec
    texts: Mapping[str, str]
    name: str


def read_spec(spec: str | Path | Mapping[str, Any]) -> Request:
    """Read and check a specification.

    Args:
        spec: Path of a YAML file, or entries by key.

    Returns:
        It, with its texts.

    Raises:
        InputError: For every entry that cannot be, with its key and line.

    >>> made = read_spec({"models": "minilm", "lengths": "16:64:16", "layers": [0, 1]}).spec
    >>> made.lengths, made.layers, made.models[0].name
    ((16, 32, 48, 64), (0, 1), 'minilm')
    """
    source = read_source(spec)
    source.check_keys([one.name for one in fields(Spec)])
    values = {
        key: _CHECKS[key](source, key, value)
        for key, value in source.values.items()
        if key not in ("models", "texts")
    }
    texts = _texts(source)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    made = Spec(models=tuple(_models(source)), texts=digests, **values)
    _check_together(source, made)
    return Request(made, texts, Path(source.name).stem)


def _texts(source: Source) -> dict[str, str]:
    """The content of every text by its name: that of its file without folder and ending."""
    texts: dict[str, str] = {}
    for i, entry in enumerate(items(source.values.get("texts", DEFAULT))):
        path = Path(str(entry))
        name = DEFAULT if entry == DEFAULT else path.stem
        if name in texts:
            source.fail(
                f"`texts` should have names of their own. Found `{name}` twice.", "texts", i
            )
        try:
            texts[name] = (
                default_text() if name == DEFAULT else path.read_text(encoding="utf-8-sig")
            )
        except (OSError, UnicodeDecodeError) as problem:
            why = getattr(problem, "strerror", None) or "not UTF-8"
            source.fail(
                f"`texts` should be readable text files. Found `{entry}`: {why}.", "texts", i
            )
        if not texts[name].strip():
            source.fail(f"`texts` should not be empty. Found no words in `{entry}`.", "texts", i)
    return texts


def _models(source: Source) -> Iterator[Model]:
    """Every model, and every checkpoint as one."""
    entries = items(source.values.get("models", []))
    if not entries:
        source.fail("`models` should name at least one model, such as `models: [minilm]`.")
    seen: set[str] = set()
    for i, entry in enumerate(entries):
        for name, step in _named(source, entry, i):
            if name in seen:
                source.fail(
                    f"`models` should name each model once. Found `{name}` twice.", "models", i
                )
            seen.add(name)
            yield Model(name, step, i)


def _named(source: Source, entry: Any, i: int) -> Iterator[tuple[str, int | None]]:
    if isinstance(entry, str) and entry:
        yield entry, None
        return
    if not isinstance(entry, dict) or set(entry) != {"name", "checkpoints"}:
        source.fail(
            f"`models` should be names, or `name` with `checkpoints`. Found `{entry}`.",
            "models",
            i,
        )
    root, folder = str(entry["name"]), Path(str(entry["name"])).expanduser()
    found = [str(one) for one in items(entry["checkpoints"])]
    if folder.is_dir():
        matches = [sorted(folder.glob(one), key=lambda p: _step(p.name) or 0) for one in found]
        for pattern, paths in zip(found, matches, strict=True):
            if not paths:
                source.fail(
                    f"`checkpoints` should be folders in `{root}`. Found none named `{pattern}`.",
                    "models",
                    i,
                )
        yield from (
            (f"{root}/{p.relative_to(folder)}", _step(p.name)) for ps in matches for p in ps
        )
    else:
        yield from ((f"{root}@{one}", _step(one)) for one in found)


def _step(name: str) -> int | None:
    """The training step in the name of a checkpoint: its last number.

    >>> _step("checkpoint-1000"), _step("main")
    (1000, None)
    """
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def _check_together(source: Source, spec: Spec) -> None:
    """What each entry allows and all together do not."""
    built = [one for one in spec.inputs if one != REAL]
    other = [one for one in spec.maps if one not in WITH_THEOREMS]
    if built and (other or spec.per_head):
        found = "`per_head`" if spec.per_head else f"`{other[0]}`"
        source.fail(
            f"`inputs` that are built go with the maps {' and '.join(WITH_THEOREMS)} and all heads "
            f"together. Found `{built[0]}` with {found}.",
            "inputs",
        )
    if spec.theorems and not set(spec.maps) & set(WITH_THEOREMS):
        source.fail(
            f"`theorems` speak of the maps {' and '.join(WITH_THEOREMS)}. Found neither in `maps`.",
            "theorems",
        )
    if spec.tight and "float32" in spec.dtypes:
        source.fail("`tight` intervals need `dtypes: [float64]`. Found `float32`.", "tight")
    if OF_TEXT not in spec.radii and spec.inputs == (REAL,):
        source.fail("`radii` are those of built inputs. Found only `real` in `inputs`.", "radii")
    for option in ("move", "read"):
        try:
            for n in spec.lengths:
                parse_tokens(getattr(spec, option), n, option)
        except InputError as problem:
            source.fail(str(problem).replace("`--", "`"), option)
    if spec.tol < (smallest := max(SMALLEST_TOL[getattr(torch, d)] for d in spec.dtypes)):
        source.fail(
            f"`tol` should be at least {smallest:g} in these `dtypes`. Found {spec.tol}.", "tol"
        )
