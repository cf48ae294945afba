"""Ranges as users write them: every form, every refusal, and what holds for all of them."""

import itertools

import pytest
from hypothesis import given, strategies as st

from lipscope.engine.checks import parse_bytes, parse_integers, parse_tokens
from lipscope.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", [7]),
        ("0", [0]),
        ("3,5", [3, 5]),
        ("2:8:3", [2, 5, 8]),  # the stop is included where the steps meet it
        ("2:9:3", [2, 5, 8]),  # and never passed
        ("2:5", [2, 3, 4, 5]),
        ("4:4", [4]),
        ("16,2:4,64", [16, 2, 3, 4, 64]),
        ("5,3,5", [5, 3]),  # the order is the reader's, repetitions count once
        (" 16 , 64 ", [16, 64]),
    ],
)
def test_integers(text, expected):
    assert parse_integers(text, "lengths") == expected


@pytest.mark.parametrize(
    "text", ["", ",", "3,", "a", "-1", "1.5", "2:", ":4", "2:8:0", "1:2:3:4", "2 8", "8:2", "1e3"]
)
def test_integers_that_are_none(text):
    with pytest.raises(InputError, match="`lengths`") as caught:
        parse_integers(text, "lengths")
    assert f"Found `{text}`" in str(caught.value)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 60))
def test_a_range_has_its_start_its_step_and_includes_its_stop(start, length, step):
    stop = start + length
    values = parse_integers(f"{start}:{stop}:{step}", "lengths")
    assert values[0] == start
    assert {b - a for a, b in itertools.pairwise(values)} <= {step}
    assert stop - step < values[-1] <= stop
    assert (stop in values) == (length % step == 0)


@given(st.lists(st.integers(0, 10**6), min_size=1, unique=True))
def test_a_list_is_itself(values):
    assert parse_integers(",".join(map(str, values)), "layers") == values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", None),
        ("first", [0]),
        ("last", [4]),
        ("not-first", [1, 2, 3, 4]),
        ("1:3", [1, 2, 3]),  # both ends
        ("0:4", [0, 1, 2, 3, 4]),
        ("2:2", [2]),
        ("3", [3]),
        ("0%:100%", [0, 1, 2, 3, 4]),
        ("0%:10%", [0]),  # every token of which a part lies in it
        ("45%:65%", [2, 3]),
        ("90%:100%", [4]),
        ("20%:40%", [1]),
    ],
)
def test_tokens(text, expected):
    assert parse_tokens(text, 5, "move") == expected


@pytest.mark.parametrize(
    "text", ["5", "3:5", "9:12", "3:1", "", "none", "-1", "1:", "1:2:3", "a", "1%", "1%:2"]
)
def test_tokens_that_are_not_there(text):
    with pytest.raises(InputError, match="`read"):
        parse_tokens(text, 5, "read")


@pytest.mark.parametrize("text", ["50%:50%", "60%:50%", "0%:101%"])
def test_shares_that_are_no_part_of_a_window(text):
    with pytest.raises(InputError, match="such as 90%:100%"):
        parse_tokens(text, 5, "move")


def test_one_token_is_the_first_and_the_last_and_has_no_others():
    assert parse_tokens("first", 1, "move") == parse_tokens("last", 1, "move") == [0]
    with pytest.raises(InputError, match="not-first"):
        parse_tokens("not-first", 1, "move")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500 * 10**6),
        ("2GB", 2 * 10**9),
        ("2048KiB", 2**21),
        ("1TiB", 2**40),
        ("1048576", 2**20),
        ("1048576B", 2**20),
        (2**30, 2**30),
    ],
)
def test_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "0", "-1GiB", "1048575", "1 XB", "GiB", "1KiB", -5])
def test_bytes_that_are_none_or_too_few(text):
    with pytest.raises(InputError, match="memory"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["3:1", "999999999:0"])
def test_a_range_that_counts_down_comes_with_the_one_that_was_meant(text):
    meant = ":".join(reversed(text.split(":")))
    for parse in (lambda: parse_tokens(text, 5, "move"), lambda: parse_integers(text, "move")):
        with pytest.raises(InputError, match=f"ascending, such as {meant}. Found `{text}`"):
            parse()


def test_tokens_far_beyond_the_last_are_refused_without_counting_them():
    with pytest.raises(InputError, match="at 5 tokens"):
        parse_tokens(f"0:{10**15}", 5, "move")
