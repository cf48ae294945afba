"""Effects of pushes of a layer's input: at the input, along each direction, at each size."""

from __future__ import annotations

import json
from dataclasses import dataclass

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
