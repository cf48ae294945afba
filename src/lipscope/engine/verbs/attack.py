"""Attacks: inputs with a large sigma of a layer, and edits of a few tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lipscope import records
from lipscope.attacks import RECIPES, Draft, EditSearch, Scores, WorstInput
from lipscope.display import Piece, Shown, pieces, rounded_down, rounded_up
from lipscope.engine import checks, runs
from lipscope.engine.checks import argument, no_several, one_of, whole_number, words
from lipscope.engine.classifier import BY_ANGLE, By, Classifier, decides_by, nearest_by_angle
from lipscope.engine.direction_words import mean_outputs
from lipscope.engine.plan import Job
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.spec import ADVERSARIAL, REAL, Options, Verb
from lipscope.errors import InputError
from lipscope.models import Embedded, WindowDecoder
from lipscope.pages import Rows, empty_table, number

_WORST = "worst.npz"
_WITHOUT = ("map", "per_head", "metric", "move", "read", "side", "inputs", "ascent_steps", "radius")
_ATTACK = Verb("attack", _WITHOUT, "float64", one_input=True)
_ATTACK_TEXT = Verb("attack_text", _WITHOUT, whole="An attack on a text")
_LENGTH, _SAMPLES = 64, 10
_OWN = "the model's own scores"
_READ_OUT = "the read-out given, on the mean output of the model"
_LARGEST = 10**9  # maximum budget and number of queries
_COUNTS = ("texts", "skipped", "failed", "succeeded", "rate", "edits", "queries")


@dataclass(frozen=True, repr=False)
class Attacked(Shown):
    """The result of an attack on a layer."""

    rows: Rows  # sigma at the given input, and at the worst one, measured anew
    # every construction for every head, and the ascent, worst first; if the attack is read from a
    # folder, only the first has its tokens
    found: Sequence[WorstInput]
    radius: float  # maximum token norm
    given_radius: float  # largest token norm of the given input


def attack(
    model: AnyModel = "minilm",
    data: runs.AnyData = None,
    *,
    layer: int = 0,
    length: int | None = None,
    radius: float | Literal["norm"] | None = None,
    steps: int = 40,
    out: str | Path | records.Place | None = None,
    progress: runs.Progress | None = None,
    **options: Unpack[Options],
) -> Attacked:
    """Search for inputs with a large sigma of a layer.

    Candidates are the given input, every construction for every head, then gradient ascent from the
    worst inputs of the four worst of these kinds and from four random ones. The worst is measured
    again from an independent random start, so that its interval holds. `bounds` with ``attack`` and
    the input ``adversarial`` of `measure` run the same search.

    Holds for every layer whose weights are read in closed form. A lower bound on the worst
    case, not a proof that nothing is worse. Twelve heads of width 32 at 64 tokens take about
    ten seconds on two cores.
    ``model``, ``data`` and ``progress`` are as for `measure`.

    Args:
        data: Text or a batch of one, as for `measure`; the default text if None.
        length: Number of tokens of the text window; 64 if None.
        radius: Largest token norm; ``norm`` for the largest possible one after the norm that feeds
            the layer; that of the input if None.
        steps: Number of ascent steps; 0 for constructions only.
        out: Run folder for both rows and the worst input, ``worst.npz`` (x, v); a folder of another
            attack is refused.
        **options: Options of `measure` about the input and the solver; the map is ``attention``,
            and ``dtype`` float64.

    Raises:
        InputError: If the request cannot be answered, or no input is available for this layer.
    """
    steps = argument(whole_number(0, 100_000), "steps", steps)
    asked = {**options, **runs.of_one_input(data, options, length), "layers": [layer]}
    most = argument(checks.radius, "radius", "row" if radius is None else radius)
    more = {"inputs": (REAL, ADVERSARIAL), "radius": most, "ascent_steps": steps}
    verb = {"verb": "attack"}
    with runs.LocalRun(model, data, asked, _ATTACK, more=more, out=out, asked=verb) as run:
        tried: list[WorstInput] = []

        def find() -> dict[str, Any]:
            real, worse = run.jobs
            at, given = run.at(real), run.at(real).radius
            tried.extend(run.at(worse).built_input.tried)
            first = tried[0]
            assert first.x is not None
            v = first.v if first.v is not None else torch.zeros_like(first.x)
            run.save(_WORST, {"x": first.x, "v": v})
            radius = at.allowed[0] or given
            plain = [{k: v for k, v in vars(one).items() if k not in ("x", "v")} for one in tried]
            return {"found": plain, "radius": radius, "given_radius": given}

        tell = runs.as_callback(progress)
        tell(0, 2, None)
        held = run.once("attack", {}, find, _WORST)
        rows = run.rows(tell)
        if not tried:  # the folder has the attack
            assert run.folder is not None
            tried = [WorstInput(**one, x=None, v=None) for one in held["found"]]
            with np.load(run.folder.path / _WORST, allow_pickle=False) as arrays:
                x, v = (torch.from_numpy(arrays[name]) for name in ("x", "v"))
            tried[0] = replace(tried[0], x=x, v=v)
    return Attacked(rows, tried, held["radius"], held["given_radius"])


# --- texts


class EditOptions(Options, total=False):
    """Options of `attack_text`, documented there."""

    recipes: str | Sequence[str]
    queries: int
    target: Literal["model", "layer"]
    between: Sequence[str] | None
    read_out: str | Path | Classifier | None


_DEFAULTS: dict[str, Any] = {"recipes": RECIPES, "queries": 32, "target": "model"}
_DEFAULTS |= {"between": None, "read_out": None}


@dataclass(frozen=True, repr=False)
class TextAttack(Shown):
    """The result of editing a few tokens."""

    rows: Rows  # sigma of the layer at every window
    edits: tuple[records.TextEdit, ...]  # every window and recipe
    by: str = ""  # description of the decision; "" if there is none

    def summary(self) -> list[records.RecipeSummary]:
        """One entry per recipe."""
        return [
            records.summed(recipe, [one for one in self.edits if one.recipe == recipe])
            for recipe in dict.fromkeys(one.recipe for one in self.edits)
        ]


def attack_text(
    model: AnyModel = "minilm",
    data: str | Path | None = None,
    *,
    budget: int = 1,
    layer: int = 0,
    length: int | None = None,
    samples: int | None = None,
    out: runs.AnyFolder = None,
    progress: runs.Progress | None = None,
    **options: Unpack[EditOptions],
) -> TextAttack:
    """Edit at most ``budget`` tokens of a text to change the output as much as possible.

    A recipe ranks the edits; the first ones that survive as text (decoded and tokenised again they
    are the same tokens) are run; the best is kept, and the next token is edited.

    - ``sigma``: substitutions by ``‖S V^T δ‖``, S and V the leading singular values and vectors
      of the output's Jacobian in the token vectors, δ the move in the embedding table.
    - ``hotflip``: substitutions by ``<gradient, δ>`` [ebrahimi2018]: of the margin of a decision,
      or else of ``‖f(X') - f(X)‖² / 2`` at a point near X.
    - ``duplicate``: copies of a token after it, which give it more weight, by the derivative of
      the layer's output with respect to the logarithm of its weight.
    - ``random``: substitutions in random order.

    If there is a decision, recipes rank edits in the same way, keep the one with the smallest
    margin, and stop when the decision changes. It is that of the model's own scores, if it ends in
    scores, or the nearest of some texts, or that of a read-out.

    Holds for models that read a single text through an embedding table. A lower bound on the effect
    of edits, not a proof that none does more.
    ``model`` and ``progress`` are as for `measure`.

    Args:
        data: The text, or its path; the default text if None.
        budget: Maximum number of substituted tokens, or of inserted copies.
        length: Number of tokens of the windows; 64 if None.
        samples: Number of windows; 10 if None.
        out: Run folder: rows of sigma, and the edits as values of the part ``edits``.
        **options: Options of `measure` about the input and the solver, and

            * ``recipes``: names of recipes; all by default; ``queries=32``: maximum number of
              edited texts for the model to read, per window and recipe.
            * ``target="model"``: the output to change, that of the model or of the ``layer``'s
              attention.
            * ``between``: texts; the decision is the one whose mean output has the smallest
              angle to that of the window; ``read_out``: a file as for ``lipscope certify
              --read-out``, or a `Classifier`, on the mean output of the model.

    Raises:
        InputError: If the request cannot be answered.
    """
    no_several(options)
    asked: dict[str, Any] = dict(options)
    own = {name: asked.pop(name, usual) for name, usual in _DEFAULTS.items()}
    between, read_out = own["between"], own["read_out"]
    budget = argument(whole_number(1, _LARGEST), "budget", budget)
    queries = argument(whole_number(1, _LARGEST), "queries", own["queries"])
    if queries < budget:
        raise InputError(
            f"`queries` should be at least the budget, one for each edit. Found {queries} for "
            f"`budget = {budget}`."
        )
    recipes = argument(words(RECIPES), "recipes", own["recipes"])
    target = argument(one_of("model", "layer"), "target", own["target"])
    if not runs.is_text(data, options):
        raise InputError(
            "Token edits need a text. Found a batch or pictures; leave `budget` out, or give a "
            "text."
        )
    by = decides_by(between, read_out)
    wanted: dict[str, Any] = {"budget": budget, "queries": queries, "target": target}
    wanted["decision"] = by.digests if isinstance(by, Classifier) else [*(by or ())]
    asked |= {"layers": [layer], "lengths": _LENGTH if length is None else length}
    asked["samples"] = _SAMPLES if samples is None else samples
    verb = {"verb": "attack", "recipes": list(recipes), **wanted}
    with runs.LocalRun(model, data, asked, _ATTACK_TEXT, out=out, asked=verb) as run:
        rows = run.rows()
        edits = _Windows(run, wanted, by)
        jobs = [(*one, recipe) for one in zip(run.jobs, rows, strict=True) for recipe in recipes]
        found: list[records.TextEdit] = []
        tell = runs.as_callback(progress)
        for job, row, recipe in jobs:
            tell(len(found), len(jobs), row if edits.anew else None)
            found.append(edits.edited(job, row, recipe))
        tell(len(jobs), len(jobs), rows[-1] if edits.anew else None)
    label = _OWN if by is None else _READ_OUT if isinstance(by, Classifier) else BY_ANGLE
    return TextAttack(rows, tuple(found), label if any(one.decision for one in found) else "")


class _Windows:
    """The windows of a run, with a cache of the last one, and the edits in its folder."""

    def __init__(self, run: runs.LocalRun, wanted: Mapping[str, Any], by: By) -> None:
        self._run, self._wanted, self._by = run, wanted, by
        self._at: tuple[str, EditSearch] | None = None
        self._classes: Classifier | None = None
        self.anew = False

    def edited(self, job: Job, row: records.Measurement, recipe: str) -> records.TextEdit:
        """The edits of a window by a recipe."""
        key = records.stable_id({"id": row.id, "recipe": recipe, **self._wanted})
        held = self._run.value(records.EDITS, key, lambda: self._made(job, row, recipe))
        return records.TextEdit(**held)

    def _made(self, job: Job, row: records.Measurement, recipe: Any) -> records.TextEdit:
        self.anew = True
        budget, queries = self._wanted["budget"], self._wanted["queries"]
        search = self._search(job, row)
        written, ids = search.written, search.start.ids
        self._check(written, ids, recipe, budget)
        about = (row.id, row.sample, row.start, len(ids), recipe, self._wanted["target"])
        before = written.text(ids)
        if not written.survives(ids):
            return records.TextEdit(*about, records.SKIPPED, before=before)
        found = search.run(recipe, budget=budget, queries=queries)
        draft, first = found.draft, search.decision
        done = bool(draft.edits) if first is None else found.decided != first
        known = self._classes.names if self._classes is not None else ()
        return records.TextEdit(
            *about,
            records.SUCCEEDED if done else records.FAILED,
            edits=_edits_in_words(draft, written),
            changed=len(draft.edits),
            before=before,
            after=written.text(draft.ids),
            change_layer=found.change_layer,
            change_model=found.change_model,
            first=found.first,
            predicted=search.predicted(draft),
            sigma=float(search.singular[0][0]),
            moved=search.moved(draft),
            queries=found.queries,
            products=found.products,
            decision=_class_name(first, known),
            decided=_class_name(found.decided, known),
        )

    def _search(self, job: Job, row: records.Measurement) -> EditSearch:
        if self._at is not None and self._at[0] == row.id:
            return self._at[1]
        at = self._run.at(job)
        built, trace = at.map, at.window.trace
        embedded = Embedded(trace.model, at.window.arguments, trace, job.layer or 0)
        loaded = self._run.model.loaded
        written = WindowDecoder(
            loaded.reader_of_text(), special_tokens=self._run.spec.special_tokens
        )
        layer = None if built.attention is None else (built.attention, built.x)
        name = f"{row.seed}|{row.id}"
        search = EditSearch(
            embedded, written, self._wanted["target"], layer, self._scores(embedded), name
        )
        self._at = (row.id, search)
        return search

    def _scores(self, embedded: Embedded) -> Scores | None:
        """A function from the model's output to class scores; None without a decision."""
        own = embedded.read(embedded.ids[None]).model
        by = self._by
        if by is None:
            return (lambda y: y) if own.ndim == 2 and own.shape[1] > 1 else None
        if own.ndim != 3:
            raise InputError(
                "A decision by texts or a read-out needs a model with an output for every token. "
                "Found one that ends in scores of its own; leave `between` and `read_out` out."
            )
        if self._classes is None:
            self._classes = by if isinstance(by, Classifier) else self._nearest(by, embedded)
        classes = self._classes
        classes.scores(own[0, 0])  # refuses another width before the search
        return lambda y: classes.scores(y.mean(1))

    def _nearest(self, texts: Sequence[str], embedded: Embedded) -> Classifier:
        """A classifier of texts by the angle between their mean outputs and that of a window."""

        def output(ids: Tensor) -> Tensor:
            return embedded.read(ids.to(embedded.ids.device)).model[0]

        loaded, special = self._run.model.loaded, self._run.spec.special_tokens
        return nearest_by_angle(mean_outputs(texts, loaded, special, output))

    def _check(self, written: WindowDecoder, ids: Sequence[int], recipe: str, budget: int) -> None:
        own, most = len(written.editable(ids)), self._run.model.loaded.max_tokens
        if budget > own:
            raise InputError(
                f"`budget` should be at most {own}, the tokens of a window's text. Found {budget}."
            )
        if recipe == "duplicate" and most is not None and len(ids) + budget > most:
            raise InputError(
                f"`length` should leave room for copies: at most {most - budget}, the positions "
                f"of `{self._run.model.name}` less the budget. Found {len(ids)}."
            )


def _class_name(decision: int | None, names: Sequence[str]) -> str | None:
    return None if decision is None else names[decision] if names else str(decision)


def _edits_in_words(draft: Draft, written: WindowDecoder) -> str:
    """``old → new`` with the positions."""
    words = []
    for edit in draft.edits:
        old, new = written.names([edit.old, edit.new])
        words.append(f"{edit.index}: {old} → {new if edit.new != edit.old else f'{old} {old}'}")
    return "; ".join(words)


# --- display


def _ends(sigma: float | None, upper: float | None) -> tuple[str, str]:
    return number(sigma, 4, rounded_down), number(upper, 4, rounded_up)


@pieces.register
def _attacked(found: Attacked) -> Iterator[Piece]:
    """The best head of each construction, next to the given input."""
    real, worst = found.rows[0], found.rows[1]
    made = empty_table(
        f"{real.model}, layer {real.layer}, map {real.map}, {real.num_tokens} tokens, "
        f"radius {found.radius:.4g}",
        ("input", "origin", "source", "head"),
        ("sigma", "upper", "× text"),
    )
    radius = f"radius {found.given_radius:.4g}"
    ends = (*_ends(real.sigma, real.upper), "1")
    made.add_row("real text", radius, "", "", *ends, end_section=True)
    seen: set[str] = set()
    for one in found.found:
        if one.sigma is None or one.name in seen:
            continue
        again = (worst.sigma, worst.upper) if not seen else (one.sigma, one.upper)
        seen.add(one.name)
        head = "" if one.head is None else str(one.head)
        made.add_row(
            *(Text(cell) for cell in (one.name, one.statement, one.cite, head)),
            *_ends(*again),
            number(one.sigma / real.sigma, 3) if real.sigma else "–",
        )
    yield made
    yield (
        "Each construction is for the head with the largest sigma of the whole layer. The first is "
        "measured again from a fresh start. A lower bound on the worst case, not a proof that "
        "nothing is worse."
    )
    reasons = dict.fromkeys((one.name, one.reason) for one in found.found if one.sigma is None)
    for name, reason in reasons:
        yield f"{name}: not available, {reason}"


@pieces.register
def _edited(found: TextAttack) -> Iterator[Piece]:
    """A summary of each recipe over all windows, then every edit."""
    first = found.rows[0]
    made = empty_table(
        f"{first.model}, layer {first.layer}, {first.num_tokens} tokens",
        ("recipe",),
        (*_COUNTS, "layer", "model"),
    )
    for one in found.summary():
        counts = (one.originals, one.skipped, one.failed, one.succeeded)
        made.add_row(
            Text(one.recipe),
            *map(str, counts),
            "–" if one.rate is None else f"{one.rate:.0%}",
            *(number(value, 3) for value in (one.changed, one.queries)),
            *(number(value, 3) for value in (one.change_layer, one.change_model)),
        )
    yield made
    yield _edits(found)
    what = f"the decision changed ({found.by})" if found.by else "a text with edits was found"
    yield (
        f"Succeeded: {what}. Skipped: the window's own text is not read back as its tokens. "
        "Layer and model: relative change of their outputs, ‖f(X') − f(X)‖ / ‖f(X)‖; means over "
        "successful edits. A lower bound on the effect of edits, not a proof that none does more."
    )


def _edits(found: TextAttack) -> Table:
    """The edits of every window and their effects."""
    names = ("window", "recipe", "edits"), ("layer", "model", "first order", "queries")
    decided = any(one.decision is not None for one in found.edits)
    made = empty_table("", (*names[0], *(["decision"] if decided else [])), names[1])
    for one in found.edits:
        done = one.edits if one.changed else one.status
        change = "" if one.decision is None else f"{one.decision} → {one.decided}"
        numbers = (one.change_layer, one.change_model, one.predicted)
        cells = (str(one.sample), one.recipe, done, *([change] if decided else []))
        made.add_row(*map(Text, cells), *(number(value, 3) for value in numbers), str(one.queries))
    return made
