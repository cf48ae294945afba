"""The live page in a browser: from the last key to the first number and to all tight ones."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tables import ROOT, Raw, Section, Target, table

# Model, tokens, most milliseconds to the first number and to all tight ones.
CASES = (("minilm", 32, 150, 400), ("smollm2", 64, 500, 4000))
# Processes a model, as each has its luck with memory; questions of each, keys a second, seconds.
PROCESSES, ROUNDS, KEYS, MINUTE = 3, 5, 20, 60
GROWTH = 64  # MB that are no growth: what torch and a browser's buffers keep
WORDS = (
    "Attention is the part of a Transformer that moves information between tokens, and a small "
    "change in one of them can move the output of all the others by a surprising amount. How far "
    "is what the local Lipschitz constant measures, layer by layer, at the text that is read, and "
    "at no other one."
)

DRAWN = """() => new Promise((seen) => {
  const root = document.documentElement, ready = () => root.dataset.drawn === "yes";
  if (ready()) return seen();
  const watch = new MutationObserver(() => { if (ready()) { watch.disconnect(); seen(); } });
  return watch.observe(root, { attributes: true });
})"""


def measure(quick: bool = False) -> Raw:
    """Times of single questions, then of a minute of typing."""
    sys.path.append(str(ROOT / "tests"))
    from browser import chromium  # pyright: ignore[reportMissingImports]

    raw: Raw = []
    with chromium() as browser:
        for k in range(1 if quick else PROCESSES):
            for name, tokens, *_ in CASES[: 1 if quick else None]:
                with serving(name, text_of(name, tokens)) as (process, address):
                    page = browser.new_page()
                    page.goto(address)
                    drawn(page)
                    raw += [{"model": name} | question(page, key) for key in "abcdefg"[:ROUNDS]]
                    if k == 0 and name == CASES[0][0]:
                        raw.append({"model": name} | typed(page, process, 5 if quick else MINUTE))
                    page.close()
    return raw


@contextmanager
def serving(name: str, text: str) -> Iterator[tuple[int, str]]:
    """The process of `lipscope explore`, as people run it, and the address that it prints."""
    command = str(Path(sys.executable).with_name("lipscope"))
    asked = [command, "explore", name, "--text", "-", "--no-browser"]
    pipe = subprocess.PIPE
    with subprocess.Popen(asked, stdin=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(text)
            process.stdin.close()
            address = next((one for one in process.stderr if one.startswith("http://")), "")
            yield process.pid, address.strip()
        finally:
            process.kill()


def text_of(name: str, tokens: int) -> str:
    """The beginning of a text that has one token less, so that a letter more makes it whole."""
    import lipscope as ls

    tokenizer = ls.load_model(name).tokenizer
    words = WORDS.split(" ")
    best = max(k for k in range(len(words)) if count(tokenizer, words[:k]) < tokens)
    return " ".join(words[:best]) + " "


def count(tokenizer: Any, words: Sequence[str]) -> int:
    """Tokens of these words."""
    return len(tokenizer(" ".join(words))["input_ids"])


def drawn(page: Any) -> None:
    """Wait until every number is tight and on the page; asking again and again would slow it."""
    page.evaluate(DRAWN)


def question(page: Any, key: str) -> dict[str, float]:
    """One key at the end of the text: tokens that are read then, and times."""
    page.locator("#text").focus()
    page.keyboard.press("End" if key == "a" else "Backspace")
    page.wait_for_timeout(600)
    page.keyboard.type(key)
    drawn(page)
    return {"tokens": page.evaluate("seen.asked.length")} | marks(page)


def marks(page: Any) -> dict[str, float]:
    """Milliseconds from the key to what it made the page show."""
    found = (
        "Object.fromEntries(performance.getEntriesByType('mark').map((m) => [m.name, m.startTime]))"
    )
    at = page.evaluate(found)
    return {name: round(at[name] - at["asked"], 1) for name in ("first", "tight")}


def typed(page: Any, process: int, seconds: int) -> dict[str, float]:
    """Twenty keys a second for so long: memory on the way, and the time after the last key."""
    page.locator("#text").fill("")
    began, keys, early = time.perf_counter(), 0, 0.0
    while (now := time.perf_counter() - began) < seconds:
        if not early and now > seconds / 4:
            early = resident(process)
        if keys % 120 == 0:
            page.locator("#text").fill("")
        page.keyboard.type(WORDS[keys % len(WORDS)])
        keys += 1
        time.sleep(max(0.0, began + keys / KEYS - time.perf_counter()))
    drawn(page)
    last = marks(page)["tight"]
    grown = round(resident(process) - early, 1)
    return {"typed": keys, "seconds": seconds, "last": last, "early": early, "grown": grown}


def resident(process: int) -> float:
    """Memory of a process, which serves and solves, in MB."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in status if "VmRSS" in line).split()[1]) / 1e3


def render(raw: Raw) -> Section:
    """Times in the browser, and what a minute of typing leaves."""
    section = Section("The live page")
    section.add(
        "Milliseconds in the browser from the last key to the first interval and to all intervals "
        f"tight and compared with the model: medians of {PROCESSES * ROUNDS} questions that were "
        f"not asked before, with the largest in brackets; {PROCESSES} processes of "
        f"`lipscope explore` in turns, with {ROUNDS} of them each."
    )
    lines = []
    for name, tokens, first, tight in CASES:
        some = [one for one in raw if one["model"] == name and "first" in one]
        said = {}
        for kind, most in (("first", first), ("tight", tight)):
            values = [one[kind] for one in some]
            said[kind] = f"{median(values):.0f} [{max(values):.0f}]" if values else "–"
            reached = median(values) <= most if values else None
            what = "the first number" if kind == "first" else "all layers tight"
            target = f"live page: {name}, {tokens} tokens, {what} within {most} ms of the last key"
            section.targets.append(Target(target, f"{said[kind]} ms", reached))
        lines.append([name, some[0]["tokens"] if some else tokens, said["first"], said["tight"]])
    section.add(table(["model", "tokens", "first, ms", "all tight, ms"], lines))
    for one in (one for one in raw if "typed" in one):
        section.add(
            f"{one['typed']} keys in {one['seconds']} s: the last text was answered "
            f"{one['last']:.0f} ms after its key; resident memory went from {one['early']:.0f} MB "
            f"after a quarter of the time by {one['grown']:+.0f} MB."
        )
        said = f"{one['last']:.0f} ms after the last key, {one['grown']:+.0f} MB"
        held = one["last"] <= 2 * CASES[0][3] and one["grown"] <= GROWTH
        target = "live page: a minute of twenty keys a second leaves no queue, memory flat"
        section.targets.append(Target(target, said, held))
    return section
