"""Moves of the first layer's input, against what sigma and the ball certificate promise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope import Attention, InputError, LayerAtInput
from lipscope.attacks import ascent_move, of_size, random_move, sign_move
from lipscope.certificates import certify_ball
from lipscope.charts import LineKind, Panel, Series
from lipscope.measures import own_operator
from lipscope.records import share_interval
from lipscope_experiments.experiment import Source, Study, experiment, layers_of
from lipscope_experiments.findings import Record, Value, average, chosen, column_mean, grouped, line
from lipscope_experiments.simple_layers import embedding, top

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


@experiment("castin2024/robustness", models=("minilm",))
def robustness(study: Study) -> None:
    """Perturbations of one size, against sigma and the ball certificate."""
    found = [case for source in study.sources() for case in _moved_windows(study, source)]
    _draw_moves(study, found)
    moves = _by_kind(found)
    _of_sigma(study, moves)
    _of_the_certificate(study, moves)
    for share in _SHARES:
        kinds = ("random", "singular model", "pgd model")
        asked = (chosen(moves, share=share, kind=kind) for kind in kinds)
        study.claim(
            f"nearest neighbour changes, move of {_PERCENT[share]} of ‖X‖",
            "not in the paper",
            "; ".join(f"{_KINDS[mine[0]['kind']]} {_changed(mine, '/')}" for mine in asked),
        )
    _move_tables(study, moves)
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


def _moved_windows(study: Study, source: Source) -> Iterator[Record]:
    """Records of all windows and sizes of a model on one text."""
    every, windows = study.pick((3, 12), (6, 60))
    asked = source.asking(_TOKENS, windows) | {"layers": [0], "dtype": "float32"}
    name, text = source.model.name, source.name
    maps = list(layers_of(source.model, map="model", **asked))
    bank = torch.stack([embedding(one(one.x).detach()) for one in maps])
    held = layers_of(source.model, **asked)
    inputs = {c.sample: c for c in held if c.sample in range(0, windows, every)}
    for place, model in enumerate(maps):  # windows that repeat another are left out
        if model.sample in inputs:
            key = {"model": name, "text": text, "sample": model.sample}
            part = f"moves-{name}-{text}-{model.sample}"
            others = bank.clone()
            others[place] = 0.0  # not its own neighbour
            # Half a minute each: of a quick run one window, of a full one every fourth.
            asked = _ASKED if model.sample % 24 == 0 else 0
            layer = inputs[model.sample]
            move = functools.partial(_moves_of, layer, model, others, asked, not study.quick)
            (record,) = study.values(part, [{**key, "steps": study.pick(10, 20)}], move)
            yield from record["cases"]


def _moves_of(
    at: LayerAtInput,
    model: LayerAtInput,
    others: Tensor,
    certified: int,
    sharp: bool,
    /,
    steps: int,
    **_: Any,
) -> Record:
    """What moves of every kind and size do to a layer at an input, and to the whole model there."""
    layer, x, seed = at.attention, at.x, model.sample
    own, whole = (top(f.linearise(x), seed) for f in (layer, model))
    sizes = [share * float(x.norm()) for share in _SHARES]
    promised = _certificates(layer, x, sizes[:certified], sharp=sharp)
    cases = []
    for i, (share, size, most) in enumerate(zip(_SHARES, sizes, promised, strict=True)):
        case: Record = {"share": share, "size": size, "certificate": most, "asked": i < certified}
        case |= {"sigma": own.sigma, "sigma model": whole.sigma}
        moves = {
            "random": random_move(x, size, seed),
            "singular": of_size(own.v, size),
            "singular model": of_size(whole.v, size),
            "fgsm": sign_move(model, x, size, seed),
            "pgd": ascent_move(layer, x, size, seed, steps=steps),
            "pgd model": ascent_move(model, x, size, seed, steps=steps),
        }
        for name, move in moves.items():
            with torch.no_grad():
                here, there = model(x), model(x + move)
                case[name] = float((layer(x + move) - layer(x)).norm())
            before, after = (int((others @ embedding(y)).argmax()) for y in (here, there))
            case[f"{name} output"] = float((there - here).norm())
            case[f"{name} relative"] = float((there - here).norm() / here.norm())
            case[f"{name} neighbour"] = before != after
        case["split"] = split_change(layer, x, size, seed)
        cases.append(case)
    return {"cases": cases}


def _certificates(
    layer: Attention, x: Tensor, sizes: Sequence[float], *, sharp: bool
) -> list[float | None]:
    """What the Frobenius balls of these sizes allow at most; None from a refusal on."""
    found: list[float | None] = []
    for size in sizes:
        try:
            one = certify_ball(layer, x, eps=size, ball="frobenius", sharp=sharp)
        except InputError:
            break
        found.append(one.value * size)
    return found + [None] * (len(_SHARES) - len(found))


def _by_kind(found: Sequence[Record]) -> list[Record]:
    """A record for every kind of move, with its change over what is said of the size."""
    moves = list[Record]()
    for r, kind in itertools.product(found, _KINDS):
        own = {name: r.get(f"{kind} {name}") for name in ("output", "relative", "neighbour")}
        own |= {"kind": kind, "change": r[kind], "gain": r[kind] / (r["sigma"] * r["size"])}
        if kind in _MOVES:
            own["of certificate"] = r["certificate"] and r[kind] / r["certificate"]
            own["of model"] = own["output"] / (r["sigma model"] * r["size"])
        moves.append({"of certificate": None, **r, **own})
    return moves


def _of_sigma(study: Study, moves: Sequence[Record]) -> None:
    along, near = "change / (sigma · size) along the top singular vector", _SHARES[0]
    asked = {
        "singular": (along, "tends to 1 as the size goes to 0 (Section 3.1)"),
        "random": ("random direction", "at most sigma · size, far below in high dimension"),
    }
    for kind, (what, said) in asked.items():
        gains = [r["gain"] for r in chosen(moves, kind=kind, share=near)]
        study.claim(f"layer: {what}, {_PERCENT[near]}", said, average(gains))
    over = (
        f"{sum(r['gain'] > 1.01 for r in mine)} of {len(mine)} windows at {_PERCENT[share]}"
        for share, mine in grouped(chosen(moves, kind="pgd"), "share")
    )
    about = "layer: largest change found above sigma · size, by more than 1 %"
    study.claim(about, "possible: sigma speaks of small moves only", "; ".join(over))


def _of_the_certificate(study: Study, moves: Sequence[Record]) -> None:
    known = [r for r in moves if r["kind"] in _MOVES and r["certificate"] is not None]
    above = sum(r["change"] > r["certificate"] * (1 + 1e-5) for r in known)
    given = []
    for share in _SHARES[:_ASKED]:
        asked = sum(r["asked"] for r in chosen(moves, share=share, kind="random"))
        mine = chosen(known, share=share, kind="random")
        loose = average([r["certificate"] / (r["sigma"] * r["size"]) for r in mine])
        words = f", where it allows {loose} times sigma · size" if mine else ""
        given.append(f"given for {len(mine)} of {asked} windows at {_PERCENT[share]}{words}")
    study.claim(
        "ball certificate",
        "no move inside the ball changes more (derived here)",
        f"exceeded by {above} of {len(known)} moves; {'; '.join(given)}",
    )


def _changed(records: Sequence[Record], of: str) -> str:
    """How often the nearest neighbour is another after a move."""
    hits = sum(r["neighbour"] for r in records)
    low, high = share_interval(hits, len(records))
    return f"{hits}{of}{len(records)} [{low:.2f}, {high:.2f}]"


def _move_tables(study: Study, moves: Sequence[Record]) -> None:
    where: dict[str, Value] = {"size / ‖X‖": lambda at, _: _PERCENT[at[0]]}
    where["move"] = lambda at, _: _KINDS[at[1]]
    gains = {"change / (sigma · size)": column_mean("gain")}
    study.table(
        "The layer: means with 95 % intervals over windows",
        grouped(moves, "share", "kind"),
        {**where, **gains, "change / certificate": column_mean("of certificate")},
    )
    study.table(
        "The model: means with 95 % intervals over windows",
        grouped([r for r in moves if r["kind"] in _MOVES], "share", "kind"),
        {
            **where,
            "change / (sigma of the model · size)": column_mean("of model"),
            "change / ‖output‖": column_mean("relative"),
            "nearest neighbour changes": lambda _, mine: _changed(mine, " of "),
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
    by = grouped(known, "share")
    means = {share: fmean(r[key] / r[unit] for r in mine) for share, mine in by}
    return line(name, means, means.values(), kind)


def split_change(layer: Attention, x: Float[Tensor, "n d"], size: float, seed: int) -> float:
    """Change of a layer's output when its tokens are doubled and the copies moved apart.

    ``‖f(X') - f(X)‖_F / √2``, as every copy has weight 1/2, for moves ``(V, -V)`` with
    ``‖V‖_F = size`` along the direction of largest gain among them. Holds for unmasked layers
    without rotary embedding: copies share their position.

    Source: mass splitting; derived here (``docs/theory/inputs.md``).
    """
    twice, move = torch.cat([x, x]), of_size(top(own_operator(layer, x), seed).v, size)
    with torch.no_grad():
        change = layer(twice + torch.cat([move, -move])) - layer(twice)
    return float(change.norm()) / 2**0.5
