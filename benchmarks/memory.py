"""Peak memory of one long measurement, and time and memory of the whole main job.

Every figure comes from a fresh process, which reports its own peak. This file is also that
process: ``python benchmarks/memory.py layer N BYTES``, ``measure N BYTES``, ``causal N BYTES`` or
``job ARGUMENT…``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import Raw, Section, Target, say, table

GIB = 2**30
JOB = ["measure", "--lengths", "16,32,64,128,256", "--samples", "5", "--rest"]
QUICK_JOB = ["measure", "--lengths", "16,32,64", "--samples", "2", "--rest"]


# --- the fresh process ----------------------------------------------------------------------


def peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss may still hold the parent's peak from before `exec`
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most * 1024


def layer_alone(n: int, memory: int) -> dict[str, Any]:
    """Linearise a BERT-base-size layer at random tokens and find its top singular value."""
    import torch

    import lipscope as ls

    torch.set_flush_denormal(True)
    generator = torch.Generator().manual_seed(0)
    weights = [0.02 * torch.randn(768, 768, generator=generator) for _ in range(4)]
    layer = ls.DotProduct(*weights, heads=12)
    x = torch.randn(n, 768, generator=generator)
    before = peak()
    began = time.perf_counter()
    # The memory is shared between the layer and the solver, as `measure` shares it.
    op = layer.linearise(x, memory=memory)
    top = ls.top_singular(op, memory=memory // 2, generator=generator)
    seconds = time.perf_counter() - began
    return {"sigma": top.sigma, "products": top.products, "seconds": seconds, "before": before}


def whole_measurement(n: int, memory: int) -> dict[str, Any]:
    """The same size through `measure`: model, text, capture and check included."""
    return _measured(f"random:bert:num_hidden_layers=1,max_position_embeddings={n}", n, memory)


def causal_measurement(n: int, memory: int) -> dict[str, Any]:
    """A random GPT-2 layer of width 384 with 12 heads through `measure`."""
    sizes = f"n_layer=1,n_embd=384,n_head=12,n_positions={n}"
    return _measured(f"random:gpt2:{sizes}", n, memory)


def _measured(model: str, n: int, memory: int) -> dict[str, Any]:
    import torch

    import lipscope as ls
    from lipscope.sources import default_text

    torch.set_flush_denormal(True)
    before = peak()
    began = time.perf_counter()
    rows = ls.measure(model, default_text(), lengths=[n], samples=1, memory=memory)
    seconds = time.perf_counter() - began
    row = rows[0]
    return {"sigma": row.sigma, "products": row.products, "seconds": seconds, "before": before}


def job(arguments: list[str]) -> dict[str, Any]:
    """The command line, in this process."""
    from lipscope.cli import main

    before = peak()
    began = time.perf_counter()
    sys.argv = ["lipscope", *arguments]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return {"code": code, "seconds": time.perf_counter() - began, "before": before}


def child() -> None:
    kind, *arguments = sys.argv[1:]
    if kind == "job":
        answer = job(arguments)
    else:
        ways: dict[str, Callable[[int, int], dict[str, Any]]] = {
            "layer": layer_alone,
            "measure": whole_measurement,
            "causal": causal_measurement,
        }
        answer = ways[kind](int(arguments[0]), int(arguments[1]))
    answer["peak"] = peak()
    print("\n" + json.dumps(answer))


# --- the sections ---------------------------------------------------------------------------


def _fresh(arguments: list[str]) -> dict[str, Any]:
    """Run this file in a fresh process; its answer, or what went wrong under `problem`."""
    say(f"fresh process: {' '.join(arguments)}")
    began = time.perf_counter()
    run = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    wall = time.perf_counter() - began
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        return {"problem": last}
    return {**json.loads(lines[-1]), "wall": wall}


def measure(*, quick: bool) -> Raw:
    """Peak memory of one measurement, at several lengths and budgets."""
    lengths = (512, 1024) if quick else (1024, 2048, 4096)
    asked = [(kind, n, GIB) for kind in ("layer", "measure") for n in lengths]
    asked += [("layer", lengths[-1], GIB // 4), ("causal", 2048 if quick else 16384, GIB)]
    return [
        {"what": kind, "n": n, "budget": budget, **_fresh([kind, str(n), str(budget)])}
        for kind, n, budget in asked
    ]


def render(raw: Raw) -> Section:
    """Peak memory of one measurement of a BERT-base-size layer."""
    out = Section("Memory")
    out.add(
        """Peak resident memory (GiB) of one measurement of a BERT-base-size layer (d = 768, 12
heads, float32, default tolerance, all threads) in a fresh process: the *layer* alone, linearised
and solved; and through *measure*, with model, tokenisation, capture and the check against the
model's own output; and *causal*, the same for a random GPT-2 layer of d = 384 with 12 heads (at
n = 16,384 its scores alone would take 12.9 GB). *Imports*: the peak before the work began. The
budget is what `memory` was set to; the default is 1 GiB."""
    )
    rows = [
        [one["what"], one["n"], f"{one['budget'] // 2**20} MiB", *_memory_cells(one)] for one in raw
    ]
    headers = ["what", "n", "budget", "peak", "imports", "seconds", "products", "sigma"]
    out.add(table(headers, rows))
    # The longest of each kind: the last in the dictionary.
    for kind, one in {o["what"]: o for o in raw if o["budget"] == GIB}.items():
        size = one.get("peak")
        text = f"{size / GIB:.2f} GiB" if size else one["problem"]
        wanted = f"memory: below 2 GB at n = {one['n']}, default budget ({kind})"
        out.targets.append(Target(wanted, text, size < 2e9 if size else None))
    return out


def _memory_cells(answer: dict[str, Any]) -> list[str]:
    if "problem" in answer:
        return [answer["problem"][:60], "", "", "", ""]
    return [
        f"{answer['peak'] / GIB:.2f}",
        f"{answer['before'] / GIB:.2f}",
        f"{answer['seconds']:.1f}",
        str(answer["products"]),
        f"{answer['sigma']:.4g}",
    ]


def measure_job(*, quick: bool) -> Raw:
    """Wall time and peak memory of the main job through the command line."""
    arguments = QUICK_JOB if quick else JOB
    with tempfile.TemporaryDirectory() as folder:
        answer = _fresh(["job", *arguments, "--out", str(Path(folder) / "run")])
        files = sorted(p.name for p in Path(folder).glob("run/*"))
    return [{"arguments": arguments, "files": files, **answer}]


def render_job(raw: Raw) -> Section:
    """One row, or why there is none."""
    (one,) = raw
    out = Section("The main job, end to end")
    out.add(
        f"""`lipscope {" ".join(one["arguments"])} --out DIR` in a fresh process, all
threads, denormals as they are: MiniLM, every layer, the default text. *Whole process* includes the
start of Python and all imports."""
    )
    if "problem" in one or one["code"]:
        problem = one.get("problem", f"exit status {one.get('code')}")
        out.add(f"The job did not run: {problem}")
        out.targets.append(Target("main job under 60 s and 3 GB", problem, None))
        return out
    seconds, wall, peaked = f"{one['seconds']:.1f}", f"{one['wall']:.1f}", one["peak"] / GIB
    row = ["main job", seconds, wall, f"{peaked:.2f}"]
    out.add(table(["", "seconds", "whole process, s", "peak, GiB"], [row]))
    out.add(f"Files written: {', '.join(f'`{f}`' for f in one['files'])}.")
    out.targets += [
        Target("main job under 60 s", f"{wall} s", one["wall"] < 60),
        Target("main job below 3 GB", f"{peaked:.2f} GiB", one["peak"] < 3e9),
    ]
    return out


if __name__ == "__main__":
    child()
