"""Edits of a text's tokens that change what a model makes of it: few tokens, and a model that runs.

A greedy search: in every step a recipe orders the edits, the first of them that a text can carry
are run, and the best is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention
from lipscope.linalg import Operator, golub_kahan, linearise, start_named
from lipscope.models import Embedded, Read, Where, WindowDecoder

Recipe = Literal["sigma", "hotflip", "duplicate", "random"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
Scores = Callable[[Tensor], Tensor]

_STEPS = 12  # of Golub and Kahan: as many singular vectors rank the edits
_NEAR = 1e-2  # of the text's own size: where the change of an output has a gradient
_BATCH = 64  # texts that are run together
_TOGETHER = 16  # positions for which the whole vocabulary is ranked in one product
_TRIED = 10_000  # edits of a step that are written and read again


@dataclass(frozen=True)
class Edit:
    """One token put in the place of another, or a copy of one put behind it."""

    index: int  # position in the text as it was given
    old: int  # id that stood there
    new: int  # id that stands there now; of a copy, the same


@dataclass(frozen=True)
class Draft:
    """A text in the making."""

    ids: tuple[int, ...]  # its token ids
    # for every token its position in the text as it was given; -1 for a copy
    origin: tuple[int, ...]
    edits: tuple[Edit, ...] = ()  # what was done to it

    @property
    def kept(self) -> list[int]:
        """Positions of the tokens that are no copies, in the order of the text as it was given."""
        return [i for i, at in enumerate(self.origin) if at >= 0]

    def substituted(self, place: int, new: int) -> Draft:
        """Another token at a position."""
        edit = Edit(self.origin[place], self.ids[place], new)
        ids = (*self.ids[:place], new, *self.ids[place + 1 :])
        return Draft(ids, self.origin, (*self.edits, edit))

    def duplicated(self, place: int) -> Draft:
        """A copy behind the token at a position."""
        edit = Edit(self.origin[place], self.ids[place], self.ids[place])
        ids = (*self.ids[: place + 1], *self.ids[place:])
        origin = (*self.origin[: place + 1], -1, *self.origin[place + 1 :])
        return Draft(ids, origin, (*self.edits, edit))


@dataclass(frozen=True)
class Edited:
    """The result of a recipe."""

    draft: Draft  # the best text; without edits if no edit survives
    # ``‖f(X') - f(X)‖ / ‖f(X)‖`` of the layer's output, tokens that are no copies
    change_layer: float
    change_model: float  # the same of the model's
    # of the output that was asked for, after the edit that the recipe put first; None if there is
    # none
    first: float | None
    queries: int  # edited texts that the model read
    products: int  # products with its Jacobian, or gradients
    decided: int | None  # the decision at the end; None if there is none to take


@dataclass
class EditSearch:
    """Edits of one text."""

    model: Embedded  # the model
    written: WindowDecoder  # its texts
    where: Where  # whose output should change: the ``layer``'s or the ``model``'s
    # the layer in closed form, at the text, with what enters it; None if it is not known, and
    # duplications are tried in random order
    attention: tuple[Attention, Tensor] | None = None
    # from the model's output, ``(b, …)``, to the scores of classes, ``(b, c)``, if it is a decision
    # that should change
    scores: Scores | None = None
    name: str = ""  # names the random starts
    _queries: int = 0
    _products: int = 0

    # --- the text as it was given

    @cached_property
    def start(self) -> Draft:
        """The text without edits."""
        ids = tuple(self.model.ids.tolist())
        return Draft(ids, tuple(range(len(ids))))

    @cached_property
    def clean(self) -> Read:
        """What the model makes of it."""
        return self.model.read(self.model.ids[None])

    @cached_property
    def decision(self) -> int | None:
        """The class that it has."""
        return None if self.scores is None else int(self.scores(self.clean.model)[0].argmax())

    @cached_property
    def operator(self) -> Operator:
        """The Jacobian of the output in the vectors of its tokens."""
        return self._operator(self.start)

    @cached_property
    def singular(self) -> tuple[Tensor, Tensor]:
        """Its leading singular values ``(k,)``, and right singular vectors ``(k, n, d)``."""
        return krylov_directions(self.operator, start_named(f"{self.name}|sigma"))

    @cached_property
    def by_weight(self) -> Tensor | None:
        """Derivatives of the layer's output in the logarithm of each token's weight, ``(n, …)``."""
        if self.attention is None:
            return None
        layer, x = self.attention
        op = linearise(lambda w: layer(x, log_weights=w), x.new_zeros(len(x)))
        return op.matvec(torch.eye(len(x), dtype=x.dtype, device=x.device))

    # --- the search

    def run(self, recipe: Recipe, *, budget: int, queries: int) -> Edited:
        """Edit at most ``budget`` tokens, and run the model on at most ``queries`` texts.

        These are shared out evenly among the steps.
        """
        self._queries = self._products = 0
        draft, best, read = self.start, -math.inf, None
        first = None
        if self.scores is not None:
            best = float(self._margin(self.clean.model)[0])
        for step in range(budget):
            count = (queries - self._queries) // (budget - step)
            some = list(itertools.islice(self._carried(recipe, draft), count))
            found = [self._judged(some[i : i + _BATCH]) for i in range(0, len(some), _BATCH)]
            if not found:
                break
            if first is None:
                first = float(self._change(found[0][1], some[0], self.where)[0])
            goals = torch.cat([goal for goal, _ in found])
            at = int(goals.argmax())
            if not float(goals[at]) > best:
                break
            draft, best = some[at], float(goals[at])
            read = Read(*(one[at % _BATCH, None] for one in found[at // _BATCH][1]))
            if self.scores is not None and best > 0:
                break
        counts = self._queries, self._products
        if read is None:
            return Edited(self.start, 0.0, 0.0, first, *counts, self.decision)
        decided = None if self.scores is None else int(self.scores(read.model)[0].argmax())
        layer, model = (float(self._change(read, draft, one)[0]) for one in ("layer", "model"))
        return Edited(draft, layer, model, first, *counts, decided)

    def predicted(self, draft: Draft) -> float | None:
        """The change of the output to first order, ``‖J δ‖ / ‖f(X)‖``; None where it is not known.

        Substitutions move vectors in the table; a token that is there c times has weighs c times
        as much, by which only the layer is known to change.
        """
        clean = getattr(self.clean, self.where)
        if len(draft.ids) == len(self.start.ids):
            out = self.operator.matvec(self._vectors(draft) - self._vectors(self.start))
        elif self.where == "layer" and self.by_weight is not None:
            counts = torch.ones(len(self.start.ids))
            for edit in draft.edits:
                counts[edit.index] += 1
            out = torch.tensordot(counts.log().to(self.by_weight), self.by_weight, 1)
        else:
            return None
        return float(out.norm() / clean.norm())

    def moved(self, draft: Draft) -> float | None:
        """How far substitutions move the vectors of the text; None for copies."""
        if len(draft.ids) != len(self.start.ids):
            return None
        return float((self._vectors(draft) - self._vectors(self.start)).norm())

    def _carried(self, recipe: Recipe, draft: Draft) -> Iterator[Draft]:
        """Edits in the order of the recipe, as far as a text can carry them."""
        for place, new in itertools.islice(self._ordered(recipe, draft), _TRIED):
            made = draft.duplicated(place) if new is None else draft.substituted(place, new)
            if self.written.survives(made.ids):
                yield made

    def _ordered(self, recipe: Recipe, draft: Draft) -> Iterator[tuple[int, int | None]]:
        places = self.written.editable(draft.ids)
        if recipe == "duplicate":
            own = [place for place in places if draft.origin[place] >= 0]
            gains = self._weights(draft)[[draft.origin[place] for place in own]]
            yield from ((own[i], None) for i in gains.argsort(descending=True, stable=True))
            return
        done = {edit.index for edit in draft.edits}
        places = [place for place in places if draft.origin[place] not in done]
        gains = getattr(self, f"gains_{recipe}")(draft)[places]
        gains[:, ~self.written.ordinary(gains.shape[1]).to(gains.device)] = -math.inf
        own = torch.tensor([draft.ids[place] for place in places], device=gains.device)
        gains[torch.arange(len(places)), own] = -math.inf
        for i, new in _descending(gains):
            yield places[i], new

    # --- recipes: what an edit is expected to change

    def gains_sigma(self, draft: Draft) -> Float[Tensor, "n v"]:
        """``‖Σ V^T δ‖`` of every substitution: its change to first order in leading directions."""
        if draft == self.start:
            values, v = self.singular
        else:
            gen = start_named(f"{self.name}|sigma|{len(draft.edits)}")
            values, v = krylov_directions(self._operator(draft), gen)
        self._products += 2 * len(values)
        reach = (values[:, None, None] * v).permute(1, 2, 0)  # (n, d, k)
        own = (self._vectors(draft)[:, None] @ reach)[:, 0]
        found = []
        for part, at in zip(reach.split(_TOGETHER), own.split(_TOGETHER), strict=True):
            move = (self.model.table @ part.permute(1, 0, 2).flatten(1)).unflatten(1, at.shape) - at
            found.append(move.norm(dim=2).T)
        return torch.cat(found)

    def gains_hotflip(self, draft: Draft) -> Float[Tensor, "n v"]:
        """``<∇ goal, δ>`` of every substitution."""
        slope = self.slope(draft)
        self._products += 1
        return slope @ self.model.table.T - (slope * self._vectors(draft)).sum(1, keepdim=True)

    def gains_random(self, draft: Draft) -> Float[Tensor, "n v"]:
        """Numbers without meaning."""
        gen = start_named(f"{self.name}|random|{len(draft.edits)}")
        return torch.rand(len(draft.ids), len(self.model.table), generator=gen)

    def slope(self, draft: Draft) -> Float[Tensor, "n d"]:
        """The gradient of the goal in the vectors of a text.

        Of a decision, of minus its margin. Else of ``‖f(X') - f(X)‖² / 2``, which has none at X:
        there at a point beside it, drawn at random, where it is ``J^T J e``.
        """
        ids = torch.tensor(draft.ids, device=self.model.ids.device)
        x = self._vectors(draft)
        if self.scores is None and not draft.edits:
            e = torch.randn(x.shape, generator=start_named(f"{self.name}|near")).to(x)
            x = x + _NEAR * x.norm() / e.norm() * e
        with torch.enable_grad():
            point = x.detach().requires_grad_(True)
            if self.scores is None:
                y = self.model.function(ids, self.where)(point)
                y = y[draft.kept] if y.ndim == 2 else y
                goal = (y - getattr(self.clean, self.where)[0]).square().sum() / 2
            else:
                goal = self._margin(self.model.function(ids, "model")(point)[None])[0]
            (found,) = torch.autograd.grad(goal, point)
        return found

    def _weights(self, draft: Draft) -> Tensor:
        """What a copy of each token is expected to change."""
        if self.by_weight is None:
            gen = start_named(f"{self.name}|copies|{len(draft.edits)}")
            return torch.rand(len(self.start.ids), generator=gen)
        self._products += len(self.by_weight) if draft == self.start else 0
        return self.by_weight.flatten(1).norm(dim=1)

    # --- what happens

    def _judged(self, drafts: list[Draft]) -> tuple[Tensor, Read]:
        """How good some texts of one length are, and what the model makes of them."""
        ids = torch.tensor([draft.ids for draft in drafts], device=self.model.ids.device)
        self._queries += len(drafts)
        read = self.model.read(ids)
        if self.scores is not None:
            return self._margin(read.model), read
        changes = [
            self._change(Read(*(one[i, None] for one in read)), draft, self.where)
            for i, draft in enumerate(drafts)
        ]
        return torch.cat(changes), read

    def _margin(self, y: Tensor) -> Tensor:
        """How far the best other class is ahead, ``(b,)``; negative while the decision holds."""
        assert self.scores is not None
        scores = self.scores(y)
        others = scores.clone()
        others[:, self.decision] = -math.inf
        return others.amax(1) - scores[:, self.decision]

    def _change(self, read: Read, draft: Draft, where: Where) -> Tensor:
        y, clean = getattr(read, where), getattr(self.clean, where)
        y = y[:, draft.kept] if y.ndim == 3 else y
        return (y - clean).flatten(1).norm(dim=1) / clean.norm()

    def _operator(self, draft: Draft) -> Operator:
        ids = torch.tensor(draft.ids, device=self.model.ids.device)
        return linearise(self.model.function(ids, self.where), self._vectors(draft))

    def _vectors(self, draft: Draft) -> Tensor:
        return self.model.vectors(torch.tensor(draft.ids, device=self.model.ids.device))


def krylov_directions(op: Operator, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors of an operator on a Krylov space of 12 steps.

    With ``J V = U B`` (Golub and Kahan) and ``B = P S Q^T``, ``‖J V V^T e‖ = ‖S Q^T V^T e‖``:
    ``S``, ``(k,)``, and ``V Q``, ``(k, *in_shape)``.
    """
    start = torch.randn(1, *op.in_shape, generator=generator).to(op.device, op.dtype)
    *_, state = golub_kahan(op, start, min(_STEPS, op.in_size))
    _, values, right = torch.linalg.svd(state.matrix()[0])
    v = right.to(state.v) @ state.v[0, :-1]
    return values.to(state.v), v.reshape(-1, *op.in_shape)


def _descending(gains: Tensor) -> Iterator[tuple[int, int]]:
    """Entries of a matrix, the largest first, those of -inf left out."""
    flat, done, width = gains.flatten(), 0, gains.shape[1]
    while done < len(flat):
        top = flat.topk(min(len(flat), max(256, 8 * done)))
        for value, at in zip(top.values[done:].tolist(), top.indices[done:].tolist(), strict=True):
            if value == -math.inf:
                return
            yield divmod(at, width)
        done = len(top.values)
