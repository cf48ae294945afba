"""How far may tokens move before a small classifier's answer can change: ours, CROWN, an attack.

Usage: ``python benchmarks/certified.py [--models N1,S2-n16-gelu] [--prose TEXT TEXT]
[--deept FOLDER] [--keep FOLDER] [--quick]``
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tables import Raw, Section, say, table
from torch import Tensor

from lipscope.models import Network
from lipscope_experiments.certified.classifiers import (
    LICENCES,
    SHOWN,
    Classifier,
    Recipe,
    Trained,
    described,
)
from lipscope_experiments.certified.crown import peer, peer_radius
from lipscope_experiments.certified.flips import least_margin, margins_with_slopes, smallest_flip

NAMES = (
    *("A1", "N1", "N2", "N3", "S1", "S2", "S3"),
    *("N1-gelu", "S1-gelu", "N1-n16", "S1-n16", "N1-d64", "S1-d64", "N1-prose", "S1-prose"),
)
BALLS = {
    "joint": "all tokens move, jointly by the radius",
    "token": "one token moves by the radius",
}
SHARES = (
    0.4,
    0.8,
    1.0,
    1.15,
    1.4,
)  # of our radius: where the lower bound of the margin is attacked


def measure(
    *,
    quick: bool,
    names: Sequence[str] = NAMES,
    prose: Sequence[Path] = (),
    deept_folder: Path | None = None,
    keep: Path | None = None,
) -> Raw:
    """Radii, seconds and lower bounds of every model, ball and input."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="auto_LiRPA|torch")
    raw: Raw = []
    with tempfile.TemporaryDirectory() as folder:
        keep = keep or Path(folder)
        for trained in _models(["N1"] if quick else names, prose, deept_folder, keep):
            if peer() is None:
                say("certified: auto_LiRPA cannot be imported: CROWN and IBP are left out")
            count = 2 if quick else len(trained.inputs)
            for ball in BALLS if "DeepT" not in trained.name else ["token"]:
                for i in range(count):
                    raw.append(_kept(keep, trained, ball, i))
                say(f"certified: {trained.name}, {ball} done")
    return raw


def _models(
    names: Sequence[str], prose: Sequence[Path], deept_folder: Path | None, keep: Path
) -> Iterator[Trained]:
    texts = {"licences": LICENCES, "prose": tuple(prose)}
    for task, paths in texts.items():
        asked = [name for name in names if Recipe.of(name).task == task]
        if asked and not (paths and all(path.is_file() for path in paths)):
            say(f"certified: {', '.join(asked)} left out: their texts are not there")
            continue
        for name in asked:
            yield Trained.of(name, paths, keep)
    if deept_folder is not None:
        yield from (deept(deept_folder, blocks) for blocks in (1, 3))


def _kept(keep: Path, trained: Trained, ball: str, i: int) -> dict[str, Any]:
    """What was measured at one input, or is measured now."""
    path = keep / f"{trained.name}-{ball}-{i}.json"
    if not path.is_file():
        path.write_text(json.dumps(_at_input(trained, ball, i)), "utf-8")
    return json.loads(path.read_text("utf-8"))


def _at_input(trained: Trained, ball: str, i: int) -> dict[str, Any]:
    model, x, label = trained.model, trained.inputs[i], trained.labels[i]
    moves = torch.ones_like(x[:, :1])
    margin, slope = margins_with_slopes(model, x[None], label, moves)
    token = int(slope[0].norm(dim=1).argmax())
    if ball == "token":
        moves = torch.zeros_like(moves).index_fill(0, torch.tensor([token]), 1.0)
    began = time.perf_counter()
    attack, point = smallest_flip(model, x, label, moves)
    found = {
        "model": trained.name,
        "accuracy": trained.accuracy,
        "ball": ball,
        "input": i,
        "tokens": len(x),
        "margin": float(margin),
        "attack": attack,
        "attack seconds": time.perf_counter() - began,
    }
    if peer() is not None:
        for method in ("CROWN", "IBP"):
            radius, seconds = peer_radius(model, x, label, moves, attack, method)
            found |= {method: radius, f"{method} seconds": seconds}
    own = ours(described(model, x), x, label, ball, token)
    if own is None:
        return found
    radius, seconds, bound = own
    found |= {"ours": radius, "ours seconds": seconds, "below": [], "points": 0}
    for share in SHARES:
        least, points = least_margin(model, x, label, moves, share * radius, point)
        found["below"].append([bound(share * radius), least])
        found["points"] += points
    return found


def ours(
    network: Network, x: Tensor, label: int, ball: str, token: int
) -> tuple[float, float, Callable[[float], float]] | None:
    """Our radius, seconds, and the certified lower bound of the margin in a ball."""
    return None


def render(raw: Raw) -> Section:
    """Radii beside each other and seconds, by ball; then what the attacks on the bounds found."""
    out = Section("Certified decisions")
    out.add(
        """Small text classifiers, trained by the benchmark (A: attention alone, N: blocks without
variance in their norms, S: with standard LayerNorm; then the number of blocks; 8 tokens, d = 32,
ReLU and two licences to tell apart unless the name says otherwise), and DeepT's certifiably trained
networks. l2 balls, float64, one thread. Medians over inputs, in brackets the range. *CROWN* and
*IBP* are auto_LiRPA's, by bisection to 4 %; the attack's radius is that of the smallest flip found;
the one token that moves is that of the largest gradient."""
    )
    for ball, title in BALLS.items():
        rows = []
        for name, mine in _by_model(r for r in raw if r["ball"] == ball).items():
            rows.append(
                [
                    *(name, f"{mine[0]['accuracy']:.2f}", len(mine)),
                    *(_ratio(mine, *pair) for pair in _PAIRS),
                    *(_seconds(mine, f"{who} seconds") for who in ("ours", "CROWN", "attack")),
                ]
            )
        over = [" / ".join(pair) for pair in _PAIRS]
        out.add(f"Radii where {title}:")
        out.add(table([ball, "accuracy", "inputs", *over, *(f"s, {w}" for w in _TIMED)], rows))
    out.add(
        """The least margin found in balls of some shares of our radius, less the certified lower
bound there, over the margin at the input; the least over inputs and balls. Below 0 the bound would
be wrong."""
    )
    rows = []
    for name, mine in _by_model(r for r in raw if "below" in r).items():
        gaps = [[(least - low) / r["margin"] for low, least in r["below"]] for r in mine]
        points = sum(r["points"] for r in mine)
        rows.append([name, points, *(f"{min(g):.3f}" for g in zip(*gaps, strict=True))])
    out.add(table(["model", "points", *(f"{s:g}" for s in SHARES)], rows))
    return out


_PAIRS = (("ours", "CROWN"), ("ours", "attack"), ("CROWN", "attack"), ("IBP", "attack"))
_TIMED = ("ours", "CROWN", "attack")


def _by_model(raw: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in raw:
        found.setdefault(one["model"], []).append(one)
    return found


def _ratio(mine: Raw, above: str, below: str) -> str:
    """Median and range of one radius over another; inputs where the lower one is 0 are counted."""
    known = [r[above] / r[below] for r in mine if r.get(above) is not None and r.get(below)]
    nothing = sum(r.get(below) == 0 for r in mine)
    text = f"{median(known):.2f} [{min(known):.2f}, {max(known):.2f}]" if known else "–"
    return text + (f", {nothing} times 0" if nothing else "")


def _seconds(mine: Raw, name: str) -> str:
    known = [r[name] for r in mine if name in r]
    return f"{median(known):.1f}" if known else "–"


# --- DeepT's networks


def deept(folder: Path, blocks: int) -> Trained:
    """A certifiably trained network of Bonaert et al. (2021), read from a folder.

    The inputs are the first sentences of its SST test set that have at most 16 tokens and are
    classified correctly; accuracy is that on its first 400 sentences.
    """
    path = folder / {1: "smaller_1.ckpt", 3: "bert_smaller3.ckpt"}[blocks]
    stored = torch.load(path, map_location="cpu", weights_only=True)
    model = Classifier(Recipe("N", blocks, d=64), front=True)
    weights = stored["state_dict_model_from_embeddings"]
    model.load_state_dict({_name_here(name): value for name, value in weights.items()})
    model.double().eval().requires_grad_(False)
    word, position, kind = (t.double() for t in stored["state_dict_embeddings"].values())
    counts = Counter(w for one in _sentences(folder, "train") for w in _words(one))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w for w, k in counts.items() if k > 1)]
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
    return Trained(f"DeepT-{blocks}", model, inputs, labels, right / len(asked))


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
    parser.add_argument("--prose", nargs=2, type=Path, default=(), help="two texts to tell apart")
    parser.add_argument("--deept", type=Path, help="folder of DeepT's networks and sentences")
    parser.add_argument("--keep", type=Path, help="folder of weights and of inputs done")
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else []
    raw = measure(
        quick=asked.quick, names=names, prose=asked.prose, deept_folder=asked.deept, keep=asked.keep
    )
    print(render(raw).text())


if __name__ == "__main__":
    main()
