"""What predicts the smallest move of a layer's stream that changes an answer: the margin's gain?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.charts import Panel, Series
from lipscope.models import LoadedModel, inputs_of
from lipscope_experiments.experiment import Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, middle
from lipscope_experiments.joint_test import better, different, mean_correlation, ranks
from lipscope_experiments.simple_layers import embedding
from lipscope_experiments.texts import Text

Scores = Callable[[Tensor], Tensor]

_TOKENS = 32
_RIVALS, _STEPS, _BISECTIONS = 3, 30, 12
_BEYOND = 1.02  # a step goes a little further than the linear model asks, as DeepFool's does
_TARGETS = {"flip": "smallest move found", "patch": "move towards another window's stream"}
MARGIN, NORM, FIRST = "margin", "norm of the stream", "margin / its gradient at the first layer"
RATIO = "margin / gain"
BASELINES = (MARGIN, NORM, FIRST)
# By name: its sign where it predicts, and its value from what is known of a layer at a window.
PREDICTORS: dict[str, tuple[float, Callable[[Record], float]]] = {
    MARGIN: (1.0, lambda r: r["margin"]),
    NORM: (1.0, lambda r: r["norm"]),
    FIRST: (1.0, lambda r: r["margin"] / r["first"]),
    "gain": (-1.0, lambda r: r["gain"]),
    RATIO: (1.0, lambda r: r["margin"] / r["gain"]),
    "sigma": (-1.0, lambda r: r["sigma"]),
    "relative sigma": (-1.0, lambda r: r["relative"]),
    "margin / sigma": (1.0, lambda r: r["margin"] / r["sigma"]),
}
PLAN = (
    "Question: does the gain of the margin, ‖∇(score of the answer − that of the next one)‖ by "
    "the stream that enters a block, predict how far that stream must move before the answer "
    "changes, better than sigma, norms and the margin alone?",
    f"Windows of {_TOKENS} tokens. Answers: of a decoder the likeliest next token; of an encoder "
    "the nearest, by cosine of the mean token, of as many other windows, none of which is asked. "
    "Two targets at each layer, both ‖E‖_F over all tokens: the smallest move found by steps to "
    f"the nearest of {_RIVALS} rivals (DeepFool, then bisection), an upper value of the smallest; "
    "and the point where the answer changes on the way to the next window's stream (patching), "
    "which is not built of gradients.",
    "Statistic: Spearman's correlation over windows, layer by layer, its mean over layers and "
    f"texts. Baselines: {', '.join(BASELINES)}. Tested: "
    f"{', '.join(name for name in PREDICTORS if name not in BASELINES)}. Sigma is that of the "
    "layer's attention. Signs as a first-order argument gives them; a correlation of the other "
    "sign counts as found, and is printed negative.",
    "Two joint tests for each model and target: targets permuted over windows within a text, "
    "alike at all layers (largest |mean| over all predictors); and tested predictor and baseline "
    "swapped in whole windows (largest gap over all pairs). 2,000 draws each.",
    f"`{RATIO}` is refuted as advice where its gap to any of the three baselines has joint "
    "p ≥ 0.05; as first-order truth where the median of move / (margin / gain) is outside 0.8 to "
    "1.25. The first target's search starts along that gradient, so that a high correlation with "
    "it alone would not do: the second one must agree.",
    "Second statistic: the same correlations over the layers of one window, with moves as parts "
    "of ‖X‖ for the norm not to decide; baseline: index of the layer.",
)


@experiment(
    "questions/margin-gain",
    title="What predicts the smallest move that changes an answer? The margin's gain",
    cite="derived here",
    models=("minilm", "smollm2"),
)
def margin_gain(study: Study) -> None:
    """Rank correlations with moves that change the answer, by layer, beside baselines."""
    study.plan(*PLAN)
    cases = [_case_of(study, *place) for place in study.places()]
    _draw(study, cases)
    for name in dict.fromkeys(case.model for case in cases):
        _of_model(study, name, [case for case in cases if case.model == name])
    study.remark(
        "Sigma to 1 %. A window at which a target was not reached at some layer is left out of "
        "that target. Layers of one window are not independent; the tests keep them together.",
        "Intervals over windows are Student's, 95 %.",
    )


@dataclass(frozen=True)
class FlipCase:
    """A model on a text: by layer and window, what was known and what changed the answer."""

    model: str
    text: str
    layers: list[int]
    records: dict[int, list[Record]]  # by window, layers in order

    def known(self, target: str) -> list[list[Record]]:
        """The windows at which a target was reached at all layers."""
        return [w for w in self.records.values() if all(r[target] is not None for r in w)]


def _case_of(study: Study, loaded: LoadedModel, text: Text) -> FlipCase:
    count = int(loaded.config.num_hidden_layers)
    layers = [*range(0, count, study.pick(max(count // 2, 1), 6 if count > 12 else 1))]
    decides = loaded.config.model_type != "bert"
    # The passages among which an encoder finds a neighbour are no windows that are asked.
    samples = study.pick(12, 16) if decides else study.pick(24, 60)
    options: Record = {"lengths": [_TOKENS], "samples": samples}
    where = f"{loaded.name}, {text.name}"
    rows = study.measure(
        f"sigma, {where}", loaded, text.content, layers=layers, tol=1e-2, **options
    )
    run = functools.cache(lambda: StreamRun(loaded, text.content, layers, options))
    held = sorted({row.sample for row in rows})
    asked = held if decides else held[::2]
    key: Record = {
        "model": loaded.name,
        "text": text.name,
        "bank": 0 if decides else len(held) // 2,
    }
    found = study.values(
        f"flips, {where}",
        [one | key for one in grid(sample=asked, layer=layers)],
        lambda sample, layer, **_: run().flipped(sample, layer),
    )
    sigma = {(row.sample, row.layer): (row.sigma, row.relative) for row in rows}
    by: dict[int, list[Record]] = {}
    for one in found:
        at = sigma[one["sample"], one["layer"]]
        mine = by.setdefault(one["sample"], [])
        first = mine[0]["gain"] if mine else one["gain"]
        mine.append(one | {"sigma": at[0], "relative": at[1], "first": first})
    return FlipCase(loaded.name, text.name, layers, by)


class StreamRun:
    """A model whose stream can be moved before any block, and what its answers are."""

    def __init__(
        self, loaded: LoadedModel, content: str, layers: Sequence[int], options: Record
    ) -> None:
        self.loaded: Any = loaded.model
        items = inputs_of(loaded, content, windows="spread", special_tokens=True, **options)
        self.arguments = {item.sample: dict(item.arguments) for item in items}
        one = options | {"samples": 1}
        maps = layers_of(loaded, content, map="block", layers=layers, dtype="float32", **one)
        self.paths = {at.layer: at.module or "" for at in maps}
        table = self.loaded.get_input_embeddings().weight.detach()
        self.scores: Scores = lambda hidden: table @ hidden[-1]
        self.order = list(self.arguments)
        if loaded.config.model_type == "bert":
            self.order = self.order[::2]
            others = [k for k in self.arguments if k not in self.order]
            with torch.no_grad():
                bank = torch.stack([embedding(self._hidden(k, 0, None)[1]) for k in others])
            self.scores = lambda hidden: bank @ embedding(hidden)

    def _hidden(self, sample: int, layer: int, move: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream that enters a block, moved if asked, and the last hidden state."""
        held: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: Record) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            x = x if move is None else x + move
            held.append(x[0])
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

        block = self.loaded.get_submodule(self.paths[layer])
        hook = block.register_forward_pre_hook(before, with_kwargs=True)
        try:
            hidden = self.loaded(**self.arguments[sample]).last_hidden_state[0]
        finally:
            hook.remove()
        return held[0], hidden

    def flipped(self, sample: int, layer: int) -> Record:
        """Margin and gain at a layer's stream, and the sizes of moves that change the answer."""

        def scores(move: Tensor) -> Tensor:
            return self.scores(self._hidden(sample, layer, move)[1])

        after = self.order[(self.order.index(sample) + 1) % len(self.order)]
        with torch.no_grad():
            x = self._hidden(sample, layer, None)[0]
            other = self._hidden(after, layer, None)[0]
        move = torch.zeros_like(x).requires_grad_(True)
        with torch.enable_grad():
            first, second = scores(move).topk(2).values
            (slope,) = torch.autograd.grad(first - second, move)
        margin, flip = deepfool(scores, x)
        answer, patch = answer_at(scores, 0 * x), other - x
        moved = answer_at(scores, patch) != answer
        return {
            "margin": margin,
            "gain": float(slope.norm()),
            "norm": float(x.norm()),
            "flip": None if flip is None else float(flip.norm()),
            "patch": float(_shortest(scores, patch, answer).norm()) if moved else None,
        }


def deepfool(scores: Scores, x: Tensor) -> tuple[float, Tensor | None]:
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
        if answer_at(scores, move) != answer:
            return margin, _shortest(scores, move, answer)
    return margin, None


def _shortest(scores: Scores, move: Tensor, answer: int) -> Tensor:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        half = (low + high) / 2
        low, high = (low, half) if answer_at(scores, half * move) != answer else (half, high)
    return high * move


def answer_at(scores: Scores, move: Tensor) -> int:
    """Index of the largest score after a move."""
    with torch.no_grad():
        return int(scores(move).argmax())


def _of_model(study: Study, name: str, cases: Sequence[FlipCase]) -> None:
    for target, words in _TARGETS.items():
        windows = [case.known(target) for case in cases]
        if min(map(len, windows)) < 3:
            study.remark(f"{name}: too few windows at which the {words} was found.")
            continue
        reached = [r for mine in windows for w in mine for r in w]
        steps = [r[target] * r["gain"] / r["margin"] for r in reached]
        parts = (r[target] / r["norm"] for r in reached)
        study.claim(f"{name}: {words} / ‖X‖", "–", middle(parts, 4))
        study.claim(f"{name}: {words} / ({RATIO})", "1 to first order, or more", middle(steps))
        truth = [ranks([[r[target] for r in w] for w in mine]) for mine in windows]
        known = {
            key: [ranks([[sign * of(r) for r in w] for w in mine]) for mine in windows]
            for key, (sign, of) in PREDICTORS.items()
        }
        levels = different(known, truth)
        tested = [key for key in PREDICTORS if key not in BASELINES]
        gaps = better(known, truth, tested, BASELINES)
        lines = []
        for key, mine in known.items():
            wins = ("–",) * len(BASELINES)
            if key in tested:
                wins = tuple("{:+.2f} (p {:.3f})".format(*gaps[key, b]) for b in BASELINES)
            rho = mean_correlation(mine, truth)
            lines.append(
                (key, f"{rho:.2f}", f"{levels[key]:.3f}", *wins, _over_layers(windows, target, key))
            )
        columns = ("predictor", "mean rank correlation over windows", "joint p")
        columns += (*(f"gap to {b}" for b in BASELINES), "over layers of a window, of ‖X‖")
        lines.append(("index of the layer", *("–",) * 5, _over_layers(windows, target, None)))
        count = " and ".join(str(len(mine)) for mine in windows)
        study.table(f"{name}: {words}, {count} windows", lines, columns)
        lost = [b for b in BASELINES if gaps[RATIO, b][1] >= 0.05]
        study.claim(
            f"{name}: is {RATIO} better than the baselines for the {words}?",
            "a gap to each, joint p < 0.05",
            "; ".join("{} {:+.2f} (p {:.3f})".format(b, *gaps[RATIO, b]) for b in BASELINES)
            + (f". Refuted by {', '.join(lost)}" if lost else ". Not refuted"),
        )


def _over_layers(windows: Sequence[list[list[Record]]], target: str, key: str | None) -> str:
    """The mean, over windows, of a predictor's correlation with the move / ‖X‖ over layers."""
    found = []
    for w in (w for mine in windows for w in mine):
        sign, of = (1.0, lambda r: r["layer"]) if key is None else PREDICTORS[key]
        scale = [r["norm"] if key in (RATIO, "margin / sigma") else 1.0 for r in w]
        mine = [[sign * of(r) / s for r, s in zip(w, scale, strict=True)]]
        if len(set(mine[0])) > 1:
            parts = ranks([[r[target] / r["norm"]] for r in w])
            found.append(float((ranks([[v] for v in mine[0]]) * parts).sum()))
    return average(found, (-1.0, 1.0), 2)


def _draw(study: Study, cases: Sequence[FlipCase]) -> None:
    panels = []
    for name in dict.fromkeys(case.model for case in cases):
        case = next(case for case in cases if case.model == name)
        for key, target in ((RATIO, "flip"), (RATIO, "patch"), ("sigma", "flip")):
            series = []
            for at, layer in enumerate(case.layers):
                mine = [w[at] for w in case.known(target)]
                points = [(PREDICTORS[key][1](r), r[target]) for r in mine]
                series.append(Series(f"layer {layer}", tuple(points), "points"))
            if key == RATIO:
                every = [x for one in series for x, _ in one.points]
                if every:
                    ends = min(every), max(every)
                    series.append(Series("first order", tuple((v, v) for v in ends), "dashes"))
            panels.append(Panel(f"{name}, {case.text}", tuple(series), key, _TARGETS[target]))
    study.draw("margin-gain", "What predicts the move that changes an answer", panels)
