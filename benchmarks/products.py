"""What one product costs: against the machine's matmul rate, and as the length grows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from cases import BERT_BASE, Case, source
from scipy.optimize import nnls
from tables import Section, Target, milliseconds, say, table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lipscope.linalg.operator import Operator

SIDE = 1024  # of the matrices whose product sets the rate
LAYERS = (("minilm", 0, 0.7), ("minilm", 3, 0.7), (BERT_BASE, 0, 0.7))


def flops(n: int, d: int) -> int:
    """Matrix products of one JVP or VJP with projections, without recomputation.

    Projections: three into queries, keys and values, one out: ``8 n d^2``. Scores: two of
    ``2 n^2 d`` for their change, two for the values: ``8 n^2 d``.
    """
    return 8 * n * d * d + 8 * n * n * d


def seconds(call: Callable[[], object], least: float = 0.02) -> float:
    """Time of one call, repeated until ``least`` seconds have passed."""
    count, began = 0, time.perf_counter()
    while True:
        call()
        count += 1
        spent = time.perf_counter() - began
        if spent >= least:
            return spent / count


def _case(name: str, layer: int, n: int) -> Case:
    model = source(name)
    return model.cases(model.windows([n], 1)[0], [layer])[0]


def _pair(op: Operator) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """One JVP and one VJP of random unit vectors."""
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(op.in_shape, generator=generator)
    g = torch.randn(op.out_shape, generator=generator)
    e, g = e / e.norm(), g / g.norm()
    return lambda: op.matvec(e), lambda: op.rmatvec(g)


def _alone(case: Case, n: int) -> Operator:
    """The layer linearised at its input, or at ``n`` rows resampled from it."""
    layer = case.map.attention
    assert layer is not None
    if n == len(case.x):
        return layer.linearise(case.x)
    rows = torch.randint(len(case.x), (n,), generator=torch.Generator().manual_seed(n))
    return layer.linearise(case.x[rows])


# --- against the matmul rate ----------------------------------------------------------------


def rate_section(*, quick: bool, threads: Sequence[int]) -> Section:
    """JVP and VJP in percent of the machine's own float32 matmul rate."""
    lengths = {128: 5} if quick else {512: 15, 1024: 9, 2048: 5}
    first = min(lengths)
    out = Section("Products against the machine's matmul rate")
    rows, profiles = [], []
    for name, layer, goal in LAYERS:
        case = _case(name, layer, first)
        for n, count in itertools.product(lengths, threads):
            say(f"products: {case.name}, n = {n}, threads {count}")
            torch.set_num_threads(count)
            flushed = _shares(case, n, lengths[n])
            row = [case.name, n, count, *(f"{flushed[k]:.0f}" for k in ("GEMM", "JVP", "VJP"))]
            if count == 1 and n == first:  # the switch reaches the calling thread only
                torch.set_flush_denormal(False)
                plain = _shares(case, n, lengths[n])
                torch.set_flush_denormal(True)
                row += [f"{plain[k]:.0f}" for k in ("JVP", "VJP")]
            else:
                row += ["", ""]
            rows.append(row)
            worst = min(flushed["JVP"], flushed["VJP"])
            text = f"JVP {flushed['JVP']:.0f} %, VJP {flushed['VJP']:.0f} %"
            at = f"{case.name}, n = {n}, threads {count}"
            wanted = f"matmul rate: {at}: at least {100 * goal:.0f} %"
            out.targets.append(Target(wanted, text, worst >= 100 * goal))
            if worst < 100 * goal:
                profiles.append(_profile_text(case, n, count))
    rounds = ", ".join(map(str, lengths.values()))
    out.add(
        f"""float32. The rate is that of a {SIDE}³ matrix product into a given output, measured in
the same rounds ({rounds} of them at the lengths in turn, interleaved; medians of the rounds'
ratios). A product counts 8 n d² + 8 n² d flops, the matrix products with projections and without
recomputation. Beyond n = {first}: the layer alone, on rows resampled from its input at that n."""
    )
    headers = ["layer", "n", "threads", "rate, GFLOP/s", "JVP, %", "VJP, %"]
    out.add(table([*headers, "JVP, denormals not flushed", "VJP, not flushed"], rows))
    for text in profiles:
        out.add(text)
    return out


def _shares(case: Case, n: int, rounds: int) -> dict[str, float]:
    """Rate of the matmul (GFLOP/s) and shares of it that the products reach (percent)."""
    a, b, c = (torch.randn(SIDE, SIDE) for _ in range(3))
    jvp, vjp = _pair(_alone(case, n))
    work = flops(n, case.x.shape[1])
    rates: dict[str, list[float]] = {"GEMM": [], "JVP": [], "VJP": []}
    for _ in range(rounds + 1):  # the first one warms up
        rate = 2 * SIDE**3 / seconds(lambda: torch.mm(a, b, out=c))
        rates["GEMM"].append(rate / 1e9)
        rates["JVP"].append(100 * work / seconds(jvp) / rate)
        rates["VJP"].append(100 * work / seconds(vjp) / rate)
    return {k: median(v[1:]) for k, v in rates.items()}


def _profile_text(case: Case, n: int, threads: int) -> str:
    """Where the time of a JVP and a VJP goes, by operation."""
    at = f"{case.name}, n = {n}, threads {threads}"
    parts = [f"Where the time goes, {at} (milliseconds a product):"]
    torch.set_num_threads(threads)
    columns = {}
    for name, call in zip(("JVP", "VJP"), _pair(_alone(case, n)), strict=True):
        columns[name] = _profile(call)
    names = sorted({k for c in columns.values() for k in c})
    names.sort(key=lambda k: -sum(c.get(k, 0.0) for c in columns.values()))
    rows = [[k, *(milliseconds(c.get(k, 0.0)) for c in columns.values())] for k in names[:9]]
    parts.append(table(["operation", *columns], rows))
    return "\n\n".join(parts)


def _profile(call: Callable[[], Tensor], repeats: int = 20) -> dict[str, float]:
    """Seconds of own time per call, by operation."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        for _ in range(repeats):
            call()
    return {
        e.key.removeprefix("aten::"): e.self_cpu_time_total / 1e6 / repeats
        for e in record.key_averages()
        if e.key.startswith("aten::")
    }


# --- as the length grows --------------------------------------------------------------------


def growth_section(*, quick: bool) -> Section:
    """Milliseconds of one product from n = 64 to 4096, with a fitted cost model."""
    torch.set_num_threads(1)
    lengths = [2**k for k in range(6, 10 if quick else 13)]
    out = Section("Cost of one product as the length grows")
    out.add(
        """One thread, float32, milliseconds (median of five timings), default memory. Beyond the
model's positions: the layer alone, on rows resampled from its input at n = 512. *Slope* is the
local log-log slope from the length before: between 1 (projections) and 2 (scores). *Model* is
a n² d + b n d², fitted by least squares in relative error; *off* is its relative deviation."""
    )
    fits = []
    for name in ("minilm", BERT_BASE):
        case = _case(name, 0, 512)
        times = {n: _product_times(case, n) for n in lengths}
        rows: list[list[object]] = [[n] for n in lengths]
        d = case.x.shape[1]
        for i, product in enumerate(("JVP", "VJP")):
            t = [times[n][i] for n in lengths]
            a, b, model = _fit(lengths, d, t)
            off = [m / x - 1 for m, x in zip(model, t, strict=True)]
            for row, cells in zip(rows, _growth_cells(lengths, t, off), strict=True):
                row.extend(cells)
            worst = max(range(len(off)), key=lambda j: abs(off[j]))
            fits.append(
                f"- {case.name} (d = {d}), {product}: a = {a:.2e} s, b = {b:.2e} s, largest "
                f"deviation {100 * off[worst]:+.0f} % at n = {lengths[worst]}; matrix products at "
                f"the rate of this fit: {8e-9 / a if a else np.inf:.0f} GFLOP/s in n² d, "
                f"{8e-9 / b if b else np.inf:.0f} in n d²"
            )
        out.add(f"{case.name}, d = {d}:")
        out.add(table(["n", *(f"{p} {c}" for p in ("JVP", "VJP") for c in _COLUMNS)], rows))
        say(f"growth: {case.name} done")
    out.add("\n".join(fits))
    return out


_COLUMNS = ("ms", "slope", "off, %")


def _product_times(case: Case, n: int) -> tuple[float, float]:
    times = []
    for call in _pair(_alone(case, n)):
        call()
        times.append(median(seconds(call) for _ in range(5)))
    return times[0], times[1]


def _fit(lengths: Sequence[int], d: int, t: Sequence[float]) -> tuple[float, float, list[float]]:
    terms = np.array([[n * n * d, n * d * d] for n in lengths], dtype=float)
    (a, b), _ = nnls(terms / np.array(t)[:, None], np.ones(len(t)))
    return float(a), float(b), list(terms @ [a, b])


def _growth_cells(
    lengths: Sequence[int], t: Sequence[float], off: Sequence[float]
) -> list[list[object]]:
    slopes = [""] + [
        f"{np.log(t1 / t0) / np.log(n1 / n0):.2f}"
        for (n0, t0), (n1, t1) in pairwise(zip(lengths, t, strict=True))
    ]
    return [[milliseconds(x), s, f"{100 * o:+.0f}"] for x, s, o in zip(t, slopes, off, strict=True)]
