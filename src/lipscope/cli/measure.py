"""`lipscope measure`: sigma of a model's layers on a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lipscope.cli.terminal import Bar, default_folder, errors, read_text, resumable
from lipscope.engine.ranges import parse_integers

if TYPE_CHECKING:
    from lipscope.pages.rows import Rows


EXAMPLE = "Example: lipscope measure minilm --text FILE --lengths 16,64,256 --rest"


def measure(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL[@REVISION]]",
            help="minilm, smollm2, dinov2, a folder, a hub id, or random:FAMILY[:key=value,…].",
        ),
    ] = "minilm",
    text: Annotated[
        str | None,
        typer.Option(help="Text file, or -.  [default: Python's manual]"),
    ] = None,
    layers: Annotated[str, typer.Option(help="all, or 0,3,5 or 0:5.")] = "all",
    lengths: Annotated[str, typer.Option(help="Tokens, or 2:512:10.")] = "16,64,256",
    samples: Annotated[int, typer.Option(help="Windows per length.")] = 10,
    windows: Annotated[str, typer.Option(help="or consecutive.")] = "spread",
    special_tokens: Annotated[
        bool, typer.Option(help="Put [CLS] and the like around each window.", show_default=False)
    ] = True,
    map_name: Annotated[
        str,
        typer.Option(
            "--map", help="attention|heads|normed|residual|block|model", show_default=False
        ),
    ] = "attention",
    per_head: Annotated[bool, typer.Option("--per-head", help="One row per head.")] = False,
    metric: Annotated[str, typer.Option(help="or token-relative.")] = "frobenius",
    move: Annotated[str, typer.Option(help="first, last, not-first, a:b.")] = "all",
    read: Annotated[str, typer.Option(help="Outputs that are read.")] = "all",
    side: Annotated[str, typer.Option(help="Across: query, key.")] = "self",
    position_offset: Annotated[int, typer.Option(help="First position id.")] = 0,
    images: Annotated[str | None, typer.Option(help="DIR or random, then @224,448.")] = None,
    rest: Annotated[
        bool, typer.Option("--rest", help="Also with the top token held fixed.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Also Frobenius norm and stable rank.")
    ] = False,
    tol: Annotated[float, typer.Option(help="Relative tolerance.")] = 1e-3,
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-6,
    tight: Annotated[
        bool, typer.Option("--tight", help="Interval within tol, in float64.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    memory: Annotated[str, typer.Option(help="Budget such as 1GiB.")] = "1GiB",
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/<date>-<model>]")
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object a row on stdout.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights, weights only.")
    ] = False,
) -> None:
    """Measure sigma, how far attention moves with its input, with intervals."""
    folder = out if out is not None else default_folder(model)
    chosen = "all" if layers == "all" else parse_integers(layers, "layers")
    wanted = parse_integers(lengths, "lengths") if images is None else None
    content = read_text(text) if images is None else None
    folder_of, sides = _images(images)
    from lipscope import measure as run

    with resumable(), Bar() as bar:
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
            side=side,  # pyright: ignore[reportArgumentType]
            position_offset=position_offset,
            images=folder_of,
            resolutions=sides,
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


def _images(text: str | None) -> tuple[str | None, list[int] | None]:
    """A folder of pictures and, behind an ``@``, their sides in pixels.

    >>> _images("cats@224,448")
    ('cats', [224, 448])
    """
    if text is None or Path(text).exists() or "@" not in text:
        return text, None
    where, _, sides = text.rpartition("@")
    return where, parse_integers(sides, "images")


def _publish(rows: Rows, folder: Path, *, jsonl: bool) -> None:
    """Figures into the folder; the table, or the rows, to standard output."""
    rows.save(folder)
    if jsonl:
        for row in rows:
            sys.stdout.write(row.to_json() + "\n")
    console = errors if jsonl else Console(highlight=False)
    console.print(rows.table(), crop=False)
    console.print()
    console.print(rows.summary(), markup=False, soft_wrap=True)
    for remark in _remarks(rows):
        errors.print(remark, markup=False, soft_wrap=True)
    errors.print(f"Rows and figures: {folder}", markup=False, soft_wrap=True)


def _remarks(rows: Rows) -> list[str]:
    """Each different remark once: bytes for tokens, steps that ran out, dropout."""
    notes = {row.note for row in rows if row.note is not None}
    parts = {part for note in notes for part in note.split("; ") if "frobenius" not in part}
    return sorted(f"Note: {part}." for part in parts)
