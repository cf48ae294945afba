"""The specification of a run: every option of every verb, checked once, in one frozen record."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, get_args

from lipscope.engine import checks
from lipscope.engine.checks import COPIES, OF_TEXT, Check, Entries, parse_tokens
from lipscope.errors import InputError
from lipscope.records import MAPS, MapName
from lipscope.sources import check_device, check_model, read_text

if TYPE_CHECKING:  # not at run time: the command line completes options without torch
    from lipscope.certificates import DecisionBall
    from lipscope.linalg import Metric
    from lipscope.models import Side, WindowKind

Default = TypeVar("Default")
DType = Literal["float32", "float64"]
Radius = float | Literal["row", "inputs", "norm"]

REAL, ADVERSARIAL, ASCENT = "real", "adversarial", "ascent"
# Maps of which theorems speak, and those for which inputs are built.
WITH_THEOREMS = ("attention", "heads", "normed", "residual")
WITH_INPUTS = ("attention", "heads")
LENGTHS, SAMPLES = (16, 64, 256), 10


class Options(TypedDict, total=False):
    """Options that every verb has; `measure` says what they mean."""

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
    """A model, or one checkpoint of one."""

    name: str  # for `load_model`, and in the rows
    step: int | None = None  # training step of a checkpoint; None elsewhere
    entry: int = 0  # number of its entry in the specification; the checkpoints of one share it


def _option(group: str, default: Default, check: Check, words: str = "", **how: bool) -> Default:
    """An entry of `Spec`: its default, its check, and its group and help on the command line.

    ``left``: a command leaves the default to its verb. ``rare``: in no help, for want of room.
    ``named``: part of every id.
    """
    how = {"left": False, "rare": False, "named": False} | how
    return field(default=default, metadata={"check": check, "group": group, "help": words} | how)


_entry, _input, _question = (partial(_option, group) for group in ("", "input", "question"))
_theorem, _solver = (partial(_option, group) for group in ("theorems", "solver"))


def _when_used(entry: str) -> Check:
    """The check of an entry whose words stand in rooms that bring torch: asked when it is used."""

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
    """Everything that a run asks for: every combination of its lists is a job.

    An option is declared here, once, and its type for callers in `MeasureOptions`; what is not
    named below is said in `measure`.

    Attributes:
        models: Models and checkpoints.
        texts: Names of texts, batches or pictures, and digests of their content.
        layers: Indices from 0, or None for all.
        maps: Names of maps: those of `MAPS`.
        metrics: ``frobenius``, ``token-relative``, ``max-token``, ``infinity``.
        inputs: ``real`` (what was given), a construction, ``adversarial`` (the worst of
            them and of an ascent) or ``ascent``; those that are built are built once per length.
        radii: Largest token norm of inputs that are built; ``text`` for that of the text.
        dtypes: ``float32``, ``float64``.
        seeds: Of random starts, and of the weights of random models.
        theorems: Names in the catalogue; asked about rows of the maps `WITH_THEOREMS`.
        tokens: Whether the tokens of every row are kept.
        directions: How many of the leading singular directions are put in words.
        among: Texts; towards which of them directions turn the model's mean output.
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
    special_tokens: bool = _input(True, checks.flag, "Put [CLS] and the like around each window.")
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
    read: str = _question("all", checks.word, "Outputs that are read.", named=True)
    side: Side = _question("self", _when_used("side"), "Across: query, key.", named=True)
    rest: bool = _question(False, checks.flag, "Also with the top token held fixed.")
    average: bool = _question(False, checks.flag, "Also Frobenius norm and stable rank.")
    inputs: tuple[str, ...] = _theorem(
        (REAL,), _when_used("inputs"), "or adversarial, ascent, a construction; several by commas."
    )
    radii: tuple[float | str, ...] = _entry((OF_TEXT,), checks.radii)
    ascent_steps: int = _theorem(
        40, checks.whole_number(0, 100_000), "Steps of gradient ascent.", left=True
    )
    theorems: tuple[str, ...] = _theorem(
        (), checks.theorem_names, "Names, or all that are quick.", left=True
    )
    sharp: bool | None = _theorem(
        True, checks.flag, "Bounds that may take long; unset: up to seconds.", left=True
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
        """Plain values: what the manifest holds and what workers are told."""
        return asdict(self) | {"models": [list(model) for model in self.models]}


OPTIONS = {one.name: one for one in fields(Spec) if one.metadata}
CHECKS: dict[str, Check] = {name: one.metadata["check"] for name, one in OPTIONS.items()}
# What a single run calls by one word, a sweep calls by its plural.
AXES = {"map": "maps", "metric": "metrics", "dtype": "dtypes", "seed": "seeds"}
_SINGLE = {plural: single for single, plural in AXES.items()}
_KNOWN = (*MeasureOptions.__annotations__, "layers", "lengths", "samples", "radii")
# Options of the question itself, which verbs with a question of their own do not have.
OF_QUESTION = tuple(n for n in MeasureOptions.__annotations__ if n not in Options.__annotations__)


class Verb(NamedTuple):
    """What tells the options of one verb from those of another."""

    name: str  # for the messages
    without: Collection[str] = ()  # options that make no sense for it
    dtype: str = "float32"  # floating type if none is asked for
    norms: bool = False  # whether it asks for the norms that feed layers
    whole: str = ""  # what needs all weights of the model at once; empty if nothing does
    one_input: bool = False  # whether its answer is of one input
    by_layer: bool = False  # whether a layer is looked at when its turn comes, not before the first


def options_of(group: str) -> tuple[str, ...]:
    """The options of a group, as a single run calls them.

    >>> options_of("theorems")
    ('inputs', 'ascent_steps', 'theorems', 'sharp', 'radius')
    """
    found = (name for name, one in OPTIONS.items() if one.metadata["group"] == group)
    return tuple(_SINGLE.get(name, name) for name in found)


def single_spec(
    verb: Verb, model: str, sources: Mapping[str, str], options: Mapping[str, Any], dtype: str
) -> Spec:
    """The specification of one call of a verb, in a floating type if it asks for none.

    ``sources`` are digests of what it reads, by name; of ``options``, None is left to its default.
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
            raise TypeError(f"{verb.name}() got an unexpected keyword argument {name!r}")
    values: dict[str, Any] = {}
    for name, value in source.values.items():
        key = AXES.get(name, name)
        values[key] = CHECKS[key](source, name, value)
    values.setdefault("dtypes", (dtype,))
    made = Spec(models=(Model(model),), texts=sources, **values)
    check_together(source, made)
    return made


def spec_of(values: Mapping[str, Any]) -> Spec:
    """The specification of `Spec.as_dict`."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    plain["models"] = tuple(Model(*one) for one in values["models"])
    return Spec(**plain)


@dataclass(frozen=True)
class Request:
    """A specification with what it only names."""

    spec: Spec  # the specification
    sources: Mapping[str, Any]  # what models read, by name: texts, batches or a folder of pictures
    name: str = ""  # of its file, without the ending; "" if there is none


def digests(sources: Mapping[str, Any]) -> dict[str, str]:
    """Digests of texts, and of what other sources are called."""
    return {
        name: hashlib.sha256(str(one).encode("utf-8", "replace")).hexdigest()
        for name, one in sources.items()
    }


def check_together(source: Entries, spec: Spec) -> None:
    """Reject incompatible options."""
    import torch  # not above: see the imports

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
            source.fail(str(problem).replace("`--", "`"), option)
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
    """Copies of a token move against each other in self-attention whose weights are known."""
    said = "`move = copies` goes with"
    other = [one for one in spec.maps if one not in WITH_INPUTS]
    if other:
        source.fail(f"{said} the maps {' and '.join(WITH_INPUTS)}. Found `{other[0]}`.", "move")
    if spec.side != "self":
        source.fail(f"{said} self-attention. Found `side = {spec.side}`.", "move")
    if spec.theorems:
        source.fail(f"{said} no theorems, which speak of whole tokens. Found some.", "theorems")


def _check_decisions(source: Entries, spec: Spec) -> None:
    """Decisions are certified in float64, beside rows of the margin."""
    if not spec.decisions:
        return
    for key, wanted, found in (("maps", "margin", spec.maps), ("dtypes", "float64", spec.dtypes)):
        if found != (wanted,):
            source.fail(
                f"`decisions` go with `{key}: {wanted}`. Found `{', '.join(found)}`.", "decisions"
            )


def _check_inputs(source: Entries, spec: Spec) -> None:
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


def _check_theorems(source: Entries, spec: Spec) -> None:
    """Theorems speak of some maps, and of all tokens."""
    if not spec.theorems:
        return
    if not set(spec.maps) & set(WITH_THEOREMS):
        known = ", ".join(WITH_THEOREMS)
        source.fail(f"`theorems` are about the maps {known}. Found none in `maps`.", "theorems")
    if spec.side != "self":
        found = f"`side = {spec.side}`; leave one of them out"
        source.fail(f"`theorems` are about self-attention. Found {found}.", "side")
    if spec.radius != "row" and "normed" in spec.maps and spec.radius != "inputs":
        source.fail(
            "`radius` should be left out for the map `normed`, whose bounds hold for tokens of "
            f"every norm from the smallest of the text on. Found `radius = {spec.radius}`.",
            "radius",
        )


# --- what is certain before torch is imported

# Whose words stand in rooms that bring torch, or mean something else to a verb.
_LATER = ("metrics", "side", "inputs", "theorems", "tokens")


def refuse_early(model: str, options: Mapping[str, Any]) -> None:
    """Refuse what is certain without a look at the model itself; a verb looks at the rest.

    ``options`` are those of a verb, without those that are left to it.

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
