"""Compare lipscope with other solvers, measure its products and memory; write the page.

Usage: ``python benchmarks/run.py [--quick] [--only speed,rate,…] [--threads 1,2] [--out FILE]``
"""

from __future__ import annotations

import os

# SciPy brings a BLAS with threads of its own, which would run under "one thread" as well and
# compete with torch's for the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tables import Section, machine, say, target_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def sections(quick: bool, threads: Sequence[int]) -> dict[str, Callable[[], Section]]:
    """The sections by name, in the order of the page."""
    import certificates
    import memory
    import products
    import speed
    import stopping
    import where

    return {
        "speed": lambda: speed.section(quick=quick, threads=threads),
        "profile": lambda: where.section(quick=quick),
        "rate": lambda: products.rate_section(quick=quick, threads=threads),
        "growth": lambda: products.growth_section(quick=quick),
        "memory": lambda: memory.memory_section(quick=quick),
        "job": lambda: memory.job_section(quick=quick),
        "stopping": lambda: stopping.section(quick=quick),
        "certificates": lambda: certificates.section(quick=quick),
    }


def page(done: Sequence[Section], description: str, minutes: float) -> str:
    """The whole page as Markdown."""
    targets = [t for s in done for t in s.targets]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `make bench`: every figure on this page was printed by that command.",
            "",
            description,
            f"- The whole run took {minutes:.0f} minutes",
            "",
            "## Targets",
            "",
            target_table(targets),
            "",
            *(s.text() for s in done),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, one or two minutes")
    parser.add_argument("--only", default="", help="sections to run, separated by commas")
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--out", type=Path, help="page to write (default: docs/benchmarks.md)")
    options = parser.parse_args()
    # Before any thread pool exists: its threads take the setting over.
    torch.set_flush_denormal(True)
    description = machine(shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]))
    every = sections(options.quick, [int(t) for t in options.threads.split(",")])
    chosen = [s for s in options.only.split(",") if s] or list(every)
    if unknown := [s for s in chosen if s not in every]:
        parser.error(f"unknown sections {unknown}; choose from {', '.join(every)}")
    began, done = time.perf_counter(), []
    print(description, flush=True)
    whole = not options.quick and chosen == list(every)
    out = options.out or (PAGE if whole else None)
    minutes = 0.0
    for name in chosen:
        done.append(every[name]())
        print("\n" + done[-1].text(), flush=True)
        minutes = (time.perf_counter() - began) / 60
        if out is not None:  # after every section: a run that is cut short has its page too
            out.write_text(page(done, description, minutes), encoding="utf-8")
    if out is None:
        say(f"{minutes:.1f} minutes; no page written, because this was not the whole run")
    else:
        say(f"{minutes:.1f} minutes; wrote {out}")


if __name__ == "__main__":
    main()
