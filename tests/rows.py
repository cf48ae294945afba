"""Rows made by hand, for what reads rows and never sees a tensor, and rows on the disk."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lipscope import Bound, Measurement, TokenShare
from lipscope.records import Finished, RunFolder
from lipscope.records.tables import BESIDE, with_checksum

# As the first issue lists them, in its order; then what sweeps added.
KEYS = [
    "id",
    "model",
    "revision",
    "weights",
    "layer",
    "head",
    "map",
    "metric",
    "move",
    "read",
    "input",
    "num_tokens",
    "sample",
    "start",
    "sigma",
    "upper",
    "delta",
    "status",
    "solver_residual",
    "products",
    "relative",
    "top_token",
    "top_share",
    "sigma_rest",
    "frobenius",
    "radius_max",
    "radius_rms",
    "input_norm",
    "output_norm",
    "seconds",
    "dtype",
    "device",
    "seed",
    "tokens_sha256",
    "version",
    "note",
    "error",
    "text",
    "step",
    "side",
    "position_offset",
    "module",
    "argument",
    "projection",
    "derivative_error",
    "trained_length",
]
TOKEN_KEYS = ["id", "index", "text", "share_in", "share_out", "norm"]
BOUND_KEYS = ["id", "theorem", "statement", "cite", "kind", "scope", "metric", "value"]
BOUND_KEYS += ["radius", "floor", "eps", "reason", "note", "sound"]
SPEC = {"model": "minilm", "layers": [0, 1], "tol": 1e-3}

VALUES: dict[str, Any] = {
    "model": "minilm",
    "weights": "float32",
    "layer": 0,
    "map": "attention",
    "metric": "frobenius",
    "move": "all",
    "read": "all",
    "input": "text",
    "num_tokens": 16,
    "sample": 0,
    "start": None,
    "sigma": 2.0,
    "delta": 1e-6,
    "status": "converged",
    "solver_residual": 1e-4,
    "products": 30,
    "relative": 0.5,
    "top_token": 0,
    "top_share": 0.934,
    "radius_max": 1.0,
    "radius_rms": 1.0,
    "input_norm": 1.0,
    "output_norm": 1.0,
    "seconds": 0.1,
    "dtype": "float32",
    "device": "cpu",
    "seed": 0,
    "tokens_sha256": "x",
    "version": "0.1.0",
}


def row(**values: Any) -> Measurement:
    """A measurement with these values; `upper` is 2 % above sigma unless given."""
    values = VALUES | values
    values.setdefault("upper", None if values["sigma"] is None else 1.02 * values["sigma"])
    where = [str(values[k]) for k in ("model", "map", "layer", "num_tokens", "sample")]
    values.setdefault("id", "-".join([*where, str(values.get("head"))]))
    return Measurement(**values)


def curve(
    sigma: Callable[[int, int], float | None],
    lengths: Sequence[int] = (16, 32, 64, 128, 256),
    samples: int = 5,
    **values: Any,
) -> list[Measurement]:
    """Rows of one layer: ``sigma(n, sample)`` at every length."""
    return [
        row(num_tokens=n, sample=s, sigma=sigma(n, s), **values)
        for n in lengths
        for s in range(samples)
    ]


def tokens_of(measured: Measurement, texts: Sequence[str]) -> list[TokenShare]:
    """Tokens of a row; the first holds half of the direction, the others the rest."""
    rest = 0.5 / max(len(texts) - 1, 1)
    return [
        TokenShare(
            id=measured.id,
            index=k,
            text=text,
            share_in=rest if k else 0.5,
            share_out=None,
            norm=1.0,
        )
        for k, text in enumerate(texts)
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without what a run adds to its records."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    extra = ("crc", *(BESIDE if path.name == "rows.jsonl" else ()))
    return [{k: v for k, v in one.items() if k not in extra} for one in found]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines with their checksums, as a run writes it."""
    path.write_bytes(
        b"".join(with_checksum(json.dumps(one, ensure_ascii=False)) for one in records)
    )


def bound_of(measured: Measurement, value: float | None = 6.0, **more: Any) -> Bound:
    values: dict[str, Any] = {
        "id": measured.id,
        "theorem": "castin_thm_3_3",
        "statement": "Theorem 3.3",
        "cite": "castin2024",
        "kind": "upper",
        "scope": "local",
        "metric": "frobenius",
        "radius": 1.0,
        "value": value,
        "reason": "" if value else "it has a mask",
        "note": "",
        "sound": True,
    }
    return Bound(**(values | more))


def append(
    folder: RunFolder,
    one: Measurement,
    tokens: Iterable[TokenShare] = (),
    bounds: Iterable[Bound] = (),
) -> None:
    folder.extend([Finished(one, tuple(tokens), tuple(bounds))])
