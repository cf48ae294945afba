"""The decision of a read-out of a layer: the radius within which it cannot change, attacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from lipscope.attacks import attack_decision
from lipscope.certificates import Pool, certified_radius
from lipscope.display import Shown
from lipscope.engine.checks import argument, one_of, whole, words
from lipscope.engine.classifier import Classifier, classifier_of_texts, read_out_of
from lipscope.engine.plan import check_one_input
from lipscope.engine.progress import Progress, told
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder
from lipscope.engine.spec import Options
from lipscope.engine.verbs.certify import beside, check_attempts, one_layer
from lipscope.records import Bound, stable_id
from lipscope.theorems import DERIVED, BallName

_BALLS: tuple[BallName, ...] = ("token", "frobenius")


@dataclass(frozen=True, kw_only=True, repr=False)
class CertifiedDecision(Shown):
    """The decision of a read-out at an input, how far it is certified, and where it changes.

    Attributes:
        model: Name of the model.
        layer: Index of the layer.
        map: ``attention``.
        num_tokens: Number of tokens of the input.
        pool: How outputs are pooled, ``mean`` or ``first``.
        decision: Class at X.
        decision_name: What it is called.
        by: What decides, in words.
        rival: The class that limits the radius.
        rival_name: What it is called.
        margin: Difference of their scores at X.
        ball: ``token`` or ``frobenius``.
        radius: No X' in the open ball of this radius changes the decision; None if none
            anywhere does.
        nearest: Distance from a token to the nearest other token's vector, or None.
        fraction: ``radius / nearest``, or None.
        flip_radius: Smallest radius at which the attack changed the decision, or None.
        flip_decision: What it became there.
        attempts: How often the attack tried.
        violated: Whether it changed within the radius.
        note: What to know, or None.
        file: Name of the file with the flips in the run folder.
    """

    model: str
    layer: int
    map: str
    num_tokens: int
    pool: Pool
    decision: int
    decision_name: str
    by: str
    rival: int
    rival_name: str
    margin: float
    ball: BallName
    radius: float | None
    nearest: float | None
    fraction: float | None
    flip_radius: float | None
    flip_decision: int | None
    attempts: int
    violated: bool
    note: str | None = None
    file: str | None = None

    def as_bound(self, row: str) -> Bound:
        """The record that stands beside the row of sigma."""
        return Bound(
            id=row,
            theorem=f"decision_{self.ball}",
            statement=f"{self.named('decision')} stays ahead of {self.named('rival')}",
            cite=DERIVED,
            kind="radius",
            scope="ball",
            metric="frobenius",
            value=self.radius,
            eps=self.radius,
            reason="" if self.radius is not None else "the scores do not depend on the input",
            note=self.note or "",
        )

    def named(self, which: str) -> str:
        """A class, ``decision`` or ``rival``, with its name where it has one."""
        index, name = getattr(self, which), getattr(self, f"{which}_name")
        return f"class {index}" if name == str(index) else f"class {index}, “{name}”"


def certify_decision(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    between: Sequence[str] | None = None,
    read_out: str | Path | Classifier | None = None,
    layer: int = 0,
    length: int | None = None,
    pool: Pool = "mean",
    ball: BallName | Sequence[BallName] = _BALLS,
    steps: int = 8,
    random: int = 20,
    ascents: int = 2,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> tuple[CertifiedDecision, ...]:
    """Certify how far tokens may move before a decision on a layer's pooled output can change.

    ``argmax(W pool(f(X)) + b)`` stays what it is in the open ball of the radius; an attack says
    where it does change. What decides is a read-out that was given, or which of some texts has the
    nearest pooled output at this layer; it is not the model's own head.

    Holds for dot-product attention whose weights are read in closed form; deterministic, up to
    float64 rounding. Proof: ``docs/theory/ball-certificate.md``.

    Args:
        model: As for `measure`.
        data: Text or a batch of one, as for `measure`; the default text if None.
        between: Texts, one a class, two at least.
        read_out: A file, or a `Classifier`, in their place.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window; 64 if None.
        pool: ``mean`` over tokens, or the ``first`` token.
        ball: ``token``: every token moves by less than the radius; ``frobenius``: all together.
        steps: Radii of the bound.
        random: Random points of the attack.
        ascents: Its random starts.
        out: Run folder for the row of sigma at X, the radii and the flips.
        progress: As for `certify`.
        **options: Those of `measure` about the input and the solver; ``dtype`` float64.

    Returns:
        One answer a ball.

    Raises:
        InputError: For every request that cannot be answered as asked.

    Source: derived here.
    """
    given = read_out_of(between, read_out)
    pool = argument(one_of("mean", "first"), "pool", pool)
    balls = argument(words(_BALLS), "ball", ball)
    steps = argument(whole(1, 1000), "steps", steps)
    check_attempts(random, ascents)
    attempts = {"random": random, "ascents": ascents}
    wanted: dict[str, Any] = {"balls": balls, "pool": pool, "steps": steps, **attempts}
    wanted |= {"between": between, "read_out": given and given.digests}
    file = f"worst-{stable_id(wanted)[:8]}.npz"
    run = one_layer(
        model, data, options, verb="certify_decision", layer=layer, length=length, out=out
    )
    with run:
        check_one_input(run.jobs)

        def find() -> dict[str, Any]:
            at = run.at(run.jobs[0])
            own, x = at.attention, at.x
            decides = given or classifier_of_texts(
                run.model,
                between or [],
                layer=layer,
                pool=pool,
                special_tokens=run.spec.special_tokens,
            )
            found, points = [], {"x": x}
            for one in balls:
                about = {"model": run.model.name, "layer": layer, "num_tokens": len(x)}
                seed = run.spec.seeds[0]
                said, flip = _decided(own, x, decides, one, pool, steps, {**attempts, "seed": seed})
                found.append(CertifiedDecision(**about, **said, file=file))
                if found[-1].flip_radius is not None:
                    points[f"flip_{one}"] = flip
            run.save(file, points)
            if run.folder is not None:
                rows = run.rows(keep=False)
                run.keep([beside(rows, rows[0], [one.as_bound(rows[0].id) for one in found])])
            return {"said": [asdict(one) for one in found]}

        told(progress)(0, 1, None)
        held = run.once("decision", wanted, find, file)["said"]
    return tuple(CertifiedDecision(**one) for one in held)


def _decided(
    layer: Any,
    x: Tensor,
    decides: Classifier,
    ball: BallName,
    pool: Pool,
    steps: int,
    attempts: dict[str, int],
) -> tuple[dict[str, Any], Tensor]:
    """What is said of one ball, and where the attack changed the decision."""
    how: dict[str, Any] = {"bias": decides.bias, "pool": pool, "ball": ball}
    found = certified_radius(layer, x, decides.weight, steps=steps, **how)
    tried = attack_decision(layer, x, decides.weight, radius=found.radius, **attempts, **how)
    reached = math.isfinite(tried.radius)
    said = {
        "map": "attention",
        "pool": pool,
        "decision": found.decision,
        "decision_name": decides.names[found.decision],
        "by": decides.by,
        "rival": found.rival,
        "rival_name": decides.names[found.rival],
        "margin": found.margin,
        "ball": ball,
        "radius": found.radius,
        "nearest": found.nearest,
        "fraction": found.fraction,
        "flip_radius": tried.radius,
        "flip_decision": tried.decision if reached else None,
        "attempts": tried.attempts,
        # a tie has no ball around it: changing there contradicts nothing
        "violated": found.radius > 0 and tried.radius < found.radius,
        "note": found.note,
    }
    return {k: None if _endless(value) else value for k, value in said.items()}, tried.point


def _endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
