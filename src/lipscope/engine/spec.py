"""What a run asks for: every option of every verb, checked once, in one frozen record."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import torch

from lipscope.attacks import PER_HEAD, PER_LAYER
from lipscope.engine import checks
from lipscope.engine.checks import OF_TEXT, Check
from lipscope.engine.ranges import COPIES, parse_tokens
from lipscope.engine.source import Source
from lipscope.errors import InputError
from lipscope.linalg.norms import Metric
from lipscope.linalg.singular import SMALLEST_TOL
from lipscope.models import MAPS, SIDES, Side
from lipscope.models.data.windows import WindowKind
from lipscope.models.tracing.maps import MapName
from lipscope.theorems import catalogue

METRICS: tuple[str, ...] = get_args(Metric)
DType = Literal["float32", "float64"]
Radius = float | Literal["row", "inputs", "norm"]

REAL, ADVERSARIAL, ASCENT = "real", "adversarial", "ascent"
CONSTRUCTIONS = (*PER_LAYER, *PER_HEAD)
INPUTS = (REAL, ADVERSARIAL, ASCENT, *CONSTRUCTIONS)
# Maps of which theorems speak, and those for which inputs are built.
WITH_THEOREMS = ("attention", "heads", "normed", "residual")
WITH_INPUTS = ("attention", "heads")
_AT_INPUTS = [one for one in catalogue() if "eps" not in one.needs]
THEOREMS = tuple(one.name for one in _AT_INPUTS)
LENGTHS, SAMPLES = (16, 64, 256), 10


class SolverOptions(TypedDict, total=False):
    """When the solver stops: part of every id, and handed to it by these names."""

    tol: float
    delta: float


SOLVER = tuple(get_type_hints(SolverOptions))


class Options(SolverOptions, total=False):
    """Options that every verb has; `measure` says what they mean."""

    map: MapName
    position_offset: int
    windows: WindowKind
    special_tokens: bool
    images: str | Path | None
    resolutions: Sequence[int] | None
    dtype: DType | None
    device: str
    seed: int
    memory: int | str
    modules: str | None
    tokenizer: Any
    revision: str | None
    allow_pickle: bool


class MeasureOptions(Options, total=False):
    """Options of the verbs that answer with rows of measurements and their bounds."""

    per_head: bool
    metric: Metric
    move: str
    read: str
    side: Side
    inputs: str | Sequence[str]
    ascent_steps: int
    theorems: str | Sequence[str]
    sharp: bool
    radius: Radius
    rest: bool
    average: bool


class Model(NamedTuple):
    """A model, or one checkpoint of one.

    Attributes:
        name: For `load_model`, and in the rows.
        step: Training step of a checkpoint; None elsewhere.
        entry: Number of its entry in the specification; the checkpoints of one share it.
    """

    name: str
    step: int | None = None
    entry: int = 0


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that a run asks for: every combination of its lists is a job.

    What is not named here is an option of `measure`.

    Attributes:
        models: Models and checkpoints.
        texts: Names of texts, batches or pictures, and digests of their content.
        layers: Indices from 0, or None for all.
        maps: ``heads``, ``attention``, ``normed``, ``residual``, ``block``, ``model``.
        metrics: ``frobenius``, ``token-relative``, ``max-token``, ``infinity``.
        lengths: Numbers of tokens of windows of text; 16, 64, 256 if None.
        samples: Windows per length, or pictures; 10 if None.
        inputs: ``real`` (what was given), a construction, ``adversarial`` (the worst of
            them and of an ascent) or ``ascent``; those that are built are built once per length.
        radii: Largest token norm of inputs that are built; ``text`` for that of the text.
        dtypes: ``float32``, ``float64``.
        seeds: Of random starts, and of the weights of random models.
        theorems: Names in the catalogue (``all`` stands for those that do not take seconds a
            head); asked about rows of the maps ``attention``, ``heads``, ``normed`` and
            ``residual``.
        sharp: Whether theorems that may take long are computed where they are named; None
            for those that are expected to take a few seconds.
        radius: Of which tokens bounds on all inputs speak: those up to the norm of the row's own
            input (``row``), of the layer's largest input (``inputs``), of the largest that
            the norm before the layer lets through (``norm``), or a number.
        ascent_steps: Steps of gradient ascent.
        windows: ``spread``: the same passages at every length; ``disjoint``: no window shares text.
        special_tokens: Whether the model's own special tokens stand around each window.
        images: Pictures instead of texts: a folder, or ``random``.
        resolutions: Sides of the pictures in pixels; the model's own if None.
        tokens: Whether the tokens of every row are kept.
        directions: How many of the leading singular directions are put in words.
        among: Texts; towards which of them directions turn the model's mean output.
    """

    models: tuple[Model, ...]
    texts: Mapping[str, str]
    layers: tuple[int, ...] | None = None
    maps: tuple[str, ...] = ("attention",)
    metrics: tuple[str, ...] = ("frobenius",)
    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    inputs: tuple[str, ...] = (REAL,)
    radii: tuple[float | str, ...] = (OF_TEXT,)
    dtypes: tuple[str, ...] = ("float32",)
    seeds: tuple[int, ...] = (0,)
    theorems: tuple[str, ...] = ()
    sharp: bool | None = True
    radius: Radius = "row"
    ascent_steps: int = 40
    windows: str = "spread"
    special_tokens: bool = True
    images: str | None = None
    resolutions: tuple[int, ...] | None = None
    per_head: bool = False
    move: str = "all"
    read: str = "all"
    side: Side = "self"
    position_offset: int = 0
    rest: bool = False
    average: bool = False
    tol: float = 1e-3
    delta: float = 0.01
    memory: str = "1GiB"
    device: str = "auto"
    modules: str | None = None
    allow_pickle: bool = False
    tokens: bool = True
    directions: int = 0
    among: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what the manifest holds and what workers are told."""
        return asdict(self) | {"models": [list(model) for model in self.models]}

    def solver(self) -> dict[str, Any]:
        """What the solver is told."""
        return {name: getattr(self, name) for name in SOLVER}


CHECKS: dict[str, Check] = {
    "layers": checks.layers,
    "maps": checks.words(MAPS),
    "metrics": checks.words(METRICS),
    "lengths": checks.lengths,
    "samples": checks.whole(1, 100_000),
    "inputs": checks.words(INPUTS),
    "radii": checks.radii,
    "dtypes": checks.words(("float32", "float64")),
    "seeds": checks.seeds,
    "theorems": checks.theorems(THEOREMS, [one.name for one in _AT_INPUTS if not one.slow]),
    "sharp": checks.flag,
    "radius": checks.radius,
    "ascent_steps": checks.whole(0, 100_000),
    "windows": checks.one_of("spread", "disjoint"),
    "special_tokens": checks.flag,
    "images": checks.path,
    "resolutions": checks.sides,
    "per_head": checks.flag,
    "move": checks.word,
    "read": checks.word,
    "side": checks.one_of(*SIDES),
    "position_offset": checks.whole(0, 2**31),
    "rest": checks.flag,
    "average": checks.flag,
    "tol": checks.number,
    "delta": checks.number,
    "memory": checks.memory,
    "device": checks.word,
    "modules": checks.word,
    "allow_pickle": checks.flag,
    "tokens": checks.flag,
}
# What a single run calls by one word, a sweep calls by its plural.
AXES = {"map": "maps", "metric": "metrics", "dtype": "dtypes", "seed": "seeds"}


def single_spec(
    model: str,
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    verb: str,
    without: Collection[str] = (),
    dtype: str = "float32",
) -> Spec:
    """The specification of one call of a verb.

    Args:
        model: Name of the model.
        sources: Digests of what it reads, by name.
        options: The call's options; None for what is left to its default.
        verb: Name of the verb, for the messages.
        without: Options that make no sense for it.
        dtype: Floating type if none is asked for.

    Returns:
        The specification.

    Raises:
        InputError: For an option that the verb does not have, or a value that cannot be.
    """
    source = Source("", {name: value for name, value in options.items() if value is not None})
    known = [name for name in _OPTIONS if name not in without]
    for name in source.values:
        if name in without:
            source.fail(f"`{verb}` has no option `{name}`; leave it out.")
        if name not in known:
            raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}")
    values: dict[str, Any] = {}
    for name, value in source.values.items():
        key = AXES.get(name, name)
        values[key] = CHECKS[key](source, name, value)
    values.setdefault("dtypes", (dtype,))
    made = Spec(models=(Model(model),), texts=sources, **values)
    check_together(source, made)
    return made


_OPTIONS = (
    *get_type_hints(MeasureOptions),
    "layers",
    "lengths",
    "samples",
    "radii",
    "allow_pickle",
)


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
        sources: What models read, by name: texts, batches or a folder of pictures.
        name: Of its file, without the ending; "" if there is none.
    """

    spec: Spec
    sources: Mapping[str, Any]
    name: str = ""


def digests(sources: Mapping[str, Any]) -> dict[str, str]:
    """Digests of texts, and of what other sources are called."""
    return {
        name: hashlib.sha256(str(one).encode("utf-8", "replace")).hexdigest()
        for name, one in sources.items()
    }


def check_together(source: Source, spec: Spec) -> None:
    """What each entry allows and all together do not."""
    _check_inputs(source, spec)
    _check_theorems(source, spec)
    pictures = spec.images is not None
    if pictures and "lengths" in source.values:
        source.fail(
            "`images` take the place of a text. Found `lengths`; leave them out.", "lengths"
        )
    if not pictures and spec.resolutions is not None:
        source.fail("`resolutions` go with `images`. Found no `images`.", "resolutions")
    for option in ("move", "read"):
        try:
            for n in spec.lengths or ():
                parse_tokens(getattr(spec, option), n, option)
        except InputError as problem:
            source.fail(str(problem).replace("`--", "`"), option)
    if spec.move == COPIES:
        _check_copies(source, spec)
    if spec.tol < (smallest := max(SMALLEST_TOL[getattr(torch, d)] for d in spec.dtypes)):
        source.fail(
            f"`tol` should be between {smallest:g} and 1 in {' and '.join(spec.dtypes)}. "
            f"Found `tol = {spec.tol}`.",
            "tol",
        )
    norms = [one for one in spec.metrics if one in ("max-token", "infinity")]
    if norms and (spec.rest or spec.average):
        source.fail(
            f"`rest` and `average` go with the metrics frobenius and token-relative. Found "
            f"`{norms[0]}`.",
            "metrics",
        )


def _check_copies(source: Source, spec: Spec) -> None:
    """Copies of a token move against each other in self-attention whose weights are known."""
    said = "`move = copies` goes with"
    other = [one for one in spec.maps if one not in WITH_INPUTS]
    if other:
        source.fail(f"{said} the maps {' and '.join(WITH_INPUTS)}. Found `{other[0]}`.", "move")
    if spec.side != "self":
        source.fail(f"{said} self-attention. Found `side = {spec.side}`.", "move")
    if spec.theorems:
        source.fail(f"{said} no theorems, which speak of whole tokens. Found some.", "theorems")


def _check_inputs(source: Source, spec: Spec) -> None:
    """Inputs that are built need whole layers whose weights are known."""
    built = [one for one in spec.inputs if one != REAL]
    other = [one for one in spec.maps if one not in WITH_INPUTS]
    if built and (other or spec.per_head):
        found = "`per_head`" if spec.per_head else f"`{other[0]}`"
        source.fail(
            f"`inputs` that are built go with the maps {' and '.join(WITH_INPUTS)} and all heads "
            f"together. Found `{built[0]}` with {found}.",
            "inputs",
        )
    if OF_TEXT not in spec.radii and not built:
        source.fail("`radii` go with inputs that are built. Found only `real`.", "radii")


def _check_theorems(source: Source, spec: Spec) -> None:
    """Theorems speak of some maps, and of all tokens."""
    if not spec.theorems:
        return
    if not set(spec.maps) & set(WITH_THEOREMS):
        source.fail(
            f"`theorems` are about the maps {', '.join(WITH_THEOREMS)}. Found none of them in "
            "`maps`.",
            "theorems",
        )
    if spec.side != "self":
        source.fail(
            f"`theorems` are about self-attention. Found `side = {spec.side}`; leave one of them "
            "out.",
            "side",
        )
    if spec.radius != "row" and "normed" in spec.maps and spec.radius != "inputs":
        source.fail(
            "`radius` should be left out for the map `normed`, whose bounds hold for tokens of "
            f"every norm from the smallest of the text on. Found `radius = {spec.radius}`.",
            "radius",
        )
