"""Lower and upper bounds of the Lipschitz constants of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from lipscope.engine.checks import argument, flag
from lipscope.engine.progress import Progress
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun, is_text
from lipscope.engine.spec import ADVERSARIAL, REAL, MeasureOptions
from lipscope.errors import InputError
from lipscope.pages import Rows
from lipscope.theorems import bounds_at, catalogue


def bounds(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layers: Sequence[int] | int | str | Literal["all"] = 0,
    lengths: Sequence[int] | int | str | None = None,
    samples: int | None = None,
    attack: bool = False,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[MeasureOptions],
) -> Rows:
    """Every bound of a model's layers, next to their sigma.

    For every layer, length and sample: sigma with its interval, every theorem of the catalogue
    with its value or the reason why it has none, and, if asked for, the worst input found.

    Holds for families whose weights are read in closed form. A theorem is compared with a
    measurement in its own metric and map only.

    Args:
        model: As for `measure`.
        data: Text or a batch, as for `measure`; the default text if None.
        layers: Indices from 0, or "all".
        lengths: Numbers of tokens of windows of text; 64 if None.
        samples: Windows per length; 1 if None.
        attack: Also the worst input within the radius that `attack` finds, and its sigma; it takes
            seconds a head.
        out: As for `measure`.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``.
        **options: Those of `measure`, with these defaults: ``map`` is ``attention``, ``heads``,
            ``normed`` or ``residual``; ``metric`` asks for theorems in this metric only, and
            measures sigma in it (all theorems, and sigma in the Frobenius norm, without);
            ``theorems`` are all;
            ``sharp``: always (True) or never (False) the bounds that may take long, of which the
            row-Gram certificate is the sharpest at an input; by default where they are expected
            to take up to 5 seconds each, else the record says how long; ``radius="inputs"``: that
            of the largest input, not with a norm in front, whose bounds on all inputs hold for
            tokens of every norm from the smallest of the inputs on; ``dtype`` is float64.

    Returns:
        The rows, with their bounds.

    Raises:
        InputError: For every request that cannot be answered as asked.

    >>> import lipscope as ls, torch
    >>> layer = ls.DotProduct(*3 * [torch.eye(2, dtype=torch.float64)])
    >>> rows = bounds(layer, torch.eye(2, dtype=torch.float64))
    >>> value = {one.theorem: one.value for one in rows.bounds}
    >>> rows[0].sigma <= value["local_rows"] <= value["castin_thm_3_3"]
    True
    """
    attack = argument(flag, "attack", attack)
    wanted: dict[str, Any] = {"radius": "inputs", **_given(options)}
    if attack and (wanted.get("per_head") or wanted.get("map", "attention") != "attention"):
        per_head = ", per head" * bool(wanted.get("per_head"))
        raise InputError(
            "`attack` goes with the map `attention` and all heads together. Found "
            f"`map = {wanted.get('map', 'attention')}`{per_head}."
        )
    more: dict[str, Any] = {}
    if isinstance(named := wanted.get("theorems", "all"), str) and named == "all":
        if "sharp" not in wanted:  # else, and where theorems are named, it is as it is asked
            more["sharp"] = None
        metric = wanted.get("metric")
        more["theorems"] = tuple(t.name for t in catalogue() if metric in (None, t.metric))
        wanted["theorems"] = "all"
    if attack:
        more["inputs"] = (REAL, ADVERSARIAL)
    if is_text(data, wanted):
        lengths, samples = 64 if lengths is None else lengths, 1 if samples is None else samples
    asked = _given(wanted) | {"layers": layers, "lengths": lengths, "samples": samples}
    with LocalRun(model, data, asked, verb="bounds", dtype="float64", more=more, out=out) as run:
        if run.left():
            _check(run)
        return run.rows(progress)


def _check(run: LocalRun) -> None:
    """Refuse a layer that has no bounds, and a radius that leaves its input out."""
    at = run.at(run.jobs[0])
    radius, floor = at.allowed
    bounds_at(at.for_theorems, at.x, radius=radius, floor=floor, names=[])


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
