"""`lipscope report`: run folders as one page to look at, and as figures for a paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: lipscope report runs/demo runs/bounds -o report.html --svg figures"


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, shown together.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The page.  [default: report.html in the first DIR]"),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Folder for the figures as PNG.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Folder for the figures as SVG.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also compare the second of two DIRs with the first.")
    ] = False,
) -> None:
    """Draw run folders as one HTML page that opens from disk and asks no network.

    Sigma with its intervals beside the shaded text, growth, heads, bounds, sensitivity,
    worst cases, methods, provenance and references. The paths written go to standard output.
    """
    from lipscope.pages import report as write

    for path in write(folders, out, png=png, svg=svg, compare=compare):
        sys.stdout.write(f"{path}\n")
