"""Rows in memory as a page and as small tables, to be shown inside of a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.errors import InputError
from lipscope.pages.content import Content
from lipscope.pages.html import page
from lipscope.records import (
    Bound,
    Direction,
    Measurement,
    Run,
    TokenShare,
    Value,
    empty,
    provenance,
    replaced,
    typed_frame,
)

if TYPE_CHECKING:
    import polars

HEIGHT = 720
"""Of the page in a notebook, in pixels."""


@dataclass(frozen=True)
class Page:
    """A report that a notebook opens inline; elsewhere `save` writes it.

    Attributes:
        html: The page, which needs nothing besides.
        title: What it is about.
    """

    html: str
    title: str

    def _repr_html_(self) -> str:
        # Its own document: no style, script or name of the notebook reaches it, nor the reverse.
        # Without a base its links to its own sections would open the notebook inside of it.
        whole = self.html.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
        return (
            f'<iframe title="{html.escape(self.title)}" srcdoc="{html.escape(whole)}"'
            ' sandbox="allow-scripts allow-downloads allow-popups"'
            f' style="width:100%;height:{HEIGHT}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Page on {self.title}: a notebook opens it; `.save('page.html')` writes it>"

    def save(self, path: str | Path) -> Path:
        """Write the page.

        Args:
            path: File to write.

        Returns:
            The path.

        Raises:
            InputError: If it cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replaced(path, self.html.encode())
        except OSError as problem:
            raise InputError(
                f"`path` should be a file that can be written. Found `{path}`: {problem.strerror}."
            ) from None
        return path


@dataclass(frozen=True)
class _Held(Run):
    """Rows in memory, read as those of a run folder are."""

    records: tuple[Sequence[Any], ...] = ()

    def _read(self, index: int) -> polars.DataFrame:
        kinds = (Measurement, TokenShare, Bound, Direction, Value)
        held = self.records[index] if 0 <= index < len(self.records) else ()
        return typed_frame(kinds[index], (vars(one) for one in held))


def page_of(
    rows: Sequence[Measurement],
    tokens: Sequence[TokenShare],
    bounds: Sequence[Bound],
    directions: Sequence[Direction],
    windows: str,
) -> Page:
    """The report of rows that stand in no folder.

    Args:
        rows: Measurements.
        tokens: Their tokens.
        bounds: Their bounds.
        directions: Their leading directions.
        windows: How windows were chosen.

    Returns:
        The page.

    Raises:
        InputError: If no row has a finite, positive sigma.
    """
    manifest = empty({"windows": windows}, provenance())
    content = Content([_Held(Path("rows in memory"), manifest, (rows, tokens, bounds, directions))])
    return Page(page(content), content.title)
