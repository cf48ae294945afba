"""What is printed holds: lower ends are never above what they stand for, upper ends never below."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import torch
from hypothesis import given, strategies as st

from folders import grown, written
from lipscope import Rows, report
from lipscope.display import rounded_down, rounded_up
from lipscope.linalg import TopSingular
from lipscope.pages import interval, number
from lipscope.records import Bound
from opened_page import Opened
from rows import row

AWKWARD = (0.0, 9.9996, 9.9991, 0.99996, 999.99999999999994, 13.047189, 14.95416, 14.95, 5e-324)
AWKWARD += (1e-4, 9.99996e-5, 999_999.9, 1e6, 1.23456e300, 0.1 + 0.2, 1234.5, 28.799999999999997)
VALUES = sorted({*AWKWARD, *(-value for value in AWKWARD)})
NUMBERS = st.floats(allow_nan=False) | st.sampled_from(VALUES)
GENERAL = st.builds(lambda m, e: m * 10.0**e, st.floats(-10, 10), st.integers(-12, 12)) | NUMBERS


def exact(value: float) -> Decimal:
    """The number that a float is written as."""
    return Decimal(repr(value))


def said(text: str, otherwise: float) -> float:
    return otherwise if text == "–" else float(text)  # – promises nothing


@given(GENERAL, GENERAL)
def test_a_printed_interval_holds(low: float, high: float) -> None:
    lower, upper = interval(low, high).strip("[]").split(", ")
    assert said(lower, -math.inf) <= low
    assert said(upper, math.inf) >= high
    assert said(interval(low, None).removeprefix("≥ "), -math.inf) <= low


@given(GENERAL)
def test_no_more_is_given_away_than_one_unit_of_the_last_digit(value: float) -> None:
    if not 1e-290 < abs(value) < 1e290:
        return
    unit = Decimal(10) ** (exact(value).adjusted() - 3)
    assert exact(value) - Decimal(number(value, 4, rounded_down)) < unit
    assert Decimal(number(value, 4, rounded_up)) - exact(value) < unit


@given(st.floats(0, 1e9), st.floats(0, 1e9) | st.just(math.inf))
def test_a_card_holds(sigma: float, upper: float) -> None:
    nothing = torch.zeros(1)
    shown = repr(TopSingular(sigma, upper, 0.01, nothing, nothing, 0.0, 2, "converged"))
    found = {name: float(text) for name, text in re.findall(r"(sigma|upper)=([^,]+)", shown)}
    assert found["sigma"] <= sigma and found["upper"] >= upper
    about = {"theorem": "row_gram", "statement": "", "cite": "", "scope": "local"}
    for kind, value, name in (("upper", upper, "upper"), ("lower", sigma, "sigma")):
        card = Bound(**about, kind=kind, metric="frobenius", value=value)._repr_html_()
        assert f"<td>value</td><td>{found[name]:.4g}</td>" in card


def test_a_table_of_bounds_holds() -> None:
    measured = row(sigma=13.047189, upper=13.0588)
    about = {"id": measured.id, "statement": "", "cite": "", "scope": "local"}
    bounds = [
        Bound(**about, theorem="row_gram_joint", kind="upper", metric="frobenius", value=14.95416),
        Bound(**about, theorem="lower", kind="lower", metric="frobenius", value=12.9999),
    ]
    shown = str(Rows([measured], bounds=bounds).bounds_table())
    assert all(part in shown for part in ("[13.04, 13.06]", "≤ 14.96", "≥ 12.99"))


def test_one_end_alone_is_no_interval() -> None:
    text = Rows([row(sigma=8.4625, upper=None, metric="max-token")]).text()
    assert "≥ 8.462" in text and "[8.4" not in text


def test_the_page_rounds_alike(opens: Callable[..., Opened], tmp_path: Path) -> None:
    written(tmp_path / "run", grown())
    (path,) = report([tmp_path / "run"])
    page = opens(path).page
    values = VALUES + [m * 10.0**e for e in range(-9, 9) for m in (1.00005, -3.14159, 9.99951)]
    found = page.evaluate("(all) => all.map((v) => [downward(v), upward(v)])", values)
    for value, (lower, upper) in zip(values, found, strict=True):
        assert float(lower) == float(number(value, 4, rounded_down)), value
        assert float(upper) == float(number(value, 4, rounded_up)), value
    ends = page.evaluate(
        "[[13.047189, 13.0588], [8.4625, null]].map(([sigma, upper]) => ends({ sigma, upper }))"
    )
    assert ends == [interval(13.047189, 13.0588), interval(8.4625, None)]
