"""Measurement rows with their provenance.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
        return _finite(vars(self))

    def to_json(self) -> str:
        """The row as one line of JSON."""
        return to_line(vars(self))


@dataclass(frozen=True, kw_only=True)
class TokenShare(Shown):
    """One token of a measured window: its part in the most sensitive direction.

    Attributes:
        id: Row that it belongs to.
        index: Position in the window, from 0.
        text: The token's text, or its id where there is no tokenizer.
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
        kind: ``upper`` or ``lower``.
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


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Things by their keys, both in order of appearance."""
    found: dict[Key, list[Thing]] = {}
    for one in things:
        found.setdefault(key(one), []).append(one)
    return found


def to_line(values: Mapping[str, Any]) -> str:
    """The values of a record as one line of JSON; non-finite numbers are null."""
    return json.dumps(_finite(values), ensure_ascii=False, allow_nan=False)


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

    finite = [_finite(vars(one)) for one in records]
    return pl.DataFrame(finite, schema=schema_of(kind), orient="row")


def records_of(kind: type[Record], frame: polars.DataFrame) -> list[Record]:
    """The lines of a frame as records."""
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


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with null for what is not finite."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
