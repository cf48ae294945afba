"""What one product costs: against the machine's matmul rate, and as the length grows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from cases import BERT_BASE, Case, source
from scipy.optimize import nnls
from tables import Raw, Section, Target, milliseconds, say, table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lipscope.linalg.operator import Operator

SIDE = 1024  # of the matrices whose product sets the rate
LAYERS = (("minilm", 0), ("minilm", 3), (BERT_BASE, 0))
GOAL = 70  # percent of that rate


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


def measure_rate(*, quick: bool, threads: Sequence[int]) -> Raw:
    """Seconds of JVP, VJP and a matrix product; where the goal is missed, what they consist of."""
    lengths = {128: 5} if quick else {512: 15, 1024: 9, 2048: 5}
    first, raw = min(lengths), []
    for name, layer in LAYERS:
        case = _case(name, layer, first)
        for n, count in itertools.product(lengths, threads):
            say(f"products: {case.name}, n = {n}, threads {count}")
            torch.set_num_threads(count)
            at = {"layer": case.name, "d": case.x.shape[1], "n": n, "threads": count}
            one = {**at, "flushed": _rounds(case, n, lengths[n])}
            if count == 1 and n == first:  # the switch reaches the calling thread only
                torch.set_flush_denormal(False)
                one["not flushed"] = _rounds(case, n, lengths[n])
                torch.set_flush_denormal(True)
            if _worst(one) < GOAL:
                calls = zip(("JVP", "VJP"), _pair(_alone(case, n)), strict=True)
                one["profile"] = {product: _profile(call) for product, call in calls}
            raw.append(one)
    return raw


def _rounds(case: Case, n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the matmul and of the products, round by round."""
    a, b, c = (torch.randn(SIDE, SIDE) for _ in range(3))
    jvp, vjp = _pair(_alone(case, n))
    calls = {"GEMM": lambda: torch.mm(a, b, out=c), "JVP": jvp, "VJP": vjp}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first one warms up
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: found[1:] for name, found in times.items()}


def _shares(one: dict[str, Any], product: str, state: str = "flushed") -> list[float]:
    """Percent of the matmul's rate that a product reaches, round by round."""
    work = flops(one["n"], one["d"]) / (2 * SIDE**3)
    times = one[state]
    return [100 * work * g / t for g, t in zip(times["GEMM"], times[product], strict=True)]


def _worst(one: dict[str, Any]) -> float:
    return min(median(_shares(one, product)) for product in ("JVP", "VJP"))


def render_rate(raw: Raw) -> Section:
    """JVP and VJP in percent of the machine's own float32 matmul rate."""
    out = Section("Products against the machine's matmul rate")
    rounds = {one["n"]: len(one["flushed"]["GEMM"]) for one in raw}
    out.add(
        f"""float32. The rate is that of a {SIDE}³ matrix product into a given output, measured in
the same rounds ({", ".join(map(str, rounds.values()))} of them at the lengths in turn, interleaved;
medians of the rounds' ratios). A product counts 8 n d² + 8 n² d flops, the matrix products with
projections and without recomputation. Beyond n = {min(rounds)}: the layer alone, on rows resampled
from its input at that n."""
    )
    rows = []
    for one in raw:
        rate = median(2e-9 * SIDE**3 / t for t in one["flushed"]["GEMM"])
        jvp, vjp = (f"{median(_shares(one, product)):.0f}" for product in ("JVP", "VJP"))
        rows.append([one["layer"], one["n"], one["threads"], f"{rate:.0f}", jvp, vjp])
        for product in ("JVP", "VJP"):
            plain = _shares(one, product, "not flushed") if "not flushed" in one else []
            rows[-1].append(f"{median(plain):.0f}" if plain else "")
    out.targets += [
        _target([one for one in raw if one["layer"] == name])
        for name in dict.fromkeys(one["layer"] for one in raw)
    ]
    headers = ["layer", "n", "threads", "rate, GFLOP/s", "JVP, %", "VJP, %"]
    out.add(table([*headers, "JVP, denormals not flushed", "VJP, not flushed"], rows))
    for one in raw:
        if "profile" in one:
            out.add(f"Where the time goes, {_at(one)} (milliseconds a product):")
            out.add(_profile_table(one["profile"]))
    return out


def _target(cases: Sequence[dict[str, Any]]) -> Target:
    """The target of one layer: both products, at every length and number of threads."""
    worst, enough = min(cases, key=_worst), sum(_worst(one) >= GOAL for one in cases)
    where = f"n = {worst['n']}, threads {worst['threads']}"
    text = f"{_worst(worst):.1f} % at the worst ({where}); {enough} of {len(cases)} cases"
    name = f"matmul rate: {worst['layer']}, JVP and VJP at least {GOAL} %"
    return Target(name, text, enough == len(cases))


def _at(one: dict[str, Any]) -> str:
    return f"{one['layer']}, n = {one['n']}, threads {one['threads']}"


def _profile_table(columns: dict[str, dict[str, float]]) -> str:
    """Where the time of a JVP and a VJP goes, by operation."""
    names = sorted({k for c in columns.values() for k in c})
    names.sort(key=lambda k: -sum(c.get(k, 0.0) for c in columns.values()))
    rows = [[k, *(milliseconds(c.get(k, 0.0)) for c in columns.values())] for k in names[:9]]
    return table(["operation", *columns], rows)


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


def measure_growth(*, quick: bool) -> Raw:
    """Seconds of one product from n = 64 to 4096, five times each."""
    torch.set_num_threads(1)
    raw = []
    for name in ("minilm", BERT_BASE):
        case = _case(name, 0, 512)
        for n in [2**k for k in range(6, 10 if quick else 13)]:
            one = {"layer": case.name, "d": case.x.shape[1], "n": n}
            for product, call in zip(("JVP", "VJP"), _pair(_alone(case, n)), strict=True):
                call()
                one[product] = [seconds(call) for _ in range(5)]
            raw.append(one)
        say(f"growth: {case.name} done")
    return raw


def render_growth(raw: Raw) -> Section:
    """Milliseconds at every length, with a fitted cost model."""
    out = Section("Cost of one product as the length grows")
    out.add(
        """One thread, float32, milliseconds (median of five timings), default memory. Beyond the
model's positions: the layer alone, on rows resampled from its input at n = 512. *Slope* is the
local log-log slope from the length before: between 1 (projections) and 2 (scores). *Model* is
a n² d + b n d², fitted by least squares in relative error; *off* is its relative deviation."""
    )
    fits = []
    for layer in dict.fromkeys(one["layer"] for one in raw):
        group = [one for one in raw if one["layer"] == layer]
        lengths, d = [one["n"] for one in group], group[0]["d"]
        rows: list[list[object]] = [[n] for n in lengths]
        for product in ("JVP", "VJP"):
            t = [median(one[product]) for one in group]
            a, b, model = _fit(lengths, d, t)
            off = [m / x - 1 for m, x in zip(model, t, strict=True)]
            for row, cells in zip(rows, _growth_cells(lengths, t, off), strict=True):
                row.extend(cells)
            worst = max(range(len(off)), key=lambda j: abs(off[j]))
            fits.append(
                f"- {layer} (d = {d}), {product}: a = {a:.2e} s, b = {b:.2e} s, largest "
                f"deviation {100 * off[worst]:+.0f} % at n = {lengths[worst]}; matrix products at "
                f"the rate of this fit: {8e-9 / a if a else np.inf:.0f} GFLOP/s in n² d, "
                f"{8e-9 / b if b else np.inf:.0f} in n d²"
            )
        out.add(f"{layer}, d = {d}:")
        out.add(table(["n", *(f"{p} {c}" for p in ("JVP", "VJP") for c in _COLUMNS)], rows))
    out.add("\n".join(fits))
    return out


_COLUMNS = ("ms", "slope", "off, %")


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
