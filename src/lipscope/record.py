"""Measurement rows with their provenance, and the run folder that keeps them.

A `Measurement` is one flat row; everything after it (tables, figures, pages) reads rows
and never sees a tensor. A `RunFolder` appends rows as they come, survives a kill, and
compacts to Parquet when a run ends.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lipscope.errors import InputError

if TYPE_CHECKING:
    import polars

Status = Literal["converged", "tight", "max_steps", "non_finite", "failed"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured local Lipschitz constant: what, where, how, and the answer.

    Attributes:
        id: Digest of everything that determines the row; stable across restarts.
        model: Name of the model as the user gave it.
        revision: Commit, package version, or null.
        weights: What the weights were stored as, for example "float32".
        layer: Index of the layer from 0; null for the map ``model``.
        head: Query head; null for all heads together.
        map: Function whose Jacobian was taken (see the vocabulary).
        metric: How a perturbation is measured.
        move: Tokens that may move.
        read: Output tokens that are read.
        input: Kind of input, "text" or "batch".
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

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values in column order; non-finite numbers are null."""
        return {name: _finite(value) for name, value in vars(self).items()}

    def to_json(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)


COLUMNS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Measurement))


@dataclass(frozen=True, kw_only=True)
class TokenShare:
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


def stable_id(parts: Mapping[str, Any]) -> str:
    """A short digest of named values, the same on every machine and in every order.

    >>> stable_id({"a": 1, "b": "x"}) == stable_id({"b": "x", "a": 1})
    True
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def version() -> str:
    """The installed version of lipscope."""
    return importlib.metadata.version("lipscope")


def provenance(**more: str) -> dict[str, Any]:
    """Where and with what a run was made: recorded in its manifest, never compared."""
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


class RunFolder:
    """A folder of rows: append-only while it runs, Parquet when it ends.

    Files: ``manifest.json`` (the specification and where it ran), ``rows.jsonl`` and
    ``tokens.jsonl`` (appended and flushed row by row; a row's tokens are written before
    the row itself, so that a row on disk is complete), and their Parquet copies.

    Args:
        path: Folder, made if it does not exist.
        spec: Everything that determines the rows.
        origin: Machine and versions (`provenance`).

    Raises:
        InputError: If the folder cannot be written or holds another specification.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, Any], origin: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.spec = json.loads(json.dumps(spec, default=str))
        manifest = self.path / "manifest.json"
        if self._exists(manifest):
            self._check_same(manifest)
        elif self.path.exists() and not self._is_free():
            raise InputError(
                f"`--out` should be a new folder or one of an earlier run. Found "
                f"`{self.path}`, which holds something else; choose another `--out`."
            )
        else:
            self._create(manifest, origin or {})
        self.done: dict[str, Measurement] = {}
        for values in _read_lines(self.path / "rows.jsonl"):
            row = Measurement(**{k: v for k, v in values.items() if k in COLUMNS})
            self.done[row.id] = row

    def _exists(self, manifest: Path) -> bool:
        try:
            return manifest.exists()
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _is_free(self) -> bool:
        """Whether nothing is there but what a kill during the first write left behind."""
        try:
            return self.path.is_dir() and all(p.suffix == ".part" for p in self.path.iterdir())
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def _unwritable(self, problem: OSError) -> InputError:
        return InputError(
            f"`--out {self.path}` cannot be written ({problem.strerror}); choose another folder."
        )

    def _check_same(self, manifest: Path) -> None:
        try:
            held = dict(json.loads(manifest.read_text(encoding="utf-8"))["spec"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise InputError(
                f"`{manifest}` should be a readable manifest. Found {problem}; "
                "choose another `--out` or remove the folder."
            ) from problem
        if held != self.spec:
            other = sorted(k for k in {*held, *self.spec} if held.get(k) != self.spec.get(k))
            raise InputError(
                f"`--out {self.path}` holds the run of another specification (it differs in "
                f"{', '.join(other)}); choose another `--out` or repeat the same command."
            )
        if not os.access(self.path, os.W_OK):
            raise InputError(f"`--out {self.path}` cannot be written; choose another folder.")

    def _create(self, manifest: Path, origin: Mapping[str, Any]) -> None:
        text = json.dumps(
            {"spec": self.spec, "provenance": dict(origin)},
            indent=2,
            ensure_ascii=False,
            default=str,
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            part = manifest.with_suffix(".part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(manifest)
        except OSError as problem:
            raise self._unwritable(problem) from problem

    def append(self, row: Measurement, tokens: Iterable[TokenShare] = ()) -> None:
        """Write one finished row, its tokens first, and flush both to the disk."""
        _append_lines(
            self.path / "tokens.jsonl",
            [json.dumps(vars(t), ensure_ascii=False) for t in tokens],
        )
        _append_lines(self.path / "rows.jsonl", [row.to_json()])
        self.done[row.id] = row

    def tokens(self) -> list[TokenShare]:
        """The tokens of all finished rows, each once."""
        seen: dict[tuple[str, int], TokenShare] = {}
        for values in _read_lines(self.path / "tokens.jsonl"):
            token = TokenShare(**values)
            if token.id in self.done:
                seen[token.id, token.index] = token
        return list(seen.values())

    def compact(self) -> None:
        """Write ``rows.parquet`` and ``tokens.parquet`` from the rows on disk."""
        rows = typed_frame(Measurement, (vars(row) for row in self.done.values()))
        write_parquet(rows, self.path / "rows.parquet")
        tokens = typed_frame(TokenShare, (vars(token) for token in self.tokens()))
        write_parquet(tokens, self.path / "tokens.parquet")


def typed_frame(kind: type, rows: Iterable[Mapping[str, Any]]) -> polars.DataFrame:
    """A frame whose types come from the record's annotations, never from the values.

    Args:
        kind: `Measurement` or `TokenShare`.
        rows: Their values by column.

    Returns:
        One line for each row; non-finite numbers are null.
    """
    import polars as pl

    types = {int: pl.Int64, float: pl.Float64, str: pl.String}
    schema: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        parts = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
        schema[name] = types.get(parts[0], pl.String)
    finite = [{name: _finite(value) for name, value in row.items()} for row in rows]
    return pl.DataFrame(finite, schema=schema, orient="row")


def write_parquet(frame: polars.DataFrame, path: Path) -> None:
    """Write a Parquet file in one move: never a half-written file."""
    part = path.with_suffix(".part")
    frame.write_parquet(part)
    part.replace(path)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append_lines(path: Path, lines: list[str]) -> None:
    if not lines:
        return
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a torn last line is cut off the file."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    for line in whole.decode("utf-8", errors="replace").split("\n"):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield values
