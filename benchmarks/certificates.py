"""How loose are the certificates beside sigma, and what do they cost?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from cases import BERT_BASE, Case, source
from tables import Section, Target, say, table
from torch import Tensor

import lipscope as ls
from lipscope.attacks import attack_in_ball
from lipscope.certificates.certify import certify_ball
from lipscope.linalg.singular import top_singular_batch
from lipscope.theorems import Head, HeadAt, heads_of
from lipscope.theorems.derived.global_bounds import global_rows, global_rows_capped
from lipscope.theorems.derived.local_bounds import (
    local_blocks,
    local_norms,
    local_rows,
    local_rows_scalar,
)
from lipscope.theorems.derived.row_gram import row_gram, row_gram_joint
from lipscope.theorems.several import AskedLayer

LOCAL = {
    "F1": local_norms,
    "F2": local_rows,
    "F2s": local_rows_scalar,
    "F3c": local_blocks,
    "row-Gram": row_gram,
}


def section(*, quick: bool) -> Section:
    """Looseness on real text, at one input and over balls."""
    torch.set_num_threads(2)
    out = Section("Certificates beside sigma")
    n, layers = (32, (0, 5)) if quick else (128, tuple(range(6)))
    cases = source("minilm").cases(source("minilm").windows([n], 1)[0], layers)
    out.add(
        f"""MiniLM, all layers, the first {n}-token window of the default text, map `attention`,
float64. Bound over sigma: 1 is exact. *One head*: its contribution through its part of the output
projection; median over the heads, in brackets the largest. *All heads*: the whole layer; *added*:
the best certificate of each head, summed (Lemma 3.8); *joint*: the row-Gram certificate with all
heads in one matrix per row."""
    )
    one: dict[str, list[float]] = {name: [] for name in LOCAL}
    together, rows_one, rows_all = [], [], []
    for case in cases:
        ratios, added, joint = _case(case)
        for name, values in ratios.items():
            one[name] += values
        together.append(joint)
        rows_one.append(
            [case.name, *(f"{np.median(v):.2f} ({max(v):.2f})" for v in ratios.values())]
        )
        rows_all.append([case.name, f"{added:.2f}", f"{joint:.2f}"])
        say(f"certificates: {case.name} done, joint {joint:.2f}")
    out.add(table(["one head", *LOCAL], rows_one))
    out.add(table(["all heads", "added", "joint"], rows_all))
    best = np.minimum.reduce([np.array(v) for v in one.values()])
    out.targets = [
        _at_most("certificate of one head over sigma, median", float(np.median(best)), 2.5),
        _at_most("certificate of all heads over sigma, median", float(np.median(together)), 4.0),
    ]
    _balls(out, quick=quick)
    return out


def _balls(out: Section, *, quick: bool) -> None:
    """The ball certificate over the largest ratio that an attack finds."""
    n, chosen = 32, ((0,) if quick else (0, 2, 5))
    cases = source("minilm").cases(source("minilm").windows([n], 1)[0], chosen)
    rows, worst = [], {"one head": 0.0, "all heads": 0.0}
    for case in cases:
        layer, x = case.exact_map.attention, case.x.double()
        assert isinstance(layer, ls.DotProduct)
        radius = float(x.norm(dim=-1).max())
        for share in (1e-3, 1e-2):
            ratios = [_over_attack(layer, x, share * radius, head) for head in (0, 4, 8)]
            whole = _over_attack(layer, x, share * radius, None)
            worst["one head"] = max(worst["one head"], *ratios)
            worst["all heads"] = max(worst["all heads"], whole)
            rows.append([case.name, f"{share:g}", f"{np.median(ratios):.2f}", f"{whole:.2f}"])
        say(f"certificates: balls of {case.name} done")
    out.add(
        f"""Certificate over a ball, n = {n}: every token moves by at most eps. Bound of
‖f(X′) − f(X)‖ / ‖X′ − X‖ over the largest ratio that 10 random points and 2 ascents found;
median of heads 0, 4 and 8, and all heads together."""
    )
    out.add(table(["layer", "eps / R", "one head", "all heads"], rows))
    out.targets += [
        _at_most(f"ball certificate over the best attack, eps / R up to 1e-2, {name}, worst", v, 3)
        for name, v in worst.items()
    ]


def _over_attack(layer: ls.DotProduct, x: Tensor, eps: float, head: int | None) -> float:
    bound = certify_ball(layer, x, eps=eps, head=head, steps=2).value
    found = attack_in_ball(layer, x, eps, head=head, random=10, ascents=2, seed=0).ratio
    if found > bound:
        raise AssertionError(f"the certificate {bound} is violated: {found}")
    return bound / found


def _case(case: Case) -> tuple[dict[str, list[float]], float, float]:
    layer, x = case.exact_map.attention, case.x.double()
    assert isinstance(layer, ls.DotProduct)
    heads = [HeadAt(head, x) for head in heads_of(layer)]
    sigma = ls.top_singular(layer.linearise(x), tol=1e-6, generator=_seeded(0)).sigma
    sources = [_seeded(h) for h in range(len(heads))]
    tops = top_singular_batch(layer.linearise(x, per_head=True), sources, tol=1e-6)
    values = {name: [form(head) for head in heads] for name, form in LOCAL.items()}
    ratios = {
        name: [v / top.sigma for v, top in zip(vs, tops, strict=True)]
        for name, vs in values.items()
    }
    added = sum(min(vs) for vs in zip(*values.values(), strict=True)) / sigma
    return ratios, added, row_gram_joint(AskedLayer(layer, x=x).together) / sigma


def times_section(*, quick: bool) -> Section:
    """Time at the size of BERT-base, and of the forms for all heads on MiniLM."""
    torch.set_num_threads(2)
    out = Section("Time of the certificates")
    n = 64 if quick else 512
    case = source(BERT_BASE).cases(source(BERT_BASE).windows([n], 1)[0], (0,))[0]
    layer, x = case.exact_map.attention, case.x.double()
    assert isinstance(layer, ls.DotProduct)
    heads = heads_of(layer)
    radius = float(x.norm(dim=-1).max())
    scalar: dict[str, Callable[[Head], float]] = {
        "G1": lambda h: global_rows(h, n, radius),
        "G2": lambda h: global_rows_capped(h, n, radius),
        "F2s": lambda h: local_rows_scalar(HeadAt(h, x)),
    }
    rows = [[name, "all", f"{_seconds(form, heads):.2f}"] for name, form in scalar.items()]
    whole = sum(float(row[2]) for row in rows)
    slow = []
    for name in ("F1", "F2", "F3c", "row-Gram"):
        seconds = _seconds(lambda h, form=LOCAL[name]: form(HeadAt(h, x)), heads[:2]) / 2
        rows.append([name, "one", f"{seconds:.2f}"])
        if name in ("F1", "F2"):
            slow.append(seconds)
    out.add(
        f"Seconds at n = {n}, d = {x.shape[1]} (a random layer of BERT-base size), two threads:"
    )
    out.add(table(["form", "heads", "seconds"], rows))
    if not quick:
        out.targets += [
            _at_most("seconds of G1, G2 and F2s for all heads, n = 512, d = 768", whole, 2.0),
            _at_most("seconds of F1 or F2 for one head, n = 512, d = 768", max(slow), 2.0),
        ]
    _together(out, quick=quick)
    return out


def _together(out: Section, *, quick: bool) -> None:
    """All heads of MiniLM's layer 3 in one matrix per row: at X, and in a ball."""
    rows = []
    for n in (16,) if quick else (32, 128):
        case = source("minilm").cases(source("minilm").windows([n], 1)[0], (3,))[0]
        layer, x = case.exact_map.attention, case.x.double()
        assert isinstance(layer, ls.DotProduct)
        began = time.perf_counter()
        row_gram_joint(AskedLayer(layer, x=x).together)
        local = time.perf_counter() - began
        began = time.perf_counter()
        certify_ball(layer, x, eps=1e-2)
        ball = time.perf_counter() - began
        out.raw.append({"n": n, "row-Gram": local, "ball certificate": ball})
        rows.append([f"n = {n}", f"{local:.1f}", f"{ball:.1f}"])
        say(f"certificates: all heads at n = {n} done")
    out.add("Seconds for all twelve heads of MiniLM's layer 3 together, two threads:")
    out.add(table(["", "row-Gram", "ball certificate"], rows))


def _seconds(form: Callable[[Head], float], heads: Sequence[Head]) -> float:
    fresh = [Head(**{k: getattr(h, k) for k in h.__dataclass_fields__}) for h in heads]
    began = time.perf_counter()
    for head in fresh:
        form(head)
    return time.perf_counter() - began


def _at_most(name: str, value: float, goal: float) -> Target:
    return Target(f"{name}: at most {goal:g}", f"{value:.2f}", value <= goal)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
