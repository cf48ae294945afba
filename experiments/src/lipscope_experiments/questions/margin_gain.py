"""What predicts the smallest move of a layer's stream that changes an answer: the margin's gain?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.charts import Panel
from lipscope.models import LoadedModel
from lipscope_experiments import joint_test
from lipscope_experiments.experiment import Source, Study, batch_of, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, chosen, grouped, line, middle
from lipscope_experiments.questions.precision import decides
from lipscope_experiments.simple_layers import embedding

Scores = Callable[[Tensor], Tensor]
Windows = Sequence[Sequence[Record]]
"""Of a text: what was known and what changed the answer, layer by layer."""

_TOKENS = 32
_RIVALS, _STEPS, _BISECTIONS = 3, 30, 12
_BEYOND = 1.02  # a step goes a little further than the linear model asks, as DeepFool's does
_TARGETS = {"flip": "smallest move found", "patch": "move towards another window's stream"}
MARGIN, NORM, FIRST = "margin", "norm of the stream", "margin / its gradient at the first layer"
RATIO, MARGIN_SIGMA, INDEX = "margin / gain", "margin / sigma", "index of the layer"
BASELINES = (MARGIN, NORM, FIRST)
# By name, from what is known of a layer at a window: larger where the move is expected to be.
PREDICTORS: dict[str, Callable[[Record], float]] = {
    MARGIN: lambda r: r["margin"],
    NORM: lambda r: r["norm"],
    FIRST: lambda r: r["margin"] / r["first"],
    "gain": lambda r: -r["gain"],
    RATIO: lambda r: r["margin"] / r["gain"],
    "sigma": lambda r: -r["sigma"],
    "relative sigma": lambda r: -r["relative"],
    MARGIN_SIGMA: lambda r: r["margin"] / r["sigma"],
}
TESTED = tuple(name for name in PREDICTORS if name not in BASELINES)
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
    f"texts. Baselines: {', '.join(BASELINES)}. Tested: {', '.join(TESTED)}. Sigma is that of the "
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


@experiment("questions/margin-gain", models=("minilm", "smollm2"))
def margin_gain(study: Study) -> None:
    """What predicts the smallest move that changes an answer? The margin's gain."""
    study.plan(*PLAN)
    by_model: dict[str, list[Windows]] = {}
    for source in study.sources():
        by_model.setdefault(source.model.name, []).append(_windows(study, source))
    _draw(study, by_model)
    for name, texts in by_model.items():
        _of_model(study, name, texts)
    study.remark(
        "Sigma to 1 %. A window at which a target was not reached at some layer is left out of "
        "that target. Layers of one window are not independent; the tests keep them together.",
        "Intervals over windows are Student's, 95 %.",
        "What it does not show: edits of the text, and larger models.",
    )


def _windows(study: Study, source: Source) -> Windows:
    loaded, count = source.model, source.depth
    layers = [*range(0, count, study.pick(max(count // 2, 1), 6 if source.is_deep else 1))]
    # Of encoders more: those among which one finds a neighbour are no windows that are asked.
    samples = study.pick(12, 16) if decides(loaded) else study.pick(24, 60)
    asked = source.asking(_TOKENS, samples)
    rows = study.measure(f"sigma, {source.where}", loaded, layers=layers, tol=1e-2, **asked)
    run = StreamRun(loaded, layers, asked, sorted({row.sample for row in rows}))
    bank = len(run.numbers) - len(run.order)
    key: Record = {"model": loaded.name, "text": source.name, "bank": bank}
    found = study.values(
        f"flips, {source.where}",
        [one | key for one in grid(sample=run.order, layer=layers)],
        lambda sample, layer, **_: run.flipped(sample, layer),
    )
    return [
        [
            r | {"sigma": row.sigma, "relative": row.relative, "first": mine[0]["gain"]}
            for r in mine
            for row in chosen(rows, sample=sample, layer=r["layer"])
        ]
        for sample, mine in grouped(found, "sample")
    ]


def _reached(windows: Windows, target: str) -> Windows:
    """The windows at which a target was reached at all layers."""
    return [w for w in windows if all(r[target] is not None for r in w)]


class StreamRun:
    """A model whose stream can be moved before any block, and what its answers are."""

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[int], asked: Record, numbers: Sequence[int]
    ) -> None:
        self.loaded: Any = loaded.model
        self.numbers = numbers  # of the windows: those that repeat another are left out
        self.arguments, one = batch_of(loaded, **asked), asked | {"samples": 1}
        maps = layers_of(loaded, map="block", layers=layers, dtype="float32", **one)
        self.paths = {at.layer: at.module or "" for at in maps}
        self.order = numbers[:: 1 if decides(loaded) else 2]
        if decides(loaded):
            table = self.loaded.get_input_embeddings().weight.detach()
            self.scores: Scores = lambda hidden: table @ hidden[-1]
        else:
            with torch.no_grad():
                others = [self.read(k).last_hidden_state[0] for k in numbers[1::2]]
                bank = torch.stack([embedding(one) for one in others])
            self.scores = lambda hidden: bank @ embedding(hidden)

    def read(self, sample: int, **options: Any) -> Any:
        """What the model returns for one window."""
        at = [self.numbers.index(sample)]
        mine = {name: v[at] for name, v in self.arguments.items() if isinstance(v, Tensor)}
        return self.loaded(**self.arguments | mine, **options)

    def _moved(self, sample: int, layer: int, move: Tensor) -> Tensor:
        """The last hidden state, where the stream that enters a block is moved."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: Record) -> Any:
            if args:
                return (args[0] + move, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": kwargs["hidden_states"] + move}

        block = self.loaded.get_submodule(self.paths[layer])
        with block.register_forward_pre_hook(before, with_kwargs=True):
            return self.read(sample).last_hidden_state[0]

    def flipped(self, sample: int, layer: int) -> Record:
        """Margin and gain at a layer's stream, and the sizes of moves that change the answer."""

        def scores(move: Tensor) -> Tensor:
            return self.scores(self._moved(sample, layer, move))

        after = self.order[(self.order.index(sample) + 1) % len(self.order)]
        with torch.no_grad():
            x, other = (
                self.read(one, output_hidden_states=True).hidden_states[layer][0]
                for one in (sample, after)
            )
        margin, gain, flip = deepfool(scores, x)
        moves = {"flip": flip, "patch": shortest(scores, other - x)}
        sizes = {name: None if e is None else float(e.norm()) for name, e in moves.items()}
        return {"margin": margin, "gain": gain, "norm": float(x.norm()), **sizes}


def deepfool(scores: Scores, x: Tensor) -> tuple[float, float, Tensor | None]:
    """Margin of the largest score over the next one, its gain, and a small move that changes it.

    Each step is the least one that closes the gap to first order, for the nearest of a few
    rivals; then the length is halved in on, along the move that was found: an upper value.

    Source: DeepFool (Moosavi-Dezfooli et al. 2016), over some rivals.
    """
    with torch.no_grad():
        start = scores(torch.zeros_like(x))
    answer, *rivals = start.topk(min(_RIVALS + 1, len(start))).indices.tolist()

    def gaps(move: Tensor) -> list[tuple[float, Tensor, float]]:
        """To each rival: the gap, its gradient and the norm of that."""
        point = move.clone().requires_grad_(True)
        with torch.enable_grad():
            found = scores(point)
            every = [found[answer] - found[rival] for rival in rivals]
        slopes = [torch.autograd.grad(gap, point, retain_graph=True)[0] for gap in every]
        return [(float(g.detach()), v, float(v.norm())) for g, v in zip(every, slopes, strict=True)]

    move = torch.zeros_like(x)
    near = gaps(move)
    margin, _, gain = near[0]
    for _ in range(_STEPS):
        sizes = {gap / norm: slope / norm for gap, slope, norm in near if norm > 0}
        if not sizes:
            break
        move = move - max(_BEYOND * min(sizes), 1e-6 * float(x.norm())) * sizes[min(sizes)]
        if (found := shortest(scores, move)) is not None:
            return margin, gain, found
        near = gaps(move)
    return margin, gain, None


def shortest(scores: Scores, move: Tensor) -> Tensor | None:
    """The part of a move at which the largest score changes, if it does by its end."""

    @torch.no_grad()
    def answer(part: float) -> int:
        return int(scores(part * move).argmax())

    low, high, before = 0.0, 1.0, answer(0.0)
    if answer(high) == before:
        return None
    for _ in range(_BISECTIONS):
        half = (low + high) / 2
        low, high = (low, half) if answer(half) != before else (half, high)
    return high * move


def _of_model(study: Study, name: str, texts: Sequence[Windows]) -> None:
    for target, words in _TARGETS.items():
        windows = [_reached(one, target) for one in texts]
        if min(map(len, windows)) < 3:
            study.remark(f"{name}: too few windows at which the {words} was found.")
            continue
        reached = [r for mine in windows for w in mine for r in w]
        steps = (r[target] * r["gain"] / r["margin"] for r in reached)
        parts = (r[target] / r["norm"] for r in reached)
        study.claim(f"{name}: {words} / ‖X‖", "–", middle(parts, 4))
        study.claim(f"{name}: {words} / ({RATIO})", "1 to first order, or more", middle(steps))
        truth = [joint_test.ranks([[r[target] for r in w] for w in mine]) for mine in windows]
        known = {
            key: [joint_test.ranks([[of(r) for r in w] for w in mine]) for mine in windows]
            for key, of in PREDICTORS.items()
        }
        levels = joint_test.different(known, truth)
        gaps = joint_test.better(known, truth, TESTED, BASELINES)
        lines: list[tuple[str, ...]] = [
            (
                key,
                f"{joint_test.mean_correlation(mine, truth):.2f}",
                f"{levels[key]:.3f}",
                *(joint_test.shown(gaps[key, b]) if (key, b) in gaps else "–" for b in BASELINES),
                _over_layers(windows, target, key),
            )
            for key, mine in known.items()
        ]
        lines.append((INDEX, *("–",) * 5, _over_layers(windows, target, INDEX)))
        columns = ("predictor", "mean rank correlation over windows", "joint p")
        columns += (*(f"gap to {b}" for b in BASELINES), "over layers of a window, of ‖X‖")
        count = " and ".join(str(len(mine)) for mine in windows)
        study.table(f"{name}: {words}, {count} windows", lines, columns)
        study.claim(
            f"{name}: is {RATIO} better than the baselines for the {words}?",
            "a gap to each, joint p < 0.05",
            joint_test.verdict({b: gaps[RATIO, b] for b in BASELINES}),
        )


def _over_layers(texts: Sequence[Windows], target: str, key: str) -> str:
    """The mean, over windows, of a predictor's correlation with the move / ‖X‖ over layers."""
    of, found = PREDICTORS.get(key, lambda r: r["layer"]), []
    for w in (w for windows in texts for w in windows):
        parts = [[r[target] / r["norm"]] for r in w]
        known = [of(r) / (r["norm"] if key in (RATIO, MARGIN_SIGMA) else 1.0) for r in w]
        found += joint_test.correlations([[one] for one in known], parts)
    return average([*filter(math.isfinite, found)], (-1.0, 1.0), 2)


def _draw(study: Study, by_model: Mapping[str, Sequence[Windows]]) -> None:
    panels = []
    for name, (windows, *_) in by_model.items():
        for key, target in ((RATIO, "flip"), (RATIO, "patch"), ("sigma", "flip")):
            curves = []
            for mine in zip(*_reached(windows, target), strict=True):
                known = [abs(PREDICTORS[key](r)) for r in mine]
                moves = [r[target] for r in mine]
                curves.append(line(f"layer {mine[0]['layer']}", known, moves, "points"))
            every = [x for one in curves for x, _ in one.points]
            if key == RATIO and every:
                ends = min(every), max(every)
                curves.append(line("first order", ends, ends, "dashes"))
            title = f"{name}, {windows[0][0]['text']}"
            panels.append(Panel(title, curves, key, _TARGETS[target]))
    study.draw("margin-gain", "What predicts the move that changes an answer", panels)
