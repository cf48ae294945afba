"""One HTML page around a chart, which needs no network to open."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

import vl_convert

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 1rem; background: #fff; color: #444; font: 13px Helvetica, Arial, sans-serif; }}
#chart svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
<div id="chart"></div>
<p>{remark}</p>
<noscript>This chart needs JavaScript.</noscript>
<script>{scripts}</script>
<script>
// On a telephone: panels under each other, as wide as it is, with words and legend around them.
function narrow(node, room) {{
  for (const [name, value] of Object.entries(node)) {{
    if (name === "legend" && value?.columns) Object.assign(value, {{orient: "bottom", columns: 5}});
    else if (name === "axis" && value?.labels === false) value.labels = value.ticks = true;
    else if (name === "width" && value > room) node.width = room;
    else if (value && typeof value === "object" && name !== "datasets") narrow(value, room);
  }}
  if (node.hconcat) {{ node.vconcat = node.hconcat; delete node.hconcat; }}
}}
const spec = {spec};
if (innerWidth < 700 && (spec.hconcat || spec.vconcat)) {{
  narrow(spec, innerWidth - 130);
  const words = [spec.title.text, ...[spec.title.subtitle ?? []].flat()];
  document.querySelector("#chart").before(...words.map((text) =>
    Object.assign(document.createElement("p"), {{textContent: text}})));
  delete spec.title;
}}
vegaEmbed("#chart", spec,
  {{mode: "vega-lite", renderer: "svg",
    actions: {{export: true, source: false, compiled: false, editor: false}}}});
</script>
</body>
</html>
"""


def chart_page(spec: Mapping[str, Any], title: str, remark: str, *, version: str) -> str:
    """A page that draws a Vega-Lite chart with the scripts and the data that it carries.

    Its content policy forbids it to fetch anything. Text of the chart cannot end the
    script it stands in: ``<`` is written as an escape.

    Args:
        spec: The chart as Vega-Lite.
        title: Title of the page, as plain text.
        remark: A line under the chart, as plain text.
        version: Release of Vega-Lite to include, for example "6.4".

    Returns:
        The page.
    """
    # The schema's address is only a name, but a page that fetches nothing holds none.
    data = json.dumps({key: value for key, value in spec.items() if key != "$schema"})
    return PAGE.format(
        title=html.escape(title),
        remark=html.escape(remark),
        # vl-convert's stub asks for a snippet, which is optional.
        scripts=vl_convert.javascript_bundle(vl_version=version),  # pyright: ignore[reportCallIssue]
        spec=data.replace("<", "\\u003c"),
    )
