"""Sequence of measurements with tables and figures, and the report of run folders.

`Rows` is what `measure` returns. Figures are drawn on demand, so that importing this module stays
cheap.
"""

from __future__ import annotations

import contextlib
import html
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from rich.console import Console
from rich.table import Table

from lipscope import charts
from lipscope.certificates import BallCertificate, HeadCertificate, NetworkCertificate
from lipscope.display import (
    Drawing,
    Piece,
    Sheet,
    Shown,
    card,
    pieces,
    printable,
    rounded_down,
    rounded_up,
)
from lipscope.errors import InputError
from lipscope.linalg import TopSingular
from lipscope.pages.moves import directions_shown, top_direction
from lipscope.pages.sentences import intervals_of, place, remarkable, sentences
from lipscope.pages.table import (
    Line,
    best_table,
    blocks,
    bounds_shown,
    draw,
    number,
    with_radius,
)
from lipscope.records import (
    Bound,
    Direction,
    Group,
    Growth,
    Measurement,
    Run,
    TokenShare,
    empty,
    groups,
    growth,
    provenance,
    read_run,
    typed_frame,
    usable,
    write_file,
)

if TYPE_CHECKING:
    import pandas
    import polars

    from lipscope.pages.content import Content


class Rows(Sequence[Measurement], Shown):
    """Measurements in a sequence, with their tokens, bounds, tables and figures.

    Args:
        tokens: The tokens of their windows; tokens of other rows are dropped.
        bounds: Values of theorems about them; bounds of other rows are dropped.
        directions: Their leading directions; directions of other rows are dropped.
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
        directions: Iterable[Direction] = (),
    ) -> None:
        self._rows = list(rows)
        ids = {row.id for row in self._rows}
        self.tokens = [token for token in tokens if token.id in ids]
        self.bounds = [bound for bound in bounds if bound.id in ids]
        self.directions = [part for part in directions if part.id in ids]
        self.windows: Literal["spread", "disjoint"] = windows

    @overload
    def __getitem__(self, index: int) -> Measurement: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Measurement | Rows:
        """One measurement, or some of them with their tokens and bounds."""
        if isinstance(index, slice):
            more = (self.tokens, self.windows, self.bounds, self.directions)
            return Rows(self._rows[index], *more)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._rows)

    def to_polars(self) -> polars.DataFrame:
        """One line for each measurement; types do not depend on the values."""
        return typed_frame(Measurement, self._rows)

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
        return typed_frame(TokenShare, self.tokens)

    def bounds_to_polars(self) -> polars.DataFrame:
        """One line for each theorem; `id` says which measurement it belongs to."""
        return typed_frame(Bound, self.bounds)

    def directions_to_polars(self) -> polars.DataFrame:
        """One line for each part of a direction; `id` says which measurement it belongs to."""
        return typed_frame(Direction, self.directions)

    def plot(self, **size: int) -> charts.Chart:
        """Sigma against the number of tokens; ``width`` and ``height`` of a panel in pixels.

        Raises:
            InputError: If no row has a finite, positive sigma.
        """
        from lipscope.pages.figures import growth_figure

        if not any(usable(row.sigma) for row in self._rows):
            raise InputError(
                "`rows` should hold a finite, positive sigma to draw. Found none among "
                f"{len(self)} rows; their `status` and `note` say why."
            )
        return growth_figure(self._content(), **size)

    def plot_layers(self) -> charts.Chart:
        """Sigma layer by layer, all heads together, see `lipscope.charts.depth_chart`.

        Raises:
            InputError: If these are not rows of several layers.
        """
        from lipscope.pages.figures import depth_charts

        for _, chart in depth_charts(self._content()):
            return chart
        raise InputError("A figure of layers should have several of them. Found one at most.")

    def plot_bounds(self) -> charts.Chart:
        """Sigma between its bounds, a chart for each layer.

        Raises:
            InputError: If no row with bounds has a finite, positive sigma.
        """
        from lipscope.pages.figures import sandwich_figure

        return sandwich_figure(self._rows, self.bounds)

    def bounds_table(self) -> Sheet:
        """Every theorem with its value and looseness; for single heads, the best ones of each."""
        return bounds_shown(self._rows, self.bounds)

    def directions_table(self) -> Sheet:
        """The leading directions of every row: tokens, what they read as, and heads."""
        return directions_shown(self._rows, self.directions)

    def shade(self, row_id: str | None = None) -> charts.Chart:
        """A window of text, shaded by how much each token can move the output.

        Args:
            row_id: `id` of the measurement; by default the one in the summary.

        Raises:
            InputError: If there is no such row, or its tokens were not stored.
        """
        row = next((r for r in self._rows if r.id == row_id), None)
        if row_id is None and self._rows:
            row = remarkable(self._blocks()[0]).row
        if row is None:
            raise InputError(
                "`row_id` should be the `id` of one of these rows. Found "
                f"{row_id!r} among {len(self)} rows."
            )
        sigma = "" if row.sigma is None else f": sigma {number(row.sigma, 3)}"
        title = f"{row.model}, {place(row)}, {row.num_tokens} tokens{sigma}"
        return charts.shaded_text([t for t in self.tokens if t.id == row.id], title=title)

    def growth(self) -> dict[Group, Growth | None]:
        """Growth of sigma with the number of tokens; see `lipscope.records.power_law.growth`."""
        paired = self.windows == "spread"
        every = groups(with_radius(self._rows))
        return {key: growth(part, paired=paired) for key, part in every.items()}

    def table(self) -> Sheet:
        """One line for each layer (and head), at the largest length.

        Of several samples, the line shows the row of median sigma.
        The table is at most 100 columns wide and never breaks a number; a narrower console
        should print it with ``crop=False``.
        """
        return Sheet(self._drawn())

    def _drawn(self) -> Table:
        return draw(self._rows, [line for block in self._blocks() for line in block])

    def text(self) -> str:
        """The table, the bounds if any and the summary, as plain text of fixed width."""
        console = Console(file=io.StringIO(), width=110, color_system=None)
        with console.capture() as capture:
            console.print(self.table(), crop=False)
            if self.bounds:
                console.print("", best_table(self._rows, self.bounds), sep="\n", crop=False)
        lines = [line.rstrip() for line in capture.get().rstrip().splitlines()]
        return "\n".join([*lines, "", self.summary()]) + "\n"

    def summary(self) -> str:
        """Two or three sentences on the most remarkable layer: the one of largest sigma."""
        if not self._rows:
            return "There are no rows."
        parts = self._blocks()
        several = len({row.model for row in self._rows}) > 1
        lines = [f"{part[0].group.model}: " * several + sentences(part) for part in parts]
        return printable("\n".join([*lines, *filter(None, [self.confidence()])]))

    def failure_probability(self) -> float:
        """A bound on the probability that any interval fails: the sum over all intervals."""
        return intervals_of(self._rows, self.directions).delta

    def confidence(self) -> str:
        """How often intervals fail, as a sentence; "" if there are none."""
        return intervals_of(self._rows, self.directions).sentence()

    def show(self) -> Page:
        """The report on these rows, which a notebook displays as the last line of a cell.

        It is self-contained; elsewhere ``show().save("page.html")`` writes it.

        Raises:
            InputError: If no row has a finite, positive sigma.
        """
        from lipscope.pages.html_page import page

        content = self._content()
        return Page(page(content), content.title)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the figures as SVG, PNG and HTML: ``growth``, or ``sandwich`` with bounds.

        Raises:
            InputError: If they cannot be written.
        """
        if not any(usable(row.sigma) for row in self._rows):
            return []
        folder = Path(folder)
        chart, name = (self.plot_bounds(), "sandwich") if self.bounds else (self.plot(), "growth")
        with _writing("`out` should be a folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
            return charts.save_each(chart, [folder / f"{name}.{k}" for k in ("svg", "png", "html")])

    def _content(self) -> Content:
        from lipscope.pages.content import Content

        records = {
            Measurement: self._rows,
            TokenShare: self.tokens,
            Bound: self.bounds,
            Direction: self.directions,
        }
        manifest = empty({"windows": self.windows}, provenance())
        return Content([_InMemory(Path("rows in memory"), manifest, records)])

    def _blocks(self) -> list[list[Line]]:
        return blocks(with_radius(self._rows), self.tokens, self.growth())


_HEIGHT = 720  # of the page in a notebook, in pixels


@dataclass(frozen=True)
class Page:
    """A report that a notebook opens inline; elsewhere `save` writes it."""

    html: str  # the self-contained page
    title: str  # its subject

    def _repr_html_(self) -> str:
        # A separate document: page and notebook share no style, script or name.
        # Without a base, links to its own sections would open the notebook inside it.
        whole = self.html.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
        return (
            f'<iframe title="{html.escape(self.title)}" srcdoc="{html.escape(whole)}"'
            ' sandbox="allow-scripts allow-downloads allow-popups"'
            f' style="width:100%;height:{_HEIGHT}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Page on {self.title}: a notebook opens it; `.save('page.html')` writes it>"

    def save(self, path: str | Path) -> Path:
        """Write the page, and return its path.

        Raises:
            InputError: If it cannot be written, or its name does not end in ``.html``.
        """
        path = _page_file("path", path)
        with _writing("`path` should be a file", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, self.html.encode())
        return path


@contextlib.contextmanager
def _writing(wanted: str, place: Path | None = None) -> Iterator[None]:
    """Turn an error of the file system into one line."""
    try:
        yield
    except OSError as problem:
        found = f"`{place or problem.filename}`: {problem.strerror}"
        raise InputError(f"{wanted} that can be written. Found {found}.") from None


def _page_file(name: str, path: str | Path) -> Path:
    """The checked file of a page; browsers need its name to end in ``.html``."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"`{name}` should be the file of the page. Found the folder `{path}`.")
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"`{name}` should end in .html, as a page is HTML. Found `{path}`.")
    return path


@dataclass(frozen=True)
class _InMemory(Run):
    """Rows in memory, read like a run folder."""

    records: Mapping[type, Sequence[Any]]

    def _read(self, kind: type) -> polars.DataFrame:
        return typed_frame(kind, self.records.get(kind, ()))


def report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    png: str | Path | None = None,
    svg: str | Path | None = None,
    compare: bool = False,
) -> list[Path]:
    """Write one self-contained HTML page about run folders, and their figures as files.

    Args:
        folders: Run folders of any verb.
        out: The page, a file ``.html``; ``report.html`` in the first folder if None.
        png: Folder for the figures as PNG, two pixels per point.
        svg: Folder for the figures as SVG.
        compare: Whether to compare the second of two folders with the first: ratios with
            intervals for the sampling of text, and significant changes.

    Returns:
        Every file written, the page first.

    Raises:
        InputError: If a folder cannot be read, nothing can be drawn or written, or two folders
            share nothing to compare.
    """
    from lipscope.pages import content, figures, html_page

    folders = [folders] if isinstance(folders, str | Path) else folders
    if not isinstance(folders, Sequence) or not folders:
        raise InputError("`DIR` should name at least one run folder. Found none.")
    runs = {str(run.path): run for run in map(read_run, folders)}
    shown = content.Content([*runs.values()], compare=compare)
    path = _page_file("out", Path(folders[0]) / "report.html" if out is None else out)
    with _writing("`out`, `png` and `svg` should be places"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, html_page.page(shown).encode())
        places = {"png": png, "svg": svg}
        folder_by_kind = {kind: Path(at) for kind, at in places.items() if at is not None}
        return [path, *(figures.write_figures(shown, folder_by_kind) if folder_by_kind else ())]


# --- in a notebook ---------------------------------------------------------------------------


@pieces.register
def _rows_pieces(rows: Rows) -> Iterator[Piece]:
    """The table and its sentences, or the readings of directions; then one figure."""
    if rows.directions:
        yield from top_direction(rows, rows.directions)
    else:
        if rows:
            yield best_table(rows, rows.bounds) if rows.bounds else rows._drawn()
        yield rows.summary()
    if rows:
        models = ", ".join(dict.fromkeys(row.model for row in rows))
        yield _drawing(lambda: _figure(rows), f"Figure of {len(rows)} measurements of {models}")


def _figure(rows: Rows) -> charts.Chart:
    """The bounds, or the growth, or the tokens of the one length."""
    if rows.bounds:
        return rows.plot_bounds()
    return rows.plot() if len({row.num_tokens for row in rows}) > 1 else rows.shade()


def _drawing(chart: Callable[[], charts.Chart], title: str) -> Drawing:
    def drawn() -> str:
        try:
            return charts.as_svg(chart())
        except InputError:  # nothing finite to draw
            return ""

    return Drawing(drawn, title)


@pieces.register
def _measurement(row: Measurement) -> Iterator[Piece]:
    yield from pieces(Rows([row]))


@pieces.register
def _run_pieces(run: Run) -> Iterator[Piece]:
    windows = "spread" if run.paired else "disjoint"
    shares, bounds = run.token_shares(), run.bound_values()
    yield from pieces(Rows(run.measurements(), shares, windows, bounds, run.direction_parts()))


@pieces.register
def _top_singular(top: TopSingular) -> Iterator[Piece]:
    """Which rows of the input the worst direction moves, and which of the output."""
    yield from card(top)
    if top.v.dim() != 2 or top.u.dim() != 2:
        return
    shares = [vector.double().square().sum(-1).tolist() for vector in (top.v, top.u)]
    names = ("moves (v)", "is moved (u)")
    curves = [(name, enumerate(s), "line") for name, s in zip(names, shares, strict=True)]
    title = f"The worst direction, sigma {top.sigma:.4g}"
    yield _curves(title, curves, x="row", y="squared share", log_y=False)


@pieces.register
def _layer_bound(found: Bound) -> Iterator[Piece]:
    yield from card(found, value=rounded_up if found.kind == "upper" else rounded_down)


@pieces.register
def _head_pieces(found: HeadCertificate) -> Iterator[Piece]:
    yield from card(found, value=rounded_up)


@pieces.register
def _network_certificate(found: NetworkCertificate) -> Iterator[Piece]:
    yield from card(found, radius=rounded_down)


@pieces.register
def _ball_pieces(found: BallCertificate) -> Iterator[Piece]:
    yield from card(found, value=rounded_up)
    if len(found.heads) < 2:
        return
    values = [(one.head, one.value) for one in found.heads]
    ends = (found.heads[0].head, found.heads[-1].head)
    curves = [
        ("one head", values, "points"),
        ("all heads", [(x, found.value) for x in ends], "dashes"),
        ("sigma at X", [(x, found.sigma) for x in ends], "dashes"),
    ]
    title = f"How far the output can move, eps {found.eps:.3g}"
    yield _curves(title, curves, x="head", y="certificate")


def _curves(title: str, curves: Sequence[tuple[str, Iterable[Any], Any]], **axes: Any) -> Drawing:
    series = [(name, tuple(points), kind) for name, points, kind in curves]

    def chart() -> charts.Chart:
        panel = charts.Panel("", tuple(charts.Series(*one) for one in series), log_x=False, **axes)
        return charts.curves_chart(title, [panel], width=420)

    return _drawing(chart, title)
