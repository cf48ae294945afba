"""HTML report: one page that opens from the disk and needs no network.

The live page of an open model uses parts of it as well.
"""

from __future__ import annotations

import functools
import html
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from lipscope.charts import in_the_page, palette
from lipscope.display import printable
from lipscope.linalg import SPECTRAL
from lipscope.pages.content import SCALE, Content, headlines
from lipscope.pages.figures import blank_charts
from lipscope.pages.points import REAL, Item, items_by_setting, text_of
from lipscope.pages.sentences import intervals_of
from lipscope.records import Bound, Measurement, version

METRICS = {
    "frobenius": "the Frobenius norm",
    "token-relative": "the token-relative norm (each token's move in proportion to its norm)",
    "max-token": "the largest token norm",
    "infinity": "the largest absolute entry",
}
_OTHER = {
    "max-token": (
        "alternating maximisation",
        "upper ends are those of norms of blocks, and need no probability",
    ),
    "infinity": (
        "a search for the largest absolute row sum",
        "an interval is of the sums of all rows, and needs no probability",
    ),
}
"""How the norms that are no singular values are found, and what their intervals are."""
KINDS = {"text": ("window", "text"), "image": ("picture", ""), "batch": ("input", "")}
_LISTED = 12  # lengths, and settings, that are named one by one
ALWAYS = "castin2024"  # where the local Lipschitz constant of attention is defined
# Ends of the range of layers on a dark page: bright enough for it, in even steps as well.
DARK = ["#8c7bff", "#a868e6", "#c65fc8", "#df65a0", "#f07a76", "#f89a4c", "#fbbf3c", "#f2e34c"]
_PARTS = {
    "spec": "Specification",
    "provenance": "Where and with what",
    "models": "Models",
    "files": "Files and their digests",
}
_SECTIONS = ("compare", "decided", "depth", "edits", "gains", "push")
"""Sections with files of their own: ``NAME.html``, which `page.html` names, and ``NAME.js``."""
_SHARED = ("elements", "drawing", "words", "tables", "keys")
"""Scripts of every page, whatever it is about."""
_SCRIPTS = (*_SHARED, "state", "charts", "sections", "link", *_SECTIONS, "signals", "start")


def page(content: Content) -> str:
    """The whole page.

    Text of rows reaches it in two ways only: as JSON in which ``<`` is an escape, shown by
    scripts as text, and as escaped HTML. Its content policy forbids it to fetch anything.
    """
    specs, inks = charts_of(tuple(content.layers), content.training.turn)
    data = printable(content.as_plain()) | {"specs": specs, "inks": inks}
    sentences = methods(content.items)
    words = {
        "title": html.escape(content.title),
        "counts": html.escape(_counts_in_words(content)),
        "headline": "\n".join(f"<p>{html.escape(s)}</p>" for s in headlines(content.cards)),
        "methods": "\n".join(f"<blockquote>{html.escape(s)}</blockquote>" for s in sentences)
        or "<p>These folders hold no measurements on real inputs.</p>",
        "provenance": _provenance(content),
        "references": _sources(content.bounds),
    } | {name: asset(f"{name}.html") for name in _SECTIONS}
    return asset("page.html").format(
        **printable(words),
        css=asset("page.css") + _layer_colours(len(content.layers)),
        data=_inside_html(data),
        vega=_vega(),
        scripts="\n".join(asset(f"{name}.js") for name in _SCRIPTS),
    )


@functools.lru_cache(maxsize=8)  # half of a page's time, and the same for every other page
def charts_of(layers: tuple[str, ...], turn: float | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The specifications of all charts, and the colours of their names."""
    return in_the_page(blank_charts(layers, turn), len(layers))


@functools.cache
def _vega() -> str:
    """Vega, as vl-convert brings it along: inside vega-embed."""
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    # In a function: its short names would otherwise be those of the whole page.
    return "(() => {" + script.replace("</script", "<\\/script") + "\n})();"


def live_script() -> str:
    """Vega, the scripts of every page, and those of the sections that a live page has as well."""
    names = (*_SHARED, "push")
    return "\n".join([_vega(), '"use strict";', *(asset(f"{name}.js") for name in names)])


def live_data(**more: Any) -> str:
    """The initial data of a live page's scripts, as JSON: blank charts, and ``more``."""
    specs, inks = charts_of((), None)
    data = {"strict": True, "specs": {"push": specs["push"]}, "inks": inks, "scale": SCALE}
    return _inside_html(printable(data | {"pushes": []} | more))


def _inside_html(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def asset(name: str) -> str:
    """A file of the page."""
    place = importlib.resources.files("lipscope.pages") / "assets" / name
    return place.read_text(encoding="utf-8")


def _layer_colours(count: int) -> str:
    pairs = zip(palette(count), palette(count, DARK), strict=True)
    names = (f"--l{k}: light-dark({light}, {dark});" for k, (light, dark) in enumerate(pairs))
    return ":root { " + " ".join(names) + " }\n"


def _counts_in_words(content: Content) -> str:
    rows = _counted(len(content.rows), "measurement")
    bounds = f", {_counted(len(content.bounds), 'bound')}" if content.bounds else ""
    count = sum(run.path.is_dir() for run in content.runs)  # others are in memory
    folders = f" from {_counted(count, 'folder')}" if count else ""
    dates = sorted(
        str(run.manifest.get("provenance", {}).get("started", ""))[:10] for run in content.runs
    )
    when = " to ".join(dict.fromkeys(d for d in (dates[0], dates[-1]) if d))
    measured = f", measured {when}" if when else ""
    return f"{rows}{bounds}{folders}{measured}; written by lipscope {version()}."


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _provenance(content: Content) -> str:
    """Rows without a value, the joint confidence of all intervals, and each folder's provenance."""
    rows = content.rows
    parts = [part for run in content.runs for part in run.direction_parts()]
    status = ", ".join(
        f"{count:,} {name}" for name, count in Counter(row.status for row in rows).most_common()
    )
    more = ", with those of all directions and the bounds of their angles," if parts else ""
    hold = f"{intervals_of(rows, parts).sentence(more)} Their failure probabilities are added up."
    texts = [f"<p>{_counted(len(rows), 'row')}: {html.escape(status)}. {hold}</p>"]
    errors = Counter(row.error for row in rows if row.error)
    texts += [
        f'<p class="notice">{_counted(count, "row")} failed: {html.escape(error)}</p>'
        for error, count in errors.most_common(10)
    ]
    for k, run in enumerate(content.runs):
        texts.append(
            f"<h3>{html.escape(str(run.path))}</h3><p class='quiet'>"
            f"{_counted(len(run.rows), 'measurement')}, {_counted(len(run.bounds), 'bound')}</p>"
        )
        for part, values in run.manifest.items():
            if isinstance(values, Mapping):
                open_ = " open" if part == "provenance" and k == 0 else ""
                name = html.escape(_PARTS.get(part, part))
                texts.append(f"<details{open_}><summary>{name}</summary>{_facts(values)}</details>")
    return "\n".join(texts)


def _facts(values: Mapping[str, Any]) -> str:
    known = {str(k): _as_words(v) for k, v in values.items() if v is not None}
    pairs = (f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in known.items())
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def _as_words(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {one}" for name, one in value.items() if one is not None]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 400 else text[:397] + "…"


def _sources(bounds: Sequence[Bound]) -> str:
    """The sources of the displayed theorems, with BibTeX; theorems derived here have none."""
    entries, parts = bibliography(), []
    used = {ALWAYS: {"Local Lipschitz constant (Section 3)": None}}
    for bound in bounds:
        if bound.cite and bound.applicable:
            # A radius states the answer of its own text: one entry for all.
            stated = f"{bound.statement} ({bound.theorem})"
            stated = "the radius of a decision" if bound.kind == "radius" else stated
            used.setdefault(bound.cite, {})[stated] = None
    for cite, statements in used.items():
        parts.append(f"<h3>{html.escape(cite)}</h3><p>{html.escape('; '.join(statements))}</p>")
        if cite in entries:
            parts.append(f"<pre>{html.escape(entries[cite])}</pre>")
    return "\n".join(parts)


def methods(items: Sequence[Item]) -> list[str]:
    """One sentence for a methods section for each setting, and how many more there are."""
    settings = items_by_setting(item for item in items if item.kind == REAL)
    sentences = [_method(setting, some) for setting, some in list(settings.items())[:_LISTED]]
    if (more := len(settings) - len(sentences)) > 0:
        sentences.append(f"Measured likewise: {more} more (model, map, metric, tokens, text).")
    return sentences


def _method(setting: tuple[str, ...], items: Sequence[Item]) -> str:
    model, map_name, metric, move, read, _ = setting
    rows = [item.row for item in items]
    lengths = sorted({row.num_tokens for row in rows})
    samples = len({row.sample for row in rows})
    tokens = f"{_enumerated([str(n) for n in lengths])} tokens"
    if len(lengths) > _LISTED:
        tokens = f"{lengths[0]} to {lengths[-1]} tokens ({len(lengths)} lengths)"
    layers = len({row.layer for row in rows})
    noun, source = KINDS.get(rows[0].input, ("input", ""))
    source = _enumerated(_text_names(items)) or source
    inputs = f"{noun}{'s' * (samples > 1)}{f' of {source}' * bool(source)}"
    what = "whole model" if rows[0].layer is None else f"{layers} layer{'s' * (layers > 1)}"
    single = {row.head is not None for row in rows}
    heads = "" if single == {False} else ", single heads" if single == {True} else ", also by head"
    which = "" if (move, read) == ("all", "all") else f", tokens moved: {move}, read: {read}"
    versions = _enumerated(sorted({row.version for row in rows if row.version})) or "of these rows"
    dtypes = _enumerated(sorted({row.dtype for row in rows if row.dtype}))
    seeds = _enumerated([str(s) for s in sorted({row.seed for row in rows})[:8]])
    how = f" ({dtypes}, seed {seeds})" * bool(dtypes)
    norm = "top singular value" if metric in SPECTRAL else "norm"
    return (
        f"The local Lipschitz constant of the map “{map_name}” of {model} ({what}{heads}{which}), "
        f"the {norm} of its Jacobian in {METRICS.get(metric, metric)} "
        f"[{ALWAYS}], was measured on {samples} {inputs} per length of {tokens}{how} with lipscope "
        f"{versions} by {_solver(rows)}."
    )


def _solver(rows: Sequence[Measurement]) -> str:
    """The solver of sigma and its guarantee; without an upper end, sigma is a lower bound."""
    metric, known = rows[0].metric, [row for row in rows if row.sigma is not None]
    deltas = {row.delta for row in known if row.upper is not None}
    if metric in SPECTRAL:
        method = "Golub–Kahan bidiagonalisation"
        ends = "each interval holds with probability at least 1 − δ over its random start, δ = "
        ends += " or ".join(f"{delta:g}" for delta in sorted(deltas))
    else:
        method, ends = _OTHER.get(metric, ("a method of its own", "its ends are as stored"))
    lower = any(row.upper is None for row in known)
    left = "a value without an upper end" if deltas else "each value"
    return method + f"; {ends}" * bool(deltas) + f"; {left} is a lower bound (≥)" * lower


def _text_names(items: Sequence[Item]) -> list[str]:
    sources = {(id(item.run), item.row.text): item for item in items}.values()
    return list(dict.fromkeys(filter(None, (text_of(i.run, i.row.text) for i in sources))))


def _enumerated(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def bibliography() -> dict[str, str]:
    """Every entry of ``references.bib`` by its key.

    >>> bibliography()["castin2024"].splitlines()[0]
    '@inproceedings{castin2024,'
    """
    installed = importlib.resources.files("lipscope") / "references.bib"
    text = (
        installed if installed.is_file() else Path(__file__).parents[3] / "docs" / "references.bib"
    ).read_text(encoding="utf-8")
    found = re.findall(r"^(@\w+\{(\w+),.*?^\})", text, flags=re.MULTILINE | re.DOTALL)
    return {key: entry for entry, key in found}
