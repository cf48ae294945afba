"""The command line: one screen per command, one command per file.

Results go to standard output, everything else to standard error. A mistake that the user
can mend is one line and exit status 2; an interrupted run says how to go on.
"""

from __future__ import annotations

import lipscope.cli.interrupts  # noqa: F401  (first: all others take time)

# isort: split
import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from lipscope.cli import (
    attack,
    bounds,
    certify,
    directions,
    doctor,
    measure,
    push,
    report,
    reproduce,
    rows,
    smooth,
    split,
    sweep,
    theorems,
)
from lipscope.cli.terminal import errors
from lipscope.errors import InputError

STATUS = (
    "Exit status: 0 done; 1 a certificate was violated, doctor found something missing, or rows of "
    "a sweep wait for another run; "
    "2 a mistake in the request, said in one line; 130 interrupted; 141 the reader of the "
    "output went away. Anything else is a fault of lipscope: please report it."
)

# `--layer` and `--layers`, `--length` and `--lengths` alike, whichever a command has.
_PLURAL = {"layer": "layers", "length": "lengths"}
_ALIKE = {"token_normalize_func": lambda word: _PLURAL.get(word, word)}
app = typer.Typer(
    epilog=STATUS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


def _version(wanted: bool) -> bool:
    if wanted:
        from lipscope.records import version

        sys.stdout.write(f"lipscope {version()}\n")
        raise typer.Exit
    return wanted


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """How much can the output of attention move when its input moves?"""
    del version


COMMANDS = (measure, bounds, directions, attack, certify, push, split, smooth)
COMMANDS += (theorems, sweep, rows, reproduce, report, doctor)
for _command in COMMANDS:
    _name = _command.__name__.rpartition(".")[2]
    app.command(epilog=_command.EXAMPLE, context_settings=_ALIKE)(getattr(_command, _name))


def main() -> NoReturn:
    """Entry point: run the command and turn foreseeable ends into exit statuses."""
    logging.getLogger("lipscope").handlers = [_Remarks()]
    try:
        app(prog_name="lipscope")
    except InputError as problem:
        errors.print(f"lipscope: {problem}", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        errors.print("Stopped.")
        raise SystemExit(130) from None
    except BrokenPipeError:
        _reader_gone()
    except SystemExit as end:
        # What writes tables and what parses commands turn a closed pipe into 1.
        if isinstance(end.__context__, BrokenPipeError) or not _flushed():
            _reader_gone()
        raise
    raise SystemExit(0)


def _flushed() -> bool:
    """Whether standard output could take what it still held."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return False
    return True


def _reader_gone() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(141) from None


class _Remarks(logging.Handler):
    """Remarks of the library as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        errors.print(record.getMessage(), markup=False, soft_wrap=True)
