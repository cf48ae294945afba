"""What the pages need besides Markdown: notebooks that are run, and formulas as MathML.

mkdocs calls these functions by their names. Nothing of what they make asks a network.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, Literal

import nbformat
import ziamath
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from plain import is_formula, latex

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_CODE = re.compile(r"(?<!asks for )<code>([^<]*)</code>")
_ALONE = re.compile(r"<p><code>([^<]*)</code>\.?</p>")
_PLACE = '<div class="output" id="output-{}"></div>'
_FONT = "fonts/STIXTwoMath-Regular.ttf"
_FONTS = Path(ziamath.__file__).parent / "fonts"
# Bars that open and close, which the converter does not tell apart.
_BARS = {
    name: (chr(0xE000 + k), f'<mo fence="true" form="{form}" stretchy="false">{bar}</mo>')
    for k, (name, form, bar) in enumerate(
        [
            (f"{side}{v}ert", form, bar)
            for side, form in (("l", "prefix"), ("r", "postfix"))
            for v, bar in (("v", "|"), ("V", "‖"))
        ]
    )
}
_made: dict[str, list[str]] = {}  # by page, its outputs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The font of the formulas, and a page for every notebook.

    Notebooks are run in one kernel; an error in one of them ends the build.
    """
    files.append(File.generated(config, _FONT, abs_src_path=str(_FONTS / Path(_FONT).name)))
    found = [file for file in files if file.src_uri.endswith(".ipynb")]
    books = [nbformat.read(file.abs_src_path or "", as_version=4) for file in found]
    reset = nbformat.v4.new_code_cell("%reset -f")  # imports stay: they take longest
    cells = [cell for book in books for cell in (*book.cells, reset)]
    NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=600).execute()
    for file, book in zip(found, books, strict=True):
        uri = file.src_uri.replace(".ipynb", ".md")
        _made[uri] = []
        text = [_markdown(cell, _made[uri]) for cell in book.cells]
        text.insert(1, f"[This page as a notebook]({Path(file.src_uri).name})")
        files.append(File.generated(config, uri, content="\n\n".join(text)))
    return files


def _markdown(cell: Any, outputs: list[str]) -> str:
    """A cell; what it returned is kept for later, since Markdown would read it too."""
    if cell.cell_type == "markdown":
        return cell.source.replace(".ipynb)", ".md)")
    said = "".join(one.text for one in cell.outputs if one.output_type == "stream")
    lines = (line.rpartition("\r")[2].rstrip() for line in said.split("\n"))  # of a bar, its end
    told = html.escape("\n".join(filter(None, lines)))
    returned = (one for one in cell.outputs if one.output_type != "stream")
    outputs.append(f"<pre>{told}</pre>" * bool(told) + "".join(map(_shown, returned)))
    return f"```python\n{cell.source}\n```\n\n{_PLACE.format(len(outputs) - 1)}"


def _shown(output: Any) -> str:
    """What a cell returned."""
    if "text/html" in output.data:
        return output.data["text/html"]
    return f"<pre>{html.escape(output.data['text/plain'])}</pre>"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return markdown if page.file.src_uri in _made else markdown.replace(".ipynb)", ".md)")


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """Formulas as MathML, and the outputs of a notebook in their places."""
    if page.file.src_uri.startswith("theorems/"):
        content = _CODE.sub(_plain, _ALONE.sub(_plain_alone, content))
    content = _FORMULA.sub(_formula, content)
    for k, output in enumerate(_made.get(page.file.src_uri, ())):
        content = content.replace(_PLACE.format(k), f'<div class="output">{output}</div>')
    return content


def _plain_alone(found: re.Match[str]) -> str:
    """A formula of the register that is a paragraph."""
    return _typeset(latex(html.unescape(found[1])), "block")


def _plain(found: re.Match[str]) -> str:
    """A formula of the register in a line; names stay code."""
    code = html.unescape(found[1])
    return _typeset(latex(code), "inline") if is_formula(code) else found[0]


def _formula(found: re.Match[str]) -> str:
    return _typeset(html.unescape(found[2]), "block" if found[1] == "div" else "inline")


def _typeset(source: str, display: Literal["block", "inline"]) -> str:
    marked = re.sub(r"\\([lr][vV]ert)\b ?", lambda bar: _BARS[bar[1]][0], source)
    made = convert(marked, display=display)
    for mark, operator in _BARS.values():
        made = re.sub(f"<m[io]>{mark}</m[io]>", operator, made)
    if "\\" in made or "<mi>&</mi>" in made:
        raise PluginError(f"A formula has a command that is not known: {source.strip()}")
    return made
