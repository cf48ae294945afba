"""Sigma and its company while a model is trained: rows with their step, a log, alerts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from lipscope.control.alarm import Alarm, Alert
from lipscope.control.signals import (
    Reading,
    entropy_and_sink,
    furthest,
    joint_norm,
    largest_logits,
)
from lipscope.engine.checks import argument, whole
from lipscope.engine.runs import AnyFolder, LocalRun, folder_of
from lipscope.engine.spec import Model, Options
from lipscope.errors import InputError, remark, shown
from lipscope.models import LoadedModel
from lipscope.models.data.windows import digest
from lipscope.models.loading import check_finite, fingerprint
from lipscope.models.tracing.sites import closed_form
from lipscope.pages.rows import Rows
from lipscope.records.folder import RunFolder
from lipscope.records.rows import Measurement, provenance, stable_id

PART = "monitor"
"""The part of the values of a run folder that holds the signals."""
_TOL = 1e-2  # of the intervals: a curve over training needs no more


class Monitor:
    """Reads a model's attention layers every so many steps of its training.

    A reading is what `measure` says of the model as it is then at the probe, a few inputs that
    stay the same: sigma with its interval, relative sigma, top share, radius; beside it the largest
    logit, the entropy and the sink mass of attention, the norms of weights and of the step's
    update, and how unusual the loss is. The model is put back as it was; torch's random numbers are
    left alone. A reading costs a few forward passes of the probe for each layer: see the
    benchmarks.

    Holds for one process, or for one of several that hold all weights. Layers whose weights are not
    read in closed form have no logit, entropy and sink mass, nor has a padded probe.

    Args:
        model: The model in training; a `LoadedModel` says what its rows call it.
        data: The probe: input ids, embeddings, pixels or a mapping of arguments.
        every: Steps between readings; one more is taken before the first step.
        layers: Indices from 0, or "all".
        out: Run folder, open or not, which `lipscope report` shows at any time; None for none.
        log: Called with a dictionary of numbers at every reading.
        alert: How many times its usual value (the median of the last ten readings) a signal must
            have to be told; None for no alerts.
        **options: Those of `measure` that make sense here, such as ``map``, ``tol``, ``modules``.

    Attributes:
        readings: All readings, in order.
        alerts: What was unusual.

    Raises:
        InputError: If the layers cannot be measured as asked; while training, if the loss or a
            weight is not finite: the layer whose sigma rose most is named.

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
        model: nn.Module | LoadedModel,
        data: Tensor | Mapping[str, Any],
        *,
        every: int = 100,
        layers: Sequence[int] | int | str | Literal["all"] = "all",
        out: AnyFolder = None,
        log: Callable[[dict[str, float]], Any] | None = None,
        alert: float | None = 2.0,
        **options: Unpack[Options],
    ) -> None:
        named = model.name if isinstance(model, LoadedModel) else None
        model = model.model if isinstance(model, LoadedModel) else model
        if not isinstance(model, nn.Module):
            raise InputError(f"`model` should be a torch module. Found `{type(model).__name__}`.")
        if not isinstance(data, Tensor | Mapping):
            raise InputError(
                "`data` should be a batch: a tensor or a mapping of tensors. Found "
                f"`{type(data).__name__}`."
            )
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
        self._last = 0
        self.readings: list[Reading] = []
        self.alerts: list[Alert] = []
        self._alarm = Alarm(math.inf, math.inf) if alert is None else Alarm(alert)
        self._weights: dict[int, list[nn.Parameter]] = {}
        self._before: dict[int, list[Tensor]] = {}
        self._folder: RunFolder | None = None
        with _in_full(self.model), self._request(self._name, ""):
            pass  # options are checked, and the layers are looked for
        self._lent = out if isinstance(out, RunFolder) else None
        self._folder = self._lent or (None if out is None else self._opened(out))
        self._written = set() if self._folder is None else {*self._folder.values(PART)}

    # --- around a step of the optimiser

    @contextlib.contextmanager
    def step(self, loss: Tensor | float | None = None) -> Iterator[None]:
        """What the step of the optimiser is taken in: ``with monitor.step(loss): …``.

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
            self._before = {
                i: [p.detach().clone() for p in own] for i, own in self._weights.items()
            }

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
        self._alarm.loss(value)

    def start(self, step: int) -> None:
        """Say that training begins at another step than 0, as from a checkpoint."""
        self._last = step

    # --- a reading

    def read(self) -> list[Reading]:
        """Read all layers now.

        Returns:
            One reading for each layer, also in `readings`; none, and a remark, where the layers
            cannot be measured any more, as with scores that float32 cannot hold.

        Raises:
            InputError: If a weight is not finite; at the first reading, for whatever the layers
                cannot be measured.
        """
        try:
            check_finite(self.model)
        except InputError as problem:
            text = str(problem).rstrip(".")
            raise InputError(f"Step {self._last}: {text}{self.rose()}.") from None
        revision = f"sha256:{fingerprint(self.model)}"
        request = self._request(self._named(revision), revision)
        try:
            with _in_full(self.model), request as run:
                new = self._found(run, run.rows())
        except InputError as problem:
            if not self.readings:
                raise
            remark(f"Step {self._last}: no reading. {problem}")  # training goes on
            new = []
        self._before = {}
        self.readings += new
        self._tell(new)
        return new

    def close(self) -> None:
        """Bring the run folder to its end, and give it free; one that was open stays so."""
        if self._folder is not self._lent and self._folder is not None:
            self._folder.__exit__()
            self._folder = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def attach(self, trainer: Any) -> Any:
        """Let a ``transformers.Trainer`` call this monitor, and log into what it logs to.

        The monitor reads before the first step and after every ``every`` steps of the optimiser.
        Losses are those that the Trainer logs; a gradient norm that it logs and that is not finite
        stops training as a loss does.

        Args:
            trainer: The Trainer, before ``train()``.

        Returns:
            The callback, a ``TrainerCallback``.
        """
        from lipscope.engine.trainer import callback_of

        callback = callback_of(self, trainer)
        trainer.add_callback(callback)
        return callback

    def _request(self, name: str, revision: str) -> LocalRun:
        """What is asked of the model as it is now; its options are checked."""
        kind = str(next(self.model.parameters()).dtype)[6:]
        loaded = LoadedModel(name, self.model, None, revision, kind)
        more = {"models": (Model(name, self._last),), "tokens": False}
        asked = {"verb": "Monitor", "more": more, "out": self._folder}
        return LocalRun(loaded, self.data, self._asked, **asked)

    def _found(self, run: LocalRun, rows: Rows) -> list[Reading]:
        by_layer: dict[int, list[Measurement]] = {}
        for row in rows:
            if row.error is not None:
                raise InputError(f"Layer {row.layer} should be measured. Found: {row.error}")
            by_layer.setdefault(row.layer or 0, []).append(row)
        tokens = {(row.layer, row.sample): row.num_tokens for row in rows}
        heads = self._heads(run, tokens)
        found = []
        for layer, some in by_layer.items():
            own = self._weights[layer]
            logits, entropies, sinks = heads.get(layer, ((), (), ()))
            moved = self._before.get(layer)
            found.append(
                Reading(
                    step=self._last,
                    layer=layer,
                    module=some[0].module or "",
                    sigma=_largest(row.sigma for row in some),
                    relative=_largest(row.relative for row in some),
                    top_share=_largest(row.top_share for row in some),
                    radius=_largest(row.radius_max for row in some),
                    largest_logit=_largest(logits),
                    entropy=min(entropies, default=None),
                    sink_mass=_largest(sinks),
                    weight_norm=joint_norm(own),
                    update_norm=None if moved is None else joint_norm(own, moved),
                    logits=logits,
                    entropies=entropies,
                    sinks=sinks,
                )
            )
        return found

    def _heads(
        self, run: LocalRun, tokens: Mapping[tuple[int | None, int], int]
    ) -> dict[int, tuple[tuple[float, ...], ...]]:
        """Largest logit, entropy and sink mass by layer and head; nothing where not known."""
        several: dict[int, list[list[Tensor]]] = {}
        for job in run.jobs:
            record = run.session.places.trace(job)
            layer = job.layer or 0
            call = record.calls[layer]
            names = {module: name for name, module in record.model.named_modules()}
            parts = [call.module] if call.projection is None else [call.module, call.projection]
            # What torch's face of our own attention shows as a projection is no module of it.
            own = [self.model.get_submodule(names[part]) for part in parts if part in names]
            params = {id(p): p for part in own for p in part.parameters()}
            self._weights[layer] = list(params.values())
            attention = closed_form(call)
            padded = tokens[job.layer, job.sample] != len(call.x)
            if attention is None or call.refusal or padded:
                continue
            logits = largest_logits(attention, call.x)
            several.setdefault(layer, []).append([logits, *entropy_and_sink(attention, call.x)])
        found = {}
        for layer, entries in several.items():
            logits, entropies, sinks = (torch.stack(one) for one in zip(*entries, strict=True))
            heads = logits.amax(0), entropies.mean(0), sinks.amax(0)
            found[layer] = tuple(tuple(map(float, one)) for one in heads)
        return found

    def _tell(self, new: Sequence[Reading]) -> None:
        """Into the folder, the log and the alerts."""
        flat: dict[str, float] = {"lipscope/step": float(self._last)}
        if self._alarm.z_score is not None:
            flat["lipscope/loss_z"] = self._alarm.z_score
        unusual = [self._alarm.loss_alert(self._last)]
        for one in new:
            signals = one.signals()
            flat |= {
                f"lipscope/layer{one.layer}/{name}": value
                for name, value in signals.items()
                if value is not None
            }
            unusual += self._alarm.signals(one.step, one.layer, one.module, signals)
            if self._folder is not None:
                content = asdict(one) | {"loss_z": self._alarm.z_score}
                key = stable_id({"part": PART, **content})
                if key not in self._written:
                    self._folder.add_value(PART, key, _plain(content))
                    self._written.add(key)
        if self.log is not None:
            self.log(flat)
        for alert in filter(None, unusual):
            self.alerts.append(alert)
            remark(str(alert))

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


@contextlib.contextmanager
def _in_full(model: nn.Module) -> Iterator[None]:
    """A model that computes in the precision of its weights, whatever a trainer put around it.

    ``accelerate`` gives a model a forward of its own that computes under autocast.
    """
    wrapped = vars(model).get("forward") if hasattr(model, "_original_forward") else None
    device = next(model.parameters()).device.type
    try:
        if wrapped is not None:
            model.forward = model._original_forward  # pyright: ignore
        with torch.autocast(device, enabled=False):
            yield
    finally:
        if wrapped is not None:
            model.forward = wrapped


def _largest(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return max(found, default=None)


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """Values that JSON can hold: what is not finite is null."""

    def one(value: Any) -> Any:
        if isinstance(value, tuple):
            return [one(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: one(value) for name, value in content.items()}
