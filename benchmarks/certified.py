"""How far may tokens move before a small classifier's answer can change: ours, CROWN, an attack.

Usage: ``python benchmarks/certified.py [--models N1,S2-n16-gelu] [--prose TEXT TEXT]
[--deept FOLDER] [--inputs 3] [--keep FOLDER] [--quick]``
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tables import Raw, Section, Target, say, table
from torch import Tensor

from lipscope_experiments.certified.classifiers import (
    LICENCES,
    SHOWN,
    Classifier,
    Recipe,
    Trained,
)
from lipscope_experiments.certified.crown import peer
from lipscope_experiments.certified.decisions import (
    BALLS,
    PAIRS,
    SHARES,
    decided,
    gaps_of,
    ratios,
)
from lipscope_experiments.findings import chosen, grouped

NAMES = (
    *("A1", "N1", "N2", "N3", "S1", "S2", "S3"),
    *("N1-gelu", "S1-gelu", "N1-n16", "S1-n16", "N1-d64", "S1-d64", "N1-prose", "S1-prose"),
)
# What our radius over CROWN's is to reach: model, ball, ratio.
GOALS = (
    *(("A1", "joint", 1.8), ("A1", "token", 1.2), ("N1", "joint", 2.8), ("N1", "token", 1.6)),
    *(("S1", "joint", 2.6), ("S1", "token", 2.0), ("N2", "joint", 2.2), ("S2", "joint", 1.5)),
    *(("N3", "joint", 1.0), ("S3", "joint", 1.0)),
    *(("DeepT-1", "token", 0.9), ("DeepT-3", "token", 0.9)),
)


def measure(
    *,
    quick: bool,
    inputs: int = SHOWN,
    names: Sequence[str] = NAMES,
    prose: Sequence[Path] = (),
    deept_folder: Path | None = None,
    keep: Path | None = None,
) -> Raw:
    """Radii, seconds and lower bounds of every model, ball and input."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if peer() is None:
        say("certified: auto_LiRPA cannot be imported: CROWN and IBP are left out")
    raw: Raw = []
    with tempfile.TemporaryDirectory() as folder:
        keep = keep or Path(folder)
        for trained in _models(["N1"] if quick else names, prose, deept_folder, keep):
            for ball in BALLS:
                if ball == "joint" and trained.recipe.task == "SST":
                    continue  # one word moves, as there
                for i in range(min(2 if quick else inputs, len(trained.inputs))):
                    path = keep / f"{trained.name}-{ball}-{i}.json"
                    if not path.is_file():
                        record = {"model": trained.name, "ball": ball, "input": i}
                        path.write_text(json.dumps(record | decided(trained, ball, i)), "utf-8")
                    raw.append(json.loads(path.read_text("utf-8")))
                say(f"certified: {trained.name}, {ball} done")
    return raw


def _models(
    names: Sequence[str], prose: Sequence[Path], deept_folder: Path | None, keep: Path
) -> Iterator[Trained]:
    for task, texts in {"licences": LICENCES, "prose": tuple(prose)}.items():
        asked = [name for name in names if Recipe.of(name).task == task]
        if asked and not (texts and all(path.is_file() for path in texts)):
            say(f"certified: {', '.join(asked)} left out: their texts are not there")
            continue
        for name in asked:
            yield Trained.of(name, texts, keep)
    if deept_folder is None:
        say("certified: DeepT's networks left out: `--deept` names no folder")
    else:
        yield from (deept(deept_folder, blocks) for blocks in (1, 3))


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
        for name, mine in grouped(chosen(raw, ball=ball), "model"):
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
    for name, mine in grouped(raw, "model"):
        gaps = zip(*map(gaps_of, mine), strict=True)
        least = [min((g for g in some if g is not None), default=math.nan) for some in gaps]
        rows.append([name, sum(r["points"] for r in mine), *(f"{g:.3f}" for g in least)])
    out.add(table(["model", "points", *(f"{s:g}" for s in SHARES)], rows))
    for name, ball, goal in GOALS:
        found = ratios(chosen(raw, model=name, ball=ball), "ours", "CROWN")
        about = f"{name}, {ball}: certified radius over CROWN's, median, at least {goal:g}"
        reached = median(found) >= goal if found else None
        out.targets.append(Target(about, _spread(found), reached))
    worst = min(gap for r in raw for gap in gaps_of(r) if gap is not None)
    about = "certified lower bounds of the margin above a margin found: none"
    out.targets.append(Target(about, f"least gap {worst:.3g}", worst >= 0))
    return out


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


# --- DeepT's networks


def deept(folder: Path, blocks: int) -> Trained:
    """A certifiably trained network of Bonaert et al. (2021), read from a folder.

    The inputs are the first sentences of its SST test set that have at most 16 tokens and are
    classified correctly; accuracy is that on its first 400 sentences.
    """
    path = folder / {1: "smaller_1.ckpt", 3: "bert_smaller3.ckpt"}[blocks]
    stored = torch.load(path, map_location="cpu", weights_only=True)
    recipe = Recipe("N", blocks, d=64, task="SST")
    model = Classifier(recipe, front=True)
    weights = stored["state_dict_model_from_embeddings"]
    model.load_state_dict({_name_here(name): value for name, value in weights.items()})
    model.double().eval().requires_grad_(False)
    word, position, kind = (t.double() for t in stored["state_dict_embeddings"].values())
    counts = Counter(w for one in _sentences(folder, "train") for w in _words(one))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w for w, k in counts.items() if k > 1)]
    if len(names) != len(word):
        raise AssertionError(f"{len(names)} words, {len(word)} embeddings")
    index = {name: i for i, name in enumerate(names)}
    asked, right = _sentences(folder, "test")[:400], 0
    inputs: list[Tensor] = []
    labels: list[int] = []
    for one in asked:
        ids = [index.get(w, 1) for w in ("[CLS]", *_words(one), "[SEP]")]
        x = word[ids] + position[: len(ids)] + kind[0]
        if int(model(x[None]).argmax()) == one["label"]:
            right += 1
            if len(ids) <= 16 and len(inputs) < SHOWN:
                inputs.append(x)
                labels.append(one["label"])
    return Trained(f"DeepT-{blocks}", recipe, model, inputs, labels, right / len(asked))


def _sentences(folder: Path, part: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{part}.json").read_text("utf-8"))


def _words(sentence: dict[str, Any]) -> list[str]:
    return sentence["sentence"].lower().split()


def _name_here(name: str) -> str:
    for theirs, own in _NAMES.items():
        name = name.replace(theirs, own)
    return name


_NAMES = {
    "bert.encoder.layer": "blocks",
    "attention.self": "attention",
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "norm",
    "intermediate.dense": "inner",
    "output.dense": "outer",
    "output.LayerNorm": "last",
    "bert.pooler.dense": "pooler",
    "classifier": "head",
    "linear_in": "front",
    "LayerNorm": "front_norm",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two inputs of one model")
    parser.add_argument("--models", default=",".join(NAMES), help="names, separated by commas")
    parser.add_argument("--inputs", type=int, default=SHOWN, help="of a model and a ball")
    parser.add_argument("--prose", nargs=2, type=Path, default=(), help="two texts to tell apart")
    parser.add_argument("--deept", type=Path, help="folder of DeepT's networks and sentences")
    parser.add_argument("--keep", type=Path, help="folder of weights and of inputs done")
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else []
    raw = measure(
        quick=asked.quick,
        inputs=asked.inputs,
        names=names,
        prose=asked.prose,
        deept_folder=asked.deept,
        keep=asked.keep,
    )
    print(render(raw).text())


if __name__ == "__main__":
    main()
