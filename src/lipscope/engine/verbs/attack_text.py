"""Attacks on a text: a few tokens edited so that the model's output changes most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import Tensor

from lipscope.attacks import RECIPES, Draft, EditSearch, Scores
from lipscope.engine.checks import argument, no_several, one_of, whole, words
from lipscope.engine.classifier import (
    BY_ANGLE,
    Classifier,
    nearest_by_angle,
    read_out_of,
)
from lipscope.engine.plan import Job
from lipscope.engine.progress import Progress, told
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyFolder, LocalRun, is_text
from lipscope.engine.spec import Options
from lipscope.engine.text_edits import TextAttack
from lipscope.engine.verbs.attack import WITHOUT
from lipscope.errors import InputError
from lipscope.models import Embedded, WindowDecoder
from lipscope.records import EDITS, FAILED, SKIPPED, SUCCEEDED, Measurement, TextEdit, stable_id

_LENGTH, _SAMPLES = 64, 10
_OWN = "the model's own scores"
_READ_OUT = "the read-out given, on the mean output of the model"
_LARGEST = 10**9  # budgets and queries


def attack_text(
    model: AnyModel = "minilm",
    data: str | Path | None = None,
    *,
    budget: int = 1,
    recipes: str | Sequence[str] = RECIPES,
    queries: int = 32,
    target: Literal["model", "layer"] = "model",
    layer: int = 0,
    length: int | None = None,
    samples: int | None = None,
    between: Sequence[str] | None = None,
    read_out: str | Path | Classifier | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> TextAttack:
    """Edit at most ``budget`` tokens of a text so that the output changes most.

    The recipes order the edits, and the first that a text can carry (written and read again
    they are the same tokens) are run; the best is kept, and the next token is edited.

    - ``sigma``: substitutions by ``‖S V^T δ‖``, S and V the leading singular values and vectors
      of the output's Jacobian in the token vectors, δ the move in the embedding table.
    - ``hotflip``: substitutions by ``<gradient, δ>`` [ebrahimi2018]: of the margin of a decision,
      or else of ``‖f(X') - f(X)‖² / 2`` at a point beside X.
    - ``duplicate``: copies of a token after it, which give it more weight, by the derivative of
      the layer's output in the logarithm of its weight.
    - ``random``: substitutions in random order.

    Where there is a decision, the recipes run what they order in the same way, keep what makes its
    margin smallest, and stop where it changes. It is that of the model's own scores, where it ends
    in scores, or the nearest of some texts, or that of a read-out.

    Holds for models that read one text through a table of token vectors. A lower bound on what
    edits can do: no proof that none does more.

    Args:
        model: As for `measure`.
        data: The text, or its path; the default text if None.
        budget: Tokens that may be substituted, or copies that may be put in.
        recipes: Names; all if not given.
        queries: Edited texts that the model may read, for each window and recipe.
        target: Whose output should change: the ``model``'s, or the ``layer``'s attention.
        layer: Index of the layer from 0.
        length: Number of tokens of the windows; 64 if None.
        samples: Number of windows; 10 if None.
        between: Texts; what is decided is which of them has the mean output of the smallest angle
            with that of the window.
        read_out: A file as for ``lipscope certify --read-out``, or a `Classifier`, on the mean
            output of the model.
        out: Run folder: rows of sigma, and the edits as values of the part ``edits``.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``.
        **options: Those of `measure` about the input and the solver.

    Returns:
        What was found.

    Raises:
        InputError: For every request that cannot be answered as asked.
    """
    no_several(options)
    budget = argument(whole(1, _LARGEST), "budget", budget)
    queries = argument(whole(1, _LARGEST), "queries", queries)
    if queries < budget:
        raise InputError(
            f"`queries` should be at least the budget, one for each edit. Found {queries} for "
            f"`budget = {budget}`."
        )
    recipes = argument(words(RECIPES), "recipes", recipes)
    target = argument(one_of("model", "layer"), "target", target)
    if not is_text(data, options):
        raise InputError(
            "Token edits are of texts. Found a batch or pictures; leave `budget` out, or give a "
            "text."
        )
    decides = between is not None or read_out is not None
    given = read_out_of(between, read_out) if decides else None
    between = between or ()
    wanted = {"budget": budget, "queries": queries, "target": target}
    wanted |= {"decision": _decision_key(between, given)}
    asked = dict(options) | {"layers": [layer], "lengths": _LENGTH if length is None else length}
    asked["samples"] = _SAMPLES if samples is None else samples
    with LocalRun(
        model,
        data,
        asked,
        verb="attack",
        without=WITHOUT,
        out=out,
        asked={"verb": "attack", "recipes": list(recipes), **wanted},
    ) as run:
        rows = run.rows()
        edits = _Windows(run, wanted, between, given)
        jobs = [(*one, recipe) for one in zip(run.jobs, rows, strict=True) for recipe in recipes]
        found: list[TextEdit] = []
        tell = told(progress)
        for job, row, recipe in jobs:
            tell(len(found), len(jobs), row if edits.anew else None)
            found.append(edits.edited(job, row, recipe))
        tell(len(jobs), len(jobs), rows[-1] if edits.anew else None)
    by = BY_ANGLE if between else _READ_OUT if given else _OWN
    return TextAttack(rows, tuple(found), by if any(one.decision for one in found) else "")


class _Windows:
    """The windows of a run, of which the last one is at hand; edits that its folder holds."""

    def __init__(
        self,
        run: LocalRun,
        wanted: Mapping[str, Any],
        between: Sequence[str],
        given: Classifier | None,
    ) -> None:
        self._run, self._wanted, self._between, self._given = run, wanted, between, given
        self._held = {} if run.folder is None else run.folder.values(EDITS)
        self._at: tuple[str, EditSearch] | None = None
        self._classes: Classifier | None = None
        self.anew = False

    def edited(self, job: Job, row: Measurement, recipe: str) -> TextEdit:
        """What a recipe does to a window."""
        key = stable_id({"id": row.id, "recipe": recipe, **self._wanted})
        if key not in self._held:
            self.anew = True
            self._held[key] = asdict(self._made(job, row, recipe))
            if self._run.folder is not None:
                self._run.folder.add_value(EDITS, key, self._held[key])
        return TextEdit(**self._held[key])

    def _made(self, job: Job, row: Measurement, recipe: Any) -> TextEdit:
        budget, queries = self._wanted["budget"], self._wanted["queries"]
        search = self._search(job, row)
        written, ids = search.written, search.start.ids
        self._check(written, ids, recipe, budget)
        about = (row.id, row.sample, row.start, len(ids), recipe, self._wanted["target"])
        before = written.text(ids)
        if not written.survives(ids):
            return TextEdit(*about, SKIPPED, before=before)
        found = search.run(recipe, budget=budget, queries=queries)
        draft, first = found.draft, search.decision
        done = bool(draft.edits) if first is None else found.decided != first
        known = self._classes.names if self._classes is not None else ()
        return TextEdit(
            *about,
            SUCCEEDED if done else FAILED,
            edits=_in_words(draft, written),
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
            decision=_named(first, known),
            decided=_named(found.decided, known),
        )

    def _search(self, job: Job, row: Measurement) -> EditSearch:
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
        """From the output of the model to the scores of classes; None if nothing is decided."""
        own = embedded.read(embedded.ids[None]).model
        if not self._between and self._given is None:
            return (lambda y: y) if own.ndim == 2 and own.shape[1] > 1 else None
        if own.ndim != 3:
            raise InputError(
                "A decision by texts or a read-out needs a model with an output for every token. "
                "Found one that ends in scores of its own; leave `between` and `read_out` out."
            )
        if self._classes is None:
            self._classes = self._given or self._nearest(embedded)
        weight = self._classes.weight.to(own)
        if weight.shape[1] != own.shape[-1]:
            raise InputError(
                f"`read_out` should have the model's width, {own.shape[-1]}. Found "
                f"{weight.shape[1]}."
            )
        bias = 0.0 if self._classes.bias is None else self._classes.bias.to(own)
        return lambda y: y.mean(1) @ weight.T + bias

    def _nearest(self, embedded: Embedded) -> Classifier:
        """Scores that order texts by the angle of their mean outputs with that of a window."""

        def output(ids: Tensor) -> Tensor:
            return embedded.read(ids.to(embedded.ids.device)).model[0]

        loaded, special = self._run.model.loaded, self._run.spec.special_tokens
        return nearest_by_angle(self._between, loaded, special, output)

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


def _decision_key(between: Sequence[str], given: Classifier | None) -> list[str]:
    """What tells one decision from another."""
    return [*between, *(() if given is None else given.digests)]


def _named(decision: int | None, names: Sequence[str]) -> str | None:
    return None if decision is None else names[decision] if names else str(decision)


def _in_words(draft: Draft, written: WindowDecoder) -> str:
    """``old → new`` with the positions."""
    said = []
    for edit in draft.edits:
        old, new = written.names([edit.old, edit.new])
        said.append(f"{edit.index}: {old} → {new if edit.new != edit.old else f'{old} {old}'}")
    return "; ".join(said)
