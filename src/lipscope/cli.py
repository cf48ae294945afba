"""The command line: one screen per command.

Results go to standard output, everything else to standard error. A mistake that the user
can mend is one line and exit status 2; an interrupted run says how to go on.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lipscope.errors import InputError
from lipscope.ranges import parse_integers

if TYPE_CHECKING:
    from lipscope.record import Measurement
    from lipscope.report import Rows

app = typer.Typer(
    help="How much can the output of attention move when its input moves?",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_errors = Console(stderr=True, highlight=False)


@app.callback()
def _commands() -> None:
    """How much can the output of attention move when its input moves?"""


@app.command()
def measure(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL[@REVISION]]",
            help="minilm, smollm2, a folder, a hub id, or random:FAMILY[:key=value,…].",
        ),
    ] = "minilm",
    text: Annotated[
        str | None,
        typer.Option(help="Text file, or - for standard input. Default: Python's manual."),
    ] = None,
    layers: Annotated[str, typer.Option(help="all, or indices such as 0,3,5 or 0:5.")] = "all",
    lengths: Annotated[
        str, typer.Option(help="Tokens per window, such as 16,64,256 or 2:512:10.")
    ] = "16,64,256",
    samples: Annotated[int, typer.Option(help="Windows per length.")] = 10,
    windows: Annotated[
        str, typer.Option(help="spread (same passages at every length) or consecutive.")
    ] = "spread",
    special_tokens: Annotated[
        bool, typer.Option(help="Put the model's special tokens around each window.")
    ] = True,
    map_name: Annotated[
        str,
        typer.Option("--map", help="heads, attention, normed, residual, block or model."),
    ] = "attention",
    per_head: Annotated[bool, typer.Option("--per-head", help="One row per head.")] = False,
    metric: Annotated[str, typer.Option(help="frobenius or token-relative.")] = "frobenius",
    move: Annotated[
        str, typer.Option(help="Tokens that may move: all, first, last, not-first, a:b.")
    ] = "all",
    read: Annotated[
        str, typer.Option(help="Outputs that are read: all, first, last, not-first, a:b.")
    ] = "all",
    rest: Annotated[
        bool, typer.Option("--rest", help="Also sigma with the top token held fixed.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Also the Frobenius norm and stable rank.")
    ] = False,
    tol: Annotated[float, typer.Option(help="Relative tolerance of sigma.")] = 1e-3,
    delta: Annotated[float, typer.Option(help="Failure probability of an interval.")] = 1e-6,
    tight: Annotated[
        bool, typer.Option("--tight", help="Go on until the interval is within tol (float64).")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or float64.  [default: float32]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    memory: Annotated[str, typer.Option(help="Budget such as 1GiB.")] = "1GiB",
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/<date>-<model>]")
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per measurement on stdout.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights (weights only).")
    ] = False,
) -> None:
    """Measure sigma, the local Lipschitz constant of a model's attention, on a text.

    sigma says how far a layer's output moves for a small move of its input. Every row has
    an interval [sigma, upper] that holds with probability 1 - delta.
    """
    folder = out if out is not None else _default_folder(model)
    chosen = "all" if layers == "all" else parse_integers(layers, "layers")
    wanted = parse_integers(lengths, "lengths")
    content = _read_text(text)
    from lipscope import measure as run

    with _resumable(), _Bar() as bar:
        rows = run(
            model,
            content,
            layers=chosen,  # pyright: ignore[reportArgumentType]
            lengths=wanted,
            samples=samples,
            windows=windows,  # pyright: ignore[reportArgumentType]
            special_tokens=special_tokens,
            map=map_name,
            per_head=per_head,
            metric=metric,  # pyright: ignore[reportArgumentType]
            move=move,
            read=read,
            rest=rest,
            average=average,
            tol=tol,
            delta=delta,
            tight=tight,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            device=device,
            seed=seed,
            memory=memory,
            out=folder,
            allow_pickle=allow_pickle,
            progress=bar.update,
        )
    _publish(rows, folder, jsonl=jsonl)


@contextmanager
def _resumable() -> Iterator[None]:
    """End an interrupted run with advice; typer would end it without a word."""
    try:
        yield
    except KeyboardInterrupt:
        _errors.print("Stopped. Finished rows are kept; the same command goes on from there.")
        raise typer.Exit(130) from None


def _publish(rows: Rows, folder: Path, *, jsonl: bool) -> None:
    """Figures into the folder; the table, or the rows, to standard output."""
    rows.save(folder)
    if jsonl:
        for row in rows:
            sys.stdout.write(row.to_json() + "\n")
    console = _errors if jsonl else Console(highlight=False)
    console.print(rows.table(), crop=False)
    console.print()
    console.print(rows.summary(), markup=False, soft_wrap=True)
    for remark in _remarks(rows):
        _errors.print(remark, markup=False, soft_wrap=True)
    _errors.print(f"Rows and figures: {folder}", markup=False, soft_wrap=True)


def _remarks(rows: Rows) -> list[str]:
    """Each different remark once: bytes for tokens, steps that ran out, dropout."""
    notes = {row.note for row in rows if row.note is not None}
    parts = {part for note in notes for part in note.split("; ") if "frobenius" not in part}
    return sorted(f"Note: {part}." for part in parts)


def _read_text(path: str | None) -> str | None:
    if path is None:
        return None
    where = "standard input" if path == "-" else f"`{path}`"
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as problem:
        raise InputError(
            f"`--text` should be a readable file. Found {where}: {problem.strerror}."
        ) from None
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        content = "\0"
    if "\0" in content:
        raise InputError(f"`--text` should be UTF-8 text. Found {where}, which is not.")
    return content


def _default_folder(model: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "model"
    return Path("runs") / f"{datetime.date.today():%Y-%m-%d}-{name}"


class _Bar:
    """A progress bar on standard error, silent where that is no terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("measuring"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=_errors,
                transient=True,
            )
        self._task: Any = None

    def __enter__(self) -> _Bar:
        self._context().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def _context(self) -> AbstractContextManager[Any]:
        return self._bar if self._bar is not None else nullcontext()

    def update(self, done: int, total: int, row: Measurement | None) -> None:
        """Move the bar; rows that an earlier run left count as done."""
        del row
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done)


def main() -> NoReturn:
    """Entry point: run the command and turn foreseeable ends into exit statuses."""
    try:
        app(standalone_mode=True)
    except InputError as problem:
        _errors.print(f"lipscope: {problem}", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    raise SystemExit(0)


if __name__ == "__main__":
    main()
