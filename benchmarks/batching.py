"""Whether layers or samples of one length should share their matrix products on a CPU."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from cases import Case, source
from products import seconds
from tables import Raw, Section, milliseconds, say, table
from torch import Tensor

COUNT = 6  # layers of MiniLM, and samples of its layer 3


def measure(*, quick: bool) -> Raw:
    """One JVP of each of six layers or samples: one after the other, and all in one batch."""
    torch.set_num_threads(1)
    rounds = 5 if quick else 15
    lengths = (32, 128) if quick else (16, 32, 64, 128, 256)
    return [_rounds(what, n, rounds) for what in ("layers", "samples") for n in lengths]


def _rounds(what: str, n: int, rounds: int) -> dict[str, Any]:
    say(f"batching: {what}, n = {n}")
    model = source("minilm")
    if what == "layers":
        cases = model.cases(model.windows([n], 1)[0], range(COUNT))
    else:
        cases = [model.cases(window, [3])[0] for window in model.windows([n], COUNT)]
    single = [_operands(case) for case in cases]
    batch = [torch.stack(parts) for parts in zip(*single, strict=True)]
    if what == "samples":
        batch[:2] = single[0][:2]  # weights that all of them share
    loop_times, batch_times = [], []
    for _ in range(rounds):
        loop_times.append(seconds(lambda: [_product(*one) for one in single]))
        batch_times.append(seconds(lambda: _product(*batch)))
    return {"what": what, "n": n, "loop": loop_times, "batch": batch_times}


def render(raw: Raw) -> Section:
    """Loop and batch side by side."""
    out = Section("Layers or samples one by one, or in a batch")
    out.add(
        f"""The matrix products and elementwise passes of one JVP (projections, scores, values) for
{COUNT} layers of MiniLM at one window, and for {COUNT} windows at its layer 3: in a loop over them,
and with them on a leading axis. One thread, float32, milliseconds for all of them, median of
{len(raw[0]["loop"])} interleaved rounds. *Ratio*: loop over batch; a batch pays where it is clearly
above 1."""
    )
    rows = []
    for one in raw:
        ratio = median(a / b for a, b in zip(one["loop"], one["batch"], strict=True))
        times = (milliseconds(median(one[way])) for way in ("loop", "batch"))
        rows.append([one["what"], one["n"], *times, f"{ratio:.2f}"])
    out.add(table(["what", "n", "loop", "batch", "ratio"], rows))
    out.add(
        """`measure` takes layers and samples one by one: a batch would also hold all their
probabilities at once, and run every one of them as long as the slowest."""
    )
    return out


def _operands(case: Case) -> tuple[Tensor, ...]:
    """Weights, queries, keys, values, probabilities, heads and a direction."""
    layer = case.map.attention
    assert layer is not None and layer.output is not None
    q, k, v = layer.project(case.x)
    p = layer.weights(q, k)
    query, key, value = layer.projections()
    weight = torch.cat([query * layer.scale, key, value])
    one = (weight, layer.output, q, k, v, p, p @ v, torch.randn_like(case.x))
    return tuple(t.detach().contiguous() for t in one)


def _product(
    weight: Tensor,
    output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    o: Tensor,
    e: Tensor,
) -> Tensor:
    """``J e`` with any leading axes."""
    heads = q.shape[-3]
    dq, dk, dv = (
        part.unflatten(-1, (heads, -1)).transpose(-3, -2)
        for part in (e @ weight.mT).chunk(3, dim=-1)
    )
    w = (torch.cat([dq, q], -1) @ torch.cat([k, dk], -1).mT).mul_(p)
    do = w @ v - w.sum(-1, keepdim=True) * o + p @ dv
    return do.transpose(-3, -2).flatten(-2) @ output.mT
