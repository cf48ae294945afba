"""How loose are the certificates beside sigma, and what do they cost?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from cases import BERT_BASE, Case, source
from tables import Raw, Section, Target, say, table
from torch import Tensor

import lipscope as ls
from lipscope.attacks import attack_in_ball
from lipscope.certificates.balls import certify_ball
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
from lipscope.theorems.layer_bounds import LayerSubject

LOCAL = {
    "F1": local_norms,
    "F2": local_rows,
    "F2s": local_rows_scalar,
    "F3c": local_blocks,
    "row-Gram": row_gram,
}


def measure(*, quick: bool) -> Raw:
    """Certificates and what they bound, at one input and over balls of MiniLM's layers."""
    torch.set_num_threads(2)
    n, layers, inner = (32, (0, 5), (0,)) if quick else (128, tuple(range(6)), (0, 2, 5))
    raw: Raw = []
    for case in source("minilm").cases(source("minilm").windows([n], 1)[0], layers):
        raw.append({"what": "input", "layer": case.name, "n": n, **_at_input(case)})
        say(f"certificates: {case.name} done")
    for case in source("minilm").cases(source("minilm").windows([32], 1)[0], inner):
        layer, x = _double(case)
        radius = float(x.norm(dim=-1).max())
        for share in (1e-3, 1e-2):
            heads = {h: _over_ball(layer, x, share * radius, h) for h in (0, 4, 8)}
            whole = _over_ball(layer, x, share * radius, None)
            at = {"what": "ball", "layer": case.name, "n": 32, "eps / R": share}
            raw.append({**at, "heads": heads, "whole": whole})
        say(f"certificates: balls of {case.name} done")
    return raw


def render(raw: Raw) -> Section:
    """Looseness on real text, at one input and over balls."""
    at_input, over_balls = ([o for o in raw if o["what"] == w] for w in ("input", "ball"))
    out = Section("Certificates beside sigma")
    out.add(
        f"""MiniLM, all layers, the first {at_input[0]["n"]}-token window of the default text, map
`attention`, float64. Bound over sigma: 1 is exact. *One head*: its contribution through its part of
the output projection; median over the heads, in brackets the largest. *All heads*: the whole layer;
*added*: the best certificate of each head, summed (Lemma 3.8); *joint*: the row-Gram certificate
with all heads in one matrix per row."""
    )
    best, together, rows_one, rows_all = [], [], [], []
    for one in at_input:
        heads, sigma = one["heads"], one["sigma"]
        ratios = [[head[name] / head["sigma"] for head in heads] for name in LOCAL]
        best += [min(every) for every in zip(*ratios, strict=True)]
        together.append(one["joint"] / sigma)
        added = sum(min(head[name] for name in LOCAL) for head in heads) / sigma
        rows_one.append([one["layer"], *(f"{median(v):.2f} ({max(v):.2f})" for v in ratios)])
        rows_all.append([one["layer"], f"{added:.2f}", f"{together[-1]:.2f}"])
    out.add(table(["one head", *LOCAL], rows_one))
    out.add(table(["all heads", "added", "joint"], rows_all))
    out.targets = [
        _goal("certificate of one head over sigma, median", median(best), 2.5),
        _goal("certificate of all heads over sigma, median", median(together), 4.0),
    ]
    out.add(
        f"""Certificate over a ball, n = {over_balls[0]["n"]}: every token moves by at most eps.
Bound of ‖f(X′) − f(X)‖ / ‖X′ − X‖ over the largest ratio that 10 random points and 2 ascents found;
median of heads {", ".join(over_balls[0]["heads"])}, and all heads together."""
    )
    rows, worst = [], {"one head": 0.0, "all heads": 0.0}
    for one in over_balls:
        ratios = [bound / found for bound, found in one["heads"].values()]
        whole = one["whole"][0] / one["whole"][1]
        worst["one head"] = max(worst["one head"], *ratios)
        worst["all heads"] = max(worst["all heads"], whole)
        rows.append([one["layer"], f"{one['eps / R']:g}", f"{median(ratios):.2f}", f"{whole:.2f}"])
    out.add(table(["layer", "eps / R", "one head", "all heads"], rows))
    out.targets += [
        _goal(f"ball certificate over the best attack, eps / R up to 1e-2, {name}, worst", v, 3)
        for name, v in worst.items()
    ]
    return out


def _double(case: Case) -> tuple[ls.DotProduct, Tensor]:
    layer = case.exact_map.attention
    assert isinstance(layer, ls.DotProduct)
    return layer, case.x.double()


def _over_ball(
    layer: ls.DotProduct, x: Tensor, eps: float, head: int | None
) -> tuple[float, float]:
    """The certificate, and the largest ratio that an attack finds."""
    bound = certify_ball(layer, x, eps=eps, head=head, steps=2).value
    found = attack_in_ball(layer, x, eps, head=head, random=10, ascents=2, seed=0).ratio
    if found > bound:
        raise AssertionError(f"the certificate {bound} is violated: {found}")
    return bound, found


def _at_input(case: Case) -> dict[str, Any]:
    layer, x = _double(case)
    heads = [HeadAt(head, x) for head in heads_of(layer)]
    sigma = ls.top_singular(layer.linearise(x), tol=1e-6, generator=_seeded(0)).sigma
    sources = [_seeded(h) for h in range(len(heads))]
    tops = top_singular_batch(layer.linearise(x, per_head=True), sources, tol=1e-6)
    each = [
        {"sigma": top.sigma, **{name: form(head) for name, form in LOCAL.items()}}
        for head, top in zip(heads, tops, strict=True)
    ]
    joint = row_gram_joint(LayerSubject(layer, x=x).together)
    return {"sigma": sigma, "joint": joint, "heads": each}


def measure_times(*, quick: bool) -> Raw:
    """Seconds at the size of BERT-base, and of the forms for all heads on MiniLM."""
    torch.set_num_threads(2)
    n = 64 if quick else 512
    layer, x = _double(source(BERT_BASE).cases(source(BERT_BASE).windows([n], 1)[0], (0,))[0])
    heads = heads_of(layer)
    radius = float(x.norm(dim=-1).max())
    scalar: dict[str, Callable[[Head], float]] = {
        "G1": lambda h: global_rows(h, n, radius),
        "G2": lambda h: global_rows_capped(h, n, radius),
        "F2s": lambda h: local_rows_scalar(HeadAt(h, x)),
    }
    at = {"what": "form", "n": n, "d": x.shape[1]}
    raw: Raw = [
        {**at, "form": name, "heads": "all", "seconds": [_seconds(form, heads)]}
        for name, form in scalar.items()
    ]
    for name in ("F1", "F2", "F3c", "row-Gram"):
        times = [_seconds(lambda h, form=LOCAL[name]: form(HeadAt(h, x)), [h]) for h in heads[:2]]
        raw.append({**at, "form": name, "heads": "one", "seconds": times})
    for n in (16,) if quick else (32, 128):
        layer, x = _double(source("minilm").cases(source("minilm").windows([n], 1)[0], (3,))[0])
        began = time.perf_counter()
        row_gram_joint(LayerSubject(layer, x=x).together)
        local = time.perf_counter() - began
        began = time.perf_counter()
        certify_ball(layer, x, eps=1e-2)
        ball = time.perf_counter() - began
        raw.append({"what": "together", "n": n, "row-Gram": local, "ball certificate": ball})
        say(f"certificates: all heads at n = {n} done")
    return raw


def render_times(raw: Raw) -> Section:
    """A form a row, then all heads together."""
    forms, together = ([o for o in raw if o["what"] == w] for w in ("form", "together"))
    out = Section("Time of the certificates")
    at = f"n = {forms[0]['n']}, d = {forms[0]['d']}"
    out.add(f"Seconds at {at} (a random layer of BERT-base size), two threads:")
    seconds = {one["form"]: fmean(one["seconds"]) for one in forms}
    rows = [[one["form"], one["heads"], f"{seconds[one['form']]:.2f}"] for one in forms]
    out.add(table(["form", "heads", "seconds"], rows))
    whole, slow = seconds["G1"] + seconds["G2"] + seconds["F2s"], max(seconds["F1"], seconds["F2"])
    out.targets = [
        _goal(f"seconds of G1, G2 and F2s for all heads, {at}", whole, 2.0),
        _goal(f"seconds of F1 or F2 for one head, {at}", slow, 2.0),
    ]
    out.add("Seconds for all twelve heads of MiniLM's layer 3 together, two threads:")
    rows = [
        [f"n = {o['n']}", f"{o['row-Gram']:.1f}", f"{o['ball certificate']:.1f}"] for o in together
    ]
    out.add(table(["", "row-Gram", "ball certificate"], rows))
    return out


def _seconds(form: Callable[[Head], float], heads: Sequence[Head]) -> float:
    fresh = [Head(**{k: getattr(h, k) for k in h.__dataclass_fields__}) for h in heads]
    began = time.perf_counter()
    for head in fresh:
        form(head)
    return time.perf_counter() - began


def _goal(name: str, value: float, goal: float) -> Target:
    return Target(f"{name}: at most {goal:g}", f"{value:.2f}", value <= goal)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
