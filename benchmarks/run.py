"""Compare lipscope with other solvers, measure its products and memory; write the pages.

Usage: ``python benchmarks/run.py [--quick] [--only speed,rate,…] [--threads 1,2] [--page]``
"""

from __future__ import annotations

import os

# SciPy brings a BLAS with threads of its own, which would run under "one thread" as well and
# compete with torch's for the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import functools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tables import PAGE, STORE, TABLES, Raw, Section, Target, commit, machine, say, table

# What one section is: its measurement, which is told whether to be quick, and its text.
Pair = tuple[Callable[..., Raw], Callable[[Raw], Section]]
Stored = dict[str, Any]  # a section as it is kept: raw, measured, commit


def sections(threads: Sequence[int] = (1, 2)) -> dict[str, Pair]:
    """The sections by name, in the order of the page."""
    import batching
    import certified
    import counts
    import flows
    import functional
    import large_models
    import memory
    import products
    import report
    import scale
    import speed
    import startup
    import stopping
    import where

    import certificates
    import control
    import explore

    rate = functools.partial(products.measure_rate, threads=threads)
    return {
        "speed": (functools.partial(speed.measure, threads=threads), speed.render),
        "startup": (startup.measure, startup.render),
        "profile": (where.measure, where.render),
        "rate": (rate, products.render_rate),
        "growth": (products.measure_growth, products.render_growth),
        "counts": (counts.measure, counts.render),
        "batching": (batching.measure, batching.render),
        "memory": (memory.measure, memory.render),
        "functional": (functional.measure, functional.render),
        "flows": (flows.measure, flows.render),
        "job": (memory.measure_job, memory.render_job),
        "large": (large_models.measure, large_models.render),
        "stopping": (stopping.measure, stopping.render),
        "certificates": (certificates.measure, certificates.render),
        "sweeps": (scale.measure, scale.render),
        "page": (report.measure, report.render),
        "explore": (explore.measure, explore.render),
        "control": (control.measure, control.render),
        "caps": (control.measure_caps, control.render_caps),
        "estimate": (control.measure_estimate, control.render_estimate),
        "certified": (certified.measure, certified.render),
        "certificate-times": (certificates.measure_times, certificates.render_times),
    }


def page(stored: dict[str, Stored]) -> str:
    """The page of targets and ratios as Markdown, rendered from what was measured."""
    found = _sections(stored)
    targets = [target for section in found.values() for target in section.targets]
    parts = {
        "Missed": [one for one in targets if one.reached is False],
        "Not measured": [one for one in targets if one.reached is None],
        "Reached": [one for one in targets if one.reached],
    }
    counts = ", ".join(f"{len(some)} {name.lower()}" for name, some in parts.items())
    lines = [
        "# Benchmarks",
        "",
        f"Of {len(targets)} targets: {counts}. *Times*: another method's time over ours.",
        "",
        *_WRITTEN,
        "Nothing was measured on a GPU: the tests marked `cuda` were skipped for want of one,",
        "and neither `torch.compile`, a Triton kernel nor `jvp_flash_attention` was tried.",
        "",
        *_of_older_code([found[name].title for name, one in stored.items() if _old(one)]),
    ]
    for name, some in parts.items():
        if some:
            lines += [f"## {name}", ""]
            lines += [table(["target", "measured"], [[t.name, t.measured] for t in some]), ""]
    links = [f"[{one.title}]({TABLES.name}#{_anchor(one.title)})" for one in found.values()]
    return "\n".join([*lines, "## The tables", "", *(f"- {link}" for link in links), ""])


def tables(stored: dict[str, Stored]) -> str:
    """The page of all tables as Markdown, each with the machine and the commit."""
    found = _sections(stored)
    texts = [f"{found[name].text()}\n{_measured(one)}\n" for name, one in stored.items()]
    about = f"What the [benchmarks]({PAGE.name}) are computed from."
    return "\n".join(["# Tables of the benchmarks", "", about, *_WRITTEN, "", *texts])


_WRITTEN = (
    "Written by `make bench`, or in parts by `benchmarks/run.py --only NAME`: every figure",
    "was measured by that command, on the processor that its section names, and is computed",
    "from the single timings and counts in `benchmarks/results.json`.",
)


def _sections(stored: dict[str, Stored]) -> dict[str, Section]:
    every = sections()
    return {name: _section(one, every[name][1]) for name, one in stored.items()}


def _anchor(title: str) -> str:
    """As MkDocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def _measured(one: Stored) -> str:
    return one["measured"] + (f"\n- Commit: {one['commit']}" if "commit" in one else "")


# --- sections of before raw numbers were kept: to be deleted when all have been run again ---------


def _old(one: Stored) -> bool:
    return "raw" not in one


def _section(one: Stored, render: Callable[[Raw], Section]) -> Section:
    if _old(one):
        return Section(one["title"], [one["printed"]], [Target(*t) for t in one["targets"]])
    return render(one["raw"])


def _of_older_code(titles: Sequence[str]) -> list[str]:
    if not titles:
        return []
    return [
        f"**Not of today's code**: {'; '.join(titles)}. These sections stand as they were printed,",
        "before raw numbers were kept, except that the overhead of a job, of which they could not",
        "show that it is small enough, counts as not measured. The one that names no commit was",
        "printed before random starts were drawn in float64 and before δ was 0.01: sigma changed",
        "within its tolerance, times may have changed.",
        "",
    ]


# --- what is kept -------------------------------------------------------------------------------


def kept() -> dict[str, Stored]:
    """The sections as they were last measured."""
    return json.loads(STORE.read_text("utf-8")) if STORE.is_file() else {}


def keep(stored: dict[str, Stored]) -> None:
    """Store what was measured, one record a line, and write the pages anew."""
    dump = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False)
    blocks = []
    for name, one in stored.items():
        lines = [f"  {dump(key)}: {dump(value)}" for key, value in one.items() if key != "raw"]
        if "raw" in one:
            records = ",\n".join(f"   {dump(record)}" for record in one["raw"])
            lines.append(f'  "raw": [\n{records}\n  ]')
        blocks.append(f" {dump(name)}: {{\n" + ",\n".join(lines) + "\n }")
    STORE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
    write(stored)


def write(stored: dict[str, Stored]) -> None:
    """Both pages anew."""
    PAGE.write_text(page(stored), encoding="utf-8")
    TABLES.write_text(tables(stored), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, one or two minutes")
    parser.add_argument("--only", default="", help="sections to run, separated by commas")
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--page", action="store_true", help="only write the pages anew")
    options = parser.parse_args()
    if options.page:
        write(kept())
        return
    # Before any thread pool exists: its threads take the setting over.
    torch.set_flush_denormal(True)
    description = machine(shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]))
    every = sections([int(t) for t in options.threads.split(",")])
    chosen = [s for s in options.only.split(",") if s] or list(every)
    if unknown := [s for s in chosen if s not in every]:
        parser.error(f"unknown sections {unknown}; choose from {', '.join(every)}")
    print(description, flush=True)
    at = commit()
    for name in chosen:
        began = time.perf_counter()
        measure, render = every[name]
        # As it will be read: what JSON cannot hold fails here, and the page says what is printed.
        raw = json.loads(json.dumps(measure(quick=options.quick), allow_nan=False))
        took = f"- This section took {(time.perf_counter() - began) / 60:.1f} minutes"
        print("\n" + render(raw).text(), flush=True)
        if options.quick:
            continue
        if at is None or commit() != at:
            say(f"{name} is not kept: files differ from the commit, which its numbers should name")
            continue
        one = {"measured": f"{description}\n{took}", "commit": at, "raw": raw}
        stored = kept() | {name: one}  # after every section: a run that is cut short has its pages
        keep({key: stored[key] for key in every if key in stored})


if __name__ == "__main__":
    main()
