"""The decisions of a sweep: a model's own answer at every input, certified beside its margin."""

from __future__ import annotations

from dataclasses import asdict, replace

from lipscope.certificates import DecisionBall
from lipscope.engine.answer import explained
from lipscope.engine.model_decision import decision_at, missing_radius, radius_key
from lipscope.engine.plan import Job, Shape
from lipscope.engine.session import Result, Session
from lipscope.records import Bound, Finished


class Decisions(Session):
    """A session whose rows have the certificates of their decisions, where a sweep asks for them.

    A decision that cannot be certified says why in its bound; the row stands.
    """

    def result(self, job: Job, shape: Shape) -> Result:
        """The result of a job."""
        found = super().result(job, shape)
        if not self.spec.decisions:
            return found
        return found._replace(finished=[self._decided(job, one) for one in found.finished])

    def _decided(self, job: Job, one: Finished) -> Finished:
        if one.row.sigma is None:
            return one
        bounds: list[Bound] = []
        radii = []
        try:
            at = self.at(job)
            special = self.spec.special_tokens
            decision = decision_at(
                at.model, at.item, given=None, between=None, pool=None, special_tokens=special
            )
        except Exception as problem:  # as of a row: the others go on
            missing = [missing_radius(one.row.id, b, explained(problem)) for b in self._balls()]
            return one._replace(bounds=(*one.bounds, *missing))
        for ball in self._balls():
            try:
                groups = decision.groups(ball, None)
                found = [replace(decision.certified(ball, g), id=one.row.id) for g in groups]
                keys = [radius_key(one.row.id, ball, group) for group in groups]
            except Exception as problem:
                bounds.append(missing_radius(one.row.id, ball, explained(problem)))
                continue
            bounds += [each.as_bound() for each in found]
            radii += [(key, asdict(each)) for key, each in zip(keys, found, strict=True)]
        return one._replace(bounds=(*one.bounds, *bounds), radii=tuple(radii))

    def _balls(self) -> list[DecisionBall]:
        return [*self.spec.decisions]  # pyright: ignore[reportReturnType]
