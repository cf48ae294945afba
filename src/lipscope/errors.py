"""User errors, warnings and out-of-memory errors.

Public functions raise `InputError` with a one-line message: what is wrong, where, and how to fix
it. The command line prints this line and exits with status 2.
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

_SHOWN = 160  # maximum number of characters of a quoted value


class InputError(ValueError):
    r"""Invalid input; the message says what to change.

    The message is always a single printable line: long quoted values are truncated, and
    non-printable or control characters are replaced.

    >>> str(InputError("`name` should be a word. Found `two\nlines \x1b[31m`."))
    '`name` should be a word. Found `two lines �[31m`.'
    """

    def __init__(self, message: str) -> None:
        words = " ".join(message.split())
        words = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
        super().__init__(re.sub(r"`([^`]*)`", lambda found: f"`{_abridged(found[1])}`", words))

    def _render_traceback_(self) -> list[str]:
        """One line instead of a traceback in IPython: user errors are expected."""
        return [f"InputError: {self}"]


class OptionError(InputError, TypeError):
    """Unknown option of a function; also a `TypeError`, as raised by Python itself."""


def _abridged(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def shown(value: object) -> str:
    """Any value as text for a message.

    >>> shown(3.0), shown(10**5000)
    ('3.0', 'int')
    """
    try:
        return str(value)
    except Exception:  # an integer of thousands of digits, or a type with a broken `__str__`
        return type(value).__name__


def install(extra: str) -> str:
    """The command that installs an extra from a source checkout (there is no PyPI release yet).

    >>> install("images")
    "pip install '.[images]'"
    """
    return f"pip install '.[{extra}]'"


def check_positive(name: str, value: object) -> None:
    """Require a finite positive number; single-element tensors are accepted."""
    if not (_is_number(value) and value > 0):  # pyright: ignore[reportOperatorIssue]
        raise InputError(f"`{name}` should be positive. Found {stated(name, value)}.")


def check_finite_number(name: str, value: object) -> None:
    """Require a finite number; single-element tensors are accepted."""
    if not _is_number(value):
        raise InputError(f"`{name}` should be a finite number. Found {stated(name, value)}.")


def check_finite_numbers(name: str, values: Tensor) -> None:
    """Require a tensor without NaN or Inf; the message contains the first invalid index."""
    bad = ~values.isfinite()
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise InputError(f"`{name}` should be finite. Found NaN or Inf in it, first at {where}.")


def check_numbers(name: str, value: Any, *shape: int | None) -> None:
    """Require a tensor of finite real numbers with the given shape; None matches any length."""
    fits = _is_tensor(value) and value.ndim == len(shape) and not value.is_complex()
    if not fits or any(one not in (None, n) for one, n in zip(shape, value.shape, strict=True)):
        found = type_and_shape(value) if _is_tensor(value) else shown(value)[:_SHOWN]
        sides = ", ".join("n" if one is None else str(one) for one in shape)
        sides += "," if len(shape) == 1 else ""
        raise InputError(f"`{name}` should be numbers in a tensor, ({sides}). Found {found}.")
    check_finite_numbers(name, value)


def check_tokens(name: str, value: Any, width: int | None = None) -> None:
    """Require a finite real matrix with one row per token and at least one token."""
    is_tensor = _is_tensor(value)
    found = type_and_shape(value) if is_tensor else shown(value)[:_SHOWN]
    fits = is_tensor and value.ndim == 2 and value.numel() > 0 and value.is_floating_point()
    if not fits or width not in (None, value.shape[1]):
        wanted = f"(n, {width or 'd'}), at least one"
        raise InputError(f"`{name}` should be tokens in a tensor, {wanted}. Found {found}.")
    check_finite_numbers(name, value)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Require an integer of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        wanted = {0: "a whole number, not negative", 1: "a positive integer"}
        words = wanted.get(least, f"a whole number of at least {least}")
        raise InputError(f"`{name}` should be {words}. Found {stated(name, value)}.")


def stated(name: str, value: object) -> str:
    """An invalid numerical argument as ``name = value``, with the type of a string.

    >>> stated("tol", -1), stated("tol", "0.1")
    ('`tol = -1`', "`tol = '0.1'`, a str")
    """
    is_text = isinstance(value, str)
    return f"`{name} = {value!r}`, a str" if is_text else f"`{name} = {shown(value)}`"


def type_and_shape(value: Any) -> str:
    """Dtype and shape of a tensor; the type name of anything else.

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
    """Log a one-line warning, by default to standard error."""
    logging.getLogger("lipscope").warning("%s", text)


def unwritable(place: object, problem: OSError) -> InputError:
    """The error for a run that cannot be written; on a full disk the run can be resumed.

    >>> print(unwritable("run", OSError(errno.ENOSPC, "No space left on device")))
    `run` cannot be written (No space left on device); free up space, then rerun the same command \
to resume.
    """
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    resume = "free up space, then rerun the same command to resume"
    advice = resume if full else "choose another folder"
    return InputError(f"`{place}` cannot be written ({problem.strerror}); {advice}.")


def out_of_memory(problem: BaseException) -> bool:
    """Whether an allocation failed; on CPU, torch reports this only in the message.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    """
    import torch  # lazily: shell completion works without it

    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or any(
        text in str(problem) for text in words
    )


@contextlib.contextmanager
def memory_for(work: str, dtype: str = "float32") -> Iterator[None]:
    """Convert out-of-memory errors to a one-line `InputError`.

    Args:
        work: The operation that needs the memory, as the subject of the sentence.
        dtype: Floating type of the operation; for float64 the message suggests float32.

    Raises:
        InputError: Instead of the allocation error.

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
