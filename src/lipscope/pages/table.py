"""Tables of rows: a line for each layer or head, or for each theorem, with reading notes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lipscope.charts import visible
from lipscope.display import Rounding, Sheet, printable, rounded_down, rounded_up
from lipscope.records import (
    ADVERSARIAL,
    EVERYWHERE,
    LACK_OF_FIT,
    MEASURED,
    NEAR,
    Bound,
    Group,
    Growth,
    Measurement,
    TokenShare,
    allowed,
    best_of,
    by_row,
    format_p,
    given,
    group_of,
    grouped,
    groups,
    looseness,
    percent_off,
)

MAX_WIDTH = 100
SETTING = ("model", "map", "metric", "move", "read")
_TEST = f"F test, p < {LACK_OF_FIT:g}"
IN_SWEEPS = ("text", "input", "dtype", "seed")  # told only where they differ


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    group: Group  # what its rows have in common
    row: Measurement | None  # middle row by sigma at the largest length; null if none is finite
    last: list[Measurement]  # all rows at the largest length
    token: str | None  # text of the middle row's top token, where it is known
    growth: Growth | None  # how sigma grows with the number of tokens
    num_tokens: int  # the largest length


class Column(NamedTuple):
    """A column: its heading, its cell of a line, and its alignment."""

    name: str
    cell: Callable[[Line], str]
    left: bool = False


def blocks(
    rows: Sequence[Measurement],
    tokens: Iterable[TokenShare],
    fits: Mapping[Group, Growth | None],
) -> list[list[Line]]:
    """The table's lines, those of one model, map, metric, move and read together."""
    # Of what has neither text nor id the text is the index, which stands there anyway.
    names = {(t.id, t.index): t.text for t in tokens if t.text != str(t.index)}
    largest: dict[tuple[Any, ...], int] = {}
    for row in rows:
        setting = _row_setting(row)
        largest[setting] = max(row.num_tokens, largest.get(setting, 0))
    found = []
    for key, part in groups(rows).items():
        num_tokens = largest[_row_setting(key)]
        last = [row for row in part if row.num_tokens == num_tokens]
        row = middle(last)
        token = None if row is None else names.get((row.id, row.top_token or 0))
        found.append(Line(key, row, last, token, fits[key], num_tokens))
    return list(grouped(found, lambda line: _row_setting(line.group)).values())


def with_radius(rows: Sequence[Measurement]) -> list[Measurement]:
    """Rows whose constructed inputs have their radius in their name, if one curve has several."""
    seen = Counter((group_of(row), row.num_tokens, row.sample) for row in rows)
    several = {_row_setting(key[0]) for key, count in seen.items() if count > 1}
    return [
        replace(row, input=f"{row.input}, radius {row.radius_max:.3g}")
        if row.radius_max and not given(row) and _row_setting(row) in several
        else row
        for row in rows
    ]


def middle(rows: Sequence[Measurement]) -> Measurement | None:
    """The row of median sigma (the lower middle of an even number); none if none is finite."""
    finite = [(r.sigma, r.sample, r) for r in rows if r.sigma is not None]
    finite = sorted(t for t in finite if math.isfinite(t[0]))
    return finite[(len(finite) - 1) // 2][2] if finite else None


def _row_setting(of: Measurement | Group) -> tuple[Any, ...]:
    return tuple(getattr(of, name) for name in (*SETTING, *IN_SWEEPS))


def number(value: float | None, digits: int = 4, rounded: Rounding | None = None) -> str:
    """A number with so many significant digits; integer digits are never cut.

    A number behind ≥ or ≤ is ``rounded`` first: `rounded_down` or `rounded_up`.

    >>> number(24.1283), number(1096.4, 3), number(float("nan")), number(14.951, 4, rounded_up)
    ('24.13', '1096', '–', '14.96')
    """
    if value is not None and rounded is not None:
        value = rounded(value, digits)
    if value is None or not math.isfinite(value):
        return "–"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(places, 0)}f}"


def without(delta: float) -> str:
    """One minus a probability, legible for small ones too.

    >>> without(0.01), without(1e-6)
    ('0.99', '1 - 1e-06')
    """
    return f"{1 - delta:.10g}" if delta >= 1e-3 else f"1 - {delta:g}"


def interval(sigma: float | None, upper: float | None) -> str:
    """``[sigma, upper]`` rounded outwards, so that it holds as printed; one end alone as ``≥``.

    >>> interval(13.047189, 13.0588), interval(8.4625, None)
    ('[13.04, 13.06]', '≥ 8.462')
    """
    low = number(sigma, 4, rounded_down)
    if sigma is not None and upper is None:
        return f"≥ {low}"
    return f"[{low}, {number(upper, 4, rounded_up)}]"


def percent(share: float | None) -> str:
    """A share in whole percent.

    >>> percent(0.934), percent(-1e-4), percent(None)
    ('93 %', '0 %', '–')
    """
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:z.0f} %"


def _top_token_cell(line: Line, narrow: int) -> str:
    """The top token as text and index: ``'[CLS]' (0)``."""
    if line.row is None or line.row.top_token is None:
        return "–"
    if line.token is None:
        return f"({line.row.top_token})"
    text = visible(line.token)
    limit = 7 if narrow > 1 else 11
    return f"{text if len(text) <= limit else text[: limit - 1] + '…'!r} ({line.row.top_token})"


def _growth_cell(line: Line, narrow: int) -> str:
    """The verdict, with that of inputs beyond the training length below it."""
    if line.growth is None:
        return "–"
    cell, beyond = _verdict_cell(line.growth, narrow), line.growth.beyond
    if beyond is None:
        return cell
    return f"{cell}\nfrom {beyond.lengths[0]}:\n{_verdict_cell(beyond, narrow)}"


def _verdict_cell(fit: Growth, narrow: int) -> str:
    """The exponent; where no power law fits, the slopes under it, a few in a line."""
    head, _, rest = fit.verdict.partition(": ")
    head = head.replace(" (", "\n(")
    if narrow:
        head = head.replace(", p ", ",\np ")
    if narrow > 1:
        head = head.replace(" [", "\n[")
    slopes, few = rest.split(", ") if rest else [], 4 - narrow
    parts = [slopes[i : i + few] for i in range(0, len(slopes), few)]
    return "\n".join([head, *(", ".join(part) for part in parts)])


def _of_row(attribute: str, digits: int = 4) -> Callable[[Line], str]:
    return lambda line: number(getattr(line.row, attribute, None), digits)


def stable_rank(row: Measurement) -> float | None:
    """``(‖J‖_F / sigma)²``, where both are known."""
    return (row.frobenius / row.sigma) ** 2 if row.frobenius and row.sigma else None


def _sigma_cell(line: Line) -> str:
    return number(line.row.sigma, 4, rounded_down) if line.row else _status(line)


def _ends_cell(line: Line, narrow: int) -> str:
    if line.row is None:
        return _status(line) if narrow else "–"  # where sigma has a column, the status is there
    return interval(line.row.sigma, line.row.upper)


def _status(line: Line) -> str:
    """The reason why a line has no sigma."""
    return ", ".join(sorted({row.status for row in line.last})) or "not measured"


def _table_columns(lines: Sequence[Line], narrow: int) -> list[Column]:
    """The columns of these lines; a narrow table gives sigma only in its interval."""
    every = (*SETTING, *IN_SWEEPS)
    varied = [n for n in every if len({getattr(line.group, n) for line in lines}) > 1]
    columns = [Column(n, lambda line, n=n: str(getattr(line.group, n)), True) for n in varied]
    columns.append(Column("layer", lambda line: _or(line.group.layer, "model")))
    if any(line.group.head is not None for line in lines):
        columns.append(Column("head", lambda line: _or(line.group.head, "all")))
    if not narrow:
        columns.append(Column("sigma", _sigma_cell))
    columns.append(Column("[sigma, upper]", lambda line: _ends_cell(line, narrow), True))
    columns += [
        Column("relative", _of_row("relative", 3)),
        Column("top token", lambda line: _top_token_cell(line, narrow), True),
        Column("share", lambda line: percent(line.row and line.row.top_share)),
    ]
    if _any_has(lines, "sigma_rest"):
        columns.append(Column("without it", _of_row("sigma_rest")))
    if _any_has(lines, "frobenius"):
        columns += [
            Column("stable rank", lambda x: number(x.row and stable_rank(x.row), 3)),
            Column("Frob. norm", _of_row("frobenius", 3)),
        ]
    return [*columns, Column("growth", lambda x: _growth_cell(x, narrow), True)]


def _any_has(lines: Sequence[Line], name: str) -> bool:
    """Whether a row in the table has this value."""
    return any(getattr(line.row, name, None) is not None for line in lines)


def _or(value: int | None, other: str) -> str:
    return other if value is None else str(value)


def draw(rows: Sequence[Measurement], lines: Sequence[Line]) -> Table:
    """The table of these lines, at most `MAX_WIDTH` wide, with its caption."""
    table = _rows_table(lines)
    for narrow in (1, 2):
        if _width(table) > MAX_WIDTH:
            table = _rows_table(lines, narrow)
    table.width = _width(table)
    table.caption = Text("\n".join(_caption(rows, lines)), justify="left", style="dim")
    return table


def _rows_table(lines: Sequence[Line], narrow: int = 0) -> Table:
    """The table; the narrower, the less air and the more lines for the growth of one row."""
    table = Table(title=_title(lines), title_justify="left", box=SIMPLE_HEAD)
    table.padding = (0, 0 if narrow else 1, 0, 0)
    table.pad_edge = False
    columns = _table_columns(lines, narrow)
    for column in columns:
        # Headings of two words may stand in two lines; what is under them may not.
        name = column.name if column.name.startswith("[") else column.name.replace(" ", "\n")
        table.add_column(Text(name), justify="left" if column.left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(printable(column.cell(line))) for column in columns))
    if table.columns and (lack := 76 - _width(table)) > 0:
        # Room for the sentences under a table of few columns.
        table.columns[-1].min_width = len("growth") + lack
    return table


def _title(lines: Sequence[Line]) -> Text:
    """The settings that all lines share."""
    if not lines:
        return Text("")
    first = lines[0].group
    shared = [n for n in SETTING if len({getattr(line.group, n) for line in lines}) == 1]
    words = [
        first.model if name == "model" else f"{name} {getattr(first, name)}" for name in shared
    ]
    lengths = sorted({line.num_tokens for line in lines})
    return Text(printable(", ".join([*words, f"{' or '.join(map(str, lengths))} tokens"])))


def _width(table: Table) -> int:
    return Console(width=500).measure(table).maximum


def _caption(rows: Sequence[Measurement], lines: Sequence[Line]) -> list[str]:
    if not lines:
        return ["There are no rows."]
    counts = {len(line.last) for line in lines}
    remarks = []
    if counts != {1} and any(line.row for line in lines):
        many = f"the {counts.pop()} samples" if len(counts) == 1 else "the samples"
        remarks.append(
            f"Each line shows one window: of {many} at the largest length, the one with the"
            " median sigma (of an even number, the lower of the two middle ones)."
        )
    remarks += [_on_intervals(rows), *_on_columns(lines), _on_growth(lines), *_on_status(rows)]
    return [remark for remark in remarks if remark]


def _on_intervals(rows: Sequence[Measurement]) -> str:
    deltas = [row.delta for row in rows if row.sigma is not None and row.upper is not None]
    if not deltas:
        return ""
    each = " or ".join(without(delta) for delta in sorted(set(deltas)))
    return (
        f"The true value is at least sigma and, with probability at least {each} over random"
        " starts, at most upper."
    )


def _on_columns(lines: Sequence[Line]) -> Iterator[str]:
    yield "move: the tokens that may change; read: the tokens whose outputs are measured."
    yield (
        "relative = sigma x norm of the input / norm of the output; share: of the squared norm"
        " of the most sensitive direction."
    )
    if _any_has(lines, "sigma_rest"):
        yield "without it: sigma with the top token held fixed."
    if _any_has(lines, "frobenius"):
        yield (
            "stable rank = (Frobenius norm / sigma)^2; the Frobenius norm is an estimate, its"
            " interval stands in the row's note."
        )


def _on_growth(lines: Sequence[Line]) -> str:
    fits = [line.growth for line in lines if line.growth is not None]
    if not fits:
        return (
            "growth: needs three lengths with a finite, positive sigma, none beyond the length of "
            "training."
        )
    low, high = min(f.lengths[0] for f in fits), max(f.lengths[-1] for f in fits)
    text = f"growth: exponent s of sigma ~ n^s for n from {low} to {high}"
    if named := dict.fromkeys(fit.interval for fit in fits if fit.level is not None):
        text += f", with the {' or '.join(named)} for the sampling of text (not the solver's error)"
    off = [percent_off(of(fit.off for fit in fits)) for of in (min, max)]
    tests = [fit.lack_of_fit_p for fit in fits if fit.lack_of_fit_p is not None]
    text += f". The means leave that law by {' to '.join(dict.fromkeys(off))} %"
    smallest = f"smallest of {len(tests)}: " if len(tests) > 1 else ""
    text += f" (F test, {smallest}{format_p(min(tests))})" if tests else " (not tested)"
    parts = [text]
    if any(fit.fits is False or fit.nearly for fit in fits):
        parts.append(f"off by: the largest deviation, where it is more than chance ({_TEST})")
    if any(fit.fits is False for fit in fits):
        parts.append(f"Where that is above {NEAR:.0%}, slopes between lengths".replace("%", " %"))
    notes = dict.fromkeys(fit.note for fit in fits if fit.note)
    return ". ".join([*parts, *(note[0].upper() + note[1:] for note in notes)]) + "."


def _on_status(rows: Sequence[Measurement]) -> Iterator[str]:
    short = sum(row.status == "max_steps" for row in rows)
    if short:
        yield (
            f"{short} of {len(rows)} rows ran out of steps: their intervals hold, but sigma may"
            " be too low."
        )
    lost = [row.status for row in rows if row.sigma is None or not math.isfinite(row.sigma)]
    if lost:
        kinds = ", ".join(f"{lost.count(kind)} {kind}" for kind in sorted(set(lost)))
        yield f"{len(lost)} of {len(rows)} rows have no finite sigma ({kinds})."


# --- bounds ----------------------------------------------------------------------------------

_SCOPES = {"local": 0, "ball": 1, "global": 2, "mean-field": 3, "limit": 4}
_READING = (
    "× sigma: an upper bound divided by the measured sigma of its own metric (Frobenius if none is "
    "named). Local bounds hold at this input, global ones for all inputs of this length with "
    "tokens of the norms above, mean-field ones for every length; a limit is that of large radii."
)
_BALLS = "Bounds of a ball hold for all inputs up to eps away from this one."


def bounds_shown(rows: Iterable[Measurement], bounds: Iterable[Bound]) -> Sheet:
    """All values of theorems about rows, input by input."""
    of = by_row(bounds := list(bounds))
    rows = list(rows)
    inputs = grouped(rows, attrgetter("model", "map", "layer", "num_tokens", "sample"))
    shown: list[Table | str] = []
    noted: list[Measurement] = []
    for some in inputs.values():
        mine = [(row, bound) for row in some for bound in of.get(row.id, [])]
        if not mine:
            continue
        if any(row.head is not None for row in some):
            shown.append(best_table(some, bounds))
        else:
            shown.append(_theorems(some, mine))
            noted += some
    if noted:  # once, however many tables there are
        pairs = [(row, bound) for row in noted for bound in of.get(row.id, [])]
        shown += dict.fromkeys(_reading_notes(noted, pairs))
    if any(row.head is not None for some in inputs.values() for row in some):
        shown.append("Every theorem for every head: the same command with --jsonl.")
    return Sheet(*shown)


def empty_table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    # Text, not markup: rich would read `:llama:` in a model's name as a picture.
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, justify="left")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


_Pairs = Sequence[tuple[Measurement, Bound]]
_Cells = tuple[str, str, str, str, str, str]


def _theorems(rows: Sequence[Measurement], pairs: _Pairs) -> Table:
    columns = ("theorem", "statement", "source", "scope"), ("value", "× sigma")
    made = empty_table(_bounds_title(rows, pairs), *columns)
    made.columns[0].no_wrap = True
    for row in filter(given, rows):
        scope = _scope_words("local", row.metric)
        ends = interval(row.sigma, row.upper)
        made.add_row(MEASURED, "sigma at this input", "", scope, ends, "", style="bold")
    for kind in ("lower", "upper"):
        some = sorted(_bound_lines(kind, rows, pairs), key=lambda line: line[0])
        for i, (_, cells) in enumerate(some):
            made.add_row(*map(Text, cells), end_section=i == len(some) - 1)
    return made


def _bound_lines(
    kind: str, rows: Sequence[Measurement], pairs: _Pairs
) -> Iterator[tuple[tuple[int, str, float], _Cells]]:
    """Lines of the table with their sort keys: scope, metric and value."""
    for row in rows:
        if kind == "lower" and not given(row) and row.sigma is not None:
            value = interval(row.sigma, None)
            cells = (ADVERSARIAL, row.input, "", _scope_words("global", row.metric), value, "")
            yield (_SCOPES["global"], row.metric, row.sigma), cells
    for row, bound in pairs:
        if bound.kind != kind or bound.value is None:
            continue
        sign, rounded = ("≥", rounded_down) if kind == "lower" else ("≤", rounded_up)
        times = looseness(bound, row)
        cells = (
            bound.theorem,
            bound.statement + ("" if bound.sound else " (fails)"),
            bound.cite,
            _scope_words(bound.scope, bound.metric, bound.eps),
            f"{sign} {number(bound.value, 4, rounded)}",
            "" if times is None else number(times, 3),
        )
        yield (_SCOPES.get(bound.scope, len(_SCOPES)), bound.metric, bound.value), cells


def _scope_words(scope: str, metric: str, eps: float | None = None) -> str:
    """The scope, the ball's radius, and the metric where it is not the usual one."""
    radius = [] if eps is None else [f"eps = {eps:.3g}"]
    return ", ".join([scope, *radius, *([] if metric == "frobenius" else [metric])])


def _shared(rows: Sequence[Measurement]) -> dict[str, object]:
    names = ("model", "layer", "head", "map", "num_tokens", "sample")
    first = rows[0]
    return {
        name: getattr(first, name)
        for name in names
        if all(getattr(row, name) == getattr(first, name) for row in rows)
    }


def _bounds_title(rows: Sequence[Measurement], pairs: _Pairs) -> str:
    """The settings that the rows share; their norms only if equal."""
    forms = {"model": "{}", "layer": "layer {}", "map": "map {}", "num_tokens": "{} tokens"}
    shared = _shared(rows)
    words = [form.format(shared[name]) for name, form in forms.items() if name in shared]
    words += [f"sample {shared['sample']}"] if shared.get("sample") else []
    norms = {allowed(b for _, b in some) for some in grouped(pairs, lambda p: p[0].id).values()}
    return ", ".join([*words, *(norms if len(norms) == 1 else [])])


def _reading_notes(rows: Sequence[Measurement], pairs: _Pairs) -> Iterator[str]:
    """Notes on reading the table, and on omissions."""
    yield _READING
    if any(bound.eps is not None for _, bound in pairs):
        yield _BALLS
    yield from (f"{row.note}." for row in rows if row.note)
    yield from (f"{b.theorem}: {b.note}." for _, b in pairs if b.applicable and b.note)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.sigma is None:
            why = row.error or row.status
            reasons.setdefault(why, []).append(MEASURED if given(row) else ADVERSARIAL)
    for _, bound in pairs:
        if not bound.applicable:
            reasons.setdefault(bound.reason, []).append(bound.theorem)
    if reasons:
        yield "Without a value:"
    yield from (
        f"  {', '.join(dict.fromkeys(names))}: {reason}." for reason, names in reasons.items()
    )


def best_table(rows: Sequence[Measurement], bounds: Iterable[Bound]) -> Table:
    """One line per row: sigma, and the best bounds at the input and on all inputs."""
    of = by_row(bounds)
    named = [n for n in ("layer", "head", "num_tokens") if n not in _shared(rows)] or ["layer"]
    if rows[0].head is not None and "head" not in named:
        named.append("head")
    table = empty_table(
        _bounds_title(rows, [(row, bound) for row in rows for bound in of.get(row.id, [])]),
        (*(n.replace("num_tokens", "n") for n in named), "best local bound", "best global bound"),
        ("sigma", "local", "× sigma", "global", "× sigma"),
    )
    for row in rows:
        own = [bound for bound in of.get(row.id, []) if bound.metric == row.metric]
        best = [best_of(own, "local"), best_of(own, *EVERYWHERE)]
        values = [
            cell
            for bound in best
            for cell in (
                number(bound and bound.value, 4, rounded_up),
                number(bound and looseness(bound, row), 3),
            )
        ]
        names = ["–" if bound is None else bound.theorem for bound in best]
        places = [str(getattr(row, name)) for name in named]
        table.add_row(*places, *names, interval(row.sigma, row.upper), *values)
    return table
