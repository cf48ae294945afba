"""A page of a report, opened in a browser."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

POINT = "#{} .role-mark.mark-symbol > path"
DRAWN = "document.documentElement.dataset.drawn === 'yes'"


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


def luminance(page: Page, selector: str, css: str) -> float:
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
