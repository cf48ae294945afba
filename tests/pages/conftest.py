"""Pages of reports, each of which asks for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from opened_page import Opened


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
