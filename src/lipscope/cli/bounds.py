"""`lipscope bounds`: every theorem about a layer, next to its measured sigma."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from lipscope.cli.terminal import errors, read_text
from lipscope.engine.ranges import parse_integers
from lipscope.errors import InputError
from lipscope.records.comparison import ADVERSARIAL, MEASURED, given, looseness

if TYPE_CHECKING:
    from lipscope.pages.rows import Rows
    from lipscope.records.rows import Bound, Measurement

EXAMPLE = "Example: lipscope bounds minilm --layer 3 --length 64 --radius norm"
_WIDTH = 110
_PLACE = ("model", "layer", "head", "map", "num_tokens", "sample")


def bounds(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]", help="minilm, smollm2, a folder, a hub id, or random:FAMILY…"
        ),
    ] = "minilm",
    layer: Annotated[str, typer.Option(help="An index, several such as 0,3, or all.")] = "0",
    text: Annotated[
        str | None,
        typer.Option(help="Text file, or -.  [default: Python's manual]"),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    lengths: Annotated[
        str | None, typer.Option(help="Several lengths, such as 16,64,128, for the figure.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Windows per length.")] = 1,
    radius: Annotated[
        str | None,
        typer.Option(
            help="Largest token norm: a number, or norm for that before the layer.  "
            "[default: that of the text]"
        ),
    ] = None,
    map_name: Annotated[
        str, typer.Option("--map", help="attention, heads or normed.")
    ] = "attention",
    per_head: Annotated[bool, typer.Option("--per-head", help="Each query head alone.")] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            help="frobenius, max-token or infinity, measured too.  [default: all theorems]"
        ),
    ] = None,
    sharp: Annotated[
        bool, typer.Option("--sharp", help="Also the bounds that take seconds a head.")
    ] = False,
    attack: Annotated[
        bool, typer.Option("--attack", help="Also the worst input within the radius.")
    ] = False,
    special_tokens: Annotated[
        bool, typer.Option(help="Put the model's special tokens around the window.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the rows and the figure over n.")
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per row on stdout, no table.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights (weights only).")
    ] = False,
) -> None:
    """Every bound of a layer next to its sigma.

    Every theorem that applies, with its value, source and looseness against the measured
    sigma (same metric and map), and those that do not, with the reason.
    """
    chosen = "all" if layer == "all" else parse_integers(layer, "layer")
    wanted = [length] if lengths is None else parse_integers(lengths, "lengths")
    from lipscope.engine.bounds import sandwich

    if out is not None and per_head:
        raise InputError("`--out` draws all heads together. Found `--per-head`; use `--jsonl`.")
    found = sandwich(
        model,
        read_text(text),
        layers=chosen,  # pyright: ignore[reportArgumentType]
        lengths=wanted,
        samples=samples,
        map=map_name,
        per_head=per_head,
        metric=metric,
        radius=parse_radius(radius),
        sharp=sharp,
        attack=attack,
        special_tokens=special_tokens,
        seed=seed,
        allow_pickle=allow_pickle,
        out=out,
        progress=_write if jsonl else None,
    )
    if not jsonl:
        _show(found)
    if out is not None:
        found.save(out)
        errors.print(f"Rows and figure: {out}", markup=False, soft_wrap=True)


def parse_radius(text: str | None) -> float | Literal["norm"] | None:
    """A number, ``norm`` or nothing."""
    if text is None or text == "norm":
        return "norm" if text else None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`--radius` should be a number, or norm. Found `{text}`.") from None


def _write(row: Measurement, bounds: Sequence[Bound]) -> None:
    """A line for the row, then one for each bound, which says of which place it speaks."""
    place = {name: getattr(row, name) for name in _PLACE}
    lines = [{"theorem": MEASURED if given(row) else ADVERSARIAL} | row.to_dict()]
    for bound in bounds:
        more = {"applicable": bound.applicable, "looseness": looseness(bound, row)}
        lines.append(vars(bound) | place | more)
    sys.stdout.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    sys.stdout.flush()


def _show(found: Rows) -> None:
    # At least as wide as the table needs: a pipe counts as 80 columns.
    console = Console(highlight=False, width=max(_WIDTH, Console().width))
    console.print(found.bounds_table())
