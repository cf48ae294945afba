"""The check of types that all tests run under: it refuses what jaxtyping's own refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

import checked
import lipscope as ls
from lipscope import Operator

THREE, FOUR = torch.ones(3), torch.ones(4)
REFUSED = (BeartypeCallHintViolation, jaxtyping.TypeCheckError)


def same_length(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> int:
    return len(a) + len(b)


def doubled(a: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return torch.cat([a, a])


def kept(a: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    same_length(FOUR, FOUR)  # a scope of its own
    return a


def counted(count: int = 1, *, name: str = "") -> str:
    return count * name


def each(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Iterator[Tensor]:
    yield from (a, b)


def unknown(a: KnownToTypeCheckersAlone) -> int:  # pyright: ignore
    return a


@dataclass
class Pair:
    a: Float[Tensor, " n"]
    b: Float[Tensor, " n"]


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {
    "one axis": (same_length, (THREE, THREE), True),
    "two values of an axis": (same_length, (THREE, FOUR), False),
    "another type of numbers": (same_length, (THREE, THREE.long()), False),
    "two axes": (same_length, (THREE, torch.ones(3, 1)), False),
    "a result of another shape": (doubled, (THREE,), False),
    "an axis of a function that is called": (kept, (THREE,), True),
    "no array": (counted, (2,), True),
    "a word for a number": (counted, ("2",), False),
    "a generator": (each, (THREE, THREE), True),
    "a generator of two lengths": (each, (THREE, FOUR), False),
    "a name that is not there": (unknown, (3,), True),
    "a record": (Pair, (THREE, THREE), True),
    "a record of two lengths": (Pair, (THREE, FOUR), False),
}


def copy_of(one: Any) -> Any:
    """Of a class: the decorator changes it."""
    return type("Copy", (), dict(one.__dict__)) if isinstance(one, type) else one


@pytest.mark.parametrize("case", CASES)
def test_refuses_what_jaxtyping_refuses(case: str) -> None:
    function, arguments, fine = CASES[case]
    for decorator in (checked.jaxtyped, checked.original):
        guarded = decorator(copy_of(function), typechecker=beartype)
        if fine:
            guarded(*arguments)
            continue
        with pytest.raises(REFUSED):
            guarded(*arguments)


def test_every_function_that_a_line_makes_is_checked_and_is_itself() -> None:
    def made(count: int) -> Callable[..., Any]:
        def longer(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> int:
            return count * len(a) + len(b)

        return checked.jaxtyped(longer, typechecker=beartype)

    for count in (1, 2, 3):
        one = made(count)
        assert one(THREE, b=THREE) == 3 * count + 3
        with pytest.raises(REFUSED):
            one(THREE, FOUR)
        with pytest.raises(REFUSED):
            one([1.0, 2.0, 3.0], THREE)


@pytest.mark.usefixtures("unchecked")
def test_nothing_is_refused_where_the_check_is_off() -> None:
    guarded = checked.jaxtyped(same_length, typechecker=beartype)
    assert guarded(THREE, FOUR) == 7


def test_calls_after_the_first_are_checked_now_and_then(monkeypatch) -> None:
    monkeypatch.setattr(checked, "ALL", 3)
    guarded = checked.jaxtyped(counted, typechecker=beartype)
    refused = 0
    for _ in range(3 + 2 * checked.EACH):
        try:
            guarded("2", name=1)
        except REFUSED:
            refused += 1
        except TypeError:  # what Python itself says of it
            pass
    assert refused == 3 + 2


def test_the_package_is_checked(monkeypatch) -> None:
    monkeypatch.setattr(checked, "ALL", 10**9)
    layer = ls.DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    with pytest.raises(BeartypeCallHintViolation):
        layer.linearise([1.0, 2.0])  # a function of arrays
    with pytest.raises(BeartypeCallHintViolation):
        Operator(None, None, (1,), (1,), torch.float64)  # a record
