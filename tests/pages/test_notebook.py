"""What a notebook shows: small tables, figures and pages, with nothing of a row as HTML."""

from __future__ import annotations

import base64
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
    assert shown(attacked).names.count("table") == 1
    assert all(one.name in attacked._repr_html_() for one in attacked.found if one.sigma)


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
        page.save(tmp_path / "page.html" / "below.html")


BERT = "random:bert:hidden_size=16,num_attention_heads=4,num_hidden_layers=2"
GPT2 = "random:gpt2:n_embd=16,n_head=4,n_layer=2"
TEXT = "The cat sat on the mat and looked at the moon, which was round and bright. " * 6


def linear() -> tuple[ls.Attention, torch.Tensor]:
    one = torch.eye(4).double()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    return ls.DotProduct(one, one, one), x


def flow() -> object:
    return ls.dynamics.evolve(*linear(), times=[0.5, 1.0, 2.0])


ANSWERS = {
    "measure": lambda _: ls.measure(BERT, TEXT, lengths=[8, 16], samples=2),
    "heads": lambda _: ls.measure(BERT, TEXT, lengths=[8], samples=1, per_head=True),
    "row": lambda _: ls.measure(BERT, TEXT, lengths=[8], samples=1)[0],
    "bounds": lambda _: ls.bounds(BERT, TEXT, lengths=[8], samples=1),
    "directions": lambda _: ls.directions(GPT2, TEXT, length=8),
    "push": lambda _: ls.push(GPT2, TEXT, length=8),
    "attack": lambda _: ls.attack(BERT, TEXT, length=8, steps=1),
    "attack_text": lambda _: ls.attack_text(GPT2, TEXT, length=12, samples=5),
    "certify": lambda _: ls.certify(BERT, TEXT, eps=1e-3, length=8),
    "decision": lambda _: (
        ls.load_model(BERT).at(TEXT, layer=0, length=4).decision(between=["a", "b"])
    ),
    "split": lambda _: ls.split(BERT, TEXT, length=8, layers="all"),
    "smooth": lambda at: ls.smooth(GPT2, target=0.5, out=at / "m", length=16, samples=1),
    "top_singular": lambda _: ls.top_singular(ls.linearise(*linear())),
    "linearise": lambda _: ls.linearise(*linear()),
    "evolve": lambda _: flow(),
    "sigma_along": lambda _: ls.dynamics.sigma_along(*linear(), times=[0.5, 1.0]),
    "clusters": lambda _: ls.dynamics.clusters(linear()[1], 0.5),
    "load_model": lambda _: ls.load_model(BERT),
    "layer": lambda _: linear()[0],
    "none": lambda _: ls.Rows([]),
}


@pytest.mark.parametrize("verb", ANSWERS)
@pytest.mark.usefixtures("unchecked")
def test_a_prompt_shows_a_screenful_of_every_verb(verb: str, tmp_path: Path) -> None:
    found = ANSWERS[verb](tmp_path)
    lines = repr(found).splitlines()
    assert 1 <= len(lines) <= 30
    # A terminal is rarely narrower than 100; numbers of ten columns take some more.
    assert max(map(len, lines)) <= 120
    assert " at 0x" not in repr(found) and "tensor(" not in repr(found)
    assert not any(re.search(r"\d…", line) for line in lines)  # a number is never cut
    if hasattr(found, "_repr_html_"):
        shown(found)
        assert " at 0x" not in found._repr_html_()


@pytest.mark.usefixtures("unchecked")
def test_words_and_edits_are_to_be_seen() -> None:
    words = ls.directions(GPT2, TEXT, length=8)
    most = max((one for one in words.directions if one.side == "right"), key=lambda p: p.share)
    for text in (repr(words), words._repr_html_()):
        assert "moves" in text and f"({most.index})" in text and "direction 1" in text
    edited = ls.attack_text(GPT2, TEXT, length=12, samples=1)
    for one in (e for e in edited.edits if e.changed):
        assert one.edits in repr(edited)
        assert html.escape(one.edits) in edited._repr_html_()
    found = ls.attack(BERT, TEXT, length=8, steps=1)
    assert found.found[0].name.split()[0] in repr(found) and "WorstInput" not in repr(found)


def test_tables_that_were_asked_for_are_whole_when_printed(tmp_path: Path) -> None:
    run = ls.read_run(sandwiched(tmp_path / "run"))
    rows = ls.Rows(run.measurements(), bounds=run.bound_values())
    names = {bound.theorem for bound in rows.bounds if bound.applicable}
    for table in (rows.bounds_table(), ls.Rows(grown()).table(), rows.directions_table()):
        assert " at 0x" not in repr(table) and len(repr(table).splitlines()) <= 30
        shown(table)
    assert all(name in str(rows.bounds_table()) for name in names)
    assert all(name in rows.bounds_table()._repr_html_() for name in names)


def test_a_prompt_obeys_nothing_of_a_text() -> None:
    one = row(num_tokens=4, model="a\x1b[31m[bold]:llama:", layer=3)
    text = repr(ls.Rows([one], shares(one, ["\x1b[2J", "[red]b", NASTY, "d"])))
    assert "\x1b" not in text and "[bold]:llama:" in text
    assert "\x1b" not in ls.Rows([one])._repr_html_().replace("&#x1b;", "\x1b")


def test_charts_need_no_network_either() -> None:
    """Altair's own display loads three scripts; a later `configure` keeps ours."""
    rows = ls.Rows(grown())
    for chart in (rows.plot(), rows.plot().configure_axis(grid=False)):
        bundle = chart._repr_mimebundle_() or {}
        tags = Tags(bundle["text/html"])
        assert tags.names == ["img"] and tags.sources[0].startswith("data:image/svg+xml;base64,")
        drawn = base64.b64decode(tags.sources[0].partition(",")[2]).decode()
        assert not re.findall(r"""(?:href|src)=["']?http|url\(http""", drawn)
        assert set(re.findall(r"""\S*http[^"']*""", drawn)) <= {
            'xmlns="http://www.w3.org/2000/svg',
            'xmlns:xlink="http://www.w3.org/1999/xlink',
        }
        assert bundle["text/plain"] == "alt.HConcatChart(...)"


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
