"""The terminal: output, text, progress, errors, and completion, which imports no torch."""

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
"""The group of the entry points by which packages of experiments come in."""


class Screen(Console):
    """A console that shows text as it is: no ``:llama:`` as a picture, no escape code obeyed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; control characters in text as their pictures."""
        super().print(*map(printable, objects), **options)


errors = Screen(stderr=True)


RUNNING: ContextVar[Any] = ContextVar("RUNNING", default=None)
"""The call of the command that runs, as typer has it."""
_NAMED = re.compile(r'(Found )?`([a-z_]+)( ?= ?"?([^`"]*)"?)?`')


def as_typed(text: str) -> str:
    """A message of the library with options as the command that runs has them: `--read-out`.

    What stands by itself after "Found" is a value.
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
    """A line on standard error, however long."""
    errors.print(as_typed(text), markup=False, soft_wrap=True)


def say(lines: Iterable[str]) -> None:
    """Lines on standard output, however long."""
    console = Screen()
    for line in lines:
        console.print(as_typed(line), markup=False, soft_wrap=True)


def say_table(table: Any, least: int = 110) -> None:
    """A table on standard output, at least as wide as it needs: a pipe counts as 80 columns."""
    Screen(width=max(least, Console().width)).print(table)


def show(result: Any) -> None:
    """What a verb found: its tables and its sentences."""
    from rich.table import Table

    for piece in pieces(result):
        if isinstance(piece, Table):
            say_table(piece, width_of(piece))
        elif isinstance(piece, str):
            say([piece])


def write_lines(records: Iterable[Mapping[str, Any]]) -> None:
    """A line of JSON on standard output for each record."""
    for one in records:
        sys.stdout.write(json.dumps(one, ensure_ascii=False) + "\n")


def given_text(path: str | None) -> str | None:
    """The text of a file, a folder or standard input, which must be UTF-8."""
    if path is None:
        return None
    if path == "-":
        return decode_text(sys.stdin.buffer.read(), "`--text`", "standard input")
    return read_texts(path, "`--text`")


@contextmanager
def resumable() -> Iterator[None]:
    """End an interrupted run with advice; typer would end it without a word.

    Not before what it runs is imported: torch swallows an interrupt while it imports numpy, which
    cannot be imported a second time.
    """
    interrupts.as_usual()
    try:
        yield
    except KeyboardInterrupt:
        errors.print("Stopped. What is finished is kept; the same command goes on from there.")
        raise typer.Exit(130) from None


def bar() -> engine.Bar:
    """Progress reporting, silent where standard error is no terminal."""
    return engine.Bar(shown=sys.stderr.isatty())


def complete_models(incomplete: str) -> list[str]:
    """Bundled models, random ones of well-known families, and folders here."""
    named = [*BUNDLED, *(f"random:{name}" for name in ("bert", "gpt2", "llama", "t5", "vit"))]
    folders = [str(path.parent) for path in Path().glob("*/config.json")]
    return [name for name in [*named, *folders] if name.startswith(incomplete)]


def complete_maps(incomplete: str) -> list[str]:
    """The maps of which sigma is measured."""
    return [name for name in records.MAPS if name.startswith(incomplete)]


def complete_theorems(incomplete: str) -> list[str]:
    """The catalogue, for the last of several names between commas."""
    before, comma, last = incomplete.rpartition(",")
    names = ["all", *_entered(_ROOT / "theorems", r"^@theorem\(.*?^def (\w+)")]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def complete_experiments(incomplete: str) -> list[str]:
    """The papers' experiments."""
    specs = [find_spec(one.module) for one in entry_points(group=EXPERIMENTS)]
    folders = [Path(path) for one in specs if one for path in one.submodule_search_locations or ()]
    named = r"^@experiment\(\s*\"([^\"]+)\""
    names = [name for folder in folders for name in _entered(folder, named)]
    return [name for name in names if name.startswith(incomplete)]


COMPLETED: dict[str, Callable[[str], list[str]]] = {
    "map": complete_maps,
    "theorems": complete_theorems,
}
"""Options by name."""


def _entered(folder: Path, pattern: str) -> Iterator[str]:
    """What the files of a folder enter into its register, read and not imported."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from re.findall(pattern, text, re.MULTILINE | re.DOTALL)
