"""Requests that cannot be meant end in one line, within seconds, and leave nothing behind."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import abuse
import lipscope as ls
from command import BERT, TEXT, refused

pytestmark = pytest.mark.usefixtures("unchecked")  # as outside of the tests
SAMPLE = 36  # of the calls, and a third as many command lines


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_calls(tmp_path, monkeypatch, all_of_them: bool) -> None:
    monkeypatch.chdir(tmp_path)
    some = list(abuse.calls())
    if not all_of_them:
        some = random.Random(0).sample(some, SAMPLE)
    found = abuse.counted(some)
    print(f"{found.tried} calls: {found.refused} refused in one line, {found.taken} taken")
    assert found.broken == []
    assert found.tried == len(some) and found.refused > found.taken


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_command_lines(command, all_of_them: bool) -> None:
    some = list(abuse.lines())
    if not all_of_them:
        some = random.Random(0).sample(some, SAMPLE // 3)
    found = abuse.commanded(command, some)
    print(f"{found.tried} lines: {found.refused} refused, {found.taken} taken")
    assert found.broken == []
    assert found.tried == len(some)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lengths", "0:1000000000000000000"], "lengths"),
        (["--lengths", "0:999999999"], "at most 100,000 numbers"),
        (["--lengths", "9" * 5000], "lengths"),
        (["--samples", "999999999999"], "at most 100,000"),
        (["--seed", str(2**63)], "below 2\\^63"),
        (["--memory", "1" + 400 * "0"], "memory"),
        (["--device", "meta"], "device"),
        (["--modules", "("], "regular expression"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_huge_and_wrong_values(lipscope, words: list[str], expected: str) -> None:
    base = [] if "--lengths" in words else ["--lengths", "4"]
    refused(lipscope(BERT, "--text", "text.txt", *base, *words), expected)


@pytest.mark.parametrize("name", ["~", "~nobody/x", "x" * 5000, "./" + "x" * 5000, "a\x1b[31m"])
def test_names_that_are_no_models(lipscope, name: str) -> None:
    refused(lipscope(name, "--text", "text.txt"), "should be|could not be")


def test_a_configuration_of_a_billion_layers(lipscope) -> None:
    for entry in ("num_hidden_layers=1000000000", "vocab_size=1000000000000"):
        refused(lipscope(f"random:bert:{entry}", "--text", "text.txt"), "at most|GiB|could not")


def test_an_expression_that_tries_too_many_ways() -> None:
    model = nn.Module()
    model.add_module("a" * 40, nn.MultiheadAttention(4, 1, batch_first=True))
    with pytest.raises(ls.InputError, match="in a second"):
        ls.measure(model, torch.zeros(1, 3, 4), modules=r"^(\w|\w\w|a)+\1\1b?(?<!a)$")


def test_a_text_and_a_file_are_told_apart(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    with pytest.raises(ls.InputError, match="did you mean the file"):
        ls.measure(BERT, "text.txt", layers=0, lengths=4, samples=1)
    (row,) = ls.measure(BERT, Path("text.txt"), layers=0, lengths=4, samples=1)
    (same,) = ls.measure(BERT, TEXT, layers="0", lengths="4", samples=1)
    assert row.id == same.id


@pytest.mark.parametrize("text", ["a\0b" * 20, "half a character \ud800 " * 9])
def test_a_text_that_no_file_can_hold(text: str, tmp_path) -> None:
    with pytest.raises(ls.InputError, match="zero byte or half a character"):
        ls.measure(BERT, text, lengths=4, samples=1)
    if "\0" in text:
        file = tmp_path / "zero.txt"
        file.write_text(text)
        with pytest.raises(ls.InputError, match="UTF-8 text"):
            ls.sweep({"models": BERT, "texts": str(file), "lengths": 4}, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 5, dtype=torch.long),
        torch.ones(2, 6, dtype=torch.long),
        2 * torch.ones(1, 6, dtype=torch.long),
        torch.ones(6),
        [1] * 6,
    ],
    ids=["short", "two entries", "twos", "no batch", "a list"],
)
def test_a_mask_that_fits_no_tokens(mask: object) -> None:
    ids = torch.arange(6)[None]
    with pytest.raises(ls.InputError, match="attention_mask"):
        ls.measure(BERT, {"input_ids": ids, "attention_mask": mask})


def _nested(depth: int) -> str:
    return "models: " + "[" * depth + "]" * depth


_BOMB = "models: [minilm]\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [" + ",".join(9 * [f"*{a}"]) + "]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        _BOMB,
        _nested(5000),
        "models: &a [*a]",
        "models: !!python/object/apply:os.system [ls]",
        "models: !!int x",
        "models: !!timestamp x",
        "? [a, b]\n: c",
        "models: [minilm]\nsamples: " + "9" * 5000,
        "models: " + "x" * 200_000,
        "models: [a\0]",
        "",
        "- a",
    ],
    ids=lambda text: text[:30],
)
def test_specifications_that_are_none(tmp_path, text: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    with pytest.raises(ls.InputError) as refusal:
        ls.sweep(file, tmp_path / "run")
    assert str(refusal.value).isprintable() and not (tmp_path / "run").exists()


def test_pipes_are_no_files(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ls.InputError, match="no regular file"):
        ls.sweep(tmp_path / "pipe", tmp_path / "run")
    with pytest.raises(ls.InputError, match="no regular file"):
        ls.measure(BERT, tmp_path / "pipe")


def test_no_models_are_not_the_default_ones(command) -> None:
    result = command("reproduce", "castin2024/figure1", "--quick", "--models", ",", "--out", "run")
    assert result.status == 2 and "--models" in result.err and not Path("run").exists()
