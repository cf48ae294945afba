"""How far may tokens move before a small classifier's answer can change: ours, CROWN, an attack.

The records of ``lipscope reproduce certified/decisions``, in the run folder that the environment
variable ``LIPSCOPE_DECISIONS`` names; what it lacks is computed. The same goes for texts,
separated by commas, in ``LIPSCOPE_TEXTS``, and for DeepT's networks in ``LIPSCOPE_DEEPT``.

Usage: ``python benchmarks/certified.py [--quick]``
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from statistics import median

import torch
from tables import Raw, Section, Target, say

from lipscope_experiments import reproduce
from lipscope_experiments.certified.crown import peer
from lipscope_experiments.certified.decisions import gaps_of
from lipscope_experiments.findings import chosen, middle, ratios

# What our radius over CROWN's is to reach.
GOALS = {
    "joint": {"A1": 1.8, "N1": 2.8, "S1": 2.6, "N2": 2.2, "S2": 1.5, "N3": 1.0, "S3": 1.0},
    "token": {"A1": 1.2, "N1": 1.6, "S1": 2.0, "DeepT-1": 0.9, "DeepT-3": 0.9},
}


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
    """Medians of ratios, with the smallest and the largest; the findings' page has the tables."""
    out = Section("Certified decisions")
    out.add("The findings `certified/decisions`, of the same records, say what was run, in tables.")
    for ball, name, goal in ((b, *one) for b, goals in GOALS.items() for one in goals.items()):
        mine = chosen(raw, name=name, ball=ball)
        radii, seconds = (ratios(mine, of + "ours", of + "CROWN") for of in ("", "seconds, "))
        reached = median(radii) >= goal if radii else None
        about = f"{name}, {ball}: certified radius over CROWN's, median, at least {goal:g}"
        out.targets.append(Target(about, middle(radii), reached))
        reached = median(seconds) <= 1 if seconds else None
        about = f"{name}, {ball}: seconds over CROWN's, median, at most 1"
        out.targets.append(Target(about, middle(seconds), reached))
    worst = min(gap for r in raw for gap in gaps_of(r) if gap is not None)
    about = "certified lower bounds of the margin above a margin found: none"
    out.targets.append(Target(about, f"least gap {worst:.3g}", worst >= 0))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two inputs of one model")
    print(render(measure(quick=parser.parse_args().quick)).text())


if __name__ == "__main__":
    main()
