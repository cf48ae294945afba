"""`lipscope explore`: the live page."""

from __future__ import annotations

import contextlib
import webbrowser
from typing import Annotated

import typer

from lipscope.cli import interrupts
from lipscope.cli.options import Model
from lipscope.cli.terminal import errors, note, read_text


def explore(
    model: Model = "minilm",
    text: Annotated[str | None, typer.Option(help="File that the page begins with, or -.")] = None,
    beside: Annotated[str | None, typer.Option(help="A second model, to compare with.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Open a page on this machine where one types, and sees where attention is fragile.

    The page is served to this machine alone, by an address that holds a secret. To use it from
    another machine, forward its port. Ctrl-C ends it.
    """
    begin = read_text(text)
    from lipscope.explore import served

    interrupts.as_usual()
    server = served([model] if beside is None else [model, beside], begin)
    note(f"{server.address}\nCtrl-C ends it.")
    if browser:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    errors.print("Stopped.")
    raise typer.Exit(130)
