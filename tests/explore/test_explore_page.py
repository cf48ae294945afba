"""The live page in a real browser: every number that it shows is the one that `measure` gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

import lipscope as ls
from browser import ARGUMENTS, find
from lipscope.explore import Server, served

SIZES = "hidden_size=24,num_attention_heads=3,num_hidden_layers=3,intermediate_size=32"
MODEL = f"random:bert:{SIZES},vocab_size=300,max_position_embeddings=64"
PHONE = {"width": 390, "height": 844}
TEXT = "It was late, and nobody came."


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find()
    assert path is not None, "make chromium finds or fetches a browser"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = served([MODEL], TEXT)
    made.start()
    yield made
    made.end()


class Opened:
    """A window on the page, in which nothing goes wrong and which asks nobody else."""

    def __init__(self, browser: Browser, server: Server, fragment: str = "", **how) -> None:
        self.context = browser.new_context(**how)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = server.address
        self.page.goto(server.address + fragment)
        self.drawn()

    def drawn(self) -> None:
        self.page.wait_for_selector("html[data-drawn=yes]", timeout=30_000)

    def type(self, text: str) -> None:
        self.page.fill("#text", text)
        self.drawn()

    def ends(self) -> list[str]:
        return self.page.locator("#layers td.ends").all_inner_texts()

    def close(self) -> None:
        self.context.close()
        assert self.problems == []
        assert all(one.startswith((self.address, "data:", "blob:")) for one in self.requests)


@pytest.fixture
def opened(browser: Browser, server: Server) -> Iterator[Opened]:
    window = Opened(browser, server)
    yield window
    window.close()


def measured(text: str, **options) -> ls.Rows:
    model = ls.load_model(MODEL)
    length = len(model.tokenizer(text)["input_ids"])
    return ls.measure(model, text, lengths=length, samples=1, **options)


def said(rows: ls.Rows) -> list[tuple[str, float, float]]:
    return [(row.id, row.sigma or 0.0, row.upper or 0.0) for row in rows]


def test_numbers_follow_the_text_and_are_those_of_measure(opened: Opened) -> None:
    opened.type("Nobody came, and it was late.")
    found = json.loads(opened.page.evaluate("JSON.stringify([...seen.layers.values()])"))
    expected = measured("Nobody came, and it was late.")
    assert [(r["row"]["id"], r["row"]["sigma"], r["row"]["upper"]) for r in found] == said(expected)
    ends = [tuple(map(float, one.strip("[]").split(", "))) for one in opened.ends()]
    for (low, high), row in zip(ends, expected, strict=True):
        assert row.sigma == pytest.approx(low, rel=1e-3)
        assert row.upper is not None and row.upper <= high <= 1.001 * row.upper


def test_a_held_token_and_read_outputs_are_those_of_measure(opened: Opened) -> None:
    page = opened.page
    page.locator("#in [role=option]").nth(2).click()
    opened.drawn()
    n = page.locator("#in [role=option]").count()
    scope = f"0:1,3:{n - 1}"
    assert page.locator("#in [aria-selected=false]").count() == 1
    page.locator("#out").scroll_into_view_if_needed()
    first, last = (page.locator("#out [role=option]").nth(k).bounding_box() for k in (1, 3))
    assert first is not None and last is not None
    page.mouse.move(first["x"] + 2, first["y"] + 4)
    page.mouse.down()
    page.mouse.move(last["x"] + 2, last["y"] + 4, steps=4)
    page.mouse.up()
    opened.drawn()
    found = page.evaluate("[...seen.layers.values()].map((one) => one.row)")
    expected = measured(TEXT, move=scope, read="1:3")
    assert [(row["id"], row["sigma"], row["upper"]) for row in found] == said(expected)


def test_single_heads_are_those_of_measure(opened: Opened) -> None:
    opened.page.click("text=Single heads")
    opened.page.wait_for_selector("#heads tbody tr:nth-child(3):not(.rough)")
    layer = opened.page.evaluate("state.layer")
    rows = measured(TEXT, layers=[layer], per_head=True)
    shown = opened.page.locator("#heads td.ends").all_inner_texts()
    for text, row in zip(shown, rows, strict=True):
        low, high = map(float, text.strip("[]").split(", "))
        assert row.sigma == pytest.approx(low, rel=1e-3) and (row.upper or 0.0) <= high


def test_a_push_and_its_direction_in_words(opened: Opened) -> None:
    page = opened.page
    page.click("#panels >> text=Push it")
    page.wait_for_selector("#push svg")
    page.wait_for_selector("#words-tokens .reading")
    sizes = int(page.get_attribute("#push-at", "max") or 0)
    before = page.inner_text("#push-now")
    page.locator("#push-at").focus()
    page.keyboard.press("End")
    opened.drawn()
    assert sizes > 5 and page.inner_text("#push-now") != before
    layer, n = page.evaluate("[state.layer, seen.asked.length]")
    expected = ls.push(
        MODEL,
        TEXT,
        layer=layer,
        length=n,
        draws=1,
        certificate=False,
        among=["The hotel was wonderful.", "The hotel was terrible."],
    )
    found = page.evaluate("D.pushes[0].directions[0].steps.map((s) => [s.eps, s.layer])")
    along = [one for one in expected.steps if one.direction == "+v"]
    assert [eps for eps, _ in found] == pytest.approx([one.eps for one in along])
    assert [change for _, change in found] == pytest.approx([one.layer for one in along], rel=1e-6)


def test_a_second_text_stands_beside_the_first(opened: Opened) -> None:
    page = opened.page
    page.click("#panels >> text=Compare")
    page.fill("#beside", "Somebody came early.")
    page.wait_for_selector("#differences tbody tr:nth-child(3)")
    shown = [one.split("\t")[2] for one in page.locator("#differences tbody tr").all_inner_texts()]
    for text, row in zip(shown, measured("Somebody came early."), strict=True):
        low, _ = map(float, text.strip("[]").split(", "))
        assert row.sigma == pytest.approx(low, rel=1e-3)
    # Attention of a random model is nearly uniform: sigma hardly depends on the text.
    assert "interval" in page.inner_text("#differs")


@pytest.mark.slow
def test_a_certified_radius_is_that_of_the_model_and_below_its_attack(browser: Browser) -> None:
    name = "random:bert:hidden_size=8,num_attention_heads=2,num_hidden_layers=1,intermediate_size=8"
    server = served([name], "No.")
    server.start()
    window = Opened(browser, server, "#panel=certify&among=Yes.%0AMaybe+so.")
    window.page.click("#certify-controls >> text=Certify")
    window.page.wait_for_selector("#certified div:nth-child(2)", timeout=300_000)
    found = ls.load_model(name).decision("No.", between=["Yes.", "Maybe so."]).certify("joint")
    said = window.page.locator("#certified dd").nth(1).evaluate("(e) => e.firstChild.textContent")
    assert 0.98 * found.radius <= float(said) <= found.radius
    assert found.attack is None or float(said) <= found.attack
    window.close()
    server.end()


def test_a_link_brings_back_what_was_shown(browser: Browser, server: Server) -> None:
    first = Opened(browser, server)
    first.type('Nobody <b>knew</b> & "nobody" cared.')
    first.page.locator("#in [role=option]").nth(1).click()
    first.drawn()
    first.page.get_by_label("Metric").select_option("token-relative")
    first.drawn()
    first.page.click("#panels >> text=Keep")
    link, shown = first.page.input_value("#link"), first.ends()
    first.close()
    second = Opened(browser, server, "#" + link.partition("#")[2])
    assert second.ends() == shown
    assert second.page.input_value("#text") == 'Nobody <b>knew</b> & "nobody" cared.'
    assert second.page.locator("#in b").count() == 0  # text is text
    second.close()


def test_what_is_kept_gives_the_same_rows(opened: Opened) -> None:
    page = opened.page
    page.locator("#in [role=option]").nth(1).click()
    opened.drawn()
    ids = page.evaluate("[...seen.layers.values()].map((one) => one.row.id)")
    page.click("#panels >> text=Keep")
    spoken: dict[str, object] = {}
    exec(page.input_value("#python").rpartition("\n")[0], spoken)
    assert [row.id for row in spoken["rows"]] == ids  # pyright: ignore
    with page.expect_download() as rows:
        page.click("text=Rows (JSON lines)")
    lines = rows.value.path().read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids
    with page.expect_download() as figure:
        page.click("text=Figure (SVG)")
    assert figure.value.path().read_text().startswith("<svg")
    with page.expect_download() as report:
        page.click("text=Static report (HTML)")
    assert report.value.path().read_text().startswith("<!DOCTYPE html>")


def test_fast_typing_ends_at_the_last_text_and_leaves_no_queue(
    opened: Opened, server: Server
) -> None:
    page = opened.page
    page.fill("#text", "")
    page.locator("#text").press_sequentially("Nobody came to the party that night.", delay=5)
    opened.drawn()
    found = page.evaluate("[...seen.layers.values()].map((one) => one.row.id)")
    assert found == [row.id for row in measured("Nobody came to the party that night.")]
    assert not server.quick[0]._waiting


def test_two_windows_ask_at_a_time(browser: Browser, server: Server) -> None:
    windows = [Opened(browser, server) for _ in range(2)]
    texts = ["One of us is here.", "The other one is there, not here."]
    for window, text in zip(windows, texts, strict=True):
        window.page.fill("#text", text)
    for window, text in zip(windows, texts, strict=True):
        window.drawn()
        found = window.page.evaluate("[...seen.layers.values()].map((one) => one.row.id)")
        assert found == [row.id for row in measured(text)]
        window.close()


@pytest.mark.parametrize("how", [{}, {"color_scheme": "dark"}, {"viewport": PHONE}])
def test_axe_finds_nothing_wrong(browser: Browser, server: Server, how: dict) -> None:
    window = Opened(browser, server, "#heads=true&panel=push", **how)
    window.page.wait_for_selector("#words-tokens .reading")
    found = []
    for panel in ("", "compare", "certify", "keep"):
        if panel:
            window.page.click(f"[aria-controls=panel-{panel}]")
        result = Axe().run(window.page)
        found += [(one["id"], one["nodes"][0]["html"]) for one in result.response["violations"]]
    wide = window.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    window.close()
    assert (found, wide <= 0) == ([], True)  # nothing sticks out


def test_the_keyboard_reaches_everything(opened: Opened) -> None:
    page = opened.page
    page.locator("#text").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.parentElement.id") == "in":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    opened.drawn()
    assert page.evaluate("state.move").startswith("0,2:")
    page.keyboard.press("Escape")
    opened.drawn()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Enter")
    opened.drawn()
    assert page.evaluate("state.move") == "0:2"
    assert page.evaluate("document.activeElement.parentElement.id") == "in"


def test_a_mistake_is_one_line_and_the_page_goes_on(opened: Opened) -> None:
    page = opened.page
    page.fill("#text", " ")
    page.wait_for_selector("#problem:not([hidden])")
    assert "\n" not in page.inner_text("#problem")
    opened.type("It goes on.")
    assert page.locator("#problem").is_hidden()


def test_a_notebook_shows_the_page_in_a_frame(browser: Browser) -> None:
    shown = ls.load_model(MODEL).explore(TEXT)
    content = f"<!DOCTYPE html><title>A notebook</title>{shown._repr_html_()}".encode()

    class Notebook(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Notebook) as notebook:
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{notebook.server_port}/")
        frame = page.frame_locator("iframe")
        frame.locator("html[data-drawn=yes]").wait_for()
        assert frame.locator("#layers tbody tr").count() == 3
        page.close()
        notebook.shutdown()
    shown.end()
