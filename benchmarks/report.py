"""How long a report of many rows takes: read, written, and drawn by a browser."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from made_up import made_up
from tables import ROOT, Raw, Section, Target, table

from lipscope.records.folder import Finished, RunFolder
from lipscope.records.rows import Measurement, TokenShare, provenance

LENGTHS, SAMPLES = (4, 8, 16, 32), 10


def measure(*, quick: bool) -> Raw:
    """Seconds and megabytes of the page for 10,000 and 100,000 rows."""
    raw = []
    for count in (10_000,) if quick else (10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            raw.append({"rows": count, **_measured(Path(folder), count)})
    return raw


def render(raw: Raw) -> Section:
    """One row for each folder."""
    out = Section("The page of many rows")
    out.add(
        f"""Rows made by a formula, of models with 25 layers and 10 heads, {SAMPLES} windows at
each of {len(LENGTHS)} lengths, with all tokens of all windows; the folder has its Parquet
copies, as every finished run has. *Report*: the whole command `lipscope report`, start of Python
included. *Drawn*: from opening the file in headless Chromium until the last chart stands."""
    )
    rows = []
    for one in raw:
        count, megabytes, seconds, drawn = (one[key] for key in ("rows", "MB", "report", "drawn"))
        rows.append([f"{count:,} rows", f"{megabytes:.1f}", f"{seconds:.1f}", f"{drawn:.1f}"])
        if count == 10_000:
            name = "page of 10,000 rows below 5 MB"
            out.targets.append(Target(name, f"{megabytes:.1f} MB", megabytes < 5))
        else:
            name, both = "100,000 rows read and drawn below 20 s", seconds + drawn
            out.targets.append(Target(name, f"{both:.1f} s", both < 20))
    out.add(table(["folder", "page, MB", "report, s", "drawn, s"], rows))
    return out


def _measured(folder: Path, count: int) -> dict[str, float]:
    """Megabytes of the page, seconds of the command, seconds of the browser."""
    run, page = folder / "run", folder / "report.html"
    _write(run, count)
    began = time.perf_counter()
    command = [sys.executable, "-m", "lipscope.cli", "report", str(run), "-o", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    return {"MB": page.stat().st_size / 1e6, "report": seconds, "drawn": _drawn(page)}


def _drawn(page: Path) -> float:
    sys.path.append(str(ROOT / "tests"))
    from browser import chromium  # pyright: ignore[reportMissingImports]

    with chromium() as browser:
        opened = browser.new_page()
        began = time.perf_counter()
        opened.goto(page.as_uri())
        opened.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=120e3)
        return time.perf_counter() - began


def _write(folder: Path, count: int) -> None:
    """A finished run, with its Parquet copies."""
    with RunFolder(folder, {"windows": "spread"}, provenance(device="cpu")) as held:
        held.extend([Finished(row, tuple(_tokens(row))) for row in _rows(count)])


def _rows(count: int) -> Iterator[Measurement]:
    for k in range(count):
        sample, length = k % SAMPLES, LENGTHS[k // SAMPLES % len(LENGTHS)]
        curve = k // (SAMPLES * len(LENGTHS))
        head, layer, model = curve % 10, curve // 10 % 25, curve // 250
        sigma = (1 + layer + head) * (1 + 0.1 * sample) * length**0.3
        yield made_up(
            k,
            sigma,
            model=f"model-{model}",
            layer=layer,
            head=head,
            num_tokens=length,
            sample=sample,
            start=100 * sample,
            sigma_rest=sigma / 3,
            frobenius=5 * sigma,
            radius_max=10.0 + 0.01 * length,
            tokens_sha256=f"{length}/{sample}",
        )


def _tokens(row: Measurement) -> Iterator[TokenShare]:
    rest = 0.1 / max(row.num_tokens - 1, 1)
    for k in range(row.num_tokens):
        share = rest if k else 0.9
        yield TokenShare(
            id=row.id, index=k, text=f"word{k}", share_in=share, share_out=share, norm=1.0
        )
