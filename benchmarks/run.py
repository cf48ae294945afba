"""Compare lipscope with other solvers, measure its products and memory; write the page.

Usage: ``python benchmarks/run.py [--quick] [--only speed,rate,…] [--threads 1,2] [--page]``
"""

from __future__ import annotations

import os

# SciPy brings a BLAS with threads of its own, which would run under "one thread" as well and
# compete with torch's for the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from tables import Section, Target, commit, machine, say, target_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
STORE = Path(__file__).with_name("results.json")  # the sections of the page, as last measured


class Stored(TypedDict):
    """One section as it is kept."""

    text: str
    targets: list[tuple[str, str, bool | None]]
    measured: str
    commit: NotRequired[str]  # of the code that was measured
    raw: NotRequired[list[dict[str, object]]]


def sections(quick: bool, threads: Sequence[int]) -> dict[str, Callable[[], Section]]:
    """The sections by name, in the order of the page."""
    import batching
    import certificates
    import control
    import counts
    import flows
    import functional
    import memory
    import products
    import report
    import speed
    import stopping
    import where

    import sweeps

    return {
        "speed": lambda: speed.section(quick=quick, threads=threads),
        "profile": lambda: where.section(quick=quick),
        "rate": lambda: products.rate_section(quick=quick, threads=threads),
        "growth": lambda: products.growth_section(quick=quick),
        "counts": lambda: counts.section(quick=quick),
        "batching": lambda: batching.section(quick=quick),
        "memory": lambda: memory.memory_section(quick=quick),
        "functional": lambda: functional.section(quick=quick),
        "flows": lambda: flows.section(quick=quick),
        "job": lambda: memory.job_section(quick=quick),
        "stopping": lambda: stopping.section(quick=quick),
        "certificates": lambda: certificates.section(quick=quick),
        "sweeps": lambda: sweeps.section(quick=quick),
        "page": lambda: report.section(quick=quick),
        "control": lambda: control.section(quick=quick),
        "estimate": lambda: control.estimate_section(quick=quick),
        "certificate-times": lambda: certificates.times_section(quick=quick),
    }


def page(stored: dict[str, Stored]) -> str:
    """The whole page as Markdown."""
    targets = [Target(*t) for one in stored.values() for t in one["targets"]]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `make bench`, or in parts by `benchmarks/run.py --only NAME`: every figure",
            "on this page was printed by that command, on the processor that its section names.",
            "Nothing was measured on a GPU: the tests marked `cuda` were skipped for want of one,",
            "and neither `torch.compile`, a Triton kernel nor `jvp_flash_attention` was tried.",
            "",
            *_of_older_code(stored),
            "## Targets",
            "",
            target_table(targets),
            "",
            *(f"{one['text']}\n{_measured(one)}\n" for one in stored.values()),
        ]
    )


def _measured(one: Stored) -> str:
    return one["measured"] + (f"\n- Commit: {one['commit']}" if "commit" in one else "")


def _of_older_code(stored: dict[str, Stored]) -> list[str]:
    """What a reader should know of the sections that were printed before commits were kept."""
    old = [one["text"].splitlines()[0][3:] for one in stored.values() if "commit" not in one]
    if not old:
        return []
    return [
        f"**Not of today's code**: {'; '.join(old)}. These sections were printed before random",
        "starts were drawn in float64, before values were centred in products, before `local_rows`",
        "and `row_gram` were sharpened, and before `upper` was had at δ = 0.01: sigma changed",
        "within its tolerance, times may have changed, bounds became smaller.",
        "",
    ]


def kept() -> dict[str, Stored]:
    """The sections as they were last measured."""
    return json.loads(STORE.read_text("utf-8")) if STORE.is_file() else {}


def keep(name: str, section: Section, measured: str, order: Sequence[str]) -> None:
    """Store a section and write the page anew."""
    stored = kept()
    targets = [(t.name, t.measured, t.reached) for t in section.targets]
    stored[name] = {
        "text": section.text(),
        "targets": targets,
        "measured": measured,
        "commit": commit(),
        "raw": section.raw,
    }
    stored = {key: stored[key] for key in order if key in stored}
    STORE.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(stored), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, one or two minutes")
    parser.add_argument("--only", default="", help="sections to run, separated by commas")
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(kept()), encoding="utf-8")
        return
    # Before any thread pool exists: its threads take the setting over.
    torch.set_flush_denormal(True)
    description = machine(shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]))
    every = sections(options.quick, [int(t) for t in options.threads.split(",")])
    chosen = [s for s in options.only.split(",") if s] or list(every)
    if unknown := [s for s in chosen if s not in every]:
        parser.error(f"unknown sections {unknown}; choose from {', '.join(every)}")
    print(description, flush=True)
    for name in chosen:
        began = time.perf_counter()
        section = every[name]()
        print("\n" + section.text(), flush=True)
        took = f"- This section took {(time.perf_counter() - began) / 60:.1f} minutes"
        if not options.quick:  # after every section: a run that is cut short has its page too
            keep(name, section, f"{description}\n{took}", list(every))
    say("no page written: small cases" if options.quick else f"wrote {PAGE}")


if __name__ == "__main__":
    main()
