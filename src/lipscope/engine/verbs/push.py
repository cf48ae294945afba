"""A layer's input pushed along its worst direction, in the model as it is: where sigma ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from lipscope.certificates import Pool
from lipscope.display import Shown
from lipscope.engine.checks import argument, flag, is_number, items, one_of, whole
from lipscope.engine.classifier import Classifier, classifier_of_texts, read_out_of
from lipscope.engine.plan import Job
from lipscope.engine.progress import Progress, Tell, told
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun, of_one_window
from lipscope.engine.spec import Options
from lipscope.engine.text_anchors import texts_of
from lipscope.engine.verbs.push_curve import Along
from lipscope.errors import InputError, shown
from lipscope.models import MAPS
from lipscope.pages import Rows
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

_WITHOUT = ("per_head", "metric", "move", "read", "side", "inputs", "ascent_steps", "theorems")
_WITHOUT += ("sharp", "radius", "rest", "average")
_MAPS = tuple(name for name in MAPS if name != "heads")  # whose output the model never forms
_MOST_SIZES, _MOST_DRAWS = 1000, 100


@dataclass(frozen=True, repr=False)
class Pushed(Shown):
    """The effect of pushes of a layer's input.

    Attributes:
        rows: Sigma of the map, one row for each input.
        places: What there was before the pushes, for each row.
        directions: Every direction of each row, and where something changes along it.
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
    between: Sequence[str] | None = None,
    read_out: str | Path | Classifier | None = None,
    pool: Pool = "mean",
    certificate: bool | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Pushed:
    """Run a model with a layer's input moved along its worst direction, at a grid of sizes.

    ``E = eps e`` with ``‖e‖_F = 1`` is added to the input of the map where the model holds it, and
    the model runs on from there as it is. The directions: ``+v`` and ``-v``, the top right
    singular vector; ``+top`` and ``-top``, its top token alone; random ones; of pictures, where
    pixels move them so, ``+patches`` and ``-patches``, v without its class token. Beside what
    happens stand ``sigma · eps``, which is what happens to first order, and a certificate
    of the change that holds for every move of that size.

    Holds for every model that `measure` takes. Certificates are for the map ``attention`` of
    dot-product layers that are read in closed form, decisions likewise.

    Args:
        model: As for `measure`.
        data: Text or a batch, as for `measure`; the default text if None.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window; 64 if None.
        eps: Sizes ``‖E‖_F``. If None, four a decade from a thousandth of the mean norm of a token
            to ``‖X‖_F``: from where sigma should hold to where the move outweighs the input.
        draws: Number of random directions.
        among: Texts, or the ``Path`` of a file with one on each line: the nearest to the output is
            read, by the cosine of the mean over tokens. If None, the next token of a decoder.
        between: Texts, as in `lipscope certify`: the nearest one to the layer's pooled output is
            its decision, whose certified radius stands beside the pushes.
        read_out: Another decision: a file, or a `Classifier` on the layer's pooled output.
        pool: ``mean`` over tokens, or the ``first`` token: for decisions.
        certificate: Whether changes are certified; if None, where that takes about a minute at
            most, else the note says so.
        out: Run folder: rows, and the parts ``push``, ``push-directions``, ``push-places``.
        progress: Called as ``progress(done, total, row)``, in directions.
        **options: Those of `measure` about the input and the solver; ``dtype`` float64.

    Returns:
        What happened.

    Raises:
        InputError: For every request that cannot be answered as asked.

    One token is mapped linearly, so that it moves by ``sigma · eps`` at every size:

    >>> import torch, lipscope as ls
    >>> one, x = torch.eye(2).double(), torch.tensor([[3.0, 1.0]]).double()
    >>> found = push(ls.DotProduct(one, one, one), x, eps=[1.0, 100.0])
    >>> [round(step.layer / step.promise, 9) for step in found.steps[:2]]
    [1.0, 1.0]
    """
    wanted: dict[str, Any] = {
        "eps": None if eps is None else _sizes(eps),
        "draws": argument(whole(0, _MOST_DRAWS), "draws", draws),
        "pool": argument(one_of("mean", "first"), "pool", pool),
        "certificate": None if certificate is None else argument(flag, "certificate", certificate),
    }
    argument(one_of(*_MAPS), "map", options.get("map", "attention"))
    texts = texts_of(among)
    decides = _decision(between, read_out, options)
    wanted |= {"among": texts, "between": between, "read_out": decides and decides.digests}
    asked = {**options, **of_one_window(data, options, length), "layers": [layer]}
    with LocalRun(
        model,
        data,
        asked,
        verb="push",
        without=_WITHOUT,
        dtype="float64",
        out=out,
        asked={"verb": "push"},
    ) as run:
        rows = run.rows()
        found = _Pushes(run, rows, wanted, texts, between or (), decides, told(progress))
        for job, row in zip(run.jobs, rows, strict=True):
            found.add(job, row)
    return Pushed(rows, tuple(found.places), tuple(found.directions), tuple(found.steps))


class _Pushes:
    """The pushes of a run, from its folder where it holds them."""

    def __init__(
        self,
        run: LocalRun,
        rows: Rows,
        wanted: Mapping[str, Any],
        among: Sequence[str],
        between: Sequence[str],
        decides: Classifier | None,
        tell: Tell,
    ) -> None:
        self._run, self._wanted, self._tell = run, wanted, tell
        self._among, self._between, self._given = among, between, decides
        folder = run.folder
        parts = (PLACES, DIRECTIONS, STEPS)
        self._held = {one: {} if folder is None else folder.values(one) for one in parts}
        self._names = ["+v", "-v", "+top", "-top"]
        self._names += [f"random {k + 1}" for k in range(wanted["draws"])]
        self._count, self._total = 0, len(rows) * len(self._names)
        self.places: list[PushPlace] = []
        self.directions: list[PushDirection] = []
        self.steps: list[PushStep] = []

    def add(self, job: Job, row: Measurement) -> None:
        """The pushes of one row."""
        if row.sigma is None:
            raise InputError(f"No push: {row.error or row.note or 'sigma is not known'}.")
        push = stable_id({"id": row.id, **self._wanted})
        made: list[Along] = []

        def place() -> Along:  # not before it is needed: a finished push loads no model
            if not made:
                classes = self._classes()
                decides = None if classes is None else (classes, self._wanted["pool"])
                made.append(Along(self._run, job, row, push, self._among, decides))
            return made[0]

        if push not in self._held[PLACES]:
            self._keep(PLACES, push, asdict(place().about(self._wanted)))
        about = PushPlace(**self._held[PLACES][push])
        self.places.append(about)
        names = [*self._names, *([f"+{PATCHES}", f"-{PATCHES}"] if about.patches else [])]
        self._total += len(names) - len(self._names)
        for name in names:
            self._tell(self._count, self._total, row if made else None)
            self._direction(about, name, place)
            self._count += 1
        self._tell(self._count, self._total, row if made else None)

    def _direction(self, about: PushPlace, name: str, place: Callable[[], Along]) -> None:
        end = f"{about.push}/{name}"
        keys = [f"{end}/{eps!r}" for eps, _ in about.sizes]
        held, ends = self._held[STEPS], self._held[DIRECTIONS]
        if end not in ends or not all(key in held for key in keys):
            steps, direction = place().pushed(name, about)
            for key, step in zip(keys, steps, strict=True):
                self._keep(STEPS, key, asdict(step))
            self._keep(DIRECTIONS, end, asdict(direction))  # last: then all of it is there
        self.steps += [PushStep(**held[key]) for key in keys]
        self.directions.append(PushDirection(**ends[end]))

    def _classes(self) -> Classifier | None:
        """What decides, if anything is to be decided."""
        if self._given is not None or not self._between:
            return self._given
        spec = self._run.spec
        return classifier_of_texts(
            self._run.model,
            self._between,
            layer=self._run.jobs[0].layer or 0,
            pool=self._wanted["pool"],
            special_tokens=spec.special_tokens,
        )

    def _keep(self, part: str, key: str, content: Mapping[str, Any]) -> None:
        folder = self._run.folder
        self._held[part][key] = dict(content)
        if folder is not None:
            folder.add_value(part, key, content)


def _sizes(eps: Any) -> list[float]:
    """Sizes that rise, each once."""
    some = items(eps)
    for one in some:
        if not is_number(one) or not one > 0:
            raise InputError(f"`eps` should be positive numbers. Found `eps = {shown(one)}`.")
    found = sorted({float(one) for one in some})
    if not 0 < len(found) <= _MOST_SIZES:
        raise InputError(f"`eps` should be 1 to {_MOST_SIZES:,} sizes. Found {len(found):,}.")
    return found


def _decision(
    between: Sequence[str] | None, read_out: Any, options: Mapping[str, Any]
) -> Classifier | None:
    """The read-out that was given, checked with what goes with it."""
    decides = between is not None or read_out is not None
    if decides and options.get("map", "attention") != "attention":
        raise InputError(
            "A decision reads the layer's attention. Found `between` or `read_out` with `map = "
            f"{shown(options['map'])}`; leave one of them out."
        )
    return read_out_of(between, read_out) if decides else None
