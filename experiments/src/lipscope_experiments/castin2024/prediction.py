"""Does sigma predict which inputs are fragile? Its rank correlation with the move that flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipscope import LayerAtInput, Rows
from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel
from lipscope.pages import number
from lipscope.records import rank_correlation
from lipscope_experiments.experiment import Study, experiment, layers_of
from lipscope_experiments.findings import Record, middle
from lipscope_experiments.simple_layers import embedding, top
from lipscope_experiments.texts import Text

Scores = Callable[[Tensor], Tensor]

_TOKENS = 32
_RIVALS, _STEPS, _BISECTIONS = 3, 30, 12
_PER_WINDOW = "sigma of the model", "margin"
_BEYOND = 1.02  # a step goes a little further than the linear model asks, as DeepFool's does


@experiment(
    "castin2024/prediction",
    title="Does sigma predict the smallest move that changes an answer?",
    models=("minilm", "smollm2"),
)
def prediction(study: Study) -> None:
    """Rank correlation over windows of sigma, relative sigma and a certificate with the move."""
    cases = [_windows_of(study, *place) for place in study.places()]
    _draw_predictors(study, cases)
    for case in cases:
        _of_correlations(study, case)
    for case in cases:
        lines = [(name, _interval_of(found)) for name, found in _correlations(case).items()]
        title = f"Rank correlation with the smallest move: {case['model']}, {case['text']}"
        study.table(title, lines, ("predictor", "correlation, 95 % interval"))
    study.remark(
        f"Windows of {_TOKENS} tokens, spread over the text. The answer of an encoder is the "
        "nearest of as many other windows, none of which is asked itself, by cosine of the "
        "mean token; that of a decoder the likeliest next token, by its own embedding table.",
        "The move is one of the first block's input, ‖E‖_F / ‖X‖_F: steps to the nearest of "
        f"the {_RIVALS} nearest rivals to first order until the answer is another one "
        "(DeepFool), then bisection on its length. It is an upper value of the smallest move.",
        "Sigma is that of each layer's attention at the window. A fragile window has a small "
        "move: where sigma predicts, the correlation is negative. The margin of the answer, "
        "the model's own sigma and their quotient stand beside it, to compare with.",
        "Intervals: 95 %, Bonett and Wright's standard error of a rank correlation on Fisher's "
        "scale, for independent windows. Each row is one test among many.",
        "The local bound is `local_rows`. The row-Gram certificate was left out: it takes "
        "seconds a window, and lies at most 1.8 times above sigma, which it would follow.",
    )


def _windows_of(study: Study, loaded: LoadedModel, text: Text) -> Record:
    count = int(loaded.config.num_hidden_layers)
    every = study.pick(count // 2, 5 if count > 12 else 1)
    decides = loaded.config.model_type != "bert"
    # The passages among which an encoder finds a neighbour are no windows that are asked.
    options: Record = {"lengths": [_TOKENS], "samples": study.pick(12, 60) * (1 if decides else 2)}
    rows = study.measure(
        f"sigma-{loaded.name}-{text.name}",
        loaded,
        text.content,
        layers=range(0, count, every),
        theorems=["local_rows"],
        **options,
    )
    maps = layers_of(loaded, text.content, map="model", layers=[0], dtype="float32", **options)
    asked = list(maps)  # windows that repeat another are left out
    key: Record = {"model": loaded.name, "text": text.name}
    scores = _next_token(loaded)
    if not decides:
        bank = torch.stack([embedding(one.output) for one in asked[1::2]]).detach()
        asked, scores = asked[::2], lambda hidden: bank @ embedding(hidden)
        key["passages"] = len(bank)
    by = {one.sample: one for one in asked}
    moves = study.values(
        f"flips-{loaded.name}-{text.name}",
        [{**key, "sample": sample} for sample in by],
        lambda sample, **_: _flip(by[sample], scores),
    )
    return {"model": loaded.name, "text": text.name, "rows": rows, "moves": moves}


def _next_token(loaded: LoadedModel) -> Scores:
    model: Any = loaded.model
    table = model.get_input_embeddings().weight.detach()
    return lambda hidden: table @ hidden[-1]


def _flip(one: LayerAtInput, scores: Scores) -> Record:
    x = one.x.detach()
    margin, move = smallest_flip(lambda e: scores(one(x + e)), x)
    sigma = top(one.linearise(x), tol=1e-2).sigma
    size = None if move is None else float(move.norm() / x.norm())
    return {"size": size, "margin": margin, "model": sigma}


def smallest_flip(scores: Scores, x: Tensor) -> tuple[float, Tensor | None]:
    """A small move that changes the largest score, and the margin without it.

    Each step is the least one that closes the gap to first order, for the nearest of a few
    rivals; then the length is halved in on, along the move that was found.

    Holds for scores that are differentiable in the move: an upper value of the smallest one. Also
    the margin of the largest score over the second one.
    Source: DeepFool (Moosavi-Dezfooli et al. 2016), over some rivals.
    """
    with torch.no_grad():
        start = scores(torch.zeros_like(x))
        first = start.topk(min(_RIVALS + 1, len(start)))
    answer, margin = int(first.indices[0]), float(first.values[0] - first.values[1])
    move = torch.zeros_like(x)
    for _ in range(_STEPS):
        point = move.clone().requires_grad_(True)
        with torch.enable_grad():
            found = scores(point)
            gaps = [found[answer] - found[rival] for rival in first.indices[1:].tolist()]
            slopes = [torch.autograd.grad(gap, point, retain_graph=True)[0] for gap in gaps]
        norms = [float(slope.norm()) for slope in slopes]
        near = {
            float(gap.detach()) / norm: slope / norm
            for gap, slope, norm in zip(gaps, slopes, norms, strict=True)
            if norm > 0
        }
        if not near:
            break
        move = move - max(_BEYOND * min(near), 1e-6 * float(x.norm())) * near[min(near)]
        if _answer(scores, move) != answer:
            return margin, _shortest(scores, move, answer)
    return margin, None


def _shortest(scores: Scores, move: Tensor, answer: int) -> Tensor:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        half = (low + high) / 2
        low, high = (low, half) if _answer(scores, half * move) != answer else (half, high)
    return high * move


def _answer(scores: Scores, move: Tensor) -> int:
    with torch.no_grad():
        return int(scores(move).argmax())


def _by_window(case: Record) -> dict[str, dict[int, float]]:
    """Predictors by name, a value for every window."""
    rows: Rows = case["rows"]
    bounds = {b.id: b.value for b in rows.bounds if b.theorem == "local_rows"}
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        values = {"sigma": row.sigma, "relative sigma": row.relative}
        for name, value in (values | {"local bound": bounds.get(row.id)}).items():
            if value is not None and math.isfinite(value):
                found.setdefault(f"{name}, layer {row.layer}", {})[row.sample] = value
    moves = {r["sample"]: r for r in case["moves"]}
    found["sigma of the model"] = {s: r["model"] for s, r in moves.items()}
    found["margin"] = {s: r["margin"] for s, r in moves.items()}
    found["margin / sigma of the model"] = {s: r["margin"] / r["model"] for s, r in moves.items()}
    return found


def _move_sizes(case: Record) -> dict[int, float]:
    return {r["sample"]: r["size"] for r in case["moves"] if r["size"] is not None}


def _correlations(case: Record) -> dict[str, tuple[float, float, float]]:
    sizes = _move_sizes(case)
    found = {}
    for name, values in _by_window(case).items():
        both = sorted(sizes.keys() & values.keys())
        found[name] = rank_correlation([values[s] for s in both], [sizes[s] for s in both])
    return found


def _of_correlations(study: Study, case: Record) -> None:
    where, found = f"{case['model']}, {case['text']}", _correlations(case)
    sizes = _move_sizes(case)
    study.claim(
        f"{where}: smallest move found, share of ‖X‖",
        "not in the paper",
        f"{middle(sizes.values(), 4)}, {len(sizes)} of {len(case['moves'])} windows",
    )
    for name in ("sigma", "relative sigma", "local bound"):
        mine = [value for key, value in found.items() if key.startswith(f"{name}, layer")]
        sure = sum(high < 0 for _, _, high in mine)
        other = sum(low > 0 for _, low, _ in mine)
        study.claim(
            f"{where}: {name} of a layer against the move, rank correlation",
            "negative if it predicts",
            f"{middle(rho for rho, _, _ in mine)} over {len(mine)} layers, negative beyond the "
            f"interval in {sure}, positive in {other}",
        )
    known = _by_window(case)
    factors = [max(known[name].values()) / min(known[name].values()) for name in _PER_WINDOW]
    study.claim(
        f"{where}: largest over smallest, among windows",
        "not in the paper",
        ", ".join(f"{n} {number(f, 3)}" for n, f in zip(_PER_WINDOW, factors, strict=True)),
    )
    for name in ("margin", "margin / sigma of the model"):
        study.claim(f"{where}: {name} against the move", "positive", _interval_of(found[name]))


def _interval_of(found: tuple[float, float, float]) -> str:
    rho, low, high = found
    return f"{rho:.2f}" + ("" if math.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def _draw_predictors(study: Study, cases: Sequence[Record]) -> None:
    panels = []
    for case in cases:
        sizes, values = _move_sizes(case), _by_window(case)
        layers = sorted({row.layer or 0 for row in case["rows"]})
        for name in (f"sigma, layer {layers[len(layers) // 2]}", "margin / sigma of the model"):
            points = tuple((v, sizes[s]) for s, v in values[name].items() if s in sizes)
            windows = Series("a window of the text", points, "points")
            where = f"{case['model']}, {case['text']}"
            panels.append(Panel(where, (windows,), x=name, y="smallest move / ‖X‖"))
    title = "What predicts the smallest move that changes an answer"
    study.draw("prediction", title, panels, columns=2)
