"""Effects of pushes of a layer's input: at the input, along each direction, at each size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lipscope.display import Shown

PLACES, DIRECTIONS, STEPS = "push-places", "push-directions", "push"
"""Parts of the values of a run folder; lines of all three name their ``push``."""
NEXT, NEAREST, MOVED = "next token", "nearest text", "most changed patch"
"""What is read of a model's output."""
PATCHES = "patches"
"""The directions ``+patches`` and ``-patches``: v without what it moves of other tokens."""


@dataclass(frozen=True, kw_only=True)
class PushPlace:
    """One map of a model at one input, before anything moves.

    Attributes:
        push: What names this push in all three parts.
        id: Row of sigma.
        mean_norm: Mean norm of the tokens of the map's input.
        input_norm: ``‖X‖_F``.
        layer_norm: ``‖f(X)‖_F``.
        block_norm: The same of what the block around it hands on; None where there is none.
        model_norm: The same of the model's output.
        grid: Sizes, each with what no move of it can exceed: a JSON list of pairs; the second is
            null where nothing is proved.
        reading: ``next token``, ``nearest text``, ``most changed patch``, or "" where nothing is
            read.
        reads: What is read at X: a JSON list of pairs, best first: a name, and its probability, its
            cosine, or its share of the squared change of the model's output.
        decision: What a read-out of the layer's pooled output decides at X, or None.
        decided_by: What decides, in words.
        radius: Frobenius radius within which the decision cannot change; None where none is proved.
        note: What to know, or None.
        patches: Whether ``+patches`` and ``-patches`` are pushed: where pixels move a picture so.
    """

    push: str
    id: str
    mean_norm: float
    input_norm: float
    layer_norm: float | None = None
    block_norm: float | None = None
    model_norm: float | None = None
    grid: str = "[]"
    reading: str = ""
    reads: str = "[]"
    decision: str | None = None
    decided_by: str = ""
    radius: float | None = None
    note: str | None = None
    patches: bool = False

    @property
    def sizes(self) -> list[tuple[float, float | None]]:
        """The grid, read."""
        return [(eps, most) for eps, most in json.loads(self.grid)]


@dataclass(frozen=True, kw_only=True)
class PushDirection:
    """One direction ``e`` of unit Frobenius norm, and where its pushes change what happens.

    Sizes at which something changes are bisected between two sizes of the grid, to one per cent;
    what changes and changes back between two of them is not seen.

    Attributes:
        push: What names this push in all three parts.
        id: Row of sigma.
        direction: ``+v``, ``-v`` (the top right singular vector), ``+top``, ``-top`` (its top token
            alone, of unit norm), of pictures ``+patches``, ``-patches`` (v without other tokens
            than patches), ``random 1`` and so on.
        gain: ``‖J e‖``: the change for each unit of size, to first order; sigma for v.
        most: Largest size.
        leaves_1: Size from which the layer's change is off ``gain · eps`` by more than 1 %; None
            if by no more up to ``most``.
        leaves_10: The same for 10 %.
        flip: Size from which the best reading is another one; None if it stays up to ``most``.
        flip_to: Which it is then.
        flips_back: Size of the grid at which the first reading is back; None if it is not.
        decision_flip: Size from which the read-out of the layer decides otherwise, or None.
        pixels: Where the move is one of the picture: the patch of its largest share as JSON, with
            its ``name``, its pixels from 0 to 1 ``before``, and its ``move`` for each unit of size,
            both ``(c, p, p)``; of pictures up to 512 x 512 also where it is (``at``), and the whole
            ``picture`` and its ``moves`` by their ``scale``, a byte for each number. None where no
            pixels move the tokens so.
    """

    push: str
    id: str
    direction: str
    gain: float
    most: float
    leaves_1: float | None = None
    leaves_10: float | None = None
    flip: float | None = None
    flip_to: str | None = None
    flips_back: float | None = None
    decision_flip: float | None = None
    pixels: str | None = None


@dataclass(frozen=True, kw_only=True)
class PushStep:
    """One move ``E = eps e`` of a map's input, and what the model made of it.

    Attributes:
        push: What names this push in all three parts.
        id: Row of sigma.
        direction: As in `PushDirection`.
        eps: ``‖E‖_F``.
        relative: ``eps`` by the mean norm of a token.
        promise: ``sigma · eps``.
        certificate: What no move of this size can exceed; None where nothing is proved.
        layer: ``‖f(X + E) - f(X)‖_F``; None where it is not finite, as for the others.
        block: The same of what the block around it hands on.
        model: The same of the model's output.
        reads: What is read, as in `PushPlace`.
        decision: What a read-out of the layer's pooled output decides, or None.
    """

    push: str
    id: str
    direction: str
    eps: float
    relative: float
    promise: float
    certificate: float | None = None
    layer: float | None = None
    block: float | None = None
    model: float | None = None
    reads: str = "[]"
    decision: str | None = None


# --- gains of splitting tokens beside moving them, token by token ---

GAINS = "tokens"
"""The part of the values of a run folder that holds `TokenGain` records."""


@dataclass(frozen=True)
class TokenGain:
    """One token of a window: taken apart, and moved.

    Attributes:
        id: Row of its layer with ``move = copies``.
        layer: Index of the layer.
        sample: Index of the window or entry.
        index: Position in the window, from 0.
        text: The token's text.
        split: Largest gain of moving its copies against each other.
        split_upper: Upper end of its interval.
        moved: Largest gain of moving it alone, copies together.
        moved_upper: Upper end of its interval.
    """

    id: str
    layer: int
    sample: int
    index: int
    text: str
    split: float
    split_upper: float
    moved: float
    moved_upper: float

    @property
    def better_split(self) -> bool:
        """Whether taking it apart is known to gain more than moving it."""
        return self.split > self.moved_upper


# --- effects of edits of a text, window by window, and of recipes on all windows ---

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
    """The effect of one recipe on all windows."""

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
