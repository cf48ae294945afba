"""Monitoring of sigma and other signals during training: rows per step, a log, alerts."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from numbers import Real
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from lipscope import models
from lipscope.attention import Attention
from lipscope.control import (
    Alarm,
    Alert,
    Reading,
    entropy_and_sink,
    furthest,
    joint_norm,
    largest_logits,
)
from lipscope.engine.answer import explained
from lipscope.engine.checks import argument, whole_number
from lipscope.engine.plan import FUSED, WindowKey
from lipscope.engine.ready_model import ReadyModel
from lipscope.engine.runs import AnyFolder, LocalRun, folder_of
from lipscope.engine.session import ModelKey
from lipscope.engine.spec import Model, Options, Verb
from lipscope.errors import InputError, check_count, remark, shown
from lipscope.records import (
    ALERTS,
    READINGS,
    Measurement,
    RunFolder,
    provenance,
    stable_id,
)

_MONITOR = Verb("Monitor")
_TOL = 1e-2  # interval tolerance, sufficient for a curve over training


class Monitor:
    """Monitor a model's attention layers at regular intervals during training.

    A reading is the result of `measure` for the current model at the probe, a fixed set of
    inputs: sigma with its interval, relative sigma, top share, radius; in addition the largest
    logit, the entropy and the sink mass of attention, the norms of weights and of the step's
    update, and how unusual the loss is. The model and torch's random state are left unchanged.
    A reading costs a few forward passes of the probe per layer.

    Holds for a single process, or one of several that hold all weights. Layers whose weights are
    not read in closed form have no logit, entropy and sink mass; neither has a padded probe.

    Args:
        model: The model in training; an open model also gives its name in the rows.
        data: The probe: input ids, embeddings, pixels or a mapping of arguments.
        every: Steps between readings; a first one is taken before the first step.
        layers: Indices from 0, or "all".
        out: Run folder, open or not; `lipscope report` can show it at any time.
        log: Called with a dictionary of numbers at every reading.
        alert: Factor over the largest of its last 15 readings from which sigma raises an alert;
            noisier signals use its fifth power (norms of updates: its tenth). None for no
            alerts.
        **options: Options of `measure` that apply here, such as ``map``, ``tol``, ``modules``.

    Attributes:
        readings: All readings, in order.

    Raises:
        InputError: If the layers cannot be measured as requested; in training, if loss or weights
            are not finite.

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
        model: nn.Module | models.LoadedModel | ReadyModel,
        data: Tensor | Mapping[str, Any],
        *,
        every: int = 100,
        layers: Sequence[int] | int | str | Literal["all"] = "all",
        out: AnyFolder = None,
        log: Callable[[dict[str, float]], Any] | None = None,
        alert: float | None = 1.15,
        **options: Unpack[Options],
    ) -> None:
        named = model.name if isinstance(model, models.LoadedModel | ReadyModel) else None
        model = model.model if isinstance(model, models.LoadedModel | ReadyModel) else model
        if not isinstance(model, nn.Module):
            raise InputError(f"`model` should be a torch module. Found `{type(model).__name__}`.")
        if isinstance(model, Attention):
            raise InputError("`model` should hold attention. Found a layer by itself.")
        if not isinstance(data, Tensor | Mapping):
            found = type(data).__name__
            raise InputError(f"`data` should be a batch: a tensor or a mapping. Found `{found}`.")
        if log is not None and not callable(log):
            raise InputError(f"`log` should be a function. Found `{type(log).__name__}`.")
        if alert is not None and not (isinstance(alert, Real) and alert > 1):
            raise InputError(f"`alert` should be above 1. Found `alert = {shown(alert)}`.")
        if options.get("map") == "model":
            raise InputError("`map` should be one of layers. Found `model`, which has none.")
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self._name = named or type(self.model).__name__
        self.data, self.log = data, log
        self.every = argument(whole_number(1, 10**9), "every", every)
        first = next(self.model.parameters(), None)
        if first is None:
            raise InputError("`model` should have parameters. Found none; nothing is trained.")
        dtype = "float64" if first.dtype == torch.float64 else "float32"
        usual = {"tol": _TOL, "device": str(first.device), "dtype": dtype}
        given = {name: value for name, value in options.items() if value is not None}
        self._asked: dict[str, Any] = {**usual, **given, "layers": layers}
        self._last, self._closed, self._run, self._loss = 0, False, self._name, math.nan
        self.readings: list[Reading] = []
        self._alarm = Alarm(math.inf, math.inf) if alert is None else Alarm(alert)
        self._trainer: Any = None
        self._hook: Any = None  # on the model of a Trainer, for its losses
        self._names: dict[int, str] = {}
        self._weights: dict[int, list[nn.Parameter]] = {}
        self._before: dict[int, list[Tensor]] = {}
        self._folder: RunFolder | None = None
        self._now = (self._name, "")  # name and revision of the model in its rows
        with _in_full(self.model), self._request() as run:
            self._layers = sorted({job.layer or 0 for job in run.jobs})
        self._lent = out if isinstance(out, RunFolder) else None
        self._folder = self._lent or (None if out is None else self._opened(out))
        self._written: set[str] = set()
        if self._folder is not None:
            self._written = {*self._folder.values(READINGS), *self._folder.values(ALERTS)}

    @property
    def alerts(self) -> list[Alert]:
        """Alerts on unusual signals, at most five per run."""
        return self._alarm.alerts

    # --- around a step of the optimiser

    @contextlib.contextmanager
    def step(self, loss: Tensor | float | None = None) -> Iterator[None]:
        """Context manager around an optimiser step: ``with monitor.step(loss): …``.

        Args:
            loss: Loss of the step, for its z-score.
        """
        self.before()
        if loss is not None:  # before the optimiser spreads a loss that is not finite
            self._number(loss, self._last + 1)
        yield
        self.after(loss)

    def before(self) -> None:
        """To call before a step: take the first reading, and store weights if one is due."""
        if not self.readings:
            self.read()
        if (self._last + 1) % self.every == 0:
            kept = self._weights.items()
            self._before = {i: [p.detach().clone() for p in own] for i, own in kept}

    def after(self, loss: Tensor | float | None = None) -> None:
        """To call after a step: count it, `see` its loss, and take a reading if due.

        Raises:
            InputError: If the loss is not a finite number.
        """
        self._last += 1
        if loss is not None:
            self.see(loss)
        if self._last % self.every == 0:
            self.read()

    def see(self, loss: Tensor | float) -> None:
        """Record a loss.

        Raises:
            InputError: If it is not a finite number.
        """
        self._loss = value = self._number(loss, self._last)
        self._tell(self._alarm.loss(self._last, value))

    def _number(self, loss: Tensor | float, step: int) -> float:
        try:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError, RuntimeError):
            found = tuple(loss.shape) if isinstance(loss, Tensor) else shown(loss)
            raise InputError(f"`loss` should be one number. Found `{found}`.") from None
        if not math.isfinite(value):
            raise self._ended(f"Training should have a finite loss. Found {value} at step {step}")
        return value

    def start(self, step: int, trained: nn.Module | None = None) -> None:
        """Set the first step, e.g. of a checkpoint, and check the trained module.

        Raises:
            InputError: If the trained module shares no weights with the monitor's model.
        """
        check_count("step", step, least=0)
        own = {id(p) for p in self.model.parameters()}
        if trained is not None and own.isdisjoint(map(id, trained.parameters())):
            raise InputError(
                "The Trainer should train the model that the monitor was given. Found another "
                f"`{type(trained).__name__}`; give `ls.Monitor` the Trainer's model."
            )
        self._last = step

    # --- a reading

    def read(self) -> list[Reading]:
        """Take a reading of all layers now.

        A layer that cannot be measured in float32 is measured in float64. If that fails too, it
        has only the signals that need no Jacobian, and an alert states the reason.

        Returns:
            One reading per layer, also in `readings`.

        Raises:
            InputError: If a weight is not finite; at the first reading, if a layer cannot be
                measured.
        """
        try:
            models.check_finite(self.model)
        except InputError as problem:
            raise self._ended(f"Step {self._last}: {problem}".rstrip(".")) from None
        revision = f"sha256:{models.fingerprint(self.model)}"
        name = self._named(revision)
        self._now = (name, revision)
        self._run = name.rpartition("@")[0]
        with _in_full(self.model):
            heads = self._heads(self._request())
            rows, problems = self._measured()
        new = [
            self._reading(layer, heads.get(layer), rows.get(layer, ()), problems.get(layer))
            for layer in self._layers
        ]
        self._before = {}
        self.readings += new
        self._note(new)
        return new

    def close(self) -> None:
        """Report the summary of the run; close the run folder, unless it was given open."""
        if self._hook is not None:
            self._hook.remove()
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
        """Attach this monitor to a Trainer of transformers or of Lightning.

        It logs to the Trainer's loggers, unless it has its own ``log``. It sees the loss of every
        step; a logged gradient norm that is not finite also stops training.

        Args:
            trainer: The Trainer, before ``train()`` or ``fit()``.

        Returns:
            The callback that was added to the Trainer.

        Raises:
            InputError: If ``trainer`` is neither, or is already attached.
        """
        if self._trainer is not None and trainer is self._trainer:
            raise InputError("`attach` should be called once per Trainer. Found a second call.")
        if hasattr(trainer, "add_callback"):
            callback = _for_transformers(self, trainer)
            trainer.add_callback(callback)
        elif hasattr(trainer, "fit") and isinstance(getattr(trainer, "callbacks", None), list):
            callback = _for_lightning(self, trainer)
            trainer.callbacks.append(callback)
        else:
            raise InputError(
                "`trainer` should be a Trainer of transformers or of Lightning. Found "
                f"`{type(trainer).__name__}`; wrap the optimiser's step in `monitor.step(loss)`."
            )
        self._trainer = trainer
        return callback

    def summary(self) -> str:
        """A one-line summary of the number of readings and the alerts; needs a first reading."""
        steps = [*dict.fromkeys(one.step for one in self.readings)]
        end = f"steps {steps[0]} to {self._last}; {self._alarm.summary()}"
        return f"Monitor: {len(steps)} readings, {end}."

    def _request(self, **more: Any) -> LocalRun:
        """A request for the current model, with its options checked."""
        model, (name, revision) = self.model, self._now
        if more.get("dtype", self._asked["dtype"]) != self._asked["dtype"]:
            # A converted copy: finite differences of the model itself would be in float32.
            model = models.copied(model).to(torch.float64)
        kind = str(next(self.model.parameters()).dtype)[6:]
        loaded = models.LoadedModel(name, model, None, revision, kind)
        set_ = {"models": (Model(name, self._last),), "tokens": False}
        asked = self._asked | more
        return LocalRun(loaded, self.data, asked, _MONITOR, more=set_, out=self._folder)

    def _measured(self) -> tuple[dict[int, list[Measurement]], dict[int, str]]:
        """Rows by layer, and problems by layer: why float32, or any dtype, failed."""
        found, problems = {}, {}
        with contextlib.suppress(Exception):  # on failure, layer by layer
            return self._rows(), problems
        for layer in self._layers:
            first = self._tried(found, layer, self._asked["dtype"])
            last = first and self._tried(found, layer, "float64")
            if last:
                problems[layer] = f"cannot be measured ({last})"
            elif first:
                problems[layer] = f"cannot be measured in float32, only in float64 ({first})"
        return found, problems

    def _tried(self, found: dict[int, list[Measurement]], layer: int, dtype: str) -> str:
        """Add the rows of a layer; return the reason if there are none, else ""."""
        try:
            found |= self._rows(layers=[layer], dtype=dtype)
        except Exception as problem:  # training must go on
            if not self.readings and dtype == "float64":
                raise
            return explained(problem).rstrip(".").removesuffix("; use float64")
        return ""

    def _rows(self, **more: Any) -> dict[int, list[Measurement]]:
        found: dict[int, list[Measurement]] = {}
        with self._request(**more) as run:
            for row in run.rows():
                if row.error is not None or row.sigma is None:
                    raise InputError(row.error or row.note or "Sigma is not finite.")
                found.setdefault(row.layer or 0, []).append(row)
        return found

    def _reading(
        self,
        layer: int,
        heads: _LayerHeads | None,
        rows: Sequence[Measurement],
        problem: str | None,
    ) -> Reading:
        own, moved = self._weights[layer], self._before.get(layer)
        logits, entropies, sinks = heads.worst() if heads else ((), (), ())
        return Reading(
            step=self._last,
            layer=layer,
            module=self._names[layer],
            sigma=_largest_finite(row.sigma for row in rows),
            relative=_largest_finite(row.relative for row in rows),
            top_share=_largest_finite(row.top_share for row in rows),
            radius=_largest_finite(
                [row.radius_max for row in rows] or (heads.radii if heads else [])
            ),
            largest_logit=_largest_finite(logits),
            entropy=min(filter(math.isfinite, entropies), default=None),
            sink_mass=_largest_finite(sinks),
            weight_norm=joint_norm(own),
            update_norm=None if moved is None else joint_norm(own, moved),
            logits=logits,
            entropies=entropies,
            sinks=sinks,
            problem=problem,
        )

    def _heads(self, asked: LocalRun) -> dict[int, _LayerHeads]:
        try:
            found = _heads_of(asked, self._layers)
        except Exception:  # sigma cannot be measured either; an alert states the reason
            if not self.readings:
                raise
            return {}
        for layer, one in found.items():
            self._names[layer] = one.module
            own = [self.model.get_submodule(name) for name in one.holders]
            weights = [*{id(p): p for m in own for p in m.parameters()}.values()]
            if [*map(id, weights)] != [*map(id, self._weights.get(layer, ()))]:
                self._before.pop(layer, None)  # no update of a module that was replaced
            self._weights[layer] = weights
        return found

    def _note(self, new: Sequence[Reading]) -> None:
        """Write readings to the folder and the log, and raise alerts."""
        flat: dict[str, float] = {"lipscope/step": float(self._last)}
        if self._alarm.z_score is not None:
            flat["lipscope/loss_z"] = self._alarm.z_score
        for one in new:
            flat |= {
                f"lipscope/layer{one.layer}/{name}": value
                for name, value in one.signals().items()
                if value is not None
            }
            self._keep(READINGS, asdict(one) | {"loss": self._loss, "loss_z": self._alarm.z_score})
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
                self._folder.add_value(part, key, plain)  # non-finite values are null
                self._written.add(key)

    def _opened(self, out: Any) -> RunFolder:
        data = self.data if isinstance(self.data, Mapping) else {"": self.data}
        plain = {k: models.digest(v) if isinstance(v, Tensor) else repr(v) for k, v in data.items()}
        spec = {"monitor": self._name, "data": plain, "every": self.every}
        spec |= {"asked": {k: shown(v) for k, v in self._asked.items()}}
        return RunFolder(folder_of(out), spec, provenance())

    def _named(self, revision: str) -> str:
        """The model's name at this step, unique to this training run within the folder."""
        held = {} if self._folder is None else self._folder.models
        numbered = (self._name + f"#{again}" * (again > 1) for again in count(1))
        names = (f"{name}@{self._last}" for name in numbered)
        return next(n for n in names if n not in held or held[n].get("revision") == revision)

    def _ended(self, why: str) -> InputError:
        """End the run; return an error that names the layer whose sigma changed most."""
        self.close()
        return InputError(f"{why}{furthest(self.readings)}.")


def _largest_finite(values: Any) -> float | None:
    return max((v for v in values if v is not None and math.isfinite(v)), default=None)


# --- inputs of layers and the weights of their heads: forward passes, no Jacobian


class _LayerHeads:
    """A layer over the entries of a batch: its module, and the modules that hold its weights.

    ``radii``, the largest token norm of the map's input per entry, is empty for maps whose input
    is not that of the attention module.
    """

    def __init__(self, module: str, holders: Sequence[str]) -> None:
        self.module, self.holders = module, holders
        self.radii: list[float] = []
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, call: models.AttentionCall, name: str) -> None:
        """Add an entry; its heads only if in closed form and without padding."""
        if name in ("heads", "attention"):
            self.radii.append(float(call.x.detach().norm(dim=-1).max()))
        layer = None if call.end.refusal else models.closed_form(call)
        mask = None if layer is None else layer.mask
        hidden = mask is not None and not bool(mask.flatten(0, -2).any(0).all())  # padding
        if layer is not None and not hidden:
            self._found.append((largest_logits(layer, call.x), *entropy_and_sink(layer, call.x)))

    def worst(self) -> tuple[tuple[float, ...], ...]:
        """Largest logit, entropy and sink mass of every head at its worst entry."""
        if not self._found:
            return (), (), ()
        logits, entropies, sinks = (torch.stack(one) for one in zip(*self._found, strict=True))
        worst = logits.amax(0), entropies.amin(0), sinks.amax(0)
        return tuple(tuple(map(float, one)) for one in worst)


def _heads_of(asked: LocalRun, layers: Sequence[int]) -> dict[int, _LayerHeads]:
    """Heads of a request's model at the given layers, with one forward pass per entry."""
    found, spec = dict[int, _LayerHeads](), asked.spec
    fused = any(name in FUSED for name in spec.maps)
    with asked.new_session() as session:
        for k in range(len(session.items(ModelKey(0, None), ""))):
            window = session.window(WindowKey(0, None, spec.dtypes[0], fused, "", k))
            record = window.trace  # builds no map of a layer
            names = {module: name for name, module in record.model.named_modules()}
            for layer in layers:
                call = record.calls[layer]
                parts = call.module, call.end.projection
                # The projection shown by our torch-compatible attention is not one of its modules.
                holders = [names[part] for part in parts if part in names]
                found.setdefault(layer, _LayerHeads(call.name, holders)).add(call, spec.maps[0])
    return found


@contextlib.contextmanager
def _in_full(model: nn.Module) -> Iterator[None]:
    """Make a model compute in the precision of its weights, undoing a trainer's wrapper.

    ``accelerate`` replaces a model's ``forward`` by one under autocast.
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


# --- a monitor as a callback of the Trainer of transformers or Lightning


def _for_transformers(monitor: Monitor, trainer: Any) -> Any:
    from transformers import TrainerCallback

    class TransformersCallback(TrainerCallback):
        """Gradients exist at ``on_pre_optimizer_step`` but no longer at ``on_step_end``.

        Updates are the difference of weights between the two. The loss of a step is that which
        the model returns in training, since the Trainer logs only some; else the logged one.
        """

        def __init__(self) -> None:
            self._losses: list[Tensor] = []
            self._each, self._sums = False, False

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if monitor.log is None:
                monitor.log = trainer.log
            monitor.start(state.global_step, trainer.model)
            if monitor._hook is not None:  # of an interrupted run
                monitor._hook.remove()
            self._losses = []
            monitor._hook = trainer.model.register_forward_hook(self._returned, with_kwargs=True)

        def _returned(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
            loss = output.get("loss") if isinstance(output, Mapping) else None
            if model.training and torch.is_grad_enabled() and isinstance(loss, Tensor):
                # Given the number of items in the batch, a loss is a partial sum, else a mean.
                self._sums = kwargs.get("num_items_in_batch") is not None
                self._losses.append(loss.detach().mean())

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                monitor.before()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            losses, self._losses = self._losses, []
            self._each |= bool(losses)
            if state.is_world_process_zero:
                due = control.should_log  # logging resets it, dropping the Trainer's own log
                count = 1 if self._sums else len(losses)  # the last step may have fewer batches
                monitor.after(sum(losses) / count if losses else None)
                control.should_log = due

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any
        ) -> None:
            logs = logs or {}
            size = logs.get("grad_norm")
            if size is not None and not math.isfinite(float(size)):
                raise monitor._ended(
                    f"Training should have finite gradients. Found a norm of {float(size)} at step "
                    f"{state.global_step}"
                )
            if "loss" in logs and not self._each:
                monitor.see(logs["loss"])

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.close()

    return TransformersCallback()


def _for_lightning(monitor: Monitor, trainer: Any) -> Any:
    """The callback for a trainer's package, ``lightning`` or ``pytorch_lightning``."""
    package = importlib.import_module(type(trainer).__module__.split(".trainer")[0])

    class LightningCallback(package.Callback):
        """Counts optimiser steps, as Lightning does, not batches."""

        losses: tuple[Tensor, ...] = ()
        step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if monitor.log is None:
                monitor.log = lambda values: [
                    one.log_metrics(values, trainer.global_step) for one in trainer.loggers
                ]
            self.step = trainer.global_step
            monitor.start(self.step, pl_module)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.is_global_zero:
                monitor.before()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                self.losses += (loss.detach(),)
            if trainer.global_step == self.step:  # gradients are still being accumulated
                return
            self.step, losses, self.losses = trainer.global_step, self.losses, ()
            if trainer.is_global_zero:
                # Lightning divides by the batches per step, except in manual optimisation.
                count = 1 if pl_module.automatic_optimization else len(losses)
                monitor.after(sum(losses) / count if losses else None)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.close()

    return LightningCallback()
