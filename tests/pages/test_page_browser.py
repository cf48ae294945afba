"""The page in a real browser: every chart draws, controls change it, nothing leaves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser
from torch import nn

from folders import (
    NASTY,
    WORDS,
    decided,
    directed,
    grown,
    pushed,
    sandwiched,
    stacked,
    trained,
    written,
)
from lipscope import Monitor, Rows, report
from opened_page import POINT, Opened, luminance
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
    paper = luminance(page, "body", "backgroundColor")
    for selector, css, least in (
        ("body", "color", 4.5),
        (".note", "color", 4.5),
        ("nav a", "color", 4.5),
        ("#real .role-axis-label text", "fill", 4.5),
        ("#focus .role-mark.mark-line path", "stroke", 1.2),  # the other layers, faint on purpose
        ("#real .role-mark.mark-line path", "stroke", 3),
    ):
        other = luminance(page, selector, css)
        high, low = max(paper, other), min(paper, other)
        assert (high + 0.05) / (low + 0.05) >= least, (scheme, selector)


def test_the_page_prints_and_fits_a_telephone(opens, path: Path) -> None:
    opened = opens(path, viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.emulate_media(media="print")
    assert not page.get_by_label("Layer", exact=True).is_visible()
    assert "layer 2" in page.inner_text("#chosen")
    assert luminance(page, "body", "backgroundColor") == pytest.approx(1.0)
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
    assert page.locator("#push-certified").is_visible()
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
