"""What perturbations of one size do, against what sigma and the ball certificate promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipscope.attention import Attention
from lipscope.capture import LayerMap, LoadedModel
from lipscope.captured import Captured, captures, layer_maps
from lipscope.certify import certify
from lipscope.experiments.experiment import Job, Study, experiment
from lipscope.experiments.findings import Claim, Findings, Table
from lipscope.experiments.texts import Text
from lipscope.panels import Panel, Series
from lipscope.perturb import ascent_move, random_move, sign_move, singular_move, split_change
from lipscope.sampling import mean_interval, share_interval
from lipscope.singular import top_singular
from lipscope.table import number

_SHARES = (0.01, 0.1, 0.3)  # size of the move as a share of ‖X‖
_KINDS = {
    "random": "random direction",
    "singular": "top singular vector of the layer",
    "singular model": "top singular vector of the model",
    "fgsm": "FGSM on the model",
    "pgd": "PGD on the layer",
    "pgd model": "PGD on the model",
    "split": "mass splitting",
}


@experiment(
    "castin2024/robustness",
    title="Perturbations of one size, against sigma and the ball certificate",
    cite="castin2024",
    models=("minilm",),
)
def robustness(study: Study) -> Findings:
    """The first layer and the whole model of an encoder, perturbed at the first layer's input."""
    found = [
        record
        for name in study.models
        for text in study.texts
        for record in _of(study, study.load(name), text)
    ]
    _draw(study, found)
    first = [r for r in found if r["share"] == _SHARES[0]]
    above = [r for r in found if r["certificate"] and r["pgd"] > r["certificate"] * (1 + 1e-5)]
    over = sum(r["pgd"] > 1.01 * r["sigma"] * r["size"] for r in found)
    return Findings(
        (
            Claim(
                f"layer: change / (sigma · size) along the top singular vector, {_SHARES[0]:.0%}",
                "tends to 1 as the size goes to 0 (Section 3.1)",
                _interval([r["singular"] / (r["sigma"] * r["size"]) for r in first]),
            ),
            Claim(
                f"layer: random direction, {_SHARES[0]:.0%}",
                "at most sigma · size, far below in high dimension",
                _interval([r["random"] / (r["sigma"] * r["size"]) for r in first]),
            ),
            Claim(
                "layer: largest change found above sigma · size",
                "possible: sigma speaks of small moves only",
                f"in {over} of {len(found)} cases by more than 1 %",
            ),
            Claim(
                "ball certificate",
                "no move inside the ball changes more (derived here)",
                f"exceeded in {len(above)} of {sum(r['certificate'] is not None for r in found)} "
                "cases",
            ),
            *_neighbours(found),
        ),
        (_table(found),),
        (
            "The move is one of the first layer's input, which is also the first block's input.",
            "Mass splitting doubles the tokens; its norms are weighted, and it acts on the layer "
            "only.",
            "Attacks made of real tokens are not in this table.",
        ),
    )


def _neighbours(found: Sequence[dict[str, Any]]) -> list[Claim]:
    claims = []
    for share in _SHARES:
        mine = [r for r in found if r["share"] == share]
        cells = []
        for kind, key in (("random", "random"), ("PGD on the model", "pgd model")):
            hits = sum(r[f"{key} neighbour"] for r in mine)
            low, high = share_interval(hits, len(mine))
            cells.append(f"{kind} {hits}/{len(mine)} [{low:.2f}, {high:.2f}]")
        about = f"nearest neighbour changes, move of {share:.0%} of ‖X‖"
        claims.append(Claim(about, "not in the paper", "; ".join(cells)))
    return claims


def _of(study: Study, loaded: LoadedModel, text: Text) -> list[dict[str, Any]]:
    """Records of all windows and sizes of a model on one text."""
    options: dict[str, Any] = {"lengths": [32], "samples": study.pick(4, 30)}
    ends = [
        _embedding(one(one.x))
        for _, one in layer_maps(loaded, text.content, layers=[0], map="model", **options)
    ]
    bank = torch.stack(ends)
    where = f"moves-{loaded.name}-{text.name}".replace(":", "-").replace(" ", "-")
    held = captures(loaded, text.content, layers=[0], dtype="float32", **options)
    inputs = {c.sample: c for c in list(held)}
    found: list[dict[str, Any]] = []
    for item, model in layer_maps(loaded, text.content, layers=[0], map="model", **options):
        key = {"model": loaded.name, "text": text.name, "sample": item.sample}
        jobs = [_job(study, key, share, inputs[item.sample], model, bank) for share in _SHARES]
        found += study.values(f"{where}-{item.sample}", jobs)
    return found


def _embedding(hidden: Tensor) -> Tensor:
    """Mean over tokens, normalised: what sentence encoders compare."""
    return torch.nn.functional.normalize(hidden.detach().mean(0), dim=0)


def _job(
    study: Study,
    key: dict[str, Any],
    share: float,
    c: Captured,
    model: LayerMap,
    bank: Tensor,
) -> Job:
    attention, x = c.attention, c.x
    certified = key["sample"] < study.pick(1, 10)  # seconds each
    size = share * float(x.norm())
    seed = key["sample"]

    def compute() -> dict[str, Any]:
        start = torch.Generator().manual_seed(seed)
        sigma = top_singular(attention.linearise(x), generator=start)
        steps = study.pick(10, 30)
        moves = {
            "random": random_move(x, size, seed),
            "singular": singular_move(attention.linearise(x), size, seed),
            "singular model": singular_move(model.linearise(x), size, seed),
            "fgsm": sign_move(model, x, size, seed),
            "pgd": ascent_move(attention, x, size, seed, steps=steps),
            "pgd model": ascent_move(model, x, size, seed, steps=steps),
        }
        record: dict[str, Any] = {"size": size, "sigma": sigma.sigma, "upper": sigma.upper}
        for name, move in moves.items():
            record |= _effect(name, attention, model, x, move, bank, seed)
        record["split"] = split_change(attention, x, size, seed)
        record["certificate"] = _certificate(attention, x, size) if certified else None
        return record

    return {**key, "share": share}, compute


def _effect(
    name: str,
    layer: Callable[[Tensor], Tensor],
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    move: Tensor,
    bank: Tensor,
    sample: int,
) -> dict[str, Any]:
    """Change of the layer's and the model's output, and whether the neighbour is another."""
    with torch.no_grad():
        here, there = model(x), model(x + move)
        change = float((layer(x + move) - layer(x)).norm())
    others = bank.clone()
    others[sample] = 0.0  # not its own neighbour
    before, after = (int((others @ _embedding(y)).argmax()) for y in (here, there))
    return {
        name: change,
        f"{name} output": float((there - here).norm() / here.norm()),
        f"{name} neighbour": before != after,
    }


def _certificate(attention: Attention, x: Tensor, size: float) -> float:
    """What the Frobenius ball of this size allows at most."""
    bound = certify(attention, x, eps=size, ball="frobenius", steps=1, sharp=False)
    return bound.value * size


def _draw(study: Study, found: Sequence[dict[str, Any]]) -> None:
    def means(key: str) -> tuple[tuple[float, float], ...]:
        known = [r for r in found if r[key] is not None]
        return tuple(
            (s, mean_interval([r[key] / r["size"] for r in known if r["share"] == s])[0])
            for s in _SHARES
        )

    promised = tuple(
        (s, mean_interval([r["sigma"] for r in found if r["share"] == s])[0]) for s in _SHARES
    )
    layer = Panel(
        "layer 0: change of the output / size of the move",
        (
            *(Series(_KINDS[k], means(k)) for k in ("random", "singular", "pgd", "split")),
            Series("sigma", promised, "dashes"),
            Series("ball certificate", means("certificate"), "dashes"),
        ),
        x="size of the move / ‖X‖",
        y="gain",
    )
    kinds = ("random", "singular", "singular model", "fgsm", "pgd model")
    model = Panel(
        "whole model: relative change of the output",
        tuple(
            Series(
                _KINDS[k],
                tuple(
                    (s, mean_interval([r[f"{k} output"] for r in found if r["share"] == s])[0])
                    for s in _SHARES
                ),
            )
            for k in kinds
        ),
        x="size of the move / ‖X‖",
        y="change / norm",
    )
    study.draw("robustness", "Moves of one size", [layer, model], columns=2)


def _table(found: Sequence[dict[str, Any]]) -> Table:
    lines = []
    for share in _SHARES:
        mine = [r for r in found if r["share"] == share]
        for kind, words in _KINDS.items():
            outputs = [r[f"{kind} output"] for r in mine] if kind != "split" else None
            hits = sum(r[f"{kind} neighbour"] for r in mine) if kind != "split" else None
            lines.append(
                (
                    f"{share:.0%}",
                    words,
                    _interval([r[kind] / (r["sigma"] * r["size"]) for r in mine]),
                    _interval([r[kind] / r["certificate"] for r in mine if r["certificate"]]),
                    "–" if outputs is None else _interval(outputs),
                    "–" if hits is None else f"{hits} of {len(mine)}",
                )
            )
    columns = (
        "size / ‖X‖",
        "move",
        "layer: change / (sigma · size)",
        "layer: change / certificate",
        "model: relative change",
        "neighbour changes",
    )
    return Table("Means with 95 % intervals over windows", columns, tuple(lines))


def _interval(values: Sequence[float]) -> str:
    mean, low, high = mean_interval(values)
    if len(values) < 2:
        return number(mean, 3)
    return f"{number(mean, 3)} [{number(low, 3)}, {number(high, 3)}]"
