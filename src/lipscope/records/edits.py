"""Effects of edits of a text, window by window, and of recipes on all windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lipscope.display import Shown

EDITS = "edits"
"""The part of the values of a run folder that holds `TextEdit` records."""

SUCCEEDED, FAILED, SKIPPED = "succeeded", "failed", "skipped"


@dataclass(frozen=True)
class TextEdit(Shown):
    """The effect of one recipe on one window of a text.

    Attributes:
        id: Row of the layer at the window.
        sample: Index of the window.
        start: Its first text token.
        num_tokens: Its length, special tokens included.
        recipe: Which recipe.
        target: Whose output should change.
        status: ``succeeded``; ``failed``: no edit that a text can carry was found, or the decision
            stands; ``skipped``: the window's own text is not read back as its tokens.
        edits: What was done, ``old → new`` with the position of each, in words; a copy as
            ``old → old old``.
        changed: Number of edits.
        before: The text as it was given.
        after: The text with the edits.
        change_layer: ``‖f(X') - f(X)‖ / ‖f(X)‖`` of the layer's output, without copies of tokens.
        change_model: The same of the model's.
        first: Of the target's, after the edit that the recipe put first.
        predicted: Of the target's, by the Jacobian; None where there is no such prediction.
        sigma: Largest stretch of the token vectors by the target, a lower value.
        moved: How far the token vectors moved; None for copies.
        queries: Edited texts that the model read.
        products: Products with its Jacobian, or gradients.
        decision: What was decided at the start; None where there is nothing to decide.
        decided: What was decided at the end.
    """

    id: str
    sample: int
    start: int | None
    num_tokens: int
    recipe: str
    target: str
    status: str
    edits: str = ""
    changed: int = 0
    before: str = ""
    after: str = ""
    change_layer: float | None = None
    change_model: float | None = None
    first: float | None = None
    predicted: float | None = None
    sigma: float | None = None
    moved: float | None = None
    queries: int = 0
    products: int = 0
    decision: str | None = None
    decided: str | None = None


@dataclass(frozen=True)
class RecipeSummary:
    """A recipe on all windows; means are over those that were neither skipped nor failed.

    Attributes:
        recipe: Which.
        originals: Windows.
        skipped: Of those, how many were skipped.
        failed: How many failed.
        succeeded: How many succeeded.
        changed: Mean number of edits.
        queries: Mean number of queries, over windows that were not skipped.
        change_layer: Mean relative change of the layer's output.
        change_model: Of the model's.
    """

    recipe: str
    originals: int
    skipped: int
    failed: int
    succeeded: int
    changed: float | None
    queries: float | None
    change_layer: float | None
    change_model: float | None

    @property
    def rate(self) -> float | None:
        """Successes among the windows that were attacked."""
        tried = self.originals - self.skipped
        return self.succeeded / tried if tried else None


def summed(recipe: str, edits: Sequence[TextEdit]) -> RecipeSummary:
    """The effect of one recipe on all windows.

    Args:
        recipe: Which.
        edits: What it did to each of them.

    Returns:
        Counts, and means over those that succeeded.
    """

    def mean(values: Sequence[float | None]) -> float | None:
        known = [one for one in values if one is not None]
        return fmean(known) if known else None

    done = [one for one in edits if one.status == SUCCEEDED]
    skipped, failed = (sum(one.status == status for one in edits) for status in (SKIPPED, FAILED))
    return RecipeSummary(
        recipe,
        len(edits),
        skipped,
        failed,
        len(done),
        mean([float(one.changed) for one in done]),
        mean([float(one.queries) for one in edits if one.status != SKIPPED]),
        mean([one.change_layer for one in done]),
        mean([one.change_model for one in done]),
    )
