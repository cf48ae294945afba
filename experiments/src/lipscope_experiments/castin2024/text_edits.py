"""Edits of a few tokens: what singular vectors choose, against gradients, copies and chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lipscope import attack_text
from lipscope.charts import Panel, Series
from lipscope.records import SKIPPED, SUCCEEDED, TextEdit
from lipscope_experiments.experiment import Study, experiment
from lipscope_experiments.findings import average, chosen, grouped, line, percentage

_LENGTH = 16
_PASSAGES, _LONG = 20, 100  # of each text; characters
_RIVALS = ("hotflip", "duplicate", "random")
_COLUMNS = {"first choice": "first", "predicted": "predicted"}
_COLUMNS |= {"layer's change": "change_layer", "model's change": "change_model"}
_COLUMNS |= {"queries": "queries"}


@experiment("castin2024/text-edits", models=("minilm", "smollm2"))
def text_edits(study: Study) -> None:
    """Edits of a few tokens that change the output most."""
    queries, samples = study.pick((8, 2), (16, 120))
    cut = [part for text in study.texts for part in _passages(text.content)]
    passages = [*{" ".join(part.split()): part for part in cut}.values()]  # each once
    asked = {"queries": queries, "samples": samples}
    change = _edits_of(study, target="model", **asked)
    flips = _edits_of(study, target="model", between=passages, **asked)
    layer = _edits_of(study, target="layer", queries=queries, samples=samples // 2)
    _draw_edits(study, change)
    about = "windows, and how many were attacked"
    study.claim(about, "–", f"{_count_windows(change)}; of the layer {_count_windows(layer)}")
    both = {"model": change, "layer": layer}
    for name, found in both.items():
        about = f"change of the {name}'s output, one token, best try"
        by = _by_recipe(found).items()
        means = (f"{recipe} {_mean_words(map(_wanted_change, some))}" for recipe, some in by)
        study.claim(about, "unknown", "; ".join(means))
    for name, found in both.items():
        study.claim(f"the {name}: sigma against the others", "unknown", _against_rivals(found))
    study.claim(
        "change over what the Jacobian predicts, edits of the recipe sigma",
        "1 to first order",
        "; ".join(
            f"{name}: {_mean_words(map(_over_predicted, _by_recipe(found)['sigma']))}"
            for name, found in both.items()
        ),
    )
    rates = (f"{recipe} {_flip_rate(some)}" for recipe, some in _by_recipe(flips).items())
    study.claim("nearest passage changed, one token", "unknown", "; ".join(rates))
    for title, found in (
        ("The model's output, one token", change),
        ("The output of the middle layer's attention, one token", layer),
    ):
        lines = [
            (name, *(_mean_words(getattr(one, key) for one in some) for key in _COLUMNS.values()))
            for name, some in _by_recipe(found).items()
        ]
        study.table(title, lines, ("recipe", *_COLUMNS))
    lines = []
    for name, some in _by_recipe(flips).items():
        moved = _mean_words(one.change_model for one in chosen(some, status=SUCCEEDED))
        lines.append((name, _flip_rate(some), moved, _mean_words(one.queries for one in some)))
    title = f"Which of {len(passages)} passages is nearest by the mean output: one token"
    columns = ("recipe", "decision changed", "model's change, where it did", "queries")
    study.table(title, lines, columns)
    study.remark(
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
    )


def _edits_of(study: Study, **options: Any) -> list[TextEdit]:
    found: list[TextEdit] = []
    for source in study.sources():
        _, middle = source.first_and_middle
        where: dict[str, Any] = {"layer": middle, "length": _LENGTH, "out": study.folder}
        found += attack_text(source.model, **source.asked, budget=1, **where, **options).edits
    return found


def _passages(text: str) -> list[str]:
    """Passages at even distances, between the beginnings of windows."""
    step = len(text) // _PASSAGES
    return [text[i * step + step // 2 :][:_LONG] for i in range(_PASSAGES)]


def _by_recipe(found: Sequence[TextEdit]) -> dict[str, list[TextEdit]]:
    """The windows that were attacked."""
    return {
        recipe: [one for one in some if one.status != SKIPPED]
        for recipe, some in grouped(found, "recipe")
    }


def _flip_rate(some: Sequence[TextEdit]) -> str:
    return _rate(len(chosen(some, status=SUCCEEDED)), len(some))


def _mean_words(values: Iterable[float | int | None]) -> str:
    return average([one for one in values if one is not None], least=2)


def _wanted_change(one: TextEdit) -> float | None:
    return one.change_model if one.target == "model" else one.change_layer


def _rate(hits: int, total: int) -> str:
    return f"{percentage(hits, total, '.0%')} of {total}" if total else "–"


def _over_predicted(one: TextEdit) -> float | None:
    change = _wanted_change(one)
    return change / one.predicted if change is not None and one.predicted else None


def _count_windows(found: Sequence[TextEdit]) -> str:
    some = chosen(found, recipe="sigma")
    return f"{len(some)} windows, {len(_by_recipe(some)['sigma'])} attacked"


def _against_rivals(found: Sequence[TextEdit]) -> str:
    said, by = [], _by_recipe(found)
    for rival in _RIVALS:
        pairs = zip(by["sigma"], by[rival], strict=True)
        gaps = [(_wanted_change(a) or 0.0) - (_wanted_change(b) or 0.0) for a, b in pairs]
        better = _rate(sum(gap > 0 for gap in gaps), len(gaps))
        said.append(f"{rival}: larger in {better} windows, by {_mean_words(gaps)}")
    return "; ".join(said)


_NAMES = {
    "sigma": "singular vectors",
    "hotflip": "HotFlip's gradient",
    "random": "chance",
    "duplicate": "copies of a token",
}


def _draw_edits(study: Study, found: Sequence[TextEdit]) -> None:
    curves, by = [], _by_recipe(found)
    for name, some in by.items():
        places = [(i + 0.5) / len(some) for i in range(len(some))]
        curves.append(line(_NAMES[name], places, sorted(one.change_model or 0.0 for one in some)))
    pairs = [(one.predicted, one.change_model) for one in by["sigma"]]
    pairs = [(x, y) for x, y in pairs if x and y]
    if not pairs:
        return
    ends = 0.0, max(map(max, pairs))
    dots = Series(_NAMES["sigma"], pairs, "points"), line("as predicted", ends, ends, "dashes")
    y, title = "relative change of the model's output", "one token, best of what was run"
    left = Panel(title, curves, "share of windows", y, log_x=False, log_y=False)
    title = "edits chosen by singular vectors, one dot a window"
    right = Panel(title, dots, "predicted by the Jacobian", y, log_x=False, log_y=False)
    study.draw("text-edits", "Edits of one token", [left, right], columns=2)
