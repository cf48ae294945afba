"""`lipscope reproduce`: the papers' experiments, each in one command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lipscope.cli.completion import EXPERIMENTS, experiments
from lipscope.cli.terminal import Force, Screen, errors, resumable
from lipscope.errors import InputError
from lipscope.plugins import load_plugins
from lipscope.records import Place

EXAMPLE = "Example: lipscope reproduce castin2024/figure1 --quick --out runs/figure1"


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="See --list.", autocompletion=experiments),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Names and titles.")] = False,
    models: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, such as minilm,bert-base-uncased. Default: see --list."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text file, folder of .txt files or ag_news, besides the default; may be repeated."
        ),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Folder of pictures for models that read them. Default: random pixels."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute on two cores, not the paper's size.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/<date>-<name>]")
    ] = None,
    force: Force = False,
) -> None:
    """Repeat an experiment of a paper: a run folder, its figures, and findings.md.

    findings.md puts the numbers beside what the paper says, in one table. A run that was
    stopped goes on when the same command is given again.
    """
    if list_all:
        _list()
        return
    if name is None:
        raise InputError("`NAME` should name an experiment. Found none; `--list` shows them.")
    package = _package_of(name)
    place = Place(out, name + "-quick" * quick, force=force)
    with resumable(), _Parts() as parts:
        findings = package.reproduce(
            name,
            models=None if models is None else _names(models),
            texts=text or (),
            images=images,
            quick=quick,
            out=place,
            progress=parts.tell,
        )
    _show(findings)
    errors.print(f"Rows, figures and findings.md: {place.path}", markup=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    """Names between commas; those of ``random:FAMILY:key=value,key=value`` stay together."""
    found: list[str] = []
    for word in text.split(","):
        if "=" in word and ":" not in word and found and found[-1].startswith("random:"):
            found[-1] += "," + word
        else:
            found.append(word)
    return found


def _packages() -> Sequence[Any]:
    """The installed packages of experiments."""
    found = load_plugins(EXPERIMENTS)
    if not found:
        raise InputError(
            "`lipscope reproduce` needs the package `lipscope-experiments`; run "
            "`pip install ./experiments` in the folder of lipscope."
        )
    return found


def _package_of(name: str) -> Any:
    """The package that has an experiment."""
    packages = {entry.name: package for package in _packages() for entry in package.experiments()}
    if name not in packages:
        raise InputError(f"`NAME` should be one of {', '.join(packages)}. Found `{name}`.")
    return packages[name]


def _list() -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what", "models"):
        table.add_column(column, no_wrap=column == "name")
    for entry in (entry for package in _packages() for entry in package.experiments()):
        table.add_row(entry.name, entry.title, ", ".join(entry.models) or "–")
    Screen().print(table)


def _show(findings: Any) -> None:
    table = Table(show_lines=True)
    for column in ("what", "the paper, or theory", "here"):
        table.add_column(column)
    for claim in findings.claims:
        table.add_row(Text(claim.about), Text(claim.said), Text(claim.found))
    console = Screen()
    console.print(table)
    for remark in findings.remarks:
        console.print(f"- {remark}", markup=False, soft_wrap=True)


class _Parts:
    """One line for each part on standard error; a counter in it where that is a terminal."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._part = ""

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live and self._part:
            sys.stderr.write("\n")

    def tell(self, done: int, total: int, part: str) -> None:
        """Say which part is being worked on, and how far it is."""
        new = part != self._part
        if self._live:
            sys.stderr.write(("\n" if new and self._part else "\r") + f"{part}: {done}/{total} ")
        elif new:
            sys.stderr.write(f"{part}: {total}\n")
        self._part = part
        sys.stderr.flush()
