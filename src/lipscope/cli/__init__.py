"""The command line: one screen per command, one command per file.

Results go to standard output, everything else to standard error. A mistake that the user
can mend is one line and exit status 2; an interrupted run says how to go on.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from lipscope.cli import attack, bounds, certify, measure, reproduce, theorems
from lipscope.cli.terminal import errors
from lipscope.errors import InputError

app = typer.Typer(
    help="How much can the output of attention move when its input moves?",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """How much can the output of attention move when its input moves?"""


app.command()(measure.measure)
app.command(epilog=bounds.EXAMPLE)(bounds.bounds)
app.command(epilog=attack.EXAMPLE)(attack.attack)
app.command(epilog=certify.EXAMPLE)(certify.certify)
app.command(epilog=reproduce.EXAMPLE)(reproduce.reproduce)
app.command(epilog=theorems.EXAMPLE)(theorems.theorems)


def main() -> NoReturn:
    """Entry point: run the command and turn foreseeable ends into exit statuses."""
    try:
        app(standalone_mode=True)
    except InputError as problem:
        errors.print(f"lipscope: {problem}", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    raise SystemExit(0)
