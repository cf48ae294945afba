"""Inputs on which a layer is far from smooth, next to the input that was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from lipscope.attacks import WorstInput
from lipscope.display import Shown
from lipscope.engine.checks import argument, is_number, whole
from lipscope.engine.plan import check_one_input
from lipscope.engine.progress import Progress, told
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, LocalRun, of_one_input
from lipscope.engine.spec import ADVERSARIAL, REAL, Options
from lipscope.errors import InputError, shown
from lipscope.pages import Rows
from lipscope.records import Place

_WORST = "worst.npz"
WITHOUT = ("map", "per_head", "metric", "move", "read", "side", "inputs", "ascent_steps", "radius")


@dataclass(frozen=True, repr=False)
class Attacked(Shown):
    """The result of an attack on a layer.

    Attributes:
        rows: Sigma at the input that was given, and at the worst one, measured anew.
        found: Every construction for every head, and the ascent, worst first; where the attack
            is read from a folder, only the first has its tokens.
        radius: Largest token norm that was allowed.
        given_radius: That of the input that was given.
    """

    rows: Rows
    found: Sequence[WorstInput]
    radius: float
    given_radius: float


def attack(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layer: int = 0,
    length: int | None = None,
    radius: float | Literal["norm"] | None = None,
    steps: int = 40,
    out: str | Path | Place | None = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Attacked:
    """Look for the inputs that make sigma of a layer large.

    Every construction for every head, then gradient ascent from the best of each kind, from the
    input that was given and from four random ones. The worst is measured again from a start that
    its choice has not seen, so that its interval holds. `bounds` with ``attack`` and the input
    ``adversarial`` of `measure` ask the same.

    Holds for every layer whose weights are read in closed form. A lower bound on the worst
    case: no proof that nothing is worse. Twelve heads of width 32 at 64 tokens take 15 seconds
    on one core.

    Args:
        model: As for `measure`.
        data: Text or a batch of one, as for `measure`; the default text if None.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window; 64 if None.
        radius: Largest token norm; ``norm`` for the largest one after the norm that feeds the
            layer; that of the input if None.
        steps: Steps of the ascent; 0 for constructions only.
        out: Run folder for both rows, the worst input as ``worst.npz`` (x, v) in it; one of another
            attack is refused.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``.
        **options: Those of `measure` about the input and the solver; the map is ``attention``, and
            ``dtype`` float64.

    Returns:
        What was found.

    Raises:
        InputError: For every request that cannot be answered as asked, or if no input is
            available for this layer.
    """
    steps = argument(whole(0, 100_000), "steps", steps)
    asked = {**options, **of_one_input(data, options, length), "layers": [layer]}
    more = {"inputs": (REAL, ADVERSARIAL), "radius": _radius(radius), "ascent_steps": steps}
    with LocalRun(
        model,
        data,
        asked,
        verb="attack",
        without=WITHOUT,
        dtype="float64",
        more=more,
        out=out,
        asked={"verb": "attack"},
    ) as run:
        check_one_input(run.jobs)
        tried: list[WorstInput] = []

        def find() -> dict[str, Any]:
            real, worse = run.jobs
            at, given = run.at(real), run.at(real).radius
            tried.extend(run.at(worse).built_input.tried)
            first = tried[0]
            assert first.x is not None
            v = first.v if first.v is not None else torch.zeros_like(first.x)
            run.save(_WORST, {"x": first.x, "v": v})
            radius = at.allowed[0] or given
            plain = [{k: v for k, v in vars(one).items() if k not in ("x", "v")} for one in tried]
            return {"found": plain, "radius": radius, "given_radius": given}

        tell = told(progress)
        tell(0, 2, None)
        held = run.once("attack", {}, find, _WORST)
        rows = run.rows(tell)
        if not tried:  # it was attacked before
            assert run.folder is not None
            tried = [WorstInput(**one, x=None, v=None) for one in held["found"]]
            tried[0] = replace(tried[0], **_load(run.folder.path / _WORST))
    return Attacked(rows, tried, held["radius"], held["given_radius"])


def _radius(radius: float | str | None) -> float | str:
    if radius is None or (isinstance(radius, str) and radius == "norm"):
        return radius or "row"
    if not (is_number(radius) and float(radius) > 0):
        raise InputError(
            f"`radius` should be a positive number, or norm. Found `radius = {shown(radius)}`."
        )
    return float(radius)


def _load(path: Path) -> dict[str, Tensor]:
    """The worst input, and the direction in which it is worst."""
    import numpy as np

    with np.load(path, allow_pickle=False) as held:
        return {name: torch.from_numpy(held[name]) for name in ("x", "v")}
