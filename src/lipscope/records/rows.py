"""Records of a run folder: rows and what belongs to them, and what moves did.

A `Measurement` is one flat row; everything after it (tables, figures, pages) reads rows
and never sees a tensor.
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
"""Version of the files of a run; only this one is read."""

GIVEN = ("text", "batch", "image")
"""Kinds of inputs that were given; all others were built."""

AGAIN = "the next run tries it again"
"""How the error of a row ends that failed for a reason outside its question."""

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
    """One measured local Lipschitz constant: what, where, how, and the answer.

    Attributes:
        id: Digest of everything that determines the row; stable across restarts.
        model: Name of the model as the user gave it.
        revision: Commit, package version, or null.
        weights: What the weights were stored as, for example "float32".
        layer: Index of the layer from 0; null for maps of the whole model.
        head: Query head; null for all heads together.
        map: Function whose Jacobian was taken (see the vocabulary).
        metric: How a perturbation is measured.
        move: Tokens that may move.
        read: Output tokens that are read.
        input: Kind of input: "text", "batch", or what built it, such as "two_cluster" or
            "ascent".
        num_tokens: Number of tokens n.
        sample: Index of the text window or batch entry.
        start: First text token of the window; null for a batch.
        sigma: Top singular value (a Ritz value, hence a lower bound); null if none.
        upper: Upper end of the interval, valid with probability ``1 - delta``.
        delta: Failure probability of the interval.
        status: How the solver ended.
        solver_residual: ``r / (sqrt(2) sigma)``: relative distance to a singular value.
        products: JVPs plus VJPs that the measurement took.
        relative: ``sigma ||X|| / ||f(X)||``.
        top_token: Token with the largest share of the top right singular vector.
        top_share: That share (squared norm, between 0 and 1).
        sigma_rest: Sigma with the top token held fixed; null unless asked for.
        frobenius: Estimate of ``||J||_F``; null unless asked for.
        radius_max: Largest token norm of the map's input.
        radius_rms: Root mean square token norm of the map's input.
        input_norm: ``||X||_F``.
        output_norm: ``||f(X)||_F``.
        seconds: Solving time, without capture.
        dtype: Floating type of the computation.
        device: Where it ran.
        seed: Seed of the random starts.
        tokens_sha256: Digest of the token ids (or of the input tensor).
        version: Version of lipscope.
        note: Advice and remarks; null if none.
        error: What went wrong; null unless the status is "failed".
        text: Name of the text in a sweep; null elsewhere.
        step: Training step of a checkpoint in a sweep; null elsewhere.
        side: What the moving tokens make: all of self-attention (``self``), or the queries
            (``query``), or the keys and values (``key``) of cross-attention.
        position_offset: How much later than usual the position ids start.
        module: Path of the module in the model: the attention, the block of the map ``block``, the
            first block of the map ``model``; null where the model is a layer by itself.
        argument: What moves: names of the module's arguments, or those of the norm before it.
        projection: Whether the output projection is part of the map: true, false (``heads``, or the
            model applies none), or null where none was seen as a module of its own.
        derivative_error: ``||J v - D|| / ||D||`` with D the finite difference of the model itself
            along the direction found; null except for the first sample of a length.
        trained_length: Number of tokens to which the model was trained; null where its files do
            not say.
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
        """Whether it failed for want of a worker, memory or disk: not an answer to the question."""
        return self.error is not None and self.error.endswith(AGAIN)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values in column order; non-finite numbers are null."""
        return plain_values(vars(self))

    def to_json(self) -> str:
        """The row as one line of JSON."""
        return to_line(vars(self))


@dataclass(frozen=True, kw_only=True)
class TokenShare(Shown):
    """One token of a measured window: its part in the most sensitive direction.

    Attributes:
        id: Row that it belongs to.
        index: Position in the window, from 0.
        text: The token's text; its id where there is no tokenizer, its index where there is no id.
        share_in: Its share of the top right singular vector: moving it moves the output.
        share_out: Its share of the top left singular vector: its output moves.
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
    """One theorem, or one certificate, asked about a layer.

    Attributes:
        id: Row that it belongs to; model, layer, head, map and sigma stand there. "" for a layer
            that was not measured.
        theorem: Name in the catalogue.
        statement: Where it is stated.
        cite: Key of the bibliography, or "derived here".
        kind: ``upper`` or ``lower``; ``radius`` of a ball in which a decision stays.
        scope: For which inputs: ``local``, ``ball``, ``global``, ``mean-field`` or ``limit``.
        metric: How input and output are measured.
        value: The bound; null if there is none.
        radius: Largest token norm that global bounds allow; null for the map ``normed``.
        floor: Smallest token norm (mean taken away if the norm does so) that global bounds for
            the map ``normed`` allow, else null.
        eps: Radius of the ball that a ``ball`` bound speaks of, else null.
        reason: Why there is no value, or "".
        note: What a reader must know, or "".
        sound: False for a statement that is shown as found although it fails.
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
    """One part of one of the leading singular directions of a layer at an input.

    A direction is a pair of vectors, v that moves and u = J v / sigma that answers; with both signs
    changed it is the same one. A part is a token of v (``side`` is ``right``), a token of u
    (``left``), a head's part in u (``head``), or a text (``text``) towards which the move v
    turns the output of the model, or away from which.

    Attributes:
        id: Row that it belongs to.
        rank: 1 for the top direction, then the next ones.
        side: ``right``, ``left``, ``head`` or ``text``.
        index: Position of the token, or index of the head or text.
        text: The token's text, the place of a patch, or ``head 3``.
        share: ``|v_i|^2`` or ``|u_i|^2`` of unit vectors; of a head ``<u, J_h v> / sigma``, which
            sums to 1 over the heads and may be negative; of a text the derivative, for each unit
            of a move along v, of the cosine of the model's mean output with that of the text.
        sigma: At most the singular value of this rank.
        upper: At least it, with probability ``1 - delta`` of the row.
        residual: ``‖J^T J v - theta^2 v‖ / (sqrt(2) theta^2)``, ``theta = ‖J v‖``.
        sine: Upper bound of the sine of the angle between v and the singular vector; null where
            the intervals do not tell this singular value from its neighbours'.
        space: In what a token was read: ``vocabulary`` (tokens in its place), ``read-out``
            (gradients of logits), ``window`` (the other tokens here); null where in nothing.
        plus: Readings along the vector as JSON, ``[[word, cosine], …]``, nearest first.
        minus: Readings against it.
        cosine: Largest absolute cosine with a reading; of a text that of v with the gradient.
        spanned: Share of the squared norm that the ten nearest readings span.
        chance_cosine: The largest such cosine of 99 random directions of this dimension; what does
            not exceed it reads as nothing.
        chance_spanned: The largest such share of these.
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
        """Whether the vector is known: a cosine with it is wrong by 0.1 at most."""
        return self.sine is not None and self.sine <= 0.1

    @property
    def reads(self) -> bool | None:
        """Whether a reading is nearer than to any of the random directions; None if unread."""
        if self.cosine is None or self.chance_cosine is None:
            return None
        return self.cosine > self.chance_cosine

    def words(self, sign: Literal["plus", "minus"]) -> list[tuple[str, float]]:
        """The readings of one sign with their cosines, nearest first."""
        held = self.plus if sign == "plus" else self.minus
        return [(word, cosine) for word, cosine in json.loads(held or "[]")]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value that an experiment computed besides rows, under a key of its own."""

    part: str  # part of the experiment; its values have the same columns
    key: str  # digest of what determines the value
    content: str  # the value as JSON


# --- pushes of a layer's input, splits of tokens, edits of a text

PLACES, DIRECTIONS, STEPS = "push-places", "push-directions", "push"
"""Parts of the values of a run folder; lines of all three name their ``push``."""
NEXT, NEAREST, MOVED = "next token", "nearest text", "most changed patch"
"""What is read of a model's output."""
PATCHES = "patches"
"""The directions ``+patches`` and ``-patches``: v without what it moves of other tokens."""


@dataclass(frozen=True, kw_only=True)
class PushPlace:
    """One map of a model at one input, before anything moves."""

    push: str  # what names this push in all three parts
    id: str  # row of sigma
    mean_norm: float  # mean norm of the tokens of the map's input
    input_norm: float  # ``‖X‖_F``
    layer_norm: float | None = None  # ``‖f(X)‖_F``
    # The same of what the block around it hands on; None where there is none
    block_norm: float | None = None
    model_norm: float | None = None  # the same of the model's output
    # Sizes, each with what no move of it can exceed: a JSON list of pairs; the second is null where
    # nothing is proved
    grid: str = "[]"
    # ``next token``, ``nearest text``, ``most changed patch``, or "" where nothing is read
    reading: str = ""
    # What is read at X: a JSON list of pairs, best first: a name, and its probability, its cosine,
    # or its share of the squared change of the model's output
    reads: str = "[]"
    # What a read-out of the layer's pooled output decides at X, or None
    decision: str | None = None
    decided_by: str = ""  # what decides, in words
    # Frobenius radius within which the decision cannot change; None where none is proved
    radius: float | None = None
    note: str | None = None  # what to know, or None
    # Whether ``+patches`` and ``-patches`` are pushed: where pixels move a picture so
    patches: bool = False

    @property
    def sizes(self) -> list[tuple[float, float | None]]:
        """The grid, read."""
        return [(eps, most) for eps, most in json.loads(self.grid)]


@dataclass(frozen=True, kw_only=True)
class PushDirection:
    """One direction ``e`` of unit Frobenius norm, and where its pushes change what happens.

    Sizes at which something changes are bisected between two sizes of the grid, to one per cent;
    what changes and changes back between two of them is not seen.
    """

    push: str  # what names this push in all three parts
    id: str  # row of sigma
    # ``+v``, ``-v`` (the top right singular vector), ``+top``, ``-top`` (its top token alone, of
    # unit norm), of pictures ``+patches``, ``-patches`` (v without other tokens than patches),
    # ``random 1`` and so on
    direction: str
    gain: float  # ``‖J e‖``: the change for each unit of size, to first order; sigma for v
    most: float  # largest size
    # Size from which the layer's change is off ``gain · eps`` by more than 1 %; None if by no more
    # up to ``most``
    leaves_1: float | None = None
    leaves_10: float | None = None  # the same for 10 %
    # Size from which the best reading is another one; None if it stays up to ``most``
    flip: float | None = None
    flip_to: str | None = None  # which it is then
    # Size of the grid at which the first reading is back; None if it is not
    flips_back: float | None = None
    # Size from which the read-out of the layer decides otherwise, or None
    decision_flip: float | None = None
    # Where the move is one of the picture: the patch of its largest share as JSON, with its
    # ``name``, its pixels from 0 to 1 ``before``, and its ``move`` for each unit of size, both
    # ``(c, p, p)``; of pictures up to 512 x 512 also where it is (``at``), and the whole
    # ``picture`` and its ``moves`` by their ``scale``, a byte for each number. None where no pixels
    # move the tokens so
    pixels: str | None = None


@dataclass(frozen=True, kw_only=True)
class PushStep:
    """One move ``E = eps e`` of a map's input, and what the model made of it."""

    push: str  # what names this push in all three parts
    id: str  # row of sigma
    direction: str  # as in `PushDirection`
    eps: float  # ``‖E‖_F``
    relative: float  # ``eps`` by the mean norm of a token
    promise: float  # ``sigma · eps``
    # What no move of this size can exceed; None where nothing is proved
    certificate: float | None = None
    # ``‖f(X + E) - f(X)‖_F``; None where it is not finite, as for the others
    layer: float | None = None
    block: float | None = None  # the same of what the block around it hands on
    model: float | None = None  # the same of the model's output
    reads: str = "[]"  # what is read, as in `PushPlace`
    decision: str | None = None  # what a read-out of the layer's pooled output decides, or None


GAINS, EDITS, RADII, READINGS, ALERTS = "tokens", "edits", "radii", "monitor", "alerts"
"""Parts of the values of a run folder: `TokenGain` and `TextEdit` records, certified radii of a
model's decision, and what a monitor writes."""


@dataclass(frozen=True)
class TokenGain:
    """One token of a window: taken apart, and moved."""

    id: str  # row of its layer with ``move = copies``
    layer: int  # index of the layer
    sample: int  # index of the window or entry
    index: int  # position in the window, from 0
    text: str  # the token's text
    split: float  # largest gain of moving its copies against each other
    split_upper: float  # upper end of its interval
    moved: float  # largest gain of moving it alone, copies together
    moved_upper: float  # upper end of its interval

    @property
    def better_split(self) -> bool:
        """Whether taking it apart is known to gain more than moving it."""
        return self.split > self.moved_upper


SUCCEEDED, FAILED, SKIPPED = "succeeded", "failed", "skipped"


@dataclass(frozen=True)
class TextEdit(Shown):
    """The effect of one recipe on one window of a text."""

    id: str  # row of the layer at the window
    sample: int  # index of the window
    start: int | None  # its first text token
    num_tokens: int  # its length, special tokens included
    recipe: str  # which recipe
    target: str  # whose output should change
    # ``succeeded``; ``failed``: no edit that a text can carry was found, or the decision stands;
    # ``skipped``: the window's own text is not read back as its tokens
    status: str
    # What was done, ``old → new`` with the position of each, in words; a copy as ``old → old old``
    edits: str = ""
    changed: int = 0  # number of edits
    before: str = ""  # the text as it was given
    after: str = ""  # the text with the edits
    # ``‖f(X') - f(X)‖ / ‖f(X)‖`` of the layer's output, without copies of tokens
    change_layer: float | None = None
    change_model: float | None = None  # the same of the model's
    first: float | None = None  # of the target's, after the edit that the recipe put first
    # Of the target's, by the Jacobian; None where there is no such prediction
    predicted: float | None = None
    sigma: float | None = None  # largest stretch of the token vectors by the target, a lower value
    moved: float | None = None  # how far the token vectors moved; None for copies
    queries: int = 0  # edited texts that the model read
    products: int = 0  # products with its Jacobian, or gradients
    # What was decided at the start; None where there is nothing to decide
    decision: str | None = None
    decided: str | None = None  # what was decided at the end


@dataclass(frozen=True)
class RecipeSummary:
    """A recipe on all windows; means are over those that were neither skipped nor failed."""

    recipe: str  # which
    originals: int  # windows
    skipped: int  # of those, how many were skipped
    failed: int  # how many failed
    succeeded: int  # how many succeeded
    changed: float | None  # mean number of edits
    queries: float | None  # mean number of queries, over windows that were not skipped
    change_layer: float | None  # mean relative change of the layer's output
    change_model: float | None  # of the model's

    @property
    def rate(self) -> float | None:
        """Successes among the windows that were attacked."""
        tried = self.originals - self.skipped
        return self.succeeded / tried if tried else None


def summed(recipe: str, edits: Sequence[TextEdit]) -> RecipeSummary:
    """The effect of one recipe on all windows."""

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


# --- lines and frames


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Things by their keys, both in order of appearance."""
    found: dict[Key, list[Thing]] = {}
    for one in things:
        found.setdefault(key(one), []).append(one)
    return found


def to_line(values: Mapping[str, Any]) -> str:
    """The values of a record as one line of JSON; non-finite numbers are null."""
    return json.dumps(plain_values(values), ensure_ascii=False, allow_nan=False)


def stable_id(parts: Mapping[str, Any]) -> str:
    """A short digest of named values, the same on every machine and in every order.

    >>> stable_id({"a": 1, "b": "x"}) == stable_id({"b": "x", "a": 1})
    True
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    # Half a character, which is refused later, has a digest too.
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


@functools.cache
def version() -> str:
    """The installed version of lipscope."""
    return importlib.metadata.version("lipscope")


def provenance(**more: str) -> dict[str, Any]:
    """Provenance of a run: recorded in its manifest, never compared."""
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
    """A frame whose types come from the record's annotations, never from the values."""
    import polars as pl

    finite = [plain_values(vars(one)) for one in records]
    return pl.DataFrame(finite, schema=schema_of(kind), orient="row")


def records_of(
    kind: type[Record], frame: polars.DataFrame, ids: Iterable[str] | None = None
) -> list[Record]:
    """The lines of a frame, or those of some rows, as records."""
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
    """Columns of a record and their types in polars."""
    import polars as pl

    types = {int: pl.Int64, float: pl.Float64, str: pl.String, bool: pl.Boolean}
    schema: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        parts = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
        schema[name] = types.get(parts[0], pl.String)
    return schema


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with null for numbers that are not finite."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
