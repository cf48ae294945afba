"""Adversarial token edits of a text: few substitutions or copies that change a model's output.

A greedy search: in every step a recipe ranks the edits, the first feasible ones are evaluated,
and the best is applied.
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

_STEPS = 12  # Golub-Kahan steps, and number of singular vectors used to rank edits
_NEAR = 1e-2  # relative to the text: distance at which the change of an output has a gradient
_BATCH = 64  # texts per forward pass
_TOGETHER = 16  # positions for which the whole vocabulary is ranked in one product
_TRIED = 10_000  # maximum number of edits per step that are decoded and tokenised again


@dataclass(frozen=True)
class Edit:
    """A substitution of one token, or a copy inserted after one."""

    index: int  # position in the original text
    old: int  # original token id
    new: int  # new token id; for a copy, the same


@dataclass(frozen=True)
class Draft:
    """A partially edited text."""

    ids: tuple[int, ...]  # its token ids
    # position of every token in the original text; -1 for a copy
    origin: tuple[int, ...]
    edits: tuple[Edit, ...] = ()  # edits so far

    @property
    def kept(self) -> list[int]:
        """Positions of the tokens that are not copies, in original order."""
        return [i for i, at in enumerate(self.origin) if at >= 0]

    def substituted(self, place: int, new: int) -> Draft:
        """Substitute the token at a position."""
        edit = Edit(self.origin[place], self.ids[place], new)
        ids = (*self.ids[:place], new, *self.ids[place + 1 :])
        return Draft(ids, self.origin, (*self.edits, edit))

    def duplicated(self, place: int) -> Draft:
        """Insert a copy after the token at a position."""
        edit = Edit(self.origin[place], self.ids[place], self.ids[place])
        ids = (*self.ids[: place + 1], *self.ids[place:])
        origin = (*self.origin[: place + 1], -1, *self.origin[place + 1 :])
        return Draft(ids, origin, (*self.edits, edit))


@dataclass(frozen=True)
class Edited:
    """The result of a recipe."""

    draft: Draft  # the best text; without edits if none is feasible
    # ``‖f(X') - f(X)‖ / ‖f(X)‖`` of the layer's output, without copies
    change_layer: float
    change_model: float  # the same for the model's output
    # relative change of the target output after the recipe's top-ranked edit; None if there is
    # none
    first: float | None
    queries: int  # edited texts evaluated by the model
    products: int  # products with its Jacobian, or gradients
    decided: int | None  # final decision; None without a decision


@dataclass
class EditSearch:
    """Search for edits of one text."""

    model: Embedded  # the model
    written: WindowDecoder  # decoder of its texts
    where: Where  # target output: the ``layer``'s or the ``model``'s
    # the layer in closed form with its input for the text; if None, duplications are tried in
    # random order
    attention: tuple[Attention, Tensor] | None = None
    # map from the model's output, ``(b, …)``, to class scores, ``(b, c)``, if a decision is the
    # target
    scores: Scores | None = None
    name: str = ""  # seeds the random starts
    _queries: int = 0
    _products: int = 0

    # --- the original text

    @cached_property
    def start(self) -> Draft:
        """The original text."""
        ids = tuple(self.model.ids.tolist())
        return Draft(ids, tuple(range(len(ids))))

    @cached_property
    def clean(self) -> Read:
        """The model's output for it."""
        return self.model.read(self.model.ids[None])

    @cached_property
    def decision(self) -> int | None:
        """Its class."""
        return None if self.scores is None else int(self.scores(self.clean.model)[0].argmax())

    @cached_property
    def operator(self) -> Operator:
        """The Jacobian of the output in the token vectors."""
        return self._operator(self.start)

    @cached_property
    def singular(self) -> tuple[Tensor, Tensor]:
        """Its leading singular values ``(k,)``, and right singular vectors ``(k, n, d)``."""
        return krylov_directions(self.operator, start_named(f"{self.name}|sigma"))

    @cached_property
    def by_weight(self) -> Tensor | None:
        """Derivatives of the layer's output in the log weight of each token, ``(n, …)``."""
        if self.attention is None:
            return None
        layer, x = self.attention
        op = linearise(lambda w: layer(x, log_weights=w), x.new_zeros(len(x)))
        return op.matvec(torch.eye(len(x), dtype=x.dtype, device=x.device))

    # --- the search

    def run(self, recipe: Recipe, *, budget: int, queries: int) -> Edited:
        """Edit at most ``budget`` tokens, evaluating the model on at most ``queries`` texts.

        Queries are divided evenly among the steps.
        """
        self._queries = self._products = 0
        draft, best, read = self.start, -math.inf, None
        first = None
        if self.scores is not None:
            best = float(self._margin(self.clean.model)[0])
        for step in range(budget):
            count = (queries - self._queries) // (budget - step)
            drafts = list(itertools.islice(self._carried(recipe, draft), count))
            found = [self._judged(drafts[i : i + _BATCH]) for i in range(0, len(drafts), _BATCH)]
            if not found:
                break
            if first is None:
                first = float(self._change(found[0][1], drafts[0], self.where)[0])
            goals = torch.cat([goal for goal, _ in found])
            at = int(goals.argmax())
            if not float(goals[at]) > best:
                break
            draft, best = drafts[at], float(goals[at])
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
        """The first-order change of the output, ``‖J δ‖ / ‖f(X)‖``; None if unknown.

        Substitutions change vectors in the table; a token with c copies has weight c, whose
        effect is known for the layer only.
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
        """The norm of the move of the token vectors by substitutions; None for copies."""
        if len(draft.ids) != len(self.start.ids):
            return None
        return float((self._vectors(draft) - self._vectors(self.start)).norm())

    def _carried(self, recipe: Recipe, draft: Draft) -> Iterator[Draft]:
        """Feasible edits in the recipe's order."""
        for place, new in itertools.islice(self._ordered(recipe, draft), _TRIED):
            made = draft.duplicated(place) if new is None else draft.substituted(place, new)
            if self.written.survives(made.ids):
                yield made

    def _ordered(self, recipe: Recipe, draft: Draft) -> Iterator[tuple[int, int | None]]:
        places = self.written.editable(draft.ids)
        if recipe == "duplicate":
            originals = [place for place in places if draft.origin[place] >= 0]
            gains = self._weights(draft)[[draft.origin[place] for place in originals]]
            yield from ((originals[i], None) for i in gains.argsort(descending=True, stable=True))
            return
        done = {edit.index for edit in draft.edits}
        places = [place for place in places if draft.origin[place] not in done]
        gains = getattr(self, f"gains_{recipe}")(draft)[places]
        gains[:, ~self.written.ordinary(gains.shape[1]).to(gains.device)] = -math.inf
        ids = torch.tensor([draft.ids[place] for place in places], device=gains.device)
        gains[torch.arange(len(places)), ids] = -math.inf
        for i, new in _descending(gains):
            yield places[i], new

    # --- recipes: expected effect of an edit

    def gains_sigma(self, draft: Draft) -> Float[Tensor, "n v"]:
        """``‖Σ V^T δ‖`` of every substitution: its first-order change in the leading directions."""
        if draft == self.start:
            values, v = self.singular
        else:
            gen = start_named(f"{self.name}|sigma|{len(draft.edits)}")
            values, v = krylov_directions(self._operator(draft), gen)
        self._products += 2 * len(values)
        reach = (values[:, None, None] * v).permute(1, 2, 0)  # (n, d, k)
        base = (self._vectors(draft)[:, None] @ reach)[:, 0]
        found = []
        for part, at in zip(reach.split(_TOGETHER), base.split(_TOGETHER), strict=True):
            move = (self.model.table @ part.permute(1, 0, 2).flatten(1)).unflatten(1, at.shape) - at
            found.append(move.norm(dim=2).T)
        return torch.cat(found)

    def gains_hotflip(self, draft: Draft) -> Float[Tensor, "n v"]:
        """``<∇ goal, δ>`` for every substitution."""
        slope = self.slope(draft)
        self._products += 1
        return slope @ self.model.table.T - (slope * self._vectors(draft)).sum(1, keepdim=True)

    def gains_random(self, draft: Draft) -> Float[Tensor, "n v"]:
        """Random numbers."""
        gen = start_named(f"{self.name}|random|{len(draft.edits)}")
        return torch.rand(len(draft.ids), len(self.model.table), generator=gen)

    def slope(self, draft: Draft) -> Float[Tensor, "n d"]:
        """The gradient of the goal in the token vectors of a text.

        The goal is minus the margin of a decision, or ``‖f(X') - f(X)‖² / 2``, whose gradient
        vanishes at X: it is then taken at a random point nearby, where it is ``J^T J e``.
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
        """The expected effect of a copy of each token."""
        if self.by_weight is None:
            gen = start_named(f"{self.name}|copies|{len(draft.edits)}")
            return torch.rand(len(self.start.ids), generator=gen)
        self._products += len(self.by_weight) if draft == self.start else 0
        return self.by_weight.flatten(1).norm(dim=1)

    # --- evaluation

    def _judged(self, drafts: list[Draft]) -> tuple[Tensor, Read]:
        """The goals of texts of equal length, and the model's outputs."""
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
        """The lead of the best other class, ``(b,)``; negative while the decision holds."""
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
    """Approximate singular values and right singular vectors from a 12-step Krylov space.

    With ``J V = U B`` (Golub and Kahan) and ``B = P S Q^T``, ``‖J V V^T e‖ = ‖S Q^T V^T e‖``:
    ``S``, ``(k,)``, and ``V Q``, ``(k, *in_shape)``.
    """
    start = torch.randn(1, *op.in_shape, generator=generator).to(op.device, op.dtype)
    *_, state = golub_kahan(op, start, min(_STEPS, op.in_size))
    _, values, right = torch.linalg.svd(state.matrix()[0])
    v = right.to(state.v) @ state.v[0, :-1]
    return values.to(state.v), v.reshape(-1, *op.in_shape)


def _descending(gains: Tensor) -> Iterator[tuple[int, int]]:
    """Indices of the entries of a matrix in descending order, without -inf."""
    flat, done, width = gains.flatten(), 0, gains.shape[1]
    while done < len(flat):
        top = flat.topk(min(len(flat), max(256, 8 * done)))
        for value, at in zip(top.values[done:].tolist(), top.indices[done:].tolist(), strict=True):
            if value == -math.inf:
                return
            yield divmod(at, width)
        done = len(top.values)
