"""How far may tokens move before a small classifier's answer can change: ours, CROWN, an attack.

The records of ``lipscope reproduce certified/decisions``, in the run folder that the environment
variable ``LIPSCOPE_DECISIONS`` names; what it lacks is computed. The same goes for texts,
separated by commas, in ``LIPSCOPE_TEXTS``, and for DeepT's networks in ``LIPSCOPE_DEEPT``.

Usage: ``python benchmarks/certified.py [--quick]``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from tables import Raw, Section, Target, say, table

from lipscope_experiments import reproduce
from lipscope_experiments.certified.crown import peer
from lipscope_experiments.certified.decisions import BALLS, PAIRS, SHARES, gaps_of
from lipscope_experiments.findings import chosen, grouped, ratios

# What our radius over CROWN's is to reach: model, ball, ratio.
GOALS = (
    *(("A1", "joint", 1.8), ("A1", "token", 1.2), ("N1", "joint", 2.8), ("N1", "token", 1.6)),
    *(("S1", "joint", 2.6), ("S1", "token", 2.0), ("N2", "joint", 2.2), ("S2", "joint", 1.5)),
    *(("N3", "joint", 1.0), ("S3", "joint", 1.0)),
    *(("DeepT-1", "token", 0.9), ("DeepT-3", "token", 0.9)),
)


def measure(*, quick: bool) -> Raw:
    """Radii, seconds and lower bounds of every model, ball and input."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if peer() is None:
        say("certified: auto_LiRPA cannot be imported: CROWN and IBP are left out")
    texts = [one for one in os.environ.get("LIPSCOPE_TEXTS", "").split(",") if one]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(os.environ.get("LIPSCOPE_DECISIONS", folder))
        reproduce("certified/decisions", quick=quick, texts=texts, out=run)
        lines = (run / "values.jsonl").read_text("utf-8").splitlines()
    found = (json.loads(json.loads(line)["content"]) for line in lines)
    return [one for one in found if "below" in one]


def render(raw: Raw) -> Section:
    """Radii beside each other and seconds, by ball; then what the attacks on the bounds found."""
    out = Section("Certified decisions")
    out.add(
        """Small text classifiers, trained by the benchmark (A: attention alone, N: blocks without
variance in their norms, S: with standard LayerNorm; then the number of blocks; 8 tokens, d = 32,
ReLU and two licences to tell apart unless the name says otherwise), and DeepT's certifiably trained
networks on sentences of SST. l2 balls of the embeddings, float64; seconds are a processor's.
Medians over inputs, in brackets the range. *CROWN* and *IBP* are auto_LiRPA's, to 2 % like ours;
the attack's radius is that of the smallest flip found; the one token that moves is that of the
largest gradient."""
    )
    seconds = [f"seconds, {who}" for who in ("ours", "CROWN", "attack")]
    for ball, words in BALLS.items():
        rows = []
        for name, mine in grouped(chosen(raw, ball=ball), "name"):
            over = [_spread(ratios(mine, *pair)) for pair in PAIRS]
            times = [_spread([r[k] for r in mine if k in r]) for k in seconds]
            attack = _spread([r["attack"] for r in mine])
            rows.append([name, f"{mine[0]['accuracy']:.2f}", len(mine), attack, *over, *times])
        heads = ["accuracy", "inputs", "attack", *(" / ".join(pair) for pair in PAIRS)]
        out.add(table([f"l2, {words}", *heads, *seconds], rows))
    out.add(
        """The least margin found in balls of some shares of our radius, less the certified lower
bound there, over the margin at the input; the least over inputs and balls. Below 0 the bound would
be wrong."""
    )
    rows = []
    for name, mine in grouped(raw, "name"):
        gaps = zip(*map(gaps_of, mine), strict=True)
        least = [min((g for g in some if g is not None), default=math.nan) for some in gaps]
        rows.append([name, sum(r["points"] for r in mine), *(f"{g:.3f}" for g in least)])
    out.add(table(["model", "points", *(f"{s:g}" for s in SHARES)], rows))
    for name, ball, goal in GOALS:
        found = ratios(chosen(raw, name=name, ball=ball), "ours", "CROWN")
        about = f"{name}, {ball}: certified radius over CROWN's, median, at least {goal:g}"
        reached = median(found) >= goal if found else None
        out.targets.append(Target(about, _spread(found), reached))
    for name, ball, _ in GOALS:
        found = ratios(chosen(raw, name=name, ball=ball), "seconds, ours", "seconds, CROWN")
        about = f"{name}, {ball}: seconds over CROWN's, median, at most 1"
        reached = median(found) <= 1 if found else None
        out.targets.append(Target(about, _spread(found), reached))
    worst = min(gap for r in raw for gap in gaps_of(r) if gap is not None)
    about = "certified lower bounds of the margin above a margin found: none"
    out.targets.append(Target(about, f"least gap {worst:.3g}", worst >= 0))
    return out


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two inputs of one model")
    print(render(measure(quick=parser.parse_args().quick)).text())


if __name__ == "__main__":
    main()
