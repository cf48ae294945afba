"""Rows that no model made: what the sections on many rows write, read and draw."""

from __future__ import annotations

from typing import Any

from lipscope.records.rows import Measurement

_COMMON: dict[str, Any] = {
    "weights": "float32",
    "map": "attention",
    "metric": "frobenius",
    "move": "all",
    "read": "all",
    "input": "text",
    "delta": 1e-6,
    "status": "converged",
    "solver_residual": 1e-4,
    "products": 24,
    "top_token": 0,
    "top_share": 0.9,
    "radius_rms": 9.0,
    "input_norm": 9.0,
    "output_norm": 18.0,
    "seconds": 0.01,
    "dtype": "float32",
    "device": "cpu",
    "seed": 0,
    "version": "0",
}


def made_up(k: int, sigma: float, **given: Any) -> Measurement:
    """Row number ``k``: a converged measurement of text, with what is ``given``."""
    values = {**_COMMON, "upper": 1.05 * sigma, "relative": sigma / 2, "radius_max": 10.0}
    return Measurement(id=f"{k:016x}", sigma=sigma, **(values | given))
