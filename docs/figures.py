"""Draw the figures of the README: the default job of `make demo`, its page, one of its windows.

Run: make figures
"""

import sys
import tempfile
from pathlib import Path

import lipscope as ls
from lipscope.charts.look import save
from lipscope.charts.text import shaded_text
from lipscope.pages.report import report

FOLDER = Path(__file__).parent / "images"


def photograph(page: Path, image: Path) -> None:
    """The opening view of a report, at one and a half pixels a point."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from playwright.sync_api import sync_playwright

    from browser import ARGUMENTS, find

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=ARGUMENTS)
        size = {"width": 1240, "height": 760}
        opened = browser.new_page(viewport=size, device_scale_factor=1.5, color_scheme="light")
        opened.goto(page.resolve().as_uri())
        opened.wait_for_function("document.documentElement.dataset.drawn === 'yes'")
        opened.screenshot(path=image)
        browser.close()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as run:
        rows = ls.measure("minilm", lengths=[16, 32, 64, 128], samples=6, rest=True, out=run)
        photograph(report([run])[0], FOLDER / "page.png")
    save(rows.plot(), FOLDER / "growth.svg")
    # One window of prose, at the layer where the most sensitive token varies most.
    windows = ls.measure("minilm", lengths=[96], samples=8, layers=[5])
    row = next(row for row in windows if row.sample == 6)
    tokens = [token for token in windows.tokens if token.id == row.id]
    title = f"Layer {row.layer}, {row.num_tokens} tokens: sigma {row.sigma:.1f}"
    save(shaded_text(tokens, title=title, columns=46), FOLDER / "sensitivity.svg")
