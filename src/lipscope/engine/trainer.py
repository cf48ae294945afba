"""A monitor as a callback of transformers' own Trainer."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

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

    def after(self) -> None:
        """It has."""

    def see(self, loss: float) -> None:
        """A loss was logged."""

    def rose(self) -> str:
        """What to say where a number is not finite."""
        ...

    def close(self) -> None:
        """Training has ended."""


def callback_of(monitor: Watching, trainer: Any) -> TrainerCallback:
    """The callback that reads a monitor.

    Gradients are clipped when ``on_pre_optimizer_step`` is called, and gone at ``on_step_end``;
    updates are seen as the difference of weights between the two.

    Args:
        monitor: The monitor.
        trainer: The Trainer, whose loggers are told.

    Returns:
        The callback.
    """
    if monitor.log is None:
        monitor.log = trainer.log
    return _Callback(monitor)


class _Callback(TrainerCallback):
    def __init__(self, monitor: Watching) -> None:
        self.monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.monitor.start(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            self.monitor.before()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            self.monitor.after()

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
        if "loss" in logs:
            self.monitor.see(logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.monitor.close()
