"""`lipscope bounds`: every theorem about a layer, next to its measured sigma."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lipscope.cli.terminal import errors, read_text
from lipscope.engine.ranges import parse_integers
from lipscope.errors import InputError
from lipscope.pages.table import number

if TYPE_CHECKING:
    from lipscope.engine.bounds import Sandwich
    from lipscope.records.bound_rows import BoundRow

EXAMPLE = "Example: lipscope bounds minilm --layer 3 --length 64 --radius norm"
_WIDTH = 110
_SCOPES = {"local": 0, "global": 1, "mean-field": 2, "limit": 3}


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
        told=_write if jsonl else None,
    )
    if not jsonl:
        _show(found, per_head=per_head)
    if out is not None:
        errors.print(f"Rows and figure: {found.save(out)}", markup=False, soft_wrap=True)


def parse_radius(text: str | None) -> float | Literal["norm"] | None:
    """A number, ``norm`` or nothing."""
    if text is None or text == "norm":
        return "norm" if text else None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`--radius` should be a number, or norm. Found `{text}`.") from None


def table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    # Text, not markup: rich would read `:llama:` in a model's name as a picture.
    made = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        made.add_column(name, justify="left")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _write(row: BoundRow) -> None:
    sys.stdout.write(row.to_json() + "\n")
    sys.stdout.flush()


def _show(found: Sandwich, *, per_head: bool) -> None:
    # At least as wide as the table needs: a pipe counts as 80 columns.
    console = Console(highlight=False, width=max(_WIDTH, Console().width))
    if per_head:
        _show_heads(console, found)
        return
    for part in found.parts():
        rows = list(part)
        console.print(_table(rows))
        for line in _remarks(rows):
            console.print(line, markup=False)
        console.print()


def _table(rows: list[BoundRow]) -> Table:
    made = table(_where(rows[0]), ("theorem", "statement", "source", "scope"), ("value", "× sigma"))
    made.columns[0].no_wrap = True
    for row in [r for r in rows if r.kind == "measured"]:
        value = f"[{number(row.sigma)}, {number(row.upper)}]"
        made.add_row("measured", row.statement, "", _scope(row), value, "", style="bold")
    for kind in ("lower", "upper"):
        some = [r for r in rows if r.kind == kind and r.applicable]
        some.sort(key=lambda r: (_SCOPES.get(r.scope, 9), r.metric, r.value or 0.0))
        for i, row in enumerate(some):
            sign = "≥" if kind == "lower" else "≤"
            mark = "" if row.sound else " (fails)"
            cells = (row.theorem, row.statement + mark, row.cite, _scope(row))
            value = f"{sign} {number(row.value)}"
            made.add_row(
                *(Text(c) for c in cells),
                value,
                "" if row.looseness is None else number(row.looseness, 3),
                end_section=i == len(some) - 1,
            )
    return made


def _scope(row: BoundRow) -> str:
    """The scope, and the metric where it is not the usual one."""
    return row.scope if row.metric == "frobenius" else f"{row.scope}, {row.metric}"


def _where(row: BoundRow) -> str:
    sample = f", sample {row.sample}" if row.sample else ""
    return (
        f"{row.model}, layer {row.layer}, map {row.map}, {row.num_tokens} tokens{sample}, "
        f"{row.allowed}"
    )


def _remarks(rows: list[BoundRow]) -> Iterator[str]:
    """How to read the table, and what is not in it."""
    yield (
        "× sigma: an upper bound divided by the measured sigma of its own metric (Frobenius if "
        "none is named). Local bounds hold at this input, global ones for all inputs of this "
        "length with tokens of the norms above, mean-field ones for every length; a limit is "
        "that of large radii."
    )
    for row in rows:
        if row.applicable and row.note:
            yield f"{row.note}." if row.kind == "measured" else f"{row.theorem}: {row.note}."
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.applicable:
            reasons.setdefault(row.reason, []).append(row.theorem)
    if reasons:
        yield "Not applicable:"
    for reason, names in reasons.items():
        yield f"  {', '.join(names)}: {reason}."


def _show_heads(console: Console, found: Sandwich) -> None:
    """One line a head: the interval between the best bounds on both sides."""
    from lipscope.records.bound_rows import best_of

    layers = dict.fromkeys((r.layer, r.num_tokens, r.sample) for r in found)
    for place in layers:
        rows = [r for r in found if (r.layer, r.num_tokens, r.sample) == place]
        made = table(
            _where(rows[0]),
            ("head", "best local bound", "best global bound"),
            ("sigma", "local", "× sigma", "global", "× sigma"),
        )
        for head in dict.fromkeys(r.head for r in rows):
            own = [r for r in rows if r.head == head]
            measured = next(r for r in own if r.kind == "measured")
            own = [r for r in own if r.metric == measured.metric]
            local, wide = best_of(own, "local"), best_of(own, "global", "mean-field")
            made.add_row(
                str(head),
                "–" if local is None else local.theorem,
                "–" if wide is None else wide.theorem,
                f"[{number(measured.sigma)}, {number(measured.upper)}]",
                number(local and local.value),
                number(local and local.looseness, 3),
                number(wide and wide.value),
                number(wide and wide.looseness, 3),
            )
        console.print(made)
    console.print("Every theorem for every head: the same command with --jsonl.")
