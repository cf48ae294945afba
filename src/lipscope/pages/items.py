"""Every measurement of a report once, with the setting and the kind of input it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

from lipscope.pages.source import Source
from lipscope.records.bound_rows import ADVERSARIAL, MEASURED, BoundRow
from lipscope.records.rows import GIVEN, Measurement

REAL = "real"


@dataclass(frozen=True)
class Item:
    """A measurement with the setting and the kind of input that it belongs to.

    Attributes:
        row: The measurement.
        setting: Model (with what tells it from others of its name), map, metric, move, read.
        kind: `REAL`, or the name of an adversarial input.
        run: The folder that holds it.
    """

    row: Measurement
    setting: tuple[str, ...]
    kind: str
    run: Source

    @property
    def curve(self) -> tuple[Any, ...]:
        """What the items of one growth curve have in common."""
        return self.setting, self.kind, self.row.layer, self.row.head


def items_of(runs: Sequence[Source]) -> list[Item]:
    """Every row once, bounds measured elsewhere included.

    Args:
        runs: The folders.

    Returns:
        Items; those of a row that stands in several folders once.
    """
    found: dict[str, tuple[Source, Measurement]] = {}
    for run in runs:
        for row in run.rows:
            found.setdefault(row.id, (run, row))
    names = _names(row for _, row in found.values())
    items = [_item(run, row, names) for run, row in found.values()]
    held = {(*item.setting, item.row.layer) for item in items if item.kind == REAL}
    for run in runs:
        # The rows of a run folder stand there themselves.
        for bound in run.bounds if run.run is None else ():
            made = _measured(bound)
            if made is None:
                continue
            item = _item(run, made, names)
            if item.kind != REAL or (*item.setting, made.layer) not in held:
                items.append(item)
    return items


def _names(rows: Iterable[Measurement]) -> dict[tuple[Any, ...], str]:
    """Names of models, with what tells apart those that share one."""
    versions: dict[str, dict[tuple[Any, ...], list[str]]] = {}
    for key in dict.fromkeys(map(_version, rows)):
        versions.setdefault(key[0], {})[key] = _words(*key[1:])
    names: dict[tuple[Any, ...], str] = {}
    for model, ways in versions.items():
        varied = [len(set(words)) > 1 for words in zip(*ways.values(), strict=True)]
        for key, words in ways.items():
            names[key] = " · ".join([model, *filter(None, compress(words, varied))])
    return names


_version = attrgetter("model", "step", "revision", "weights", "text", "side", "dtype", "seed")


def _words(
    step: int | None,
    revision: str | None,
    weights: str,
    text: str | None,
    side: str,
    dtype: str,
    seed: int,
) -> list[str]:
    return [
        "" if step is None else f"step {step}",
        revision or "",
        weights,
        text or "",
        "" if side == "self" else f"side {side}",
        dtype,
        f"seed {seed}",
    ]


def _item(run: Source, row: Measurement, names: Mapping[tuple[Any, ...], str]) -> Item:
    model = names.get(_version(row), row.model)
    kind = REAL if row.input in GIVEN else row.input
    return Item(row, (model, row.map, row.metric, row.move, row.read), kind, run)


def _measured(bound: BoundRow) -> Measurement | None:
    """A sigma of a sandwich as a row: at the text, or at an adversarial input."""
    real = bound.theorem == MEASURED
    known = real or bound.theorem == ADVERSARIAL
    if not known or bound.sigma is None or bound.metric != "frobenius":
        return None
    where = (bound.model, bound.map, bound.layer, bound.head, bound.num_tokens, bound.sample)
    return Measurement(
        id="/".join(map(str, (bound.theorem, *where))),
        model=bound.model,
        weights="",
        layer=bound.layer,
        head=bound.head,
        map=bound.map,
        metric=bound.metric,
        move="all",
        read="all",
        input="text" if real else ADVERSARIAL,
        num_tokens=bound.num_tokens,
        sample=bound.sample,
        sigma=bound.sigma,
        upper=bound.upper,
        delta=1e-6,
        status="converged",
        solver_residual=None,
        products=0,
        relative=None,
        top_token=None,
        top_share=None,
        radius_max=None if real else bound.radius,
        radius_rms=None,
        input_norm=None,
        output_norm=None,
        seconds=0.0,
        dtype="",
        device="",
        seed=0,
        tokens_sha256="",
        version="",
        note=None if real else bound.statement,
    )
