"""Processor time and peak memory of `lipscope.attention` beside attention written out.

Every figure comes from a process of its own, forked off before any tensor is made, which reports
its own peak.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from memory import peak
from tables import Raw, Section, milliseconds, say, table
from torch import Tensor
from torch.func import grad, jvp

import lipscope as ls

HEADS, WIDTH, ROUNDS = 2, 64, 3
PASSES = ("forward", "jvp", "grad", "grad of jvp")
WHICH = ("eager", "lipscope")


def once(answer: Connection, which: str, name: str, n: int) -> None:
    """Times of some rounds of a pass, and what it adds to the peak."""
    torch.set_num_threads(1)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * WIDTH**-0.5, -1) @ v

    function: Callable[..., Tensor] = eager if which == "eager" else ls.attention
    torch.manual_seed(0)
    small = [torch.randn(1, 8, WIDTH) for _ in range(6)]
    x = [torch.randn(HEADS, n, WIDTH) for _ in range(6)]
    every = tuple(range(6))

    def moved(*z: Tensor) -> Tensor:
        return jvp(function, z[:3], z[3:])[1]

    passes: dict[str, Callable[..., Any]] = {
        "forward": lambda *z: function(*z[:3]),
        "jvp": moved,
        "grad": lambda *z: grad(lambda *y: function(*y).square().sum(), (0, 1, 2))(*z[:3]),
        "grad of jvp": grad(lambda *y: moved(*y).square().sum(), every),
    }
    run = passes[name]
    run(*small)  # imports and pools
    before, times = peak(), []
    for _ in range(max(1, min(ROUNDS, 4096 // n))):
        began = time.process_time()
        run(*x)
        times.append(time.process_time() - began)
    answer.send({"seconds": times, "bytes": peak() - before})


def measure(*, quick: bool) -> Raw:
    """Both of them at every length, in turn; None where a process was killed."""
    lengths = (512, 1024) if quick else (512, 1024, 2048, 4096, 8192)
    return [
        {"pass": name, "n": n, **{which: _fresh(which, name, n) for which in WHICH}}
        for name in PASSES
        for n in lengths
    ]


def render(raw: Raw) -> Section:
    """Times and peaks side by side."""
    out = Section("Attention as a function")
    out.add(
        f"""`lipscope.attention` beside `softmax(q k^T / sqrt(k)) v` written out and differentiated
by torch: {HEADS} heads of width {WIDTH}, no mask, float32, one thread, denormals flushed. *grad of
jvp* is the gradient, in all inputs and their tangents, of a function of `torch.func.jvp`, as
consistency and flow models take it; torch's own fused attention has no forward-mode derivative on a
CPU. Times in milliseconds of the processor, which load from elsewhere disturbs less than those of
the clock: the best of {ROUNDS} rounds, of one from n = 4,096 on. Memory in MiB: what the pass adds
to the peak of its process, one for each figure. The two that a ratio compares ran one after the
other."""
    )
    headers = [
        "pass",
        "n",
        "eager",
        "lipscope",
        "faster by",
        "eager MiB",
        "lipscope MiB",
        "less by",
    ]
    rows = [[one["pass"], one["n"], *_cells(one["eager"], one["lipscope"])] for one in raw]
    out.add(table(headers, rows))
    return out


def _cells(eager: dict[str, Any] | None, ours: dict[str, Any] | None) -> list[str]:
    times = [milliseconds(min(one["seconds"])) if one else "no memory" for one in (eager, ours)]
    sizes = [f"{one['bytes'] / 2**20:.0f}" if one else "" for one in (eager, ours)]
    if not eager or not ours:
        return [*times, "", *sizes, ""]
    faster = min(eager["seconds"]) / min(ours["seconds"])
    less = eager["bytes"] / max(ours["bytes"], 2**20)
    return [*times, f"{faster:.1f}", *sizes, f"{less:.0f}"]


def _fresh(which: str, name: str, n: int) -> dict[str, Any] | None:
    """One figure from a process of its own; None where it was killed."""
    say(f"functional: {which}, {name}, n = {n}")
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe()
    process = forked.Process(target=once, args=(theirs, which, name, n))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()
