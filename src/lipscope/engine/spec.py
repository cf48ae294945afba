"""The specification of a run: every option of every verb, checked once, in one frozen record."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    get_args,
    get_type_hints,
)

from lipscope.engine import checks
from lipscope.engine.checks import COPIES, OF_TEXT, Check, Entries, parse_tokens
from lipscope.errors import InputError, OptionError
from lipscope.records import MAPS, MapName
from lipscope.sources import check_device, check_model, default_text, read_text, read_texts

if TYPE_CHECKING:  # not at run time: the command line completes options without torch
    from lipscope.certificates import DecisionBall
    from lipscope.linalg import Metric
    from lipscope.models import Side, WindowKind

Default = TypeVar("Default")
DType = Literal["float32", "float64"]
Radius = float | Literal["row", "inputs", "norm"]

REAL, ADVERSARIAL, ASCENT = "real", "adversarial", "ascent"
# Maps that theorems cover, and maps with built inputs.
WITH_THEOREMS = ("attention", "heads", "normed", "residual")
WITH_INPUTS = ("attention", "heads")
LENGTHS, SAMPLES = (16, 64, 128, 256), 10


class Options(TypedDict, total=False):
    """Options of every verb, documented in `measure`."""

    map: MapName
    position_offset: int
    windows: WindowKind
    special_tokens: bool
    causal: bool | None
    images: str | Path | None
    resolutions: Sequence[int] | None
    tol: float
    delta: float
    dtype: DType | None
    device: str
    seed: int
    memory: int | str
    modules: str | None
    tokenizer: Any
    revision: str | None
    allow_pickle: bool


class MeasureOptions(Options, total=False):
    """Options of the verbs that return measurements and their bounds."""

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
    """A model, or a checkpoint of one."""

    name: str  # for `load_model`, and in the rows
    step: int | None = None  # training step of a checkpoint; None otherwise
    entry: int = 0  # index of its entry in the specification, shared by its checkpoints


def _option(group: str, default: Default, check: Check, words: str = "", **how: bool) -> Default:
    """An entry of `Spec`: its default, its check, and its group and help on the command line.

    ``left``: a command leaves the default to its verb. ``rare``: omitted from help to save space.
    ``named``: part of every id.
    """
    how = {"left": False, "rare": False, "named": False} | how
    return field(default=default, metadata={"check": check, "group": group, "help": words} | how)


_entry, _input, _question = (partial(_option, group) for group in ("", "input", "question"))
_theorem, _solver = (partial(_option, group) for group in ("theorems", "solver"))


def _when_used(entry: str) -> Check:
    """The check of an entry whose choices are defined in packages that import torch; deferred."""

    def check(source: Entries, key: str, value: Any) -> Any:
        from lipscope.attacks import PER_HEAD, PER_LAYER
        from lipscope.certificates import DecisionBall
        from lipscope.linalg import Metric
        from lipscope.models import SIDES

        known = {
            "metrics": checks.words(get_args(Metric)),
            "side": checks.one_of(*SIDES),
            "decisions": checks.words(get_args(DecisionBall)),
            "inputs": checks.words((REAL, ADVERSARIAL, ASCENT, *PER_LAYER, *PER_HEAD)),
        }
        return known[entry](source, key, value)

    return check


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All settings of a run; every combination of its lists is a job.

    Options are declared here once, with types for callers in `MeasureOptions`; those not listed
    below are documented in `measure`.

    Attributes:
        models: Models and checkpoints.
        texts: Names of texts, batches or pictures, and digests of their content.
        layers: Indices from 0, or None for all.
        maps: Names of maps: those of `MAPS`.
        metrics: ``frobenius``, ``token-relative``, ``max-token``, ``infinity``.
        inputs: ``real`` (as given), a construction, ``adversarial`` (the worst construction or
            ascent) or ``ascent``; built inputs are built once per length.
        radii: Largest token norms of built inputs; ``text`` for that of the text.
        dtypes: ``float32``, ``float64``.
        seeds: Seeds of random starts, and of the weights of random models.
        theorems: Names in the catalogue, evaluated for rows of the maps `WITH_THEOREMS`.
        tokens: Whether the tokens of every row are stored.
        directions: Number of leading singular directions to describe in words.
        among: Texts that directions may turn the model's mean output towards.
        decisions: Balls in which the decisions of rows of the map ``margin`` are certified.
    """

    models: tuple[Model, ...]
    texts: Mapping[str, str]
    layers: tuple[int, ...] | None = _entry(None, checks.layers)
    lengths: tuple[int, ...] | None = _entry(None, checks.integers(1, 10**7, rising=True))
    samples: int | None = _entry(None, checks.whole_number(1, 100_000))
    windows: WindowKind = _input(
        "spread", checks.one_of("spread", "disjoint"), "or disjoint, no overlap."
    )
    special_tokens: bool = _input(True, checks.flag, "Add special tokens such as [CLS].")
    causal: bool | None = _input(
        None, checks.flag, "yes or no: with a causal mask in every layer, or without.", rare=True
    )
    position_offset: int = _input(
        0, checks.whole_number(0, 2**31), "First position id.", named=True
    )
    images: str | None = _input(None, checks.path, "DIR or random, then @224,448.")
    resolutions: tuple[int, ...] | None = _entry(None, checks.integers(1, 4096, rising=True))
    maps: tuple[str, ...] = _question(
        ("attention",),
        checks.words(MAPS),
        "heads, normed, residual, block, stack, model, logits, margin",
    )
    per_head: bool = _question(False, checks.flag, "One row per head.")
    metrics: tuple[str, ...] = _question(
        ("frobenius",), _when_used("metrics"), "or token-relative, max-token, infinity.", left=True
    )
    move: str = _question(
        "all", checks.word, "first, last, not-first, a:b, a%:b%, copies.", named=True
    )
    read: str = _question("all", checks.word, "Outputs to read.", named=True)
    side: Side = _question("self", _when_used("side"), "Across: query, key.", named=True)
    rest: bool = _question(False, checks.flag, "Also with the top token held fixed.")
    average: bool = _question(False, checks.flag, "Also Frobenius norm and stable rank.")
    inputs: tuple[str, ...] = _theorem(
        (REAL,), _when_used("inputs"), "or adversarial, ascent, a construction; comma-separated."
    )
    radii: tuple[float | str, ...] = _entry((OF_TEXT,), checks.radii)
    ascent_steps: int = _theorem(
        40, checks.whole_number(0, 100_000), "Steps of gradient ascent.", left=True
    )
    theorems: tuple[str, ...] = _theorem(
        (), checks.theorem_names, "Names, or all that are quick.", left=True
    )
    sharp: bool | None = _theorem(
        True, checks.flag, "Also slow bounds; unset: up to seconds.", left=True
    )
    radius: Radius = _theorem(
        "row",
        checks.radius,
        "Largest token norm of bounds: a number, norm, inputs, row.",
        left=True,
    )
    tol: float = _solver(1e-3, checks.between_0_and_1, "How wide intervals may be.", named=True)
    delta: float = _solver(0.01, checks.between_0_and_1, "Their failure probability.", named=True)
    dtypes: tuple[str, ...] = _solver(
        ("float32",), checks.words(get_args(DType)), "float32 or float64.", left=True
    )
    device: str = _solver("auto", checks.word, "auto, cpu, cuda, …")
    seeds: tuple[int, ...] = _solver(
        (0,), checks.integers(0, 2**63 - 1), "Seed of the random starts."
    )
    memory: str = _solver(checks.FREE, checks.memory, "Budget, such as 1GiB.")
    modules: str | None = _solver(
        None, checks.word, "Regular expression for attention modules.", rare=True, named=True
    )
    allow_pickle: bool = _solver(False, checks.flag, "Load pickled weights, weights only.")
    tokens: bool = _entry(True, checks.flag)
    decisions: tuple[DecisionBall, ...] = _entry((), _when_used("decisions"))
    directions: int = 0
    among: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the manifest and for workers."""
        return asdict(self) | {"models": [list(model) for model in self.models]}


OPTIONS = {one.name: one for one in fields(Spec) if one.metadata}
CHECKS: dict[str, Check] = {name: one.metadata["check"] for name, one in OPTIONS.items()}
# Singular names of a single run, and plural names of a sweep.
AXES = {"map": "maps", "metric": "metrics", "dtype": "dtypes", "seed": "seeds"}
_SINGLE = {plural: single for single, plural in AXES.items()}
_KNOWN = (*MeasureOptions.__annotations__, "layers", "lengths", "samples", "radii")
# Options that define the question; verbs with a fixed question do not have them.
OF_QUESTION = tuple(n for n in MeasureOptions.__annotations__ if n not in Options.__annotations__)


class Verb(NamedTuple):
    """The options and requirements of a verb."""

    name: str  # for messages
    without: Collection[str] = ()  # options that do not apply
    dtype: str = "float32"  # default floating type
    norms: bool = False  # whether it needs the norms that feed layers
    whole: str = ""  # name of a task that needs all weights in memory; empty if none does
    one_input: bool = False  # whether it takes a single input
    by_layer: bool = False  # whether each layer is surveyed in its turn, not all at the start


def options_of(group: str) -> tuple[str, ...]:
    """The options of a group, by their names in a single run.

    >>> options_of("theorems")
    ('inputs', 'ascent_steps', 'theorems', 'sharp', 'radius')
    """
    found = (name for name, one in OPTIONS.items() if one.metadata["group"] == group)
    return tuple(_SINGLE.get(name, name) for name in found)


def single_spec(
    verb: Verb, model: str, sources: Mapping[str, str], options: Mapping[str, Any], dtype: str
) -> Spec:
    """The specification of a call of a verb; ``dtype`` is its default floating type.

    ``sources`` are digests of its inputs by name; ``options`` that are None take their defaults.
    """
    source = Entries("", {name: value for name, value in options.items() if value is not None})
    known = [name for name in _KNOWN if name not in verb.without]
    for name in source.values:
        if name in verb.without:
            source.fail(f"`{verb.name}` has no option `{name}`; leave it out.")
        if name not in known:
            twin = next((one for one in known if one in (f"{name}s", name.removesuffix("s"))), None)
            if twin is not None:
                source.fail(f"`{verb.name}` has no option `{name}`; write `{twin}=`.")
            raise OptionError(
                f"{verb.name}() got an unexpected keyword argument {name!r}."
                + checks.nearest(name, _names_of(verb))
            )
    values: dict[str, Any] = {}
    for name, value in source.values.items():
        key = AXES.get(name, name)
        values[key] = CHECKS[key](source, name, value)
    values.setdefault("dtypes", (dtype,))
    made = Spec(models=(Model(model),), texts=sources, **values)
    check_together(source, made)
    return made


def _names_of(verb: Verb) -> list[str]:
    """Names of the arguments of a verb's function."""
    door = import_module("lipscope.engine")
    function = getattr(door, verb.name, None) or getattr(door.OpenModel, verb.name)
    options = get_args(get_type_hints(function).get("options", MeasureOptions)) or (MeasureOptions,)
    more = [one for one in options[0].__annotations__ if one not in verb.without]
    return [*inspect.signature(function).parameters, *more]


def spec_of(values: Mapping[str, Any]) -> Spec:
    """The specification from `Spec.as_dict`."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    plain["models"] = tuple(Model(*one) for one in values["models"])
    return Spec(**plain)


@dataclass(frozen=True)
class Request:
    """A specification with the contents that it names."""

    spec: Spec  # the specification
    sources: Mapping[str, Any]  # inputs of models by name: texts, batches or a folder of pictures
    source: Entries  # the original entries with their line numbers


def digests(sources: Mapping[str, Any]) -> dict[str, str]:
    """Digests of texts, and of the names of other sources."""
    return {
        name: hashlib.sha256(str(one).encode("utf-8", "replace")).hexdigest()
        for name, one in sources.items()
    }


def check_together(source: Entries, spec: Spec) -> None:
    """Reject incompatible options."""
    import torch  # not at the top: see the imports

    from lipscope.linalg import SMALLEST_TOL, SPECTRAL

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
            source.fail(str(problem), option)
    if spec.move == COPIES:
        _check_copies(source, spec)
    if spec.tol < (smallest := max(SMALLEST_TOL[getattr(torch, d)] for d in spec.dtypes)):
        should = f"between {smallest:g} and 1 in {' and '.join(spec.dtypes)}"
        source.refuse(should, spec.tol, "tol")
    _check_decisions(source, spec)
    norms = [one for one in spec.metrics if one not in SPECTRAL]
    if norms and (spec.rest or spec.average):
        source.fail(
            f"`rest` and `average` go with the metrics frobenius and token-relative. Found "
            f"`{norms[0]}`.",
            "metrics",
        )


def _check_copies(source: Entries, spec: Spec) -> None:
    """Require self-attention with known weights for ``move = copies``."""
    said = "`move = copies` goes with"
    other = [one for one in spec.maps if one not in WITH_INPUTS]
    if other:
        source.fail(f"{said} the maps {' and '.join(WITH_INPUTS)}. Found `{other[0]}`.", "move")
    if spec.side != "self":
        source.fail(f"{said} self-attention. Found `side = {spec.side}`.", "move")
    if spec.theorems:
        source.fail(f"{said} no theorems, which cover only whole tokens. Found some.", "theorems")


def _check_decisions(source: Entries, spec: Spec) -> None:
    """Require float64 and rows of the map ``margin`` for decisions."""
    if not spec.decisions:
        return
    for key, wanted, found in (("maps", "margin", spec.maps), ("dtypes", "float64", spec.dtypes)):
        if found != (wanted,):
            source.fail(
                f"`decisions` go with `{key}: {wanted}`. Found `{', '.join(found)}`.", "decisions"
            )


def _check_inputs(source: Entries, spec: Spec) -> None:
    """Require whole layers with known weights for built inputs."""
    built = [one for one in spec.inputs if one != REAL]
    other = [one for one in spec.maps if one not in WITH_INPUTS]
    if built and (other or spec.per_head):
        found = "`per_head`" if spec.per_head else f"`{other[0]}`"
        source.fail(
            f"`inputs` other than real go with the maps {' and '.join(WITH_INPUTS)} and all heads "
            f"together. Found `{built[0]}` with {found}.",
            "inputs",
        )
    if OF_TEXT not in spec.radii and not built:
        source.fail("`radii` go with built inputs. Found only `real`.", "radii")
    if "ascent_steps" in source.values and not {ADVERSARIAL, ASCENT} & {*built}:
        climbs = f"`ascent_steps` go with the inputs {ADVERSARIAL} and {ASCENT}."
        source.fail(f"{climbs} Found `{spec.inputs[0]}`.", "ascent_steps")


def _check_theorems(source: Entries, spec: Spec) -> None:
    """Require maps that theorems cover; without theorems, none of their options."""
    if not spec.theorems:
        if one := next((one for one in ("radius", "sharp") if one in source.values), None):
            source.fail(f"`{one}` goes with `theorems`. Found none of them.", one)
        return
    if not set(spec.maps) & set(WITH_THEOREMS):
        known = ", ".join(WITH_THEOREMS)
        source.fail(
            f"Theorems cover the maps {known}. Found `{', '.join(spec.maps)}`; choose one of "
            "them, or measure without `theorems`.",
            "theorems",
        )
    if spec.side != "self":
        found = f"`side = {spec.side}`; leave one of them out"
        source.fail(f"`theorems` are about self-attention. Found {found}.", "side")
    if spec.radius != "row" and "normed" in spec.maps and spec.radius != "inputs":
        source.fail(
            "`radius` should be left out for the map `normed`, whose bounds hold for tokens of "
            f"every norm from the smallest of the text on. Found `radius = {spec.radius}`.",
            "radius",
        )


# --- checks without torch

# Options whose choices need torch, or that have another meaning for a verb.
_LATER = ("metrics", "side", "inputs", "theorems", "tokens")


def refuse_early(model: str, options: Mapping[str, Any]) -> None:
    """Refuse requests that are invalid for every model; the verb checks the rest.

    ``options`` are those of a verb, without those left to its defaults.

    Raises:
        InputError: As the verb itself would.
    """
    for name, value in options.items():
        key = AXES.get(name, name)
        if key in CHECKS and key not in _LATER and value is not None:
            CHECKS[key](Entries("", {name: value}), name, value)
    check_device(options.get("device", "auto"))
    if isinstance(among := options.get("among"), Path):
        read_text(among, "`among`")
    asked: dict[str, Any] = {"allow_pickle": options.get("allow_pickle", False)}
    if "images" not in options:
        asked["lengths"] = checks.items(options.get("lengths", options.get("length", [])))
    if options.get("modules") is None and options.get("side", "self") == "self":
        numbers = options.get("layers", options.get("layer", "all"))
        asked["layers"] = checks.layers(Entries("", {}), "layers", numbers) or ()
        asked["head"] = options.get("head")
    check_model(model, **asked)


# --- the file of a sweep: its entries with their lines, its models, checkpoints and texts

_DEFAULT, _IMAGES = "default", "images"
# The scalars of YAML 1.2. PyYAML implements 1.1, where `2:50:4` is a number in base 60,
# `1e-3` is a string and `no` is false.
_SCALARS = {
    "null": r"^(~|null|Null|NULL|)$",
    "bool": r"^(true|True|TRUE|false|False|FALSE)$",
    "int": r"^[-+]?[0-9]+$",
    "float": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$",
}
_MOST = 100_000  # maximum number of characters, and of values, in a specification


def read_spec(spec: str | Path | Mapping[str, Any]) -> Request:
    """Read and check a specification, from a YAML file or a mapping, with its texts.

    Raises:
        InputError: For every invalid entry, with its key and line.

    >>> made = read_spec({"models": "minilm", "lengths": "16:64:16", "layers": [0, 1]}).spec
    >>> made.lengths, made.layers, made.models[0].name
    ((16, 32, 48, 64), (0, 1), 'minilm')
    """
    source = _read_entries(spec)
    source.check_keys(["models", "texts", *CHECKS])
    values = {
        key: CHECKS[key](source, key, value)
        for key, value in source.values.items()
        if key not in ("models", "texts")
    }
    if "images" in values:
        if "texts" in source.values:
            source.fail("`images` take the place of texts. Found both; leave one out.", "images")
        sources = {_IMAGES: values["images"]}
    else:
        sources = _text_contents(source)
        values = {"lengths": LENGTHS, "samples": SAMPLES} | values
    made = Spec(models=tuple(_models_of(source)), texts=digests(sources), **values)
    check_together(source, made)
    return Request(made, sources, source)


def _text_contents(source: Entries) -> dict[str, str]:
    """The content of every text by name, the stem of its file name."""
    texts: dict[str, str] = {}
    for i, entry in enumerate(checks.items(source.values.get("texts", _DEFAULT))):
        if not isinstance(entry, str | Path):
            source.refuse("names of files", entry, "texts", i)
        name = _DEFAULT if entry == _DEFAULT else Path(entry).stem
        if name in texts:
            source.fail(f"`texts` should have distinct names. Found `{name}` twice.", "texts", i)
        try:
            texts[name] = (
                default_text()
                if entry == _DEFAULT
                else read_texts(entry, "`texts`", "readable text files")
            )
        except InputError as problem:
            source.fail(str(problem), "texts", i)
    if not texts:
        source.fail("`texts` should name at least one. Found none.", "texts")
    return texts


def _models_of(source: Entries) -> Iterator[Model]:
    """All models, with every checkpoint as a separate one."""
    entries = checks.items(source.values.get("models", []))
    if not entries:
        source.fail("`models` should name at least one model, such as `models: [minilm]`.")
    seen: set[str] = set()
    for i, entry in enumerate(entries):
        for name, step in _checkpoints_of(source, entry, i):
            if name in seen:
                source.fail(
                    f"`models` should name each model once. Found `{name}` twice.", "models", i
                )
            seen.add(name)
            yield Model(name, step, i)


def _checkpoints_of(source: Entries, entry: Any, i: int) -> Iterator[tuple[str, int | None]]:
    if isinstance(entry, str) and entry:
        yield entry, None
        return
    if not isinstance(entry, dict) or set(entry) != {"name", "checkpoints"}:
        source.refuse("names, or `name` with `checkpoints`", entry, "models", i)
    root, folder = str(entry["name"]), Path(os.path.expanduser(str(entry["name"])))
    found = [str(one) for one in checks.items(entry["checkpoints"])]
    if os.path.isdir(folder):
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


# --- YAML


def _read_entries(spec: str | Path | Mapping[str, Any]) -> Entries:
    """The entries of a YAML file, or the given values."""
    if isinstance(spec, Mapping):
        return Entries("", dict(spec))
    if not isinstance(spec, str | Path):
        raise InputError(
            "The specification should be the path of a YAML file, or a mapping of entries. Found "
            f"`{type(spec).__name__}`."
        )
    import yaml

    path = Path(spec)
    text = read_text(path, "The specification", "a readable YAML file")
    try:
        node = yaml.compose(text, Loader=_loader()) if len(text) <= _MOST else None
        if not isinstance(node, yaml.MappingNode) or _count_values(node, {}) > _MOST:
            raise InputError(
                f"`{path}` should hold entries such as `models: [minilm]`, and at most {_MOST:,} "
                "characters and values. Found none, or more."
            )
        return _source(str(path), node)
    # PyYAML's constructors, such as that of dates, raise various exceptions.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"`{path}` should be YAML. Found {_in_one_line(problem)}.") from None


def _count_values(node: Any, known: dict[Any, float]) -> float:
    """Number of values of a node: aliases of aliases multiply, and may contain themselves."""
    if node not in known:
        known[node] = math.inf
        parts = node.value if isinstance(node.value, list) else []
        known[node] = 1.0 + sum(
            _count_values(one, known)
            for part in parts
            for one in (part if type(part) is tuple else [part])
        )
    return known[node]


def _source(name: str, node: Any) -> Entries:
    loader = _loader()("")
    values: dict[str, Any] = {}
    lines: dict[tuple[str | int, ...], int] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in values:
            raise InputError(
                f"`{name}`, line {line}: `{key}` should appear once. Found it on "
                f"line {lines[key,]} too."
            )
        lines[key,] = line
        values[key] = loader.construct_object(value_node, deep=True)
        if value_node.id == "sequence":
            for i, item in enumerate(value_node.value):
                lines[key, i] = item.start_mark.line + 1
    return Entries(name, values, lines)


def _loader() -> Any:
    """A safe loader that reads scalars as YAML 1.2 does."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern in _SCALARS.items():
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), None)
    return loader


def _in_one_line(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "lists that are nested too deeply"
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or " ".join(str(problem).split())
    return what if mark is None else f"{what} on line {mark.line + 1}"
