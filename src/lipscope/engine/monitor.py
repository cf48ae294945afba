"""A monitor of sigma and other signals during training: rows with their step, a log, alerts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.control import Alarm, Alert, Reading, furthest, joint_norm
from lipscope.engine.checks import argument, whole
from lipscope.engine.heads import Heads, heads_of, in_full
from lipscope.engine.ready_model import ReadyModel
from lipscope.engine.result import explained
from lipscope.engine.runs import AnyFolder, LocalRun, folder_of
from lipscope.engine.spec import Model, Options
from lipscope.errors import InputError, remark, shown
from lipscope.models import LoadedModel, check_finite, copied, digest, fingerprint
from lipscope.records import Measurement, RunFolder, provenance, stable_id

PART, ALERTS = "monitor", "alerts"
"""The parts of the values of a run folder that hold the signals, and the alerts."""
_TOL = 1e-2  # of the intervals: a curve over training needs no more


class Monitor:
    """Reads a model's attention layers every so many steps of its training.

    A reading is what `measure` says of the model as it is then at the probe, a few inputs that
    stay the same: sigma with its interval, relative sigma, top share, radius; beside it the largest
    logit, the entropy and the sink mass of attention, the norms of weights and of the step's
    update, and how unusual the loss is. The model and torch's random numbers are left as they were.
    A reading costs a few forward passes of the probe for each layer.

    Holds for one process, or for one of several that hold all weights. Layers whose weights are not
    read in closed form have no logit, entropy and sink mass, nor has a padded probe.

    Args:
        model: The model in training; an open model says what its rows call it.
        data: The probe: input ids, embeddings, pixels or a mapping of arguments.
        every: Steps between readings; one more is taken before the first step.
        layers: Indices from 0, or "all".
        out: Run folder, open or not, which `lipscope report` shows at any time.
        log: Called with a dictionary of numbers at every reading.
        alert: How many times the largest of its last 15 readings sigma must be to be told; other
            signals, which move more by themselves, its fifth power (norms of updates: its
            tenth). None for no alerts.
        **options: Those of `measure` that make sense here, such as ``map``, ``tol``, ``modules``.

    Attributes:
        readings: All readings, in order.

    Raises:
        InputError: If the layers cannot be measured as asked; in training, if loss or weights are
            not finite.

    >>> import torch, lipscope as ls
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> monitor = ls.Monitor(model, torch.randn(1, 5, 8), every=2)
    >>> for _ in range(4):
    ...     loss = model(torch.randn(4, 5, 8)).square().mean()
    ...     loss.backward()
    ...     with monitor.step(loss):
    ...         optimiser.step()
    >>> [one.step for one in monitor.readings]
    [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module | LoadedModel | ReadyModel,
        data: Tensor | Mapping[str, Any],
        *,
        every: int = 100,
        layers: Sequence[int] | int | str | Literal["all"] = "all",
        out: AnyFolder = None,
        log: Callable[[dict[str, float]], Any] | None = None,
        alert: float | None = 1.15,
        **options: Unpack[Options],
    ) -> None:
        named = model.name if isinstance(model, LoadedModel | ReadyModel) else None
        model = model.model if isinstance(model, LoadedModel | ReadyModel) else model
        if not isinstance(model, nn.Module):
            raise InputError(f"`model` should be a torch module. Found `{type(model).__name__}`.")
        if isinstance(model, Attention):
            raise InputError("`model` should hold attention. Found a layer by itself.")
        if not isinstance(data, Tensor | Mapping):
            found = type(data).__name__
            raise InputError(f"`data` should be a batch: a tensor or a mapping. Found `{found}`.")
        if log is not None and not callable(log):
            raise InputError(f"`log` should be a function. Found `{type(log).__name__}`.")
        if alert is not None and not (isinstance(alert, int | float) and alert > 1):
            raise InputError(f"`alert` should be above 1. Found `alert = {shown(alert)}`.")
        if options.get("map") == "model":
            raise InputError("`map` should be one of layers. Found `model`, which has none.")
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self._name = named or type(self.model).__name__
        self.data, self.log = data, log
        self.every = argument(whole(1, 10**9), "every", every)
        first = next(self.model.parameters())
        dtype = "float64" if first.dtype == torch.float64 else "float32"
        usual = {"tol": _TOL, "device": str(first.device), "dtype": dtype}
        given = {name: value for name, value in options.items() if value is not None}
        self._asked: dict[str, Any] = {**usual, **given, "layers": layers}
        self._last, self._closed, self._run, self._loss = 0, False, self._name, math.nan
        self.readings: list[Reading] = []
        self._alarm = Alarm(math.inf, math.inf) if alert is None else Alarm(alert)
        self._names: dict[int, str] = {}
        self._weights: dict[int, list[nn.Parameter]] = {}
        self._before: dict[int, list[Tensor]] = {}
        self._folder: RunFolder | None = None
        with in_full(self.model), self._request(self._name, "") as run:
            self._layers = sorted({job.layer or 0 for job in run.jobs})
        self._lent = out if isinstance(out, RunFolder) else None
        self._folder = self._lent or (None if out is None else self._opened(out))
        self._written: set[str] = set()
        if self._folder is not None:
            self._written = {*self._folder.values(PART), *self._folder.values(ALERTS)}

    @property
    def alerts(self) -> list[Alert]:
        """Alerts of what was unusual, at most five a run."""
        return self._alarm.told

    # --- around a step of the optimiser

    @contextlib.contextmanager
    def step(self, loss: Tensor | float | None = None) -> Iterator[None]:
        """The context of one step of the optimiser: ``with monitor.step(loss): …``.

        Args:
            loss: That of the step, for its z-score.
        """
        self.before()
        yield
        self.after(loss)

    def before(self) -> None:
        """Before a step: read once before the first one, and keep the weights that will move."""
        if not self.readings:
            self.read()
        if (self._last + 1) % self.every == 0:
            kept = self._weights.items()
            self._before = {i: [p.detach().clone() for p in own] for i, own in kept}

    def after(self, loss: Tensor | float | None = None) -> None:
        """After a step: count it, and read where it is time.

        Raises:
            InputError: If the loss is not finite.
        """
        self._last += 1
        if loss is not None:
            self.see(loss)
        if self._last % self.every == 0:
            self.read()

    def see(self, loss: Tensor | float) -> None:
        """Take a loss in.

        Raises:
            InputError: If it is not finite.
        """
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        if not math.isfinite(value):
            raise InputError(
                f"Training should have a finite loss. Found {value} at step {self._last}"
                f"{self.rose()}."
            )
        self._loss = value
        self._tell(self._alarm.loss(self._last, value))

    def start(self, step: int) -> None:
        """Say that training begins at another step than 0, as from a checkpoint."""
        self._last = step

    # --- a reading

    def read(self) -> list[Reading]:
        """Read all layers now.

        A layer that float32 cannot measure is measured in float64. One that cannot be measured at
        all has the signals that need no Jacobian, and an alert says why.

        Returns:
            One reading for each layer, also in `readings`.

        Raises:
            InputError: If a weight is not finite; at the first reading, for whatever a layer
                cannot be measured.
        """
        try:
            check_finite(self.model)
        except InputError as problem:
            text = str(problem).rstrip(".")
            raise InputError(f"Step {self._last}: {text}{self.rose()}.") from None
        revision = f"sha256:{fingerprint(self.model)}"
        name = self._named(revision)
        self._run = name.rpartition("@")[0]
        with in_full(self.model):
            heads = self._heads(self._request(name, revision))
            rows, problems = self._measured(name, revision)
        new = [
            self._reading(layer, heads.get(layer), rows.get(layer, ()), problems.get(layer))
            for layer in self._layers
        ]
        self._before = {}
        self.readings += new
        self._note(new)
        return new

    def close(self) -> None:
        """Say what the run was; bring the run folder to its end, unless it was open before."""
        if self.readings and not self._closed:
            remark(self.summary())
            self._closed = True
        if self._folder is not self._lent and self._folder is not None:
            self._folder.__exit__()
            self._folder = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def attach(self, trainer: Any) -> Any:
        """Let a Trainer of transformers or of Lightning call this monitor.

        It logs into what the Trainer logs to, unless it has a ``log`` of its own. Losses are those
        of every step; a gradient norm that is logged and not finite stops training, too.

        Args:
            trainer: The Trainer, before ``train()`` or ``fit()``.

        Returns:
            The callback that the Trainer was given.
        """
        from lipscope.engine.trainer import attached

        return attached(self, trainer)

    def summary(self) -> str:
        """The run in one line, after a first reading: how often it was read, and its alerts."""
        steps = [*dict.fromkeys(one.step for one in self.readings)]
        end = f"steps {steps[0]} to {self._last}; {self._alarm.summary()}"
        return f"Monitor: {len(steps)} readings, {end}."

    def _request(self, name: str, revision: str, **more: Any) -> LocalRun:
        """What is asked of the model as it is now; its options are checked."""
        model = self.model
        if more.get("dtype", self._asked["dtype"]) != self._asked["dtype"]:
            # Not the model as it is: its own differences would be those of float32.
            model = copied(model).to(torch.float64)
        kind = str(next(self.model.parameters()).dtype)[6:]
        loaded = LoadedModel(name, model, None, revision, kind)
        set_ = {"models": (Model(name, self._last),), "tokens": False}
        asked = self._asked | more
        return LocalRun(loaded, self.data, asked, verb="Monitor", more=set_, out=self._folder)

    def _measured(
        self, name: str, revision: str
    ) -> tuple[dict[int, list[Measurement]], dict[int, str]]:
        """Rows by layer, and why float32, or nothing, can measure a layer."""
        found, problems = {}, {}
        with contextlib.suppress(Exception):  # then layer by layer
            return self._rows(name, revision), problems
        for layer in self._layers:
            first = self._tried(found, name, revision, layer, self._asked["dtype"])
            last = first and self._tried(found, name, revision, layer, "float64")
            if last:
                problems[layer] = f"cannot be measured ({last})"
            elif first:
                problems[layer] = f"cannot be measured in float32, and was in float64 ({first})"
        return found, problems

    def _tried(
        self, found: dict[int, list[Measurement]], name: str, revision: str, layer: int, dtype: str
    ) -> str:
        """Add the rows of a layer; why there are none, if so."""
        try:
            found |= self._rows(name, revision, layers=[layer], dtype=dtype)
        except Exception as problem:  # whatever it is, training goes on
            if not self.readings and dtype == "float64":
                raise
            return explained(problem).rstrip(".").removesuffix("; use float64")
        return ""

    def _rows(self, name: str, revision: str, **more: Any) -> dict[int, list[Measurement]]:
        found: dict[int, list[Measurement]] = {}
        with self._request(name, revision, **more) as run:
            for row in run.rows():
                if row.error is not None or row.sigma is None:
                    raise InputError(row.error or row.note or "Sigma is not finite.")
                found.setdefault(row.layer or 0, []).append(row)
        return found

    def _reading(
        self, layer: int, heads: Heads | None, rows: Sequence[Measurement], problem: str | None
    ) -> Reading:
        own, moved = self._weights[layer], self._before.get(layer)
        logits, entropies, sinks = heads.worst() if heads else ((), (), ())
        return Reading(
            step=self._last,
            layer=layer,
            module=self._names[layer],
            sigma=_largest(row.sigma for row in rows),
            relative=_largest(row.relative for row in rows),
            top_share=_largest(row.top_share for row in rows),
            radius=_largest([row.radius_max for row in rows] or (heads.radii if heads else [])),
            largest_logit=_largest(logits),
            entropy=min(filter(math.isfinite, entropies), default=None),
            sink_mass=_largest(sinks),
            weight_norm=joint_norm(own),
            update_norm=None if moved is None else joint_norm(own, moved),
            logits=logits,
            entropies=entropies,
            sinks=sinks,
            problem=problem,
        )

    def _heads(self, asked: LocalRun) -> dict[int, Heads]:
        try:
            found = heads_of(asked, self._layers)
        except Exception:  # sigma cannot be measured either, and an alert says why
            if not self.readings:
                raise
            return {}
        for layer, one in found.items():
            self._names[layer] = one.module
            own = [self.model.get_submodule(name) for name in one.holders]
            self._weights[layer] = [*{id(p): p for m in own for p in m.parameters()}.values()]
        return found

    def _note(self, new: Sequence[Reading]) -> None:
        """Into the folder, the log and the alerts."""
        flat: dict[str, float] = {"lipscope/step": float(self._last)}
        if self._alarm.z_score is not None:
            flat["lipscope/loss_z"] = self._alarm.z_score
        for one in new:
            flat |= {
                f"lipscope/layer{one.layer}/{name}": value
                for name, value in one.signals().items()
                if value is not None
            }
            self._keep(PART, asdict(one) | {"loss": self._loss, "loss_z": self._alarm.z_score})
        if self.log is not None:
            self.log(flat)
        self._tell(self._alarm.signals(new))

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self._keep(ALERTS, asdict(alert) | {"text": str(alert)})
            remark(str(alert))

    def _keep(self, part: str, content: dict[str, Any]) -> None:
        if self._folder is not None:
            content |= {"run": self._run}
            key = stable_id({"part": part, **content})
            if key not in self._written:
                plain = json.loads(json.dumps(content), parse_constant=lambda _: None)
                self._folder.add_value(part, key, plain)  # what is not finite is null
                self._written.add(key)

    def _opened(self, out: Any) -> RunFolder:
        data = self.data if isinstance(self.data, Mapping) else {"": self.data}
        plain = {k: digest(v) if isinstance(v, Tensor) else repr(v) for k, v in data.items()}
        spec = {"monitor": self._name, "data": plain, "every": self.every}
        spec |= {"asked": {k: shown(v) for k, v in self._asked.items()}}
        return RunFolder(folder_of(out), spec, provenance())

    def _named(self, revision: str) -> str:
        """The model at this step; another training in the same folder has a name of its own."""
        held = {} if self._folder is None else self._folder.models
        for again in count(1):
            name = self._name + (f"#{again}" if again > 1 else "")
            name = f"{name}@{self._last}"
            if name not in held or held[name].get("revision") == revision:
                return name
        raise AssertionError

    def rose(self) -> str:
        """Which layer's sigma rose most since the first reading, in words."""
        return furthest(self.readings)


def _largest(values: Any) -> float | None:
    return max((v for v in values if v is not None and math.isfinite(v)), default=None)
