"""Terminal input and output, progress, errors, and completion without importing torch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from lipscope import engine, records
from lipscope.cli import interrupts
from lipscope.display import pieces, printable, width_of
from lipscope.sources import BUNDLED, decode_text, read_texts

_ROOT = Path(__file__).parent.parent
EXPERIMENTS = "lipscope.experiments"
"""Entry point group of experiment packages."""


class Screen(Console):
    """A console that prints text literally, without emoji codes and escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with control characters as visible symbols."""
        super().print(*map(printable, objects), **options)


errors = Screen(stderr=True)


RUNNING: ContextVar[Any] = ContextVar("RUNNING", default=None)
"""The typer context of the running command."""
_NAMED = re.compile(r'(Found )?`([a-z_]+)( ?= ?"?([^`"]*)"?)?`')


def as_typed(text: str) -> str:
    """A message of the library with options as typed on the command line: `--read-out`.

    A name without ``=`` after "Found" is a value and is left unchanged.
    """
    context = RUNNING.get()
    if context is None:
        return text
    alike = context.token_normalize_func or str
    every: list[Any] = [one for one in context.command.params if one.param_type_name == "option"]
    options = {alike(one.name): one for one in every}

    def typed(found: re.Match[str]) -> str:
        before, name, given, value = found.groups(default="")
        option = options.get(alike(name.removeprefix("at_")))
        if option is None or (before and not given):
            return found[0]
        flag = max(option.opts, key=len)
        if option.is_flag:
            flag, value = (option.secondary_opts or [flag])[0] if value == "False" else flag, ""
        return f"{before}`{flag} {value}".rstrip() + "`"

    return _NAMED.sub(typed, text)


def note(text: str) -> None:
    """Print a line to standard error, without wrapping."""
    errors.print(as_typed(text), markup=False, soft_wrap=True)


def say(lines: Iterable[str]) -> None:
    """Print lines to standard output, without wrapping."""
    console = Screen()
    for line in lines:
        console.print(as_typed(line), markup=False, soft_wrap=True)


def say_table(table: Any, least: int = 110) -> None:
    """Print a table to standard output, with a minimum width: pipes count as 80 columns."""
    Screen(width=max(least, Console().width)).print(table)


def show(result: Any) -> None:
    """Print the tables and sentences of a result."""
    from rich.table import Table

    for piece in pieces(result):
        if isinstance(piece, Table):
            say_table(piece, width_of(piece))
        elif isinstance(piece, str):
            say([piece])


def write_lines(records: Iterable[Mapping[str, Any]]) -> None:
    """Print one line of JSON per record to standard output."""
    for one in records:
        sys.stdout.write(json.dumps(one, ensure_ascii=False) + "\n")


def given_text(path: str | None) -> str | None:
    """The UTF-8 text of a file, a folder or standard input."""
    if path is None:
        return None
    if path == "-":
        return decode_text(sys.stdin.buffer.read(), "`--text`", "standard input")
    return read_texts(path, "`--text`")


@contextmanager
def resumable() -> Iterator[None]:
    """Exit an interrupted run with advice; typer would exit silently.

    Use it only after the imports: torch swallows an interrupt while it imports numpy, which
    cannot be imported twice.
    """
    interrupts.as_usual()
    try:
        yield
    except KeyboardInterrupt:
        errors.print("Stopped. What is finished is kept; rerun the same command to resume.")
        raise typer.Exit(130) from None


def bar() -> engine.Bar:
    """Progress bar; silent if standard error is not a terminal."""
    return engine.Bar(shown=sys.stderr.isatty())


def complete_models(incomplete: str) -> list[str]:
    """Bundled models, random models of well-known families, and local folders."""
    named = [*BUNDLED, *(f"random:{name}" for name in ("bert", "gpt2", "llama", "t5", "vit"))]
    folders = [str(path.parent) for path in Path().glob("*/config.json")]
    return [name for name in [*named, *folders] if name.startswith(incomplete)]


def complete_maps(incomplete: str) -> list[str]:
    """The supported maps."""
    return [name for name in records.MAPS if name.startswith(incomplete)]


def complete_theorems(incomplete: str) -> list[str]:
    """Theorems of the catalogue, for the last of several comma-separated names."""
    before, comma, last = incomplete.rpartition(",")
    names = ["all", *_entered(_ROOT / "theorems", r"^@theorem\(.*?^def (\w+)")]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def complete_experiments(incomplete: str) -> list[str]:
    """The experiments of papers."""
    specs = [find_spec(one.module) for one in entry_points(group=EXPERIMENTS)]
    folders = [Path(path) for one in specs if one for path in one.submodule_search_locations or ()]
    named = r"^@experiment\(\s*\"([^\"]+)\""
    names = [name for folder in folders for name in _entered(folder, named)]
    return [name for name in names if name.startswith(incomplete)]


COMPLETED: dict[str, Callable[[str], list[str]]] = {
    "map": complete_maps,
    "theorems": complete_theorems,
}
"""Completion functions by option name."""


def _entered(folder: Path, pattern: str) -> Iterator[str]:
    """Names that the files of a folder register, found without importing them."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from re.findall(pattern, text, re.MULTILINE | re.DOTALL)
