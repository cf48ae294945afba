"""Rows and their ids: what is in them and how they read as one line."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, strategies as st

from lipscope import Measurement, TokenShare
from lipscope.records.rows import stable_id
from rows import KEYS, TOKEN_KEYS, row


def test_the_columns_are_those_that_are_promised():
    assert [field.name for field in dataclasses.fields(Measurement)] == KEYS
    assert [field.name for field in dataclasses.fields(TokenShare)] == TOKEN_KEYS


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.sampled_from(["sigma", "upper"]))
def test_what_is_not_finite_is_null(value, name):
    line = row(**{"upper": 3.0, name: value}).to_json()
    assert "NaN" not in line and "Infinity" not in line
    values = json.loads(line, parse_constant=pytest.fail)
    assert values[name] is None
    assert list(values) == KEYS


def test_a_row_is_one_line_whatever_is_in_it():
    line = row(note="first\nsecond\u2028third", model="a\tb — é").to_json()
    assert "\n" not in line
    assert json.loads(line)["note"] == "first\nsecond\u2028third"


def test_an_id_depends_on_every_value_and_on_no_order():
    parts = {"model": "minilm", "layer": 1, "head": None, "tol": 1e-3}
    name = stable_id(parts)
    assert name == stable_id(dict(reversed(parts.items())))
    others = [stable_id(parts | {key: "else"}) for key in parts]
    assert len({name, *others}) == 5
