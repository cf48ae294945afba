"""How fast tokens flow: steps of the adaptive flow a minute of the processor."""

from __future__ import annotations

import time

import torch
from tables import Raw, Section, Target, say, table

import lipscope as ls
from lipscope.dynamics import evolve

SIZES = ((64, 2), (256, 2), (256, 64), (2000, 2), (2000, 64))
EVALUATIONS = 12  # of a step of order 8


def measure(*, quick: bool) -> Raw:
    """Some steps at every size, one thread, float64."""
    torch.set_num_threads(1)
    raw = []
    for n, d in SIZES[: 3 if quick else None]:
        say(f"flows: {n} tokens of width {d}")
        eye = torch.eye(d, dtype=torch.float64)
        layer = ls.DotProduct(eye, eye, eye, scale=1.0)
        x = torch.randn(n, d, generator=torch.Generator().manual_seed(0)) / d**0.5
        evolve(layer, x[:8], [0.1])  # imports and pools
        began = time.process_time()
        most = 12 * EVALUATIONS if n > 1000 else 200 * EVALUATIONS
        found = evolve(layer, x, [50.0], renormalise=True, rtol=1e-6, max_evaluations=most)
        seconds = time.process_time() - began
        raw.append({"tokens": n, "width": d, "steps": found.steps, "seconds": seconds})
    return raw


def render(raw: Raw) -> Section:
    """Steps a minute at every size."""
    out = Section("Flows of tokens")
    out.add(
        f"""`lipscope.dynamics.evolve`, A = V = I, float64, one thread, tolerance 1e-6, standard
normal tokens over the square root of the width. A step asks the layer {EVALUATIONS} times; those
that are refused, and states in between, cost as much and are counted as time only. Processor time,
which load from elsewhere disturbs less than that of the clock."""
    )
    rows = []
    for one in raw:
        n, d, steps, seconds = (one[key] for key in ("tokens", "width", "steps", "seconds"))
        rate = 60 * steps / seconds
        rows.append([n, d, steps, f"{seconds:.1f}", f"{rate:,.0f}"])
        if n == 256:
            goal = f"at least 2,000 steps a minute, {n} tokens of width {d}"
            out.targets.append(Target(goal, f"{rate:,.0f}", rate >= 2000))
    out.add(table(["tokens", "width", "steps", "seconds", "steps a minute"], rows))
    return out
