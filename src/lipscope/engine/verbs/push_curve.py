"""Pushes along directions: what happens at each size, what is promised, where something changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lipscope.certificates import Pool, certified_changes, certified_radius
from lipscope.engine.classifier import Classifier
from lipscope.engine.plan import Job
from lipscope.engine.push_probe import Pushing, Seen, apart, as_text, first_from, norms_of
from lipscope.engine.result import finite
from lipscope.engine.runs import LocalRun
from lipscope.engine.verbs.certify import sharp_seconds
from lipscope.errors import InputError
from lipscope.records import Measurement, PushDirection, PushPlace, PushStep
from lipscope.theorems import PATIENCE

# The default grid: four sizes a decade, from a thousandth of a token's mean norm, where the linear
# model holds, to ‖X‖, where what is put in outweighs what was there.
_LEAST, _A_DECADE = 1e-3, 4
_LARGE = 12 * 64**2  # heads times tokens squared, up to which certificates take a minute or so


class Along:
    """One row's map at its input, and its pushes along directions.

    Args:
        run: The run.
        job: The map and the input.
        row: Sigma there.
        push: What names this push.
        among: Texts whose nearest one is read, or none.
        decides: A read-out of the layer's pooled output, with how it is pooled; or None.
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
        self.row, self.push, self.decides = row, push, decides
        self.at = Pushing(run, job, among, decides)

    def about(self, wanted: Mapping[str, Any]) -> PushPlace:
        """What there is before the push."""
        at, x = self.at, self.at.x.double()
        mean, size = float(x.norm(dim=-1).mean()), float(x.norm())
        sizes = wanted["eps"] or _default_sizes(mean, size)
        certificates, remark = self._certificates(sizes, wanted["certificate"])
        radius, why = self._radius()
        notes = (at.note, remark, why)
        return PushPlace(
            push=self.push,
            id=self.row.id,
            mean_norm=mean,
            input_norm=size,
            grid=json.dumps(list(zip(sizes, certificates, strict=True))),
            reading=at.reading,
            reads=as_text(at.reads(at.here)),
            decision=at.class_of(at.decision(at.here)),
            decided_by=self.decides[0].by if self.decides else "",
            radius=radius,
            note="; ".join(filter(None, notes)) or None,
            patches=at.patches_alone,
            **norms_of(at.here),
        )

    def pushed(self, name: str, about: PushPlace) -> tuple[list[PushStep], PushDirection]:
        """One direction at every size, and where something changes along it."""
        at, here = self.at, self.at.here
        e, sizes = at.direction(name), [eps for eps, _ in about.sizes]
        gain, first, decided = at.gain(e), at.answer(here), at.decision(here)
        steps: list[PushStep] = []
        answers: list[bool] = []
        decisions: list[bool] = []
        for eps, certificate in about.sizes:
            seen = at.at(at.x + eps * e)
            answers.append(at.answer(seen) != first)
            decisions.append(at.decision(seen) != decided)
            steps.append(self._step(name, eps, certificate, seen))

        def leaves(share: float) -> float | None:
            def off(change: float | None, eps: float) -> bool:
                return change is None or abs(change - gain * eps) > share * gain * eps

            holds = [off(one.layer, one.eps) for one in steps]
            return first_from(sizes, holds, lambda eps: off(at.change(e, eps), eps))

        def seen_at(eps: float) -> Seen:
            return at.at(at.x + eps * e)

        flip = first_from(sizes, answers, lambda eps: at.answer(seen_at(eps)) != first)
        back = [
            eps
            for eps, other in zip(sizes, answers, strict=True)
            if flip and eps > flip and not other
        ]
        reached = None if flip is None else at.answer(seen_at(flip))
        return steps, PushDirection(
            push=self.push,
            id=self.row.id,
            direction=name,
            gain=gain,
            most=sizes[-1],
            leaves_1=leaves(0.01) if gain else None,
            leaves_10=leaves(0.1) if gain else None,
            flip=flip,
            flip_to=None if reached is None else at.name_of(reached),
            flips_back=back[0] if back else None,
            decision_flip=first_from(
                sizes, decisions, lambda eps: at.decision(seen_at(eps)) != decided
            ),
            pixels=at.pixels(e),
        )

    def _step(self, name: str, eps: float, certificate: float | None, seen: Seen) -> PushStep:
        at, here = self.at, self.at.here

        def change(what: str) -> float | None:
            there, before = getattr(seen, what), getattr(here, what)
            return None if there is None else finite(apart(there, before))

        return PushStep(
            push=self.push,
            id=self.row.id,
            direction=name,
            eps=eps,
            relative=eps / self.mean,
            promise=at.sigma * eps,
            certificate=certificate,
            layer=change("layer"),
            block=change("block"),
            model=change("model"),
            reads=as_text(at.reads(seen)),
            decision=at.class_of(at.decision(seen)),
        )

    @cached_property
    def mean(self) -> float:
        """Mean norm of the tokens of the map's input."""
        return float(self.at.x.double().norm(dim=-1).mean())

    def _certificates(
        self, sizes: Sequence[float], asked: bool | None
    ) -> tuple[list[float | None], str | None]:
        """What no move of each size can exceed, or why there is none."""
        none: list[float | None] = [None] * len(sizes)
        layer, x = self.at.built.attention, self.at.x
        if asked is False:
            return none, None
        if self.at.built.map != "attention":
            return none, f"no certificate: it is for the map attention, not {self.at.built.map}"
        if layer is None:
            return none, "no certificate: the layer's weights are not read in closed form"
        if asked is None and layer.num_heads * len(x) ** 2 > _LARGE:
            return none, (
                f"certificates are left out: {layer.num_heads} heads at {len(x)} tokens take "
                "minutes; ask for them"
            )
        sharp = sharp_seconds(layer, x, "attention") <= PATIENCE
        try:
            return certified_changes(layer, x, sizes, sharp=sharp), None
        except InputError as problem:
            return none, str(problem).rstrip(".")

    def _radius(self) -> tuple[float | None, str | None]:
        """The size of moves within which the decision stands, where that is proved."""
        layer = self.at.built.attention
        if self.decides is None or layer is None:
            return None, None if self.decides is None else "no radius: no weights in closed form"
        by, pool = self.decides
        try:
            found = certified_radius(
                layer, self.at.x, by.weight, bias=by.bias, pool=pool, ball="frobenius"
            )
        except InputError as problem:
            return None, f"no radius of the decision: {str(problem).rstrip('.')}"
        if not math.isfinite(found.radius):
            return None, "the decision does not depend on the input"
        return found.radius, None


def _default_sizes(mean: float, size: float) -> list[float]:
    """Four a decade, from a thousandth of the mean norm of a token to that of all tokens."""
    if not size > 0:
        raise InputError("`eps` should say how far to push. Found an input that is zero.")
    count = math.floor(_A_DECADE * math.log10(size / (_LEAST * mean)) - 1e-9) + 1
    return [_LEAST * mean * 10 ** (k / _A_DECADE) for k in range(count)] + [size]
