"""Rows to words: the table, the summary in sentences, and the files of a run.

`Rows` is what `measure` returns: a sequence of measurements that knows how to show
itself. Figures are drawn on demand, so that importing this module stays cheap.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from rich.console import Console, RenderableType
from rich.table import Table

from lipscope.charts.pieces import printable, readable
from lipscope.errors import InputError
from lipscope.pages.table import Line, blocks, draw, interval, number, percent, rounded_up
from lipscope.records.exponent import Growth
from lipscope.records.growth import Group, groups, growth, usable
from lipscope.records.rows import Bound, Measurement, TokenShare, typed_frame

if TYPE_CHECKING:
    import pandas
    import polars

    from lipscope.charts.look import Chart


class Rows(Sequence[Measurement]):
    """Measurements in a sequence, with their tokens, bounds, tables and figures.

    Args:
        rows: Measurements, in the order in which they should stand.
        tokens: The tokens of their windows; those of other rows are left out.
        bounds: What theorems say about them; those of other rows are left out.
        windows: How windows were chosen: "spread" compares the same passages at every
            length, "disjoint" takes fresh ones.

    >>> rows = Rows([])
    >>> len(rows), rows.summary()
    (0, 'There are no rows.')
    """

    def __init__(
        self,
        rows: Iterable[Measurement],
        tokens: Iterable[TokenShare] = (),
        windows: Literal["spread", "disjoint"] = "spread",
        bounds: Iterable[Bound] = (),
    ) -> None:
        self._rows = list(rows)
        held = {row.id for row in self._rows}
        self.tokens = [token for token in tokens if token.id in held]
        self.bounds = [bound for bound in bounds if bound.id in held]
        self.windows: Literal["spread", "disjoint"] = windows

    @overload
    def __getitem__(self, index: int) -> Measurement: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Measurement | Rows:
        """One measurement, or some of them with their tokens and bounds."""
        if isinstance(index, slice):
            return Rows(self._rows[index], self.tokens, self.windows, self.bounds)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._rows)

    def __repr__(self) -> str:
        models = ", ".join(dict.fromkeys(row.model for row in self._rows))
        return f"<Rows: {len(self)} measurements{' of ' * bool(models)}{models}>"

    def to_polars(self) -> polars.DataFrame:
        """One line for each measurement; types do not depend on the values."""
        return typed_frame(Measurement, (vars(row) for row in self._rows))

    def to_pandas(self) -> pandas.DataFrame:
        """The same for pandas.

        Raises:
            InputError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InputError(
                "`to_pandas` needs pandas, which is not installed; run `pip install pandas`, or "
                "use `to_polars`."
            ) from None
        return pandas.DataFrame(self.to_polars().to_dict(as_series=False))

    def tokens_to_polars(self) -> polars.DataFrame:
        """One line for each token; `id` says which measurement it belongs to."""
        return typed_frame(TokenShare, (vars(token) for token in self.tokens))

    def bounds_to_polars(self) -> polars.DataFrame:
        """One line for each theorem; `id` says which measurement it speaks of."""
        return typed_frame(Bound, (vars(bound) for bound in self.bounds))

    def plot(self) -> Chart:
        """The growth chart, see `lipscope.charts.growth_chart`.

        Raises:
            InputError: If no row has a finite, positive sigma.
        """
        from lipscope.charts.growth import growth_chart

        return growth_chart(self._rows, self.tokens)

    def plot_bounds(self) -> Chart:
        """Sigma between its bounds, see `lipscope.charts.sandwich_chart`.

        Raises:
            InputError: If no row with bounds has a finite, positive sigma.
        """
        from lipscope.charts.sandwich import sandwich_chart

        return sandwich_chart(self._rows, self.bounds)

    def bounds_table(self) -> RenderableType:
        """Every theorem with its value and looseness; for single heads, the best ones of each."""
        from lipscope.pages.bounds_table import bounds_shown

        return bounds_shown(self._rows, self.bounds)

    def shade(self, row_id: str | None = None) -> Chart:
        """A window of text, shaded by how much each token can move the output.

        Args:
            row_id: `id` of the measurement; by default the one that the summary speaks of.

        Raises:
            InputError: If the row is not here, or its tokens were not kept.
        """
        from lipscope.charts.text import shaded_text

        row = next((r for r in self._rows if r.id == row_id), None)
        if row_id is None and self._rows:
            row = remarkable(self._blocks()[0]).row
        if row is None:
            raise InputError(
                "`row_id` should be the `id` of one of these rows. Found "
                f"{row_id!r} among {len(self)} rows."
            )
        sigma = "" if row.sigma is None else f": sigma {number(row.sigma, 3)}"
        title = f"{row.model}, {_where(row)}, {row.num_tokens} tokens{sigma}"
        return shaded_text([t for t in self.tokens if t.id == row.id], title=title)

    def growth(self) -> dict[Group, Growth | None]:
        """How sigma grows with the number of tokens, see `lipscope.records.growth.growth`."""
        paired = self.windows == "spread"
        return {key: growth(part, paired=paired) for key, part in groups(self._rows).items()}

    def table(self) -> Table:
        """One line for each layer (and head), at the largest length.

        Of several samples the middle row by sigma is shown, all of its line from that row.
        The table is at most 100 columns wide and never breaks a number; a narrower console
        should print it with ``crop=False``.
        """
        return draw(self._rows, [line for block in self._blocks() for line in block])

    def text(self) -> str:
        """The table and the summary as plain text, the same in every terminal."""
        console = Console(file=io.StringIO(), width=110, color_system=None)
        with console.capture() as capture:
            console.print(self.table(), crop=False)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        return "\n".join([*lines, "", self.summary()]) + "\n"

    def summary(self) -> str:
        """Two or three sentences on the most remarkable layer: the one of largest sigma."""
        if not self._rows:
            return "There are no rows."
        parts = self._blocks()
        several = len({row.model for row in self._rows}) > 1
        said = [f"{part[0].group.model}: " * several + sentences(part) for part in parts]
        return printable("\n".join([*said, *filter(None, [self.confidence()])]))

    def failure_probability(self) -> float:
        """Sum of the failure probabilities of all intervals: at most so likely is one wrong.

        ``delta`` for each row with an interval, and once more where ``‖J‖_F`` has one too.
        """
        return math.fsum(
            row.delta * (1 + (row.frobenius is not None))
            for row in self._rows
            if row.upper is not None
        )

    def confidence(self) -> str:
        """How often intervals fail, as a sentence; "" if there are none."""
        count = sum(row.upper is not None for row in self._rows)
        if not count:
            return ""
        total = rounded_up(self.failure_probability(), 2)
        if total >= 1:
            return f"Of {count} intervals, at most {total:.2g} are expected to miss."
        kind = "The interval holds" if count == 1 else f"All {count} intervals hold together"
        return f"{kind} with probability at least 1 - {total:.2g}."

    def save(self, folder: str | Path) -> list[Path]:
        """Write the figures as SVG, PNG and HTML: ``growth``, or ``sandwich`` where bounds are.

        Args:
            folder: Folder, made if it does not exist.

        Returns:
            The files; none where no row has a finite, positive sigma to draw.

        Raises:
            InputError: If they cannot be written.
        """
        from lipscope.charts.look import save

        if not any(usable(row.sigma) for row in self._rows):
            return []
        folder = Path(folder)
        chart, name = (self.plot_bounds(), "sandwich") if self.bounds else (self.plot(), "growth")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return [save(chart, folder / f"{name}.{kind}") for kind in ("svg", "png", "html")]
        except OSError as problem:
            raise InputError(
                f"`out` should be a folder that can be written. Found `{folder}`: "
                f"{problem.strerror}."
            ) from None

    def _blocks(self) -> list[list[Line]]:
        return blocks(self._rows, self.tokens, self.growth())


# --- summary --------------------------------------------------------------------------------

# map: what moves, what answers
ENDS = {
    "attention": ("the layer's input", "its output"),
    "heads": ("the layer's input", "the output of its heads"),
    "normed": ("the input of the layer's norm", "the output of its attention"),
    "residual": ("the layer's input", "its output with the residual connection"),
    "block": ("the block's input", "its output"),
    "stack": ("the first block's input", "this block's output"),
    "model": ("the model's embedded input", "its last hidden state"),
}

# metric: how large the change is, and what moves by up to so much
SIZES = {
    "frobenius": ("of size ε", "{}"),
    "token-relative": ("each token moving in proportion to its norm, of size ε", "{}"),
    "max-token": ("no token moving by more than ε", "a token of {}"),
    "infinity": ("no entry moving by more than ε", "an entry of {}"),
}


def sentences(lines: Sequence[Line], line: Line | None = None) -> str:
    """Two or three sentences on a line beside others, by default the one of largest sigma."""
    line = line or remarkable(lines)
    if line.row is None:
        status = ", ".join(sorted({row.status for each in lines for row in each.last}))
        reasons = [row.error or row.note for each in lines for row in each.last]
        reason = next((f" ({text})" for text in reasons if text), "")
        return f"No row at {line.num_tokens} tokens has a finite sigma: {status}{reason}."
    parts = [_meaning(line.row, line.token), _comparison(line.row, lines), _course(line)]
    return " ".join(part for part in parts if part)


def remarkable(lines: Sequence[Line]) -> Line:
    """The line of largest sigma among those of one setting."""
    return max(lines, key=lambda line: -1.0 if line.row is None else line.row.sigma or 0.0)


def _where(row: Measurement | Group) -> str:
    if row.layer is None:
        return "whole model"
    return f"layer {row.layer}" if row.head is None else f"layer {row.layer}, head {row.head}"


def _tokens_named(which: str) -> str:
    """Words for `move` and `read`."""
    if which == "all":
        return ""
    names = {"last": "the last token", "first": "the first token"}
    names |= {"not-first": "all tokens but the first", "copies": "copies against each other"}
    return f" at {names.get(which, f'tokens {which}')}"


def _meaning(row: Measurement, token: str | None) -> str:
    """What sigma says, and which token carries it."""
    sigma = number(row.sigma, 3)
    source, answer = ENDS.get(row.map, ("the input", "the output"))
    size, target = SIZES.get(row.metric, (f"of size ε ({row.metric})", "{}"))
    said = (
        f"{_where(row)}: sigma {sigma} means that a small change of {source}"
        f"{_tokens_named(row.move)}, {size}, can move {target.format(answer)}"
        f"{_tokens_named(row.read)} by up to {sigma} ε"
    )
    if row.status == "max_steps":
        said += f" (the solver ran out of steps, the interval is {interval(row)})"
    if row.top_token is not None and row.top_share is not None:
        share, name = percent(row.top_share), _named(row, token)
        said += (
            f"; {share} of that direction sits on {name}"
            if row.top_share >= 0.2
            else f"; that direction is spread, its largest part ({share}) sits on {name}"
        )
        if row.sigma_rest is not None:
            said += f"; without it, {number(row.sigma_rest, 3)}"
    return said[0].upper() + said[1:] + "."


def _named(row: Measurement, token: str | None) -> str:
    """The top token by its place, and its text where that is known."""
    ends = {0: "the first token", row.num_tokens - 1: "the last token"}
    place = ends.get(row.top_token or 0, f"token {row.top_token}")
    text = readable(token).strip(" ") if token is not None else ""
    return f"{place}, {text!r}" if text else place


def _comparison(row: Measurement, lines: Sequence[Line]) -> str:
    """What may be compared across layers."""
    value = number(row.relative, 3)
    if row.relative is None or not math.isfinite(row.relative):
        return ""
    said = (
        f"Relative to the norms of input and output this is {value}: to first order, the output"
        f" moves by up to {value} times the input's relative change"
    )
    others = [r for r in (line.row for line in lines) if r is not None and r.relative is not None]
    if len(others) < 2:
        return said + "."
    top = max(others, key=lambda r: r.relative or 0.0)
    best = (
        "it is the largest here"
        if top is row
        else f"the largest is {number(top.relative, 3)}, at {_where(top)}"
    )
    return f"{said}; this is what may be compared across layers, and {best}."


def _course(line: Line) -> str:
    """How sigma of this line grows, or why that is not said."""
    fit = line.growth
    if fit is None:
        return "How it grows with the number of tokens takes three lengths to say."
    span = f"From {fit.lengths[0]} to {fit.lengths[-1]} tokens"
    if fit.fits is False:
        return f"{span} its growth is {fit.verdict}, the slopes from length to length."
    slope = _exponent(fit.slope)
    verb = f"{'grows' if fit.slope > 0 else 'falls'} like n^{slope}"
    if float(slope) == 0:
        verb = "hardly changes"
    near = f" nearly, and not only by chance ({fit.deviation})" if fit.nearly else ""
    if fit.low is None or fit.high is None:
        return f"{span} it {verb}{near}, with no interval: {fit.note}."
    interval = f"{_exponent(fit.low)} to {_exponent(fit.high)}, {fit.interval}"
    interval += " for the sampling of text"
    if fit.low <= 0 <= fit.high:
        return f"{span} no growth can be told from none (exponent {slope}; {interval})."
    return f"{span} it {verb}{near} ({interval})."


def _exponent(value: float) -> str:
    """Two decimals, and no minus in front of a zero."""
    return f"{round(value, 2) + 0.0:.2f}"
