"""A monitor as a callback: of transformers' own Trainer, or of Lightning's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import TrainerCallback

from lipscope.errors import InputError


@runtime_checkable
class Watching(Protocol):
    """What is called around steps: a monitor."""

    log: Any

    def start(self, step: int) -> None:
        """Training begins at this step."""

    def before(self) -> None:
        """The optimiser is about to step."""

    def after(self, loss: Tensor | float | None = None) -> None:
        """It has."""

    def see(self, loss: Tensor | float) -> None:
        """A loss was logged."""

    def rose(self) -> str:
        """What to say where a number is not finite."""
        ...

    def close(self) -> None:
        """Training has ended."""


def attached(monitor: Watching, trainer: Any) -> Any:
    """Let a trainer call a monitor, which logs to what it logs to unless it has a log.

    Args:
        monitor: The monitor.
        trainer: A Trainer of transformers, or of Lightning.

    Returns:
        The callback, which the trainer has.

    Raises:
        InputError: If it is neither.
    """
    if hasattr(trainer, "add_callback"):
        callback = _Callback(monitor, trainer)
        trainer.add_callback(callback)
    elif hasattr(trainer, "fit") and isinstance(getattr(trainer, "callbacks", None), list):
        callback = _for_lightning(monitor, trainer)
        trainer.callbacks.append(callback)
    else:
        raise InputError(
            "`trainer` should be a Trainer of transformers or of Lightning. Found "
            f"`{type(trainer).__name__}`; wrap the optimiser's step in `monitor.step(loss)`."
        )
    return callback


class _Callback(TrainerCallback):
    """Gradients are there at ``on_pre_optimizer_step``, and gone at ``on_step_end``.

    Updates are seen as the difference of weights between the two. The loss of a step is what the
    model returns in training, as the Trainer logs only some; where it returns none, what is logged.
    """

    def __init__(self, monitor: Watching, trainer: Any) -> None:
        self.monitor, self.trainer = monitor, trainer
        self._losses: list[Tensor] = []
        self._each, self._hook = False, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.monitor.log is None:
            self.monitor.log = self.trainer.log
        self.monitor.start(state.global_step)
        self._let_go()  # of a run that was stopped
        self._hook = self.trainer.model.register_forward_hook(self._returned, with_kwargs=True)

    def _returned(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if model.training and torch.is_grad_enabled() and isinstance(loss, Tensor):
            # A loss that is told the items of the whole batch is a part of it; others are means.
            parts = 1 if kwargs.get("num_items_in_batch") is not None else None
            share = parts or self.trainer.args.gradient_accumulation_steps
            self._losses.append(loss.detach().mean() / share)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            self.monitor.before()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        losses, self._losses = self._losses, []
        self._each |= bool(losses)
        if state.is_world_process_zero:
            due = control.should_log
            self.monitor.after(sum(losses) if losses else None)
            control.should_log = due  # whoever logs takes it back, and the Trainer's own is lost

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        logs = logs or {}
        size = logs.get("grad_norm")
        if size is not None and not math.isfinite(float(size)):
            raise InputError(
                f"Training should have finite gradients. Found a norm of {float(size)} at step "
                f"{state.global_step}{self.monitor.rose()}."
            )
        if "loss" in logs and not self._each:
            self.monitor.see(logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._let_go()
        self.monitor.close()

    def _let_go(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._losses = []


def _for_lightning(monitor: Watching, trainer: Any) -> Any:
    """The callback for the package that a trainer is of, ``lightning`` or ``pytorch_lightning``."""
    package = importlib.import_module(type(trainer).__module__.split(".trainer")[0])

    class LightningCallback(package.Callback):
        """Counts steps of the optimiser, as Lightning does, not batches."""

        losses: tuple[Tensor, ...] = ()
        step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if monitor.log is None:
                monitor.log = lambda values: [
                    one.log_metrics(values, trainer.global_step) for one in trainer.loggers
                ]
            self.step = trainer.global_step
            monitor.start(self.step)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.is_global_zero:
                monitor.before()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                self.losses += (loss.detach(),)
            if trainer.global_step == self.step:  # gradients are still being gathered
                return
            self.step, losses, self.losses = trainer.global_step, self.losses, ()
            if trainer.is_global_zero:
                # Lightning divides by the batches of a step, unless a module steps by itself.
                count = 1 if pl_module.automatic_optimization else len(losses)
                monitor.after(sum(losses) / count if losses else None)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.close()

    return LightningCallback()
