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

from lipscope import Attention, InputError, LayerAtInput, Operator, TopSingular, top_singular
from lipscope.attacks import Function, ascent_move, of_size, random_move, sign_move
from lipscope.certificates import certify_ball
from lipscope.charts import LineKind, Panel, Series
from lipscope.models import LoadedModel
from lipscope.records import mean_interval, share_interval
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import Claim, Findings, Record, Table, average
from lipscope_experiments.texts import Text

_TOKENS = 32
_SHARES = (0.001, 0.01, 0.1, 0.3)  # size of the move as a share of ‖X‖
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
    cite="castin2024",
    models=("minilm",),
)
def robustness(study: Study) -> Findings:
    """The first layer and the whole model of an encoder, perturbed at the first layer's input."""
    found = [case for place in study.places() for case in _cases(study, *place)]
    _draw(study, found)
    return Findings(
        (*_of_sigma(found), _of_the_certificate(found), *_of_neighbours(found)),
        (_layer_table(found), _model_table(found)),
        (
            f"Windows of {_TOKENS} tokens; the move is one of the first layer's input, which is "
            "also the first block's input.",
            "Sigma speaks of small moves; sigma · size is what it would allow if the map were "
            "linear. The certificate holds for every move of the ball.",
            "A certificate costs half a minute: it was asked for on some of the windows, and at "
            f"no size above {_percent(_SHARES[_ASKED - 1])}. It is refused where it would allow "
            "more than the values of the layer do.",
            f"Nearest neighbour: the mean token, by cosine, among {study.pick(12, 60)} windows of "
            "the same text.",
            "Mass splitting doubles the tokens; its norms are weighted, and it acts on the layer "
            "only.",
            "Attacks made of real tokens are not in this table.",
        ),
    )


# --- what is computed ------------------------------------------------------------------------


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
        return self._top(self.attention)

    @cached_property
    def model_top(self) -> TopSingular:
        """The same of the model."""
        return self._top(self.model)

    def _top(self, f: Any) -> TopSingular:
        return top_singular(f.linearise(self.x), generator=torch.Generator().manual_seed(self.seed))

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


def _cases(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Record]:
    """Records of all windows and sizes of a model on one text."""
    every, windows = study.pick((3, 12), (6, 60))
    options: Record = {"layers": [0], "lengths": [_TOKENS], "samples": windows}
    chosen = range(0, windows, every)
    maps = list(layers_of(loaded, text.content, map="model", dtype="float32", **options))
    bank = torch.stack([_embedding(one(one.x)) for one in maps])
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
            (record,) = study.values(part, [_job(study, key, window, others)])
            yield from record["cases"]


def _embedding(hidden: Tensor) -> Tensor:
    """Mean over tokens, normalised: what sentence encoders compare."""
    return torch.nn.functional.normalize(hidden.detach().mean(0), dim=0)


def _job(study: Study, key: Record, window: _Window, others: Tensor) -> ValueJob:
    steps = study.pick(10, 20)
    # Half a minute each: of a quick run one window, of a full one every fourth.
    certified = key["sample"] % 24 == 0

    def compute() -> Record:
        sizes = [share * float(window.x.norm()) for share in _SHARES]
        asked = sizes[:_ASKED] if certified else []
        promised = _certificates(window, asked, sharp=not study.quick)
        cases = []
        for share, size, most in zip(_SHARES, sizes, promised, strict=True):
            moves = window.moves(size, steps)
            case: Record = {"share": share, "size": size, "certificate": most}
            case["asked"] = size in asked
            case["sigma"], case["sigma model"] = window.layer_top.sigma, window.model_top.sigma
            for name, move in moves.items():
                case |= _effect(name, window, move, others)
            case["split"] = split_change(window.attention, window.x, size, window.seed)
            cases.append(case)
        return {"cases": cases}

    return {**key, "steps": steps}, compute


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
    before, after = (int((others @ _embedding(y)).argmax()) for y in (here, there))
    return {
        name: change,
        f"{name} output": float((there - here).norm()),
        f"{name} relative": float((there - here).norm() / here.norm()),
        f"{name} neighbour": before != after,
    }


# --- what is said ----------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _at(found: Sequence[Record], share: float) -> list[Record]:
    return [r for r in found if r["share"] == share]


def _gain(records: Sequence[Record], kind: str) -> list[float]:
    """Change of the layer's output divided by what sigma says of a move of this size."""
    return [r[kind] / (r["sigma"] * r["size"]) for r in records]


def _of_sigma(found: Sequence[Record]) -> Iterator[Claim]:
    first = _at(found, _SHARES[0])
    yield Claim(
        f"layer: change / (sigma · size) along the top singular vector, {_percent(_SHARES[0])}",
        "tends to 1 as the size goes to 0 (Section 3.1)",
        average(_gain(first, "singular")),
    )
    yield Claim(
        f"layer: random direction, {_percent(_SHARES[0])}",
        "at most sigma · size, far below in high dimension",
        average(_gain(first, "random")),
    )
    over = {share: sum(g > 1.01 for g in _gain(_at(found, share), "pgd")) for share in _SHARES}
    yield Claim(
        "layer: largest change found above sigma · size, by more than 1 %",
        "possible: sigma speaks of small moves only",
        "; ".join(f"{hits} of {len(first)} windows at {_percent(s)}" for s, hits in over.items()),
    )


def _of_the_certificate(found: Sequence[Record]) -> Claim:
    known = [r for r in found if r["certificate"] is not None]
    above = sum(r[kind] > r["certificate"] * (1 + 1e-5) for r in known for kind in _MOVES)
    given = []
    for share in _SHARES[:_ASKED]:
        mine = _at(known, share)
        loose = [r["certificate"] / (r["sigma"] * r["size"]) for r in mine]
        asked = sum(r["asked"] for r in _at(found, share))
        words = f", where it allows {average(loose)} times sigma · size" if mine else ""
        given.append(f"given for {len(mine)} of {asked} windows at {_percent(share)}{words}")
    return Claim(
        "ball certificate",
        "no move inside the ball changes more (derived here)",
        f"exceeded by {above} of {len(known) * len(_MOVES)} moves; {'; '.join(given)}",
    )


def _of_neighbours(found: Sequence[Record]) -> Iterator[Claim]:
    for share in _SHARES:
        cells = []
        for kind in ("random", "singular model", "pgd model"):
            hits, total, low, high = _changed(_at(found, share), kind)
            cells.append(f"{_KINDS[kind]} {hits}/{total} [{low:.2f}, {high:.2f}]")
        about = f"nearest neighbour changes, move of {_percent(share)} of ‖X‖"
        yield Claim(about, "not in the paper", "; ".join(cells))


def _changed(records: Sequence[Record], kind: str) -> tuple[int, int, float, float]:
    hits = sum(r[f"{kind} neighbour"] for r in records)
    return hits, len(records), *share_interval(hits, len(records))


def _layer_table(found: Sequence[Record]) -> Table:
    lines = []
    for share in _SHARES:
        mine = _at(found, share)
        known = [r for r in mine if r["certificate"] is not None]
        for kind, words in _KINDS.items():
            part = [r[kind] / r["certificate"] for r in known if kind in _MOVES]
            lines.append(
                (
                    _percent(share),
                    words,
                    average(_gain(mine, kind)),
                    average(part) if part else "–",
                )
            )
    columns = ("size / ‖X‖", "move", "change / (sigma · size)", "change / certificate")
    return Table("The layer: means with 95 % intervals over windows", columns, tuple(lines))


def _model_table(found: Sequence[Record]) -> Table:
    lines = []
    for share in _SHARES:
        mine = _at(found, share)
        for kind in _MOVES:
            gains = [r[f"{kind} output"] / (r["sigma model"] * r["size"]) for r in mine]
            hits, total, low, high = _changed(mine, kind)
            lines.append(
                (
                    _percent(share),
                    _KINDS[kind],
                    average(gains),
                    average([r[f"{kind} relative"] for r in mine]),
                    f"{hits} of {total} [{low:.2f}, {high:.2f}]",
                )
            )
    columns = (
        "size / ‖X‖",
        "move",
        "change / (sigma of the model · size)",
        "change / ‖output‖",
        "nearest neighbour changes",
    )
    return Table("The model: means with 95 % intervals over windows", columns, tuple(lines))


# --- what is drawn ---------------------------------------------------------------------------


def _draw(study: Study, found: Sequence[Record]) -> None:
    found = [r | {"one": 1.0} for r in found]
    attacks = {"random": "random direction", "singular": "top singular vector", "pgd": "PGD"}
    layer = (
        *(_curve(found, key, name) for key, name in attacks.items()),
        _curve(found, "split", _KINDS["split"]),
        _curve(found, "sigma", "sigma", "one", "dashes"),
        _curve(found, "certificate", "ball certificate", kind="dashes"),
    )
    of_model = ("random output", "singular model output", "pgd model output")
    model = (
        *map(functools.partial(_curve, found), of_model, attacks.values()),
        _curve(found, "fgsm output", "FGSM"),
        _curve(found, "sigma model", "sigma", "one", "dashes"),
    )
    x, y = "size of the move / ‖X‖", "change of the output / size of the move"
    panels = [Panel("layer 0", layer, x=x, y=y), Panel("whole model", model, x=x, y=y)]
    study.draw("robustness", "Moves of one size", panels, [_HOW], columns=2)


_HOW = "Means over windows. Singular vectors, PGD and sigma are those of the map above the panel."


def _curve(
    found: Sequence[Record], key: str, name: str, unit: str = "size", kind: LineKind = "line"
) -> Series:
    """Means of a quantity over those windows that have it, by size of the move."""
    at = {s: [r for r in _at(found, s) if r[key] is not None] for s in _SHARES}
    means = {
        s: mean_interval([r[key] / r[unit] for r in mine])[0] for s, mine in at.items() if mine
    }
    return Series(name, tuple(means.items()), kind)


# --- moves of one ℓ2 size along a singular vector, and of tokens that are split ---


def singular_move(operator: Operator, size: float, seed: int) -> Float[Tensor, "n d"]:
    """The top right singular vector of a Jacobian, scaled to ``‖E‖_F = size``."""
    gen = torch.Generator().manual_seed(seed)
    return of_size(top_singular(operator, generator=gen).v, size)


def split_change(layer: Attention, x: Float[Tensor, "n d"], size: float, seed: int) -> float:
    """Change of a layer's output when its tokens are doubled and the copies moved apart.

    ``X`` doubled has weights 1/2 for every copy, so that norms are divided by ``√2``: moves
    ``(V, -V)`` with ``‖V‖_F = size`` along the direction of largest gain among them.

    Holds for unmasked layers without rotary embedding: copies share their position.

    Args:
        layer: The layer.
        x: Its input.
        size: ``‖V‖_F``, the weighted norm of the move.
        seed: Of the solver's start.

    Returns:
        ``‖f(X') - f(X)‖_F / √2`` on the doubled input.

    Source: mass splitting; derived here (``docs/theory/inputs.md``).
    """
    twice = torch.cat([x, x])
    inner = layer.linearise(twice)

    def apart(product: Function, e: Tensor) -> Tensor:
        y = product(torch.cat([e, -e], dim=-2) / 2**0.5)
        first, second = y.chunk(2, dim=-2)
        return (first - second) / 2**0.5

    n = len(x)
    operator = Operator(
        lambda e: apart(inner.matvec, e),
        lambda g: apart(inner.rmatvec, g),
        (n, inner.in_shape[1]),
        (n, inner.out_shape[1]),
        inner.dtype,
        inner.device,
    )
    move = singular_move(operator, size, seed)
    with torch.no_grad():
        change = layer(twice + torch.cat([move, -move])) - layer(twice)
    return float(change.norm()) / 2**0.5
