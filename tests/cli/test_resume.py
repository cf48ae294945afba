"""Runs of the command whose processes are really stopped."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest

import lipscope as ls
from rows import lines

MODEL = "random:bert:hidden_size=24,num_attention_heads=2,num_hidden_layers=3,intermediate_size=32"
TEXT = "It was a dark and stormy night; the rain fell in torrents, except at intervals. " * 40
LENGTH, SAMPLES = 16, 12


@pytest.fixture(scope="module")
def uninterrupted() -> ls.Rows:
    return ls.measure(MODEL, TEXT, lengths=LENGTH, samples=SAMPLES)


ARGUMENTS = ["measure", MODEL, "--text", "text.txt", "--lengths", str(LENGTH)]
ARGUMENTS += ["--samples", str(SAMPLES), "--out", "run"]


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "text.txt").write_text(TEXT)
    return subprocess.Popen(
        [sys.executable, "-m", "lipscope", *ARGUMENTS],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def started(folder: Path) -> subprocess.Popen[str]:
    """The command, with some rows on the disk."""
    process, file = start(folder), folder / "run" / "rows.jsonl"
    limit = time.monotonic() + 120
    while not (file.exists() and file.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)
    return process


def without_seconds(rows: ls.Rows) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.to_dict().items() if k != "seconds"} for r in rows]


def finish(folder: Path) -> ls.Rows:
    """The same request, from Python."""
    return ls.measure(MODEL, TEXT, lengths=LENGTH, samples=SAMPLES, out=folder / "run")


@pytest.mark.slow
def test_a_killed_process_loses_no_row_that_it_had_finished(command, tmp_path, uninterrupted):
    """SIGKILL in mid-run, then the same command: the rows of a run without interruption.

    While the first process lives, also if it stands still, a second one is refused.
    """
    first, run = started(tmp_path), tmp_path / "run"
    first.send_signal(signal.SIGSTOP)
    try:
        before = {f.name: f.read_bytes() for f in run.iterdir()}
        second = command(*ARGUMENTS)
        assert (second.status, second.out) == (2, "")
        assert re.fullmatch(r"lipscope: `--out run` is in use by another process, .+\n", second.err)
        assert {f.name: f.read_bytes() for f in run.iterdir()} == before
    finally:
        first.kill()  # no process can catch it: the lock is the system's to give back
        first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    kept = (run / "rows.jsonl").read_text().split("\n")[:-1]
    assert 5 <= len(kept) < len(uninterrupted), "not in the middle"
    again = command(*ARGUMENTS)
    assert again.status == 0, again.err
    after = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert after[: len(kept)] == kept  # kept as they were, not measured again
    assert len(after) == len(uninterrupted) == len({json.loads(line)["id"] for line in after})
    expected = {r["id"]: r for r in without_seconds(uninterrupted)}
    found = polars.read_parquet(tmp_path / "run" / "rows.parquet").drop("seconds").to_dicts()
    for one in found:
        _same(one, expected[one["id"]])
    assert {f.name for f in (tmp_path / "run").iterdir()} >= {
        "rows.jsonl", "rows.parquet", "manifest.json",
    }  # fmt: skip


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal but for rounding in the last digits between two processes."""
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, float) and name != "solver_residual":
            assert math.isclose(value, other[name], rel_tol=1e-9), name
        elif name != "solver_residual":
            assert value == other[name], name


def test_control_c_ends_in_status_130_and_a_readable_folder(tmp_path, uninterrupted):
    process = started(tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "rerun the same command to resume" in said
    whole = lines(tmp_path / "run" / "rows.jsonl")
    assert 5 <= len(whole) < len(uninterrupted), "not in the middle"
    frame = polars.read_parquet(tmp_path / "run" / "rows.parquet")
    assert frame.to_dicts() == whole
    counted = duckdb.sql(f"select count(*) from '{tmp_path}/run/rows.parquet'").fetchall()
    assert counted == [(len(whole),)]
    rows = finish(tmp_path)
    for one, other in zip(without_seconds(rows), without_seconds(uninterrupted), strict=True):
        _same(one, other)
    assert lines(tmp_path / "run" / "rows.jsonl")[: len(whole)] == whole
