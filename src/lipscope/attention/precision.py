"""Precision: squares and sums in float32 at least, under autocast too, rounded once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def wide(t: Tensor) -> Tensor:
    """The numbers in float32 where they are in half precision: squares of 256 exceed float16.

    >>> wide(torch.ones(1).half()).dtype, wide(torch.ones(1).double()).dtype
    (torch.float32, torch.float64)
    """
    return t.to(torch.promote_types(t.dtype, torch.float32))


def returned(x: Tensor) -> torch.dtype:
    """The dtype of linear maps of ``x``: its own, or that of autocast."""
    device = x.device.type
    if x.dtype == torch.float64 or not _casts(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def uncast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Without autocast, which would round again what is wide."""
    if not _casts(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def exact(function: _Function) -> _Function:
    """A function in the dtype of its arguments, one of which is a tensor, under autocast too."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        found = next(one for one in args if isinstance(one, Tensor))
        with uncast(found.device):
            return function(*args, **options)

    return cast("_Function", run)


def _casts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)
