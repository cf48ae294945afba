"""What a notebook shows: small tables, figures and pages, with nothing of a row as HTML."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import lipscope as ls
from folders import NASTY, grown, sandwiched, shares, written
from rows import row
from small_layers import case

SAFE = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p", "br", "img"}


class Tags(HTMLParser):
    """The tags of a fragment, and where its pictures come from."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sources: list[str] = []
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.sources += [value or "" for name, value in attrs if name == "src"]


def shown(result) -> Tags:
    """The tags of what a notebook shows of a result, none of which fetches or runs anything."""
    tags = Tags(result._repr_html_())
    assert set(tags.names) <= SAFE
    assert all(source.startswith("data:image/svg+xml;base64,") for source in tags.sources)
    return tags


def test_rows_show_a_small_table_their_sentences_and_one_figure() -> None:
    many = ls.Rows([row(layer=k, num_tokens=n) for k in range(14) for n in (8, 16)])
    tags = shown(many)
    assert tags.names.count("tr") == 13  # the columns and twelve lines
    assert "… and 2 more lines." in many._repr_html_()
    assert tags.names.count("img") == 1
    assert html.escape(many.summary().splitlines()[0]) in many._repr_html_()


def test_the_figure_is_the_one_that_says_most(tmp_path: Path) -> None:
    one = row(num_tokens=4)
    tokens = shares(one, ["a", "b", NASTY, "d"])
    assert shown(ls.Rows([one], tokens)).names.count("img") == 1  # the window, shaded
    assert "img" not in shown(ls.Rows([one])).names  # one number needs no figure
    run = ls.read_run(sandwiched(tmp_path / "run"))
    tags = shown(run)
    assert tags.names.count("img") == 1
    assert "best global bound" in run._repr_html_()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ls.Rows([]), id="none"),
        pytest.param(ls.Rows([row(sigma=None, status="failed", error=NASTY)]), id="failed"),
        pytest.param(ls.Rows([row(model=NASTY), row(model="\ud800", layer=1)]), id="hostile"),
    ],
)
def test_text_of_rows_is_text(rows: ls.Rows) -> None:
    assert "script" not in shown(rows).names
    for one in rows:
        shown(one)


def test_single_answers_show_themselves() -> None:
    layer, x = case("heads", 0)
    top = ls.top_singular(layer.linearise(x))
    assert f"<td>sigma</td><td>{top.sigma:.4g}</td>" in top._repr_html_()
    assert "<td>v</td><td>6 × 5 numbers, torch.float64</td>" in top._repr_html_()
    assert shown(top).names.count("img") == 1
    found = ls.certify(layer, x, eps=1e-3)
    assert f"<td>value</td><td>{found.value:.4g}</td>" in found._repr_html_()
    assert shown(found).names.count("img") == 1
    attacked = ls.attack(layer, x, steps=1)
    assert shown(attacked).names.count("table") == 2  # what it found, and its rows


def test_show_is_the_page_of_the_report_in_a_frame_of_its_own(tmp_path: Path) -> None:
    rows = ls.Rows(grown(model=NASTY))
    page = rows.show()
    (frame,) = re.findall(r'<iframe [^>]*srcdoc="([^"]*)"[^>]*></iframe>', page._repr_html_())
    inside = html.unescape(frame)
    # A link to a section stays inside, instead of opening the notebook there.
    assert inside.replace('<base href="about:srcdoc">\n', "") == page.html
    assert "<script>alert" not in page.html and NASTY not in page._repr_html_()
    assert "allow-same-origin" not in page._repr_html_().partition("srcdoc")[0]
    (made,) = ls.report([written(tmp_path / "run", list(rows))])
    words = made.read_text(encoding="utf-8")
    # As from a folder, but for what only a folder has.
    assert re.findall(r"<h2.*?</h2>", page.html) == re.findall(r"<h2.*?</h2>", words)
    assert page.save(tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    assert "\n" not in repr(page)
    with pytest.raises(ls.InputError, match=r"`path` should be a file that can be written"):
        page.save(tmp_path / "page.html" / "below")


@pytest.mark.usefixtures("unchecked")
def test_true_is_a_bar(capsys) -> None:
    layer = ls.DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    ls.measure(layer, torch.randn(3, 4, 2), progress=True)
    told = capsys.readouterr().err
    assert re.search(r"measuring .* 3/3 ", told.splitlines()[-1].rpartition("\r")[2])
    for other in ("yes", 0, torch.zeros(2)):
        with pytest.raises(ls.InputError, match="`progress` should be true, or a function"):
            ls.measure(layer, torch.randn(3, 4, 2), progress=other)  # pyright: ignore


@pytest.mark.slow
def test_in_a_real_kernel() -> None:
    """A bar that ends full, no warning, tables and pages as HTML, a mistake in one line."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    model = "random:bert:hidden_size=16,num_attention_heads=4,num_hidden_layers=2"
    cells = [
        f"import lipscope as ls\nmodel = '{model}'",
        "rows = ls.measure(model, lengths=[8], samples=1, progress=True)",
        "rows",
        "rows.show()",
        "ls.measure('nobody', lengths=[8])",
    ]
    book = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    NotebookClient(book, timeout=300, allow_errors=True).execute()
    _, told, table, page, mistake = (cell.outputs for cell in book.cells)
    said = "".join(one.text for one in told)
    assert " 2/2 " in said.rpartition("\r")[2] and "Warning" not in said
    assert table[0].data["text/html"].startswith("<table>")
    assert page[0].data["text/html"].startswith("<iframe")
    assert len(mistake[-1].traceback) == 1 and "InputError: " in mistake[-1].traceback[0]
