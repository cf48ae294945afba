"""Calls and command lines that cannot be meant: every option of every verb, every wrong kind."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import click
import torch
import typer

import lipscope as ls
from command import BERT, TEXT, Command
from lipscope.cli import app

WORDS = {
    "empty": "",
    "blank": " ",
    "surrogate": "\udcff",
    "long": "x" * 5000,
    "comma": ",",
    "range": "0:1000000000000000000",
    "digits": "9" * 5000,
    "range of digits": "1" * 5000 + ":2",
    "home": "~",
    "nobody": "~nobody/x",
    "star": "*",
    "minus": "-1",
    "exponent": "1e400",
    "nan": "nan",
    "word size": str(2**63),
    "no device": "meta",
    "escape": "\x1b[31m",
}
THINGS: dict[str, Any] = {
    "zero byte": "a\0b",
    "negative": -1,
    "zero": 0,
    "half": 0.5,
    "many": 999_999_999_999,
    "larger than a word": 2**63,
    "huge": 10**5000,
    "huge float": 1e30,
    "infinite": float("inf"),
    "not a number": float("nan"),
    "yes": True,
    "complex": 1j,
    "bytes": b"x",
    "list": [],
    "lists": [[]],
    "None in a list": [None],
    "object in a list": [object()],
    "dict": {},
    "dict of None": {"a": None},
    "set": {1},
    "object": object(),
    "type": int,
    "path": Path("nowhere"),
    "scalar": torch.tensor(1.0),
    "empty tensor": torch.zeros(0, 3),
    "complex tensor": torch.zeros(1, 3, 4, dtype=torch.complex64),
    "meta tensor": torch.zeros(1, 3, 4, device="meta"),
    "generator": (i for i in ()),
}


class Call(NamedTuple):
    """A call with one argument that cannot be meant."""

    name: str
    make: Callable[[], Any]


@dataclass
class Counted:
    """What became of calls: refused in one line, taken after all, or ended in any other way."""

    refused: int = 0
    taken: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.refused + self.taken + len(self.broken)


_TEXT: dict[str, Any] = {"model": BERT, "data": TEXT[:200]}
_LAYER = ls.DotProduct(*(torch.nn.Parameter(torch.eye(2)) for _ in range(3)))
_BASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "measure": (ls.measure, {**_TEXT, "lengths": 4, "samples": 1, "layers": 0}),
    "bounds": (ls.bounds, {**_TEXT, "lengths": 3, "theorems": "local_rows"}),
    "attack": (ls.attack, {**_TEXT, "length": 2, "steps": 0}),
    "attack_text": (ls.attack_text, {**_TEXT, "length": 4, "samples": 1, "queries": 2}),
    "certify": (ls.certify, {**_TEXT, "length": 2, "steps": 1, "sharp": False}),
    "certify_decision": (
        ls.certify_decision,
        {**_TEXT, "length": 2, "between": ["a", "b"], "ball": "token", "tokens": [0]},
    ),
    "directions": (ls.directions, {**_TEXT, "length": 3, "k": 1}),
    "push": (ls.push, {**_TEXT, "length": 3, "eps": 0.1, "draws": 1, "certificate": False}),
    "split": (ls.split, {**_TEXT, "length": 3}),
    "smooth": (ls.smooth, {**_TEXT, "length": 4, "samples": 1, "target": 1e-3, "out": "smooth"}),
    "restrain": (
        ls.restrain,
        {"model": _LAYER, "data": torch.ones(3, 2), "how": "sigma-cap", "cap": 0.5},
    ),
    "load_model": (ls.load_model, {"model": BERT}),
    "read_run": (ls.read_run, {"path": "nowhere"}),
    "report": (ls.report, {"folders": ["nowhere"]}),
    "sweep": (ls.sweep, {"spec": {}}),
}


def calls() -> Iterator[Call]:
    """Every argument of every verb with every value; entries of sweeps too."""
    for verb, (function, base) in _BASES.items():
        for name in _parameters(function):
            for said, value in (WORDS | THINGS).items():
                if (name, said) == ("progress", "type"):  # is called, and says so itself
                    continue
                if (verb, name, said) == ("smooth", "out", "nobody"):  # somebody, elsewhere
                    continue
                yield Call(f"{verb}({name}={said})", _with(function, base, {name: value}))
    for key in (*(one.name for one in _fields()), 3):
        for said, value in (WORDS | THINGS).items():
            entries = {"models": BERT, "lengths": 4, "samples": 1} | {key: value}
            yield Call(f"sweep: {key} = {said}", lambda e=entries: _estimated(e))


def _estimated(entries: dict[Any, Any]) -> None:
    """Read as a sweep reads it; no job is done."""
    from lipscope.engine import sweeps as sweep

    sweep.read_spec(entries)


def _fields() -> Any:
    from dataclasses import fields

    from lipscope.engine.spec import Spec

    return fields(Spec)


def _with(function: Callable[..., Any], base: dict[str, Any], more: dict[str, Any]) -> Any:
    return lambda: function(**base | more)


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    """Names of all arguments, those behind ``**options`` too."""
    hints = get_type_hints(function)
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            yield from get_args(hints[one.name])[0].__annotations__
        else:
            yield one.name


def counted(some: Iterable[Call]) -> Counted:
    """Make the calls in this folder, where a refused one leaves nothing."""
    found, before = Counted(), set(os.listdir())
    for call in some:
        left: set[str] = set()
        try:
            call.make()
        except ls.InputError as problem:
            found.refused += 1
            words, left = str(problem), set(os.listdir()) - before
            if left or not words.isprintable() or len(words) > 1000:
                found.broken.append(ascii(f"{call.name}: {words[:200]}, left {left}"))
        except Exception as problem:  # what must not happen
            said = f"{type(problem).__name__}: {str(problem)[:200]}"
            found.broken.append(ascii(f"{call.name}: {said}"))
        else:
            found.taken += 1
        for name in set(os.listdir()) - before:
            shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)
    return found


_LINES = {
    "measure": ["--text", "text.txt", "--lengths", "4", "--samples", "1", "--layers", "0"],
    "bounds": ["--text", "text.txt", "--lengths", "3", "--theorems", "local_rows"],
    "attack": ["--text", "text.txt", "--length", "2", "--steps", "0"],
    "certify": ["--text", "text.txt", "--length", "2", "--no-sharp", "--random", "1"],
    "directions": ["--text", "text.txt", "--length", "3", "-k", "1"],
    "push": ["--text", "text.txt", "--length", "3", "--eps", "0.1", "--no-certificate"],
    "split": ["--text", "text.txt", "--length", "3"],
    "smooth": ["--text", "text.txt", "--length", "4", "--samples", "1", "--target", "1e-3"],
}


def lines() -> Iterator[tuple[str, list[str]]]:
    """Every option of every command with every word, and every argument."""
    commands: Any = typer.main.get_command(app)
    for name, made in commands.commands.items():
        if name == "explore":  # serves until it is interrupted
            continue
        base = [name, BERT, *_LINES[name]] if name in _LINES else [name]
        base += ["--out", "smooth"] if name == "smooth" else []
        for one in made.params:
            if one.name in ("help", "out") or (isinstance(one, click.Option) and one.is_flag):
                continue
            for said, word in WORDS.items():
                given = [word] if one.param_type_name == "argument" else [one.opts[0], word]
                if given == [word] and name in _LINES:
                    yield f"{name} {said}", [name, word, *_LINES[name]]
                else:
                    needed = [] if name in _LINES or given == [word] else _needed(name)
                    yield f"{name} {one.opts[0]} {said}", [*base, *needed, *given]


def _needed(name: str) -> list[str]:
    return {"rows": ["nowhere"], "report": ["nowhere"], "sweep": ["nowhere.yaml"]}.get(name, [])


def commanded(run: Command, some: Iterable[tuple[str, list[str]]]) -> Counted:
    """Give the command lines; one that is refused says one line, or how it is used."""
    found, before = Counted(), set(os.listdir())
    for name, words in some:
        try:
            result = run(*words)
        except Exception as problem:  # what must not happen
            found.broken.append(ascii(f"{name}: {type(problem).__name__}: {str(problem)[:200]}"))
            continue
        left = set(os.listdir()) - before
        if result.status == 0:
            found.taken += 1
        elif result.status == 2 and not left and "Traceback" not in result.err:
            found.refused += 1
        else:
            said = f"status {result.status}, {result.err[-300:]}, {left}"
            found.broken.append(ascii(f"{name}: {said}"))
        for one in left:
            shutil.rmtree(one) if os.path.isdir(one) else os.remove(one)
    return found
