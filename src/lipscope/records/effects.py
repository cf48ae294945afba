"""Records of what moves do: pushes of a layer's input, splits of tokens, edits of a text."""

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
    """One map of a model at one input, before anything moves."""

    push: str  # what names this push in all three parts
    id: str  # row of sigma
    mean_norm: float  # mean norm of the tokens of the map's input
    input_norm: float  # ``‖X‖_F``
    layer_norm: float | None = None  # ``‖f(X)‖_F``
    # The same of what the block around it hands on; None where there is none
    block_norm: float | None = None
    model_norm: float | None = None  # the same of the model's output
    # Sizes, each with what no move of it can exceed: a JSON list of pairs; the second is null where
    # nothing is proved
    grid: str = "[]"
    # ``next token``, ``nearest text``, ``most changed patch``, or "" where nothing is read
    reading: str = ""
    # What is read at X: a JSON list of pairs, best first: a name, and its probability, its cosine,
    # or its share of the squared change of the model's output
    reads: str = "[]"
    # What a read-out of the layer's pooled output decides at X, or None
    decision: str | None = None
    decided_by: str = ""  # what decides, in words
    # Frobenius radius within which the decision cannot change; None where none is proved
    radius: float | None = None
    note: str | None = None  # what to know, or None
    # Whether ``+patches`` and ``-patches`` are pushed: where pixels move a picture so
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
    """

    push: str  # what names this push in all three parts
    id: str  # row of sigma
    # ``+v``, ``-v`` (the top right singular vector), ``+top``, ``-top`` (its top token alone, of
    # unit norm), of pictures ``+patches``, ``-patches`` (v without other tokens than patches),
    # ``random 1`` and so on
    direction: str
    gain: float  # ``‖J e‖``: the change for each unit of size, to first order; sigma for v
    most: float  # largest size
    # Size from which the layer's change is off ``gain · eps`` by more than 1 %; None if by no more
    # up to ``most``
    leaves_1: float | None = None
    leaves_10: float | None = None  # the same for 10 %
    # Size from which the best reading is another one; None if it stays up to ``most``
    flip: float | None = None
    flip_to: str | None = None  # which it is then
    # Size of the grid at which the first reading is back; None if it is not
    flips_back: float | None = None
    # Size from which the read-out of the layer decides otherwise, or None
    decision_flip: float | None = None
    # Where the move is one of the picture: the patch of its largest share as JSON, with its
    # ``name``, its pixels from 0 to 1 ``before``, and its ``move`` for each unit of size, both
    # ``(c, p, p)``; of pictures up to 512 x 512 also where it is (``at``), and the whole
    # ``picture`` and its ``moves`` by their ``scale``, a byte for each number. None where no pixels
    # move the tokens so
    pixels: str | None = None


@dataclass(frozen=True, kw_only=True)
class PushStep:
    """One move ``E = eps e`` of a map's input, and what the model made of it."""

    push: str  # what names this push in all three parts
    id: str  # row of sigma
    direction: str  # as in `PushDirection`
    eps: float  # ``‖E‖_F``
    relative: float  # ``eps`` by the mean norm of a token
    promise: float  # ``sigma · eps``
    # What no move of this size can exceed; None where nothing is proved
    certificate: float | None = None
    # ``‖f(X + E) - f(X)‖_F``; None where it is not finite, as for the others
    layer: float | None = None
    block: float | None = None  # the same of what the block around it hands on
    model: float | None = None  # the same of the model's output
    reads: str = "[]"  # what is read, as in `PushPlace`
    decision: str | None = None  # what a read-out of the layer's pooled output decides, or None


GAINS = "tokens"
"""The part of the values of a run folder that holds `TokenGain` records."""


@dataclass(frozen=True)
class TokenGain:
    """One token of a window: taken apart, and moved."""

    id: str  # row of its layer with ``move = copies``
    layer: int  # index of the layer
    sample: int  # index of the window or entry
    index: int  # position in the window, from 0
    text: str  # the token's text
    split: float  # largest gain of moving its copies against each other
    split_upper: float  # upper end of its interval
    moved: float  # largest gain of moving it alone, copies together
    moved_upper: float  # upper end of its interval

    @property
    def better_split(self) -> bool:
        """Whether taking it apart is known to gain more than moving it."""
        return self.split > self.moved_upper


RADII = "radii"
"""The part of the values of a run folder that holds certified radii of a model's decision."""

EDITS = "edits"
"""The part of the values of a run folder that holds `TextEdit` records."""

SUCCEEDED, FAILED, SKIPPED = "succeeded", "failed", "skipped"


@dataclass(frozen=True)
class TextEdit(Shown):
    """The effect of one recipe on one window of a text."""

    id: str  # row of the layer at the window
    sample: int  # index of the window
    start: int | None  # its first text token
    num_tokens: int  # its length, special tokens included
    recipe: str  # which recipe
    target: str  # whose output should change
    # ``succeeded``; ``failed``: no edit that a text can carry was found, or the decision stands;
    # ``skipped``: the window's own text is not read back as its tokens
    status: str
    # What was done, ``old → new`` with the position of each, in words; a copy as ``old → old old``
    edits: str = ""
    changed: int = 0  # number of edits
    before: str = ""  # the text as it was given
    after: str = ""  # the text with the edits
    # ``‖f(X') - f(X)‖ / ‖f(X)‖`` of the layer's output, without copies of tokens
    change_layer: float | None = None
    change_model: float | None = None  # the same of the model's
    first: float | None = None  # of the target's, after the edit that the recipe put first
    # Of the target's, by the Jacobian; None where there is no such prediction
    predicted: float | None = None
    sigma: float | None = None  # largest stretch of the token vectors by the target, a lower value
    moved: float | None = None  # how far the token vectors moved; None for copies
    queries: int = 0  # edited texts that the model read
    products: int = 0  # products with its Jacobian, or gradients
    # What was decided at the start; None where there is nothing to decide
    decision: str | None = None
    decided: str | None = None  # what was decided at the end


@dataclass(frozen=True)
class RecipeSummary:
    """A recipe on all windows; means are over those that were neither skipped nor failed."""

    recipe: str  # which
    originals: int  # windows
    skipped: int  # of those, how many were skipped
    failed: int  # how many failed
    succeeded: int  # how many succeeded
    changed: float | None  # mean number of edits
    queries: float | None  # mean number of queries, over windows that were not skipped
    change_layer: float | None  # mean relative change of the layer's output
    change_model: float | None  # of the model's

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
