"""A Chromium for the tests of pages: one that is installed, or the one that Playwright brings."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

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


if __name__ == "__main__":
    # `make chromium` asks whether one has to be fetched.
    sys.exit(find() is None)
