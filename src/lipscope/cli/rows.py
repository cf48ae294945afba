"""`lipscope rows` and `lipscope report`: print, export or render run folders."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lipscope import pages, records
from lipscope.cli.options import with_options
from lipscope.cli.terminal import say, say_table
from lipscope.display import ENDS, Rounding, printable, rounded_down, rounded_up
from lipscope.engine import nearest
from lipscope.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars


_ALWAYS = ("layer", "num_tokens", "sample", "sigma", "upper", "relative", "status")
_WHERE_VARIED = (
    "model", "step", "text", "input", "head", "map", "metric", "move", "read", "dtype", "seed",
)  # fmt: skip
_TEXT = re.compile(r"'(?:[^']|'')*'")  # SQL string literals
_READS = re.compile(r"\b(?:read|scan)_\w+", re.IGNORECASE)
# Error messages of polars for invalid conditions; the query plan starts at `_PLAN`.
_PLAN = re.compile(r" (?:Resolved plan until failure|This error occurred)")
_NO_COLUMN = re.compile(r"(?:unable to find column|no column named) [\"'](\w+)[\"']")
_VALID = re.compile(r"valid columns: \[([^\]]*)\]")
_OF_TABLE = re.compile(r"in table '(\w+)'")
_NO_OPERATOR = re.compile(r"operator (?:PG)?(\w+) is not currently supported")
_FORMULA = r"^[=+\-@\t\r]"
Form = Literal["csv", "parquet", "json", "latex"]


@with_options(
    where=(str, None, "SQL condition on the columns; tokens, bounds and directions by id."),
    part=(str, None, "Another table: tokens, bounds, directions; edits, push…"),
    to=(str, None, "csv, parquet, json or latex.  [default: a table]"),
    out=(Path, None, "File to write.  [default: standard output]"),
)
def rows(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder.")], **options: Any
) -> None:
    """Print or export the rows of a run folder.

    The table and latex have only the columns that vary; the other formats have all.
    In csv, text that looks like a formula (=, +, -, @) is prefixed with '; parquet and json
    store it unchanged.
    """
    where, part, to, out = (options[name] for name in ("where", "part", "to", "out"))
    if to not in (None, "csv", "parquet", "json", "latex"):
        raise InputError(f"`--to` should be one of csv, parquet, json, latex. Found `{to}`.")
    run = records.read_run(folder)
    found = selected(run, where) if part is None else _values(run, part, where, to)
    if to is None and out is None:
        _print(varied_columns(found) if part is None else found)
        return
    content = exported(found, to or _form_of(out))  # pyright: ignore[reportArgumentType]
    if out is not None:
        _write_file(out, content)
    elif to == "parquet" and sys.stdout.isatty():
        raise InputError("Parquet cannot be shown in a terminal; name a file with `--out`.")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)


def selected(run: records.Run, where: str | None) -> polars.DataFrame:
    """The rows that satisfy an SQL condition on the rows and their side tables."""
    import polars as pl

    if where is None:
        return run.rows
    if other := _READS.search(_TEXT.sub("", where)):
        raise InputError(
            f"`--where` should be an SQL condition on this run. Found `{other[0]}`, which reads "
            f"other files; its tables are rows, {', '.join(records.BESIDE)}."
        )
    tables = {"rows": run.rows}
    for name in records.BESIDE:
        if name in where:
            tables[name] = getattr(run, name)
    try:
        return pl.SQLContext(tables, eager=True).execute(f"SELECT rows.* FROM rows WHERE {where}")
    except pl.exceptions.PolarsError as problem:
        raise InputError(
            f"`--where` should be an SQL condition. Found `{where}`: {_why(problem, tables)}"
        ) from None


def _why(problem: Exception, tables: Mapping[str, polars.DataFrame]) -> str:
    """Why a condition is invalid, without the query plan of polars."""
    words = _PLAN.split(" ".join(str(problem).split()))[0]
    if column := _NO_COLUMN.search(words):
        valid, table = _VALID.search(words), _OF_TABLE.search(words)
        some = [tables[table[1]]] if table and table[1] in tables else tables.values()
        known = [name for one in some for name in one.columns]
        known = re.findall(r"\w+", valid[1]) if valid else known
        hint = nearest(column[1], known) or f" Known are {', '.join(known)}."
        return f"there is no column `{column[1]}`.{hint}"
    if operator := _NO_OPERATOR.search(words):
        return f"the operator {operator[1]} is not known here; compare with =, <, >, in or like."
    return f"{words[:200]}."


def _values(run: records.Run, part: str, where: str | None, to: str | None) -> polars.DataFrame:
    """Values of a part, or tokens, bounds or directions of the rows, one per line."""
    if where is not None or to == "latex":
        raise InputError(
            "`--part` goes with csv, parquet and json of all lines. Found `--where` or latex."
        )
    found = run.values(part)
    if not len(found) and part in records.BESIDE:
        found = getattr(run, part)
    if not len(found):
        held = [*(name for name in records.BESIDE if len(getattr(run, name))), *run.parts()]
        raise InputError(
            f"`--part` should name what this run holds beside its rows: {', '.join(held) or 'none'}"
            f". Found `{part}`."
        )
    return found


def exported(frame: polars.DataFrame, form: Form) -> bytes:
    """Rows as the content of a file; ``latex`` has only the columns that vary."""
    if form == "latex":
        return latex(varied_columns(frame)).encode()
    if form == "csv":
        return _without_formulas(frame).write_csv().encode()
    content = io.BytesIO()
    frame.write_parquet(content) if form == "parquet" else frame.write_json(content)
    return content.getvalue() + b"\n" * (form == "json")


def _without_formulas(frame: polars.DataFrame) -> polars.DataFrame:
    """Lists as JSON, and text that looks like a formula with ``'``, so that it is text alone."""
    import polars as pl

    nested = [column for column in frame if column.dtype.is_nested()]
    lists = [pl.Series(one.name, map(json.dumps, one.to_list())) for one in nested]
    frame, text = frame.with_columns(lists), pl.col(pl.String)
    marked = "'" + text
    return frame.with_columns(
        pl.when(text.str.contains(_FORMULA)).then(marked).otherwise(text).name.keep()
    )


def varied_columns(frame: polars.DataFrame) -> polars.DataFrame:
    """The columns to display: the results, and the settings that vary between rows."""
    varied = [n for n in _WHERE_VARIED if frame[n].n_unique() > 1]
    if frame.select(*varied, *_ALWAYS[:3]).is_duplicated().any():  # built inputs of several radii
        varied.append("radius_max")
    return frame.select(*varied, *_ALWAYS)


def latex(frame: polars.DataFrame) -> str:
    """A ``tabular`` with booktabs rules."""
    sides = "".join("r" if kind.is_numeric() else "l" for kind in frame.dtypes)
    lines = [f"\\begin{{tabular}}{{{sides}}}", "\\toprule"]
    lines += [" & ".join(map(_escaped, frame.columns)) + r" \\", "\\midrule"]
    lines += [
        " & ".join(map(_escaped, _cells(row))) + r" \\" for row in frame.iter_rows(named=True)
    ]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row in words; a bound and a radius are rounded to their side."""
    ends = dict(ENDS)
    if "kind" in row:
        ends["value"] = rounded_up if row["kind"] == "upper" else rounded_down
    if "attack" in row:
        ends |= {"radius": rounded_down, "attack": rounded_up}
    return [_cell_words(value, ends.get(name)) for name, value in row.items()]


def _cell_words(value: object, rounding: Rounding | None) -> str:
    if isinstance(value, float):
        return pages.number(value, 4, rounding)
    return "–" if value is None else str(value)


def _escaped(text: str) -> str:
    """Escape the special characters of LaTeX."""
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "–": "--"}
    special |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, c) for c in text)


def _form_of(out: Path | None) -> str:
    endings = {".csv": "csv", ".parquet": "parquet", ".json": "json", ".tex": "latex"}
    ending = out.suffix if out is not None else ""
    if ending not in endings:
        raise InputError(
            f"`--out` should end in {', '.join(endings)} where no `--to` is given. Found `{out}`."
        )
    return endings[ending]


def _write_file(path: Path, content: bytes) -> None:
    records.refuse_record(path)
    try:
        path.write_bytes(content)
    except OSError as problem:
        raise InputError(f"`--out {path}` cannot be written ({problem.strerror}).") from None


def _print(frame: polars.DataFrame) -> None:
    """Print a table at its full width."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, kind in frame.schema.items():
        table.add_column(Text(name), justify="right" if kind.is_numeric() else "left", no_wrap=True)
    for row in frame.iter_rows(named=True):
        table.add_row(*(Text(printable(cell)) for cell in _cells(row)))
    say_table(table, Console(width=10**6).measure(table).maximum)
    say([f"{len(frame):,} rows"])


@with_options(
    png=(Path, None, "Folder for the figures as PNG."),
    svg=(Path, None, "Folder for the figures as SVG."),
    compare=(bool, False, "Also compare the second of two DIRs with the first."),
)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, shown together.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="A file.  [default: report.html in the first DIR]"),
    ] = None,
    **options: Any,
) -> None:
    """Render run folders as one self-contained HTML page that works offline.

    Sigma with its intervals beside the shaded text, growth, heads, bounds, sensitivity,
    worst cases, methods, provenance and references. The written paths are printed.
    """
    for path in pages.report(folders, out, **options):
        sys.stdout.write(f"{path}\n")
