"""The live page in a real browser: every number that it shows is the one that `measure` gives."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

import lipscope as ls
from command import Command
from lipscope.explore import Server, served

SIZES = "hidden_size=24,num_attention_heads=3,num_hidden_layers=3,intermediate_size=32"
MODEL = f"random:bert:{SIZES},vocab_size=300,max_position_embeddings=64"
PHONE = {"width": 390, "height": 844}
TEXT = "It was late, and nobody came."
OTHER = "random:gpt2:n_embd=12,n_head=3,n_layer=2,n_positions=64"  # a second model
# What a browser calls a jump, but for the marks of the numbers, which are where the numbers are.
JUMPS = """
globalThis.jumps = [];
new PerformanceObserver((some) => some.getEntries().forEach((one) => one.sources.forEach((s) => {
  const node = s.node?.nodeType === 1 ? s.node : s.node?.parentElement;
  if (node && !node.closest(".track, .tokens, #axis")) jumps.push(node.outerHTML.slice(0, 60));
}))).observe({ type: "layout-shift" });
"""

# The lines of the table, or the parts besides, in which some work puts or takes anything.
TOUCHED = """(work) => {
  const watch = new MutationObserver(() => {});
  const all = { subtree: true, childList: true, characterData: true };
  watch.observe($("layers").closest("section"), all);
  work();
  const holds = (one) => (one.target.nodeType === 1 ? one.target : one.target.parentElement)
    .closest("[data-key], #axis, #in, #out");
  const found = watch.takeRecords().map(holds).filter((one) => one);
  watch.disconnect();
  return [...new Set(found.map((one) => one.dataset.key ?? one.id))];
}"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = served([MODEL], TEXT)
    made.start()
    yield made
    made.end()


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    made = served([MODEL, OTHER], TEXT)
    made.start()
    yield made
    made.end()


class Opened:
    """A window on the page, in which nothing goes wrong and which asks nobody else."""

    def __init__(self, browser: Browser, server: Server, fragment: str = "", **how) -> None:
        self.context = browser.new_context(**how)
        self.context.add_init_script(JUMPS)
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

    def rows(self) -> list[tuple[str, float, float]]:
        found = self.page.evaluate("[...seen.layers.values()].flatMap((one) => one.row ?? [])")
        return [(row["id"], row["sigma"] or 0.0, row["upper"] or 0.0) for row in found]

    def choose(self, label: str, option: str) -> None:
        self.page.get_by_label(label, exact=True).select_option(option)
        self.drawn()

    def close(self) -> None:
        self.context.close()
        assert self.problems == []
        assert all(one.startswith((self.address, "data:", "blob:")) for one in self.requests)


@pytest.fixture
def opened(browser: Browser, server: Server) -> Iterator[Opened]:
    window = Opened(browser, server)
    yield window
    window.close()


def measured(text: str, name: str = MODEL, **options) -> ls.Rows:
    model = ls.load_model(name)
    length = len(model.tokenizer(text)["input_ids"])
    return ls.measure(model, text, lengths=length, samples=1, **options)


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


@pytest.mark.parametrize(
    ("control", "options"),
    [
        ("Mask", {"causal": {"causal": True}, "none": {"causal": False}}),
        ("Map", {name: {"map": name} for name in ("normed", "residual", "block", "model")}),
        ("Metric", {"token-relative": {"metric": "token-relative"}}),
    ],
)
def test_controls_ask_what_measure_asks(opened: Opened, control: str, options: dict) -> None:
    for name, asked in options.items():
        opened.choose(control, name)
        expected = measured(TEXT, **asked)
        assert opened.rows() == said(expected), name
        cells = [
            one.split("\t") for one in opened.page.locator("#layers tbody tr").all_inner_texts()
        ]
        for (_, _, _, relative, top), row in zip(cells, expected, strict=True):
            assert row.relative == pytest.approx(float(relative), rel=6e-3)
            assert top.endswith("%") or row.top_token is None


def test_without_the_first_token_is_one_click(opened: Opened) -> None:
    opened.page.click("#controls >> text=Without")
    opened.drawn()
    assert opened.rows() == said(measured(TEXT, move="not-first"))
    assert opened.page.locator("#in [aria-selected=false]").count() == 1


def test_a_second_model_stands_beside_the_first(browser: Browser, pair: Server) -> None:
    window = Opened(browser, pair, "#panel=compare")
    page = window.page
    page.wait_for_selector("#differences tbody tr:nth-child(2)")  # layers that both have
    shown = [one.split("\t") for one in page.locator("#differences tbody tr").all_inner_texts()]
    for (_, here, there, _, _), a, b in zip(
        shown, measured(TEXT), measured(TEXT, OTHER), strict=False
    ):
        for text, row in ((here, a), (there, b)):
            low, high = map(float, text.strip("[]").split(", "))
            assert row.sigma == pytest.approx(low, rel=1e-3) and (row.upper or 0.0) <= high
    assert page.locator("#layers i.beside.dot:visible").count() == 2
    most = re.match(
        r"Layer (\d) differs most: sigma is (\S+) here and (\S+) there, ",
        page.inner_text("#differs"),
    )
    assert most is not None
    for text, given in zip(shown[int(most[1])][1:3], most.groups()[1:], strict=True):
        assert float(given) == pytest.approx(float(text.strip("[]").split(", ")[0]), rel=5e-3)
    window.choose("Model", OTHER)
    assert window.rows() == said(measured(TEXT, OTHER))
    assert page.inner_text("#model-name") == OTHER
    page.click("#panels >> text=Push it")
    page.wait_for_selector("#push-now table.reads")
    assert OTHER in page.inner_text("#push-about")
    assert not page.locator("#push-certified").is_visible()  # nothing is certified here
    window.close()


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
def test_certified_radii_are_those_of_the_model_and_below_their_attacks(browser: Browser) -> None:
    name = "random:bert:hidden_size=8,num_attention_heads=2,num_hidden_layers=1,intermediate_size=8"
    server = served([name], "No.")
    server.start()
    window = Opened(browser, server, "#panel=certify&among=Yes.%0AMaybe+so.")
    window.page.click("#certify-controls >> text=Certify")
    window.page.wait_for_selector("#certified div:nth-child(2)", timeout=300_000)
    deciding = ls.load_model(name).decision("No.", between=["Yes.", "Maybe so."])
    found = deciding.certify("joint")
    said = window.page.locator("#certified dd").nth(1).evaluate("(e) => e.firstChild.textContent")
    assert 0.98 * found.radius <= float(said) <= found.radius
    assert found.attack is None or float(said) <= found.attack
    until(lambda: window.page.locator("#certify-controls >> text=Stop").count() == 0, 300)
    window.page.get_by_label("What may move").select_option("each token alone")
    window.page.click("#certify-controls >> text=Certify")
    each = [deciding.certified("token", (k,)) for k in range(len(deciding.words))]
    lines = window.page.locator("#certified-tokens tbody tr")
    until(lambda: lines.count() == len(each), 300)
    for line, one in zip(lines.all_inner_texts(), each, strict=True):
        _, word, radius, attack, _ = line.split("\t")
        assert word == one.words[0].strip() and 0.98 * one.radius <= float(radius) <= one.radius
        assert attack == "–" or float(radius) <= float(attack)
    window.close()
    server.end()


def test_what_is_too_large_to_certify_is_refused_in_one_line(opened: Opened) -> None:
    opened.type(" ".join(["word"] * 60))
    opened.page.click("#panels >> text=Certify")
    opened.page.click("#certify-controls >> text=Certify")
    until(lambda: "4 GB" in opened.page.inner_text("#certify-progress"))
    assert "\n" not in opened.page.inner_text("#certify-progress")
    assert opened.page.locator("#certify-controls >> text=Certify").is_visible()


def certifying(opened: Opened) -> Page:
    """The page with a certificate in progress."""
    page = opened.page
    opened.type("It was late.")
    page.click("#panels >> text=Certify")
    page.click("#certify-controls >> text=Certify")
    page.wait_for_selector("#certified dd")
    return page


def test_stop_ends_a_certificate(opened: Opened, server: Server) -> None:
    page = certifying(opened)
    assert server._slow[0]._running is not None
    page.click("#certify-controls >> text=Stop")
    assert page.inner_text("#certify-progress") == "Stopped."
    until(lambda: server._slow[0]._running is None)


def test_a_certificate_goes_when_another_question_is_asked(opened: Opened, server: Server) -> None:
    page = certifying(opened)
    page.get_by_label("What may move").select_option("each token alone")
    until(lambda: server._slow[0]._running is None)
    assert page.locator("#certified dd").count() == 0
    assert page.inner_text("#certify-progress") == page.inner_text("#certify-note") == ""
    assert page.locator("#certify-controls >> text=Certify").is_visible()


def test_numbers_of_another_text_are_pale_where_one_is_refused(opened: Opened) -> None:
    opened.type("It was late.")
    opened.page.fill("#text", "")
    opened.page.wait_for_selector("#problem:not([hidden])")
    until(lambda: opened.page.locator("#layers tbody tr:not(.rough)").count() == 0)
    assert opened.page.locator("#layers tbody tr").count() == 3
    assert opened.page.inner_text("#counted") == "–"


def test_what_is_open_besides_goes_with_a_text_that_is_refused(opened: Opened) -> None:
    page = opened.page
    page.click("#panels >> text=Compare")
    page.fill("#beside", "Somebody came early.")
    page.wait_for_selector("#differences tbody tr:nth-child(3)")
    page.fill("#text", "")
    page.wait_for_selector("#problem:not([hidden])")
    until(lambda: not page.locator("#layers i.beside.dot:visible").count())
    assert page.inner_text("#differs") == "" == page.inner_text("#differences")
    page.click("#panels >> text=Keep")
    assert page.input_value("#python") == ""
    opened.type("It was late.")
    assert "It was late." in page.input_value("#python")


def test_heads_of_another_question_are_pale(opened: Opened) -> None:
    page, pale = opened.page, opened.page.locator("#heads tbody tr.rough")
    page.click("text=Single heads")
    page.wait_for_selector("#heads tbody tr:not(.rough):nth-child(3)")
    page.fill("#text", "")
    until(lambda: pale.count() == 3)
    opened.type("Nobody came late.")
    until(lambda: not pale.count())
    page.evaluate("ask = () => {}; chooseLayer(state.layer === 0 ? 1 : 0)")
    assert pale.count() == 3


def test_an_answer_that_ends_early_says_that_the_server_is_gone(opened: Opened) -> None:
    begun = 'data: {"event": "asked", "length": 3, "cut": false, "python": "", "command": ""}\n\n'
    how = {"content_type": "text/event-stream", "body": begun}
    opened.page.route("**/ask", lambda route: route.fulfill(**how))
    opened.page.fill("#text", "Nobody answers.")
    opened.page.wait_for_selector("#problem:not([hidden])")
    assert "lipscope explore has ended" in opened.page.inner_text("#problem")


def test_a_link_brings_back_every_control(browser: Browser, pair: Server) -> None:
    first = Opened(browser, pair)
    page = first.page
    page.click("#theme")
    first.type("Nobody came. Nobody knew.")
    page.click("#panels >> text=Compare")
    page.fill("#beside", "Somebody came.")
    first.choose("Second model", MODEL)
    page.click("#panels >> text=Certify")
    first.choose("What may move", "each token alone")
    page.fill("#among", "It is early.\nIt is late.")
    page.click("#controls >> text=Single heads")
    first.choose("Model", OTHER)
    first.choose("Mask", "none")
    first.choose("Map", "normed")
    first.choose("Metric", "token-relative")
    for side in ("in", "out"):
        page.locator(f"#{side} [role=option]").nth(1).click()
        first.drawn()
    chosen = page.evaluate("state.layer")
    page.click(f"#layers tr[data-key='{1 - chosen}'] button")
    page.click("#panels >> text=Push it")
    page.wait_for_selector("#push svg")
    page.get_by_label("Pushed along").select_option(index=1)
    first.drawn()
    page.locator("#push-at").focus()
    page.keyboard.press("End")
    first.drawn()
    page.click("figure:has(#push) .as-table")
    until(lambda: page.locator(".astable").count() == 1)
    state = "JSON.stringify(Object.fromEntries(Object.keys(FIRST).map((k) => [k, state[k]])))"
    now, usual = (
        json.loads(page.evaluate(state)),
        json.loads(page.evaluate("JSON.stringify(FIRST)")),
    )
    assert [name for name in usual if now[name] == usual[name]] == ["kind"]
    shown, pushed = first.ends(), page.inner_text("#push-now")
    until(lambda: "tables=push" in page.evaluate("location.href"))  # it is written a moment later
    link = page.evaluate("location.href")
    first.close()
    second = Opened(browser, pair, "#" + link.partition("#")[2])
    until(lambda: second.page.inner_text("#push-now") == pushed)
    assert json.loads(second.page.evaluate(state)) == now
    assert second.ends() == shown
    heads = second.page.locator("#heads tbody tr:not(.rough)")
    until(lambda: heads.count() == 3)
    second.close()


@pytest.mark.parametrize(
    "what", ["map=nonsense", "layer=many", "model=7", "move=9:3", "panel=none"]
)
def test_a_broken_link_is_one_line_at_most(browser: Browser, server: Server, what: str) -> None:
    window = Opened(browser, server)
    window.page.goto(window.address + f"#{what}")
    until(lambda: window.page.evaluate("!$('problem').hidden || seen.done"))
    assert "\n" not in window.page.inner_text("#problem")
    window.page.goto(window.address + "#text=It+goes+on.")
    expected = said(measured("It goes on."))
    until(lambda: window.rows() == expected)
    # A browser tells of every answer that is a refusal.
    window.problems = [one for one in window.problems if "400" not in one]
    window.close()


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


def test_what_is_kept_gives_the_same_rows(opened: Opened, lipscope: Command) -> None:
    page = opened.page
    opened.type('It isn\'t "late"; $HOME is `here`, and 5 % of us came.')
    page.locator("#in [role=option]").nth(1).click()
    opened.drawn()
    opened.choose("Mask", "causal")
    opened.choose("Map", "residual")
    opened.choose("Metric", "token-relative")
    rows_there = opened.rows()
    ids = [id for id, *_ in rows_there]
    page.click("#panels >> text=Keep")
    spoken: dict[str, object] = {}
    exec(page.input_value("#python").rpartition("\n")[0], spoken)
    assert said(spoken["rows"]) == rows_there  # pyright: ignore
    spoken_by, _, words = page.input_value("#command").rpartition(" | ")
    text = subprocess.run(["sh", "-c", spoken_by], capture_output=True, check=True).stdout
    _, verb, *options = shlex.split(words)
    written = lipscope(*options, "--jsonl", stdin=text).rows
    assert (verb, [one["id"] for one in written]) == ("measure", ids)
    assert [(one["sigma"], one["upper"]) for one in written] == [
        (low, high) for _, low, high in rows_there
    ]
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


def test_nothing_jumps_when_numbers_come(browser: Browser, server: Server) -> None:
    window = Opened(browser, server, "#heads=true&panel=compare&beside=Somebody+came.")
    page = window.page
    page.wait_for_selector("#heads tbody tr:nth-child(3):not(.rough)")
    page.wait_for_selector("#differences tbody tr:nth-child(3)")
    for text in ("Nobody came, and it was late again.", "It was late, and 7 of us never came."):
        page.evaluate("jumps.length = 0")
        window.type(text)
        until(lambda: page.evaluate("[...running.values()].length > 2 && second.done"))
        page.wait_for_timeout(700)
        assert page.evaluate("jumps") == []
    window.close()


def test_what_is_shown_is_not_drawn_again(opened: Opened) -> None:
    """Each drawing costs what changed: nothing, one line, or all of them where the axis moves."""
    page = opened.page

    def drawn_by(change: str) -> list[str]:
        """The lines and other parts of the page that are touched by a drawing after a change."""
        return sorted(page.evaluate(f"({TOUCHED})(() => {{ {change}; drawSeen(); }})"))

    assert drawn_by("") == []
    same = "const one = seen.layers.get(1); seen.layers.set(1, { ...one, row: { ...one.row } })"
    assert drawn_by(f"state.layer = 0; drawSeen(); {same}") == ["1", "in", "out"]
    assert drawn_by(same) == ["1"]
    far = "const row = seen.layers.get(1).row; row.sigma *= 1e3; row.upper *= 1e3"
    assert drawn_by(f"{same}; {far}") == ["0", "1", "2", "axis"]
    assert drawn_by("state.move = '0'") == ["in", "out"]
    assert drawn_by("") == []


def test_dots_move_at_once_while_numbers_come(opened: Opened) -> None:
    """To let them glide takes longer than to draw the rest, and the solver waits."""
    moves = "getComputedStyle(document.querySelector('.track i')).transitionDuration"
    assert opened.page.evaluate(moves) != "0s"
    opened.page.evaluate("document.documentElement.dataset.drawn = ''")
    assert opened.page.evaluate(moves) == "0s"


def test_a_reader_who_wants_no_motion_gets_none(browser: Browser, server: Server) -> None:
    moves = "getComputedStyle(document.querySelector('.track i')).transitionDuration"
    for wish, said_so in (("reduce", True), ("no-preference", False)):
        window = Opened(browser, server, reduced_motion=wish)
        assert (window.page.evaluate(moves) == "0s") == said_so
        if said_so:
            window.page.fill("#text", "Nobody moves.")
            window.drawn()
            assert window.page.evaluate("document.getAnimations().length") == 0
        window.close()


def test_a_finger_holds_a_token_on_a_phone(browser: Browser, server: Server) -> None:
    window = Opened(browser, server, viewport=PHONE, has_touch=True, is_mobile=True)
    window.page.locator("#in [role=option]").nth(2).tap()
    window.drawn()
    assert window.page.evaluate("state.move").startswith("0:1,3:")
    assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    window.close()


def test_the_theme_is_the_readers(browser: Browser, server: Server) -> None:
    paper = (
        "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).map(Number)"
    )
    found = []
    for how, fragment in (("dark", ""), ("light", ""), ("light", "#theme=dark")):
        window = Opened(browser, server, fragment, color_scheme=how)
        found.append(window.page.evaluate(paper))
        window.close()
    assert found[0] == found[2] and max(found[0]) < 60 < 200 < min(found[1])


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
    marked = "document.querySelectorAll('#in .dragged').length"
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate(marked) == 2
    page.keyboard.press("Escape")  # all may move, as before: nothing is drawn anew
    assert page.evaluate(marked) == 0
    opened.drawn()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Enter")
    opened.drawn()
    assert page.evaluate("state.move") == "0:2"
    assert page.evaluate("document.activeElement.parentElement.id") == "in"


def test_focus_goes_down_the_page_and_reaches_every_control(opened: Opened) -> None:
    page = opened.page
    page.click("#controls >> text=Single heads")
    page.wait_for_selector("#heads tbody tr:nth-child(3):not(.rough)")
    page.click("#panels >> text=Push it")
    page.wait_for_selector("#words-tokens .reading")
    # In the order of the document, which is that of the page, for every panel that can be open.
    every = (
        "[...document.querySelectorAll('a, button, select, textarea, input, summary, [tabindex]')]"
    )
    seen = f"{every}.filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0)"
    for panel in ("push", "compare", "certify", "keep"):
        if panel != "push":
            page.click(f"[aria-controls=panel-{panel}]")
        wanted = page.evaluate(f"{seen}.map((e) => e.id || e.textContent || e.className)")
        page.locator("a.skip").focus()
        order = [page.evaluate(f"{seen}.indexOf(document.activeElement)")]
        for _ in wanted[1:]:
            page.keyboard.press("Tab")
            order.append(page.evaluate(f"{seen}.indexOf(document.activeElement)"))
        assert order == list(range(len(wanted))), (panel, wanted)


def test_the_status_is_said_aloud(opened: Opened) -> None:
    opened.type("It is said aloud.")
    status = opened.page.get_by_role("status").filter(has_text="3 layers at")
    assert "The largest sigma is [" in status.inner_text()
    tokens = opened.page.get_by_role("listbox", name="Tokens that move")
    assert tokens.get_by_role("option").count() == opened.page.evaluate("seen.asked.length")
    assert opened.page.get_by_role("region", name="Every layer").get_by_role("row").count() == 4


def test_without_an_upper_end_a_number_is_a_lower_bound(opened: Opened) -> None:
    opened.type("It has no upper end.")
    note = opened.page.locator("#layers-note")
    assert note.inner_text().startswith("Each interval holds with probability 0.99; pale")
    without = "seen.layers.forEach((one) => { one.row = { ...one.row, upper: null }; })"
    opened.page.evaluate(f"{without}; drawSeen(); finished()")
    assert note.inner_text().startswith("A number behind ≥ is a lower bound; pale")
    assert all(one.startswith("≥ ") for one in opened.ends())
    assert "The largest sigma is ≥ " in opened.page.locator("#status").inner_text()


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
