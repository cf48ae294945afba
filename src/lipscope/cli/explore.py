"""`lipscope explore`: the live page."""

from __future__ import annotations

import contextlib
import webbrowser
from typing import Any

import typer

from lipscope.cli import interrupts
from lipscope.cli.options import Model, with_options
from lipscope.cli.terminal import errors, given_text, note


@with_options(
    text=(str, None, "File that the page begins with, or -."),
    beside=(str, None, "A second model, to compare with."),
    browser=(bool, True, "Open a browser."),
)
def explore(model: Model = "minilm", **options: Any) -> None:
    """Open a page on this machine where one types, and sees where attention is fragile.

    The page is served to this machine alone, by an address that holds a secret. To use it from
    another machine, forward its port. Ctrl-C ends it.
    """
    begin, beside = given_text(options["text"]), options["beside"]
    from lipscope.explore import served

    interrupts.as_usual()
    server = served([model] if beside is None else [model, beside], begin)
    note(f"{server.address}\nCtrl-C ends it.")
    if options["browser"]:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    errors.print("Stopped.")
    raise typer.Exit(130)
