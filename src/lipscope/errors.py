"""Errors that a user can mend, remarks, and out-of-memory errors.

Every public door raises it with one line that says what, where and what to do; the
command line prints that line and exits with status 2.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import re
from collections.abc import Iterator
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 160  # characters of a value


class InputError(ValueError):
    r"""A request that cannot be answered as asked; the message says what to change.

    Whatever was found, it is one line that a terminal can print: what is quoted is cut where it is
    long, and characters that print as nothing, or steer a terminal, are replaced.

    >>> str(InputError("`name` should be a word. Found `two\nlines \x1b[31m`."))
    '`name` should be a word. Found `two lines �[31m`.'
    """

    def __init__(self, message: str) -> None:
        words = " ".join(message.split())
        words = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
        super().__init__(re.sub(r"`([^`]*)`", lambda found: f"`{_abridged(found[1])}`", words))

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback: a foreseeable mistake is one line."""
        return [f"InputError: {self}"]


class OptionError(InputError, TypeError):
    """An option that a function does not have: Python's own error, and a line of lipscope's."""


def _abridged(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def shown(value: object) -> str:
    """A value in words for a message, whatever it is.

    >>> shown(3.0), shown(10**5000)
    ('3.0', 'int')
    """
    try:
        return str(value)
    except Exception:  # a number of thousands of digits, or a type that cannot say what it is
        return type(value).__name__


def install(extra: str) -> str:
    """The line that installs an extra, given in the folder of lipscope: it is on no index yet.

    >>> install("images")
    "pip install '.[images]'"
    """
    return f"pip install '.[{extra}]'"


def check_positive(name: str, value: object) -> None:
    """Refuse an argument that is no finite number above zero; a tensor of one entry may be."""
    if not (_is_number(value) and value > 0):  # pyright: ignore[reportOperatorIssue]
        raise InputError(f"`{name}` should be positive. Found {stated(name, value)}.")


def check_finite_number(name: str, value: object) -> None:
    """Refuse an argument that is no finite number; a tensor of one entry may be."""
    if not _is_number(value):
        raise InputError(f"`{name}` should be a finite number. Found {stated(name, value)}.")


def check_finite_numbers(name: str, values: Tensor) -> None:
    """Refuse a tensor with NaN or Inf, and say where the first one is."""
    bad = ~values.isfinite()
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise InputError(f"`{name}` should be finite. Found NaN or Inf in it, first at {where}.")


def check_numbers(name: str, value: Any, *shape: int | None) -> None:
    """Refuse what is no tensor of finite real numbers of a shape; None is any length."""
    fits = _is_tensor(value) and value.ndim == len(shape) and not value.is_complex()
    if not fits or any(one not in (None, n) for one, n in zip(shape, value.shape, strict=True)):
        found = type_and_shape(value) if _is_tensor(value) else shown(value)[:_SHOWN]
        sides = ", ".join("n" if one is None else str(one) for one in shape)
        sides += "," if len(shape) == 1 else ""
        raise InputError(f"`{name}` should be numbers in a tensor, ({sides}). Found {found}.")
    check_finite_numbers(name, value)


def check_tokens(name: str, value: Any, width: int | None = None) -> None:
    """Refuse what is no finite matrix of real numbers, a row for each of some tokens."""
    is_tensor = _is_tensor(value)
    found = type_and_shape(value) if is_tensor else shown(value)[:_SHOWN]
    fits = is_tensor and value.ndim == 2 and value.numel() > 0 and value.is_floating_point()
    if not fits or width not in (None, value.shape[1]):
        wanted = f"(n, {width or 'd'}), at least one"
        raise InputError(f"`{name}` should be tokens in a tensor, {wanted}. Found {found}.")
    check_finite_numbers(name, value)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse an argument that is no whole number, or is too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        wanted = {0: "a whole number, not negative", 1: "a positive integer"}
        words = wanted.get(least, f"a whole number of at least {least}")
        raise InputError(f"`{name}` should be {words}. Found {stated(name, value)}.")


def stated(name: str, value: object) -> str:
    """A value that is no number as it should be, by its name.

    >>> stated("tol", -1), stated("tol", "0.1")
    ('`tol = -1`', "`tol = '0.1'`, a str")
    """
    is_text = isinstance(value, str)
    return f"`{name} = {value!r}`, a str" if is_text else f"`{name} = {shown(value)}`"


def type_and_shape(value: Any) -> str:
    """A tensor by its type and shape, anything else by its type.

    >>> type_and_shape([1])
    'list'
    """
    kind = type(value).__name__
    return f"{str(value.dtype)[6:]}, {tuple(value.shape)}" if _is_tensor(value) else kind


def _is_tensor(value: object) -> bool:
    return type(value).__name__ in ("Tensor", "Parameter")  # without importing torch


def _is_number(value: Any) -> bool:
    if _is_tensor(value):
        return value.numel() == 1 and not value.is_complex() and bool(value.isfinite())
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def remark(text: str) -> None:
    """Say one line on standard error, or wherever the caller's logging sends it."""
    logging.getLogger("lipscope").warning("%s", text)


def unwritable(place: object, problem: OSError) -> InputError:
    """What to do where a run cannot be written; on a full disk, what is kept is not given up.

    >>> print(unwritable("run", OSError(errno.ENOSPC, "No space left on device")))
    `run` cannot be written (No space left on device); make room, and the same command goes on \
from what is kept.
    """
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    kept = "make room, and the same command goes on from what is kept"
    mend = kept if full else "choose another folder"
    return InputError(f"`{place}` cannot be written ({problem.strerror}); {mend}.")


def out_of_memory(problem: BaseException) -> bool:
    """Whether an allocation failed; on a CPU torch says so in words only.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    import torch  # not above: a name can be completed without it

    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or any(
        text in str(problem) for text in words
    )


@contextlib.contextmanager
def memory_for(work: str, dtype: str = "float32") -> Iterator[None]:
    """Report out of memory as an `InputError` of one line.

    Args:
        work: What needed it, as the subject of the sentence.
        dtype: Floating type of the work: half the memory is enough for what was in float64.

    Raises:
        InputError: Instead of the error of the allocation.

    >>> with memory_for("The model's own forward pass", "float64"):
    ...     raise MemoryError
    Traceback (most recent call last):
    lipscope.errors.InputError: The model's own forward pass ran out of memory. Use shorter \
inputs, a smaller model or float32; rows measured before are kept.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if not out_of_memory(problem):
            raise
        less = ", a smaller model or float32" if dtype == "float64" else " or a smaller model"
        raise InputError(
            f"{work} ran out of memory. Use shorter inputs{less}; rows measured before are kept."
        ) from problem
