"""The live page in a real browser: every number that it shows is the one that `measure` gives."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import lipscope as ls
from browser import ARGUMENTS, find
from lipscope.explore import Server, served

SIZES = "hidden_size=24,num_attention_heads=3,num_hidden_layers=3,intermediate_size=32"
MODEL = f"random:bert:{SIZES},vocab_size=300,max_position_embeddings=64"
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
