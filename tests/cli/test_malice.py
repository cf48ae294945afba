"""What a stranger's model folders and run folders hold is read, and never obeyed."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import lipscope as ls
from folders import written
from malice import BESIDE, FIELDS, PAYLOADS, Shape, Trap, checkpoints, code_folders, good
from rows import row

LIMIT = 1000  # characters of one line
pytestmark = pytest.mark.usefixtures("unchecked")  # as outside of the tests


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return good(tmp_path_factory.mktemp("model") / "good")


@pytest.fixture
def asked(monkeypatch) -> list[object]:
    """Addresses that somebody tried to reach."""
    found: list[object] = []

    def connect(_: socket.socket, address: object) -> None:
        found.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", connect)
    return found


def survived(traps: Iterable[Trap], model: Path, folder: Path) -> tuple[int, int]:
    """Load every trap with and without pickles: nothing runs, and what fails is one line."""
    tried = refused = 0
    for trap in traps:
        for allow_pickle in (False, True):
            tried += 1
            here, ran = folder / f"{tried}" / "model", folder / f"ran{tried}"
            shutil.copytree(model, here)
            trap.make(here, ran)
            before = sorted(os.listdir(here))
            try:
                ls.load_model(str(here), allow_pickle=allow_pickle)
            except ls.InputError as problem:
                refused, said = refused + 1, str(problem)
                assert trap.loads is not True, (trap.name, said)
                assert said.isprintable() and len(said) < LIMIT, (trap.name, said)
                assert "weights_only" not in said and "trust_remote_code" not in said, trap.name
            else:
                assert trap.loads is not False, trap.name
            assert not ran.exists(), trap.name
            assert sorted(os.listdir(here)) == before, trap.name
            shutil.rmtree(here)
    assert "own" not in sys.modules
    return tried, refused


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoints_and_code(tmp_path, model, asked, monkeypatch, all_of_them: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, some in (("checkpoints", checkpoints()), ("folders with code", code_folders())):
        traps = list(some)
        if not all_of_them:
            traps = random.Random(0).sample(traps, 4)
        tried, refused = survived(traps, model, tmp_path / name)
        print(f"{len(traps)} {name}: {tried} loads, {refused} refused, nothing executed")
    assert asked == []


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pages(tmp_path, all_of_them: bool) -> None:
    """Tags and attributes of a page are those of one with harmless words in the same place."""
    places = list(itertools.product((*FIELDS, *BESIDE), PAYLOADS))
    if not all_of_them:
        places = random.Random(0).sample(places, 3)
    harmless: dict[str, list[tuple[str, ...]]] = {}
    refused = 0
    for k, (field, payload) in enumerate(places):
        if field not in harmless:
            harmless[field] = Shape(page(tmp_path / field, field, "a word") or "").found
        found = page(tmp_path / str(k), field, payload)
        if found is None:
            refused += 1
            continue
        assert Shape(found).found == harmless[field], (field, payload)
        data = found.partition('<script type="application/json" id="data">')[2]
        json.loads(data.partition("</script>")[0])
    print(f"{len(places)} pages: {refused} refused in one line, the others obey nothing")
    assert refused < len(places) / 2


def page(folder: Path, field: str, text: str) -> str | None:
    """A page of two rows with a text of a stranger in one place; None if it is refused."""
    values = {field: text} if field in FIELDS else {}
    rows = [row(num_tokens=n, sigma=float(n), **values) for n in (16, 32)]
    words = ["one", text, "three"] if field == "token" else ["one", "two"]
    spec = {"texts": {text: text}} if field == "spec" else {}
    try:
        (made,) = ls.report([written(folder, rows, words, **spec)])
    except ls.InputError as problem:
        said = str(problem)
    else:
        content = made.read_text(encoding="utf-8")
        shutil.rmtree(folder)
        return content
    assert said.isprintable() and len(said) < LIMIT, (field, text)
    return None
