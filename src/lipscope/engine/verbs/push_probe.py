"""A map of a model at an input that is moved inside the running model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipscope import models
from lipscope.certificates import certified_changes, read_out_radius
from lipscope.engine.answer import finite
from lipscope.engine.classifier import Classifier, Pool
from lipscope.engine.direction_words import Texts, body_of, texts_for
from lipscope.engine.model_decision import decision_of_layer
from lipscope.engine.plan import Job
from lipscope.engine.runs import LocalRun
from lipscope.engine.verbs.certify import sharp_seconds
from lipscope.errors import InputError
from lipscope.linalg import start_named
from lipscope.records import (
    MOVED,
    NEAREST,
    NEXT,
    PATCHES,
    Measurement,
    PushDirection,
    PushPlace,
    PushStep,
)
from lipscope.theorems import PATIENCE, NotApplicableError

FINE = 1.01  # ratio of the two sizes that bracket a change
_PATHS = ("enters", "leaves", "until")  # paths in the ends of a map
_SHOWN = 5  # number of readings per size
_MOST_HALVES = 60
_OF_PICTURES = (
    "moves are of token vectors; pixels are shown for directions that move only patches, "
    "at layer 0 and before any norm (map residual, block or model)"
)
_MOST_PIXELS = 512**2  # maximum number of pixels of a picture that is stored whole
_STILL = 1e-6  # relative changes below this are rounding
# The default grid: four sizes per decade, from a thousandth of a token's mean norm, where the
# linear model holds, to ‖X‖, where the move outweighs the input.
_LEAST, _A_DECADE = 1e-3, 4
_LARGE = 12 * 64**2  # heads times tokens squared for which certificates take about a minute
Reads = list[tuple[str, float]]


@dataclass(frozen=True)
class Outputs:
    """The model's outputs for an input of the map."""

    layer: Tensor  # output of the map, ``(n, d_out)``
    block: Tensor | None = None  # output of the surrounding block, or None
    model: Tensor | None = None  # the model's output, or None
    scores: Tensor | None = None  # scores of the next token, ``(vocabulary,)``, or None


class PushProbe:
    """A map at its input, in the unchanged model.

    The reading is the nearest of ``among``, or a decoder's next token; ``decides`` is a read-out of
    the layer's pooled output, with the pooling.
    """

    def __init__(
        self,
        run: LocalRun,
        job: Job,
        row: Measurement,
        push: str,
        among: Sequence[str],
        decides: tuple[Classifier, Pool] | None,
    ) -> None:
        self.run, self.job, self.row, self.push, self.decides = run, job, row, push, decides
        self._at = run.at(job)
        self._window = self._at.window
        self._inputs = self._window.arguments
        self.built = self._at.map
        self.x = self.built.x
        (reply,) = self._at.answers
        top = reply.top
        if top is None or not bool(top.v.isfinite().all()) or not top.sigma > 0:
            raise InputError(
                f"A push needs a map with finite, positive sigma. Found sigma = "
                f"{None if top is None else top.sigma} at window {job.sample}."
            )
        self.sigma = top.sigma
        self._v = top.v.reshape(self.x.shape).to(self.x)
        self._best = self._v.norm(dim=-1).argmax(keepdim=True)
        self.note: str | None = None
        self.reading = ""
        self._texts: Texts | None = None
        self._watch(with_head=False)
        if among:
            reads = self.here.model is not None and run.spec.images is None
            about = run.model.loaded, self._window.trace, run.spec.special_tokens
            self._texts, self.reading = texts_for(among, *about, reads=reads), NEAREST
        elif self.patches is not None:
            self.reading = MOVED
            self.note = _OF_PICTURES
        elif self.built.ends is not None:
            self._look_for_words()

    # --- the model

    @cached_property
    def here(self) -> Outputs:
        """The model's outputs at X."""
        return self.at(self.x)

    def at(self, x: Tensor) -> Outputs:
        """The model's outputs at another input of the map."""
        found = dict(zip(self._names, self._function(x), strict=True))
        scores = found.pop("scores", None)
        real = None if self.built.ends is None else self.built.ends.read
        for name in ("block", "model"):
            # Padding is dropped if these have the tokens of the map.
            if name in found and real is not None and len(found[name]) > int(real.max()):
                found[name] = found[name][real]
        if scores is not None:
            scores = scores[-1 if real is None else int(real[-1])]
        return Outputs(**found, scores=scores)

    def _watch(self, *, with_head: bool) -> None:
        """Select the outputs of each pass: of the map, its block, the model, its scores."""
        built = self.built
        self._names = ["layer"]
        if built.ends is None:
            self.layer_at = built.function
            self._function = lambda x: [built.function(x)]
            return
        prepared = model = self._window.trace.model
        body, inside = body_of(model), ""
        block = None
        if built.map not in models.OF_BLOCKS and built.module is not None:
            block = models.block_of(model, built.module)
        if with_head:
            model, inside = models.with_scores(model)
            body = inside
        prefix = f"{inside}." if with_head and model is not prepared else ""
        ends = replace(
            built.ends,
            **{one: (prefix + getattr(built.ends, one)).rstrip(".") for one in _PATHS},
        )
        paths: dict[str, str] = {}
        if block is not None:
            paths["block"] = prefix + block
        if built.map != "model":
            paths["model"] = body
        if with_head:
            paths["scores"] = ""
        self._names += paths
        others = [ends.at(path) for path in paths.values()]
        below = {}
        # Sums are counted, and random numbers are drawn, from the first block on.
        if ends.total is None and not self._window.trace.draws:
            end = others[-1] if others else ends
            below = end.below(model, self._inputs, self.x + self._v)
        self._function = ends.beside(others, model, self._inputs, below)
        # Stops the model after the map.
        self.layer_at = ends.function(model, self._inputs, below)

    @cached_property
    def patches(self) -> models.Patches | None:
        """How the model splits a picture into patches, if it reads one."""
        if self.built.ends is None:
            return None
        return models.patches_of(self._window.trace.model, self._inputs)

    @property
    def patches_alone(self) -> bool:
        """Whether v also moves other tokens, and pixels can realise its move of the patches."""
        patches = self.patches
        if patches is None or patches.first(len(self.x)) <= 0:
            return False
        return self.pixels(self.direction(f"+{PATCHES}")) is not None

    def pixels(self, e: Tensor) -> str | None:
        """The picture, and its move per unit of size, as JSON; None if pixels cannot realise it.

        The patch with the largest share in full, the picture in bytes.
        """
        patches, ends = self.patches, self.built.ends
        if patches is None or ends is None:
            return None
        model, token = self._window.trace.model, int(e.norm(dim=-1).argmax())
        move = models.picture_move(patches, ends, model, self._inputs, e)
        if move is None:
            return None
        mean, deviation = (one.to(move) for one in models.normalisation(self.run.model.loaded))
        shown = {"before": patches.picture * deviation + mean, "move": move * deviation}
        found: dict[str, Any] = {"name": patches.name(token, len(e))}
        for name, picture in shown.items():
            values = patches.pixels(token, len(e), picture)
            found[name] = [[[round(v, 5) for v in row] for row in one] for one in values.tolist()]
        if shown["move"][0, 0].numel() <= _MOST_PIXELS:
            scale = float(shown["move"].abs().max())
            found |= {"at": patches.corner(token, len(e)), "scale": scale}
            found |= {"picture": models.encode_picture(shown["before"].clamp(0, 1))}
            found |= {"moves": models.encode_picture(shown["move"] / scale, signed=True)}
        return json.dumps(found)

    # --- readings

    def _look_for_words(self) -> None:
        """Read the scores of the next token, if the model is a decoder that has them."""
        if not self._is_causal():
            return
        try:
            self._watch(with_head=True)
            scores = self.at(self.x).scores
        except InputError as problem:
            self.note = str(problem).rstrip(".")
            self._watch(with_head=False)
            return
        assert scores is not None
        self.reading = NEXT
        self.__dict__.pop("here", None)
        if self.run.model.tokenizer is None:
            self.note = "the model has no tokenizer: next tokens are ids"

    def _is_causal(self) -> bool:
        """Whether moving the last token leaves earlier outputs unchanged."""
        y = self.here.model if self.here.model is not None else self.here.layer
        if len(self.x) < 2 or len(y) != len(self.x):
            return False
        x = self.x.clone()
        drawn = torch.randn(x.shape[1], generator=start_named("causal"), dtype=torch.float64)
        x[-1] += x.norm(dim=-1).mean() * torch.nn.functional.normalize(drawn, dim=0).to(x)
        there = self.at(x)
        z = there.model if there.model is not None else there.layer
        return frobenius_distance(z[:-1], y[:-1]) <= _STILL * frobenius_distance(z[-1], y[-1])

    def reads(self, seen: Outputs) -> Reads:
        """The best readings, with their probabilities or cosines."""
        if seen.scores is not None:
            shares = torch.softmax(seen.scores.double(), -1)
            best = shares.topk(min(_SHOWN, len(shares)))
            return list(zip(self._names_of(best.indices), best.values.tolist(), strict=True))
        if self.reading == MOVED:
            return self._changed(seen)
        if self._texts is None:
            return []
        cosines = self._cosines(seen)
        best = cosines.topk(min(_SHOWN, len(cosines)))
        names = [self._texts.names[i] for i in best.indices.tolist()]
        return list(zip(names, best.values.tolist(), strict=True))

    def _changed(self, seen: Outputs) -> Reads:
        """The tokens whose model outputs changed most, with shares of the squared change."""
        there, here = (one.layer if one.model is None else one.model for one in (seen, self.here))
        squares = (there.double() - here.double()).square().sum(-1)
        total = float(squares.sum())
        if self.patches is None or not total > 0:
            return []
        best = squares.topk(min(_SHOWN, len(squares)))
        names = [self.patches.name(i, len(squares)) for i in best.indices.tolist()]
        return [(n, v / total) for n, v in zip(names, best.values.tolist(), strict=True)]

    def answer(self, seen: Outputs) -> int | None:
        """The index of the best reading."""
        if seen.scores is not None:
            return int(seen.scores.argmax())
        return None if self._texts is None else int(self._cosines(seen).argmax())

    def name_of(self, answer: int) -> str:
        """The name of a reading."""
        if self._texts is not None:
            return self._texts.names[answer]
        return self._names_of(torch.tensor([answer]))[0]

    def decision(self, seen: Outputs) -> int | None:
        """The decision of the layer's read-out."""
        if self.decides is None:
            return None
        by, pool = self.decides
        y = seen.layer.mean(0) if pool == "mean" else seen.layer[0]
        return int(by.scores(y).argmax())

    def class_of(self, decision: int | None) -> str | None:
        """The class name of a decision."""
        if self.decides is None or decision is None:
            return None
        return self.decides[0].names[decision]

    def _names_of(self, ids: Tensor) -> list[str]:
        tokenizer = self.run.model.tokenizer
        if tokenizer is None:
            return [f"#{i}" for i in ids.tolist()]
        names = []
        for i in ids.tolist():
            word = tokenizer.decode([i]) if callable(getattr(tokenizer, "decode", None)) else ""
            # Part of a character has no text: use the tokenizer's name.
            whole = word and "\ufffd" not in word
            names.append(word if whole else str(tokenizer.convert_ids_to_tokens([i])[0]))
        return names

    def _cosines(self, seen: Outputs) -> Tensor:
        assert self._texts is not None and seen.model is not None
        return self._texts.cosines(seen.model)

    # --- directions

    def direction(self, name: str) -> Tensor:
        """A direction of unit norm, such as ``+v`` (its largest entry positive) or ``random 1``."""
        kind = name[1:]
        if kind not in ("v", "top", PATCHES):
            start = start_named(f"push|{self.job.seed}|{self.job.id}|{name}")
            drawn = torch.randn(self.x.shape, generator=start, dtype=torch.float64)
            return (drawn / drawn.norm()).to(self.x)
        v = self._v * self._v.flatten()[self._v.abs().argmax()].sign()
        if kind == "top":
            v = torch.zeros_like(v).index_copy(0, self._best, v[self._best])
        if kind == PATCHES and self.patches is not None:
            v = v.index_fill(0, torch.arange(self.patches.first(len(v)), device=v.device), 0.0)
        return v / v.norm() * (1 if name[0] == "+" else -1)

    def gain(self, e: Tensor) -> float:
        """``‖J e‖``."""
        with torch.no_grad():
            return float(self.built.linearise(self.x).matvec(e).norm())

    def change(self, e: Tensor, eps: float) -> float:
        """``‖f(X + eps e) - f(X)‖``."""
        return frobenius_distance(self.layer_at(self.x + eps * e), self.here.layer)

    # --- changes and certificates by size

    def about(self, wanted: Mapping[str, Any]) -> PushPlace:
        """The state before the push."""
        x = self.x.double()
        mean, size = float(x.norm(dim=-1).mean()), float(x.norm())
        sizes = wanted["eps"] or _default_sizes(mean, size)
        certificates, remark = self._certificates(sizes, wanted["certificate"])
        radius, why = self._radius()
        notes = (self.note, remark, why)
        outputs = {"layer": self.here.layer, "block": self.here.block, "model": self.here.model}
        norms = {
            f"{name}_norm": None if y is None else float(y.double().norm())
            for name, y in outputs.items()
        }
        return PushPlace(
            push=self.push,
            id=self.row.id,
            mean_norm=mean,
            input_norm=size,
            grid=json.dumps(list(zip(sizes, certificates, strict=True))),
            reading=self.reading,
            reads=json.dumps(self.reads(self.here), ensure_ascii=False),
            decision=self.class_of(self.decision(self.here)),
            decided_by=self.decides[0].by if self.decides else "",
            radius=radius,
            note="; ".join(filter(None, notes)) or None,
            patches=self.patches_alone,
            **norms,
        )

    def pushed(self, name: str, about: PushPlace) -> tuple[list[PushStep], PushDirection]:
        """A direction at every size, and the sizes at which something changes."""
        e, sizes = self.direction(name), [eps for eps, _ in about.sizes]
        gain, first, decided = self.gain(e), self.answer(self.here), self.decision(self.here)
        steps, answers, decisions = list[PushStep](), list[bool](), list[bool]()

        def seen_at(eps: float) -> Outputs:
            return self.at(self.x + eps * e)

        for eps, certificate in about.sizes:
            seen = seen_at(eps)
            answers.append(self.answer(seen) != first)
            decisions.append(self.decision(seen) != decided)
            steps.append(self._step(name, about, eps, certificate, seen))

        def leaves(share: float) -> float | None:
            def off(change: float | None, eps: float) -> bool:
                return change is None or abs(change - gain * eps) > share * gain * eps

            holds = [off(one.layer, one.eps) for one in steps]
            return size_from(sizes, holds, lambda eps: off(self.change(e, eps), eps))

        flip = size_from(sizes, answers, lambda eps: self.answer(seen_at(eps)) != first)
        back = [
            eps
            for eps, other in zip(sizes, answers, strict=True)
            if flip and eps > flip and not other
        ]
        reached = None if flip is None else self.answer(seen_at(flip))
        return steps, PushDirection(
            push=self.push,
            id=self.row.id,
            direction=name,
            gain=gain,
            most=sizes[-1],
            leaves_1=leaves(0.01) if gain else None,
            leaves_10=leaves(0.1) if gain else None,
            flip=flip,
            flip_to=None if reached is None else self.name_of(reached),
            flips_back=back[0] if back else None,
            decision_flip=size_from(
                sizes, decisions, lambda eps: self.decision(seen_at(eps)) != decided
            ),
            pixels=self.pixels(e),
        )

    def _step(
        self, name: str, about: PushPlace, eps: float, certificate: float | None, seen: Outputs
    ) -> PushStep:
        def change(what: str) -> float | None:
            there, before = getattr(seen, what), getattr(self.here, what)
            return None if there is None else finite(frobenius_distance(there, before))

        return PushStep(
            push=self.push,
            id=self.row.id,
            direction=name,
            eps=eps,
            relative=eps / about.mean_norm,
            promise=self.sigma * eps,
            certificate=certificate,
            layer=change("layer"),
            block=change("block"),
            model=change("model"),
            reads=json.dumps(self.reads(seen), ensure_ascii=False),
            decision=self.class_of(self.decision(seen)),
        )

    def _certificates(
        self, sizes: Sequence[float], asked: bool | None
    ) -> tuple[list[float | None], str | None]:
        """The certified change for moves of each size, or the reason why there is none."""
        none: list[float | None] = [None] * len(sizes)
        layer, x = self.built.attention, self.x
        if asked is False:
            return none, None
        if self.built.map != "attention":
            return none, f"no certificate: it is for the map attention, not {self.built.map}"
        if layer is None:
            return none, "no certificate: the layer's weights are not read in closed form"
        if asked is None and layer.num_heads * len(x) ** 2 > _LARGE:
            return none, (
                f"certificates are left out: {layer.num_heads} heads at {len(x)} tokens take "
                "minutes; request them"
            )
        sharp = sharp_seconds(layer, x, "attention") <= PATIENCE
        try:
            return certified_changes(layer, x, sizes, sharp=sharp), None
        except InputError as problem:
            return none, str(problem).rstrip(".")

    def _radius(self) -> tuple[float | None, str | None]:
        """The certified radius of the decision, or the reason why there is none."""
        layer = self.built.attention
        if self.decides is None or layer is None:
            return None, None if self.decides is None else "no radius: no weights in closed form"
        by, pool = self.decides
        try:
            decided = decision_of_layer(layer, self.x, by, pool)
            radius, _ = read_out_radius(decided.network, decided.x, "frobenius")
        except (InputError, NotApplicableError) as problem:
            return None, f"no radius of the decision: {str(problem).rstrip('.')}"
        if not math.isfinite(radius):
            return None, "the decision does not depend on the input"
        return radius, None


def frobenius_distance(there: Tensor, here: Tensor) -> float:
    """The Frobenius norm of a difference."""
    return float((there.double() - here.double()).norm())


def size_from(
    sizes: Sequence[float], holds: Sequence[bool], test: Callable[[float], bool]
) -> float | None:
    """The size from which a test holds, given where it ``holds`` on an ascending grid, or None.

    Bisects between the first such size and the one before, to 1 % above a size where it fails.
    """
    k = next((i for i, one in enumerate(holds) if one), None)
    if k is None:
        return None
    low, high = sizes[k - 1] if k else 0.0, sizes[k]
    for _ in range(_MOST_HALVES):
        if high <= FINE * low:
            break
        middle = math.sqrt(low * high) if low else high / 2
        low, high = (low, middle) if test(middle) else (middle, high)
    return high


def _default_sizes(mean: float, size: float) -> list[float]:
    """Four sizes per decade, from a thousandth of a token's mean norm to that of all tokens."""
    if not size > 0:
        raise InputError("`eps` should say how far to push. Found an input that is zero.")
    count = math.floor(_A_DECADE * math.log10(size / (_LEAST * mean)) - 1e-9) + 1
    return [_LEAST * mean * 10 ** (k / _A_DECADE) for k in range(count)] + [size]
