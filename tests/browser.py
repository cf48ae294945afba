"""A Chromium for the tests of pages: one that is installed, or the one that Playwright brings."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# No sandbox inside containers, where root runs the tests; nothing of its own on the network.
ARGUMENTS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]


def find() -> str | None:
    """Path of a browser, or None."""
    named = os.environ.get("LIPSCOPE_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is not None:
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, started."""
    from playwright.sync_api import sync_playwright

    path = find()
    assert path is not None, "make chromium finds or fetches a browser"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


if __name__ == "__main__":
    # `make chromium` asks whether one has to be fetched.
    sys.exit(find() is None)
