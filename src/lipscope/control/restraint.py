"""Restraints that keep layers smooth, under one face; each kind is registered by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lipscope.control.probe import Probe
from lipscope.errors import InputError, check_count, shown

Batch = Tensor | Mapping[str, Any] | None


_LARGEST = 1e30  # cap that anybody means


class Restraint:
    """A penalty or a constraint on chosen layers of a model in training.

    One loop serves every kind: what is no penalty has the penalty 0, and what is nothing to be
    done after a step does nothing there.

    Args:
        probe: The model, its layers, and a batch.
        cap: Of a penalty: only what is above it counts. Of a constraint: what it keeps to.
        seed: Of random starts.

    Attributes:
        name: What it is called in `restrain`.
        cap_is: Whether a cap is ``needed``, ``possible`` or ``none``.
    """

    name: ClassVar[str]
    cap_is: ClassVar[Literal["needed", "possible", "none"]] = "possible"

    def __init__(self, probe: Probe, *, cap: float | None = None, seed: int = 0) -> None:
        check_count("seed", seed, least=0)
        self.probe, self.cap, self.seed = probe, _checked(type(self), cap), seed

    def penalty(self, data: Batch = None) -> Tensor:
        """The term to add to the loss, times a weight of your own.

        Args:
            data: Batch at whose layer inputs it is taken; that of the call of `restrain` if None.

        Returns:
            A scalar with gradients for the weights of the layers; 0 for a constraint.
        """
        del data
        return torch.zeros((), device=self.probe.device)

    def step(self, data: Batch = None) -> dict[int, float]:
        """The action after each step of the optimiser, or every so often.

        Args:
            data: As for `penalty`.

        Returns:
            By layer, the smallest factor by which something in it was multiplied; empty if
            nothing was.
        """
        del data
        return {}

    def remove(self) -> None:
        """Leave the weights as they are now, and take the parametrisations off, if any."""


def _checked(kind: type[Restraint], cap: float | None) -> float | None:
    if cap is None:
        if kind.cap_is == "needed":
            raise InputError(f"`{kind.name}` needs a `cap`. Found none.")
        return None
    if kind.cap_is == "none":
        raise InputError(f"`{kind.name}` takes no `cap`. Found `cap = {shown(cap)}`.")
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < _LARGEST:
        raise InputError(f"`cap` should be positive and finite. Found `cap = {shown(cap)}`.")
    return float(cap)


_REGISTER: dict[str, type[Restraint]] = {}
_Kind = TypeVar("_Kind", bound=type[Restraint])


def restraint(name: str) -> Callable[[_Kind], _Kind]:
    """Enter a kind of restraint under its name."""

    def enter(kind: _Kind) -> _Kind:
        kind.name = name
        _REGISTER[name] = kind
        return kind

    return enter


def restraints() -> dict[str, type[Restraint]]:
    """Every kind of restraint by its name."""
    return dict(sorted(_REGISTER.items()))
