"""`lipscope reproduce`: the papers' experiments, each in one command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lipscope.cli.options import with_options
from lipscope.cli.terminal import EXPERIMENTS, Screen, complete_experiments, note, resumable, say
from lipscope.errors import InputError
from lipscope.plugins import load_plugins
from lipscope.records import Place


@with_options(
    list=(bool, False, "Names and titles."),
    models=(str, None, "Comma-separated, such as minilm,bert-base-uncased. Default: see --list."),
    text=(list[str], None, "Text file, folder of .txt files or ag_news, besides the default."),
    images=(str, None, "Folder of pictures for models that read them. Default: random pixels."),
    quick=(bool, False, "About a minute on two cores, not the paper's size."),
    out=(Path, None, "Run folder.  [default: runs/<date>-<name>]"),
    force=(bool, False, "Replace a run of another question."),
)
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="See --list.", autocompletion=complete_experiments),
    ] = None,
    **options: Any,
) -> None:
    """Repeat an experiment of a paper: a run folder, its figures, and findings.md.

    findings.md puts the numbers beside what the paper says, in one table. A run that was
    stopped goes on when the same command is given again.
    """
    if options.pop("list"):
        _list_experiments()
        return
    if name is None:
        raise InputError("`NAME` should name an experiment. Found none; `--list` shows them.")
    package = _package_of(name)
    out, force = options.pop("out"), options.pop("force")
    place = Place(out, name + "-quick" * options["quick"], force=force)
    models, texts = options.pop("models"), options.pop("text") or ()
    options["models"] = None if models is None else _model_names(models)
    with resumable(), _part_progress() as tell:
        findings = package.reproduce(name, texts=texts, out=place, progress=tell, **options)
    _show_findings(findings)
    note(f"Rows, figures and findings.md: {place.path}")


def _model_names(text: str) -> list[str]:
    """Names between commas; those of ``random:FAMILY:key=value,key=value`` stay together."""
    found: list[str] = []
    for word in text.split(","):
        if "=" in word and ":" not in word and found and found[-1].startswith("random:"):
            found[-1] += "," + word
        else:
            found.append(word)
    return found


def _packages() -> Sequence[Any]:
    found = load_plugins(EXPERIMENTS)
    if not found:
        raise InputError(
            "`lipscope reproduce` needs the package `lipscope-experiments`; run "
            "`pip install ./experiments` in the folder of lipscope."
        )
    return found


def _package_of(name: str) -> Any:
    packages = {entry.name: package for package in _packages() for entry in package.experiments()}
    if name not in packages:
        raise InputError(f"`NAME` should be one of {', '.join(packages)}. Found `{name}`.")
    return packages[name]


def _list_experiments() -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what", "models"):
        table.add_column(column, no_wrap=column == "name")
    for entry in (entry for package in _packages() for entry in package.experiments()):
        table.add_row(entry.name, entry.title, ", ".join(entry.models) or "–")
    Screen().print(table)


def _show_findings(findings: Any) -> None:
    table = Table(show_lines=True)
    for column in ("what", "the paper, or theory", "here"):
        table.add_column(column)
    for claim in findings.claims:
        table.add_row(Text(claim.about), Text(claim.said), Text(claim.found))
    Screen().print(table)
    say(f"- {remark}" for remark in findings.remarks)


@contextmanager
def _part_progress() -> Iterator[Callable[[int, int, str], None]]:
    """One line for each part on standard error; a counter in it where that is a terminal."""
    live, now = sys.stderr.isatty(), ""

    def tell(done: int, total: int, part: str) -> None:
        nonlocal now
        if live:
            sys.stderr.write(("\n" if now not in ("", part) else "\r") + f"{part}: {done}/{total} ")
        elif part != now:
            sys.stderr.write(f"{part}: {total}\n")
        now = part
        sys.stderr.flush()

    try:
        yield tell
    finally:
        if live and now:
            sys.stderr.write("\n")
