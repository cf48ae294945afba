"""Notebook display of single answers with their figures, and of run folders."""

from __future__ import annotations

from collections.abc import Iterator

from lipscope.certificates import BallCertificate
from lipscope.charts import Panel, Series
from lipscope.display import Drawing, Piece, card, pieces
from lipscope.errors import InputError
from lipscope.linalg import TopSingular
from lipscope.pages.rows import Rows
from lipscope.records import Run


@pieces.register
def _run(run: Run) -> Iterator[Piece]:
    windows = run.manifest["spec"].get("windows", "spread")
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
    series = (Series(name, tuple(enumerate(s))) for name, s in zip(names, shares, strict=True))
    panel = Panel("", tuple(series), "row", "squared share", log_x=False, log_y=False)
    yield _figure(f"The worst direction, sigma {top.sigma:.4g}", panel)


@pieces.register
def _ball(found: BallCertificate) -> Iterator[Piece]:
    """The certificate of every head."""
    yield from card(found)
    if len(found.heads) < 2:
        return
    values = tuple((one.head, one.value) for one in found.heads)
    ends = (found.heads[0].head, found.heads[-1].head)
    together = tuple((x, found.value) for x in ends), tuple((x, found.sigma) for x in ends)
    series = (
        Series("one head", values, "points"),
        Series("all heads", together[0], "dashes"),
        Series("sigma at X", together[1], "dashes"),
    )
    title = f"How far the output can move, eps {found.eps:.3g}"
    yield _figure(title, Panel("", series, "head", "certificate", log_x=False))


def _figure(title: str, panel: Panel) -> Drawing:
    def drawn() -> str:
        from lipscope.charts import as_svg, curves_chart

        try:
            return as_svg(curves_chart(title, [panel], width=420))
        except InputError:  # nothing finite to draw
            return ""

    return Drawing(drawn, title)
