"""`lipscope theorems` and `lipscope reproduce`: bounds and experiments of papers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lipscope import pages
from lipscope.cli.options import with_options
from lipscope.cli.terminal import (
    EXPERIMENTS,
    Screen,
    complete_experiments,
    note,
    resumable,
    say,
    say_table,
    write_lines,
)
from lipscope.errors import InputError
from lipscope.plugins import load_plugins
from lipscope.records import Place

_PLAIN = ("statement", "cite", "kind", "scope", "metric", "subject", "needs", "sound", "slow")


@with_options(
    kind=(str, None, "Only upper, or only lower bounds."),
    scope=(str, None, "Only bounds that are local, ball, global, mean-field or limit."),
    cite=(str, None, "Only bounds from one source, such as castin2024."),
    jsonl=(bool, False, "One JSON object per theorem on stdout."),
    markdown=(bool, False, "The page docs/theorems.md, or with --cite the page of a source."),
    families=(bool, False, "The page docs/families.md."),
    variants=(bool, False, "The page docs/variants.md."),
)
def theorems(**options: Any) -> None:
    """List every bound: statement, source, scope, metric."""
    from lipscope.theorems import catalogue

    pages_asked = [one for one in ("families", "variants", "markdown", "jsonl") if options[one]]
    if pages_asked[1:]:
        found = " and ".join(f"`--{one}`" for one in pages_asked)
        raise InputError(f"The catalogue is printed in one form. Found {found}; choose one.")
    choices = {"kind": ("upper", "lower")}
    choices |= {"scope": ("local", "ball", "global", "mean-field", "limit")}
    choices |= {"cite": tuple(dict.fromkeys(one.cite for one in catalogue()))}
    chosen, cite = [*catalogue()], options["cite"]
    for name, known in choices.items():
        value = options[name]
        if value not in (None, *known):
            raise InputError(f"`{name}` should be one of {', '.join(known)}. Found `{value}`.")
        chosen = [one for one in chosen if value in (None, getattr(one, name))]
    if options["families"]:
        sys.stdout.write(pages.families_page())
    elif options["variants"]:
        sys.stdout.write(pages.variants_page())
    elif options["jsonl"]:
        write_lines(map(_theorem_line, chosen))
    elif options["markdown"]:
        page = pages.catalogue_page(chosen) if cite is None else pages.source_page(cite, chosen)
        sys.stdout.write(page)
    else:
        table = pages.empty_table(f"{len(chosen)} theorems", ("theorem", "statement", "source"), ())
        for name in ("kind", "scope", "metric"):
            table.add_column(name, no_wrap=True)
        for one in chosen:
            cells = (one.name, one.stated, one.cite, one.kind, one.scope, one.metric)
            table.add_row(*(Text(cell) for cell in cells))
        say_table(table)
        say([f"Scope. {' '.join(pages.SCOPES)}"])


def _theorem_line(one: Any) -> dict[str, Any]:
    found = {name: getattr(one, name) for name in (*_PLAIN, "summary", "note")}
    own = {"subject": one.subject.__name__, "needs": list(one.needs)}
    return {"theorem": one.name} | found | own


@with_options(
    list=(bool, False, "Names and titles."),
    models=(str, None, "Comma-separated, such as minilm,bert-base-uncased. Default: see --list."),
    text=(list[str], None, "Text file, folder of .txt files or ag_news, besides the default."),
    images=(str, None, "Folder of pictures for models that read them. Default: random pixels."),
    quick=(bool, False, "Smaller than in the paper: about a minute on two cores."),
    out=(Path, None, "Run folder.  [default: runs/<date>-<name>]"),
    force=(bool, False, "Replace a run with other options."),
)
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="See --list.", autocompletion=complete_experiments),
    ] = None,
    **options: Any,
) -> None:
    """Repeat an experiment of a paper: a run folder, its figures, and findings.md.

    findings.md compares the results with the paper, in one table. Rerun the same command to
    resume an interrupted run.
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
    """Split names at commas, but keep ``random:FAMILY:key=value,key=value`` together."""
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
    """One line per part on standard error, with a counter in a terminal."""
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
