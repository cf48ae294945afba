"""The command line: one module per group of commands, with an example in the help of each.

Results go to standard output, everything else to standard error. A user error is one line
and exit status 2; an interrupted run explains how to resume.
"""

from __future__ import annotations

import lipscope.cli.interrupts  # noqa: F401  (first: the other imports are slow)

# isort: split
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from lipscope.cli import doctor, layers, papers, rows
from lipscope.cli.terminal import RUNNING, as_typed, errors, note
from lipscope.errors import InputError

STATUS = (
    "Exit status: 0 done; 1 a certificate was violated, doctor found something missing, or rows of "
    "a sweep must be run again; "
    "2 invalid input, with a one-line message; 130 interrupted; 141 the reader of the "
    "output closed the pipe. Anything else is a bug in lipscope: please report it."
)

# `--layer` and `--layers` are synonyms in every command.
_PLURAL = {"layer": "layers", "length": "lengths", "text": "texts"}
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


EXAMPLES: dict[Callable[..., None], str] = {
    layers.measure: "lipscope measure minilm --text FILE --lengths 16,64,256 --rest",
    layers.bounds: "lipscope bounds minilm --layer 3 --length 64 --radius norm",
    layers.directions: "lipscope directions minilm --layer 3 --length 32 -k 3 --out runs/words",
    layers.attack: "lipscope attack minilm --layer 3 --length 64 --like-text --steps 80",
    layers.certify: "lipscope certify minilm --layer 3 --length 32 --eps 0.01",
    layers.push: "lipscope push smollm2 --layer 5 --length 32 --map block --out runs/push",
    layers.split: "lipscope split minilm --layers 0,3 --length 32 --out runs/split",
    layers.smooth: "lipscope smooth minilm --layers 3 --target 2 --out smooth-minilm",
    papers.theorems: "lipscope theorems --kind upper --scope local",
    layers.sweep: "lipscope sweep growth.yaml --out runs/growth --workers 2",
    rows.rows: 'lipscope rows runs/demo --where "layer = 3 and sigma > 10" --to csv',
    papers.reproduce: "lipscope reproduce castin2024/figure1 --quick --out runs/figure1",
    layers.explore: "lipscope explore minilm --text FILE",
    rows.report: "lipscope report runs/demo runs/bounds -o report.html --svg figures",
    doctor.doctor: "lipscope doctor",
}


class _Command(TyperCommand):
    """A command whose error messages show options as typed on the command line."""

    def invoke(self, ctx: Any) -> Any:
        before = RUNNING.set(ctx)
        try:
            return super().invoke(ctx)
        except InputError as problem:
            raise InputError(as_typed(str(problem))) from None
        finally:
            RUNNING.reset(before)


for _command, _example in EXAMPLES.items():
    app.command(cls=_Command, epilog=f"Example: {_example}", context_settings=_ALIKE)(_command)


def main() -> NoReturn:
    """Entry point: run the command and convert expected exceptions to exit statuses."""
    logging.getLogger("lipscope").handlers = [_Remarks()]
    try:
        app(prog_name="lipscope")
    except InputError as problem:
        note(f"lipscope: {problem}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        errors.print("Stopped.")
        raise SystemExit(130) from None
    except BrokenPipeError:
        _reader_gone()
    except SystemExit as end:
        # rich and typer convert a closed pipe to status 1.
        if isinstance(end.__context__, BrokenPipeError) or not _flushed():
            _reader_gone()
        raise
    raise SystemExit(0)


def _flushed() -> bool:
    """Whether standard output can be flushed."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return False
    return True


def _reader_gone() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(141) from None


class _Remarks(logging.Handler):
    """Print warnings of the library to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())
