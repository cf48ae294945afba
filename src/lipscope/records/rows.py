"""Records of a run folder: measurements with their side tables, pushes, splits and edits.

A `Measurement` is a flat row; tables, figures and pages are made from rows and never see a
tensor.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lipscope.display import Shown

if TYPE_CHECKING:
    import polars

SCHEMA = 6
"""Version of the file format; files of other versions are refused."""

GIVEN = ("text", "batch", "image")
"""Kinds of inputs from the user; all others are constructed."""

AGAIN = "the next run tries it again"
"""End of the error message of a row that failed for an external reason."""

Record = TypeVar("Record")
Thing = TypeVar("Thing")
Key = TypeVar("Key")
MapName = Literal[
    "heads", "attention", "normed", "residual", "block", "stack", "model", "logits", "margin"
]
MAPS: tuple[str, ...] = typing.get_args(MapName)
Status = Literal["converged", "max_steps", "non_finite", "failed"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement(Shown):
    """One measured local Lipschitz constant, with its settings and provenance.

    Attributes:
        id: Digest of everything that determines the row; stable across restarts.
        model: Name of the model as given by the user.
        revision: Commit, package version, or null.
        weights: Storage type of the weights, for example "float32".
        layer: Index of the layer from 0; null for maps of the whole model.
        head: Query head; null for all heads together.
        map: Function whose Jacobian is measured (see the vocabulary).
        metric: Norm of perturbations.
        move: Tokens that may move.
        read: Output tokens that are read.
        input: Kind of input: "text", "batch", or the construction, such as "two_cluster" or
            "ascent".
        num_tokens: Number of tokens n.
        sample: Index of the text window or batch entry.
        start: First text token of the window; null for a batch.
        sigma: Top singular value (a Ritz value, hence a lower bound); null if none.
        upper: Upper end of the interval, valid with probability ``1 - delta``.
        delta: Failure probability of the interval.
        status: Final state of the solver.
        solver_residual: ``r / (sqrt(2) sigma)``: relative distance to a singular value.
        products: Number of JVPs plus VJPs.
        relative: ``sigma ||X|| / ||f(X)||``.
        top_token: Token with the largest share of the top right singular vector.
        top_share: That share (squared norm, between 0 and 1).
        sigma_rest: Sigma with the top token held fixed; null unless requested.
        frobenius: Estimate of ``||J||_F``; null unless requested.
        radius_max: Largest token norm of the map's input.
        radius_rms: Root mean square token norm of the map's input.
        input_norm: ``||X||_F``.
        output_norm: ``||f(X)||_F``.
        seconds: Solver time, without capture.
        dtype: Floating type of the computation.
        device: Device of the computation.
        seed: Seed of the random starts.
        tokens_sha256: Digest of the token ids (or of the input tensor).
        version: Version of lipscope.
        note: Advice and remarks; null if none.
        error: Error message; null unless the status is "failed".
        text: Name of the text in a sweep; null elsewhere.
        step: Training step of a checkpoint in a sweep; null elsewhere.
        side: Role of the moving tokens: all of self-attention (``self``), or the queries
            (``query``), or the keys and values (``key``) of cross-attention.
        position_offset: Offset added to the position ids.
        module: Path of the module in the model: the attention, the block of the map ``block``, the
            first block of the map ``model``; null if the model is a single layer.
        argument: The moving input: names of the module's arguments, or those of the norm before it.
        projection: Whether the output projection is part of the map: true, false (``heads``, or the
            model applies none), or null if it was not observed as a separate module.
        derivative_error: ``||J v - D|| / ||D||`` with D the finite difference of the model itself
            along the top direction; null except for the first sample of a length.
        trained_length: Number of tokens the model was trained on; null if not stated in its files.
    """

    id: str
    model: str
    revision: str | None = None
    weights: str
    layer: int | None
    head: int | None = None
    map: str
    metric: str
    move: str
    read: str
    input: str
    num_tokens: int
    sample: int
    start: int | None = None
    sigma: float | None
    upper: float | None
    delta: float
    status: Status
    solver_residual: float | None
    products: int
    relative: float | None
    top_token: int | None
    top_share: float | None
    sigma_rest: float | None = None
    frobenius: float | None = None
    radius_max: float | None
    radius_rms: float | None
    input_norm: float | None
    output_norm: float | None
    seconds: float
    dtype: str
    device: str
    seed: int
    tokens_sha256: str
    version: str
    note: str | None = None
    error: str | None = None
    text: str | None = None
    step: int | None = None
    side: str = "self"
    position_offset: int = 0
    module: str | None = None
    argument: str | None = None
    projection: bool | None = None
    derivative_error: float | None = None
    trained_length: int | None = None

    @property
    def passing(self) -> bool:
        """Whether it failed for an external reason: no worker, memory or disk space."""
        return self.error is not None and self.error.endswith(AGAIN)

    def to_dict(self) -> dict[str, Any]:
        """The row as a dict in column order; non-finite numbers are null."""
        return plain_values(vars(self))

    def to_json(self) -> str:
        """The row as one line of JSON."""
        return to_line(vars(self))


@dataclass(frozen=True, kw_only=True)
class TokenShare(Shown):
    """One token of a measured window: its share of the top singular vectors.

    Attributes:
        id: Row of the token.
        index: Position in the window, from 0.
        text: The token's text; its id without a tokenizer, its index without ids.
        share_in: Its share of the top right singular vector (input).
        share_out: Its share of the top left singular vector (output).
        norm: Norm of the map's input at this token.
    """

    id: str
    index: int
    text: str
    share_in: float | None
    share_out: float | None
    norm: float | None


@dataclass(frozen=True, kw_only=True)
class Bound(Shown):
    """One theorem, or one certificate, applied to a layer.

    Attributes:
        id: Row of the bound, with its model, layer, head, map and sigma. "" for a layer that was
            not measured.
        theorem: Name in the catalogue.
        statement: Statement in the source, such as "Theorem 3.2".
        cite: Key of the bibliography, or "derived here".
        kind: ``upper`` or ``lower``; ``radius`` of a ball in which a decision stays.
        scope: Covered inputs: ``local``, ``ball``, ``global``, ``mean-field`` or ``limit``.
        metric: Norm of input and output.
        value: The bound; null if not available.
        radius: Largest token norm covered by global bounds; null for the map ``normed``.
        floor: Smallest token norm (after centring if the norm centres) covered by global bounds
            for the map ``normed``, else null.
        eps: Radius of the ball of a ``ball`` bound, else null.
        reason: Why there is no value, or "".
        note: Caveats, or "".
        sound: False for a published statement that is known to fail.
    """

    id: str = ""
    theorem: str
    statement: str
    cite: str
    kind: str
    scope: str
    metric: str
    value: float | None
    radius: float | None = None
    floor: float | None = None
    eps: float | None = None
    reason: str = ""
    note: str = ""
    sound: bool = True

    @property
    def applicable(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


@dataclass(frozen=True, kw_only=True)
class Direction:
    """One component of a leading singular direction of a layer at an input.

    A direction is a pair of singular vectors, v and u = J v / sigma, up to a common sign. A
    component is a token of v (``side`` is ``right``), a token of u (``left``), a head's
    contribution to u (``head``), or a text (``text``) that the model's output moves towards or
    away from along v.

    Attributes:
        id: Row of the direction.
        rank: 1 for the top direction, then the next ones.
        side: ``right``, ``left``, ``head`` or ``text``.
        index: Position of the token, or index of the head or text.
        text: The token's text, the place of a patch, or ``head 3``.
        share: ``|v_i|^2`` or ``|u_i|^2`` of unit vectors; for a head ``<u, J_h v> / sigma``, which
            sums to 1 over the heads and may be negative; for a text the directional derivative
            along v of the cosine between the mean outputs of the model at the input and the text.
        sigma: Lower bound of the singular value of this rank.
        upper: Upper bound, with probability ``1 - delta`` of the row.
        residual: ``‖J^T J v - theta^2 v‖ / (sqrt(2) theta^2)``, ``theta = ‖J v‖``.
        sine: Upper bound of the sine of the angle between v and the singular vector; null if
            the intervals do not separate this singular value from its neighbours.
        space: Vectors that a token is compared with: ``vocabulary`` (tokens in its place),
            ``read-out`` (gradients of logits), ``window`` (the other tokens); null if none.
        plus: Readings along the vector as JSON, ``[[word, cosine], …]``, nearest first.
        minus: Readings against the vector.
        cosine: Largest absolute cosine with a reading; for a text that of v with the gradient.
        spanned: Fraction of the squared norm in the span of the ten nearest readings.
        chance_cosine: The largest cosine of 99 random directions of this dimension; smaller cosines
            are not meaningful.
        chance_spanned: The largest fraction for these random directions.
    """

    id: str
    rank: int
    side: str
    index: int
    text: str
    share: float
    sigma: float
    upper: float
    residual: float
    sine: float | None
    space: str | None = None
    plus: str | None = None
    minus: str | None = None
    cosine: float | None = None
    spanned: float | None = None
    chance_cosine: float | None = None
    chance_spanned: float | None = None

    @property
    def determined(self) -> bool:
        """Whether the vector is known accurately: errors of cosines are at most 0.1."""
        return self.sine is not None and self.sine <= 0.1

    @property
    def reads(self) -> bool | None:
        """Whether a reading is nearer than for all random directions; None without readings."""
        if self.cosine is None or self.chance_cosine is None:
            return None
        return self.cosine > self.chance_cosine

    def words(self, sign: Literal["plus", "minus"]) -> list[tuple[str, float]]:
        """The readings of one sign with their cosines, nearest first."""
        held = self.plus if sign == "plus" else self.minus
        return [(word, cosine) for word, cosine in json.loads(held or "[]")]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value that an experiment stores in addition to rows, with its own key."""

    part: str  # part of the experiment; values of a part have the same columns
    key: str  # digest of the inputs of the value
    content: str  # the value as JSON


# --- pushes of a layer's input, token splits, text edits

PLACES, DIRECTIONS, STEPS = "push-places", "push-directions", "push"
"""Parts of the values of a run folder; records of all three have a ``push``."""
NEXT, NEAREST, MOVED = "next token", "nearest text", "most changed patch"
"""Readings of a model's output."""
PATCHES = "patches"
"""The directions ``+patches`` and ``-patches``: v restricted to patch tokens."""


@dataclass(frozen=True, kw_only=True)
class PushPlace:
    """One map of a model at the unperturbed input."""

    push: str  # name of this push in all three parts
    id: str  # row of sigma
    mean_norm: float  # mean token norm of the map's input
    input_norm: float  # ``‖X‖_F``
    layer_norm: float | None = None  # ``‖f(X)‖_F``
    # Norm of the output of the enclosing block; None if there is none
    block_norm: float | None = None
    model_norm: float | None = None  # norm of the model's output
    # Sizes, each with the certified bound of the change: a JSON list of pairs; the bound is null if
    # not available
    grid: str = "[]"
    # ``next token``, ``nearest text``, ``most changed patch``, or "" for no reading
    reading: str = ""
    # Readings at X: a JSON list of pairs, best first: a name, and its probability, cosine, or share
    # of the squared change of the model's output
    reads: str = "[]"
    # Decision at X of a read-out of the layer's pooled output, or None
    decision: str | None = None
    decided_by: str = ""  # description of the read-out
    # Certified Frobenius radius within which the decision cannot change; None if not available
    radius: float | None = None
    note: str | None = None  # caveats, or None
    # Whether ``+patches`` and ``-patches`` are pushed: if pixels can realise these directions
    patches: bool = False

    @property
    def sizes(self) -> list[tuple[float, float | None]]:
        """The parsed grid."""
        return [(eps, most) for eps, most in json.loads(self.grid)]


@dataclass(frozen=True, kw_only=True)
class PushDirection:
    """One direction ``e`` of unit Frobenius norm, and the sizes at which the outcome changes.

    These sizes are bisected between two sizes of the grid, to one per cent; a change that reverts
    between two grid sizes is missed.
    """

    push: str  # name of this push in all three parts
    id: str  # row of sigma
    # ``+v``, ``-v`` (the top right singular vector), ``+top``, ``-top`` (its top token alone, of
    # unit norm), for pictures ``+patches``, ``-patches`` (v restricted to patch tokens),
    # ``random 1`` and so on
    direction: str
    gain: float  # ``‖J e‖``: change per unit size, to first order; sigma for v
    most: float  # largest size
    # Smallest size at which the layer's change differs from ``gain · eps`` by more than 1 %; None
    # if it does not up to ``most``
    leaves_1: float | None = None
    leaves_10: float | None = None  # the same for 10 %
    # Smallest size at which the best reading changes; None if it does not up to ``most``
    flip: float | None = None
    flip_to: str | None = None  # the new best reading
    # Grid size at which the initial reading returns; None if it does not
    flips_back: float | None = None
    # Smallest size at which the decision of the layer's read-out changes, or None
    decision_flip: float | None = None
    # If pixels can realise the direction: the patch of largest share as JSON, with its ``name``,
    # its pixels from 0 to 1 ``before``, and its ``move`` per unit size, both ``(c, p, p)``; for
    # pictures up to 512 x 512 also its position (``at``), the whole ``picture`` and its ``moves``
    # (divided by ``scale``), one byte per number. None otherwise
    pixels: str | None = None


@dataclass(frozen=True, kw_only=True)
class PushStep:
    """One perturbation ``E = eps e`` of a map's input, and the response of the model."""

    push: str  # name of this push in all three parts
    id: str  # row of sigma
    direction: str  # as in `PushDirection`
    eps: float  # ``‖E‖_F``
    relative: float  # ``eps`` divided by the mean token norm
    promise: float  # ``sigma · eps``
    # Certified bound of the change at this size; None if not available
    certificate: float | None = None
    # ``‖f(X + E) - f(X)‖_F``; like the next two, None if not finite
    layer: float | None = None
    block: float | None = None  # change of the output of the enclosing block
    model: float | None = None  # change of the model's output
    reads: str = "[]"  # readings, as in `PushPlace`
    decision: str | None = None  # decision of a read-out of the layer's pooled output, or None


GAINS, EDITS, RADII, READINGS, ALERTS = "tokens", "edits", "radii", "monitor", "alerts"
"""Parts of the values of a run folder: `TokenGain` and `TextEdit` records, certified radii of a
model's decision, and the output of a monitor."""


@dataclass(frozen=True)
class TokenGain:
    """Gains of splitting and of moving one token of a window."""

    id: str  # row of its layer with ``move = copies``
    layer: int  # index of the layer
    sample: int  # index of the window or entry
    index: int  # position in the window, from 0
    text: str  # the token's text
    split: float  # largest gain of moving its copies in opposite directions
    split_upper: float  # upper end of its interval
    moved: float  # largest gain of moving this token alone, without splitting it
    moved_upper: float  # upper end of its interval

    @property
    def better_split(self) -> bool:
        """Whether splitting the token provably gains more than moving it."""
        return self.split > self.moved_upper


SUCCEEDED, FAILED, SKIPPED = "succeeded", "failed", "skipped"


@dataclass(frozen=True)
class TextEdit(Shown):
    """The effect of one recipe on one window of a text."""

    id: str  # row of the layer at the window
    sample: int  # index of the window
    start: int | None  # its first text token
    num_tokens: int  # its length, special tokens included
    recipe: str  # name of the recipe
    target: str  # the output to change
    # ``succeeded``; ``failed``: no valid edit was found, or the decision is unchanged; ``skipped``:
    # the text of the window does not tokenize back to its tokens
    status: str
    # The edits as text, ``old → new`` with their positions; a copy as ``old → old old``
    edits: str = ""
    changed: int = 0  # number of edits
    before: str = ""  # the original text
    after: str = ""  # the text with the edits
    # ``‖f(X') - f(X)‖ / ‖f(X)‖`` of the layer's output, without copies of tokens
    change_layer: float | None = None
    change_model: float | None = None  # the same for the model's output
    first: float | None = None  # change of the target's output after the recipe's first edit
    # Change of the target's output predicted by the Jacobian; None if not available
    predicted: float | None = None
    sigma: float | None = None  # lower bound of sigma from the token vectors to the target's output
    moved: float | None = None  # norm of the change of the token vectors; None for copies
    queries: int = 0  # number of forward passes on edited texts
    products: int = 0  # number of Jacobian products or gradients
    # Decision for the original text; None without a read-out
    decision: str | None = None
    decided: str | None = None  # decision for the edited text


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe on all windows; means are over the windows where it succeeded."""

    recipe: str  # name of the recipe
    originals: int  # number of windows
    skipped: int  # number of skipped windows
    failed: int  # number of failures
    succeeded: int  # number of successes
    changed: float | None  # mean number of edits
    queries: float | None  # mean number of queries, over windows that were not skipped
    change_layer: float | None  # mean relative change of the layer's output
    change_model: float | None  # the same for the model's output

    @property
    def rate(self) -> float | None:
        """Success rate among the windows that were not skipped."""
        tried = self.originals - self.skipped
        return self.succeeded / tried if tried else None


def summed(recipe: str, edits: Sequence[TextEdit]) -> RecipeSummary:
    """Summarise one recipe over all windows."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [one for one in values if one is not None]
        return fmean(known) if known else None

    done = [one for one in edits if one.status == SUCCEEDED]
    skipped, failed = (sum(one.status == status for one in edits) for status in (SKIPPED, FAILED))
    return RecipeSummary(
        recipe,
        len(edits),
        skipped,
        failed,
        len(done),
        mean([float(one.changed) for one in done]),
        mean([float(one.queries) for one in edits if one.status != SKIPPED]),
        mean([one.change_layer for one in done]),
        mean([one.change_model for one in done]),
    )


# --- serialisation and data frames


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Group items by key, in order of appearance."""
    found: dict[Key, list[Thing]] = {}
    for one in things:
        found.setdefault(key(one), []).append(one)
    return found


def to_line(values: Mapping[str, Any]) -> str:
    """A record's values as one line of JSON; non-finite numbers are null."""
    return json.dumps(plain_values(values), ensure_ascii=False, allow_nan=False)


def stable_id(parts: Mapping[str, Any]) -> str:
    """A short digest of named values, independent of their order and of the machine.

    >>> stable_id({"a": 1, "b": "x"}) == stable_id({"b": "x", "a": 1})
    True
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    # Lone surrogates, which are refused later, have a digest too.
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


@functools.cache
def version() -> str:
    """The installed version of lipscope."""
    return importlib.metadata.version("lipscope")


def provenance(**more: str) -> dict[str, Any]:
    """Provenance of a run: stored in its manifest, never compared."""
    return {
        "lipscope": version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }


def typed_frame(kind: type[Record], records: Iterable[Record]) -> polars.DataFrame:
    """A data frame with types from the record's annotations, not from the values."""
    import polars as pl

    finite = [plain_values(vars(one)) for one in records]
    return pl.DataFrame(finite, schema=schema_of(kind), orient="row")


def records_of(
    kind: type[Record], frame: polars.DataFrame, ids: Iterable[str] | None = None
) -> list[Record]:
    """The rows of a frame as records; with ``ids``, only those of these measurements."""
    if ids is not None:
        import polars as pl

        frame = frame.filter(pl.col("id").is_in(list(ids)))
    found = []
    for values in frame.iter_rows(named=True):
        one = object.__new__(kind)
        # A frozen record's constructor sets each field through `object`: slow for 100,000 rows.
        vars(one).update(values)
        found.append(one)
    return found


def schema_of(kind: type) -> dict[str, Any]:
    """The polars schema of a record."""
    import polars as pl

    types = {int: pl.Int64, float: pl.Float64, str: pl.String, bool: pl.Boolean}
    schema: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        parts = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
        schema[name] = types.get(parts[0], pl.String)
    return schema


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with None for non-finite numbers."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
