"""The page of two runs in a real browser: depth, heads, edits, gains, and what compares them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from folders import NASTY, decided, edited, gained, grown, written
from lipscope import report
from opened_page import POINT, Opened, luminance
from rows import row

DRAWN_MARKS = {
    "sides": {"symbol": 6, "line": 2},
    "ratios": {"symbol": 2},
    "shifts": {"symbol": 2},
    "layers": {"symbol": 2, "line": 1},
    "heatmap": {"rect": 4, "symbol": 4},
    "apart": {"symbol": 4},
    "focus": {"symbol": 18 + 1},
    "exponents": {"symbol": 4},
}


@pytest.fixture(scope="module")
def both(browser: Browser, tmp_path_factory) -> Iterator[Opened]:
    """Layer 0 of the second folder is twice that of the first; edits, gains, heads, blocks."""
    folder = tmp_path_factory.mktemp("both")
    other = []
    for one in grown(2):
        sigma = (one.sigma or 0) * (2 if one.layer == 0 else 1)
        values = {"id": f"b{one.id}", "model": NASTY, "sigma": sigma, "upper": 1.001 * sigma}
        other.append(row(**(vars(one) | values)))
    first = written(folder / "first", grown(2) + grown(2, heads=2))
    first = decided(gained(edited(first)))
    path = report([first, written(folder / "second", other)], folder / "page.html", compare=True)
    page = Opened(browser.new_page(), path[0])
    yield page
    page.sane()
    page.page.close()


@pytest.fixture
def anew(both: Opened) -> Opened:
    """The page as it opens."""
    both.page.goto("about:blank")
    both.requests.clear()
    both.page.set_viewport_size({"width": 1280, "height": 800})
    both.page.goto(both.address)
    both.drawn()
    return both


def test_two_runs_stand_on_the_same_axes(anew: Opened) -> None:
    said = anew.page.inner_text("#compare-said")
    assert "Of 6 rows with an interval, sigma changed beyond the sampling of text in 3" in said
    changed = anew.page.locator("#changed tbody tr")
    assert changed.count() == 3 and "× 2.00" in changed.first.inner_text()
    anew.choose("Rows", "all")
    assert changed.count() == 6
    anew.page.locator(POINT.format("ratios")).first.click()
    anew.drawn()
    assert anew.page.get_by_label("Layer", exact=True).input_value() == "layer 0"
    assert anew.page.inner_text("#sides-about") == "map attention, layer 0"
    anew.choose("Length compared", "16 tokens")
    assert "16 tokens" in anew.page.inner_text("#ratios-about")
    assert NASTY in anew.page.inner_text("#differ")


def test_a_page_has_the_sections_that_its_folders_fill(anew: Opened) -> None:
    listed = anew.page.locator("#contents a").all_inner_texts()
    assert {"Side by side", "Through depth", "Tokens taken apart", "Edits of the text"} <= {*listed}
    assert "During training" not in listed
    assert anew.page.locator("#edited ins").all_inner_texts() == ["dog", "bat"]
    assert anew.page.locator("#edited del").all_inner_texts() == ["cat", "cat"]
    assert "1 of 2 tokens are known to gain more" not in anew.page.inner_text("#said")
    assert "1 of 2 tokens are known to gain more" in anew.page.inner_text("#gains-note")
    shaded = anew.page.locator("#decided-text span")
    assert [text.strip() for text in shaded.all_inner_texts()] == ["[CLS]", "cat"]
    assert shaded.nth(1).get_attribute("class") == "top"
    together = anew.page.locator("#decided-balls tbody tr").all_inner_texts()
    assert [text.split("\t") for text in together] == [
        ["all together", "2", "0.2500", "0.9000", "3"],
        ["every one by", "2", "0.1000", "0.9000", "3"],
    ]
    anew.page.evaluate("() => { D.decided[0].balls[1].radius = null; return drawAll(); }")
    assert "\tany\t" in anew.page.inner_text("#decided-balls")
    alone = anew.page.locator("#decided-tokens tbody tr").all_inner_texts()
    assert [text.split("\t")[3] for text in alone] == ["0.4812", "0.2500"]  # rounded down
    title = anew.page.locator("#decided-title")
    assert title.inner_text() == "Text shaded by certified radius"
    for radii in (
        "D.decided[0].tokens.forEach((t) => { t.radius = 0; })",
        "D.decided[0].tokens = []",
    ):
        anew.page.evaluate(f"() => {{ {radii}; return drawAll(); }}")
        assert title.inner_text() == "No token is certified alone"
        assert not anew.page.locator("#decided-text").is_visible()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (420, "light")])
def test_a_page_has_the_same_marks_in_every_light_and_width(
    anew: Opened, width: int, scheme: Any
) -> None:
    """By structure: the marks of every chart, words inside the page, nothing to scroll aside."""
    anew.page.emulate_media(color_scheme=scheme)
    anew.page.set_viewport_size({"width": width, "height": 800})
    anew.choose("Layer", "layer 0")
    for chart, marks in DRAWN_MARKS.items():
        found = {kind: anew.count(chart, kind) for kind in marks}
        assert found == marks, (chart, found)
    assert anew.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.chart svg')].map(s => s.getBoundingClientRect().right)"
    assert max(anew.page.evaluate(wide)) <= width
    anew.page.emulate_media(color_scheme="light")


def test_a_link_restores_the_view(anew: Opened) -> None:
    shown = "[...document.querySelectorAll('form select')].map(s => `${s.ariaLabel}: ${s.value}`)"
    plain = anew.page.evaluate(shown)
    assert "#" not in anew.page.url
    anew.choose("Layer", "layer 0")
    anew.choose("Head", "head 1")
    anew.choose("Colour", "share of the top token")
    anew.choose("Compared", "relative")
    anew.page.locator("#theme").click()
    anew.page.locator("#heads .as-table").click()
    anew.page.get_by_role("link", name="Through depth").click()
    anew.page.wait_for_function("location.hash.startsWith('#depth?')")
    view, chosen = anew.page.url, anew.page.evaluate(shown)
    assert chosen != plain
    anew.page.goto("about:blank")
    anew.page.goto(view)
    anew.drawn()
    assert anew.page.url == view and anew.page.evaluate(shown) == chosen
    assert anew.page.locator("#heads .astable tbody tr").count() == 4
    assert anew.page.inner_text("#theme") == "Theme: light"
    # A link of another page, or a broken one, shows what it can.
    broken = "#no?s=99&layer=77&head=x&quantity=<b>&tables=no+<i>&picked=1e9&at=NaN&__proto__=1"
    anew.page.evaluate(f"location.hash = {broken!r}")
    anew.page.wait_for_function("!location.hash.includes('s=99')")
    anew.drawn()
    assert anew.page.evaluate(shown) == plain
    anew.requests[:] = anew.requests[:1]


def test_every_chart_is_a_table_too(anew: Opened) -> None:
    drawn = {"focus": 9, "real": 18, "exponents": 4, "slopes": 4, "sides": 3, "ratios": 2}
    drawn |= {"layers": 2, "heatmap": 4, "apart": 4, "radius-n": 18, "rank": 18, "shifts": 2}
    for chart, rows in drawn.items():
        figure = anew.page.locator(f"figure:has(#{chart})")
        figure.locator(".as-table").click()
        assert figure.locator("tbody tr").count() == rows * (2 if chart == "sides" else 1), chart
        assert figure.locator(".as-table").get_attribute("aria-pressed") == "true"
        assert not anew.page.locator(f"#{chart}").is_visible()
    first = anew.page.locator("figure:has(#radius-n) tbody tr td:last-child")
    up = [float(text) for text in first.all_inner_texts()]
    head = anew.page.locator("figure:has(#radius-n) th button").last
    head.click()
    head.click()
    down = [float(text) for text in first.all_inner_texts()]
    assert down == sorted(up, reverse=True)
    sorts = anew.page.locator("figure:has(#radius-n) th").last.get_attribute("aria-sort")
    assert sorts == "descending"
    anew.page.locator("figure:has(#focus) .as-table").click()
    assert anew.page.locator("#focus").is_visible()


def test_a_chart_is_read_with_the_arrow_keys(anew: Opened) -> None:
    """Every mark once; the tip names row and interval; Enter chooses; the focus is seen."""
    chart, tip = anew.page.locator("#ratios"), anew.page.locator("#tip")
    chart.focus()
    anew.page.keyboard.press("Home")
    assert "layer 0, all heads, 64 tokens" in tip.inner_text()
    assert "ratio 2.00 in [" in tip.inner_text() and "changed" in tip.inner_text()
    anew.page.keyboard.press("Enter")
    anew.drawn()
    assert anew.page.get_by_label("Layer", exact=True).input_value() == "layer 0"
    assert anew.page.evaluate("document.activeElement.id") == "ratios"
    assert anew.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    anew.page.locator("#heatmap").focus()
    seen = set()
    anew.page.keyboard.press("Home")
    for key in ["ArrowRight"] * 4 + ["ArrowUp", "ArrowDown"]:
        seen.add(tip.inner_text().split(",")[0] + tip.inner_text().split(",")[1])
        anew.page.keyboard.press(key)
    assert len(seen) == 4 and "[" in tip.inner_text()
    assert "top token most often: special (3 of 3 windows)" in tip.inner_text()
    unnamed = """[...document.querySelectorAll('button, select, a, .chart[tabindex]')].filter(
        e => !(e.ariaLabel || e.textContent.trim())).length"""
    assert anew.page.evaluate(unnamed) == 0


def test_a_chart_drawn_anew_keeps_the_readers_place(anew: Opened) -> None:
    """Choosing draws every chart again, with other elements: the next arrow goes on from there."""
    tip = anew.page.locator("#tip")
    anew.page.locator("#real").focus()
    told = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        anew.page.keyboard.press(key)
        told.append(tip.text_content())
    assert len(set(told)) == 4
    for _ in range(2):
        anew.page.keyboard.press("ArrowLeft")
    assert tip.text_content() == told[1]
    anew.page.keyboard.press("Enter")
    anew.drawn()
    tip.wait_for()  # hidden while the page still scrolls to the chart
    assert tip.text_content() == told[1]
    assert anew.page.locator("#real .at").count() == 1
    anew.page.keyboard.press("ArrowRight")
    assert tip.text_content() == told[2]


def test_the_print_has_the_charts_and_no_controls(anew: Opened) -> None:
    anew.page.emulate_media(media="print", color_scheme="dark")
    for controls in ("#controls", "#compare-controls", ".tools", "#theme", "nav"):
        assert not anew.page.locator(controls).first.is_visible(), controls
    assert anew.page.locator("#sides svg").is_visible()
    assert luminance(anew.page, "body", "backgroundColor") == pytest.approx(1.0)
    anew.page.emulate_media(media="screen", color_scheme="light")


def test_the_axis_of_a_comparison_says_what_is_compared(anew: Opened) -> None:
    titles = anew.page.locator("#sides svg .role-axis-title").all_text_contents()
    assert anew.page.get_by_label("Compared", exact=True).input_value() == "sigma"
    assert "sigma" in titles and "mean" not in titles
    ratios = anew.page.locator("#ratios svg .role-axis-title").all_text_contents()
    assert "sigma: second / first" in ratios
