"""Edits of a few tokens: what singular vectors choose, against gradients, copies and chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lipscope import attack_text
from lipscope.charts import Panel, Series
from lipscope.pages import number
from lipscope.records import TextEdit, mean_interval, share_interval
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import Claim, Findings, Table

_LENGTH = 16
_PASSAGES, _LONG = 20, 100  # of each text; characters
_RIVALS = ("hotflip", "duplicate", "random")
Number = Callable[[TextEdit], float | None]


@experiment(
    "castin2024/text-edits",
    title="Edits of a few tokens that change the output most",
    cite="castin2024",
    models=("minilm", "smollm2"),
    quick_models=("minilm",),
)
def text_edits(study: Study) -> Findings:
    """One token against the model's output, a layer's, and the nearest neighbour."""
    queries, samples = study.pick((8, 2), (16, 120))
    cut = [part for text in study.texts for part in _passages(text.content)]
    passages = [*{" ".join(part.split()): part for part in cut}.values()]  # each once
    asked = {"queries": queries, "samples": samples}
    change = _asked(study, target="model", **asked)
    flips = _asked(study, target="model", between=passages, **asked)
    layer = _asked(study, target="layer", queries=queries, samples=samples // 2)
    _draw(study, change)
    tables = [
        _table("The model's output, one token", change),
        _table("The output of the middle layer's attention, one token", layer),
        _flips(flips, len(passages)),
    ]
    return Findings(
        (
            Claim(
                "windows, and how many were attacked",
                "–",
                f"{_windows(change)}; of the layer {_windows(layer)}",
            ),
            Claim("change of the model's output, one token, best try", "unknown", _means(change)),
            Claim("change of the layer's output, one token, best try", "unknown", _means(layer)),
            Claim("the model: sigma against the others", "unknown", _pairs(change)),
            Claim("the layer: sigma against the others", "unknown", _pairs(layer)),
            Claim(
                "change over what the Jacobian predicts, edits of the recipe sigma",
                "1 to first order",
                "; ".join(
                    f"{name}: {_interval([_over(one) for one in _of(found, 'sigma')])}"
                    for name, found in (("model", change), ("layer", layer))
                ),
            ),
            Claim("nearest passage changed, one token", "unknown", _rates(flips)),
        ),
        tuple(tables),
        (
            f"Windows of {_LENGTH} tokens, at most {queries} edited texts that the model reads for "
            "each window and recipe, of which the best is kept; changes are relative, "
            "‖f(X') − f(X)‖ / ‖f(X)‖, of the tokens that are no copies.",
            "Intervals are 95 %: Student's over windows, Clopper–Pearson of shares. They hold as "
            "far as windows that share no text are independent of each other.",
            "First choice: what the recipe puts first, before anything is run; of `random`, one "
            "random edit.",
            "A copy moves the positions of what follows it; what is copied and what is moved are "
            "not told apart here.",
            "Skipped windows are those whose own text is not read back as its tokens: most begin "
            "inside a word.",
        ),
    )


def _asked(study: Study, **options: Any) -> list[TextEdit]:
    found: list[TextEdit] = []
    for model, text in study.places():
        middle = getattr(model.config, "num_hidden_layers", 0) // 2
        where: dict[str, Any] = {"layer": middle, "length": _LENGTH, "out": study.folder}
        found += attack_text(model, text.content, budget=1, **where, **options).edits
    return found


def _passages(text: str) -> list[str]:
    """Passages at even distances, between the beginnings of windows."""
    step = len(text) // _PASSAGES
    return [text[i * step + step // 2 :][:_LONG] for i in range(_PASSAGES)]


# --- what is said


def _of(found: Sequence[TextEdit], recipe: str) -> list[TextEdit]:
    """Windows that were attacked."""
    return [one for one in found if one.recipe == recipe and one.status != "skipped"]


def _recipes(found: Sequence[TextEdit]) -> list[str]:
    return [*dict.fromkeys(one.recipe for one in found)]


def _interval(values: Sequence[float | None]) -> str:
    known = [one for one in values if one is not None]
    if not known:
        return "–"
    mean, low, high = mean_interval(known)
    return number(mean, 3) + ("" if math.isnan(low) else f" [{number(low, 3)}, {number(high, 3)}]")


def _share(hits: int, total: int) -> str:
    if not total:
        return "–"
    low, high = share_interval(hits, total)
    return f"{hits / total:.0%} [{low:.0%}, {high:.0%}] of {total}"


def _goal(one: TextEdit) -> float | None:
    """The change that was asked for."""
    return one.change_model if one.target == "model" else one.change_layer


def _over(one: TextEdit) -> float | None:
    change = _goal(one)
    return change / one.predicted if change is not None and one.predicted else None


def _windows(found: Sequence[TextEdit]) -> str:
    some = [one for one in found if one.recipe == "sigma"]
    return f"{len(some)} windows, {len(_of(found, 'sigma'))} attacked"


def _means(found: Sequence[TextEdit]) -> str:
    return "; ".join(
        f"{name} {_interval([_goal(one) for one in _of(found, name)])}" for name in _recipes(found)
    )


def _pairs(found: Sequence[TextEdit]) -> str:
    mine = [_goal(one) or 0.0 for one in _of(found, "sigma")]
    said = []
    for rival in _RIVALS:
        other = [_goal(one) or 0.0 for one in _of(found, rival)]
        better = sum(a > b for a, b in zip(mine, other, strict=True))
        gap = _interval([a - b for a, b in zip(mine, other, strict=True)])
        said.append(f"{rival}: larger in {_share(better, len(mine))} windows, by {gap}")
    return "; ".join(said)


def _rates(found: Sequence[TextEdit]) -> str:
    return "; ".join(
        f"{name} {_share(sum(one.status == 'succeeded' for one in some), len(some))}"
        for name in _recipes(found)
        for some in [_of(found, name)]
    )


def _table(title: str, found: Sequence[TextEdit]) -> Table:
    lines = []
    for name in _recipes(found):
        some = _of(found, name)
        columns: tuple[Number, ...] = (
            lambda one: one.first,
            lambda one: one.predicted,
            lambda one: one.change_layer,
            lambda one: one.change_model,
            lambda one: float(one.queries),
        )
        lines.append((name, *(_interval([get(one) for one in some]) for get in columns)))
    heads = ("recipe", "first choice", "predicted", "layer's change", "model's change", "queries")
    return Table(title, heads, tuple(lines))


def _flips(found: Sequence[TextEdit], passages: int) -> Table:
    lines = []
    for name in _recipes(found):
        some = _of(found, name)
        done = [one for one in some if one.status == "succeeded"]
        lines.append(
            (
                name,
                _share(len(done), len(some)),
                _interval([one.change_model for one in done]),
                _interval([float(one.queries) for one in some]),
            )
        )
    heads = ("recipe", "decision changed", "model's change, where it did", "queries")
    return Table(
        f"Which of {passages} passages is nearest by the mean output: one token",
        heads,
        tuple(lines),
    )


_NAMES = {
    "sigma": "singular vectors",
    "hotflip": "HotFlip's gradient",
    "random": "chance",
    "duplicate": "copies of a token",
}


def _draw(study: Study, found: Sequence[TextEdit]) -> None:
    curves = []
    for name in _recipes(found):
        values = sorted(one.change_model or 0.0 for one in _of(found, name))
        points = tuple(((i + 0.5) / len(values), value) for i, value in enumerate(values))
        curves.append(Series(_NAMES[name], points))
    pairs = [
        (one.predicted, one.change_model)
        for one in _of(found, "sigma")
        if one.predicted and one.change_model
    ]
    if not pairs:
        return
    most = max(max(pair) for pair in pairs)
    panels = [
        Panel(
            "one token, best of what was run",
            tuple(curves),
            x="share of windows",
            y="relative change of the model's output",
            log_x=False,
            log_y=False,
        ),
        Panel(
            "edits chosen by singular vectors, one dot a window",
            (
                Series(_NAMES["sigma"], tuple(pairs), "points"),
                Series("as predicted", ((0.0, 0.0), (most, most)), "dashes"),
            ),
            x="predicted by the Jacobian",
            y="relative change of the model's output",
            log_x=False,
            log_y=False,
        ),
    ]
    study.draw("text-edits", "Edits of one token", panels, columns=2)
