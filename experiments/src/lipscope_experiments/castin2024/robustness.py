"""What perturbations of one size do, against what sigma and the ball certificate promise."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import Attention, InputError, LayerAtInput, Operator, TopSingular
from lipscope.attacks import ascent_move, of_size, random_move, sign_move
from lipscope.certificates import certify_ball
from lipscope.charts import LineKind, Panel, Series
from lipscope.measures import own_operator
from lipscope.models import LoadedModel
from lipscope.records import mean_interval, share_interval
from lipscope_experiments.experiment import Study, experiment, layers_of
from lipscope_experiments.findings import Record, average, chosen, grouped
from lipscope_experiments.simple_layers import embedding, top
from lipscope_experiments.texts import Text

_TOKENS = 32
_SHARES = (0.001, 0.01, 0.1, 0.3)  # size of the move as a share of ‖X‖
_PERCENT = {share: f"{100 * share:g} %" for share in _SHARES}
_ASKED = 2  # the certificate, at the smallest of them
_KINDS = {
    "random": "random direction",
    "singular": "top singular vector of the layer",
    "singular model": "top singular vector of the model",
    "fgsm": "FGSM on the model",
    "pgd": "PGD on the layer",
    "pgd model": "PGD on the model",
    "split": "mass splitting",
}
_MOVES = [kind for kind in _KINDS if kind != "split"]  # of the input itself


@experiment(
    "castin2024/robustness",
    title="Perturbations of one size, against sigma and the ball certificate",
    models=("minilm",),
)
def robustness(study: Study) -> None:
    """The first layer and the whole model of an encoder, perturbed at the first layer's input."""
    found = [case for place in study.places() for case in _moved_windows(study, *place)]
    _draw_moves(study, found)
    _of_sigma(study, found)
    _of_the_certificate(study, found)
    _of_neighbours(study, found)
    _layer_table(study, found)
    _whole_table(study, found)
    study.remark(
        f"Windows of {_TOKENS} tokens; the move is one of the first layer's input, which is "
        "also the first block's input.",
        "Sigma speaks of small moves; sigma · size is what it would allow if the map were "
        "linear. The certificate holds for every move of the ball.",
        "A certificate costs half a minute: it was asked for on some of the windows, and at "
        f"no size above {_PERCENT[_SHARES[_ASKED - 1]]}. It is refused where it would allow "
        "more than the values of the layer do.",
        f"Nearest neighbour: the mean token, by cosine, among {study.pick(12, 60)} windows of "
        "the same text.",
        "Mass splitting doubles the tokens; its norms are weighted, and it acts on the layer only.",
        "Attacks made of real tokens are not in this table.",
    )


@dataclass
class _Window:
    """One window: the first layer, the whole model (or any layer), and their common input."""

    attention: Attention
    model: LayerAtInput | Attention
    x: Tensor
    seed: int

    @cached_property
    def layer_top(self) -> TopSingular:
        """Sigma of the layer, and where it is attained."""
        return top(self.attention.linearise(self.x), self.seed)

    @cached_property
    def model_top(self) -> TopSingular:
        """The same of the model."""
        return top(self.model.linearise(self.x), self.seed)

    def moves(self, size: float, steps: int) -> dict[str, Tensor]:
        """One move of this size of every kind but splitting."""
        x, seed = self.x, self.seed
        return {
            "random": random_move(x, size, seed),
            "singular": of_size(self.layer_top.v, size),
            "singular model": of_size(self.model_top.v, size),
            "fgsm": sign_move(self.model, x, size, seed),
            "pgd": ascent_move(self.attention, x, size, seed, steps=steps),
            "pgd model": ascent_move(self.model, x, size, seed, steps=steps),
        }


def _moved_windows(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Record]:
    """Records of all windows and sizes of a model on one text."""
    every, windows = study.pick((3, 12), (6, 60))
    options: Record = {"layers": [0], "lengths": [_TOKENS], "samples": windows}
    chosen = range(0, windows, every)
    maps = list(layers_of(loaded, text.content, map="model", dtype="float32", **options))
    bank = torch.stack([embedding(one(one.x).detach()) for one in maps])
    held = layers_of(loaded, text.content, dtype="float32", **options)
    inputs = {c.sample: c for c in held if c.sample in chosen}
    for place, model in enumerate(maps):  # windows that repeat another are left out
        if model.sample in inputs:
            c = inputs[model.sample]
            window = _Window(c.attention, model, c.x, model.sample)
            key = {"model": loaded.name, "text": text.name, "sample": model.sample}
            part = f"moves-{loaded.name}-{text.name}-{model.sample}"
            others = bank.clone()
            others[place] = 0.0  # not its own neighbour
            # Half a minute each: of a quick run one window, of a full one every fourth.
            asked = _ASKED if model.sample % 24 == 0 else 0
            move = functools.partial(_moves_of, window, others, asked, not study.quick)
            (record,) = study.values(part, [{**key, "steps": study.pick(10, 20)}], move)
            yield from record["cases"]


def _moves_of(
    window: _Window, others: Tensor, certified: int, sharp: bool, steps: int, **_: Any
) -> Record:
    sizes = [share * float(window.x.norm()) for share in _SHARES]
    promised = _certificates(window, sizes[:certified], sharp=sharp)
    cases = []
    for i, (share, size, most) in enumerate(zip(_SHARES, sizes, promised, strict=True)):
        case: Record = {"share": share, "size": size, "certificate": most, "asked": i < certified}
        case["sigma"], case["sigma model"] = window.layer_top.sigma, window.model_top.sigma
        for name, move in window.moves(size, steps).items():
            case |= _effect(name, window, move, others)
        case["split"] = split_change(window.attention, window.x, size, window.seed)
        cases.append(case)
    return {"cases": cases}


def _certificates(window: _Window, sizes: Sequence[float], *, sharp: bool) -> list[float | None]:
    """What the Frobenius balls of these sizes allow at most; None from a refusal on."""
    found: list[float | None] = []
    for size in sizes:
        try:
            one = certify_ball(window.attention, window.x, eps=size, ball="frobenius", sharp=sharp)
        except InputError:
            break
        found.append(one.value * size)
    return found + [None] * (len(_SHARES) - len(found))


def _effect(name: str, window: _Window, move: Tensor, others: Tensor) -> Record:
    """Change of the layer's and the model's output, and whether the neighbour is another."""
    x = window.x
    with torch.no_grad():
        here, there = window.model(x), window.model(x + move)
        change = float((window.attention(x + move) - window.attention(x)).norm())
    before, after = (int((others @ embedding(y)).argmax()) for y in (here, there))
    return {
        name: change,
        f"{name} output": float((there - here).norm()),
        f"{name} relative": float((there - here).norm() / here.norm()),
        f"{name} neighbour": before != after,
    }


def _gain(records: Sequence[Record], kind: str) -> list[float]:
    """Change of the layer's output divided by what sigma says of a move of this size."""
    return [r[kind] / (r["sigma"] * r["size"]) for r in records]


def _of_sigma(study: Study, found: Sequence[Record]) -> None:
    first = chosen(found, share=_SHARES[0])
    study.claim(
        f"layer: change / (sigma · size) along the top singular vector, {_PERCENT[_SHARES[0]]}",
        "tends to 1 as the size goes to 0 (Section 3.1)",
        average(_gain(first, "singular")),
    )
    study.claim(
        f"layer: random direction, {_PERCENT[_SHARES[0]]}",
        "at most sigma · size, far below in high dimension",
        average(_gain(first, "random")),
    )
    over = {
        share: sum(g > 1.01 for g in _gain(chosen(found, share=share), "pgd")) for share in _SHARES
    }
    study.claim(
        "layer: largest change found above sigma · size, by more than 1 %",
        "possible: sigma speaks of small moves only",
        "; ".join(f"{hits} of {len(first)} windows at {_PERCENT[s]}" for s, hits in over.items()),
    )


def _of_the_certificate(study: Study, found: Sequence[Record]) -> None:
    known = [r for r in found if r["certificate"] is not None]
    above = sum(r[kind] > r["certificate"] * (1 + 1e-5) for r in known for kind in _MOVES)
    given = []
    for share in _SHARES[:_ASKED]:
        mine = chosen(known, share=share)
        loose = [r["certificate"] / (r["sigma"] * r["size"]) for r in mine]
        asked = sum(r["asked"] for r in chosen(found, share=share))
        words = f", where it allows {average(loose)} times sigma · size" if mine else ""
        given.append(f"given for {len(mine)} of {asked} windows at {_PERCENT[share]}{words}")
    study.claim(
        "ball certificate",
        "no move inside the ball changes more (derived here)",
        f"exceeded by {above} of {len(known) * len(_MOVES)} moves; {'; '.join(given)}",
    )


def _of_neighbours(study: Study, found: Sequence[Record]) -> None:
    for share in _SHARES:
        mine = chosen(found, share=share)
        kinds = ("random", "singular model", "pgd model")
        about = f"nearest neighbour changes, move of {_PERCENT[share]} of ‖X‖"
        cells = (f"{_KINDS[kind]} {_changed(mine, kind, '/')}" for kind in kinds)
        study.claim(about, "not in the paper", "; ".join(cells))


def _changed(records: Sequence[Record], kind: str, of: str) -> str:
    """How often the nearest neighbour is another after a move of this kind."""
    hits = sum(r[f"{kind} neighbour"] for r in records)
    low, high = share_interval(hits, len(records))
    return f"{hits}{of}{len(records)} [{low:.2f}, {high:.2f}]"


def _layer_table(study: Study, found: Sequence[Record]) -> None:
    def part(mine: list[Record], kind: str) -> str:
        known = [r for r in mine if r["certificate"] is not None and kind in _MOVES]
        return average([r[kind] / r["certificate"] for r in known])

    study.table(
        "The layer: means with 95 % intervals over windows",
        [(share, mine, kind) for share, mine in grouped(found, "share") for kind in _KINDS],
        {
            "size / ‖X‖": lambda share, _, __: _PERCENT[share],
            "move": lambda _, __, kind: _KINDS[kind],
            "change / (sigma · size)": lambda _, mine, kind: average(_gain(mine, kind)),
            "change / certificate": lambda _, mine, kind: part(mine, kind),
        },
    )


def _whole_table(study: Study, found: Sequence[Record]) -> None:
    def gain(r: Record, kind: str) -> float:
        return r[f"{kind} output"] / (r["sigma model"] * r["size"])

    study.table(
        "The model: means with 95 % intervals over windows",
        [(share, mine, kind) for share, mine in grouped(found, "share") for kind in _MOVES],
        {
            "size / ‖X‖": lambda share, _, __: _PERCENT[share],
            "move": lambda _, __, kind: _KINDS[kind],
            "change / (sigma of the model · size)": lambda _, mine, kind: average(
                [gain(r, kind) for r in mine]
            ),
            "change / ‖output‖": lambda _, mine, kind: average(
                [r[f"{kind} relative"] for r in mine]
            ),
            "nearest neighbour changes": lambda _, mine, kind: _changed(mine, kind, " of "),
        },
    )


def _draw_moves(study: Study, found: Sequence[Record]) -> None:
    found = [r | {"one": 1.0} for r in found]
    attacks = {"random": "random direction", "singular": "top singular vector", "pgd": "PGD"}
    layer = (
        *(_mean_curve(found, key, name) for key, name in attacks.items()),
        _mean_curve(found, "split", _KINDS["split"]),
        _mean_curve(found, "sigma", "sigma", "one", "dashes"),
        _mean_curve(found, "certificate", "ball certificate", kind="dashes"),
    )
    of_model = ("random output", "singular model output", "pgd model output")
    model = (
        *map(functools.partial(_mean_curve, found), of_model, attacks.values()),
        _mean_curve(found, "fgsm output", "FGSM"),
        _mean_curve(found, "sigma model", "sigma", "one", "dashes"),
    )
    x, y = "size of the move / ‖X‖", "change of the output / size of the move"
    panels = [Panel("layer 0", layer, x=x, y=y), Panel("whole model", model, x=x, y=y)]
    how = (
        "Means over windows. Singular vectors, PGD and sigma are those of the map above the panel."
    )
    study.draw("robustness", "Moves of one size", panels, [how], columns=2)


def _mean_curve(
    found: Sequence[Record], key: str, name: str, unit: str = "size", kind: LineKind = "line"
) -> Series:
    """Means of a quantity over those windows that have it, by size of the move."""
    known = [r for r in found if r[key] is not None]
    points = (
        (share, mean_interval([r[key] / r[unit] for r in mine])[0])
        for share, mine in grouped(known, "share")
    )
    return Series(name, tuple(points), kind)


def singular_move(operator: Operator, size: float, seed: int) -> Float[Tensor, "n d"]:
    """The top right singular vector of a Jacobian, scaled to ``‖E‖_F = size``."""
    return of_size(top(operator, seed).v, size)


def split_change(layer: Attention, x: Float[Tensor, "n d"], size: float, seed: int) -> float:
    """Change of a layer's output when its tokens are doubled and the copies moved apart.

    ``X`` doubled has weights 1/2 for every copy, so that norms are divided by ``√2``: moves
    ``(V, -V)`` with ``‖V‖_F = size`` along the direction of largest gain among them.

    Holds for unmasked layers without rotary embedding: copies share their position. The change is
    ``‖f(X') - f(X)‖_F / √2`` on the doubled input.

    Source: mass splitting; derived here (``docs/theory/inputs.md``).
    """
    twice, move = torch.cat([x, x]), singular_move(own_operator(layer, x), size, seed)
    with torch.no_grad():
        change = layer(twice + torch.cat([move, -move])) - layer(twice)
    return float(change.norm()) / 2**0.5
