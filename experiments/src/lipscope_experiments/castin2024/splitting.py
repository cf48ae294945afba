"""Mass splitting: wedges, finite moves, tiny masses, a table of maps, and tokens of texts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from lipscope import Attention, InputError, split
from lipscope.attention import arguments, variants
from lipscope.charts import Panel, Series
from lipscope.linalg import start_named
from lipscope.measures import TokenMeasure, finite_split, split_at, tiny_mass_gain, tiny_mass_ratio
from lipscope.pages import number
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, average, chosen, curve, percentage
from lipscope_experiments.simple_layers import SIGNS, dots, eye, in_ball, multiple, normal
from lipscope_experiments.training import seeded

_WEDGES = ((-3.0, -0.3), (-0.5, -5.0))
_FAR = (1.0, 2.0, 3.0, 5.0, 8.0)


@experiment("castin2024/splitting", models=("minilm", "smollm2"))
def splitting(study: Study) -> None:
    """Mass splitting: when tokens should be taken apart rather than moved."""
    side, many = study.pick((41, 400), (121, 4000))
    keys = grid(sign=SIGNS, n=[2], d=[1], radius=(1.0, 2.0, 3.0, 5.0), count=[side])
    keys += grid(sign=SIGNS, n=[3], d=(1, 2, 4), radius=[3.0], count=[many])
    areas = study.values("areas", keys, _splitting_share)
    finite = study.values("finite moves", grid(x=map(list, _WEDGES)), _finite_moves)
    far = study.values("tiny masses", grid(sign=SIGNS, radius=_FAR), _tiny_mass)
    count, targets = study.pick((60, 200), (500, 500))
    keys = grid(sign=SIGNS, count=[count], targets=[targets], radius=[3.0])
    chance = study.values("tiny masses at random", keys, _random_masses)
    _draw_regions(study, far)
    study.claim(
        "one dimension, two tokens in [-R, R]², A = -1",
        "splitting wins in curved wedges, one token near 0 and one near ±R (derived here)",
        _areas(areas, "A = -I"),
    )
    study.claim("the same, A = +1", "none found (derived here)", _areas(areas, "A = +I"))
    study.claim(
        "finite moves by exact transport at (-3, -0.3) and (-0.5, -5)",
        "gains of 1.5535 and 1.7467, moves of 1.2187 and 1.1928 (derived here)",
        "; ".join(
            f"split {number(r['split'], 5)}, together {number(r['together'], 5)}, "
            f"sigma {number(r['moving'], 5)}"
            for r in finite
        ),
    )
    study.claim(
        "two atoms at ±R, A = +1: a tiny mass carried across the middle",
        "tends to 2, every small move to 1 (derived here)",
        "; ".join(
            f"R = {r['radius']:g}: {number(r['far'])} against {number(r['small'])}"
            for r in chosen(far, sign="A = +I")
        ),
    )
    study.claim(
        "inputs of three tokens in the plane where a tiny mass beats every small move",
        "unknown",
        "; ".join(
            f"{r['sign']}, R = {r['radius']:g}: {percentage(r['hits'], r['total'])}, "
            f"at most {number(r['largest'], 3)} times"
            for r in chance
        ),
    )
    lines = [
        (r["sign"], r["n"], r["d"], f"{r['radius']:g}", _area_share(r), r["largest"]) for r in areas
    ]
    columns = ("A", "tokens", "d", "R", "share", "largest split / moved")
    study.table("Share of random or gridded inputs that split", lines, columns)
    table_of_maps(study)
    _of_texts(study)
    study.remark(
        "Split / moved above 1: two copies of a token that move against each other change "
        "the output more than any move of whole tokens does.",
        "Intervals are 95 %: Clopper–Pearson over inputs that were drawn independently, "
        "Student's over windows of text.",
        "Not found is no proof. What is proved stands in docs/theory/splitting.md.",
        "With a causal mask or positions, copies share those of their token; a text has no "
        "such copies.",
    )


def ratios(layer: Attention, x: Tensor) -> Tensor:
    """Split / moved at many inputs ``(b, n, d)`` of a layer in closed form."""
    n = x.shape[1]
    whole = vmap(jacrev(layer.forward))(x)
    own = vmap(jacrev(layer))(x, x)
    moving = torch.linalg.matrix_norm(whole.reshape(len(x), -1, n * x.shape[2]), 2)
    blocks = torch.stack([own[:, i, :, i] for i in range(n)], 1)
    return torch.linalg.matrix_norm(blocks, 2).amax(1) / moving


def _splitting_share(sign: str, n: int, d: int, radius: float, count: int) -> Record:
    if n == 2:
        axis = torch.linspace(-radius, radius, count, dtype=torch.float64)
        x = torch.cartesian_prod(axis, axis)[:, :, None]
    else:
        gen = start_named(f"splitting|{sign}|{d}")
        x = radius * in_ball(gen, count, n, d)
    found = torch.cat([ratios(multiple(SIGNS[sign], d), part) for part in x.split(2000)])
    hits = int((found > 1 + CLEAR).sum())
    return {"hits": hits, "total": len(x), "largest": float(found.max())}


def _area_share(r: Record) -> str:
    hits, total = r["hits"], r["total"]
    return f"{hits / total:.1%}" if r["n"] == 2 else percentage(hits, total)  # a grid, or random


def _areas(found: list[Record], sign: str) -> str:
    return "; ".join(
        f"R = {r['radius']:g}: {_area_share(r)}, largest ratio {number(r['largest'], 3)}"
        for r in chosen(found, sign=sign, n=2)
    )


def _finite_moves(x: list[float]) -> Record:
    layer, tokens = multiple(-1.0, 1), torch.tensor(x, dtype=torch.float64)[:, None]
    found, mu = split_at(layer, tokens), TokenMeasure(tokens)
    split, together = (finite_split(layer, mu, found, size=1e-4, whole=w) for w in (False, True))
    return {"moving": found.moving, "split": split, "together": together}


def _tiny_mass(sign: str, radius: float) -> Record:
    layer = multiple(SIGNS[sign], 1)
    x = torch.tensor([[radius], [-radius]], dtype=torch.float64)
    y = torch.linspace(-radius, radius, 801, dtype=torch.float64)[:, None]
    mu, small = TokenMeasure(x), split_at(layer, x)
    gains = tiny_mass_gain(layer, mu, y)
    atom, target = divmod(int(gains.argmax()), len(y))
    exact = tiny_mass_ratio(layer, mu, atom, y[target], mass=1e-6)
    found = {"small": max(small.moving, small.splitting), "far": float(gains.max())}
    return found | {"exact": exact, "to": float(y[target]) / float(x[atom])}


def _random_masses(sign: str, count: int, targets: int, radius: float) -> Record:
    gen, layer, hits, best = start_named(f"far|{sign}"), multiple(SIGNS[sign], 2), 0, 0.0
    for _ in range(count):
        x = radius * _in_disc(3, gen)
        found = split_at(layer, x)
        small = max(found.moving, found.splitting)
        gains = tiny_mass_gain(layer, TokenMeasure(x), radius * _in_disc(targets, gen))
        ratio = float(gains.max()) / small
        hits, best = hits + (ratio > 1 + CLEAR), max(best, ratio)
    return {"hits": hits, "total": count, "largest": best}


def _in_disc(n: int, gen: torch.Generator) -> Tensor:
    angle, far = (torch.rand(n, generator=gen, dtype=torch.float64) for _ in range(2))
    return (far.sqrt() * torch.stack([(math.tau * angle).cos(), (math.tau * angle).sin()])).T


def _of_texts(study: Study) -> None:
    count, length = study.pick((1, 16), (4, 32))
    lines, tokens, every = [], list[list[bool]](), list[float]()
    for source in study.sources():
        model, text, layers = source.model, source.asked["data"], study.pick([0], [0, 2, 5])
        for window in range(count):
            part = text[window * len(text) // count :]
            found = split(model, part, layers=layers, length=length, out=study.folder)
            ratios = [found.ratio(i) for i in range(len(found.moved))]
            held = [one for one in ratios if one is not None]
            alone = max(one.split / one.moved for one in found.tokens)
            tokens.append([one.better_split for one in found.tokens])
            every += held
            lines.append((model.name, source.name, str(window), number(max(held)), number(alone)))
    columns = ("model", "text", "window", "largest split / moved", "of one token, moved alone")
    study.table(f"Layers, heads and tokens of texts, {length} tokens", lines, columns)
    mean = average([fmean(some) for some in tokens], (0.0, math.inf), ".2%", least=2)
    study.claim(
        "tokens of texts that are better split than moved alone",
        "unknown",
        f"{sum(map(sum, tokens))} of {sum(map(len, tokens)):,} tokens in all layers, {mean} of a "
        f"window; in {sum(one > 1 for one in every)} of {len(every):,} layers and heads splitting "
        "beats every move",
    )


def _draw_regions(study: Study, far: list[Record]) -> None:
    def panel(title: str, series: list[Series], x: str, y: str) -> Panel:
        return Panel(title, tuple(series), x, y, log_x=False, log_y=False)

    wins, side, panels = "splitting beats moving", study.pick(61, 121), []
    for radius in (3.0, 5.0):
        axis = torch.linspace(-radius, radius, side, dtype=torch.float64)
        x = torch.cartesian_prod(axis, axis)
        inside = ratios(multiple(-1.0, 1), x[:, :, None]) > 1 + CLEAR
        panels.append(panel(f"d = 1, R = {radius:g}", [dots(wins, x[inside])], "x₁", "x₂"))
    axis = torch.linspace(-5, 5, side, dtype=torch.float64)
    moving = torch.cartesian_prod(axis, axis)
    fixed = torch.tensor([[3.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    x = torch.cat([fixed.expand(len(moving), 2, 2), moving[:, None]], 1)
    inside = ratios(multiple(-1.0, 2), x) > 1 + CLEAR
    series = [dots(wins, moving[inside]), dots("the two other tokens", fixed)]
    title = "d = 2: where a third token makes it split"
    panels.append(panel(title, series, "x₃, first entry", "x₃, second entry"))
    mine = chosen(far, sign="A = +I")
    series = [
        curve("a tiny mass across", mine, "radius", "far"),
        curve("any small move", mine, "radius", "small"),
        curve("gain 2", mine, "radius", lambda r: 2.0, "dashes"),
    ]
    panels.append(panel("A = +1, atoms at ±R", series, "radius R", "gain"))
    study.draw("splitting", "Where splitting beats moving (A = -I)", panels, columns=2)


Map = Callable[[Tensor], Tensor]
CLEAR = 1e-6  # above 1: what rounding cannot do
_OPTIONS: dict[str, Any] = {"temperature": 5.0, "radius": 3.0, "num_tokens": 64, "by": "G2"}


def table_of_maps(study: Study) -> None:
    """Every map, the largest ratio that a search found, and what is proved."""
    starts, steps = study.pick((4, 25), (6, 60))
    keys = grid(map=_maps_by_name(), starts=[starts], steps=[steps])
    found = study.values("maps", keys, _search_map)
    lines = [(r["map"], r["largest"], _verdict_on(r), _PROVED.get(r["map"], "–")) for r in found]
    title = "Which maps split: largest split / moved that a search found"
    study.table(title, lines, ("map", "largest", "found", "proved"))


_ENCODER = "model without positions: two encoder layers"
_L2 = "never: the own block is T plus a positive matrix"
_PROVED = {
    "L2Attention, A = -I": _L2,
    "L2Attention, A = +I": _L2,
    "token by token (MLP, LayerNorm)": "never: both sides are equal",
    "mean of all tokens": "never: no own query",
    "A = 0 (uniform attention)": "never: no own query",
    "one token": "never for attention: it reads itself alone",
}


def _maps_by_name() -> dict[str, tuple[Callable[[int], Map], int]]:
    """Maps on tokens by name: what makes one of width d, and the number of tokens."""
    gen = start_named("splitting|maps")

    def mlp(d: int) -> Map:
        first, second = normal(gen, 4 * d, d), normal(gen, d, 4 * d)
        return lambda x: torch.tanh(x @ first.T) @ second.T

    def residual(f: Map) -> Map:
        return lambda x: x + f(x)

    def block(d: int) -> Map:
        f, g = multiple(-1.0, d), mlp(d)
        first = residual(lambda x: f(nn.functional.layer_norm(x, (d,)) if d > 1 else x))
        return lambda x: residual(g)(first(x))

    def encoder(d: int) -> Map:
        with seeded(0):
            one = nn.TransformerEncoderLayer(d, 1, 4 * d, dropout=0.0, batch_first=True)
            both = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        return both.double().eval().requires_grad_(False)

    return {
        f"{kind.__name__}, {name}": (_builder(kind, sign), 3)
        for kind in variants()
        for name, sign in SIGNS.items()
    } | {
        "residual, A = -I": (lambda d: residual(multiple(-1.0, d)), 3),
        "residual, A = +I": (lambda d: residual(multiple(1.0, d)), 3),
        "block: attention, then MLP": (block, 3),
        _ENCODER: (encoder, 3),
        "A = 0 (uniform attention)": (lambda d: multiple(0.0, d), 3),
        "one token": (lambda d: multiple(-1.0, d), 1),
        "token by token (MLP, LayerNorm)": (mlp, 3),
        "mean of all tokens": (lambda d: lambda x: x.mean(-2, keepdim=True).expand_as(x), 3),
    }


def _builder(kind: type[Attention], sign: float) -> Callable[[int], Map]:
    """A layer of a variant with ``A`` a multiple of the identity, whatever else it asks for."""
    every = arguments(kind).items()
    needed = [name for name, one in every if one.default is inspect.Parameter.empty]

    def build(d: int) -> Map:
        given = {"query": sign * eye(d), "key": eye(d), "value": eye(d), **_OPTIONS}
        return kind(**{name: given.get(name, 1.0) for name in needed})

    return build


def _search_map(map: str, starts: int, steps: int) -> Record:
    make, n = _maps_by_name()[map]
    widths = (4,) if map == _ENCODER else (1, 2)  # a norm of two entries is constant
    found = [_search(make(d), n, d, starts, steps, map) for d in widths]
    largest = None if max(found) < 0 else max(found)
    return {"largest": largest, "inputs": len(widths) * starts * (steps + 1)}


def _search(f: Map, n: int, d: int, starts: int, steps: int, name: str) -> float:
    """The largest ratio by random steps from random inputs; -1 where none could be had."""
    gen, best = start_named(f"splitting|{name}|{d}"), -1.0

    def value(x: Tensor) -> float:
        try:
            found = split_at(f, x)
        except InputError:
            return -1.0  # scores that float64 does not resolve
        return found.ratio if found.moving > 1e-9 else -1.0

    for _ in range(starts):
        size = 10 ** (1.4 * torch.rand(1, generator=gen, dtype=torch.float64) - 0.4)
        x = size * normal(gen, n, d)
        here = value(x)
        for step in range(steps):
            scale = size * 10 ** (-2 * step / steps)
            other = x + 0.5 * scale * normal(gen, n, d)
            if (tried := value(other)) > here:
                x, here = other, tried
        best = max(here, best)
    return best


def _verdict_on(r: Record) -> str:
    if r["largest"] is None:
        return "no gain at all"
    if r["largest"] > 1 + CLEAR:
        return "splits"
    return f"not found among {r['inputs']:,} inputs"
