"""What a notebook shows besides rows: single answers with their figures, and run folders."""

from __future__ import annotations

from lipscope.certificates.certify import BallCertificate
from lipscope.charts.panels import Panel, Series
from lipscope.display import as_html, card, picture
from lipscope.errors import InputError
from lipscope.linalg.singular import TopSingular
from lipscope.pages.rows import Rows
from lipscope.records.run import Run


@as_html.register
def _run(run: Run) -> str:
    windows = run.manifest["spec"].get("windows", "spread")
    shares, bounds = run.token_shares(), run.bound_values()
    return as_html(Rows(run.measurements(), shares, windows, bounds, run.direction_parts()))


@as_html.register
def _top_singular(top: TopSingular) -> str:
    """Which rows of the input the worst direction moves, and which of the output."""
    series = []
    for name, vector in (("moves (v)", top.v), ("is moved (u)", top.u)):
        if vector.dim() != 2:
            return card(top)
        shares = vector.double().square().sum(-1).tolist()
        series.append(Series(name, tuple(enumerate(shares))))
    panel = Panel("", tuple(series), "row", "squared share", log_x=False, log_y=False)
    return _with(top, f"The worst direction, sigma {top.sigma:.4g}", panel)


@as_html.register
def _ball(found: BallCertificate) -> str:
    """The certificate of every head."""
    if len(found.heads) < 2:
        return card(found)
    values = tuple((one.head, one.value) for one in found.heads)
    ends = (found.heads[0].head, found.heads[-1].head)
    together = tuple((x, found.value) for x in ends), tuple((x, found.sigma) for x in ends)
    series = (
        Series("one head", values, "points"),
        Series("all heads", together[0], "dashes"),
        Series("sigma at X", together[1], "dashes"),
    )
    title = f"How far the output can move, eps {found.eps:.3g}"
    return _with(found, title, Panel("", series, "head", "certificate", log_x=False))


def _with(result: TopSingular | BallCertificate, title: str, panel: Panel) -> str:
    """The card with a figure."""
    from lipscope.charts.curves import curves_chart
    from lipscope.charts.look import as_svg

    try:
        chart = curves_chart(title, [panel], width=420)
    except InputError:  # nothing finite to draw
        return card(result)
    return card(result) + picture(as_svg(chart), title)
