"""The page in a real browser: every chart draws, controls change it, nothing leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright
from torch import nn

from browser import ARGUMENTS, find
from folders import (
    NASTY,
    WORDS,
    decided,
    directed,
    edited,
    gained,
    grown,
    pushed,
    sandwiched,
    stacked,
    trained,
    written,
)
from lipscope import Monitor, Rows, report
from rows import row

CHARTS = [
    "focus",
    "real",
    "adversarial",
    "exponents",
    "slopes",
    "heatmap",
    "bounds",
    "radius-n",
    "sigma-radius",
    "rank",
    "push",
]
POINT = "#{} .role-mark.mark-symbol > path"
DRAWN = "document.documentElement.dataset.drawn === 'yes'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find()
    assert path is not None, "make chromium finds or fetches a browser"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Two models, one of a nasty name, with heads, bounds and adversarial inputs."""
    folder = tmp_path_factory.mktemp("page")
    first = grown() + grown(heads=2) + grown(map="block", metric="token-relative")
    runs = [
        written(
            folder / "first",
            first,
            directions=[
                d for r in first if (r.layer, r.map) == (2, "attention") for d in directed(r)
            ],
        ),
        written(folder / "second", grown(layers=2, model=NASTY, revision=NASTY)),
        sandwiched(folder / "bounds"),
        pushed(folder / "pushed"),
    ]
    return report(runs, folder / "report.html")[0]


class Opened:
    """A page with what it asked for and what went wrong in it."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page, self.requests, self.problems = page, [], []
        self.address = path.as_uri()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        page.goto(self.address)
        self.drawn()

    def drawn(self) -> None:
        self.page.wait_for_function(DRAWN, timeout=15_000)

    def choose(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).select_option(label=value)
        self.drawn()

    def svg(self, chart: str) -> str:
        return self.page.inner_html(f"#{chart}")

    def count(self, chart: str, marks: str) -> int:
        """Marks of a kind, such as circles, in a chart."""
        return self.page.locator(f"#{chart} .role-mark.mark-{marks} > path").count()

    def sane(self) -> None:
        """No request but for the page itself, no word on the console."""
        assert self.problems == []
        assert len(self.requests) == 1 and self.requests[0].startswith("file://")


@pytest.fixture
def opens(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Open a page, which at the end has asked for nothing and said nothing."""
    found: list[Opened] = []

    def open_page(path: Path, **how: Any) -> Opened:
        found.append(Opened(browser.new_page(**how), path))
        return found[-1]

    yield open_page
    for one in found:
        one.sane()
        one.page.close()


@pytest.fixture
def opened(opens: Callable[..., Opened], path: Path) -> Opened:
    return opens(path)


def test_every_chart_draws_its_marks(opened: Opened) -> None:
    for chart in CHARTS:
        assert opened.page.locator(f"#{chart} svg").count() == 1, chart
        assert opened.page.locator(f"#{chart}").get_attribute("aria-label"), chart
    # Layer 2 is the largest: 3 lengths x 3 samples, each with and without the top token, and
    # the ring around the chosen window.
    assert opened.count("focus", "symbol") == 18 + 1
    assert opened.count("real", "symbol") == 27
    assert opened.count("adversarial", "symbol") == 3
    assert opened.count("heatmap", "rect") == 6
    assert opened.count("exponents", "symbol") == 7  # 3 layers twice, one adversarial
    assert opened.count("rank", "line") == 3
    assert "NaN" not in "".join(opened.svg(chart) for chart in CHARTS)


def test_the_opening_view_says_the_numbers(opened: Opened) -> None:
    """Closed forms: sigma 3 · 1.1 · 64^(1/4) of the middle sample, exponents 1/4 and 1/2."""
    figures = opened.page.inner_text("#figures")
    assert f"{3 * 1.1 * 64**0.25:.3g}" in figures
    assert "93 %" in figures and "“[CLS]” (0)" in figures
    assert "16.0" in figures  # stable rank: (4 / 1)^2
    assert opened.page.inner_text("#figures sup") == "0.25"
    table = opened.page.inner_text("#fits")
    assert table.count("0.25 [0.25, 0.25]") == 3 and table.count("0.50 [0.50, 0.50]") == 3
    said = opened.page.inner_text("#said")
    assert said.startswith("minilm") and f"sigma {3 * 1.1 * 64**0.25:.3g} means" in said


def test_controls_change_the_charts(opened: Opened) -> None:
    before = {chart: opened.svg(chart) for chart in CHARTS}
    opened.choose("Layer", "layer 0")
    assert opened.svg("focus") != before["focus"] and opened.svg("real") != before["real"]
    opened.choose("Head", "head 1")
    assert "head 1" in opened.page.inner_text("#focus-about")
    assert opened.svg("radius-n") != before["radius-n"]
    opened.choose("Map", "block")
    assert opened.page.get_by_label("Metric", exact=True).input_value() == "token-relative"
    assert "No bounds" in opened.page.inner_text("#bounds") or opened.svg("bounds")
    assert "add --per-head" in opened.page.inner_text("#heatmap")
    assert "No adversarial inputs" in opened.page.inner_text("#adversarial")
    opened.choose("Map", "attention")
    opened.choose("Head", "all heads")
    opened.choose("Colour", "relative")
    assert opened.svg("heatmap") != before["heatmap"]
    opened.choose("Metric of the bounds", "infinity")
    assert "kim_thm_3_2" in opened.page.inner_text("#bounds")
    assert "not measured in this metric" in opened.page.inner_text("#bounds-note")
    opened.choose("Window", "16 tokens, window 2: sigma 2.40")
    assert "16 tokens, window 2" in opened.page.inner_text("#overview .about-window")


def test_a_text_with_markup_stays_text(opened: Opened) -> None:
    text = opened.page.inner_text("#overview .shaded")
    assert NASTY in text
    opened.choose("Model", NASTY)
    assert NASTY in opened.page.inner_text("#provenance") or NASTY in opened.page.title()
    assert NASTY in opened.page.inner_text("#methods")
    opened.page.locator(POINT.format("focus")).first.hover()
    assert NASTY in opened.page.inner_text("#tip")
    assert opened.page.locator("main img, #tip img, script[src]").count() == 0
    assert opened.page.locator("script").count() == 3


def test_directions_are_in_words(opened: Opened) -> None:
    words = opened.page.locator("#words")
    assert "the vector is not determined" in words.inner_text()
    assert words.locator(".chips span").all_inner_texts() == [NASTY, "word"]
    assert words.locator(".reading q").all_inner_texts() == [NASTY, "[SEP]"]
    assert words.inner_text().count("reads as nothing\n") == 1  # nearest 0.1, chance 0.2
    assert words.locator(".bars i").count() == 2 and words.locator(".bars i.against").count() == 1
    opened.choose("Direction", "2")
    assert "singular vector at most 0.01" in words.inner_text()
    opened.choose("Layer", "layer 0")
    assert "lipscope directions … --out DIR" in words.inner_text()


def test_a_point_under_the_mouse_and_a_click_tell_its_window(opened: Opened) -> None:
    point = opened.page.locator(POINT.format("real")).first
    point.hover()
    tip = opened.page.inner_text("#tip")
    assert "layer 0, all heads, 16 tokens, window 0" in tip and "smoothness grows" in tip
    point.click()
    opened.drawn()
    assert opened.page.get_by_label("Layer", exact=True).input_value() == "layer 0"
    assert "layer 0, all heads, 16 tokens, window 0" in opened.page.inner_text(
        "#sensitivity .about-window"
    )


def test_a_tip_goes_when_the_chart_does(opened: Opened) -> None:
    """Drawn anew, scrolled away, left: none of them tells Vega that the mouse has gone."""
    shown = "getComputedStyle(document.getElementById('tip')).display"
    for leave in (
        lambda: opened.choose("Layer", "layer 0"),
        lambda: opened.page.mouse.wheel(0, 300),
        lambda: opened.page.locator("h1").hover(),
    ):
        point = opened.page.locator(POINT.format("focus")).first
        opened.page.mouse.move(0, 0)
        point.scroll_into_view_if_needed()
        for _ in range(20):  # the page scrolls smoothly, and that hides a tip as well
            opened.page.wait_for_timeout(300)
            opened.page.mouse.move(0, 0)
            point.hover()
            if opened.page.evaluate(shown) == "block":
                break
        assert opened.page.evaluate(shown) == "block"
        leave()
        opened.page.wait_for_function(f"{shown} === 'none'", timeout=5_000)


def test_texts_inputs_and_folders_are_chosen_apart(opens, tmp_path: Path) -> None:
    texts = {"one": "a" * 64, "two": "b" * 64}
    rows = grown(1, text="one")
    for factor, text, kind in ((10, "two", "text"), (3, "one", "unbalanced"), (5, "one", "ascent")):
        rows += [
            row(**(vars(r) | {"id": f"{r.id}{text}{kind}", "sigma": factor * (r.sigma or 0)}))
            for r in grown(1, text=text, input=kind)
        ]
    again = [
        row(**(vars(r) | {"id": f"again{r.id}", "sigma": 100 * (r.sigma or 0)}))
        for r in grown(1, text="one", samples=1, lengths=(16,))
    ]
    long = [*WORDS[:1], *(f"w{k}" for k in range(20))]
    runs = [
        written(tmp_path / "first", rows, long, texts=texts),
        written(tmp_path / "second", again, texts=texts),
    ]
    opened = opens(report(runs, tmp_path / "page.html")[0])
    windows = opened.page.get_by_label("Window", exact=True)
    listed = windows.locator("option").all_inner_texts()
    assert len(listed) == len(set(listed)) == 9
    assert opened.page.locator("#tokens tbody tr").count() == 8
    assert opened.count("adversarial", "symbol") == 9 and opened.count("real", "symbol") == 9
    assert "unbalanced" in opened.page.inner_text("#adversarial-title")
    before = opened.svg("adversarial")
    opened.choose("Built input", "ascent")
    assert opened.svg("adversarial") != before
    opened.page.locator(POINT.format("adversarial")).first.click()
    opened.drawn()
    picked = windows.locator("option:checked").inner_text()
    assert picked.startswith("16 tokens, ascent: sigma") and windows.locator("option").count() == 10
    assert "not kept" in opened.page.inner_text("#sensitivity .shaded[data-side=in]")
    opened.choose("Folder", "second")  # which has no built input
    assert windows.count() == 0  # one window is no choice
    opened.choose("Folder", "first")
    assert windows.locator("option").all_inner_texts() == listed
    opened.choose("Folder", "second")
    assert f"{100 * 16**0.25:.3g}" in opened.page.inner_text("#figures")
    opened.choose("Text", "two")
    assert f"{11 * 64**0.25:.3g}" in opened.page.inner_text("#figures")
    assert opened.page.get_by_label("Folder", exact=True).count() == 0


def test_tokens_are_shaded_by_their_shares(opened: Opened) -> None:
    """The cube root of the share, of 78 at the top: 93.4 % and (1 - 93.4 %) / 5."""
    shades = opened.page.eval_on_selector_all(
        "#sensitivity .shaded[data-side=in] span",
        "spans => spans.map(s => Number(s.style.getPropertyValue('--p')))",
    )
    assert shades[0] == 78
    assert shades[1:] == pytest.approx([78 * (0.0132 / 0.934) ** (1 / 3)] * 5, abs=0.1)
    left = opened.page.locator("#sensitivity .shaded[data-side=out] span.top")
    assert left.inner_text().strip() == "[SEP]"


def test_the_keyboard_reaches_every_control(opened: Opened) -> None:
    focused = "document.activeElement.closest('label')?.firstChild.textContent " + (
        "?? document.activeElement.textContent"
    )
    seen = []
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        seen.append(opened.page.evaluate(focused))
    for name in ("Skip to the charts", "Theme: automatic", "Growth by layer", "Layer", "Window"):
        assert name in seen, name
    opened.page.get_by_label("Layer", exact=True).focus()
    opened.page.keyboard.press("ArrowUp")
    opened.drawn()
    assert opened.page.get_by_label("Layer", exact=True).input_value() == "layer 1"
    assert opened.page.evaluate(focused) == "Layer"  # the controls are made anew around it
    opened.page.get_by_role("button", name="1", exact=True).press("Enter")
    opened.drawn()
    assert opened.page.get_by_role("button", name="1", exact=True).get_attribute("aria-pressed")


def test_a_training_that_was_watched_opens_on_its_signals(opens, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with Monitor(net, torch.randn(1, 5, 8), every=1, out=tmp_path / "run") as monitor:
        for step in range(13):
            if step == 12:
                net.layers[1].self_attn.out_proj.weight.data *= 5  # pyright: ignore
            with monitor.step(1.0):
                pass
    assert ("sigma", 1) in {(one.signal, one.layer) for one in monitor.alerts}
    opened = opens(report([tmp_path / "run"], tmp_path / "page.html")[0])
    page = opened.page
    assert page.inner_text("h1") == "TransformerEncoder during training"
    assert page.locator("main section:visible h2").first.inner_text() == "During training"
    assert opened.count("signal-sigma", "symbol") == 2 * 14 + 1  # and the alert
    assert opened.count("signal-sigma", "line") == 2
    assert opened.count("signal-loss", "symbol") == 13
    assert opened.count("signal-entropy", "symbol") == 2 * 14
    assert page.locator("#alerts li").count() == len(monitor.alerts)
    assert "sigma of layer 1 (layers.1.self_attn) is" in page.inner_text("#alerts")
    assert page.get_by_label("Model", exact=True).input_value() == "TransformerEncoder@13"
    chosen = page.locator("#watched-layers button", has_text="1")
    chosen.click()
    opened.drawn()
    assert chosen.get_attribute("aria-pressed") == "true"
    faint = page.locator("#signal-sigma .role-mark.mark-symbol > path[opacity='0.12']")
    assert faint.count() == 14  # layer 0


def test_checkpoints_are_drawn_against_their_steps(opens, tmp_path: Path) -> None:
    runs = [trained(tmp_path / "run"), written(tmp_path / "other", grown(1))]
    opened = opens(report(runs, tmp_path / "page.html")[0])
    assert opened.page.locator("#training h2").is_visible()
    assert opened.count("steps", "symbol") == 2 * 4 and opened.count("steps", "rule") == 0
    assert opened.page.locator("#steps .role-mark.mark-rule > line").count() == 2 * 4
    opened.choose("Length at each step", "16 tokens")
    opened.page.locator(POINT.format("steps")).last.click()
    opened.drawn()
    assert opened.page.get_by_label("Model", exact=True).input_value() == "org/lm@step1000"
    assert opened.count("steps", "symbol") == 2 * 4 + 3 * 4  # the windows of the layer in front
    assert "16 tokens" in opened.page.inner_text("#training-about")
    opened.choose("Model", "minilm")
    assert "come from a sweep over checkpoints" in opened.page.inner_text("#steps")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_marks_stand_out_from_the_paper(opens, path: Path, scheme) -> None:
    """Contrast of at least 4.5 for words and 3 for marks (WCAG 2.1, 1.4.3 and 1.4.11)."""
    opened = opens(path, color_scheme=scheme)
    page = opened.page
    paper = _luminance(page, "body", "backgroundColor")
    for selector, css, least in (
        ("body", "color", 4.5),
        (".note", "color", 4.5),
        ("nav a", "color", 4.5),
        ("#real .role-axis-label text", "fill", 4.5),
        ("#focus .role-mark.mark-line path", "stroke", 1.2),  # the other layers, faint on purpose
        ("#real .role-mark.mark-line path", "stroke", 3),
    ):
        other = _luminance(page, selector, css)
        high, low = max(paper, other), min(paper, other)
        assert (high + 0.05) / (low + 0.05) >= least, (scheme, selector)


def _luminance(page: Page, selector: str, css: str) -> float:
    """Relative luminance of a computed colour (WCAG 2.1)."""
    found = page.eval_on_selector(
        selector,
        """(element, css) => {
            const canvas = document.createElement('canvas').getContext('2d');
            canvas.fillStyle = getComputedStyle(element)[css];
            canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        css,
    )
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in found]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_prints_and_fits_a_telephone(opens, path: Path) -> None:
    opened = opens(path, viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.emulate_media(media="print")
    assert not page.get_by_label("Layer", exact=True).is_visible()
    assert "layer 2" in page.inner_text("#chosen")
    assert _luminance(page, "body", "backgroundColor") == pytest.approx(1.0)
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_name_without_a_break_fits_a_telephone(opens, tmp_path: Path) -> None:
    name = "random:bert:" + "hidden_size=8," * 12
    one = row(layer=0, model=name, id=row(layer=0).id)
    folder = decided(written(tmp_path / "long", [one]))
    (page,) = report([folder], tmp_path / "long.html")
    opened = opens(page, viewport={"width": 390, "height": 800})
    assert opened.page.locator("#decided").is_visible()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_chart_is_saved_with_colours_instead_of_their_names(opened: Opened) -> None:
    with opened.page.expect_download() as download:
        opened.page.locator("#overview .save").click()
    svg = Path(download.value.path()).read_text()
    assert download.value.suggested_filename == "focus.svg"
    assert svg.startswith("<svg") and "var(" not in svg and "#0072b2" in svg
    # The download is a blob of the page's own making, no request.
    opened.requests[:] = [r for r in opened.requests if not r.startswith("blob:")]


def test_the_chart_of_a_run_fits_a_telephone(browser: Browser, tmp_path: Path) -> None:
    """Panels under each other, at nine tenths of their size or more: words stay legible."""
    (path,) = (p for p in Rows(grown(12)).save(tmp_path) if p.suffix == ".html")
    page = browser.new_page(viewport={"width": 420, "height": 800})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.goto(path.as_uri())
    page.wait_for_selector("#chart svg .role-axis-title")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    drawn, meant = page.eval_on_selector(
        "#chart svg", "svg => [svg.getBoundingClientRect().width, svg.viewBox.baseVal.width]"
    )
    assert 0.9 * meant <= drawn <= 420
    labelled = page.locator("#chart svg .role-axis-label").filter(has=page.locator("text"))
    assert labelled.count() == 4  # both axes of both panels
    assert "Growth of sigma" in page.inner_text("body")
    assert problems == []
    page.close()


def test_a_push_is_read_size_by_size_with_the_keyboard(opened: Opened) -> None:
    page = opened.page
    assert page.locator("#pushed").is_visible()
    said = page.inner_text("#push-said")
    assert "sigma · size to 1 % up to 0.200 (0.0400 mean token norms), and to 10 %" in said
    assert "No flip up to 10.0 (2.00 mean token norms): along −v, along random 1." in said
    key = page.locator("#push-key span").all_inner_texts()
    assert key[:3] == ["sigma · size", "certificate, any move", "map, along +v"]
    assert "map, along +top token" not in key  # which was not pushed
    slider = page.locator("#push-at")
    assert slider.get_attribute("aria-valuetext") == "0.100, 0.0200 mean token norms"
    assert page.inner_text("#push-now .first .word") == "␣sea"
    before = opened.svg("push")
    slider.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        opened.drawn()
    assert slider.get_attribute("aria-valuetext") == "10.0, 2.00 mean token norms"
    now = page.inner_text("#push-now")
    assert "13.33, 0.667 × sigma · size" in now and "at most 30.00" in now
    assert NASTY in now and page.inner_text("#push-now tr:first-child .word") == NASTY
    assert opened.svg("push") != before  # the bold line has moved
    page.locator("#push-more summary").click()
    assert page.locator("#push-table tbody tr").count() == 3
    assert "13.33" in page.inner_text("#push-table tr.front")
    page.get_by_label("Pushed along", exact=True).focus()
    opened.choose("Pushed along", "along −v")
    assert "20.00, 1.00 × sigma · size" in page.inner_text("#push-now")
    assert page.evaluate("document.activeElement.tagName") == "SELECT"


# --- two runs, depth, heads, edits, gains: one page for all ----------------------------------

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
        ["all together", "2", "0.1000", "0.9000", "3"],
        ["every one by", "2", "any", "0.9000", "3"],
    ]
    alone = anew.page.locator("#decided-tokens tbody tr").all_inner_texts()
    assert [text.split("\t")[3] for text in alone] == ["0.4812", "0.2000"]  # rounded down


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
    assert _luminance(anew.page, "body", "backgroundColor") == pytest.approx(1.0)
    anew.page.emulate_media(media="screen", color_scheme="light")


def test_blocks_and_the_model_stand_in_one_picture(opens, tmp_path: Path) -> None:
    opened = opens(report([stacked(tmp_path / "run")], tmp_path / "page.html")[0])
    assert opened.count("layers", "symbol") == 6 and opened.count("products", "symbol") == 6
    assert "it is 4.8 times sigma of the model's map" in opened.page.inner_text("#depth-note")


@pytest.fixture(scope="module")
def flat(tmp_path_factory) -> Path:
    """Sigma that does not grow: lines like n^(1/4) and n^(1/2) soon leave the chart above."""
    folder = tmp_path_factory.mktemp("flat")
    rows = [
        row(layer=k, num_tokens=n, sample=s, sigma=(2 + k) * (1 + 0.02 * s))
        for k in range(3)
        for n in (16, 64, 256, 1024, 4096)
        for s in range(3)
    ]
    return report([written(folder / "flat", rows)], folder / "report.html")[0]


@pytest.mark.parametrize("width", [420, 1280])
def test_guides_stay_in_the_chart_each_with_its_name(opens, flat, width) -> None:
    found = opens(flat, viewport={"width": width, "height": 900})
    page = found.page
    for chart in ("real", "focus"):
        frame = page.locator(f"#{chart} svg").bounding_box()
        names = [
            page.locator(f"#{chart} svg text", has_text=f"~ n^({law})").bounding_box()
            for law in ("1/4", "1/2")
        ]
        for box in names:
            assert frame["x"] <= box["x"] and box["x"] + box["width"] <= frame["x"] + frame["width"]
            assert (
                frame["y"] <= box["y"] and box["y"] + box["height"] <= frame["y"] + frame["height"]
            )
        low, high = sorted(names, key=lambda box: box["y"])
        apart = low["y"] + low["height"] <= high["y"] + 2
        beside = abs(low["x"] - high["x"]) >= low["width"]
        assert apart or beside


def test_what_was_not_measured_leaves_the_page_and_its_contents(opens, flat) -> None:
    found = opens(flat)
    page = found.page
    listed = page.locator("#contents a").all_inner_texts()
    for name in ("Layers and heads", "Between its bounds", "Directions in words"):
        assert name not in listed
        assert not page.get_by_role("heading", name=name).is_visible()
        assert f"{name} (" in page.inner_text("#absent")
    assert {"Overview", "Growth by layer", "Worst cases", "Provenance"} <= {*listed}


def test_the_axis_of_a_comparison_says_what_is_compared(anew: Opened) -> None:
    titles = anew.page.locator("#sides svg .role-axis-title").all_text_contents()
    assert anew.page.get_by_label("Compared", exact=True).input_value() == "sigma"
    assert "sigma" in titles and "mean" not in titles
    ratios = anew.page.locator("#ratios svg .role-axis-title").all_text_contents()
    assert "sigma: second / first" in ratios
