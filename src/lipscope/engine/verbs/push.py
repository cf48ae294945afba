"""Pushes of a layer's input along its worst direction in the model: where sigma stops holding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from rich.table import Table
from rich.text import Text

from lipscope.charts import as_svg, visible
from lipscope.display import Drawing, Piece, Shown, pieces, rounded_up
from lipscope.engine.checks import argument, flag, is_number, items, one_of, whole_number
from lipscope.engine.classifier import (
    By,
    Classifier,
    DecisionOptions,
    classifier_of_texts,
    decides_by,
)
from lipscope.engine.direction_words import given_texts
from lipscope.engine.plan import Job
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import (
    AnyData,
    AnyFolder,
    LocalRun,
    Progress,
    Tell,
    as_callback,
    of_one_window,
)
from lipscope.engine.spec import OF_QUESTION, Options, Verb
from lipscope.engine.verbs.push_probe import (
    PushProbe,
)
from lipscope.errors import InputError, shown, stated
from lipscope.models import MAPS
from lipscope.pages import Push, Rows, empty_table, number, pushes_in
from lipscope.records import (
    DIRECTIONS,
    PATCHES,
    PLACES,
    STEPS,
    Measurement,
    PushDirection,
    PushPlace,
    PushStep,
    stable_id,
)

_PUSH = Verb("push", OF_QUESTION, "float64")
_MAPS = tuple(name for name in MAPS if name != "heads")  # the model never forms its output
_MOST_SIZES, _MOST_DRAWS = 1000, 100
_COLUMNS = ("size", "token norms", "sigma·size", "certified", "map +v", "−v", "random", "block")
_COLUMNS += ("model",)


class PushOptions(Options, DecisionOptions, total=False):
    """Options of `push`, documented there."""

    certificate: bool | None


_DEFAULTS = {"between": None, "read_out": None, "pool": "mean", "certificate": None}


@dataclass(frozen=True, repr=False)
class Pushed(Shown):
    """The effect of pushes of a layer's input.

    Attributes:
        rows: Sigma of the map, one row for each input.
        places: The state before the pushes, for each row.
        directions: Every direction of each row, with the sizes at which something changes.
        steps: Every size of every direction.
    """

    rows: Rows
    places: tuple[PushPlace, ...]
    directions: tuple[PushDirection, ...]
    steps: tuple[PushStep, ...]


def push(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layer: int = 0,
    length: int | None = None,
    eps: Sequence[float] | float | None = None,
    draws: int = 3,
    among: Sequence[str] | Path | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[PushOptions],
) -> Pushed:
    """Run a model with a layer's input moved along its worst direction, at a grid of sizes.

    ``E = eps e`` with ``‖e‖_F = 1`` is added to the input of the map inside the model, which runs
    on from there unchanged. The directions are ``+v`` and ``-v``, the top right singular vector;
    ``+top`` and ``-top``, its top token alone; random ones; and for pictures, if pixels can realise
    them, ``+patches`` and ``-patches``, v without its class token. The observed change is compared
    with ``sigma · eps``, its first-order prediction, and with a certificate that holds for every
    move of that size.

    Holds for every model that `measure` supports. Certificates and decisions are for the map
    ``attention`` of dot-product layers that are read in closed form.
    ``model``, ``data`` and ``progress`` are as for `measure`.

    Args:
        length: Number of tokens of the text window; 64 if None.
        eps: Sizes ``‖E‖_F``. If None, four per decade from a thousandth of a token's mean norm
            to ``‖X‖_F``: from where sigma should hold to where the move outweighs the input.
        draws: Number of random directions.
        among: Texts, or the ``Path`` of a file with one per line: the reading is the nearest to the
            output, by the cosine of the mean over tokens. If None, the next token of a decoder.
        out: Run folder: rows, and the parts ``push``, ``push-directions``, ``push-places``.
        **options: Options of `measure` about the input and the solver, ``dtype`` float64, and

            * ``between``: texts, as in `lipscope certify`: the one nearest to the layer's pooled
              output is its decision, reported with its certified radius; ``read_out``: instead, a
              file or a `Classifier` on the layer's pooled output; ``pool="mean"`` over tokens, or
              the ``first`` token, for decisions.
            * ``certificate``: whether changes are certified; if None, only if that takes up to
              about a minute, else the note says so.

    A single token is mapped linearly, so its output moves by ``sigma · eps`` at every size:

    >>> import torch, lipscope as ls
    >>> one, x = torch.eye(2).double(), torch.tensor([[3.0, 1.0]]).double()
    >>> found = push(ls.DotProduct(one, one, one), x, eps=[1.0, 100.0])
    >>> [round(step.layer / step.promise, 9) for step in found.steps[:2]]
    [1.0, 1.0]
    """
    asked: dict[str, Any] = {**options, **of_one_window(data, options, length), "layers": [layer]}
    own = {name: asked.pop(name, usual) for name, usual in _DEFAULTS.items()}
    between, certificate = own["between"], own["certificate"]
    wanted: dict[str, Any] = {
        "eps": None if eps is None else _grid(eps),
        "draws": argument(whole_number(0, _MOST_DRAWS), "draws", draws),
        "pool": argument(one_of("mean", "first"), "pool", own["pool"]),
        "certificate": None if certificate is None else argument(flag, "certificate", certificate),
    }
    argument(one_of(*_MAPS), "map", options.get("map", "attention"))
    texts = given_texts(among)
    by = _decides_by(between, own["read_out"], asked)
    digests = by.digests if isinstance(by, Classifier) else None
    wanted |= {"among": texts, "between": between, "read_out": digests}
    with LocalRun(model, data, asked, _PUSH, out=out, asked={"verb": "push"}) as run:
        rows = run.rows()
        found = _Pushes(run, rows, wanted, texts, by, as_callback(progress))
        for job, row in zip(run.jobs, rows, strict=True):
            found.add(job, row)
    return Pushed(rows, tuple(found.places), tuple(found.directions), tuple(found.steps))


class _Pushes:
    """The pushes of a run, from its folder if they are there."""

    def __init__(
        self,
        run: LocalRun,
        rows: Rows,
        wanted: Mapping[str, Any],
        among: Sequence[str],
        by: By,
        tell: Tell,
    ) -> None:
        self._run, self._wanted, self._tell = run, wanted, tell
        self._among, self._by = among, by
        self._names = ["+v", "-v", "+top", "-top"]
        self._names += [f"random {k + 1}" for k in range(wanted["draws"])]
        self._count, self._total = 0, len(rows) * len(self._names)
        self.places: list[PushPlace] = []
        self.directions: list[PushDirection] = []
        self.steps: list[PushStep] = []

    def add(self, job: Job, row: Measurement) -> None:
        """Add the pushes of a row."""
        if row.sigma is None:
            raise InputError(f"No push: {row.error or row.note or 'sigma is unknown'}.")
        push = stable_id({"id": row.id, **self._wanted})
        made: list[PushProbe] = []

        def place() -> PushProbe:  # deferred: a finished push loads no model
            if not made:
                pool, by = self._wanted["pool"], self._by
                if by is not None and not isinstance(by, Classifier):
                    how: Any = {"pool": pool, "special_tokens": self._run.spec.special_tokens}
                    by = classifier_of_texts(self._run.model, by, layer=job.layer or 0, **how)
                decides = None if by is None else (by, pool)
                made.append(PushProbe(self._run, job, row, push, self._among, decides))
            return made[0]

        held = self._run.value(PLACES, push, lambda: place().about(self._wanted))
        about = PushPlace(**held)
        self.places.append(about)
        names = [*self._names, *([f"+{PATCHES}", f"-{PATCHES}"] if about.patches else [])]
        self._total += len(names) - len(self._names)
        for name in names:
            self._tell(self._count, self._total, row if made else None)
            self._direction(about, name, place)
            self._count += 1
        self._tell(self._count, self._total, row if made else None)

    def _direction(self, about: PushPlace, name: str, place: Callable[[], PushProbe]) -> None:
        end = f"{about.push}/{name}"
        keys = [f"{end}/{eps!r}" for eps, _ in about.sizes]
        held, ends = self._run.values(STEPS), self._run.values(DIRECTIONS)
        if end not in ends or not all(key in held for key in keys):
            steps, direction = place().pushed(name, about)
            for key, step in zip(keys, steps, strict=True):
                self._run.keep_value(STEPS, key, step)
            self._run.keep_value(DIRECTIONS, end, direction)  # last, to mark it complete
        self.steps += [PushStep(**held[key]) for key in keys]
        self.directions.append(PushDirection(**ends[end]))


def _grid(eps: Any) -> list[float]:
    """Unique sizes in ascending order."""
    some = items(eps)
    for one in some:
        if not is_number(one) or not one > 0:
            raise InputError(f"`eps` should be positive numbers. Found {stated('eps', one)}.")
    found = sorted({float(one) for one in some})
    if not 0 < len(found) <= _MOST_SIZES:
        raise InputError(f"`eps` should be 1 to {_MOST_SIZES:,} sizes. Found {len(found):,}.")
    return found


def _decides_by(between: Sequence[str] | None, read_out: Any, options: Mapping[str, Any]) -> By:
    """The given read-out or class texts, checked with the other options."""
    given = between is not None or read_out is not None
    if given and options.get("map", "attention") != "attention":
        raise InputError(
            "A decision reads the layer's attention. Found `between` or `read_out` with `map = "
            f"{shown(options['map'])}`; leave one of them out."
        )
    return decides_by(between, read_out)


# --- display


@pieces.register
def _pushed(found: Pushed) -> Iterator[Piece]:
    """A table of sizes, a summary in words, and the chart."""
    for push in pushes_in(found.rows, found.places, found.directions, found.steps):
        yield _sizes_of(push)
        yield from push.sentences
        yield Drawing(lambda push=push: _chart(push), push.name)


def _sizes_of(push: Push) -> Table:
    reading = push.place.reading
    made = empty_table(f"{push.name}: sigma {number(push.row.sigma)}", (), _COLUMNS)
    if reading:
        made.add_column("says, +v")
    other = {one.eps: one.layer for one in push.along("-v")}
    drawn = push.random
    for one in push.along("+v"):
        chance = drawn.get(one.eps)
        ends = "–" if not chance else f"{number(min(chance), 2)}–{number(max(chance), 2)}"
        cells = [
            *(number(v, 3) for v in (one.eps, one.relative, one.promise)),
            number(one.certificate, 3, rounded_up),
            *(number(v, 3) for v in (one.layer, other.get(one.eps))),
            ends,
            *(number(v, 3) for v in (one.block, one.model)),
        ]
        best = [Text(visible(text)) for text, _ in json.loads(one.reads)[:1]]
        made.add_row(*cells, *best)
    return made


def _chart(push: Push) -> str:
    from lipscope.pages import push_charts

    return "".join(as_svg(chart) for _, chart in push_charts([push]))
