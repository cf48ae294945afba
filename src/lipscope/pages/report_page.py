"""The report: run folders to one HTML page, and to figures for a paper.

It reads rows, bounds and tokens, never a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lipscope.errors import InputError

__all__ = ["report"]


def report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    png: str | Path | None = None,
    svg: str | Path | None = None,
    compare: bool = False,
) -> list[Path]:
    """Write one self-contained HTML page about run folders, and their figures as files.

    Args:
        folders: Run folders, whichever verb wrote them.
        out: The page; ``report.html`` in the first folder if None.
        png: Folder for the figures as PNG, two pixels a point.
        svg: Folder for the figures as SVG.
        compare: Whether the second of two folders is also compared with the first: ratios with
            intervals for the sampling of text, and what changed beyond them.

    Returns:
        Every file written, the page first.

    Raises:
        InputError: If a folder cannot be read, nothing can be drawn or written, or two folders
            share nothing to compare.
    """
    from lipscope.pages.content import Content
    from lipscope.pages.files import write_figures
    from lipscope.pages.html import page
    from lipscope.records import read_run, replaced

    folders = [folders] if isinstance(folders, str | Path) else folders
    if not isinstance(folders, Sequence) or not folders:
        raise InputError("`DIR` should name at least one run folder. Found none.")
    content = Content([read_run(folder) for folder in folders], compare=compare)
    path = Path(out) if out is not None else Path(folders[0]) / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replaced(path, page(content).encode())
        places = {"png": png, "svg": svg}
        asked = {kind: Path(at) for kind, at in places.items() if at is not None}
        written = [path, *(write_figures(content, asked) if asked else ())]
    except OSError as problem:
        raise InputError(
            "`-o`, `--png` and `--svg` should be places that can be written. Found "
            f"`{problem.filename}`: {problem.strerror}."
        ) from None
    return written
