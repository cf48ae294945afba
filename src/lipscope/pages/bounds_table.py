"""Rows and bounds to tables: every theorem of a layer, or the best ones of every head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lipscope.display import Sheet
from lipscope.pages.table import interval, number
from lipscope.records import (
    ADVERSARIAL,
    EVERYWHERE,
    MEASURED,
    Bound,
    Measurement,
    allowed,
    best_of,
    by_row,
    given,
    looseness,
)

_SCOPES = {"local": 0, "ball": 1, "global": 2, "mean-field": 3, "limit": 4}
_READING = (
    "× sigma: an upper bound divided by the measured sigma of its own metric (Frobenius if none is "
    "named). Local bounds hold at this input, global ones for all inputs of this length with "
    "tokens of the norms above, mean-field ones for every length; a limit is that of large radii."
)
_BALLS = "Bounds of a ball hold for all inputs up to eps away from this one."


def bounds_shown(rows: Iterable[Measurement], bounds: Iterable[Bound]) -> Sheet:
    """Everything that theorems say about rows, input by input.

    Args:
        rows: Rows at given inputs, and the adversarial ones to show with them.
        bounds: Their bounds.

    Returns:
        For every layer and input a table with a line for each theorem, and how to read it;
        with a line for each head where rows are of single heads.
    """
    of = by_row(bounds := list(bounds))
    inputs: dict[tuple[object, ...], list[Measurement]] = {}
    for row in rows:
        key = (row.model, row.map, row.layer, row.num_tokens, row.sample)
        inputs.setdefault(key, []).append(row)
    shown: list[Table | str] = []
    told: list[Measurement] = []
    for some in inputs.values():
        mine = [(row, bound) for row in some for bound in of.get(row.id, [])]
        if not mine:
            continue
        if any(row.head is not None for row in some):
            shown.append(best_table(some, bounds))
        else:
            shown.append(_theorems(some, mine))
            told += some
    if told:  # once, however many tables there are
        pairs = [(row, bound) for row in told for bound in of.get(row.id, [])]
        shown += dict.fromkeys(_remarks(told, pairs))
    if any(row.head is not None for some in inputs.values() for row in some):
        shown.append("Every theorem for every head: the same command with --jsonl.")
    return Sheet(*shown)


def empty_table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    # Text, not markup: rich would read `:llama:` in a model's name as a picture.
    made = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        made.add_column(name, justify="left")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


_Pairs = Sequence[tuple[Measurement, Bound]]
_Cells = tuple[str, str, str, str, str, str]


def _theorems(rows: Sequence[Measurement], pairs: _Pairs) -> Table:
    """What was measured, then lower values, then upper ones."""
    columns = ("theorem", "statement", "source", "scope"), ("value", "× sigma")
    made = empty_table(_title(rows, pairs), *columns)
    made.columns[0].no_wrap = True
    for row in filter(given, rows):
        scope = _scope("local", row.metric)
        made.add_row(MEASURED, "sigma at this input", "", scope, interval(row), "", style="bold")
    for kind in ("lower", "upper"):
        some = sorted(_lines(kind, rows, pairs), key=lambda line: line[0])
        for i, (_, cells) in enumerate(some):
            made.add_row(*map(Text, cells), end_section=i == len(some) - 1)
    return made


def _lines(
    kind: str, rows: Sequence[Measurement], pairs: _Pairs
) -> Iterator[tuple[tuple[int, str, float], _Cells]]:
    """Lines of the table with what they are sorted by: scope, metric and value."""
    for row in rows:
        if kind == "lower" and not given(row) and row.sigma is not None:
            value = f"≥ {number(row.sigma)}"
            cells = (ADVERSARIAL, row.input, "", _scope("global", row.metric), value, "")
            yield (_SCOPES["global"], row.metric, row.sigma), cells
    for row, bound in pairs:
        if bound.kind != kind or bound.value is None:
            continue
        times = looseness(bound, row)
        cells = (
            bound.theorem,
            bound.statement + ("" if bound.sound else " (fails)"),
            bound.cite,
            _scope(bound.scope, bound.metric, bound.eps),
            f"{'≥' if kind == 'lower' else '≤'} {number(bound.value)}",
            "" if times is None else number(times, 3),
        )
        yield (_SCOPES.get(bound.scope, len(_SCOPES)), bound.metric, bound.value), cells


def _scope(scope: str, metric: str, eps: float | None = None) -> str:
    """The scope, the ball's radius, and the metric where it is not the usual one."""
    radius = [] if eps is None else [f"eps = {eps:.3g}"]
    return ", ".join([scope, *radius, *([] if metric == "frobenius" else [metric])])


def _shared(rows: Sequence[Measurement]) -> dict[str, object]:
    """What rows have in common, of what tells them apart."""
    names = ("model", "layer", "head", "map", "num_tokens", "sample")
    first = rows[0]
    return {
        name: getattr(first, name)
        for name in names
        if all(getattr(row, name) == getattr(first, name) for row in rows)
    }


def _title(rows: Sequence[Measurement], pairs: _Pairs) -> str:
    """What the rows have in common; their norms only where those are the same too."""
    forms = {"model": "{}", "layer": "layer {}", "map": "map {}", "num_tokens": "{} tokens"}
    shared = _shared(rows)
    words = [form.format(shared[name]) for name, form in forms.items() if name in shared]
    words += [f"sample {shared['sample']}"] if shared.get("sample") else []
    of: dict[str, list[Bound]] = {}
    for row, bound in pairs:
        of.setdefault(row.id, []).append(bound)
    norms = set(map(allowed, of.values()))
    return ", ".join([*words, *(norms if len(norms) == 1 else [])])


def _remarks(rows: Sequence[Measurement], pairs: _Pairs) -> Iterator[str]:
    """How to read the table, and what is not in it."""
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
    """One line a row: sigma, and the best bounds at the input and on all inputs.

    Args:
        rows: Rows at given inputs.
        bounds: Their bounds, and those of other rows.
    """
    of = by_row(bounds)
    named = [n for n in ("layer", "head", "num_tokens") if n not in _shared(rows)] or ["layer"]
    if rows[0].head is not None and "head" not in named:
        named.append("head")
    made = empty_table(
        _title(rows, [(row, bound) for row in rows for bound in of.get(row.id, [])]),
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
                number(bound and bound.value),
                number(bound and looseness(bound, row), 3),
            )
        ]
        names = ["–" if bound is None else bound.theorem for bound in best]
        places = [str(getattr(row, name)) for name in named]
        made.add_row(*places, *names, interval(row), *values)
    return made
