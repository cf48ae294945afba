"""The content of a report as one HTML page that opens from the disk and asks no network."""

from __future__ import annotations

import functools
import html
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

import vl_convert

from lipscope.charts import in_the_page, palette
from lipscope.display import printable
from lipscope.pages.cards import headlines
from lipscope.pages.chart_register import SHOWN, Blank
from lipscope.pages.content import Content
from lipscope.pages.words import failures, methods, provenance, references
from lipscope.records import version

# Ends of the range of layers on a dark page: bright enough for it, in even steps as well.
DARK = ["#8c7bff", "#a868e6", "#c65fc8", "#df65a0", "#f07a76", "#f89a4c", "#fbbf3c", "#f2e34c"]
_PARTS = {
    "spec": "Specification",
    "provenance": "Where and with what",
    "models": "Models",
    "files": "Files and their digests",
}
_SECTIONS = ("compare", "depth", "edits", "gains", "push")
"""Sections with files of their own: ``NAME.html``, which `page.html` names, and ``NAME.js``."""
_SCRIPTS = ("state", "charts", "sections", "link", "keys", "tables", *_SECTIONS, "signals", "start")


def page(content: Content) -> str:
    """The whole page.

    Text of rows reaches it in two ways only: as JSON in which ``<`` is an escape, shown by
    scripts as text, and as escaped HTML. Its content policy forbids it to fetch anything.

    Args:
        content: What it is about.

    Returns:
        HTML with its styles, scripts and data inside.
    """
    specs, inks = _charts(Blank(tuple(content.layers), content.training.turn))
    data = printable(content.as_plain()) | {"specs": specs, "inks": inks}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    words = {
        "title": html.escape(content.title),
        "counts": html.escape(_counts(content)),
        "headline": "\n".join(f"<p>{html.escape(s)}</p>" for s in headlines(content.cards)),
        "methods": _methods(content),
        "provenance": _provenance(content),
        "references": _references(content),
    } | {name: _asset(f"{name}.html") for name in _SECTIONS}
    return _asset("page.html").format(
        **printable(words),
        css=_asset("page.css") + _layer_colours(len(content.layers)),
        data=text.replace("<", "\\u003c"),
        vega=_vega(),
        scripts="\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
    )


@functools.lru_cache(maxsize=8)  # half of a page's time, and the same for every other page
def _charts(blank: Blank) -> tuple[dict[str, Any], dict[str, str]]:
    """The specifications of all charts, and the colours of their names."""
    charts = {one.spec: one.page(blank) for one in SHOWN if one.spec and one.page}
    return in_the_page(charts, len(blank.layers))


@functools.cache
def _vega() -> str:
    """Vega, as vl-convert brings it along: inside vega-embed."""
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    # In a function: its short names would otherwise be those of the whole page.
    return "(() => {" + script.replace("</script", "<\\/script") + "\n})();"


def _asset(name: str) -> str:
    place = importlib.resources.files("lipscope.pages") / "assets" / name
    return place.read_text(encoding="utf-8")


def _layer_colours(count: int) -> str:
    pairs = zip(palette(count), palette(count, DARK), strict=True)
    names = (f"--l{k}: light-dark({light}, {dark});" for k, (light, dark) in enumerate(pairs))
    return ":root { " + " ".join(names) + " }\n"


def _counts(content: Content) -> str:
    rows = f"{len(content.items):,} measurements"
    bounds = f", {len(content.bounds):,} bounds" if content.bounds else ""
    count = sum(run.path.is_dir() for run in content.runs)  # others are in memory
    folders = f" from {count} folder{'s' * (count > 1)}" if count else ""
    dates = sorted(
        str(run.manifest.get("provenance", {}).get("started", ""))[:10] for run in content.runs
    )
    when = " to ".join(dict.fromkeys(d for d in (dates[0], dates[-1]) if d))
    measured = f", measured {when}" if when else ""
    return f"{rows}{bounds}{folders}{measured}; written by lipscope {version()}."


def _methods(content: Content) -> str:
    quotes = "\n".join(f"<blockquote>{html.escape(s)}</blockquote>" for s in methods(content.items))
    return quotes or "<p>These folders hold no measurements on real inputs.</p>"


def _facts(values: Mapping[str, Any]) -> str:
    pairs = (
        f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd>" for k, v in values.items()
    )
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def _provenance(content: Content) -> str:
    parts = [part for run in content.runs for part in run.direction_parts()]
    found = failures(content.items, parts)
    status = ", ".join(f"{count:,} {name}" for name, count in found["status"].items())
    more = ", with those of all directions and the bounds of their angles," if parts else ""
    hold = f"{found['intervals'].sentence(more)} Their failure probabilities are added up."
    said = [f"<p>{found['rows']:,} rows: {html.escape(status)}. {hold}</p>"]
    said += [
        f'<p class="notice">{count:,} row{"s" * (count > 1)} failed: {html.escape(error)}</p>'
        for error, count in found["errors"]
    ]
    for k, one in enumerate(provenance(content.runs)):
        said.append(
            f"<h3>{html.escape(one['folder'])}</h3><p class='quiet'>{one['rows']:,} measurements, "
            f"{one['bounds']:,} bounds</p>"
        )
        for part, values in one["parts"].items():
            open_ = " open" if part == "provenance" and k == 0 else ""
            name = _PARTS.get(part, part)
            said.append(
                f"<details{open_}><summary>{html.escape(name)}</summary>{_facts(values)}</details>"
            )
    return "\n".join(said)


def _references(content: Content) -> str:
    said = []
    for one in references(content.bounds):
        statements = html.escape("; ".join(one["statements"]))
        said.append(f"<h3>{html.escape(one['cite'])}</h3><p>{statements}</p>")
        if one["bibtex"]:
            said.append(f"<pre>{html.escape(one['bibtex'])}</pre>")
    return "\n".join(said)
